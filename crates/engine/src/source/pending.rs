//! Pages that a migration still has to send.
//!
//! While the source owns the guest, a page that the target needs is in one of these places:
//!
//! | place | owner | what takes the page out |
//! |---|---|---|
//! | `PendingPages::next` | the driver | the next pass begins |
//! | `PassPages`, if only senders take its pages | for each chunk, the sender of its channel | the sender reaches the chunk |
//! | `PassPages`, with the turn first or last | all senders and the driver, by atomic claims | the thread that claims the page |
//! | a bitmap of one thread | the sender that protects and reads the page, or the driver that protects it | the page is put into a frame, or its turn becomes last |
//!
//! A page that is in none of these places was sent, was never touched, or is in
//! `PendingPages::skipped`. A write to such a page returns it to `next`, by the tracker's next
//! harvest.
//!
//! # Unexamined spans
//! At the start every page is to be sent, but a page that was never touched need not be, because
//! the target's memory reads as zeros. If the tracker reports every write since its start, memory
//! is asked which pages were touched for a span of 1 GiB at a time. Until then, the pages of the
//! span are in no bitmap: `PendingPages::unexamined` or `PassPages::unexamined` has the span.
//! Therefore the time and the memory of a migration depend on the touched pages, not on the size of
//! the guest.

use crate::sync::{ClaimBitmap, SteppedMutex};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use vmferry_bitmap::Bitmap;
use vmferry_core::{GuestMemory, Layout, NothingToProtect, PageRun, PageSet, RegionId, VmError};

/// Number of pages of a span: 1 GiB. Asking for a span takes about 2 ms if all of its pages were
/// touched, and about a microsecond if none were.
pub(crate) const SPAN_PAGES: u64 = 1 << 18;

/// Pages that are to be sent, and pages that were skipped.
///
/// An answer about free pages must not remove a page that the guest wrote after the question
/// (hazard 8). No additional set is needed to ensure that:
///
/// - While a pass runs, answers remove pages from the pass only. A harvest comes after the end of
///   the pass and of its questions.
/// - While the guest is paused, the question comes after the harvest, and no harvest comes before
///   its answer.
///
/// It is safe to drop these sets. A migration that ends without having moved the guest drops them
/// together with its tracker, and the next migration begins with every page in `next`.
#[derive(Debug)]
pub(crate) struct PendingPages {
    /// Pages that the next pass sends, in addition to those of `unexamined`.
    next: PageSet,
    /// Spans of each region whose pages the next pass sends, if they were touched. `next` may have
    /// pages of these spans, too.
    unexamined: Vec<Spans>,
    /// The current pass.
    pass: Option<Arc<PassPages>>,
    /// Pages that were skipped as free and not sent since.
    ///
    /// A page that the guest wrote after the page was skipped is also in `next`, until the next
    /// pass begins.
    skipped: PageSet,
    skipped_count: u64,
}

impl PendingPages {
    /// Creates the sets with every page still to be sent.
    pub(crate) fn everything(layout: &Layout) -> Self {
        Self {
            next: PageSet::empty(layout),
            unexamined: layout.regions().iter().map(|region| Spans::all(region.pages())).collect(),
            pass: None,
            skipped: PageSet::empty(layout),
            skipped_count: 0,
        }
    }

    /// Returns the set to which a tracker's harvest adds pages.
    ///
    /// # Panics
    /// If a pass is in progress. Its senders still protect pages, and the harvest could find a page
    /// that a sender has not read yet.
    pub(crate) fn next(&mut self) -> &mut PageSet {
        assert!(self.pass.is_none(), "a harvest comes between two passes");
        &mut self.next
    }

    /// Returns the number of pages of memory.
    pub(crate) fn all(&self) -> u64 {
        self.next.iter().map(|(_, map)| map.len()).sum()
    }

    /// Returns the number of pages of the next pass.
    pub(crate) fn count(&self) -> u64 {
        let sets = self.next.iter().zip(&self.unexamined);
        sets.map(|((_, next), spans)| spans.pages_with(next)).sum()
    }

    /// Begins a pass with all pages that are to be sent, which `takers` take out of the pass.
    ///
    /// `memory` is asked which pages of the unexamined spans were touched, while the pass runs. The
    /// tracker must report every write since its start. With `None`, all pages of these spans are
    /// pages of the pass.
    pub(crate) fn begin_pass(
        &mut self,
        memory: Option<&Arc<dyn GuestMemory>>,
        takers: Takers,
    ) -> Arc<PassPages> {
        self.end_pass();
        if memory.is_none() {
            self.examine_nothing();
        }
        self.unskip_next();
        let pages = self.count();
        let unexamined = self.unexamined.iter_mut().map(Spans::take).collect();
        let unexamined = memory.map(Arc::clone).map(|memory| (memory, unexamined));
        let pass = PassPages::new(self.next.take(), pages, unexamined, takers);
        Arc::clone(self.pass.insert(Arc::new(pass)))
    }

    /// Removes the pages of the next pass from the skipped pages. A page of an unexamined span was
    /// never in a pass, so it was never skipped.
    fn unskip_next(&mut self) {
        if self.skipped_count > 0 {
            self.skipped.subtract(&self.next);
            self.skipped_count = self.skipped.count();
        }
    }

    /// Moves all pages of unexamined spans into `next`.
    fn examine_nothing(&mut self) {
        for ((_, next), spans) in self.next.iter_mut().zip(&mut self.unexamined) {
            spans.take().ranges().for_each(|span| next.set_range(span));
        }
    }

    /// Begins a pass with the pages of `set`, which had a digest mismatch, even if they are free.
    /// The guest must be paused.
    ///
    /// Free pages are included, because the target accepts the guest only if every page that it has
    /// received matches its digest.
    pub(crate) fn begin_repeat(&mut self, set: PageSet, takers: Takers) -> Arc<PassPages> {
        self.end_pass();
        self.unskip(&set);
        let pages = set.count();
        Arc::clone(self.pass.insert(Arc::new(PassPages::new(set, pages, None, takers))))
    }

