//! Sending thread of a bulk channel. It sends its share of the chunks as frames, directly from
//! guest memory.
//!
//! A newer version of a page must not arrive before an older one (hazards.md 11). Therefore memory
//! is divided into chunks, and each chunk belongs to one channel for the whole migration. Because
//! the stream of a channel keeps the order, no barrier between passes is needed for correctness,
//! and the threads share only counters.

use super::encode::{Encoded, PageEncoder};
use super::hashes::{HashSender, Unknown};
use super::pending::{Division, PageTurn, PassPages, SPAN_PAGES, Share};
use super::turns::{Turn, Turns};
use crate::breaks::Breaks;
use crate::channel::{IoBuf, Pacer, SendError, Stream};
use crate::handle::Counters;
use crate::known::PageHash;
use crate::vm::protect_run;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    GuestMemory, PAGE_BYTES, PageDigest, PageIndex, PageRun, PageSet, Protect, Region, RegionId, VmError,
    Window,
};
use vmferry_wire::{
    Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, MAX_FRAME_PAGES, RunKind, Segment, TableWriter,
};

/// Number of pages with content in a frame.
///
/// A frame of 1 MiB is read to compute its digests, and is then copied into the socket while a
/// second-level cache still holds most of it. With smaller frames, source and target would wait for
/// each other more often.
pub(crate) const FRAME_PAGES: usize = 256;
const _: () = assert!(FRAME_PAGES <= MAX_FRAME_PAGES);

/// Time in which the unsent bytes in the socket of a bulk channel must be able to leave, once the
/// rate of the link is known.
///
/// If the guest writes a page again while the page waits in the socket, the page is sent in vain.
/// Without a limit, the kernel would hold megabytes, which take a link of 1 Gb/s a tenth of a
/// second. In a measurement, a tenth more pages were dirty after a pass because of this. Bytes in
/// flight are not limited.
pub(crate) const UNSENT: Duration = Duration::from_millis(4);

/// Number of pages of a block that is announced to the target: 2 MiB, the size of a huge page.
const BLOCK_PAGES: u64 = 512;

/// Minimum size, in pages, of a chunk that is assigned to a channel. With this size, only one
/// thread of the target fills each huge page.
const MIN_CHUNK_PAGES: u64 = 512;

/// Largest number of pages in a chunk. A frame takes any run of zeros of one chunk.
const MAX_CHUNK_PAGES: u64 = 1 << 20;

/// Number of pages in a chunk if one sender takes all pages and protecting has no effect: 64 GiB,
/// so that it walks the bitmap almost without interruption.
const WHOLE_PAGES: u64 = 1 << 24;

/// Returns the division of memory among `channels`. With `senders_only`, no other thread takes
/// pages. Each page belongs to the same channel in all divisions of a migration.
pub(crate) fn division(protect: &dyn Protect, channels: u16, senders_only: bool) -> Division {
    let chunk_pages = match senders_only && channels == 1 && !protect.is_useful() {
        true => WHOLE_PAGES,
        false => protect.chunk_pages().clamp(MIN_CHUNK_PAGES, MAX_CHUNK_PAGES),
    };
    Division { chunk_pages, channels: channels.into() }
}

/// Kind of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassKind {
    First,
    Later,
    /// Pages that had a digest mismatch on the target.
    Again,
}

/// Reason why a channel stopped.
#[derive(Debug)]
pub(crate) enum SenderError {
    /// The migration stopped the channel.
    Stopped,
    /// The socket failed. The string names the peer.
    Link(SendError, String),
    /// The VMM's memory or tracker failed.
    Vm(VmError),
}

impl From<VmError> for SenderError {
    fn from(error: VmError) -> Self {
        Self::Vm(error)
    }
}

/// References that all channels of a migration share.
#[derive(Clone, Copy)]
pub(crate) struct SenderContext<'a> {
    pub(crate) memory: &'a dyn GuestMemory,
    pub(crate) protect: &'a dyn Protect,
    pub(crate) pacer: &'a Pacer,
    pub(crate) counters: &'a Counters,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) channels: u16,
    /// Limit for the channels that send at the same time. `None` if all of them may.
    pub(crate) turns: Option<&'a Turns>,
}

