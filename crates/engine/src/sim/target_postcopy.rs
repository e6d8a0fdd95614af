//! Host of the target from the handover on: missing pages, threads that wait for them, and the
//! running guest.

use super::link::{Cargo, Request, SentPage};
use super::source_host::layout;
use super::source_postcopy::{flags, set_of};
use super::target_host::HelloConnection;
use super::world::{Defect, Item, TO_SOURCE, World};
use crate::missing_pages::{CollectedPages, pieces};
use crate::target::inbox::Input;
use crate::target::session::{Event, Outcome};
use vmferry_wire::{PagingFigures, Refusal, RefusalCode, ToSource, Token};

/// Time after the loss of its source for which a target with all pages continues to listen, in
/// microseconds.
const SOURCE_GONE_AFTER: u64 = 20_000_000;
const VCPUS: usize = 2;

/// State of the permission to start the guest without the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Open,
    Committed,
    Abandoned,
}

#[derive(Debug)]
pub(super) struct Paging {
    pub(super) missing: Vec<bool>,
    /// Flags of pages that can be touched. Other pages make a fault.
    pub(super) present: Vec<bool>,
    requested: Vec<bool>,
    waits: Vec<bool>,
    lines_up: bool,
    fate: Fate,
    /// Pages that the loading of the state touches.
    load_needs: Vec<usize>,
    /// Page that each vCPU waits for.
    vcpus: [Option<usize>; VCPUS],
    /// Expected content: the writes of the guest on either host.
    model: Vec<u64>,
    writes: u64,
    ended: bool,
    pub(super) figures: PagingFigures,
}

impl Paging {
    /// Returns the expected content of the guest's memory.
    pub(super) fn model(&self) -> &Vec<u64> {
        &self.model
    }

    pub(super) fn left(&self) -> usize {
        self.missing.iter().filter(|missing| **missing).count()
    }
}

impl World {
    /// Performs the driver's part of the handover: drops all stale pages.
    pub(super) fn begin_paging(&mut self, pages: u64) -> Option<Event> {
        let empty = CollectedPages::new(&layout(self.target.pages.len()));
        let missing = match std::mem::replace(&mut self.target.collected, empty).complete(pages) {
            Ok(set) => flags(&set),
            Err(why) => {
                let why = Refusal::new(RefusalCode::Protocol, why);
                return Some(Event::LocalFailure(why));
            }
        };
        let named =
            missing.iter().zip(&self.target.mismatched).all(|(lacks, mismatched)| *lacks || !mismatched);
        self.promise(named, |_| "a page that came damaged is not among those that come again".into());
        let mut present = vec![true; missing.len()];
        for page in (0..missing.len()).filter(|page| missing[*page]) {
            if self.defect != Defect::KeepsStale || self.target.pages[page] == 0 {
                present[page] = false;
                self.target.pages[page] = 0;
            }
        }
        let count = missing.len();
        let needs = self.rng.index(3);
        let paging = Paging {
            missing,
            present,
            requested: vec![false; count],
            waits: vec![false; count],
            lines_up: true,
            fate: Fate::Open,
            load_needs: (0..needs).map(|_| self.rng.index(count)).collect(),
            vcpus: [None; VCPUS],
            model: Vec::new(),
            writes: 1 << 32,
            ended: false,
            figures: PagingFigures::default(),
        };
        let nothing = paging.left() == 0;
        self.target.paging = Some(paging);
        if self.target.lost {
            self.target_lost_early();
        }
        nothing.then(|| Event::MissingArrived(PagingFigures::default()))
    }

    fn paging(&mut self) -> &mut Paging {
        self.target.paging.as_mut().expect("after the handover only")
    }

    /// Handles the loss of a link before the guest was started: the guest will not be started, and
    /// waiting threads get zeros.
    pub(super) fn target_lost_early(&mut self) {
        self.target.lost = true;
        if let Some(paging) = self.target.paging.as_mut()
            && paging.fate == Fate::Open
        {
            paging.fate = Fate::Abandoned;
            paging.present.fill(true);
        }
    }

    pub(super) fn abandoned(&self) -> bool {
        self.target.paging.as_ref().is_some_and(|paging| paging.fate == Fate::Abandoned)
    }

    pub(super) fn commit_paging(&mut self) -> bool {
        let Some(paging) = self.target.paging.as_mut() else { return true };
        let open = paging.fate == Fate::Open;
        if open {
            paging.fate = Fate::Committed;
        }
        open
    }

    pub(super) fn start_paging(&mut self) {
        if let Some(paging) = self.target.paging.as_mut() {
            paging.model = self.memory.pages.clone();
        }
    }

