//! Skipping of the pages of a pass that the guest reports as free. This is the driver's part of the
//! algorithm that [`crate::free`] describes and proves.

use super::pending::{PageTurn, PassPages, PendingPages};
use crate::report::FreePagesFigures;
use crate::vm::protect_run;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    Answer, AnswerMode, FreePages, FreeReport, Layout, PageRun, PageSet, Protect, RegionId, VmError,
};

/// Number of pages that are protected before the driver returns to its other work: 256 MiB, which
/// takes about a millisecond.
const BURST_PAGES: u64 = 1 << 16;
/// Number of chunks that are examined before the driver returns to its other work. If no page in
/// them needs protection, this takes about a millisecond.
const BURST_CHUNKS: u64 = 1 << 14;
/// Minimum number of pages that are postponed between two questions of a pass to a source of free
/// pages that answers at once. The number is also at least an eighth of memory, so that the
/// questions cost next to nothing.
const ROUND_PAGES: u64 = BURST_PAGES;
/// Divisor of the size of memory: the guest is asked only in passes over at least this fraction of
/// its memory.
///
/// A smaller pass would end before the guest has walked its free lists. Walking takes 3 ms/GiB,
/// protecting all pages before that takes 5 ms/GiB, and sending one 32nd of a GiB takes 10 ms at 3
/// GB/s.
const WORTH_REQUESTING: u64 = 32;

/// Position of the driver in the pass's pages: position of the region, and page.
type Cursor = (usize, u64);

/// State of the questions of a pass. A guest that answers the questions itself is not asked the
/// first question, because all of its pages are candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// No question is open.
    Idle,
    /// The first question is open: which pages may be free? These pages are the candidates.
    Requesting,
    /// The candidates are being protected and postponed, from this position on.
    Postponing(Cursor),
    /// The second question is open: which postponed pages are still free? The pages from this
    /// position on are postponed afterwards.
    Confirming(Cursor),
}

/// Time of the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The next step can be done at once.
    Now,
    /// The next step can be done when the guest has had time to answer.
    Soon,
    /// There is no further step in this pass.
    Nothing,
}

/// Asks which pages are free, and skips these pages.
#[derive(Debug)]
pub(crate) struct Skipping {
    source: Box<dyn FreePages>,
    state: State,
    /// Number of the latest question.
    question: u64,
    /// True if the source of free pages has failed. It is not asked again.
    failed: bool,
    /// Pages that the current poll returned.
    report: FreeReport,
    /// Candidates: the pages that are worth being protected and postponed.
    worth: Candidates,
    /// Scratch bitmap of a region: the pages of a chunk that are being protected.
    mine: Bitmap,
    /// Pages postponed since the last question.
    round: u64,
    /// Time of the first question of the migration.
    requested: Option<Instant>,
    figures: FreePagesFigures,
    #[cfg(test)]
    pub(crate) flaw: Flaw,
}

/// Pages that are worth being protected and postponed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Candidates {
    /// All pages, because the guest answers once, after they are protected.
    All,
    /// The pages that an answer named.
    Named(PageSet),
}

impl Candidates {
    /// Returns those of the 64 pages from page `64 * at` on that are candidates.
    fn word(&self, region: RegionId, at: u64) -> u64 {
        match self {
            Self::All => u64::MAX,
            Self::Named(pages) => pages.region(region).map_or(0, |map| map.word(index(at))),
        }
    }

    /// Returns the candidates of the regions of `like`.
    #[cfg(test)]
    pub(crate) fn pages(&self, like: &PageSet) -> PageSet {
        let Self::Named(pages) = self else {
            let mut all = like.empty_like();
            all.iter_mut().for_each(|(_, map)| map.set_range(0..map.len()));
            return all;
        };
        pages.clone()
    }

    /// Returns the first candidate at or after `page` of a region, or a page before it.
    fn next(&self, region: RegionId, page: u64) -> Option<u64> {
        match self {
            Self::All => Some(page),
            Self::Named(pages) => pages.region(region)?.next_set(page),
        }
    }
}

/// Planted defect, for tests that show that the order matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Flaw {
    None,
    /// Pages are skipped by the answer to a question that was asked before they were protected.
    AsksFirst,
    /// Pages are protected only after the answer by which they are skipped has arrived.
    ProtectsLate,
    /// Pages are protected that a sender may have taken or sent.
    ProtectsSent,
    /// An answer is used after the pass of its question has ended.
    TakesLate,
    /// An answer from before the pause is used when the guest is paused.
    SettlesEarly,
}

