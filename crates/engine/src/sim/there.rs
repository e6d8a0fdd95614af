//! The target's host in the simulation.

use super::here::{layout, machine};
use super::link::Cargo;
use super::rng::Rng;
use super::there_lazy::Lazy;
use super::world::{BULK, Defect, Item, TO_SOURCE, TO_TARGET, World};
use crate::fence::{Ruling, Side};
use crate::lacking::Collected;
use crate::target::session::{Action, Event, Outcome, Session, Tokens};
use std::collections::VecDeque;
use vmferry_core::RegionId;
use vmferry_wire::{PageName, Refusal, RefusalCode, RunName, ToTarget, Token};

pub(super) fn tokens() -> Tokens {
    Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) }
}

/// What waits for the thread that runs the session, and the set of channels that it is of.
pub(super) enum Input {
    Event(usize, Event),
    /// A control channel for a lost link.
    Back(usize),
}

pub(super) struct There {
    pub(super) session: Session,
    pub(super) actions: VecDeque<Action>,
    pub(super) inbox: VecDeque<Input>,
    eager: bool,
    pub(super) busy: bool,
    pub(super) running: bool,
    /// It has what only the side that runs the guest may have.
    pub(super) holds: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) crashed: bool,
    /// Somebody wanted no guest any more while its source might still have asked.
    pub(super) stopped: bool,
    /// The set of channels, and whether they were not closed.
    pub(super) link: usize,
    pub(super) connected: bool,
    pub(super) tokens: (Token, Token),
    pub(super) collected: Collected,
    /// Once the guest is about to run without all of its memory.
    pub(super) lazy: Option<Lazy>,
    /// It runs, and the rest is being taken.
    pub(super) rest: bool,
    /// When the link was lost.
    pub(super) lost_at: Option<u64>,
    pub(super) pages: Vec<u64>,
    pub(super) suspect: Vec<bool>,
    compared: u64,
    differ: Vec<usize>,
    loads: u32,
    starts: u32,
}

impl There {
    pub(super) fn new(rng: &mut Rng, pages: usize, fenced: bool) -> Self {
        Self {
            session: Session::begin(machine(pages), tokens()).fenced(fenced),
            actions: VecDeque::new(),
            inbox: VecDeque::new(),
            eager: rng.per_mille(400),
            busy: false,
            running: false,
            holds: false,
            outcome: None,
            crashed: false,
            stopped: false,
            link: 0,
            connected: true,
            tokens: (tokens().bulk, tokens().urgent),
            collected: Collected::new(&layout(pages)),
            lazy: None,
            rest: false,
            lost_at: None,
            pages: vec![0; pages],
            suspect: vec![false; pages],
            compared: 0,
            differ: Vec::new(),
            loads: 0,
            starts: 0,
        }
    }

    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

impl World {
    pub(super) fn target_event(&mut self, link: usize, event: Event) {
        if self.there.ended() || link != self.there.link {
            return;
        }
        if self.there.busy && !self.there.eager {
            self.there.inbox.push_back(Input::Event(link, event));
            return;
        }
        self.target_handle(event);
        self.pump_target();
    }

    pub(super) fn target_handle(&mut self, event: Event) {
        let before = self.there.session.ended();
        let actions = self.there.session.handle(event);
        let again = before && self.defect != Defect::DropsTheEnd;
        if !again && self.there.session.ended() {
            // What was still to be done is moot.
            self.there.actions.clear();
        }
        self.there.actions.extend(actions);
        if self.defect == Defect::EndsRenounced && self.there.session.renounced() {
            let why = Refusal::new(RefusalCode::Other, "renounced");
            self.there.actions.push_back(Action::Finish(Outcome::Failed(why)));
        }
    }

    /// A channel's thread, or the control channel's, finds it lost.
    pub(super) fn target_lost(&mut self, link: usize) {
        if link == self.there.link && self.there.connected {
            self.target_lost_early();
            self.target_event(link, Event::PeerLost("the link was cut".into()));
        }
    }

