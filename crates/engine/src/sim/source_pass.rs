//! Host of the source in the simulation: the content of passes.

use super::source_host::Job;
use super::source_postcopy::{REGION, flags, set_of};
use super::world::{Defect, World};
use crate::source::pending::{PageTurn, Takers};
use crate::source::sender::PassKind;
use vmferry_protocol::source::{Event, Pass};

impl World {
    pub(super) fn harvest(&mut self) -> Event {
        self.stop_free_page_requests();
        self.source.pending.end_pass();
        let next = self.source.pending.next().region_mut(REGION).expect("the one region");
        self.memory.harvest(next);
        if self.defect == Defect::LostPage && self.rng.per_mille(200) {
            next.test_and_clear(self.rng.below(next.len()));
        }
        if self.source.paused {
            self.skip_free();
        }
        Event::Harvested { pages: self.source.pending.count(), writers: Vec::new() }
    }

    pub(super) fn begin_pass(&mut self, number: u32, pass: Pass) -> Option<Event> {
        let pages = self.memory.pages.len();
        let (digests, first) = (pass == Pass::Digests, pass == Pass::Dirty { first: true });
        let kind = match pass {
            Pass::Dirty { first: true } => Some(PassKind::First),
            Pass::Dirty { first: false } => Some(PassKind::Later),
            Pass::Again(_) => Some(PassKind::Again),
            Pass::Digests => None,
        };
        let again = kind == Some(PassKind::Again);
        if let Some(kind) = kind {
            self.versions_begin_pass(kind);
        }
        let mut compared = vec![false; pages];
        let taken = match pass {
            Pass::Dirty { .. } => Some(self.source.pending.begin_pass(None, Takers::SHARED)),
            Pass::Again(runs) => {
                let named =
                    |page: u64| runs.iter().any(|run| (run.first..run.first + run.count).contains(&page));
                let set: Vec<bool> = (0..pages as u64).map(named).collect();
                Some(self.source.pending.begin_repeat(set_of(&set), Takers::SHARED))
            }
            Pass::Digests => {
                // Missing pages are compared when they arrive. Skipped pages are never compared.
                let left_out = flags(self.source.pending.skipped());
                let missing = self.source.claims.clone().unwrap_or_else(|| vec![false; pages]);
                for page in 0..pages {
                    compared[page] = !left_out[page] && !missing[page];
                }
                None
            }
        };
        let channels = self.source.jobs.len();
        self.source.inbox.pass_given_to(channels);
        self.source.bytes = 0;
        for (channel, job) in self.source.jobs.iter_mut().enumerate() {
            let left = (0..pages).filter(|page| compared[*page] && page % channels == channel).collect();
            let pages = taken.clone();
            *job = Job { pass: number, digests, first, again, left, pages, active: true, ..Job::default() };
        }
        if first && !self.source.paused && !self.source.free_pages_wait.is_zero() {
            self.request_free_pages();
            self.hold_pass();
            return None;
        }
        self.start_senders();
        if digests {
            let pages = compared.iter().filter(|compared| **compared).count() as u64;
            return Some(Event::Comparing { pages });
        }
        self.request_free_pages();
        None
    }

    /// Returns the next pages of a channel's share, at most `most`. Pages at the end of the pass
    /// come only after all others.
    pub(super) fn next_pages(&mut self, channel: usize, most: usize) -> Vec<usize> {
        let channels = self.source.jobs.len();
        let job = &mut self.source.jobs[channel];
        let Some(pages) = &job.pages else {
            return job.left.drain(..most.min(job.left.len())).collect();
        };
        let moved = if self.defect == Defect::SharesPages { job.pass as usize } else { 0 };
        let channel = (channel + moved) % channels;
        let mut next = Vec::new();
        for turn in [PageTurn::First, PageTurn::Last] {
            for page in (channel..self.memory.pages.len()).step_by(channels) {
                if next.len() < most && pages.take_64(0, turn, 0, 1 << page) != 0 {
                    next.push(page);
                }
            }
        }
        next
    }
}