    /// Ends the current pass, if there is one. Pages that no thread took are still to be sent.
    pub(crate) fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take() {
            pass.add_remaining_to(&mut self.next);
            pass.add_unexamined_to(&mut self.unexamined);
        }
    }

    /// Returns the current pass.
    pub(crate) fn pass(&self) -> Option<&Arc<PassPages>> {
        self.pass.as_ref()
    }

    /// Takes all pages that are to be sent, for the target to request them. Unexamined spans in
    /// which `memory` has no touched page are left out. The guest must be paused.
    ///
    /// # Errors
    /// If the host cannot determine which pages were touched. No page has been taken then.
    pub(crate) fn take_all(&mut self, memory: Option<&dyn GuestMemory>) -> Result<PageSet, VmError> {
        self.end_pass();
        if let Some(memory) = memory {
            for ((id, _), spans) in self.next.iter().zip(&mut self.unexamined) {
                spans.retain_touched(id, memory)?;
            }
        }
        self.examine_nothing();
        let taken = self.next.take();
        self.unskip(&taken);
        Ok(taken)
    }

    /// Skips the pages that are to be sent and are in `free`. Returns the number of pages that are
    /// skipped now and were not before.
    ///
    /// The guest must be paused, and must have been paused when it was asked which pages are free.
    ///
    /// # Panics
    /// If a pass is in progress. Use [`mark_skipped`](Self::mark_skipped) for the pages of a pass.
    pub(crate) fn skip(&mut self, free: &PageSet) -> u64 {
        assert!(self.pass.is_none(), "a pass skips its own pages");
        self.examine_nothing();
        let mut out = self.next.clone();
        out.retain(free);
        self.next.subtract(&out);
        self.skipped.union(&out);
        let before = std::mem::replace(&mut self.skipped_count, self.skipped.count());
        self.skipped_count.saturating_sub(before)
    }

    /// Marks pages that were taken out of the current pass as skipped. `pages` is a mask of these
    /// pages among the 64 pages from `first` on, in the region at `position`.
    ///
    /// # Panics
    /// If no pass is in progress.
    pub(crate) fn mark_skipped(&mut self, position: usize, first: u64, pages: u64) {
        assert!(self.pass.is_some(), "pages are taken out of a pass that is under way");
        if let Some((_, map)) = self.skipped.iter_mut().nth(position) {
            map.union_word(place(first), pages);
            self.skipped_count += u64::from(pages.count_ones());
        }
    }

    /// Removes the pages of `sent` from the skipped pages, because they are sent or named to the
    /// target as missing.
    pub(crate) fn unskip(&mut self, sent: &PageSet) {
        if self.skipped_count > 0 {
            self.skipped.subtract(sent);
            self.skipped_count = self.skipped.count();
        }
    }

    /// Returns the pages that were skipped and not sent since.
    pub(crate) fn skipped(&self) -> &PageSet {
        &self.skipped
    }

    /// Returns the number of pages that were skipped and not sent since.
    pub(crate) fn skipped_count(&self) -> u64 {
        self.skipped_count
    }

    /// Creates the sets from `next`, `skipped` and the current pass. For models that keep them
    /// elsewhere between two steps.
    #[cfg(test)]
    pub(crate) fn of([next, skipped]: [PageSet; 2], pass: Option<Arc<PassPages>>) -> Self {
        let skipped_count = skipped.count();
        let unexamined = next.iter().map(|(_, map)| Spans::none(map.len())).collect();
        Self { next, unexamined, pass, skipped, skipped_count }
    }

    #[cfg(test)]
    pub(crate) fn sets(&self) -> [&PageSet; 2] {
        [&self.next, &self.skipped]
    }
}

/// Set of spans of a region.
#[derive(Debug, Clone)]
struct Spans {
    /// One bit for each span.
    map: Bitmap,
    /// Number of pages of the region.
    len: u64,
}

impl Spans {
    fn none(len: u64) -> Self {
        Self { map: Bitmap::new(len.div_ceil(SPAN_PAGES)), len }
    }

    fn all(len: u64) -> Self {
        Self { map: Bitmap::full(len.div_ceil(SPAN_PAGES)), len }
    }

    /// Removes and returns all spans.
    fn take(&mut self) -> Self {
        let none = Self::none(self.len);
        std::mem::replace(self, none)
    }

    /// Removes the spans in which `memory` has no touched page of region `id`.
    fn retain_touched(&mut self, id: RegionId, memory: &dyn GuestMemory) -> Result<(), VmError> {
        let mut touched = Bitmap::new(self.map.len());
        for range in self.ranges() {
            let mut rest = range;
            while let Some(page) = memory.next_touched(id, PageRun::from(rest.clone()))?
                && !rest.is_empty()
            {
                let span = page.max(rest.start) / SPAN_PAGES;
                touched.set(span);
                rest.start = ((span + 1) * SPAN_PAGES).min(rest.end);
            }
        }
        self.map = touched;
        Ok(())
    }

    /// Returns the page ranges of the spans as maximal runs.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.map.runs().map(|spans| spans.start * SPAN_PAGES..(spans.end * SPAN_PAGES).min(self.len))
    }

    /// Returns the number of pages in the spans or in `map`, a bitmap of the region.
    fn pages_with(&self, map: &Bitmap) -> u64 {
        let outside = |range: Range<u64>| range.end - range.start - map.count_range(range);
        map.count() + self.ranges().map(outside).sum::<u64>()
    }
}

/// Turn of a page within a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageTurn {
    /// The page is sent in the order of addresses.
    First,
    /// The page is sent after all pages whose turn is first. Until then the guest may report the
    /// page as free.
    Last,
}

/// Threads that take pages out of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Takers {
    /// Only the sender of each channel, which takes the chunks of its share.
    Senders(Division),
    /// The senders, and the driver, which skips free pages.
    SendersAndDriver(Division),
}

#[cfg(any(test, feature = "sim"))]
impl Takers {
    /// One sender and the driver, for tests and simulations.
    pub(crate) const SHARED: Self = Self::SendersAndDriver(Division { chunk_pages: 512, channels: 1 });
}

/// Division of memory into chunks, and of the chunks among the channels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    /// Number of pages of a chunk, a multiple of 64.
    pub(crate) chunk_pages: u64,
    pub(crate) channels: u64,
}

impl Division {
    /// Returns the division for a pass with unexamined spans. If there is one channel, a chunk is
    /// at most one span, so that not all of memory is examined before the first page is sent.
    ///
    /// With several channels the division stays, because each page must belong to the same channel
    /// in all passes.
    fn by_spans(self) -> Self {
        match self.channels {
            1 => Self { chunk_pages: self.chunk_pages.min(SPAN_PAGES), ..self },
            _ => self,
        }
    }