    /// Messages go to the session; pages go to memory by the channels' own threads, whatever the session does.
    pub(super) fn target_receives(&mut self, link: usize, stream: usize, cargo: Cargo) {
        if matches!(cargo, Cargo::Back) {
            self.source_is_back(link);
            return;
        }
        let late = self.defect == Defect::RetoldEarly && matches!(cargo, Cargo::Pages(_));
        let ours = link == self.there.link && self.there.connected;
        if self.there.ended() || !(ours || late) {
            return;
        }
        let channel = u16::try_from(stream.saturating_sub(BULK)).expect("few channels");
        match cargo {
            Cargo::ToTarget(ToTarget::Commit)
                if self.defect == Defect::StartsRenounced && self.there.session.renounced() =>
            {
                self.start();
            }
            Cargo::ToTarget(message) => self.target_event(link, Event::Message(message)),
            Cargo::Hello(token) => {
                let (bulk, urgent) = self.there.tokens;
                let wanted = if stream < self.streams.urgent(0) { bulk } else { urgent };
                self.promise(token == wanted, |_| "a channel with another token".into());
                self.target_event(link, Event::ChannelUp);
            }
            Cargo::Pages(pages) if self.there.lazy.is_some() => self.take_pages(pages),
            Cargo::Pages(pages) => {
                let frozen = self.there.loads > 0;
                self.promise(!frozen, |_| "pages came after the state was loaded".into());
                for sent in pages {
                    self.there.pages[sent.page] = sent.content;
                    self.there.suspect[sent.page] = sent.content != sent.digest;
                }
            }
            Cargo::Digests(digests) => {
                for (page, digest) in digests {
                    self.there.compared += 1;
                    if self.there.pages[page] != digest {
                        self.there.differ.push(page);
                    }
                }
            }
            Cargo::Barrier(pass) => self.target_event(link, Event::Barrier { channel, pass }),
            // Once it knows that all is here the source closes its channels, the control channel last.
            Cargo::Eof if stream != TO_TARGET && self.there.session.complete() => {}
            Cargo::Eof if stream == TO_TARGET || self.there.rest => self.target_lost(link),
            Cargo::Eof => {
                // As the real driver: before memory is complete the source's last words are waited for.
                self.target_lost_early();
                if !self.there.session.memory_complete() {
                    self.at(500_000, Item::TargetLost(link));
                }
            }
            _ => {}
        }
    }

    pub(super) fn pump_target(&mut self) {
        while !self.there.busy && !self.there.ended() {
            if let Some(action) = self.there.actions.pop_front() {
                self.perform_target(action);
            } else if let Some(input) = self.there.inbox.pop_front() {
                match input {
                    Input::Event(link, event) if link == self.there.link => self.target_handle(event),
                    Input::Event(..) => {}
                    Input::Back(link) => self.take_up(link),
                }
            } else {
                return;
            }
        }
        if self.there.ended() {
            self.refuse_who_waits();
        }
    }

