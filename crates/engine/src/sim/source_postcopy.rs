//! Host of the source from the handover on: missing pages are claimed and sent, over one set of
//! channels or several.

use super::link::{Cargo, Request};
use super::source_host::{Job, layout};
use super::world::{BULK, Defect, Item, TO_TARGET, World};
use crate::missing_pages::{CollectedPages, pieces};
use crate::source::encode::Versions;
use crate::source::postcopy::missing_pages;
use crate::source::{MigrationMode, UrgentPath};
use vmferry_core::{PageSet, RegionId};
use vmferry_protocol::source::Event;
use vmferry_wire::{RegionRun, ToTarget};

pub(super) const REGION: RegionId = RegionId(0);

/// Returns one flag for each page of the set.
pub(super) fn flags(set: &PageSet) -> Vec<bool> {
    let map = set.region(REGION).expect("the one region");
    (0..map.len()).map(|page| map.test(page)).collect()
}

pub(super) fn set_of(flags: &[bool]) -> PageSet {
    let mut set = PageSet::empty(&layout(flags.len()));
    let map = set.region_mut(REGION).expect("the one region");
    for (page, _) in (0..).zip(flags).filter(|(_, wanted)| **wanted) {
        map.set(page);
    }
    set
}

impl World {
    pub(super) fn hand_over(&mut self, also: &[RegionRun]) -> Event {
        let pages = self.memory.pages.len();
        if self.source.settings.mode == MigrationMode::Postcopy {
            self.skip_free();
        }
        let also = if self.defect == Defect::ForgetsSuspects { &[] } else { also };
        let pending = self.source.pending.take_all(None).expect("no memory is asked");
        let set = missing_pages(pending, &layout(pages), also).expect("honest names");
        self.source.pending.unskip(&set);
        for piece in pieces(&set) {
            if let Some(failed) = self.source_sends(ToTarget::Lacking(piece)) {
                return failed;
            }
        }
        self.source.claims = Some(flags(&set));
        self.serve();
        Event::HandedOver { pages: set.count(), skipped: self.source.pending.skipped_count() }
    }

    /// Begins to serve requests.
    pub(super) fn serve(&mut self) {
        if self.source.claims.is_none() {
            return;
        }
        self.source.serving = true;
        for (channel, request) in std::mem::take(&mut self.source.early) {
            self.requested(channel, request);
        }
    }

    pub(super) fn send_remaining(&mut self, number: u32) {
        if self.source.claims.is_none() {
            return;
        }
        if self.source.link == 0 {
            self.postcopy_begins();
        }
        self.source.inbox.pass_given_to(self.source.jobs.len());
        self.source.versions.iter_mut().for_each(Versions::end);
        for job in &mut self.source.jobs {
            *job = Job { pass: number, remaining: true, active: true, ..Job::default() };
        }
        self.start_senders();
    }

    fn bulk_at_work(&self) -> usize {
        self.source.jobs.iter().filter(|job| job.remaining && job.active).count()
    }

    fn claim(&mut self, page: usize) -> bool {
        let claims = self.source.claims.as_mut();
        claims.and_then(|claims| claims.get_mut(page)).is_some_and(std::mem::take)
    }

    /// Performs a step of a bulk thread: sends its claimed pages, then queued requests, and claims
    /// more.
    pub(super) fn remaining_step(&mut self, channel: usize) {
        let prepared = std::mem::take(&mut self.source.jobs[channel].prepared);
        if !prepared.is_empty() {
            let sent = prepared.into_iter().map(|page| self.read(page)).collect();
            self.transmit(BULK + channel, Cargo::Pages(sent));
        }
        while let Some((asked_on, request)) = self.source.queue.pop_front() {
            let stream = match self.source.settings.urgent {
                UrgentPath::Shared => BULK + channel,
                _ => self.streams.urgent(asked_on),
            };
            self.send_wanted(stream, request);
        }
        let most = 1 + self.rng.index(6);
        let claims = self.source.claims.as_deref().unwrap_or_default();
        let next: Vec<usize> = (0..claims.len()).filter(|page| claims[*page]).take(most).collect();
        if next.is_empty() {
            self.source.jobs[channel].active = false;
            self.transmit(BULK + channel, Cargo::Barrier(self.source.jobs[channel].pass));
            self.pass_done();
            return;
        }
        for page in next {
            let claimed = self.claim(page);
            self.promise(claimed, |_| "claimed twice".into());
            self.source.jobs[channel].prepared.push((page, self.memory.pages[page]));
        }
        let delay = self.rng.latency(400);
        self.at(delay, Item::SenderStep(self.source.link, channel));
    }