    /// Returns the share of channel `index`.
    pub(crate) fn share(self, index: u16) -> Share {
        Share { division: self, index }
    }
}

/// Chunks that belong to a channel: chunk `c` of the region at `position` belongs to channel
/// `(c + position) % channels`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    division: Division,
    index: u16,
}

impl Share {
    /// Returns the channel's first chunk of a region of `pages` pages that has `page` or later
    /// pages, or `None` if there is none.
    fn chunk_from(self, position: usize, pages: u64, page: u64) -> Option<Range<u64>> {
        let Division { chunk_pages: size, channels } = self.division;
        let chunk = page / size;
        let owner = (chunk + position as u64) % channels;
        let first = (chunk + (u64::from(self.index) + channels - owner) % channels) * size;
        // A region may end within a chunk, so `page` at its end may lie in the last chunk.
        (page.max(first) < pages).then(|| first..(first + size).min(pages))
    }

    /// Returns the channel's chunks of a region of `pages` pages.
    pub(crate) fn chunks(self, position: usize, pages: u64) -> impl Iterator<Item = Range<u64>> {
        self.chunks_from(position, pages, 0)
    }

    /// Returns the channel's chunks that have `page` or later pages.
    fn chunks_from(self, position: usize, pages: u64, page: u64) -> impl Iterator<Item = Range<u64>> {
        let next = move |chunk: &Range<u64>| self.chunk_from(position, pages, chunk.end);
        std::iter::successors(self.chunk_from(position, pages, page), next)
    }
}

/// The pages of a pass that no thread has taken. The channels' senders share the set with the
/// driver, which skips free pages.
///
/// A page is in `first`, or in `last`, or one thread has taken it. Only that thread protects the
/// page: a protection discards the writes recorded since the previous protection, and only a thread
/// that has not read the page yet may do so.
///
/// A page moves in one of these ways:
///
/// - from `first` to a sender, permanently;
/// - from `first` to the driver, which protects the page and puts it into `last`;
/// - from `last` to a sender, or to the driver, which skips the page. Both are permanent.
///
/// If the driver takes no pages, no claim is needed: each page belongs to the sender of its chunk.
pub(crate) struct PassPages {
    parts: Vec<Part>,
    division: Division,
    /// Number of pages that the pass began with.
    pages: u64,
    /// Spans that no thread has examined. `None` if there were none.
    unexamined: Option<Unexamined>,
}

/// Spans of a pass that no thread has examined, and the memory that is asked about them.
///
/// A thread that needs a page of a span examines the span first: it asks which of its pages were
/// touched, puts these pages into the pass, and then removes the span. It holds the lock in the
/// meantime, so a thread that waits for the lock finds the span examined. The lock is taken once
/// for each chunk, not for each page.
///
/// A page that is touched after memory was asked is not in the pass. The tracker reports the page,
/// because it reports every write since its start, and the next harvest adds the page to
/// `PendingPages::next`.
struct Unexamined {
    memory: Arc<dyn GuestMemory>,
    spans: SteppedMutex<UnexaminedSpans>,
    /// Number of unexamined spans, so that threads do not take the lock when no span is left.
    left: AtomicU64,
    /// Number of pages that were found untouched and that
    /// [`take_untouched`](PassPages::take_untouched) has not returned.
    untouched: AtomicU64,
}

struct UnexaminedSpans {
    /// Spans of each region.
    of_region: Vec<Spans>,
    /// Scratch bitmap of a region for the touched pages of a span. It is empty between two spans.
    touched: Bitmap,
}

#[derive(Debug)]
struct Part {
    id: RegionId,
    /// Number of pages of the region.
    len: u64,
    pages: PartPages,
}

/// Pages of a region that await their turn.
#[derive(Debug)]
enum PartPages {
    /// Threads claim the pages.
    Claimed { first: ClaimBitmap, last: ClaimBitmap },
    /// Each page belongs to the sender of its chunk, and its turn is first.
    Divided(DividedPages),
}

/// Pages of a region that the senders of a pass take chunk by chunk, each from its own share. No
/// thread changes the bitmap, so that a sender finds its pages as fast as a scan of the bitmap.
#[derive(Debug)]
struct DividedPages {
    pages: Bitmap,
    /// For each channel, the page after the last chunk that its sender has taken.
    ///
    /// Only that sender stores the number while the pass runs. The driver reads it after the pass,
    /// when it has received the sender's message or has joined its thread, so the order of other
    /// memory accesses does not matter.
    reached: Box<[AtomicU64]>,
}