    fn perform_target(&mut self, action: Action) {
        match action {
            Action::Send(message) => self.target_transmits(message),
            Action::AwaitChannels(channels) => {
                let streams = self.streams;
                let right = usize::from(channels.bulk) == streams.bulk
                    && usize::from(channels.urgent) == streams.urgent
                    && channels.probe == streams.probe;
                self.promise(right, |_| "another number of channels".into());
            }
            Action::PrepareLazily => {
                let why = Refusal::new(RefusalCode::Feature, "a step failed");
                let failed = self.rng.per_mille(self.faults.step_fails);
                self.target_handle(if failed { Event::LocalFailure(why) } else { Event::Prepared });
            }
            Action::TakeLacking(piece) => self.there.collected.add(&piece).expect("honest pieces"),
            Action::BeginLazily { pages } => self.begin_lazily(pages),
            Action::Retell => self.retell(),
            Action::AskAgain => self.ask_again(),
            Action::Disconnect => self.disconnect_target(),
            Action::Fence { word, after } => self.ask_fence(Side::Target, word, after),
            Action::EndLazily => self.end_lazily(),
            Action::Finish(Outcome::RunsLazily) => {
                self.there.rest = true;
            }
            Action::CountSuspects { pass } => {
                let suspects = self.suspects();
                let pages = suspects.len() as u64;
                self.target_handle(Event::Suspects { pass, pages, runs: suspects });
            }
            Action::CountDifferences => {
                let name = |page: &usize| PageName { region: RegionId(0), page: *page as u64 };
                let (pages, mismatched) = (self.there.compared, self.there.differ.len() as u64);
                let samples = self.there.differ.iter().map(name).collect();
                self.target_handle(Event::Compared { pages, mismatched, samples });
            }
            Action::Finish(outcome) => {
                self.there.outcome = Some(outcome);
                self.transmit(TO_SOURCE, Cargo::Eof);
            }
            step @ (Action::Load(_) | Action::Start) => {
                self.there.busy = true;
                let mut delay = self.rng.latency(300);
                if step == Action::Start {
                    delay += self.stopped_for();
                }
                self.at(delay, Item::TargetStep(step));
            }
        }
    }

    fn suspects(&self) -> Vec<RunName> {
        let name = |(page, _): (usize, &bool)| RunName { region: RegionId(0), first: page as u64, count: 1 };
        let blind = self.defect == Defect::BlindToDamage;
        self.there.suspect.iter().enumerate().filter(|(_, suspect)| **suspect && !blind).map(name).collect()
    }

    pub(super) fn target_step_done(&mut self, action: Action) {
        if self.there.ended() {
            return;
        }
        if matches!(action, Action::Load(_)) && !self.load_finds_its_pages() {
            self.at(2000, Item::TargetStep(action));
            return;
        }
        let failed = self.rng.per_mille(self.faults.step_fails);
        self.there.busy = false;
        let why = Refusal::new(RefusalCode::State, "a step failed");
        let event = match action {
            Action::Load(_) => {
                self.there.loads += 1;
                let first = self.there.loads == 1;
                self.promise(first, |_| "loaded twice".into());
                if self.defect == Defect::StartsAtLoad {
                    self.start();
                }
                match failed {
                    _ if self.abandoned() => Event::PeerLost("while the state was loaded".into()),
                    true => Event::LocalFailure(why),
                    false => Event::Loaded { micros: 9 },
                }
            }
            _ if failed || !self.commit_lazily() => Event::StartFailed(why),
            _ => {
                self.start();
                Event::Started { micros: 9, cpu_us: 9 }
            }
        };
        self.target_handle(event);
        self.pump_target();
    }

    /// The moment of truth: it runs here only if it was handed over, and only with the memory that it had.
    fn start(&mut self) {
        self.there.running = true;
        self.there.starts += 1;
        self.there.holds = true;
        let free = !self.here.holds;
        self.promise(free, |_| "started without its disks".into());
        self.check_owner();
        let once = self.there.starts == 1;
        self.promise(once, |_| "started twice".into());
        self.promise(self.here.committed, |_| "started before the commit".into());
        let ours = !self.fenced() || matches!(self.fence.register, Some(Ruling::Target { .. }));
        self.promise(ours, |world| format!("started, and the fence holds {:?}", world.fence.register));
        self.start_lazily();
        let lazy = self.there.lazy.as_ref();
        let there = |page: &usize| lazy.is_none_or(|lazy| lazy.present[*page]);
        let pages = (0..self.there.pages.len()).filter(there);
        let same = |page: usize| self.there.pages[page] == self.memory.pages[page];
        let equal = pages.clone().all(|page| !self.memory.counts(page) || same(page));
        self.promise(equal, |world| {
            format!("started with other memory: {:?} instead of {:?}", world.there.pages, world.memory.pages)
        });
    }
}
