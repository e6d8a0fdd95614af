//! Encoding of the pages of a bulk channel: LZ4, Zstandard, and deltas.
//!
//! An encoded page is encoded from a copy, and its digest is that of the copy. Therefore an encoded
//! page always matches its digest, even if the guest writes to the page meanwhile.
//!
//! # Deltas
//! A delta describes a page by its difference from the version that the target has. The source
//! keeps a bounded number of versions that it has sent. A kept version is the content of the page
//! on the target, because
//!
//! 1. each page belongs to the same channel in all passes, and a channel delivers its frames in
//!    order;
//! 2. a version is kept only if the page was sent from a copy, in a frame that may have deltas. A
//!    page that is sent in another way is forgotten;
//! 3. all versions are forgotten when the target reports pages with a digest mismatch, and a new
//!    link has new encoders;
//! 4. the source sends no deltas after the handover, when the target has dropped the missing pages.

use super::sender::PassKind;
use super::settings::{Deltas, PageCodec};
use crate::clock::Clock;
use crate::handle::{Encodings, thread_cpu};
use crate::idle::{IdleCores, LinkWait, OpenedLater, Started};
use std::sync::Arc;
use std::time::Duration;
use vmferry_codec::{
    BATCH_BYTES, BATCH_PAGES, Choice, Chooser, Class, Codec, DeltaEncoder, Encoder, Facts, Page, SentFigures,
    SentPages,
};
use vmferry_core::{Layout, PAGE_BYTES, PageDigest, PageIndex, RegionId, Window};
use vmferry_wire::{Encoding, MAX_FRAME_PAGES, Segment};

/// Longest delta in bytes. A page with a longer one loses its place among the kept versions.
pub(crate) const LONGEST_DELTA: usize = PAGE_BYTES / 2;

/// Codecs of the pages of a migration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Codecs {
    pub(crate) codec: PageCodec,
    pub(crate) deltas: Deltas,
    /// Memory for the versions of one channel, in bytes.
    pub(crate) cache_bytes: usize,
}

impl Codecs {
    /// Returns the memory for the versions of `channels` channels, in bytes. `None` without deltas.
    pub(crate) fn cache_limit(&self, channels: u16) -> Option<u64> {
        (self.deltas != Deltas::Off).then(|| (self.cache_bytes as u64).saturating_mul(channels.into()))
    }

    /// Returns true if the choice by measurement can be frames that are sent from guest memory.
    /// Otherwise, encoded frames are not compared with them.
    fn may_be_raw(&self) -> bool {
        matches!(self.codec, PageCodec::Auto | PageCodec::Raw) && self.deltas != Deltas::On
    }
}

/// Batch of pages of a frame that were encoded together, or that were sent without encoding.
struct Batch {
    class: Class,
    /// Codec that was tried.
    codec: Option<Codec>,
    bytes_in: usize,
    bytes_out: usize,
    encode: Duration,
    encode_cpu: Duration,
}

impl Batch {
    /// Returns a batch of `bytes` bytes that were sent without a try to encode them.
    fn unencoded(class: Class, bytes: usize) -> Self {
        let (encode, encode_cpu) = (Duration::ZERO, Duration::ZERO);
        Self { class, codec: None, bytes_in: bytes, bytes_out: bytes, encode, encode_cpu }
    }
}

/// Versions of the pages of a channel that the target has.
pub(crate) struct Versions {
    /// `None` if no versions are kept, for example after the handover.
    sent: Option<SentPages>,
    /// Memory of the cache in bytes, as it was counted last.
    counted: usize,
}

