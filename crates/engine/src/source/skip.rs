//! Leaving out of a pass what the guest says is free: the driver's part of [`crate::free`], which has the argument.

use super::pending::{PassPages, PendingPages, Turn};
use crate::report::FreePagesFigures;
use crate::vm::protect_run;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{Answer, Answers, FreePages, FreeReport, Layout, PageRun, PageSet, Protect, VmError};

/// Pages that are protected before the driver looks after its other duties: 256 MiB, a millisecond or so.
const BURST_PAGES: u64 = 1 << 16;
/// Chunks that are looked at, likewise: with nothing to protect in them, a millisecond or so.
const BURST_CHUNKS: u64 = 1 << 14;
/// Between the questions to a guest's map within a pass lie at least so many pages, and an eighth of memory: reading the map then
/// costs next to nothing.
const ROUND_PAGES: u64 = BURST_PAGES;
/// A guest is not made to walk its free lists for a pass over less than this share of its memory, which would end before it is done:
/// walking takes 3 ms/GiB, protecting all before 5, and sending that share of a GiB 10 ms at 3 GB/s.
const WORTH_ASKING: u64 = 32;

/// Where in the pass's pages the driver is: a region by position, a page.
type Cursor = (usize, u64);

/// The questions of a pass. A guest that answers itself is not asked the first one: all pages are worth the trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// None is open.
    Idle,
    /// Which pages are worth the trouble?
    Asking,
    /// They are being protected and postponed.
    Postponing(Cursor),
    /// Which of them are free still? What lies behind the cursor is yet to be postponed.
    Confirming(Cursor),
}

/// When there is something to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// At once.
    Now,
    /// When the guest has had time to answer.
    Soon,
    /// In the next pass.
    Nothing,
}

/// Learns which pages are free, and leaves them out.
#[derive(Debug)]
pub(crate) struct Skipping {
    source: Box<dyn FreePages>,
    state: State,
    /// The number of the latest question.
    question: u64,
    /// The source has failed, and is asked no more.
    failed: bool,
    /// What was brought by the poll under way.
    report: FreeReport,
    /// The pages that are worth the trouble.
    worth: PageSet,
    /// Scratch: the pages of a chunk that are being protected, in a bitmap of the region.
    mine: Bitmap,
    /// Pages postponed since the last question.
    round: u64,
    /// When the first question of all was asked.
    asked: Option<Instant>,
    figures: FreePagesFigures,
    #[cfg(test)]
    pub(crate) flaw: Flaw,
}

/// A way to get the order wrong, for tests that show that it matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Flaw {
    None,
    /// Pages are left out by an answer that was asked for before they were protected.
    AsksFirst,
    /// Pages are protected when the answer by which they are left out has come.
    ProtectsLate,
    /// Pages are protected that a sender may have, or have sent.
    ProtectsSent,
    /// What comes after the end of the pass that it was asked for still counts.
    TakesLate,
    /// An answer from before the pause counts when the guest is paused.
    SettlesEarly,
}