/// State of `Skipping` between two steps of a model.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SkippingState {
    pub(crate) state: State,
    pub(crate) question: u64,
    pub(crate) worth: Candidates,
    pub(crate) round: u64,
}

impl Skipping {
    pub(crate) fn new(source: Box<dyn FreePages>, layout: &Layout) -> Self {
        Self {
            source,
            state: State::Idle,
            question: 0,
            failed: false,
            report: FreeReport::new(layout),
            worth: Candidates::Named(PageSet::empty(layout)),
            mine: Bitmap::new(0),
            round: 0,
            requested: None,
            figures: FreePagesFigures::default(),
            #[cfg(test)]
            flaw: Flaw::None,
        }
    }

    /// Returns true if the guest is to be asked in a pass over `pages` of the `all` pages of its
    /// memory.
    pub(crate) fn asks(&self, pages: u64, all: u64) -> bool {
        match self.source.answer_mode() {
            _ if self.failed => false,
            AnswerMode::AtOnce => pages > 0,
            AnswerMode::ByGuest => pages >= (all / WORTH_REQUESTING).max(1),
        }
    }

    /// Begins the questions of a pass. The senders have the pages of the pass and do not wait for
    /// an answer. If the senders alone take the pages, no question is asked.
    pub(crate) fn begin(&mut self, pass: &PassPages) {
        self.close();
        let all: u64 = pass.regions().map(|(.., pages)| pages).sum();
        if !pass.is_shared() || !self.asks(pass.pages(), all) {
            return;
        }
        match self.source.answer_mode() {
            AnswerMode::AtOnce if self.request() => {
                self.worth = Candidates::Named(self.report.pages().empty_like());
                self.state = State::Requesting;
            }
            AnswerMode::AtOnce => {}
            AnswerMode::ByGuest => {
                // For a guest that answers itself, a question is expensive, and the guest's driver
                // may not name a page twice. Therefore such a guest is asked only once, after all
                // pages are protected.
                self.worth = Candidates::All;
                self.round = 0;
                self.state = State::Postponing((0, 0));
                #[cfg(test)]
                if self.flaw == Flaw::AsksFirst {
                    self.request();
                }
            }
        }
    }

    /// Continues for about a millisecond. Returns the number of pages that were skipped, and the
    /// time of the next step.
    pub(crate) fn step(&mut self, pending: &mut PendingPages, protect: &dyn Protect) -> (u64, Next) {
        let Some(pass) = pending.pass().cloned() else { return (0, Next::Nothing) };
        match self.state {
            State::Idle => (0, Next::Nothing),
            State::Requesting => (0, self.receive_candidates(&pass)),
            State::Postponing(at) => match self.postpone(&pass, at, protect) {
                Ok(next) => (0, next),
                Err(error) => (0, self.give_up(&error)),
            },
            State::Confirming(at) => self.receive_confirmed(&pass, pending, at, protect),
        }
    }

    /// Drops the open question, because the pass has ended or the guest is about to be paused. A
    /// later answer is not used.
    pub(crate) fn close(&mut self) {
        if self.state != State::Idle {
            self.state = State::Idle;
            self.source.stop();
        }
    }

    /// Skips the pages that are free now, if the source of free pages answers at once. Returns the
    /// number of skipped pages.
    ///
    /// The guest must be paused, and all its writes must be harvested.
    pub(crate) fn skip_free(&mut self, pending: &mut PendingPages) -> u64 {
        self.close();
        #[cfg(test)]
        if self.flaw == Flaw::SettlesEarly {
            return pending.skip(&self.worth.pages(self.report.pages()));
        }
        if self.source.answer_mode() != AnswerMode::AtOnce {
            return 0;
        }
        // Because the question comes after the harvest, harvested pages can be skipped, too.
        if pending.count() == 0 || !self.request() {
            return 0;
        }
        self.state = State::Requesting;
        let received = self.receive();
        self.close();
        if received.is_none_or(|answer| !answer.complete) {
            return 0;
        }
        pending.skip(self.report.pages())
    }

    /// Returns true while the guest itself still has to answer a question of the pass.
    pub(crate) fn awaits_guest(&self) -> bool {
        self.state != State::Idle && self.source.answer_mode() == AnswerMode::ByGuest
    }

    /// Notes that the pages of a pass were held back for `time`.
    pub(crate) fn held_back(&mut self, time: Duration) {
        self.figures.waited_ms += ms(time);
    }

    pub(crate) fn figures(&self) -> FreePagesFigures {
        self.figures.clone()
    }