/// Destination of frames.
pub(crate) trait FrameSink {
    /// Sends all of `bufs`, which are one frame. The content of `bufs` is used up.
    fn send_frame(&mut self, bufs: &mut [IoBuf<'_>]) -> Result<(), SenderError>;
}

/// The kernel copies the pages into its own buffers. Lending the pages to the kernel instead
/// (`vmsplice` and `splice`, or `MSG_ZEROCOPY`) was measured and is slower. Computing the digest
/// has just brought the page into the cache of this processor, where the copy finds the page. A
/// lent page is read later, and by another processor.
impl FrameSink for Arc<Stream> {
    fn send_frame(&mut self, bufs: &mut [IoBuf<'_>]) -> Result<(), SenderError> {
        self.send(bufs).map_err(|error| SenderError::Link(error, self.peer.clone()))
    }
}

/// Frame that is being built: its table, and the guest memory that it carries.
///
/// The memory is looked up only once, when a run is added. Therefore the digest in the table and
/// the bytes in the socket come from the same mapping.
struct Frame<'a> {
    table: TableWriter,
    /// Pages with content, in the order of the table. Empty in a frame of digests, and in a frame
    /// whose pages an encoder has copied.
    spans: Vec<Span<'a>>,
}

/// Range of pages of a window.
#[derive(Clone, Copy)]
struct Span<'a> {
    window: Window<'a>,
    first: usize,
    count: usize,
}

impl<'a> Frame<'a> {
    fn new() -> Self {
        Self { table: TableWriter::default(), spans: Vec::with_capacity(FRAME_PAGES) }
    }

    /// Adds page `index`, which is page `page` of `window`. Returns false if the frame is full.
    #[must_use]
    fn push(
        &mut self,
        kind: FrameKind,
        index: PageIndex,
        digest: Option<PageDigest>,
        (window, page): (Window<'a>, usize),
    ) -> bool {
        if !self.table.push(index, digest) {
            return false;
        }
        if digest.is_none() || kind != FrameKind::Pages {
            return true;
        }
        match self.spans.last_mut() {
            Some(span) if span.window.as_ptr() == window.as_ptr() && span.first + span.count == page => {
                span.count += 1;
            }
            _ => self.spans.push(Span { window, first: page, count: 1 }),
        }
        true
    }

    fn clear(&mut self) {
        self.table.clear();
        self.spans.clear();
    }
}

/// Sending end of bulk channel `index`.
pub(crate) struct Sender<'a, S> {
    pub(super) shared: SenderContext<'a>,
    sink: S,
    index: u16,
    frame: Frame<'a>,
    /// Encoder of the content. `None` if the pages are sent as they are.
    encoder: Option<Box<PageEncoder>>,
    /// Hashes of pages, for a first pass. `None` if the target has no known pages.
    first_hashes: Option<HashSender<'a>>,
    /// Hashes of pages, while the sender sends the first pass.
    hashes: Option<HashSender<'a>>,
    scratch: Box<[u8; PAGE_BYTES]>,
    /// Pages of a region that were ever touched. One bitmap is reused from region to region.
    pub(super) touched: Bitmap,
    sequence: u64,
    /// True if the target takes announcements of touched pages.
    announces: bool,
    breaks: Breaks,
    /// True if the guest runs on this host, so that the sender takes breaks between frames.
    takes_breaks: bool,
}

impl<'a, S: FrameSink> Sender<'a, S> {
    pub(crate) fn new(shared: SenderContext<'a>, sink: S, index: u16) -> Self {
        let (frame, scratch) = (Frame::new(), Box::new([0; PAGE_BYTES]));
        let (encoder, first_hashes, hashes, touched) = (None, None, None, Bitmap::new(0));
        let announces = false;
        Self {
            shared,
            sink,
            index,
            frame,
            encoder,
            first_hashes,
            hashes,
            scratch,
            touched,
            sequence: 0,
            announces,
            breaks: Breaks::default(),
            takes_breaks: false,
        }
    }