impl Versions {
    /// Returns a cache of versions that takes at most `bytes` bytes of memory.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { sent: Some(SentPages::new(bytes, DeltaEncoder::default())), counted: 0 }
    }

    /// Returns versions that are never kept.
    fn none() -> Self {
        Self { sent: None, counted: 0 }
    }

    /// Begins a pass.
    pub(crate) fn begin_pass(&mut self, kind: PassKind) {
        let Some(sent) = &mut self.sent else { return };
        match kind {
            PassKind::First => {}
            PassKind::Later => sent.next_pass(),
            PassKind::Again => sent.forget_all(),
        }
    }

    /// Drops all versions, and keeps none from now on.
    pub(crate) fn end(&mut self) {
        self.sent = None;
    }

    /// Returns true if the versions of pages are kept. In the first pass no page has a version, so
    /// a full cache needs no copies.
    fn are_kept(&self) -> bool {
        self.sent.as_ref().is_some_and(SentPages::admits)
    }

    /// Drops the version of page `key`, which is sent in another way.
    pub(crate) fn forget(&mut self, key: u64) {
        if let Some(sent) = &mut self.sent {
            sent.forget(key);
        }
    }

    /// Keeps the version `page` of page `key`, and returns the delta from the version before, if
    /// there is one of at most `limit` bytes. Without a delta, the page must be sent in full.
    pub(crate) fn send(&mut self, key: u64, page: &Page, limit: usize) -> Option<&[u8]> {
        self.sent.as_mut()?.send(key, page, limit)
    }

    fn figures(&self) -> SentFigures {
        self.sent.as_ref().map(SentPages::figures).unwrap_or_default()
    }

    /// Counts what the cache has done since the last call.
    fn count(&mut self, counters: &Encodings) {
        let Some(sent) = &mut self.sent else { return };
        let memory = sent.memory();
        assert!(memory >= self.counted, "a cache keeps its memory");
        counters.count_cache(sent.take_figures(), memory - self.counted);
        self.counted = memory;
    }
}

/// Time to copy a byte of a page, and to keep it as a version, in seconds. It is not measured.
const COPY: f64 = 0.25e-9;

/// Cost and use of the deltas of a channel, by measurement.
#[derive(Debug, Clone, Copy)]
struct DeltaCost {
    /// Size of a page that has a version, after the encoding, divided by its size before.
    ratio: f64,
    /// Processor time for each byte of all pages, in seconds.
    cpu: f64,
}

impl DeltaCost {
    /// Cost that is plausible before anything is measured.
    const EXPECTED: Self = Self { ratio: 0.5, cpu: 0.25e-9 };
    /// Weight of a frame.
    const WEIGHT: f64 = 0.1;

    /// Adds a frame of `pages` pages, whose deltas took `cpu`. `figures` are those of the cache
    /// before and after the frame.
    fn add(&mut self, pages: usize, cpu: Duration, (before, after): (&SentFigures, &SentFigures)) {
        let bytes = (pages * PAGE_BYTES) as f64;
        self.cpu += Self::WEIGHT * (cpu.as_secs_f64() / bytes.max(1.0) - self.cpu);
        let versions = (after.hits + after.large) - (before.hits + before.large);
        if versions > 0 {
            let saved = (after.saved_bytes - before.saved_bytes) as f64;
            let ratio = 1.0 - saved / (versions * PAGE_BYTES as u64) as f64;
            self.ratio += Self::WEIGHT * (ratio - self.ratio);
        }
    }

    /// Begins a pass. Its pages may have changed less than those of the pass before.
    fn begin_pass(&mut self) {
        self.ratio = self.ratio.min(self.ratio.midpoint(Self::EXPECTED.ratio));
    }
}

/// Encoder of a bulk channel.
pub(crate) struct PageEncoder {
    /// Regions of the guest's memory, in the order of its layout.
    regions: Vec<RegionId>,
    codecs: Codecs,
    clock: Clock,
    idle: Arc<IdleCores>,
    wait: LinkWait,
    delta_cost: DeltaCost,
    encoder: Encoder,
    chooser: Chooser,
    versions: Versions,
    frame: Staging,
}

/// Decisions about a frame, made at its first page.
#[derive(Clone, Copy)]
struct FramePlan {
    began: Duration,
    started: Started,
    /// Class of the first page.
    class: Class,
    /// Choice for the first batch of `class`, until that batch is encoded.
    choice: Option<Choice>,
    /// True if the pages are copied.
    copies: bool,
    /// True if pages are sent as deltas, and their versions are kept.
    deltas: bool,
}

/// Frame that is being built.
struct Staging {
    /// `None` before the first page.
    plan: Option<FramePlan>,
    /// Number, class and copy of each page with content.
    keys: Vec<u64>,
    classes: Vec<Class>,
    /// Places for the copies of all pages that a frame can have.
    pages: Box<[Page]>,
    /// Encoded content, without the pages that are sent as they are.
    content: Vec<u8>,
    segments: Vec<Segment>,
    /// Segment of each page.
    owners: Vec<u8>,
    /// Positions of the pages of a batch, and copies of pages that are not next to each other.
    positions: Vec<usize>,
    gathered: Vec<Page>,
    batches: Vec<Batch>,
    /// CPU time for the deltas of the frame.
    delta_cpu: Duration,
}