    /// Recreates the state of an earlier `Skipping`, for a model that keeps it elsewhere between
    /// two steps.
    #[cfg(test)]
    pub(crate) fn resume(
        source: Box<dyn FreePages>,
        layout: &Layout,
        kept: &SkippingState,
        flaw: Flaw,
    ) -> Self {
        let SkippingState { state, question, worth, round } = kept.clone();
        Self { state, question, worth, round, flaw, ..Self::new(source, layout) }
    }

    #[cfg(test)]
    pub(crate) fn keep(self) -> SkippingState {
        SkippingState { state: self.state, question: self.question, worth: self.worth, round: self.round }
    }

    fn request(&mut self) -> bool {
        if self.failed {
            return false;
        }
        self.question += 1;
        self.figures.questions += 1;
        self.requested.get_or_insert_with(Instant::now);
        self.round = 0;
        let requested = self.source.request(self.question);
        requested.map_err(|error| self.give_up(&error)).is_ok()
    }

    fn give_up(&mut self, error: &VmError) -> Next {
        tracing::warn!("cannot ask the guest for its free pages, so they are sent: {error}");
        self.failed = true;
        self.state = State::Idle;
        self.source.stop();
        Next::Nothing
    }

    /// Polls for an answer into `self.report`. Returns the answer if it belongs to the open
    /// question.
    fn receive(&mut self) -> Option<Answer> {
        self.report.clear();
        #[cfg(test)]
        if self.flaw == Flaw::AsksFirst
            && matches!(self.state, State::Confirming(_))
            && self.source.answer_mode() == AnswerMode::AtOnce
        {
            let worth = self.worth.pages(self.report.pages());
            self.report.add_pages(&worth);
            return Some(Answer { question: self.question, complete: true });
        }
        let answer = match self.source.poll(&mut self.report) {
            Ok(answer) => answer?,
            Err(error) => {
                self.give_up(&error);
                return None;
            }
        };
        self.figures.reports += 1;
        self.figures.outside_pages = self.figures.outside_pages.saturating_add(self.report.outside());
        let first = self.requested.map(|requested| requested.elapsed());
        self.figures.first_answer_ms = self.figures.first_answer_ms.or(first.map(ms));
        if answer.question == self.question {
            return Some(answer);
        }
        self.figures.dropped_reports += 1;
        self.figures.late_reports += u64::from(answer.question < self.question);
        #[cfg(test)]
        if self.flaw == Flaw::TakesLate {
            return Some(answer);
        }
        None
    }

    fn receive_candidates(&mut self, pass: &PassPages) -> Next {
        let Some(answer) = self.receive() else { return self.unless_failed(Next::Soon) };
        if let Candidates::Named(worth) = &mut self.worth {
            worth.union(self.report.pages());
        }
        if !answer.complete {
            return Next::Soon;
        }
        self.state = State::Postponing((0, 0));
        if pass.regions().all(|(position, ..)| !pass.has(position, PageTurn::First)) {
            self.close();
            return Next::Nothing;
        }
        Next::Now
    }

    fn unless_failed(&self, next: Next) -> Next {
        if self.failed { Next::Nothing } else { next }
    }

    /// Protects candidates that no thread has taken, and moves them to the end of the pass.
    fn postpone(&mut self, pass: &PassPages, at: Cursor, protect: &dyn Protect) -> Result<Next, VmError> {
        let size = protect.chunk_pages().max(64);
        let (mut pages, mut chunks) = (0, 0);
        let round = match self.source.answer_mode() {
            AnswerMode::AtOnce => ROUND_PAGES.max(pass.regions().map(|(.., pages)| pages).sum::<u64>() / 8),
            AnswerMode::ByGuest => u64::MAX,
        };
        for (position, id, len) in pass.regions().skip(at.0) {
            let mut first = if position == at.0 { at.1 } else { 0 };
            while let Some(page) = self.next_candidate(pass, (position, id), first)? {
                first = page / size * size;
                if self.round >= round {
                    return Ok(self.confirm((position, first)));
                }
                if pages >= BURST_PAGES || chunks >= BURST_CHUNKS {
                    self.state = State::Postponing((position, first));
                    return Ok(Next::Now);
                }
                let chunk = PageRun::from(first..(first + size).min(len));
                let postponed = self.postpone_chunk(pass, (position, id, len), chunk, protect)?;
                (pages, chunks, first) = (pages + postponed, chunks + 1, first + size);
                self.round += postponed;
            }
        }
        Ok(self.confirm((usize::MAX, 0)))
    }

