//! The guest's memory on the source, the thread that sends it, and the threads that answer requests
//! for it.

use super::Flaw;
use super::step::{Step, StepFault};
use super::world::{Cargo, DAMAGED, Job, has, pages, take};
use std::time::Duration;
use vmferry_protocol::source::Event;

impl Step<'_> {
    /// Writes a page on the source, as the guest or the VMM.
    pub(super) fn write(&mut self, page: usize) {
        let source = &mut self.world.source;
        source.memory[page] += 1;
        if has(source.protected, page) {
            source.protected &= !(1 << page);
            source.marked |= 1 << page;
        }
    }

    /// Harvests like KVM's log: marks stay until the page is protected.
    pub(super) fn harvest(&mut self) -> Event {
        let (late, lost) = (self.flaw(Flaw::HarvestsBeforeSaving), self.flaw(Flaw::LosesPage));
        let early = self.flaw(Flaw::HarvestsBeforePause);
        let source = &mut self.world.source;
        source.pending |= std::mem::take(&mut source.in_pass);
        let marked = if lost { source.marked & !1 } else { source.marked };
        if !(early && source.paused) {
            source.pending |= marked;
        }
        let count = source.pending.count_ones();
        let last_live = !source.paused && source.live_passes >= self.model.bounds.passes && !source.timed_out;
        if last_live {
            self.tell_of_timeout();
        }
        if late && self.world.source.paused {
            self.save();
        }
        Event::Harvested { pages: count.into(), writers: Vec::new() }
    }

    /// Performs the next step of the sending thread.
    pub(super) fn send_pages(&mut self) {
        match self.world.source.job {
            Some(Job::Pages { pass, hand: Some((page, read)), told }) => {
                if read.is_some() {
                    self.protect(page);
                }
                self.world.source.job = Some(Job::Pages { pass, hand: None, told });
                self.enqueue_page(page, read.unwrap_or(self.world.source.memory[page]), false);
            }
            Some(Job::Pages { pass, hand: None, told }) => {
                let in_pass = self.world.source.in_pass;
                let Some(page) = pages(in_pass).next() else { return self.pass_sent(pass, told) };
                // Flaw: the end of the pass overtakes its last page.
                let told = in_pass.count_ones() == 1 && self.flaw(Flaw::AcknowledgedEarly);
                if told {
                    self.enqueue(Cargo::Barrier(pass), false);
                }
                take(&mut self.world.source.in_pass, page);
                let read = self.flaw(Flaw::ProtectsLate).then_some(self.world.source.memory[page]);
                if read.is_none() {
                    self.protect(page);
                }
                self.world.source.job = Some(Job::Pages { pass, hand: Some((page, read)), told });
            }
            Some(Job::Digests { pass, of }) => {
                self.enqueue(Cargo::Digests { of, contents: self.world.source.memory }, false);
                self.pass_sent(pass, false);
            }
            Some(Job::Remaining { pass }) => match pages(self.world.source.claims.unwrap_or(0)).next() {
                Some(page) => {
                    self.claim(page);
                    self.enqueue_page(page, self.world.source.memory[page], false);
                }
                None => self.pass_sent(pass, false),
            },
            None => {}
        }
    }

    fn protect(&mut self, page: usize) {
        let source = &mut self.world.source;
        source.protected |= 1 << page;
        source.marked &= !(1 << page);
    }

    fn pass_sent(&mut self, pass: u32, told: bool) {
        if !told {
            self.enqueue(Cargo::Barrier(pass), false);
        }
        self.world.source.job = None;
        self.tell_source(
            Duration::ZERO,
            Event::PassSent { bytes: 0, listing: Duration::ZERO, held: Duration::ZERO },
        );
    }

    fn enqueue_page(&mut self, page: usize, content: u8, urgent: bool) {
        let damaged = self.injects(StepFault::Damage);
        self.enqueue(Cargo::Page { page, content: if damaged { DAMAGED } else { content } }, urgent);
    }

    fn enqueue(&mut self, cargo: Cargo, urgent: bool) {
        let link = self.source_link();
        if !link.dead() && !link.pages_cut {
            if urgent { &mut link.urgent } else { &mut link.bulk }.push_back(cargo);
        }
    }

    fn claim(&mut self, page: usize) -> bool {
        self.world.source.claims.as_mut().is_some_and(|claims| take(claims, page))
    }

    /// Begins to serve requests.
    pub(super) fn serve(&mut self) {
        if self.world.source.claims.is_none() {
            return;
        }
        self.world.source.serving = true;
        for (page, again) in std::mem::take(&mut self.world.source.early) {
            self.requested(page, again);
        }
    }

    pub(super) fn requested(&mut self, page: usize, again: bool) {
        if !self.world.source.serving {
            self.world.source.early.push((page, again));
            return;
        }
        let planted = self.flaw(Flaw::OlderOverNewer) || self.flaw(Flaw::SendsTwice);
        if self.claim(page) || again || planted {
            self.enqueue_page(page, self.world.source.memory[page], true);
        }
    }
}