    /// Returns the sender, which encodes pages with `encoder`, if there is one.
    pub(crate) fn encoding(self, encoder: Option<Box<PageEncoder>>) -> Self {
        Self { encoder, ..self }
    }

    /// Sets whether the first pass announces touched pages, for a target with
    /// [`FEATURE_TOUCHED`](vmferry_wire::FEATURE_TOUCHED).
    pub(crate) fn announcing(self, announces: bool) -> Self {
        Self { announces, ..self }
    }

    /// Returns the sender, which sends hashes of pages in the first pass, if `hashes` is given.
    pub(crate) fn hashing(self, hashes: Option<HashSender<'a>>) -> Self {
        Self { first_hashes: hashes, ..self }
    }

    /// Sets whether the sender takes breaks between frames.
    pub(super) fn take_breaks(&mut self, take: bool) {
        self.takes_breaks = take;
    }

    /// Sends no deltas any more, because the target is about to drop the missing pages.
    pub(super) fn end_deltas(&mut self) {
        if let Some(encoder) = &mut self.encoder {
            encoder.end_deltas();
        }
    }

    /// Sends this channel's share of `pages` as pass number `pass`, and then a barrier. Pages that
    /// another thread takes out before their turn are not sent.
    ///
    /// On the first pass, pages that were never touched are skipped: the target's memory already
    /// reads as zeros. If the pass does not examine spans for them, this thread asks after it has
    /// protected the pages.
    pub(crate) fn send_pass(
        &mut self,
        pass: u32,
        pages: &PassPages,
        kind: PassKind,
    ) -> Result<(), SenderError> {
        let first = kind == PassKind::First;
        if let Some(encoder) = &mut self.encoder {
            encoder.begin_pass(kind);
        }
        self.hashes = self.first_hashes.take().filter(|_| first);
        let turn = self.shared.turns.map(Turns::take);
        for when in [PageTurn::First, PageTurn::Last] {
            for (position, region) in self.shared.memory.layout().regions().iter().enumerate() {
                if pages.has(position, when) {
                    self.send_region((pass, first), (pages, when), (position, *region), turn.as_ref())?;
                }
            }
        }
        drop(turn);
        self.send_last_unknown(pass)?;
        self.barrier(pass)
    }

    /// Sends the pages that the target is known not to know, if they fill a frame. Must be called
    /// between two frames, because the pages of a frame are in order.
    fn send_unknown(&mut self, pass: u32) -> Result<(), SenderError> {
        let unknown = self.hashes.as_mut().map(HashSender::take_unknown).unwrap_or_default();
        self.send_contents(pass, &unknown)
    }

    /// Sends the pages that the target does not know, after it has answered all frames with hashes.
    /// The sender sends no more hashes.
    fn send_last_unknown(&mut self, pass: u32) -> Result<(), SenderError> {
        let Some(mut hashes) = self.hashes.take() else { return Ok(()) };
        while let Some(unknown) = hashes.take_last(|| self.shared.stop.load(Ordering::Relaxed)) {
            self.send_contents(pass, &unknown)?;
        }
        if self.shared.stop.load(Ordering::Relaxed) { Err(SenderError::Stopped) } else { Ok(()) }
    }

    /// Sends the contents of pages that the target does not know. They were protected when their
    /// hashes were sent.
    fn send_contents(&mut self, pass: u32, unknown: &[Unknown]) -> Result<(), SenderError> {
        assert!(self.frame.table.is_empty(), "no frame is being built");
        self.shared.counters.hashes.unknown(unknown.iter().map(Unknown::pages).sum());
        let hashes = self.hashes.take();
        for Unknown { region, runs } in unknown {
            runs.iter().try_for_each(|run| self.send_run(pass, *region, *run))?;
            self.flush(FrameKind::Pages, *region, pass)?;
        }
        self.hashes = hashes;
        Ok(())
    }