/// Where it stands.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) state: State,
    pub(crate) question: u64,
    pub(crate) worth: PageSet,
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
            worth: PageSet::empty(layout),
            mine: Bitmap::new(0),
            round: 0,
            asked: None,
            figures: FreePagesFigures::default(),
            #[cfg(test)]
            flaw: Flaw::None,
        }
    }

    /// A pass has begun: its pages are with the senders, which wait for nothing here.
    pub(crate) fn begin(&mut self, pass: &PassPages) {
        self.close();
        let all: u64 = pass.regions().map(|(.., pages)| pages).sum();
        match self.source.answers() {
            _ if self.failed => {}
            Answers::AtOnce if pass.pages() > 0 && self.ask() => {
                self.worth.clear();
                self.state = State::Asking;
            }
            Answers::ByGuest if pass.pages() >= (all / WORTH_ASKING).max(1) => {
                // A question is dear to a guest that answers itself, and its driver may name what it has named once no more: it is
                // asked once, with all pages protected.
                self.worth.iter_mut().for_each(|(_, map)| map.set_range(0..map.len()));
                self.round = 0;
                self.state = State::Postponing((0, 0));
                #[cfg(test)]
                if self.flaw == Flaw::AsksFirst {
                    self.ask();
                }
            }
            _ => {}
        }
    }

    /// Goes on with what is to do, for a millisecond or so; returns how many pages were left out, and when it wants to go on.
    pub(crate) fn step(&mut self, pending: &mut PendingPages, protect: &dyn Protect) -> (u64, Next) {
        let Some(pass) = pending.pass().cloned() else { return (0, Next::Nothing) };
        match self.state {
            State::Idle => (0, Next::Nothing),
            State::Asking => (0, self.hear_candidates(&pass)),
            State::Postponing(at) => match self.postpone(&pass, at, protect) {
                Ok(next) => (0, next),
                Err(error) => (0, self.give_up(&error)),
            },
            State::Confirming(at) => self.hear_confirmed(&pass, pending, at, protect),
        }
    }

    /// The pass has ended, or the guest is about to be paused: no answer to the open question counts any more.
    pub(crate) fn close(&mut self) {
        if self.state != State::Idle {
            self.state = State::Idle;
            self.source.stop();
        }
    }

    /// The guest is paused, and everything was harvested: leaves out what is free now, if that can be known. Returns how many
    /// pages that were.
    pub(crate) fn settle(&mut self, pending: &mut PendingPages) -> u64 {
        self.close();
        #[cfg(test)]
        if self.flaw == Flaw::SettlesEarly {
            return pending.skip(&self.worth);
        }
        if self.source.answers() != Answers::AtOnce {
            return 0;
        }
        // The question comes after the harvest: what was harvested can be skipped, too.
        if pending.count() == 0 || !self.ask() {
            return 0;
        }
        self.state = State::Asking;
        let heard = self.hear();
        self.close();
        if heard.is_none_or(|answer| !answer.complete) {
            return 0;
        }
        pending.skip(self.report.pages())
    }

    pub(crate) fn figures(&self) -> FreePagesFigures {
        self.figures.clone()
    }

    /// Goes on from where another was, in a model that keeps that elsewhere between two steps.
    #[cfg(test)]
    pub(crate) fn resume(source: Box<dyn FreePages>, layout: &Layout, kept: &Kept, flaw: Flaw) -> Self {
        let Kept { state, question, worth, round } = kept.clone();
        Self { state, question, worth, round, flaw, ..Self::new(source, layout) }
    }

    #[cfg(test)]
    pub(crate) fn keep(self) -> Kept {
        Kept { state: self.state, question: self.question, worth: self.worth, round: self.round }
    }

    fn ask(&mut self) -> bool {
        if self.failed {
            return false;
        }
        self.question += 1;
        self.figures.questions += 1;
        self.asked.get_or_insert_with(Instant::now);
        self.round = 0;
        let asked = self.source.ask(self.question);
        asked.map_err(|error| self.give_up(&error)).is_ok()
    }

    fn give_up(&mut self, error: &VmError) -> Next {
        tracing::warn!("the guest's free pages are sent, because it cannot be known which they are: {error}");
        self.failed = true;
        self.state = State::Idle;
        self.source.stop();
        Next::Nothing
    }

    /// What has come, in `self.report`, if it is for the open question.
    fn hear(&mut self) -> Option<Answer> {
        self.report.clear();
        #[cfg(test)]
        if self.flaw == Flaw::AsksFirst
            && matches!(self.state, State::Confirming(_))
            && self.source.answers() == Answers::AtOnce
        {
            self.report.add_pages(&self.worth);
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
        let first = self.asked.map(|asked| asked.elapsed());
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

    fn hear_candidates(&mut self, pass: &PassPages) -> Next {
        let Some(answer) = self.hear() else { return self.unless_failed(Next::Soon) };
        self.worth.union(self.report.pages());
        if !answer.complete {
            return Next::Soon;
        }
        self.state = State::Postponing((0, 0));
        if pass.regions().all(|(position, ..)| !pass.has(position, Turn::First)) {
            self.close();
            return Next::Nothing;
        }
        Next::Now
    }

    fn unless_failed(&self, next: Next) -> Next {
        if self.failed { Next::Nothing } else { next }
    }

    /// Pages that nobody has begun with are protected, and have their turn last.
    fn postpone(&mut self, pass: &PassPages, at: Cursor, protect: &dyn Protect) -> Result<Next, VmError> {
        let size = protect.chunk_pages().max(64);
        let (mut pages, mut chunks) = (0, 0);
        let round = match self.source.answers() {
            Answers::AtOnce => ROUND_PAGES.max(pass.regions().map(|(.., pages)| pages).sum::<u64>() / 8),
            Answers::ByGuest => u64::MAX,
        };
        for (position, id, len) in pass.regions().skip(at.0) {
            let mut first = if position == at.0 { at.1 } else { 0 };
            while first < len {
                if self.round >= round {
                    return Ok(self.confirm((position, first)));
                }
                if pages >= BURST_PAGES || chunks >= BURST_CHUNKS {
                    self.state = State::Postponing((position, first));
                    return Ok(Next::Now);
                }
                let chunk = PageRun::from(first..(first + size).min(len));
                let postponed = self.postpone_chunk(pass, (position, id), chunk, protect)?;
                (pages, chunks, first) = (pages + postponed, chunks + 1, first + size);
                self.round += postponed;
            }
        }
        Ok(self.confirm((usize::MAX, 0)))
    }

    fn postpone_chunk(
        &mut self,
        pass: &PassPages,
        (position, id): (usize, vmferry_core::RegionId),
        chunk: PageRun,
        protect: &dyn Protect,
    ) -> Result<u64, VmError> {
        let Some(worth) = self.worth.region(id) else { return Ok(0) };
        let words = chunk.first.0 / 64..chunk.end().div_ceil(64);
        if self.mine.len() != worth.len() {
            self.mine = Bitmap::new(worth.len());
        }
        let mut pages = 0;
        for at in words.clone() {
            let wanted = word(worth, at);
            let taken = if wanted == 0 { 0 } else { pass.take_64(position, Turn::First, at * 64, wanted) };
            pages += u64::from(taken.count_ones());
            self.mine.union_word(index(at), taken);
        }
        if pages == 0 {
            return Ok(0);
        }
        // They are in no set now, and nobody else protects or reads them. Whatever comes of it they are given back.
        #[cfg(not(test))]
        let protected = protect_run(protect, id, chunk, &self.mine);
        #[cfg(test)]
        let protected = match self.flaw {
            Flaw::ProtectsLate => Ok(()),
            Flaw::ProtectsSent => protect.protect(id, chunk, worth),
            _ => protect_run(protect, id, chunk, &self.mine),
        };
        for at in words {
            pass.postpone(position, at * 64, word(&self.mine, at));
        }
        self.mine.clear_range(chunk.range());
        self.figures.put_off_pages += pages;
        protected.map(|()| pages)
    }

    /// Asks what counts, now that pages are protected.
    fn confirm(&mut self, rest: Cursor) -> Next {
        if self.round == 0 {
            self.close();
            return Next::Nothing;
        }
        #[cfg(test)]
        let unasked = self.flaw == Flaw::AsksFirst;
        #[cfg(not(test))]
        let unasked = false;
        if !(unasked || self.ask()) {
            return Next::Nothing;
        }
        self.state = State::Confirming(rest);
        Next::Now
    }

    fn hear_confirmed(
        &mut self,
        pass: &PassPages,
        pending: &mut PendingPages,
        rest: Cursor,
        protect: &dyn Protect,
    ) -> (u64, Next) {
        let Some(answer) = self.hear() else { return (0, self.unless_failed(Next::Soon)) };
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
            let Some(free) = self.report.pages().region(id).filter(|_| pass.has(position, Turn::Last)) else {
                continue;
            };
            for (at, wanted) in (0..).zip(free.words()).filter(|(_, wanted)| **wanted != 0) {
                let taken = pass.take_64(position, Turn::Last, at * 64, *wanted);
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

fn word(map: &Bitmap, at: u64) -> u64 {
    map.words().get(index(at)).copied().unwrap_or(0)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
