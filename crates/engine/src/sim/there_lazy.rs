//! Host of the target from the handover on: missing pages, threads that wait for them, and the
//! running guest.

use super::here::layout;
use super::here_lazy::{flags, set_of};
use super::link::{Cargo, Request, SentPage};
use super::there::Hail;
use super::world::{Defect, Item, TO_SOURCE, World};
use crate::lacking::{Collected, pieces};
use crate::target::inbox::Input;
use crate::target::session::{Event, Outcome};
use vmferry_wire::{LazyFigures, Refusal, RefusalCode, ToSource, Token};

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
pub(super) struct Lazy {
    pub(super) lacking: Vec<bool>,
    /// Flags of pages that can be touched. Other pages make a fault.
    pub(super) present: Vec<bool>,
    asked: Vec<bool>,
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
    pub(super) figures: LazyFigures,
}

impl Lazy {
    /// Returns the expected content of the guest's memory.
    pub(super) fn model(&self) -> &Vec<u64> {
        &self.model
    }

    pub(super) fn left(&self) -> usize {
        self.lacking.iter().filter(|lacking| **lacking).count()
    }
}

impl World {
    /// Performs the driver's part of the handover: drops all stale pages.
    pub(super) fn begin_lazily(&mut self, pages: u64) -> Option<Event> {
        let empty = Collected::new(&layout(self.there.pages.len()));
        let lacking = match std::mem::replace(&mut self.there.collected, empty).complete(pages) {
            Ok(set) => flags(&set),
            Err(why) => {
                let why = Refusal::new(RefusalCode::Protocol, why);
                return Some(Event::LocalFailure(why));
            }
        };
        let named = lacking.iter().zip(&self.there.suspect).all(|(lacks, suspect)| *lacks || !suspect);
        self.promise(named, |_| "a page that came damaged is not among those that come again".into());
        let mut present = vec![true; lacking.len()];
        for page in (0..lacking.len()).filter(|page| lacking[*page]) {
            if self.defect != Defect::KeepsStale || self.there.pages[page] == 0 {
                present[page] = false;
                self.there.pages[page] = 0;
            }
        }
        let count = lacking.len();
        let needs = self.rng.index(3);
        let lazy = Lazy {
            lacking,
            present,
            asked: vec![false; count],
            waits: vec![false; count],
            lines_up: true,
            fate: Fate::Open,
            load_needs: (0..needs).map(|_| self.rng.index(count)).collect(),
            vcpus: [None; VCPUS],
            model: Vec::new(),
            writes: 1 << 32,
            ended: false,
            figures: LazyFigures::default(),
        };
        let nothing = lazy.left() == 0;
        self.there.lazy = Some(lazy);
        if self.there.lost {
            self.target_lost_early();
        }
        nothing.then(|| Event::MissingArrived(LazyFigures::default()))
    }

    fn lazy(&mut self) -> &mut Lazy {
        self.there.lazy.as_mut().expect("after the handover only")
    }

    /// Handles the loss of a link before the guest was started: the guest will not be started, and
    /// waiting threads get zeros.
    pub(super) fn target_lost_early(&mut self) {
        self.there.lost = true;
        if let Some(lazy) = self.there.lazy.as_mut()
            && lazy.fate == Fate::Open
        {
            lazy.fate = Fate::Abandoned;
            lazy.present.fill(true);
        }
    }

    pub(super) fn abandoned(&self) -> bool {
        self.there.lazy.as_ref().is_some_and(|lazy| lazy.fate == Fate::Abandoned)
    }

    pub(super) fn commit_lazily(&mut self) -> bool {
        let Some(lazy) = self.there.lazy.as_mut() else { return true };
        let open = lazy.fate == Fate::Open;
        if open {
            lazy.fate = Fate::Committed;
        }
        open
    }

    pub(super) fn start_lazily(&mut self) {
        if let Some(lazy) = self.there.lazy.as_mut() {
            lazy.model = self.memory.pages.clone();
        }
    }

    /// Returns true if the pages that the state's loading touches are present. Requests them if
    /// not.
    pub(super) fn load_finds_its_pages(&mut self) -> bool {
        let Some(lazy) = self.there.lazy.as_ref() else { return true };
        let needs = lazy.load_needs.clone();
        needs.into_iter().filter(|page| !self.touched(*page)).count() == 0
    }