    fn send_region(
        &mut self,
        (pass, first): (u32, bool),
        (pages, when): (&PassPages, PageTurn),
        (position, region): (usize, Region),
        turn: Option<&Turn<'_>>,
    ) -> Result<(), SenderError> {
        let ask = first && !pages.examines();
        let (mut announced, mut announcing) = (0, Bitmap::new(0));
        let mut mine = Bitmap::new(0);
        if ask {
            self.touched = Bitmap::new(region.pages());
        }
        let mut from = 0;
        while let Some((chunk, map)) = pages.next_chunk(position, when, from, self.index, &mut mine)? {
            if let Some(turn) = turn.filter(|turn| turn.is_surplus()) {
                // A page must not change between its digest and its transfer, and the time that a
                // frame takes must not include the wait.
                self.flush(FrameKind::Pages, region.id, pass)?;
                turn.renew();
            }
            if self.shared.stop.load(Ordering::Relaxed) {
                return Err(SenderError::Stopped);
            }
            from = chunk.end;
            if first && when == PageTurn::First && self.announces {
                let spans = (chunk.start / SPAN_PAGES).max(announced)..chunk.end.div_ceil(SPAN_PAGES);
                announced = spans.end;
                self.announce(pass, region, spans, &mut announcing)?;
            }
            self.send_chunk(pass, region.id, map, chunk, ask)?;
            // A page with content must not wait between its digest and its transfer. Zeros may.
            if self.frame_pages() == 0 {
                self.take_break();
            }
            self.shared.counters.untouched.fetch_add(pages.take_untouched(), Ordering::Relaxed);
        }
        self.shared.counters.untouched.fetch_add(pages.take_untouched(), Ordering::Relaxed);
        self.touched = Bitmap::new(0);
        self.flush(FrameKind::Pages, region.id, pass)
    }

    /// Protects, reads and sends the pages of `chunk` that are set in `map`. With `ask`, pages that
    /// were never touched are not sent.
    ///
    /// No write is lost, because the order is: protect, *then* ask which pages were touched, *then*
    /// read. The content that is read contains every write before the protection, and the next
    /// harvest finds every write after the protection (hazards.md 1, 3, 9).
    fn send_chunk(
        &mut self,
        pass: u32,
        region: RegionId,
        map: &Bitmap,
        chunk: Range<u64>,
        ask: bool,
    ) -> Result<(), SenderError> {
        let run = PageRun::from(chunk.clone());
        protect_run(self.shared.protect, region, run, map)?;
        if !ask {
            // `for_each` walks faster than `try_for_each`.
            let mut sent = Ok(());
            map.runs_in(chunk).for_each(|run| {
                if sent.is_ok() {
                    sent = self.send_run(pass, region, run.into());
                }
            });
            return sent;
        }
        let mut touched = std::mem::replace(&mut self.touched, Bitmap::new(0));
        self.shared.memory.touched(region, run, &mut touched)?;
        touched.retain_range(chunk.clone(), map);
        let sent = touched.runs_in(chunk.clone()).try_for_each(|run| self.send_run(pass, region, run.into()));
        let skipped = map.count_range(chunk.clone()) - touched.count_range(chunk);
        self.shared.counters.untouched.fetch_add(skipped, Ordering::Relaxed);
        self.touched = touched;
        sent
    }

    /// Announces the touched pages of this channel's share of `spans`, so that the target can
    /// allocate memory for them before they arrive.
    ///
    /// A block of the size of a huge page is announced if every page of the block was touched.
    /// Otherwise the target would allocate pages that the guest has never touched. A page that is
    /// announced need not be sent, because it may be zero or free.
    ///
    /// The answer of memory is only a hint, so pages need not be protected first. `touched` is
    /// memory for the answers about the region, in which no page of `spans` is set.
    fn announce(
        &mut self,
        pass: u32,
        region: Region,
        spans: Range<u64>,
        touched: &mut Bitmap,
    ) -> Result<(), SenderError> {
        let (channels, index) = (u64::from(self.shared.channels), u64::from(self.index));
        for span in spans.filter(|span| span % channels == index) {
            self.flush(FrameKind::Pages, region.id, pass)?;
            if touched.len() != region.pages() {
                *touched = Bitmap::new(region.pages());
            }
            let pages = span * SPAN_PAGES..((span + 1) * SPAN_PAGES).min(region.pages());
            self.shared.memory.touched(region.id, pages.clone().into(), touched)?;
            for run in touched.runs_in(pages) {
                let blocks = run.start.next_multiple_of(BLOCK_PAGES)..run.end / BLOCK_PAGES * BLOCK_PAGES;
                self.push_zeros(pass, region.id, blocks, FrameKind::Touched)?;
            }
            self.flush(FrameKind::Touched, region.id, pass)?;
        }
        Ok(())
    }