    /// Returns true if the pages that the state's loading touches are present. Requests them if
    /// not.
    pub(super) fn load_finds_its_pages(&mut self) -> bool {
        let Some(paging) = self.target.paging.as_ref() else { return true };
        let needs = paging.load_needs.clone();
        needs.into_iter().filter(|page| !self.touched(*page)).count() == 0
    }

    /// Returns true if a touched page is present. If not, requests the page, or answers it with
    /// zeros.
    fn touched(&mut self, page: usize) -> bool {
        let paging = self.paging();
        if !paging.present[page] && !paging.missing[page] {
            paging.figures.zero_faults += 1;
            paging.present[page] = true;
        } else if !paging.present[page] {
            paging.waits[page] = true;
            let ahead = self.rng.index(4);
            self.request_page(page, ahead, false);
        }
        self.paging().present[page]
    }

    fn request_page(&mut self, page: usize, ahead: usize, again: bool) {
        let paging = self.paging();
        if !paging.lines_up || (paging.requested[page] && !again) {
            return;
        }
        paging.requested[page] = true;
        paging.figures.requests += 1;
        let line = self.streams.requests(page % self.streams.urgent);
        self.transmit(line, Cargo::Request(Request { page, ahead, again }));
    }

    /// Handles pages that arrived on any channel.
    pub(super) fn take_pages(&mut self, pages: Vec<SentPage>) {
        for SentPage { page, digest, content, .. } in pages {
            if self.paging().ended && self.defect != Defect::CompleteEarly {
                self.promise(self.target.in_postcopy, |_| "a page after the end".into());
            }
            if digest != content {
                self.paging().figures.digest_mismatches += 1;
                self.request_page(page, 0, true);
                continue;
            }
            let overwrites = self.defect == Defect::OlderOverNewer;
            let paging = self.paging();
            let fresh = std::mem::take(&mut paging.missing[page]);
            let placed = !paging.present[page] && (content != 0 || paging.waits[page]);
            paging.present[page] |= placed;
            paging.figures.duplicates += u64::from(!fresh);
            paging.waits[page] = false;
            let last = fresh && paging.left() == 0;
            if placed || overwrites {
                self.target.pages[page] = content;
            }
            let early = self.defect == Defect::CompleteEarly && fresh && self.paging().left() == 1;
            let fine = fresh || overwrites || self.paging().fate == Fate::Abandoned;
            self.promise(fine, |_| format!("page {page} came twice"));
            self.wake(page);
            if last || early {
                self.target_input(self.target.link, Input::AllArrived);
            }
        }
    }

    /// Continues the vCPUs that wait for a page.
    fn wake(&mut self, page: usize) {
        for vcpu in 0..VCPUS {
            if self.paging().present[page] && self.paging().vcpus[vcpu] == Some(page) {
                self.paging().vcpus[vcpu] = None;
                self.access(page);
            }
        }
    }

    pub(super) fn guest_works_on_target(&mut self) {
        if self.target.paging.is_none() {
            return;
        }
        let vcpu = self.rng.index(VCPUS);
        if self.paging().vcpus[vcpu].is_some() {
            return;
        }
        let page = self.rng.index(self.target.pages.len());
        if self.rng.per_mille(100) {
            self.memory.freedom().free[page] = true;
        } else if self.touched(page) {
            self.access(page);
        } else {
            self.paging().vcpus[vcpu] = Some(page);
        }
    }

    /// Reads a page that is present, and sometimes writes it, as the guest.
    fn access(&mut self, page: usize) {
        let Some(want) = self.paging().model.get(page).copied() else { return };
        let found = self.target.pages[page];
        // The guest writes a free page before it reads it. Wrong content of a page about which it
        // reported falsely is its own fault.
        let was_free = std::mem::take(&mut self.memory.freedom().free[page]);
        let missed = found != want && !was_free && self.memory.counts(page);
        self.promise(!missed, |_| format!("the guest finds {found} in page {page}, which held {want}"));
        if was_free || self.rng.per_mille(500) {
            let zero = self.rng.per_mille(100);
            let paging = self.paging();
            paging.writes += 1;
            let value = if zero { 0 } else { paging.writes };
            paging.model[page] = value;
            self.target.pages[page] = value;
        }
    }

    /// Ends the faults: missing pages read as zeros.
    pub(super) fn end_paging(&mut self) {
        self.paging().ended = true;
        self.paging().present.fill(true);
        (0..self.target.pages.len()).for_each(|page| self.wake(page));
    }

    pub(super) fn disconnect_target(&mut self) {
        self.transmit(TO_SOURCE, Cargo::Eof);
        for urgent in 0..self.streams.urgent {
            self.transmit(self.streams.requests(urgent), Cargo::Eof);
        }
        self.target.connected = false;
        if let Some(paging) = self.target.paging.as_mut() {
            paging.lines_up = false;
            paging.requested.fill(false);
        }
        self.drain();
    }