/// Owner of a page that no segment has yet.
const UNOWNED: u8 = u8::MAX;

/// Encoded content of a frame.
pub(crate) struct Encoded<'a> {
    /// Segments of the frame. Empty if all pages are sent as they are.
    pub(crate) segments: &'a [Segment],
    /// Segment of each page.
    pub(crate) owners: &'a [u8],
    content: &'a [u8],
    pages: &'a [Page],
    /// Number of the segment of pages that are sent as they are.
    raw: u8,
}

impl<'a> Encoded<'a> {
    /// Returns the parts of the content, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &'a [u8]> {
        let (pages, owners, raw) = (self.pages, self.owners, self.raw);
        let mut at = 0;
        let runs = std::iter::from_fn(move || {
            let first = at + owners.get(at..)?.iter().position(|owner| *owner == raw)?;
            let count = owners[first..].iter().take_while(|owner| **owner == raw).count();
            at = first + count;
            Some(pages[first..at].as_flattened())
        });
        std::iter::once(self.content).filter(|content| !content.is_empty()).chain(runs)
    }
}

impl PageEncoder {
    /// Returns the encoder of a channel for a guest with the memory `layout`, or `None` if pages
    /// are sent as they are.
    pub(crate) fn new(
        codecs: Codecs,
        layout: &Layout,
        clock: Clock,
        (idle, run_delay): (&Arc<IdleCores>, &Arc<OpenedLater>),
    ) -> Option<Box<Self>> {
        if codecs.codec == PageCodec::Raw && codecs.deltas == Deltas::Off {
            return None;
        }
        let versions = match codecs.deltas {
            Deltas::Off => Versions::none(),
            _ => Versions::new(codecs.cache_bytes),
        };
        Some(Box::new(Self {
            regions: layout.regions().iter().map(|region| region.id).collect(),
            codecs,
            clock,
            idle: Arc::clone(idle),
            wait: LinkWait::new(Arc::clone(run_delay)),
            delta_cost: DeltaCost::EXPECTED,
            encoder: Encoder::new(),
            chooser: Chooser::new(clock.now()),
            versions,
            frame: Staging::new(),
        }))
    }

    /// Notes that the thread has taken a break, which is no wait for the link.
    pub(super) fn rested(&mut self) {
        self.wait.reset();
    }

    /// Begins a pass.
    pub(crate) fn begin_pass(&mut self, kind: PassKind) {
        self.wait.reset();
        self.delta_cost.begin_pass();
        self.versions.begin_pass(kind);
    }

    /// Sends no deltas any more.
    pub(crate) fn end_deltas(&mut self) {
        self.versions.end();
    }

    /// Begins a frame whose first page is `first`, and decides whether the pages of the frame are
    /// copied. Without copies, the frame is sent from guest memory.
    pub(crate) fn begin_frame(&mut self, first: &Page) {
        assert!(self.frame.plan.is_none(), "the frame before was sent");
        let (began, started, class) = (self.clock.now(), LinkWait::start(), Class::of(first));
        let (choice, deltas) = (self.choose(class, BATCH_BYTES), self.uses_deltas());
        let copies = choice != Choice::Raw || deltas;
        self.frame.plan = Some(FramePlan { began, started, class, choice: Some(choice), copies, deltas });
    }

    /// Returns true if the frame has a page.
    pub(crate) fn has_begun(&self) -> bool {
        self.frame.plan.is_some()
    }

    /// Returns true if the pages of the frame are copied.
    pub(crate) fn copies(&self) -> bool {
        self.frame.plan.is_some_and(|plan| plan.copies)
    }

    fn uses_deltas(&self) -> bool {
        if !self.versions.are_kept() {
            return false;
        }
        let DeltaCost { ratio, cpu } = self.delta_cost;
        match self.codecs.deltas {
            Deltas::On => true,
            Deltas::Auto => self.chooser.is_faster(ratio, cpu + COPY, self.clock.now()),
            Deltas::Off => false,
        }
    }