    pub(super) fn send_run(&mut self, pass: u32, region: RegionId, run: PageRun) -> Result<(), SenderError> {
        self.add_run(pass, region, run, FrameKind::Pages)
    }

    /// Adds the pages of `run` to the frame, or their digests, and sends each frame that is full.
    fn add_run(
        &mut self,
        pass: u32,
        region: RegionId,
        run: PageRun,
        kind: FrameKind,
    ) -> Result<(), SenderError> {
        let window = self.shared.memory.window(region, run)?;
        for (page, index) in run.range().enumerate() {
            if !self.push(kind, region, PageIndex(index), (window, page)) {
                self.flush(kind, region, pass)?;
                self.send_unknown(pass)?;
                self.take_break();
                let fits = self.push(kind, region, PageIndex(index), (window, page));
                assert!(fits, "an empty frame takes any page");
            }
        }
        Ok(())
    }

    /// Takes a break between two frames, if it is due.
    fn take_break(&mut self) {
        if self.takes_breaks
            && self.breaks.take()
            && let Some(encoder) = &mut self.encoder
        {
            encoder.rested();
        }
    }

    /// Adds page `index`, which is page `page` of `window`, to the frame. Returns false if the
    /// frame is full.
    #[must_use]
    fn push(
        &mut self,
        kind: FrameKind,
        region: RegionId,
        index: PageIndex,
        (window, page): (Window<'a>, usize),
    ) -> bool {
        if self.frame.table.pages() == FRAME_PAGES {
            return false;
        }
        if kind == FrameKind::Pages && self.frame_has_hashes() {
            return self.push_hash(region, index, &window, page);
        }
        if let Some(encoder) = self.encoder.as_mut().filter(|_| kind == FrameKind::Pages) {
            if !encoder.has_begun() {
                window.copy_page(page, &mut self.scratch);
                encoder.begin_frame(&self.scratch);
            }
            if encoder.copies() {
                let digest = encoder.copy(&window, page);
                let fits = self.frame.table.push(index, digest);
                match digest {
                    Some(_) if fits => encoder.add(region, index),
                    Some(_) => {}
                    None => encoder.forget(region, index),
                }
                return fits;
            }
            // The target gets another content than the version that was kept, if there is one.
            encoder.forget(region, index);
        }
        let digest = window.digest(page, &mut self.scratch);
        self.frame.push(kind, index, digest, (window, page))
    }

    /// Returns true if the frame that is being built contains hashes. This is decided at its first
    /// page.
    fn frame_has_hashes(&mut self) -> bool {
        let Some(hashes) = &mut self.hashes else { return false };
        if self.frame.table.is_empty() {
            hashes.begin_frame();
        }
        hashes.hashes()
    }

    /// Adds the hash of a copy of page `index` to the frame. Returns false if the frame is full.
    fn push_hash(&mut self, region: RegionId, index: PageIndex, window: &Window<'_>, page: usize) -> bool {
        let digest = (!window.copy_page(page, &mut self.scratch)).then(|| PageDigest::of(&*self.scratch));
        let fits = self.frame.table.push(index, digest);
        if let Some(hashes) = self.hashes.as_mut().filter(|_| fits && digest.is_some()) {
            hashes.add(PageHash::of(&self.scratch));
        }
        // The target may not have the version that was kept, if there is one.
        if let Some(encoder) = self.encoder.as_mut().filter(|_| fits) {
            encoder.forget(region, index);
        }
        fits
    }

    /// Returns the number of pages in the table of the frame that is being built.
    pub(super) fn frame_pages(&self) -> usize {
        self.frame.table.pages()
    }

    /// Sends digests of this channel's share of all pages except those in `except` as pass `pass`,
    /// and its barrier. The guest must be stopped.
    pub(crate) fn send_digests(&mut self, pass: u32, except: &PageSet) -> Result<(), SenderError> {
        for (position, region) in self.shared.memory.layout().regions().iter().enumerate() {
            let mut touched = Bitmap::new(region.pages());
            for chunk in self.share().chunks(position, region.pages()) {
                self.shared.memory.touched(region.id, chunk.clone().into(), &mut touched)?;
                let left_out = except.region(region.id);
                let mut at = chunk.start;
                for run in left_out.into_iter().flat_map(|map| map.runs_in(chunk.clone())) {
                    self.digest_part(pass, region.id, at..run.start, &touched)?;
                    at = run.end;
                }
                self.digest_part(pass, region.id, at..chunk.end, &touched)?;
            }
            self.flush(FrameKind::Digests, region.id, pass)?;
        }
        self.barrier(pass)
    }

    /// Adds the digests of the pages of `part`. Pages that were never touched count as zeros and
    /// are not read.
    fn digest_part(
        &mut self,
        pass: u32,
        region: RegionId,
        part: Range<u64>,
        touched: &Bitmap,
    ) -> Result<(), SenderError> {
        let mut at = part.start;
        for run in touched.runs_in(part.clone()) {
            self.push_zeros(pass, region, at..run.start, FrameKind::Digests)?;
            at = run.end;
            self.add_run(pass, region, run.into(), FrameKind::Digests)?;
        }
        self.push_zeros(pass, region, at..part.end, FrameKind::Digests)
    }

    pub(super) fn push_zeros(
        &mut self,
        pass: u32,
        region: RegionId,
        run: Range<u64>,
        kind: FrameKind,
    ) -> Result<(), SenderError> {
        if run.is_empty() || self.frame.table.push_zeros(run.clone().into()) {
            return Ok(());
        }
        self.flush(kind, region, pass)?;
        let fits = self.frame.table.push_zeros(run.into());
        assert!(fits, "an empty frame takes any run of zeros");
        Ok(())
    }

    /// Returns this channel's share of the chunks.
    fn share(&self) -> Share {
        division(self.shared.protect, self.shared.channels, false).share(self.index)
    }

    pub(super) fn barrier(&mut self, pass: u32) -> Result<(), SenderError> {
        let header = FrameHeader::barrier(pass, self.sequence).encode();
        self.sequence += 1;
        self.shared.counters.wire_bytes.fetch_add(FRAME_HEADER_BYTES as u64, Ordering::Relaxed);
        self.sink.send_frame(&mut [IoBuf::from_bytes(&header)])
    }

    pub(super) fn flush(&mut self, kind: FrameKind, region: RegionId, pass: u32) -> Result<(), SenderError> {
        if self.frame.table.is_empty() {
            return Ok(());
        }
        if self.shared.stop.load(Ordering::Relaxed) {
            return Err(SenderError::Stopped);
        }
        let zero_runs = self.frame.table.runs().filter(|entry| entry.kind == RunKind::Zero);
        let zero_pages = zero_runs.map(|entry| entry.run.count).sum();
        let hashes = self.hashes.as_ref().filter(|_| kind == FrameKind::Pages);
        let hashes = hashes.map(HashSender::frame).unwrap_or_default();
        if !hashes.is_empty() {
            return self.flush_hashes(region, pass, zero_pages);
        }
        let encoder = self.encoder.as_deref_mut().filter(|_| kind == FrameKind::Pages);
        let encoded = encoder.filter(|encoder| encoder.copies()).map(PageEncoder::encode);
        let (header, table) = match &encoded {
            Some(Encoded { segments, owners, .. }) if !segments.is_empty() => {
                self.frame.table.finish_segments((segments, owners), region, pass, self.sequence)
            }
            _ => self.frame.table.finish(kind, region, pass, self.sequence),
        };
        let encoded_header = header.encode();
        let mut bufs = FrameBufs::new(&encoded_header, table);
        let before = bufs.bytes;
        match &encoded {
            Some(encoded) => encoded.parts().for_each(|part| bufs.push(IoBuf::from_bytes(part), part.len())),
            None => self.frame.spans.iter().for_each(|span| {
                let window = span.window.slice(span.first, span.count);
                bufs.push(IoBuf::from_window(window), window.len());
            }),
        }
        assert!(
            encoded.is_some() || kind != FrameKind::Pages || bufs.bytes == before + header.pages * PAGE_BYTES,
            "a frame carries what its table names"
        );
        let bytes = bufs.bytes;
        self.shared.pacer.wait(bytes, || self.shared.stop.load(Ordering::Relaxed));
        self.sink.send_frame(bufs.used())?;
        self.sequence += 1;
        // The runs of an announcement are no pages that are sent.
        let pages = match kind {
            FrameKind::Pages => Some((header.pages as u64, zero_pages)),
            FrameKind::Touched => Some((0, 0)),
            _ => None,
        };
        if let Some((raw_pages, zero_pages)) = pages {
            self.shared.counters.count_frame(bytes, raw_pages, zero_pages);
            self.shared.counters.count_channel(self.index, bytes);
        }
        if let Some(encoder) = self.encoder.as_mut().filter(|_| kind == FrameKind::Pages) {
            encoder.sent(bytes, &self.shared.counters.encodings);
        }
        if let Some(hashes) = self.hashes.as_mut().filter(|_| kind == FrameKind::Pages) {
            hashes.sent_contents(header.pages as u64);
        }
        self.frame.clear();
        Ok(())
    }

    /// Sends the frame, which contains hashes, and in addition runs of zeros.
    fn flush_hashes(&mut self, region: RegionId, pass: u32, zero_pages: u64) -> Result<(), SenderError> {
        /// Each page belongs to the only segment.
        const OWNERS: [u8; FRAME_PAGES] = [0; FRAME_PAGES];
        let data = self.frame.table.runs().filter(|entry| entry.kind == RunKind::Data);
        let runs = data.map(|entry| entry.run).collect();
        // The target may answer as soon as the frame is sent.
        let asked = self.hashes.as_mut().and_then(|hashes| hashes.ask(self.sequence, region, runs));
        assert!(asked.is_some(), "the frame contains hashes");
        let Some(frame) = asked else { return Ok(()) };
        let pages = self.frame.table.pages();
        let segment = Segment { encoding: Encoding::Hash, pages, bytes: frame.hashes.len() };
        let content = (&[segment][..], &OWNERS[..pages]);
        let (header, table) = self.frame.table.finish_segments(content, region, pass, self.sequence);
        let header = header.encode();
        let mut bufs = [&header[..], table, &frame.hashes].map(IoBuf::from_bytes);
        let bytes = header.len() + table.len() + frame.hashes.len();
        self.shared.pacer.wait(bytes, || self.shared.stop.load(Ordering::Relaxed));
        self.sink.send_frame(&mut bufs)?;
        self.sequence += 1;
        let counters = self.shared.counters;
        counters.count_frame(bytes, 0, zero_pages);
        counters.count_channel(self.index, bytes);
        counters.hashes.sent(pages, bytes, frame.cpu);
        self.frame.clear();
        Ok(())
    }
}

/// Maximum number of buffers of a frame: header, table, encoded content, and each page alone.
const MOST_BUFS: usize = 3 + FRAME_PAGES;

/// Buffers of a frame.
struct FrameBufs<'a> {
    bufs: [IoBuf<'a>; MOST_BUFS],
    used: usize,
    bytes: usize,
}

impl<'a> FrameBufs<'a> {
    fn new(header: &'a [u8], table: &'a [u8]) -> Self {
        let mut bufs = Self { bufs: [IoBuf::from_bytes(&[]); MOST_BUFS], used: 0, bytes: 0 };
        bufs.push(IoBuf::from_bytes(header), header.len());
        bufs.push(IoBuf::from_bytes(table), table.len());
        bufs
    }

    fn push(&mut self, buf: IoBuf<'a>, bytes: usize) {
        self.bufs[self.used] = buf;
        self.used += 1;
        self.bytes += bytes;
    }

    fn used(&mut self) -> &mut [IoBuf<'a>] {
        &mut self.bufs[..self.used]
    }
}