    /// Handles a request from an urgent channel.
    pub(super) fn requested(&mut self, channel: usize, request: Request) {
        if !self.source.serving {
            self.source.early.push((channel, request));
        } else if self.source.settings.urgent != UrgentPath::Dedicated && self.bulk_at_work() > 0 {
            self.source.queue.push_back((channel, request));
        } else {
            let delay = self.rng.latency(50);
            self.at(delay, Item::Urgent(self.source.link, channel, request));
        }
    }

    pub(super) fn send_urgent(&mut self, link: usize, channel: usize, request: Request) {
        if link == self.source.link && !self.source.ended() && self.source.serving {
            if self.source.dead[self.streams.bulk + channel] {
                return self.urgent_lost();
            }
            self.send_wanted(self.streams.urgent(channel), request);
        }
    }

    fn send_wanted(&mut self, stream: usize, request: Request) {
        let Request { page, ahead, again } = request;
        let planted = matches!(self.defect, Defect::OlderOverNewer | Defect::SendsTwice);
        let last = (page + ahead).min(self.memory.pages.len() - 1);
        let frames = [page..page + 1, page + 1..last + 1];
        for (pages, again) in frames.into_iter().zip([again || planted, false]) {
            let taken: Vec<usize> = pages.filter(|page| self.claim(*page) || again).collect();
            let sent: Vec<_> =
                taken.into_iter().map(|page| self.read((page, self.memory.pages[page]))).collect();
            if !sent.is_empty() {
                self.transmit(stream, Cargo::Pages(sent));
            }
        }
    }

    /// Closes every channel. Cargo that is on its way may still arrive.
    pub(super) fn disconnect(&mut self) {
        self.transmit(TO_TARGET, Cargo::Eof);
        for stream in self.streams.opened() {
            self.transmit(stream, Cargo::Eof);
            self.slow_down(self.source_wire(stream), 200, 1_000_000);
        }
        self.source.inbox.closed();
        self.source.connected = false;
        self.source.serving = false;
        self.source.early.clear();
        self.source.queue.clear();
        self.source.jobs.iter_mut().for_each(|job| *job = Job::default());
        if self.defect != Defect::ClaimSurvives {
            self.source.claims = None;
        }
    }

    /// Performs the attempt that `Reconnect` requested.
    pub(super) fn connect_again(&mut self) {
        if !self.net_up || self.target.ended() {
            self.reconnected(false);
            return;
        }
        self.connect();
        self.source.connected = true;
        self.source.connecting = true;
        self.transmit(TO_TARGET, Cargo::Back);
    }

    pub(super) fn reconnected(&mut self, yes: bool) {
        self.source.connecting = false;
        self.source.connected = yes;
        if yes {
            self.source.inbox.reopened();
            self.source.missing = CollectedPages::new(&layout(self.memory.pages.len()));
            self.source.dead.fill(false);
            if let Some(left) = self.faults.cuts_left.checked_sub(1) {
                self.faults.cuts_left = left;
                let soon = 1 + self.rng.below(6000);
                let item = if self.rng.per_mille(600) { Item::Cut } else { Item::CutChannel };
                self.at(soon, item);
            }
        }
        self.source.done =
            Some(if yes { Event::Reconnected } else { Event::NotReconnected("refused".into()) });
    }

    pub(super) fn serve_again(&mut self, pages: u64) -> Option<Event> {
        let empty = CollectedPages::new(&layout(self.memory.pages.len()));
        match std::mem::replace(&mut self.source.missing, empty).complete(pages) {
            Ok(set) => {
                let claims = flags(&set);
                match (&mut self.source.claims, self.defect) {
                    (Some(before), Defect::ClaimSurvives) => {
                        before.iter_mut().zip(claims).for_each(|(left, lacks)| *left &= lacks);
                    }
                    (own, _) => *own = Some(claims),
                }
            }
            Err(why) => return Some(Event::PeerLost(why)),
        }
        None
    }

    pub(super) fn crash_source(&mut self) {
        if self.source.ended() {
            return;
        }
        self.disconnect();
        self.source.crashed = true;
        self.source.running = false;
    }
}