    /// Drops all or some of the remaining reports of channels until their threads have ended.
    fn drain(&mut self) {
        let dropped = self.rng.index(self.target.inputs.len() + 1);
        for (_, input) in self.target.inputs.drain(..dropped).collect::<Vec<_>>() {
            if let Input::Connected(HelloConnection::Back(link)) = input {
                self.target.late.push_back(link);
            }
        }
        self.restore_last_report();
    }

    /// Handles the hello of a source that has lost the link.
    pub(super) fn source_is_back(&mut self, link: usize) {
        if self.target.ended() {
            self.reply(link, false);
            return;
        }
        self.target_input(0, Input::Connected(HelloConnection::Back(link)));
    }

    /// Answers a source that has reconnected.
    pub(super) fn take_up(&mut self, link: usize) -> Option<Event> {
        let listens = self.target.in_postcopy || self.target.session.accepts_new_link();
        if !listens || link <= self.target.link {
            self.reply(link, false);
            return None;
        }
        self.disconnect_target();
        self.target.inbox.reopened();
        self.target.link = link;
        self.target.connected = true;
        self.reply(link, true);
        // Events that were found when the old channels ended come first.
        self.target.found.push_back(Event::ControlReopened);
        self.target.found.pop_front()
    }

    pub(super) fn retell(&mut self) -> Event {
        let mut missing = self.paging().missing.clone();
        if self.paging().ended {
            missing.fill(false);
        }
        let set = set_of(&missing);
        for piece in pieces(&set) {
            if let Some(failed) = self.target_transmits(ToSource::Lacking(piece)) {
                return failed;
            }
        }
        let fresh = |salt| Token([u8::try_from((self.target.link * 2 + salt) % 256).expect("less"); 16]);
        self.target.tokens = (fresh(40), fresh(41));
        Event::MissingNamed { pages: set.count(), tokens: self.target.tokens }
    }

    pub(super) fn request_again(&mut self) {
        let paging = self.paging();
        paging.lines_up = true;
        let waits: Vec<usize> = (0..paging.waits.len()).filter(|page| paging.waits[*page]).collect();
        waits.into_iter().for_each(|page| self.request_page(page, 0, false));
    }

    /// Restores the report of the last page, if it was dropped with the other reports of the lost
    /// channels.
    fn restore_last_report(&mut self) {
        let Some(paging) = self.target.paging.as_ref() else { return };
        let unknown = self.target.in_postcopy && paging.left() == 0 && !self.target.session.complete();
        if unknown && self.defect != Defect::ForgetsTheLast {
            let event = Event::MissingArrived(paging.figures.clone());
            self.target.found.push_back(event);
        }
    }

    pub(super) fn crash_target(&mut self) {
        if self.target.ended() {
            return;
        }
        self.disconnect_target();
        self.target.crashed = true;
        self.target.running = false;
        self.refuse_who_waits();
    }

    /// Closes the connections that wait for a host that has died, as its kernel does.
    pub(super) fn refuse_who_waits(&mut self) {
        for (_, input) in std::mem::take(&mut self.target.inputs) {
            if let Input::Connected(HelloConnection::Back(link)) = input {
                self.reply(link, false);
            }
        }
        for link in std::mem::take(&mut self.target.late) {
            self.reply(link, false);
        }
    }

    /// Acts as the operator of both hosts from time to time: reopens a link that is not reopened
    /// automatically, and gives up a guest that cannot continue.
    pub(super) fn operate(&mut self) {
        let next = 1_000_000 + self.rng.below(5_000_000);
        self.at(next, Item::Operator);
        if !self.source.ended() {
            let waiting = self.source.session.interrupted().map(|(waiting, _)| waiting);
            if waiting.is_some() && self.target.ended() && self.no_claim_can_be_granted() {
                self.source.requests.push_back(super::source::Event::Abandon);
            } else if waiting == Some(true) {
                self.source.requests.push_back(super::source::Event::Recover);
            }
        }
        if self.target.session.renounced() && self.source.ended() {
            // The guest runs on its source, so the target will not be asked any more.
            self.target.stopped = true;
        }
        if !self.target.in_postcopy || self.target.ended() {
            return;
        }
        let suspended = self.target.session.suspended();
        let since = *self.target.lost_at.get_or_insert(self.now);
        if !suspended {
            self.target.lost_at = None;
        } else if self.source.ended()
            && self.target.session.complete()
            && self.now - since > SOURCE_GONE_AFTER
        {
            // The guest has all of its memory and runs. The target is told to stop listening.
            self.target.outcome = Some(Outcome::Completed);
        } else if self.source.ended()
            && !self.target.session.complete()
            && self.now - since > SOURCE_GONE_AFTER
        {
            // The source is gone, and with it the missing pages.
            self.crash_target();
        }
    }
}