    /// Returns true if a touched page is present. If not, requests the page, or answers it with
    /// zeros.
    fn touched(&mut self, page: usize) -> bool {
        let lazy = self.lazy();
        if !lazy.present[page] && !lazy.lacking[page] {
            lazy.figures.zero_faults += 1;
            lazy.present[page] = true;
        } else if !lazy.present[page] {
            lazy.waits[page] = true;
            let ahead = self.rng.index(4);
            self.ask(page, ahead, false);
        }
        self.lazy().present[page]
    }

    fn ask(&mut self, page: usize, ahead: usize, again: bool) {
        let lazy = self.lazy();
        if !lazy.lines_up || (lazy.asked[page] && !again) {
            return;
        }
        lazy.asked[page] = true;
        lazy.figures.requests += 1;
        let line = self.streams.requests(page % self.streams.urgent);
        self.transmit(line, Cargo::Request(Request { page, ahead, again }));
    }

    /// Handles pages that arrived on any channel.
    pub(super) fn take_pages(&mut self, pages: Vec<SentPage>) {
        for SentPage { page, digest, content } in pages {
            if self.lazy().ended && self.defect != Defect::CompleteEarly {
                self.promise(self.there.rest, |_| "a page after the end".into());
            }
            if digest != content {
                self.lazy().figures.damaged += 1;
                self.ask(page, 0, true);
                continue;
            }
            let overwrites = self.defect == Defect::OlderOverNewer;
            let lazy = self.lazy();
            let fresh = std::mem::take(&mut lazy.lacking[page]);
            let placed = !lazy.present[page] && (content != 0 || lazy.waits[page]);
            lazy.present[page] |= placed;
            lazy.figures.duplicates += u64::from(!fresh);
            lazy.waits[page] = false;
            let last = fresh && lazy.left() == 0;
            if placed || overwrites {
                self.there.pages[page] = content;
            }
            let early = self.defect == Defect::CompleteEarly && fresh && self.lazy().left() == 1;
            let fine = fresh || overwrites || self.lazy().fate == Fate::Abandoned;
            self.promise(fine, |_| format!("page {page} came twice"));
            self.wake(page);
            if last || early {
                self.target_input(self.there.link, Input::AllHere);
            }
        }
    }

    /// Continues the vCPUs that wait for a page.
    fn wake(&mut self, page: usize) {
        for vcpu in 0..VCPUS {
            if self.lazy().present[page] && self.lazy().vcpus[vcpu] == Some(page) {
                self.lazy().vcpus[vcpu] = None;
                self.access(page);
            }
        }
    }

    pub(super) fn guest_works_there(&mut self) {
        if self.there.lazy.is_none() {
            return;
        }
        let vcpu = self.rng.index(VCPUS);
        if self.lazy().vcpus[vcpu].is_some() {
            return;
        }
        let page = self.rng.index(self.there.pages.len());
        if self.rng.per_mille(100) {
            self.memory.freedom().free[page] = true;
        } else if self.touched(page) {
            self.access(page);
        } else {
            self.lazy().vcpus[vcpu] = Some(page);
        }
    }

    /// Reads a page that is present, and sometimes writes it, as the guest.
    fn access(&mut self, page: usize) {
        let Some(want) = self.lazy().model.get(page).copied() else { return };
        let found = self.there.pages[page];
        // The guest writes a free page before it reads it. Wrong content of a page about which it
        // reported falsely is its own fault.
        let was_free = std::mem::take(&mut self.memory.freedom().free[page]);
        let missed = found != want && !was_free && self.memory.counts(page);
        self.promise(!missed, |_| format!("the guest finds {found} in page {page}, which held {want}"));
        if was_free || self.rng.per_mille(500) {
            let zero = self.rng.per_mille(100);
            let lazy = self.lazy();
            lazy.writes += 1;
            let value = if zero { 0 } else { lazy.writes };
            lazy.model[page] = value;
            self.there.pages[page] = value;
        }
    }

    /// Ends the faults: missing pages read as zeros.
    pub(super) fn end_lazily(&mut self) {
        self.lazy().ended = true;
        self.lazy().present.fill(true);
        (0..self.there.pages.len()).for_each(|page| self.wake(page));
    }

    pub(super) fn disconnect_target(&mut self) {
        self.transmit(TO_SOURCE, Cargo::Eof);
        for urgent in 0..self.streams.urgent {
            self.transmit(self.streams.requests(urgent), Cargo::Eof);
        }
        self.there.connected = false;
        if let Some(lazy) = self.there.lazy.as_mut() {
            lazy.lines_up = false;
            lazy.asked.fill(false);
        }
        self.drain();
    }

