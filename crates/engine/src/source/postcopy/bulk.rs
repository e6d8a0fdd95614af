//! Work of a bulk thread in postcopy: sends the pages that no vCPU waits for, in order.

use super::super::sender::{FrameSink, Sender, SenderError};
use super::urgent::UrgentOut;
use super::{Chunk, Claims, Wanted};
use std::ops::Range;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageIndex, PageRun, RegionId};
use vmferry_wire::FrameKind;

impl<S: FrameSink> Sender<'_, S> {
    /// Sends the pages of `claims` that are left, chunk by chunk, and then a barrier.
    ///
    /// On a baseline path this function also serves, after each frame, the requests that were left
    /// to bulk threads.
    pub(crate) fn send_remaining(
        &mut self,
        pass: u32,
        claims: &Claims,
        urgent: &[UrgentOut<'_>],
    ) -> Result<(), SenderError> {
        self.end_deltas();
        if let Some(queue) = &claims.baseline {
            queue.bulk_begins();
        }
        while let Some(chunk) = claims.next_chunk() {
            self.send_remaining_of(pass, claims, &chunk, urgent)?;
        }
        self.end_serving(pass, claims, urgent)?;
        self.barrier(pass)
    }

    fn send_remaining_of(
        &mut self,
        pass: u32,
        claims: &Claims,
        chunk: &Chunk,
        urgent: &[UrgentOut<'_>],
    ) -> Result<(), SenderError> {
        let (id, map) = &claims.regions[chunk.region];
        if claims.look_up_untouched && map.any(chunk.pages.clone()) {
            if self.touched.len() != map.len() {
                self.touched = Bitmap::new(map.len());
            }
            // For other chunks the bitmap holds the result of an earlier lookup, which is not used
            // again.
            self.shared.memory.touched(*id, chunk.pages.clone().into(), &mut self.touched)?;
        }
        self.send_part_of(pass, claims, chunk, chunk.from..chunk.pages.end, urgent)?;
        self.send_part_of(pass, claims, chunk, chunk.pages.start..chunk.from, urgent)?;
        self.flush(FrameKind::Pages, *id, pass)?;
        self.serve_left(pass, claims, urgent)
    }

    fn send_part_of(
        &mut self,
        pass: u32,
        claims: &Claims,
        chunk: &Chunk,
        part: Range<u64>,
        urgent: &[UrgentOut<'_>],
    ) -> Result<(), SenderError> {
        let (id, map) = &claims.regions[chunk.region];
        let mut at = part.start;
        while at < part.end {
            // A frame contains pages of one 64-bit word only, so that its pages are claimed by one
            // operation, immediately before they are sent.
            let pages = claims.frame_pages(chunk.near);
            let (first, begin) = (at / 64 * 64, at % 64);
            let end = (begin + pages).min(64);
            let wanted = (u64::MAX >> (64 - (end - begin))) << begin;
            at = first + end;
            let mut bits = map.take_64(first, wanted);
            while bits != 0 {
                let begin = u64::from(bits.trailing_zeros());
                let len = u64::from((!(bits >> begin)).trailing_zeros());
                bits &= u64::MAX.checked_shl(u32::try_from(begin + len).unwrap_or(64)).unwrap_or(0);
                let run = first + begin..first + begin + len;
                self.push_claimed(pass, *id, run, claims.look_up_untouched)?;
            }
            // The frame is sent at once, because a page that is claimed and not sent may keep a
            // vCPU waiting.
            if self.frame_pages() > 0 {
                self.flush(FrameKind::Pages, *id, pass)?;
                self.serve_left(pass, claims, urgent)?;
            }
        }
        Ok(())
    }

    /// Adds claimed pages to the frame. If the pages were `looked_up`, those that were never
    /// touched are added as zeros and are not read.
    fn push_claimed(
        &mut self,
        pass: u32,
        region: RegionId,
        run: Range<u64>,
        looked_up: bool,
    ) -> Result<(), SenderError> {
        if !looked_up {
            return self.send_run(pass, region, run.into());
        }
        let touched = std::mem::replace(&mut self.touched, Bitmap::new(0));
        let mut at = run.start;
        let pushed = touched.runs_in(run.clone()).try_for_each(|some| {
            self.push_zeros(pass, region, at..some.start, FrameKind::Pages)?;
            at = some.end;
            self.send_run(pass, region, some.into())
        });
        self.touched = touched;
        pushed?;
        self.push_zeros(pass, region, at..run.end, FrameKind::Pages)
    }

    /// Sends a page that the guest waits for, as a frame of its own, unless another thread has
    /// claimed the page.
    pub(crate) fn send_wanted(
        &mut self,
        pass: u32,
        claims: &Claims,
        wanted: Wanted,
    ) -> Result<(), SenderError> {
        let (id, map) = &claims.regions[wanted.region];
        let page = PageRun::new(PageIndex(wanted.page), 1);
        if map.take(wanted.page) || wanted.again {
            self.send_run(pass, *id, page)?;
            self.flush(FrameKind::Pages, *id, pass)?;
        }
        Ok(())
    }

    /// Sends the pages requested ahead, in pieces. Stops when `must_yield` returns true, because
    /// the guest waits for another page.
    pub(super) fn send_ahead(
        &mut self,
        pass: u32,
        claims: &Claims,
        wanted: Wanted,
        must_yield: impl Fn() -> bool,
    ) -> Result<(), SenderError> {
        /// Pages between two checks for requests: 32 KiB, 130 us of a link of 2 Gb/s.
        const PIECE: usize = 8;
        let (id, map) = &claims.regions[wanted.region];
        let ahead = wanted.page + 1..wanted.page.saturating_add(1 + u64::from(wanted.ahead)).min(map.len());
        for first in ahead.clone().step_by(PIECE) {
            if must_yield() {
                return Ok(());
            }
            for page in first..(first + PIECE as u64).min(ahead.end) {
                if map.take(page) {
                    self.send_run(pass, *id, PageRun::new(PageIndex(page), 1))?;
                }
            }
            self.flush(FrameKind::Pages, *id, pass)?;
        }
        Ok(())
    }
}