impl DividedPages {
    fn new(pages: Bitmap, division: Division) -> Self {
        Self { pages, reached: (0..division.channels).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Takes the next chunk of `share` at or after page `from` that has pages. Returns the chunk.
    fn next_chunk(&self, position: usize, mut from: u64, share: Share) -> Option<Range<u64>> {
        while let Some(page) = self.pages.next_set(from)
            && let Some(chunk) = share.chunk_from(position, self.pages.len(), page)
        {
            if chunk.contains(&page) {
                self.reached[usize::from(share.index)].store(chunk.end, Ordering::Relaxed);
                return Some(chunk);
            }
            from = chunk.start;
        }
        None
    }

    /// Returns the pages that no sender has taken.
    fn snapshot(&self, position: usize, division: Division) -> Bitmap {
        let mut left = Bitmap::new(self.pages.len());
        for (index, reached) in (0..).zip(&self.reached) {
            let share = division.share(index);
            for chunk in share.chunks_from(position, left.len(), reached.load(Ordering::Relaxed)) {
                self.pages.runs_in(chunk).for_each(|run| left.set_range(run));
            }
        }
        left
    }
}

impl Part {
    /// Returns the pages that threads claim and that await `turn`. `None` if the senders divide the
    /// pages.
    fn claimed(&self, turn: PageTurn) -> Option<&ClaimBitmap> {
        match (&self.pages, turn) {
            (PartPages::Claimed { first, .. }, PageTurn::First) => Some(first),
            (PartPages::Claimed { last, .. }, PageTurn::Last) => Some(last),
            (PartPages::Divided(_), _) => None,
        }
    }

    /// Adds the pages of the span `run` that are set in `touched` to the pages that await their
    /// first turn. Returns the number of the other pages of the span that do not await it.
    fn give_touched(&self, run: Range<u64>, touched: &Bitmap) -> u64 {
        let words = |pages: &Range<u64>| place(pages.start)..place(pages.end.next_multiple_of(64));
        // A pass with unexamined spans is never divided.
        let Some(first) = self.claimed(PageTurn::First) else { return run.end - run.start };
        // Pages of the span that a harvest found are in the pass already.
        let mut awaiting = 0;
        if first.next_block(run.start).is_some_and(|page| page < run.end) {
            awaiting = words(&run).map(|word| u64::from(first.word(word).count_ones())).sum();
        }
        for pages in touched.runs_in(run.clone()) {
            for word in words(&pages) {
                // Each word is given once, by the run in which it begins or by the first run in it.
                let bits = touched.word(word) & !first.word(word);
                first.give_64(word as u64 * 64, bits);
                awaiting += u64::from(bits.count_ones());
            }
        }
        run.end - run.start - awaiting
    }
}

/// Returns the index of the word that contains `page`.
fn place(page: u64) -> usize {
    usize::try_from(page / 64).unwrap_or(usize::MAX)
}

impl std::fmt::Debug for PassPages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PassPages")
            .field("parts", &self.parts)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

impl PassPages {
    /// Creates a pass of `pages` pages: those of `set`, and those of the unexamined spans.
    fn new(
        set: PageSet,
        pages: u64,
        unexamined: Option<(Arc<dyn GuestMemory>, Vec<Spans>)>,
        takers: Takers,
    ) -> Self {
        let unexamined = unexamined.filter(|(_, spans)| spans.iter().any(|spans| !spans.map.is_empty()));
        // Any sender may put touched pages of other senders' chunks into the pass.
        let (division, divided) = match (takers, &unexamined) {
            (Takers::Senders(division), None) => (division, true),
            (Takers::Senders(division), Some(_)) => (division.by_spans(), false),
            (Takers::SendersAndDriver(division), _) => (division, false),
        };
        let part = |(id, map): (RegionId, Bitmap)| Part {
            id,
            len: map.len(),
            pages: match divided {
                true => PartPages::Divided(DividedPages::new(map, division)),
                false => {
                    PartPages::Claimed { last: ClaimBitmap::empty(map.len()), first: ClaimBitmap::new(map) }
                }
            },
        };
        let unexamined = unexamined.map(|(memory, spans)| Unexamined {
            memory,
            left: AtomicU64::new(spans.iter().map(|spans| spans.map.count()).sum()),
            spans: SteppedMutex::new(UnexaminedSpans { of_region: spans, touched: Bitmap::new(0) }),
            untouched: AtomicU64::new(0),
        });
        Self { parts: set.into_iter().map(part).collect(), division, pages, unexamined }
    }

    /// Returns true if the untouched pages of the pass are found by examining spans. If false, the
    /// threads must ask which pages were touched after they have protected them.
    pub(crate) fn examines(&self) -> bool {
        self.unexamined.is_some()
    }

    /// Returns true if the driver may take pages of the pass, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.parts.iter().all(|part| matches!(part.pages, PartPages::Claimed { .. }))
    }

    /// Returns the number of untouched pages found since the last call.
    pub(crate) fn take_untouched(&self) -> u64 {
        self.unexamined.as_ref().map_or(0, |unexamined| unexamined.untouched.swap(0, Ordering::Relaxed))
    }

    /// Examines the spans of `pages`, so that all touched pages in them that await their first turn
    /// can be taken.
    pub(crate) fn examine(&self, position: usize, pages: Range<u64>) -> Result<(), VmError> {
        let Some(unexamined) = &self.unexamined else { return Ok(()) };
        if unexamined.left.load(Ordering::Acquire) == 0 || pages.is_empty() {
            return Ok(());
        }
        let mut spans = unexamined.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let UnexaminedSpans { of_region, touched } = &mut *spans;
        let (part, spans) = (&self.parts[position], &mut of_region[position]);
        if touched.len() != spans.len {
            *touched = Bitmap::new(spans.len);
        }
        for span in pages.start / SPAN_PAGES..pages.end.div_ceil(SPAN_PAGES) {
            if !spans.map.test(span) {
                continue;
            }
            let run = span * SPAN_PAGES..((span + 1) * SPAN_PAGES).min(spans.len);
            touched.clear_range(run.clone());
            unexamined.memory.touched(part.id, PageRun::from(run.clone()), touched)?;
            unexamined.untouched.fetch_add(part.give_touched(run, touched), Ordering::Relaxed);
            spans.map.test_and_clear(span);
            unexamined.left.fetch_sub(1, Ordering::Release);
        }
        Ok(())
    }

    /// Returns the first unexamined span at or after `page`, as its first page.
    fn next_unexamined(&self, position: usize, page: u64) -> Option<u64> {
        let unexamined = self.unexamined.as_ref()?;
        if unexamined.left.load(Ordering::Acquire) == 0 {
            return None;
        }
        let spans = unexamined.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.of_region[position].map.next_set(page / SPAN_PAGES).map(|span| (span * SPAN_PAGES).max(page))
    }

    /// Returns the first page at or after `from` that may await `turn`, or `None` if there is none.
    /// No page between `from` and the result awaits `turn`. Pages that the senders divide are not
    /// found.
    ///
    /// # Errors
    /// If the host cannot determine which pages were touched.
    pub(crate) fn next_page(
        &self,
        position: usize,
        turn: PageTurn,
        from: u64,
    ) -> Result<Option<u64>, VmError> {
        let Some(claims) = self.parts[position].claimed(turn) else { return Ok(None) };
        if turn == PageTurn::Last {
            return Ok(claims.next_block(from));
        }
        loop {
            // The span is looked up first: a span that another thread examines in between has its
            // pages in the bitmap afterwards.
            let span = self.next_unexamined(position, from);
            let page = claims.next_block(from);
            match (span, page) {
                (Some(span), page) if page.is_none_or(|page| span <= page) => {
                    self.examine(position, span..span + 1)?;
                }
                (_, page) => return Ok(page),
            }
        }
    }

    /// Returns the number of pages that the pass began with.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the position, the identifier and the number of pages of each region.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (usize, RegionId, u64)> + '_ {
        self.parts.iter().enumerate().map(|(position, part)| (position, part.id, part.len))
    }

