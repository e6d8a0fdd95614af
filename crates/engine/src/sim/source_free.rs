//! Free pages in the simulation: the production code that skips them, and a simulated guest.

use super::guest::{Freedom, Memory};
use super::rng::Rng;
use super::source_postcopy::REGION;
use super::world::{Defect, Item, World};
use crate::source::answer_wait::AnswerWait;
#[cfg(test)]
use crate::source::skip::Flaw;
use crate::source::skip::{Next, Skipping};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    Answer, AnswerMode, FreePages, FreeReport, PageIndex, PageRun, Protect, RegionId, VmError,
};

/// Free-page source of the simulated guest.
#[derive(Debug)]
struct Source {
    answer_mode: AnswerMode,
    freedom: Arc<Mutex<Freedom>>,
    /// Randomness for false reports.
    rng: Rng,
    requested: Option<u64>,
}

impl Source {
    fn freedom(&self) -> MutexGuard<'_, Freedom> {
        self.freedom.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(report: &mut FreeReport, pages: &[usize]) {
    pages.iter().for_each(|page| report.add(REGION, PageRun::new(PageIndex(*page as u64), 1)));
}

impl FreePages for Source {
    fn answer_mode(&self) -> AnswerMode {
        self.answer_mode
    }

    fn request(&mut self, question: u64) -> Result<(), VmError> {
        if self.rng.per_mille(10) {
            return Err(VmError::new("the guest does not answer"));
        }
        self.requested = Some(question);
        self.freedom().open = Some(question);
        Ok(())
    }

    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        if self.rng.per_mille(5) {
            return Err(VmError::new("the guest makes no sense"));
        }
        if self.rng.per_mille(100) {
            // Memory that does not exist.
            report.add(RegionId(7), PageRun::from(0..u64::MAX));
            report.add(REGION, PageRun::from(u64::MAX - 1..u64::MAX));
        }
        if self.answer_mode == AnswerMode::AtOnce {
            let Some(question) = self.requested.take() else { return Ok(None) };
            let freedom = Arc::clone(&self.freedom);
            let mut freedom = freedom.lock().unwrap_or_else(PoisonError::into_inner);
            let all = 0..freedom.free.len();
            add(report, &freedom.look(&mut self.rng, all));
            return Ok(Some(Answer { question, complete: true }));
        }
        let mut freedom = self.freedom();
        if freedom.said.is_empty() {
            return Ok(None);
        }
        let (question, pages, complete) = freedom.said.remove(0);
        add(report, &pages);
        Ok(Some(Answer { question, complete }))
    }

    fn stop(&mut self) {
        self.freedom().open = None;
        self.requested = None;
    }
}

/// Protecting part of the tracker.
struct Tracker<'a>(Mutex<&'a mut Memory>);

impl Protect for Tracker<'_> {
    fn chunk_pages(&self) -> u64 {
        64
    }

    fn protect(&self, _: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for page in pages.bits_in(chunk.range()) {
            memory.protect(usize::try_from(page).expect("a few pages"));
        }
        Ok(())
    }
}

/// Returns a free-page source, in most runs.
pub(super) fn skipping(
    rng: &mut Rng,
    memory: &Memory,
    #[cfg_attr(not(test), expect(unused))] defect: Defect,
) -> Option<Skipping> {
    let answer_mode = match rng.below(5) {
        0 => return None,
        1..=2 => AnswerMode::AtOnce,
        _ => AnswerMode::ByGuest,
    };
    let source =
        Source { answer_mode, freedom: memory.share_freedom(), rng: Rng::new(rng.next()), requested: None };
    let skipping = Skipping::new(Box::new(source), &super::source_host::layout(memory.pages.len()));
    #[cfg(test)]
    let skipping = flawed(skipping, defect);
    Some(skipping)
}

#[cfg(test)]
fn flawed(mut skipping: Skipping, defect: Defect) -> Skipping {
    skipping.flaw = match defect {
        Defect::AsksFirst => Flaw::AsksFirst,
        Defect::ProtectsAfterAsking => Flaw::ProtectsLate,
        Defect::ProtectsSent => Flaw::ProtectsSent,
        Defect::TakesLateAnswers => Flaw::TakesLate,
        Defect::SettlesEarly => Flaw::SettlesEarly,
        _ => Flaw::None,
    };
    skipping
}

impl World {
    /// Begins the questions of a pass.
    pub(super) fn request_free_pages(&mut self) {
        if !self.source.paused
            && let (Some(skipping), Some(pass)) = (&mut self.source.skipping, self.source.pending.pass())
        {
            skipping.begin(pass);
            self.skip_later();
        }
    }

    fn skip_later(&mut self) {
        let delay = self.rng.latency(60);
        self.at(delay, Item::SkipStep);
    }

    /// Performs a step of the free-page code when the driver has time.
    pub(super) fn skip_step(&mut self) {
        if self.source.ended() {
            return;
        }
        // The driver performs one action at a time.
        if self.source.action_queue.is_under_way() {
            return self.skip_later();
        }
        let Some(skipping) = &mut self.source.skipping else { return };
        let tracker = Tracker(Mutex::new(&mut self.memory));
        let (_, next) = skipping.step(&mut self.source.pending, &tracker);
        if next != Next::Nothing {
            self.skip_later();
        }
        self.check_held();
    }

    /// Holds the pages of the pass back if the guest has to answer. Otherwise starts the senders.
    pub(super) fn hold_pass(&mut self) {
        let (now, awaited) = (Duration::from_micros(self.now), self.awaits_guest());
        self.source.held = AnswerWait::begin(now, self.source.free_pages_wait, awaited);
        if self.source.held.is_none() {
            self.start_senders();
        }
    }

    /// Starts the senders of a pass that was held back, once its wait is over. While the guest has
    /// to answer, there is always a next step that calls this function.
    fn check_held(&mut self) {
        let (now, awaited) = (Duration::from_micros(self.now), self.awaits_guest());
        if let Some(wait) = self.source.held.take_if(|wait| wait.left(now, awaited).is_none()) {
            self.source.held_for = wait.waited(now);
            self.source.answered |= !awaited;
            self.start_senders();
        }
    }

    fn awaits_guest(&self) -> bool {
        self.source.skipping.as_ref().is_some_and(Skipping::awaits_guest)
    }

    pub(super) fn stop_free_page_requests(&mut self) {
        if let Some(skipping) = &mut self.source.skipping {
            skipping.close();
        }
    }

    pub(super) fn skip_free(&mut self) {
        if let Some(skipping) = &mut self.source.skipping {
            skipping.skip_free(&mut self.source.pending);
        }
    }

    /// The guest answers the question, or a part of it, or repeats an answer to an earlier
    /// question.
    pub(super) fn guest_answers(&mut self) {
        let next = 1 + self.rng.below(if self.now < 200_000 { 400 } else { 100_000 });
        self.at(next, Item::GuestAnswers);
        let mut freedom = self.memory.freedom();
        if !self.source.running || freedom.said.len() > 8 {
            return;
        }
        let Some(question) = freedom.open else { return };
        let count = freedom.free.len();
        let from = self.rng.index(count);
        let range = if self.rng.per_mille(500) { 0..count } else { from..count };
        let pages = freedom.look(&mut self.rng, range);
        let complete = self.rng.per_mille(700);
        freedom.said.push((question, pages, complete));
    }
}