    /// Returns the first page of a region at or after `from` that may be a candidate and await its
    /// first turn.
    fn next_candidate(
        &self,
        pass: &PassPages,
        (position, id): (usize, RegionId),
        mut from: u64,
    ) -> Result<Option<u64>, VmError> {
        loop {
            let Some(page) = self.worth.next(id, from) else { return Ok(None) };
            let Some(waiting) = pass.next_page(position, PageTurn::First, page)? else { return Ok(None) };
            // The next block of the pass may have no candidate.
            if waiting == page || self.worth.next(id, waiting) == Some(waiting) {
                return Ok(Some(waiting));
            }
            from = waiting;
        }
    }

    fn postpone_chunk(
        &mut self,
        pass: &PassPages,
        (position, id, len): (usize, RegionId, u64),
        chunk: PageRun,
        protect: &dyn Protect,
    ) -> Result<u64, VmError> {
        let words = chunk.first.0 / 64..chunk.end().div_ceil(64);
        if self.mine.len() != len {
            self.mine = Bitmap::new(len);
        }
        pass.examine(position, chunk.range())?;
        let mut pages = 0;
        for at in words.clone() {
            let wanted = self.worth.word(id, at);
            let taken =
                if wanted == 0 { 0 } else { pass.take_64(position, PageTurn::First, at * 64, wanted) };
            pages += u64::from(taken.count_ones());
            self.mine.union_word(index(at), taken);
        }
        if pages == 0 {
            return Ok(0);
        }
        // The pages are in no set now, and no other thread protects or reads them. They are
        // returned even if the protection fails. A tracker that need not protect them would only
        // discard writes to pages that are not read next, so it is not asked.
        let protect_mine = || match protect.is_needed() {
            true => protect_run(protect, id, chunk, &self.mine),
            false => Ok(()),
        };
        #[cfg(not(test))]
        let protected = protect_mine();
        #[cfg(test)]
        let protected = match self.flaw {
            Flaw::ProtectsLate => Ok(()),
            Flaw::ProtectsSent => match &self.worth {
                Candidates::All => protect.protect(id, chunk, &Bitmap::full(len)),
                Candidates::Named(worth) => protect.protect(id, chunk, worth.region(id).unwrap()),
            },
            _ => protect_mine(),
        };
        for at in words {
            pass.postpone(position, at * 64, self.mine.word(index(at)));
        }
        self.mine.clear_range(chunk.range());
        self.figures.postponed_pages += pages;
        protected.map(|()| pages)
    }

    /// Asks which pages are free, now that the candidates are protected. Only this answer may skip
    /// pages.
    fn confirm(&mut self, rest: Cursor) -> Next {
        if self.round == 0 {
            self.close();
            return Next::Nothing;
        }
        #[cfg(test)]
        let unrequested = self.flaw == Flaw::AsksFirst;
        #[cfg(not(test))]
        let unrequested = false;
        if !(unrequested || self.request()) {
            return Next::Nothing;
        }
        self.state = State::Confirming(rest);
        Next::Now
    }

    fn receive_confirmed(
        &mut self,
        pass: &PassPages,
        pending: &mut PendingPages,
        rest: Cursor,
        protect: &dyn Protect,
    ) -> (u64, Next) {
        let Some(answer) = self.receive() else { return (0, self.unless_failed(Next::Soon)) };
        #[cfg(not(test))]
        let _ = protect;
        #[cfg(test)]
        if self.flaw == Flaw::ProtectsLate {
            for (_, id, len) in pass.regions() {
                let _ = protect.protect(id, PageRun::from(0..len), self.report.pages().region(id).unwrap());
            }
        }
        let mut pages = 0;
        for (position, id, _) in pass.regions() {
            let Some(free) = self.report.pages().region(id).filter(|_| pass.has(position, PageTurn::Last))
            else {
                continue;
            };
            let words = free.word_parts().flat_map(|(first, words)| (first as u64..).zip(words));
            for (at, wanted) in words.filter(|(_, wanted)| **wanted != 0) {
                let taken = pass.take_64(position, PageTurn::Last, at * 64, *wanted);
                if taken != 0 {
                    pending.mark_skipped(position, at * 64, taken);
                    pages += u64::from(taken.count_ones());
                }
            }
        }
        if !answer.complete {
            return (pages, Next::Soon);
        }
        if rest.0 == usize::MAX {
            self.close();
            return (pages, Next::Nothing);
        }
        self.state = State::Postponing(rest);
        (pages, Next::Now)
    }
}

fn index(word: u64) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