    /// Returns true if any page of the region at `position` still awaits `turn`. If the senders
    /// divide the pages, those that they have taken count as well.
    pub(crate) fn has(&self, position: usize, turn: PageTurn) -> bool {
        let part = &self.parts[position];
        if let PartPages::Divided(divided) = &part.pages {
            return turn == PageTurn::First && !divided.pages.is_empty();
        }
        // The spans are looked up first: if another thread has examined all of them in between,
        // their pages are in the bitmap afterwards. In the other order, a sender would skip the
        // region.
        turn == PageTurn::First && self.next_unexamined(position, 0).is_some()
            || part.claimed(turn).is_some_and(|claims| claims.left() > 0)
    }

    /// Finds the next chunk of channel `index` at or after page `from` with pages that await
    /// `turn`, and takes these pages. Returns the chunk and a bitmap of the region in which exactly
    /// these pages of the chunk are set, or `None` if no chunk is left. `mine` is memory for that
    /// bitmap.
    ///
    /// # Errors
    /// If the host cannot determine which pages were touched.
    pub(crate) fn next_chunk<'a>(
        &'a self,
        position: usize,
        turn: PageTurn,
        mut from: u64,
        index: u16,
        mine: &'a mut Bitmap,
    ) -> Result<Option<(Range<u64>, &'a Bitmap)>, VmError> {
        let (part, share) = (&self.parts[position], self.division.share(index));
        if let PartPages::Divided(divided) = &part.pages {
            let chunk = divided.next_chunk(position, from, share).filter(|_| turn == PageTurn::First);
            return Ok(chunk.map(|chunk| (chunk, &divided.pages)));
        }
        if mine.len() != part.len {
            *mine = Bitmap::new(part.len);
        }
        while let Some(page) = self.next_page(position, turn, from)?
            && let Some(chunk) = share.chunk_from(position, part.len, page)
        {
            from = chunk.end;
            if self.take(position, turn, chunk.clone(), mine)? {
                return Ok(Some((chunk, mine)));
            }
        }
        Ok(None)
    }

    /// Takes the remaining pages of `chunk` that await `turn` into `mine`, a bitmap of the region.
    /// Returns true if there was any.
    ///
    /// `chunk` must begin at a multiple of 64.
    ///
    /// # Errors
    /// If the host cannot determine which pages were touched.
    fn take(
        &self,
        position: usize,
        turn: PageTurn,
        chunk: Range<u64>,
        mine: &mut Bitmap,
    ) -> Result<bool, VmError> {
        if turn == PageTurn::First {
            self.examine(position, chunk.clone())?;
        }
        let claims = self.parts[position].claimed(turn);
        Ok(claims.is_some_and(|claims| claims.take_range_into(chunk, mine) > 0))
    }

    /// Takes those pages of `wanted` that still await `turn`. `wanted` is a mask of the 64 pages
    /// from `first` on. Returns the taken pages as a mask. Pages of an unexamined span, and pages
    /// that the senders divide, are not taken.
    pub(crate) fn take_64(&self, position: usize, turn: PageTurn, first: u64, wanted: u64) -> u64 {
        self.parts[position].claimed(turn).map_or(0, |claims| claims.take_64(first, wanted))
    }

    /// Returns pages that were taken to the pass, with their turn last. The pages must be
    /// protected.
    pub(crate) fn postpone(&self, position: usize, first: u64, pages: u64) {
        let claims = self.parts[position].claimed(PageTurn::Last);
        assert!(claims.is_some(), "pages are taken to be postponed only from a pass with claims");
        claims.into_iter().for_each(|claims| claims.give_64(first, pages));
    }

    /// Adds the pages that no thread took to `into`. The pass must have ended.
    fn add_remaining_to(&self, into: &mut PageSet) {
        for (position, part) in self.parts.iter().enumerate() {
            let Some(map) = into.region_mut(part.id) else { continue };
            match &part.pages {
                PartPages::Claimed { first, last } => [first, last]
                    .into_iter()
                    .filter(|pages| pages.left() > 0)
                    .for_each(|pages| map.union(&pages.snapshot())),
                PartPages::Divided(divided) => map.union(&divided.snapshot(position, self.division)),
            }
        }
    }

    /// Adds the spans that no thread has examined to `into`. The pass must have ended.
    fn add_unexamined_to(&self, into: &mut [Spans]) {
        if let Some(unexamined) = &self.unexamined {
            let spans = unexamined.spans.lock().unwrap_or_else(PoisonError::into_inner);
            into.iter_mut().zip(&spans.of_region).for_each(|(into, spans)| into.map.union(&spans.map));
        }
    }

    /// Creates a pass in which the pages of `last` are postponed already.
    #[cfg(test)]
    pub(crate) fn of_parts(first: &PageSet, last: &PageSet, pages: u64) -> Self {
        let part = |((id, first), (_, last)): ((RegionId, &Bitmap), (_, &Bitmap))| Part {
            id,
            len: first.len(),
            pages: PartPages::Claimed {
                first: ClaimBitmap::new(first.clone()),
                last: ClaimBitmap::new(last.clone()),
            },
        };
        let division = Division { chunk_pages: 64, channels: 1 };
        Self { parts: first.iter().zip(last.iter()).map(part).collect(), division, pages, unexamined: None }
    }

    /// Returns the pages of the region at `position` that await their first and their last turn.
    #[cfg(test)]
    pub(crate) fn sets(&self, position: usize) -> [Bitmap; 2] {
        [PageTurn::First, PageTurn::Last].map(|turn| self.parts[position].claimed(turn).unwrap().snapshot())
    }
}

/// Pass of a migration with one channel, whose pages need no protection. For measurements.
#[doc(hidden)]
#[derive(Debug)]
pub struct WalkedPass(PassPages);

impl WalkedPass {
    /// Creates a pass of the pages in `set`. With `claims`, the driver may skip free pages of it.
    #[must_use]
    pub fn new(set: PageSet, claims: bool) -> Self {
        let division = |divided| super::sender::division(&NothingToProtect, 1, divided);
        let takers = match claims {
            true => Takers::SendersAndDriver(division(false)),
            false => Takers::Senders(division(true)),
        };
        let pages = set.count();
        Self(PassPages::new(set, pages, None, takers))
    }