    fn choose(&mut self, class: Class, bytes: usize) -> Choice {
        match self.codecs.codec {
            PageCodec::Raw => Choice::Raw,
            PageCodec::Lz4 => Choice::Use(Codec::Lz4),
            PageCodec::Zstd(level) => Choice::Use(Codec::Zstd(level)),
            PageCodec::Auto => self.chooser.next(class, bytes, self.clock.now()),
        }
    }

    /// Copies page `page` of `window` to the place of the frame's next page. Returns the digest of
    /// the copy, or `None` if the page contains only zeros. [`add`](Self::add) adds the page.
    pub(crate) fn copy(&mut self, window: &Window<'_>, page: usize) -> Option<PageDigest> {
        let copy = &mut self.frame.pages[self.frame.keys.len()];
        (!window.copy_page(page, copy)).then(|| PageDigest::of(copy))
    }

    /// Adds the page that was copied last to the frame.
    pub(crate) fn add(&mut self, region: RegionId, index: PageIndex) {
        assert!(self.copies(), "the frame is sent from guest memory");
        let (key, copy) = (self.key(region, index), &self.frame.pages[self.frame.keys.len()]);
        self.frame.classes.push(Class::of(copy));
        self.frame.keys.push(key);
    }

    /// Notes that a page is sent as zeros or from guest memory.
    pub(crate) fn forget(&mut self, region: RegionId, index: PageIndex) {
        let key = self.key(region, index);
        self.versions.forget(key);
    }

    /// Returns a number that no other page of the guest has.
    fn key(&self, region: RegionId, index: PageIndex) -> u64 {
        let position = self.regions.iter().position(|known| *known == region);
        // A layout has at most 64 regions, and a page number has at most 52 bits.
        position.map_or(u64::MAX, |position| (position as u64) << 52 | index.0)
    }

    /// Encodes the pages of the frame.
    pub(crate) fn encode(&mut self) -> Encoded<'_> {
        self.frame.owners.resize(self.frame.keys.len(), UNOWNED);
        if self.frame.plan.is_some_and(|plan| plan.deltas) {
            self.encode_deltas();
        } else {
            // The target gets other content than the versions that were kept.
            self.frame.keys.iter().for_each(|key| self.versions.forget(*key));
        }
        for class in [Class::Mixed, Class::Sparse] {
            self.encode_class(class);
        }
        self.frame.finish()
    }

    fn encode_deltas(&mut self) {
        let Self { versions, frame, delta_cost, .. } = self;
        let (begin, segment, cpu) = (frame.content.len(), frame.next_segment(), thread_cpu());
        let before = versions.figures();
        let mut pages = 0;
        for ((key, page), owner) in frame.keys.iter().zip(&frame.pages).zip(&mut frame.owners) {
            if let Some(delta) = versions.send(*key, page, LONGEST_DELTA) {
                frame.content.extend(delta);
                *owner = segment;
                pages += 1;
            }
        }
        frame.end_segment(Encoding::Delta, pages, begin);
        frame.delta_cpu = thread_cpu().saturating_sub(cpu);
        delta_cost.add(frame.keys.len(), frame.delta_cpu, (&before, &versions.figures()));
    }

    /// Encodes the pages of a class that have no segment yet, in batches. Pages that do not become
    /// smaller get no segment.
    fn encode_class(&mut self, class: Class) {
        let mut at = 0;
        while let Some(end) = self.frame.gather(class, at) {
            at = end;
            let bytes = self.frame.positions.len() * PAGE_BYTES;
            let plan = self.frame.plan.as_mut().filter(|plan| plan.class == class);
            let planned = plan.and_then(|plan| plan.choice.take());
            let choice = planned.unwrap_or_else(|| self.choose(class, bytes));
            let Some(codec) = choice.codec() else { return };
            let (began, cpu) = (self.clock.now(), thread_cpu());
            let encoded = self.encoder.encode(codec, self.frame.batch(), bytes - 1);
            let bytes_out = encoded.map_or(bytes, <[u8]>::len);
            if let Some(encoded) = encoded {
                let (begin, segment) = (self.frame.content.len(), self.frame.next_segment());
                self.frame.content.extend(encoded);
                self.frame.positions.iter().for_each(|at| self.frame.owners[*at] = segment);
                let encoding = match codec {
                    Codec::Lz4 => Encoding::Lz4,
                    Codec::Zstd(_) => Encoding::Zstd,
                };
                self.frame.end_segment(encoding, self.frame.positions.len(), begin);
            }
            let (encode, encode_cpu) = (self.clock.since(began), thread_cpu().saturating_sub(cpu));
            let codec = Some(codec);
            self.frame.batches.push(Batch { class, codec, bytes_in: bytes, bytes_out, encode, encode_cpu });
        }
    }

    /// Records that the frame, of `bytes` bytes, was sent.
    pub(crate) fn sent(&mut self, bytes: usize, counters: &Encodings) {
        let Some(plan) = self.frame.plan else { return };
        let waited = self.wait.since(plan.started);
        let now = self.clock.now();
        counters.count(&self.frame.segments);
        counters.delta.add_cpu(self.frame.delta_cpu);
        self.versions.count(counters);
        let elapsed = now.saturating_sub(plan.began);
        if self.codecs.may_be_raw() {
            let memory = if plan.copies { self.frame.keys.len() * PAGE_BYTES } else { bytes };
            self.chooser.frame_sent(plan.copies, memory as u64, elapsed, waited, now);
        }
        let idle_cores = self.idle.now(now);
        let batches = &mut self.frame.batches;
        let encode = batches.iter().map(|batch| batch.encode).sum::<Duration>() + self.frame.delta_cpu;
        let rest = bytes.saturating_sub(batches.iter().map(|batch| batch.bytes_out).sum());
        // The chooser never encodes dense pages, so it learns only the rate of the link from them.
        let class = if batches.is_empty() { plan.class } else { Class::Dense };
        batches.push(Batch::unencoded(class, rest));
        for batch in batches {
            match batch.codec {
                Some(Codec::Lz4) => counters.lz4.add_cpu(batch.encode_cpu),
                Some(Codec::Zstd(_)) => counters.zstd.add_cpu(batch.encode_cpu),
                None => {}
            }
            let share = batch.bytes_out as f64 / bytes.max(1) as f64;
            let facts = Facts {
                class: batch.class,
                codec: batch.codec,
                bytes_in: batch.bytes_in as u64,
                bytes_out: batch.bytes_out as u64,
                encode: batch.encode,
                encode_cpu: batch.encode_cpu,
                elapsed: batch.encode + elapsed.saturating_sub(encode).mul_f64(share),
                waited: waited.mul_f64(share),
                idle_cores,
            };
            self.chooser.sent(&facts, now);
        }
        self.frame.clear();
    }
}

