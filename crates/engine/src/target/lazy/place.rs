//! Placing what comes.

#[cfg(test)]
use super::Flaw;
use super::{Lazy, MOST_DAMAGED, Place};
use crate::channel::IoBuf;
use crate::target::receiver::{FrameSource, ReceiveError};
use std::sync::atomic::Ordering;
use vmferry_memory::{PAGE_BYTES, PageDigest, PageRun, RegionId};
use vmferry_wire::{MAX_FRAME_PAGES, RunKind, Table, WireError};

/// A channel's place for pages that are not yet checked: nothing can be received into memory that is still missing.
#[derive(Debug, Default)]
pub(crate) struct Stager {
    /// Allocated at the first frame, as large as the largest.
    bytes: Vec<u8>,
}

impl Stager {
    /// Takes a frame's contents off `source` and places them. Says whether no page is lacking now, which one call does.
    pub(crate) fn take(
        &mut self,
        lazy: &Lazy,
        region: RegionId,
        table: &Table<'_>,
        source: &impl FrameSource,
    ) -> Result<bool, ReceiveError> {
        self.bytes.resize(MAX_FRAME_PAGES * PAGE_BYTES, 0);
        let position = lazy.regions.iter().position(|own| own.id == region);
        let position = position.ok_or(WireError::Field {
            what: "region",
            value: region.0.into(),
            allowed: "one of the layout",
        })?;
        let pages = table.digests().count();
        let contents = &mut self.bytes[..pages * PAGE_BYTES];
        source.fill(&mut [IoBuf::from_bytes_mut(contents)])?;
        let (mut contents, mut digests, mut last) = (&*contents, table.digests(), false);
        for entry in table.runs() {
            last |= match entry.kind {
                RunKind::Zero => lazy.take_zeros(position, entry.run),
                RunKind::Data => {
                    let (own, rest) =
                        contents.split_at(usize::try_from(entry.run.bytes()).unwrap_or(usize::MAX));
                    contents = rest;
                    lazy.take_pages(position, entry.run, own, &mut digests)?
                }
            };
        }
        Ok(last)
    }
}

impl Lazy {
    /// Pages of zeros: nothing is placed unless somebody waits, or may wait.
    pub(super) fn take_zeros(&self, region: usize, run: PageRun) -> bool {
        #[cfg(test)]
        if self.flaw == Flaw::WaitersFirst {
            self.waiters
                .take(region, run.range(), |waiter| self.zero_at_last(Place { region, page: waiter.page }));
            return self.arrived(region, run).1;
        }
        let (taken, last) = self.arrived(region, run);
        self.counters.zero_pages.fetch_add(taken, Ordering::Relaxed);
        self.counters.duplicates.fetch_add(run.count - taken, Ordering::Relaxed);
        self.waiters.take(region, run.range(), |waiter| {
            self.zero_at_last(Place { region, page: waiter.page });
            self.latencies.record(waiter.vcpu, self.now().saturating_sub(waiter.since));
        });
        if self.waiters.overflowed() {
            run.range().for_each(|page| self.zero_at_last(Place { region, page }));
        }
        last
    }

    /// Pages with content: those that match their digest are placed, run by run; the others are asked for again.
    fn take_pages(
        &self,
        region: usize,
        run: PageRun,
        contents: &[u8],
        digests: &mut impl Iterator<Item = PageDigest>,
    ) -> Result<bool, ReceiveError> {
        let mut last = false;
        let mut sound = run.first.0..run.first.0;
        for (page, content) in run.range().zip(contents.chunks_exact(PAGE_BYTES)) {
            let digest = digests.next();
            if digest == Some(PageDigest::of(content)) {
                sound.end = page + 1;
                continue;
            }
            last |= self.place_run(region, run, sound, contents)?;
            sound = page + 1..page + 1;
            self.damaged(Place { region, page })?;
        }
        last |= self.place_run(region, run, sound, contents)?;
        Ok(last)
    }

    pub(super) fn place_run(
        &self,
        region: usize,
        run: PageRun,
        pages: std::ops::Range<u64>,
        contents: &[u8],
    ) -> Result<bool, ReceiveError> {
        if pages.is_empty() {
            return Ok(false);
        }
        let byte =
            |page: u64| usize::try_from(page - run.first.0).unwrap_or(usize::MAX).saturating_mul(PAGE_BYTES);
        let bytes = &contents[byte(pages.start)..byte(pages.end)];
        let sound = PageRun::from(pages.clone());
        #[cfg(test)]
        let early = (self.flaw == Flaw::OffBeforePlaced).then(|| self.arrived(region, sound));
        let placed = self.memory.place(self.regions[region].id, sound, bytes)?;
        self.counters.pages.fetch_add(placed.pages, Ordering::Relaxed);
        self.counters.duplicates.fetch_add(placed.there, Ordering::Relaxed);
        let (_, last) = self.arrived(region, sound);
        #[cfg(test)]
        let last = early.map_or(last, |(_, last)| last);
        self.release(region, pages);
        Ok(last)
    }

    fn damaged(&self, place: Place) -> Result<(), ReceiveError> {
        self.counters.damaged.fetch_add(1, Ordering::Relaxed);
        if self.damaged_here.fetch_add(1, Ordering::Relaxed) >= MOST_DAMAGED {
            return Err(WireError::Damaged { what: "content of thousands of pages" }.into());
        }
        self.ask(place, 0, true);
        Ok(())
    }
}