    /// Takes the pages out of the pass like its sender, and folds the runs that the sender would
    /// send.
    pub fn walk<T>(&self, mut folded: T, mut fold: impl FnMut(T, Range<u64>) -> T) -> T {
        let mut mine = Bitmap::new(0);
        for (position, ..) in self.0.regions() {
            let mut from = 0;
            // The pass has no unexamined span, so no question to the host fails.
            while let Ok(Some((chunk, map))) =
                self.0.next_chunk(position, PageTurn::First, from, 0, &mut mine)
            {
                from = chunk.end;
                folded = map.runs_in(chunk).fold(folded, &mut fold);
            }
        }
        folded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::sender::division;
    use crate::sync::unscheduled;
    use vmferry_core::{Gpa, Region};

    fn layout() -> Layout {
        Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 100 << 12 }]).unwrap()
    }

    fn set(pages: &[u64]) -> PageSet {
        let mut set = PageSet::empty(&layout());
        pages.iter().for_each(|page| {
            set.region_mut(RegionId(0)).unwrap().set(*page);
        });
        set
    }

    fn take_all(pass: &PassPages, turn: PageTurn) -> Vec<u64> {
        let mut mine = Bitmap::new(100);
        pass.take(0, turn, 0..100, &mut mine).unwrap();
        mine.bits().collect()
    }

    #[test]
    fn harvested_page_is_taken_once() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            assert_eq!(pending.count(), 100);
            let pass = pending.begin_pass(None, Takers::SHARED);
            assert_eq!((pass.pages(), pending.count()), (100, 0));
            assert_eq!(take_all(&pass, PageTurn::First).len(), 100);
            pending.end_pass();
            pending.next().region_mut(RegionId(0)).unwrap().set(7);
            assert_eq!(pending.count(), 1);
            assert_eq!(take_all(&pending.begin_pass(None, Takers::SHARED), PageTurn::First), [7]);
            assert_eq!(pending.count(), 0);
        });
    }

    #[test]
    fn pages_that_a_pass_leaves_are_sent_by_the_next() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            let pass = pending.begin_pass(None, Takers::SHARED);
            let off = pass.take_64(0, PageTurn::First, 64, 0b111);
            pass.postpone(0, 64, off);
            assert_eq!(take_all(&pass, PageTurn::First).len(), 97);
            assert_eq!(pass.take_64(0, PageTurn::Last, 64, 0b10), 0b10);
            pending.mark_skipped(0, 64, 0b10);
            pending.end_pass();
            assert_eq!((pending.count(), pending.skipped_count()), (2, 1));
            assert_eq!(take_all(&pending.begin_pass(None, Takers::SHARED), PageTurn::First), [64, 66]);
            // The guest has written the page since. The next pass sends it, so it is not skipped
            // any more.
            pending.end_pass();
            pending.next().region_mut(RegionId(0)).unwrap().set(65);
            assert_eq!(pending.skipped_count(), 1);
            assert_eq!(take_all(&pending.begin_pass(None, Takers::SHARED), PageTurn::First), [65]);
            assert_eq!(pending.skipped_count(), 0);
        });
    }

    #[test]
    fn paused_guest_has_only_pages_skipped_that_are_to_be_sent() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            take_all(&pending.begin_pass(None, Takers::SHARED), PageTurn::First);
            pending.end_pass();
            pending.next().union(&set(&[1, 2, 3]));
            assert_eq!(pending.skip(&set(&[2, 4, 9])), 1);
            assert_eq!(*pending.skipped(), set(&[2]));
            assert_eq!(pending.take_all(None).unwrap(), set(&[1, 3]));
        });
    }

    /// Memory of two regions, which has no content and knows which pages were touched.
    struct Touched {
        layout: Layout,
        pages: PageSet,
        asked: std::sync::Mutex<Vec<(RegionId, PageRun)>>,
    }

    /// Number of pages of the larger region: two spans and a part of a third.
    const LONG: u64 = 2 * SPAN_PAGES + 100;

    impl Touched {
        fn new(pages: &[(u32, u64)]) -> Arc<Self> {
            let region =
                |id, pages: u64| Region { id: RegionId(id), gpa: Gpa(u64::from(id) << 40), len: pages << 12 };
            let layout = Layout::new(vec![region(0, LONG), region(1, 70)]).unwrap();
            let mut set = PageSet::empty(&layout);
            for (id, page) in pages {
                set.region_mut(RegionId(*id)).unwrap().set(*page);
            }
            Arc::new(Self { layout, pages: set, asked: std::sync::Mutex::default() })
        }
    }

    impl GuestMemory for Touched {
        fn layout(&self) -> &Layout {
            &self.layout
        }

        fn window(&self, _: RegionId, _: PageRun) -> Result<vmferry_core::Window<'_>, VmError> {
            Err(VmError::new("memory without content"))
        }

        fn next_touched(&self, region: RegionId, run: PageRun) -> Result<Option<u64>, VmError> {
            Ok(self.pages.region(region).unwrap().bits_in(run.range()).next())
        }

        fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
            self.asked.lock().unwrap().push((region, run));
            self.pages.region(region).unwrap().runs_in(run.range()).for_each(|run| touched.set_range(run));
            Ok(())
        }
    }

    /// Takes all pages of a region in the way of a sender. Returns these pages and the number of
    /// chunks that were sent.
    fn take_region(pass: &PassPages, position: usize, len: u64) -> (Vec<u64>, u64) {
        let (mut mine, mut from, mut chunks, mut pages) = (Bitmap::new(len), 0, 0, Vec::new());
        while let Some((chunk, map)) = pass.next_chunk(position, PageTurn::First, from, 0, &mut mine).unwrap()
        {
            pages.extend(map.bits_in(chunk.clone()));
            (from, chunks) = (chunk.end, chunks + 1);
        }
        (pages, chunks)
    }

    #[test]
    fn channels_share_the_chunks_of_every_region() {
        for (channels, pages) in [(1, 1u64), (2, 512), (3, 5000), (7, 5120)] {
            for position in 0..4 {
                let share = |index| Division { chunk_pages: 512, channels: channels.into() }.share(index);
                let mut all: Vec<_> =
                    (0..channels).flat_map(|index| share(index).chunks(position, pages)).collect();
                all.sort_by_key(|chunk| chunk.start);
                assert_eq!((all[0].start, all[all.len() - 1].end), (0, pages));
                assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{all:?}");
            }
        }
    }

    #[test]
    fn page_belongs_to_the_same_channel_in_all_passes() {
        struct Chunks(u64);
        impl vmferry_core::Protect for Chunks {
            fn chunk_pages(&self) -> u64 {
                self.0
            }
            fn is_needed(&self) -> bool {
                false
            }
            fn protect(&self, _: RegionId, _: PageRun, _: &Bitmap) -> Result<(), VmError> {
                Ok(())
            }
        }
        let memory = Touched::new(&[]);
        let passes = |chunk: u64, channels| {
            let division = |senders_only| division(&Chunks(chunk), channels, senders_only);
            let unexamined = || vec![Spans::all(LONG), Spans::none(70)];
            let pass = |takers, spans: Option<Vec<Spans>>| {
                let unexamined = spans.map(|spans| (Arc::clone(&memory) as _, spans));
                PassPages::new(PageSet::empty(memory.layout()), 0, unexamined, takers).division.chunk_pages
            };
            [Takers::Senders(division(true)), Takers::SendersAndDriver(division(false))]
                .map(|takers| [pass(takers, None), pass(takers, Some(unexamined()))])
        };
        unscheduled(|| {
            for chunk in [1, 512, 1 << 14, SPAN_PAGES, 1 << 20] {
                assert_eq!(passes(chunk, 2), [[chunk.max(512); 2]; 2]);
            }
            assert_eq!(passes(512, 1), [[1 << 24, SPAN_PAGES], [512, 512]]);
        });
    }

    #[test]
    fn walk_of_a_pass_returns_every_page_once() {
        unscheduled(|| {
            for claims in [false, true] {
                let mut pages = Vec::new();
                WalkedPass::new(set(&[0, 1, 2, 63, 64, 99]), claims).walk((), |(), run| pages.extend(run));
                assert_eq!(pages, [0, 1, 2, 63, 64, 99]);
            }
        });
    }

    #[test]
    fn senders_take_their_shares_and_leave_the_rest_to_the_next_pass() {
        unscheduled(|| {
            let layout = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 5000 << 12 }]).unwrap();
            let mut pending = PendingPages::everything(&layout);
            pending.begin_pass(None, Takers::SHARED);
            let all = pending.take_all(None).unwrap();
            assert_eq!(all.count(), 5000);
            let dirty = [0, 511, 512, 1023, 1024, 1600, 4100, 4999];
            dirty.iter().for_each(|page| {
                pending.next().region_mut(RegionId(0)).unwrap().set(*page);
            });
            let takers = Takers::Senders(Division { chunk_pages: 512, channels: 2 });
            let pass = pending.begin_pass(None, takers);
            assert!(!pass.is_shared() && pass.has(0, PageTurn::First) && !pass.has(0, PageTurn::Last));
            let mut mine = Bitmap::new(0);
            let mut next = |index, from| {
                let chunk = pass.next_chunk(0, PageTurn::First, from, index, &mut mine).unwrap();
                chunk.map(|(chunk, map)| (chunk.clone(), map.bits_in(chunk).collect::<Vec<_>>()))
            };
            assert_eq!(next(0, 0), Some((0..512, vec![0, 511])));
            assert_eq!(next(0, 512), Some((1024..1536, vec![1024])));
            assert_eq!(next(1, 0), Some((512..1024, vec![512, 1023])));
            assert_eq!(next(1, 1024), Some((1536..2048, vec![1600])));
            assert_eq!(next(1, 2048), Some((4608..5000, vec![4999])));
            assert_eq!(next(1, 5000), None);
            pending.end_pass();
            assert_eq!(pending.next().region(RegionId(0)).unwrap().bits().collect::<Vec<_>>(), [4100]);
        });
    }

    #[test]
    fn pass_has_touched_pages_only_and_asks_for_each_span_once() {
        unscheduled(|| {
            let touched = [(0, 5), (0, SPAN_PAGES - 1), (0, 2 * SPAN_PAGES + 99), (1, 64), (1, 69)];
            let memory = Touched::new(&touched);
            let mut pending = PendingPages::everything(memory.layout());
            assert_eq!(pending.count(), LONG + 70);
            let pass = pending.begin_pass(Some(&(Arc::clone(&memory) as _)), Takers::SHARED);
            assert_eq!((pass.pages(), pending.count()), (LONG + 70, 0));
            assert!(pass.has(0, PageTurn::First) && pass.has(1, PageTurn::First));
            let (pages, chunks) = take_region(&pass, 0, LONG);
            assert_eq!(pages, [5, SPAN_PAGES - 1, 2 * SPAN_PAGES + 99]);
            assert_eq!(chunks, 3);
            assert_eq!(take_region(&pass, 1, 70).0, [64, 69]);
            assert_eq!(pass.take_untouched(), LONG + 70 - 5);
            assert_eq!(pass.take_untouched(), 0);
            assert!(!pass.has(0, PageTurn::First) && !pass.has(1, PageTurn::First));
            assert_eq!(memory.asked.lock().unwrap().len(), 4);
            pending.end_pass();
            assert_eq!(pending.count(), 0);
        });
    }

    #[test]
    fn spans_that_a_pass_leaves_are_examined_by_the_next_or_sent_whole() {
        unscheduled(|| {
            let memory = Touched::new(&[(0, 5), (0, SPAN_PAGES + 7)]);
            let shared: Arc<dyn GuestMemory> = Arc::clone(&memory) as _;
            let mut pending = PendingPages::everything(memory.layout());
            let pass = pending.begin_pass(Some(&shared), Takers::SHARED);
            let mut mine = Bitmap::new(LONG);
            assert!(pass.take(0, PageTurn::First, 0..512, &mut mine).unwrap());
            pending.end_pass();
            // The pages of three spans are left. A harvested page is one of them, another is not.
            let left = LONG - SPAN_PAGES + 70;
            assert_eq!(pending.count(), left);
            pending.next().region_mut(RegionId(0)).unwrap().set_range(SPAN_PAGES..SPAN_PAGES + 1);
            pending.next().region_mut(RegionId(0)).unwrap().set(9);
            assert_eq!(pending.count(), left + 1);
            let pass = pending.begin_pass(Some(&shared), Takers::SHARED);
            assert_eq!(pass.pages(), left + 1);
            assert_eq!(take_region(&pass, 0, LONG).0, [9, SPAN_PAGES, SPAN_PAGES + 7]);
            // Two pages of the span at `SPAN_PAGES` are in the pass, and page 9 is in none of the
            // spans.
            assert_eq!(pass.take_untouched(), LONG - SPAN_PAGES - 2);
            // Without memory to ask, all pages of the span of the other region are sent.
            let pass = pending.begin_pass(None, Takers::SHARED);
            assert_eq!((pass.pages(), pass.examines()), (70, false));
            assert_eq!(take_region(&pass, 1, 70).0.len(), 70);
        });
    }

    #[test]
    fn handover_names_whole_spans_with_a_touched_page_only() {
        let memory = Touched::new(&[(0, SPAN_PAGES + 7), (0, LONG - 1)]);
        let mut pending = PendingPages::everything(memory.layout());
        pending.next().region_mut(RegionId(0)).unwrap().set(3);
        let all = pending.take_all(Some(&*memory)).unwrap();
        let runs: Vec<_> = all.region(RegionId(0)).unwrap().runs().collect();
        assert_eq!(runs, [3..4, SPAN_PAGES..LONG]);
        assert!(all.region(RegionId(1)).unwrap().is_empty());
        assert_eq!(pending.count(), 0);
    }

    #[test]
    fn failed_question_leaves_the_span_unexamined() {
        struct Failing(Layout);
        impl GuestMemory for Failing {
            fn layout(&self) -> &Layout {
                &self.0
            }
            fn window(&self, _: RegionId, _: PageRun) -> Result<vmferry_core::Window<'_>, VmError> {
                Err(VmError::new("memory without content"))
            }
            fn touched(&self, _: RegionId, _: PageRun, _: &mut Bitmap) -> Result<(), VmError> {
                Err(VmError::new("the host does not say"))
            }
        }
        unscheduled(|| {
            let memory: Arc<dyn GuestMemory> = Arc::new(Failing(layout()));
            let mut pending = PendingPages::everything(&layout());
            let pass = pending.begin_pass(Some(&memory), Takers::SHARED);
            let error = pass.next_page(0, PageTurn::First, 0).unwrap_err();
            assert_eq!(error.to_string(), "the host does not say");
            pending.end_pass();
            assert_eq!((pending.count(), pending.take_all(None).unwrap().count()), (100, 100));
        });
    }

    #[test]
    fn no_sender_skips_a_region_whose_span_another_sender_examines() {
        let senders = || {
            // One span, with one page in a chunk of each sender.
            let region = Region { id: RegionId(0), gpa: Gpa(0), len: 2000 << 12 };
            let layout = Layout::new(vec![region]).unwrap();
            let mut pages = PageSet::empty(&layout);
            let map = pages.region_mut(RegionId(0)).unwrap();
            assert_eq!([3, 600].map(|page| map.set(page)), [false; 2]);
            let memory = Arc::new(Touched { layout, pages, asked: std::sync::Mutex::default() });
            let mut pending = PendingPages::everything(memory.layout());
            let takers = Takers::Senders(Division { chunk_pages: 512, channels: 2 });
            let pass = pending.begin_pass(Some(&(Arc::clone(&memory) as _)), takers);
            let sender = |index| {
                let pass = Arc::clone(&pass);
                shuttle::thread::spawn(move || {
                    let (mut mine, mut from, mut pages) = (Bitmap::new(2000), 0, 0);
                    while pass.has(0, PageTurn::First)
                        && let Some((chunk, map)) =
                            pass.next_chunk(0, PageTurn::First, from, index, &mut mine).unwrap()
                    {
                        (from, pages) = (chunk.end, pages + map.count_range(chunk));
                    }
                    pages
                })
            };
            let taken = [0, 1].map(sender).map(|sender| sender.join().unwrap());
            assert_eq!(taken, [1, 1]);
        };
        shuttle::check_random(senders, 300);
    }

    #[test]
    fn each_touched_page_is_taken_once_by_senders_and_the_driver() {
        let senders_and_driver = || {
            let touched = [(0, 3), (0, 600), (0, SPAN_PAGES), (1, 2)];
            let memory = Touched::new(&touched);
            let mut pending = PendingPages::everything(memory.layout());
            let pass = pending.begin_pass(Some(&(Arc::clone(&memory) as _)), Takers::SHARED);
            let lens = [LONG, 70];
            let sender = |_| {
                let pass = Arc::clone(&pass);
                shuttle::thread::spawn(move || {
                    let taken = [0, 1].map(|position| take_region(&pass, position, lens[position]).0);
                    taken.map(|pages| pages.len()).iter().sum::<usize>()
                })
            };
            let senders = [0, 1].map(sender);
            // The driver postpones the first pages, as for a guest that reports free pages.
            pass.examine(0, 0..64).unwrap();
            let postponed = pass.take_64(0, PageTurn::First, 0, u64::MAX);
            pass.postpone(0, 0, postponed);
            let by_senders: usize = senders.into_iter().map(|sender| sender.join().unwrap()).sum();
            assert_eq!(by_senders + postponed.count_ones() as usize, touched.len());
            assert_eq!(pass.take_untouched(), LONG + 70 - 4);
            assert_eq!(memory.asked.lock().unwrap().len(), 4);
            pending.end_pass();
            assert_eq!(pending.count(), u64::from(postponed.count_ones()));
        };
        shuttle::check_random(senders_and_driver, 300);
    }

    #[test]
    fn channel_finds_its_pages_while_another_channel_examines_them() {
        let channels = || {
            let memory = Touched::new(&[(1, 2), (1, 66)]);
            let mut pending = PendingPages::everything(memory.layout());
            // Each channel has one chunk of the region.
            let takers = Takers::Senders(Division { chunk_pages: 64, channels: 2 });
            let pass = pending.begin_pass(Some(&(Arc::clone(&memory) as _)), takers);
            let sender = |index| {
                let pass = Arc::clone(&pass);
                shuttle::thread::spawn(move || {
                    let mut mine = Bitmap::new(70);
                    let next = |mine| pass.next_chunk(1, PageTurn::First, 0, index, mine).unwrap().is_some();
                    pass.has(1, PageTurn::First) && next(&mut mine)
                })
            };
            for sender in [0, 1].map(sender) {
                assert!(sender.join().unwrap(), "each channel sends a page");
            }
        };
        shuttle::check_random(channels, 300);
    }
}