impl Staging {
    fn new() -> Self {
        Self {
            plan: None,
            keys: Vec::with_capacity(MAX_FRAME_PAGES),
            classes: Vec::with_capacity(MAX_FRAME_PAGES),
            pages: vec![[0; PAGE_BYTES]; MAX_FRAME_PAGES].into(),
            content: Vec::with_capacity(MAX_FRAME_PAGES * PAGE_BYTES),
            segments: Vec::new(),
            owners: Vec::with_capacity(MAX_FRAME_PAGES),
            gathered: Vec::with_capacity(BATCH_PAGES),
            positions: Vec::with_capacity(BATCH_PAGES),
            batches: Vec::new(),
            delta_cpu: Duration::ZERO,
        }
    }

    fn clear(&mut self) {
        (self.plan, self.delta_cpu) = (None, Duration::ZERO);
        self.keys.clear();
        self.classes.clear();
        self.content.clear();
        self.segments.clear();
        self.owners.clear();
        self.batches.clear();
    }

    fn next_segment(&self) -> u8 {
        u8::try_from(self.segments.len()).unwrap_or(UNOWNED)
    }

    /// Ends a segment of `pages` pages, whose content begins at `begin`. Without pages, there is no
    /// segment.
    fn end_segment(&mut self, encoding: Encoding, pages: usize, begin: usize) {
        if pages > 0 {
            self.segments.push(Segment { encoding, pages, bytes: self.content.len() - begin });
        }
    }

    /// Lists up to a batch of pages of `class` that have no segment, from position `from` on.
    /// Returns the position after the last one, or `None` if there is none.
    fn gather(&mut self, class: Class, from: usize) -> Option<usize> {
        let pages = self.classes.iter().zip(&self.owners).enumerate().skip(from);
        let of_class = pages.filter(|(_, (of, owner))| **owner == UNOWNED && **of == class);
        self.positions.clear();
        self.positions.extend(of_class.map(|(position, _)| position).take(BATCH_PAGES));
        self.positions.last().map(|last| last + 1)
    }