    /// Drops all or some of the remaining reports of channels until their threads have ended.
    fn drain(&mut self) {
        let dropped = self.rng.index(self.there.inputs.len() + 1);
        for (_, input) in self.there.inputs.drain(..dropped).collect::<Vec<_>>() {
            if let Input::Connected(Hail::Back(link)) = input {
                self.there.late.push_back(link);
            }
        }
        self.all_here_after_all();
    }

    /// Handles the hello of a source that has lost the link.
    pub(super) fn source_is_back(&mut self, link: usize) {
        if self.there.ended() {
            self.reply(link, false);
            return;
        }
        self.target_input(0, Input::Connected(Hail::Back(link)));
    }

    /// Answers a source that has reconnected.
    pub(super) fn take_up(&mut self, link: usize) -> Option<Event> {
        let heard = self.there.rest || self.there.session.may_be_asked();
        if !heard || link <= self.there.link {
            self.reply(link, false);
            return None;
        }
        self.disconnect_target();
        self.there.inbox.reopened();
        self.there.link = link;
        self.there.connected = true;
        self.reply(link, true);
        // Events that were found when the old channels ended come first.
        self.there.found.push_back(Event::ControlReopened);
        self.there.found.pop_front()
    }

    pub(super) fn retell(&mut self) -> Event {
        let mut lacking = self.lazy().lacking.clone();
        if self.lazy().ended {
            lacking.fill(false);
        }
        let set = set_of(&lacking);
        for piece in pieces(&set) {
            if let Some(failed) = self.target_transmits(ToSource::Lacking(piece)) {
                return failed;
            }
        }
        let fresh = |salt| Token([u8::try_from((self.there.link * 2 + salt) % 256).expect("less"); 16]);
        self.there.tokens = (fresh(40), fresh(41));
        Event::MissingNamed { pages: set.count(), tokens: self.there.tokens }
    }

    pub(super) fn ask_again(&mut self) {
        let lazy = self.lazy();
        lazy.lines_up = true;
        let waits: Vec<usize> = (0..lazy.waits.len()).filter(|page| lazy.waits[*page]).collect();
        waits.into_iter().for_each(|page| self.ask(page, 0, false));
    }

    /// Restores the report of the last page, if it was dropped with the other reports of the lost
    /// channels.
    fn all_here_after_all(&mut self) {
        let Some(lazy) = self.there.lazy.as_ref() else { return };
        let unknown = self.there.rest && lazy.left() == 0 && !self.there.session.complete();
        if unknown && self.defect != Defect::ForgetsTheLast {
            let event = Event::MissingArrived(lazy.figures.clone());
            self.there.found.push_back(event);
        }
    }

    pub(super) fn crash_target(&mut self) {
        if self.there.ended() {
            return;
        }
        self.disconnect_target();
        self.there.crashed = true;
        self.there.running = false;
        self.refuse_who_waits();
    }

    /// Closes the connections that wait for a host that has died, as its kernel does.
    pub(super) fn refuse_who_waits(&mut self) {
        for (_, input) in std::mem::take(&mut self.there.inputs) {
            if let Input::Connected(Hail::Back(link)) = input {
                self.reply(link, false);
            }
        }
        for link in std::mem::take(&mut self.there.late) {
            self.reply(link, false);
        }
    }

    /// Acts as the operator of both hosts from time to time: reopens a link that is not reopened
    /// automatically, and gives up a guest that cannot continue.
    pub(super) fn operate(&mut self) {
        let next = 1_000_000 + self.rng.below(5_000_000);
        self.at(next, Item::Operator);
        if !self.here.ended() {
            let waiting = self.here.session.interrupted().map(|(waiting, _)| waiting);
            if waiting.is_some() && self.there.ended() && self.no_claim_can_be_granted() {
                self.here.requests.push_back(super::source::Event::Abandon);
            } else if waiting == Some(true) {
                self.here.requests.push_back(super::source::Event::Recover);
            }
        }
        if self.there.session.renounced() && self.here.ended() {
            // The guest runs on its source, so the target will not be asked any more.
            self.there.stopped = true;
        }
        if !self.there.rest || self.there.ended() {
            return;
        }
        let suspended = self.there.session.suspended();
        let since = *self.there.lost_at.get_or_insert(self.now);
        if !suspended {
            self.there.lost_at = None;
        } else if self.here.ended() && self.there.session.complete() && self.now - since > SOURCE_GONE_AFTER {
            // The guest has all of its memory and runs. The target is told to stop listening.
            self.there.outcome = Some(Outcome::Completed);
        } else if self.here.ended() && !self.there.session.complete() && self.now - since > SOURCE_GONE_AFTER
        {
            // The source is gone, and with it the missing pages.
            self.crash_target();
        }
    }
}