    /// Returns the pages of the batch. They are copied only if they are not next to each other.
    fn batch(&mut self) -> &[Page] {
        let (first, count) = (self.positions.first().copied().unwrap_or(0), self.positions.len());
        if self.positions.last() == Some(&(first + count - 1)) {
            return &self.pages[first..first + count];
        }
        self.gathered.clear();
        self.gathered.extend(self.positions.iter().map(|position| self.pages[*position]));
        &self.gathered
    }

    /// Puts the pages without a segment into a segment of their own.
    fn finish(&mut self) -> Encoded<'_> {
        let raw = self.next_segment();
        let mut pages = 0;
        for owner in self.owners.iter_mut().filter(|owner| **owner == UNOWNED) {
            *owner = raw;
            pages += 1;
        }
        // If no page is encoded, the frame has no segments.
        if !self.segments.is_empty() && pages > 0 {
            self.segments.push(Segment { encoding: Encoding::Raw, pages, bytes: pages * PAGE_BYTES });
        }
        let Self { segments, owners, content, pages, .. } = self;
        Encoded { segments, owners, content, pages, raw }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::{SCRATCH, Scratch};
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashMap};
    use vmferry_codec::{Decoder, Delta, Format, Level};
    use vmferry_core::{GuestMemory, PageRun};

    const PAGES: u64 = 160;

    /// Memory of a target, which decodes frames.
    struct Target {
        decoder: Decoder,
        pages: HashMap<u64, Page>,
    }

    impl Target {
        fn receive(&mut self, encoded: &Encoded<'_>, numbers: &[u64]) {
            let content: Vec<u8> = encoded.parts().flatten().copied().collect();
            let raw = Segment { encoding: Encoding::Raw, pages: numbers.len(), bytes: content.len() };
            let segments = if encoded.segments.is_empty() { &[raw][..] } else { encoded.segments };
            let mut rest = &content[..];
            for (segment, index) in segments.iter().zip(0u8..) {
                let (mut own, after) = rest.split_at(segment.bytes);
                rest = after;
                let owned = numbers.iter().zip(encoded.owners).filter(|(_, owner)| **owner == index);
                let owned: Vec<u64> = owned.map(|(number, _)| *number).collect();
                assert_eq!(owned.len(), segment.pages);
                let mut pages = vec![[0; PAGE_BYTES]; owned.len()];
                let mut decode = |format| self.decoder.decode(format, own, &mut pages).unwrap();
                match segment.encoding {
                    Encoding::Raw => pages.as_flattened_mut().copy_from_slice(own),
                    Encoding::Lz4 => decode(Format::Lz4),
                    Encoding::Zstd => decode(Format::Zstd),
                    Encoding::Hash => panic!("an encoder sends no hashes"),
                    Encoding::Delta => {
                        for (page, number) in pages.iter_mut().zip(&owned) {
                            let (delta, after) = Delta::parse(own).unwrap();
                            *page = self.pages[number];
                            delta.apply(page);
                            own = after;
                        }
                        assert!(own.is_empty());
                    }
                }
                self.pages.extend(owned.into_iter().zip(pages));
            }
            assert!(rest.is_empty());
        }
    }

    /// Change that the guest makes to a page.
    #[derive(Debug, Clone, Copy)]
    enum Change {
        Zero,
        Word(usize, u64),
        Text(u8),
        Noise(u64),
    }

    /// Returns a change of some pages. Few values are possible, so that pages often get an earlier
    /// content again: only then is a delta against a version that the target does not have wrong.
    fn change() -> impl Strategy<Value = (u64, u64, Change)> {
        let change = prop_oneof![
            1 => Just(Change::Zero),
            6 => (0usize..3, 0u64..3).prop_map(|(at, word)| Change::Word(at, word)),
            2 => (0u8..2).prop_map(Change::Text),
            1 => (0u64..2).prop_map(Change::Noise),
        ];
        (0..PAGES, 1..PAGES, change)
    }

    fn apply(page: &mut Page, change: Change) {
        match change {
            Change::Zero => page.fill(0),
            Change::Word(at, word) => page.as_chunks_mut::<8>().0[at] = word.to_le_bytes(),
            Change::Text(seed) => {
                for (byte, at) in page.iter_mut().zip(0usize..) {
                    *byte = b"the quick brown fox "[(at + usize::from(seed)) % 20];
                }
            }
            Change::Noise(mut state) => {
                state |= 1;
                for word in page.as_chunks_mut::<8>().0 {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    *word = state.to_le_bytes();
                }
            }
        }
    }

    /// Returns a codec and a use of deltas. They differ from pass to pass, as they do when the
    /// choice changes.
    fn settings() -> impl Strategy<Value = (PageCodec, Deltas)> {
        let codecs = [PageCodec::Auto, PageCodec::Raw, PageCodec::Lz4, PageCodec::Zstd(Level::MIN)];
        let deltas = [Deltas::Auto, Deltas::On, Deltas::Off];
        (prop::sample::select(codecs.to_vec()), prop::sample::select(deltas.to_vec()))
    }

    #[test]
    fn frames_that_must_be_encoded_are_not_compared_with_raw_ones() {
        let zstd = PageCodec::Zstd(Level::MIN);
        let may_be_raw = |codec, deltas| Codecs { codec, deltas, cache_bytes: 0 }.may_be_raw();
        for deltas in [Deltas::Auto, Deltas::Off] {
            assert!(may_be_raw(PageCodec::Auto, deltas) && may_be_raw(PageCodec::Raw, deltas));
            assert!(!may_be_raw(PageCodec::Lz4, deltas) && !may_be_raw(zstd, deltas));
        }
        assert!(!may_be_raw(PageCodec::Auto, Deltas::On) && !may_be_raw(PageCodec::Raw, Deltas::On));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn target_has_the_content_that_was_sent(
            passes in prop::collection::vec((prop::collection::vec(change(), 0..6), 0u8..8, settings()), 1..10),
            // Caches without room, for fewer pages than the guest has, and for all of them.
            cache_bytes in prop_oneof![Just(0usize), Just(400 << 10), Just(4 << 20)],
        ) {
            let scratch = Scratch::new().unwrap();
            let window = scratch.memory().window(SCRATCH, PageRun::from(0..PAGES)).unwrap();
            let all = Codecs { codec: PageCodec::Auto, deltas: Deltas::On, cache_bytes };
            let layout = scratch.memory().layout();
            let mut encoder = PageEncoder::new(all, layout, Clock::start(), (&Arc::default(), &Arc::default())).unwrap();
            let mut target = Target { decoder: Decoder::new(), pages: HashMap::new() };
            let counters = Encodings::default();
            for (number, (changes, kind, (codec, deltas))) in passes.iter().enumerate() {
                (encoder.codecs.codec, encoder.codecs.deltas) = (*codec, *deltas);
                let mut dirty = BTreeSet::new();
                for (first, count, change) in changes {
                    for page in *first..(first + count).min(PAGES) {
                        let (mut content, at) = ([0; PAGE_BYTES], usize::try_from(page).unwrap());
                        window.copy_page(at, &mut content);
                        apply(&mut content, *change);
                        window.write_page(at, &content);
                        dirty.insert(page);
                    }
                }
                encoder.begin_pass(match (number, kind) {
                    (0, _) => PassKind::First,
                    (_, 0) => PassKind::Again,
                    _ => PassKind::Later,
                });
                let (mut sent, mut bytes) = (Vec::new(), 0);
                for page in dirty {
                    let (index, at) = (PageIndex(page), usize::try_from(page).unwrap());
                    let mut content = [0; PAGE_BYTES];
                    window.copy_page(at, &mut content);
                    if !encoder.has_begun() {
                        encoder.begin_frame(&content);
                    }
                    if encoder.copies() && encoder.copy(&window, at).is_some() {
                        encoder.add(SCRATCH, index);
                        sent.push(page);
                    } else {
                        encoder.forget(SCRATCH, index);
                        target.pages.insert(page, content);
                        bytes += PAGE_BYTES;
                    }
                }
                if !encoder.has_begun() {
                    continue;
                }
                if encoder.copies() {
                    let encoded = encoder.encode();
                    bytes += encoded.parts().map(<[u8]>::len).sum::<usize>();
                    target.receive(&encoded, &sent);
                }
                encoder.sent(bytes, &counters);
            }
            for (page, content) in &target.pages {
                let mut own = [0; PAGE_BYTES];
                window.copy_page(usize::try_from(*page).unwrap(), &mut own);
                prop_assert!(own == *content, "page {page}");
            }
        }
    }
}
