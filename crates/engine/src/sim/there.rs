//! The target's host in the simulation.

use super::here::machine;
use super::link::Cargo;
use super::rng::Rng;
use super::world::{BULK, Defect, Item, TO_SOURCE, World};
use crate::target::session::{Action, Event, Outcome, Session, Tokens};
use std::collections::VecDeque;
use vmferry_memory::RegionId;
use vmferry_wire::{PageName, Refusal, RefusalCode, RunName, Token};

pub(super) fn tokens() -> Tokens {
    Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) }
}

pub(super) struct There {
    pub(super) session: Session,
    actions: VecDeque<Action>,
    inbox: VecDeque<Event>,
    eager: bool,
    busy: bool,
    pub(super) running: bool,
    pub(super) outcome: Option<Outcome>,
    pages: Vec<u64>,
    suspect: Vec<bool>,
    compared: u64,
    differ: Vec<usize>,
    loads: u32,
    starts: u32,
}

impl There {
    pub(super) fn new(rng: &mut Rng, pages: usize) -> Self {
        Self {
            session: Session::begin(machine(pages), tokens()),
            actions: VecDeque::new(),
            inbox: VecDeque::new(),
            eager: rng.per_mille(400),
            busy: false,
            running: false,
            outcome: None,
            pages: vec![0; pages],
            suspect: vec![false; pages],
            compared: 0,
            differ: Vec::new(),
            loads: 0,
            starts: 0,
        }
    }
}

impl World {
    pub(super) fn target_event(&mut self, event: Event) {
        if self.there.outcome.is_some() {
            return;
        }
        if self.there.busy && !self.there.eager {
            self.there.inbox.push_back(event);
            return;
        }
        self.target_handle(event);
        self.pump_target();
    }

    fn target_handle(&mut self, event: Event) {
        let actions = self.there.session.handle(event);
        self.there.actions.extend(actions);
    }

    /// Messages go to the session; pages go to memory by the channels' own threads, whatever the session does.
    pub(super) fn target_receives(&mut self, stream: usize, cargo: Cargo) {
        let channel = u16::try_from(stream.saturating_sub(BULK)).expect("few channels");
        match cargo {
            Cargo::ToTarget(message) => self.target_event(Event::Message(message)),
            Cargo::Hello => self.target_event(Event::ChannelUp),
            Cargo::Pages(pages) if self.there.outcome.is_none() => {
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
            Cargo::Barrier(pass) => self.target_event(Event::Barrier { channel, pass }),
            Cargo::Eof if stream >= BULK => {
                // As the real driver: before memory is complete the source's last words are waited for.
                if !self.there.session.memory_complete() {
                    self.at(500_000, Item::TargetLost);
                }
            }
            Cargo::Eof => self.target_event(Event::PeerLost("the source went away".into())),
            Cargo::Pages(_) | Cargo::ToSource(_) => {}
        }
    }

    fn pump_target(&mut self) {
        while !self.there.busy && self.there.outcome.is_none() {
            if let Some(action) = self.there.actions.pop_front() {
                self.perform_target(action);
            } else if let Some(event) = self.there.inbox.pop_front() {
                self.target_handle(event);
            } else {
                return;
            }
        }
    }

    fn perform_target(&mut self, action: Action) {
        match action {
            Action::Send(message) => self.target_transmits(message),
            Action::AwaitChannels(channels) => {
                let right = channels.bulk == self.here.settings.channels;
                self.promise(right, |_| "another number of channels".into());
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
                let delay = self.rng.latency(300);
                self.at(delay, Item::TargetStep(step));
            }
            other => self.promise(false, |_| format!("{other:?} in precopy")),
        }
    }

    fn suspects(&self) -> Vec<RunName> {
        let name = |(page, _): (usize, &bool)| RunName { region: RegionId(0), first: page as u64, count: 1 };
        let blind = self.defect == Defect::BlindToDamage;
        self.there.suspect.iter().enumerate().filter(|(_, suspect)| **suspect && !blind).map(name).collect()
    }

    pub(super) fn target_step_done(&mut self, action: Action) {
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
                if failed { Event::LocalFailure(why) } else { Event::Loaded { micros: 9 } }
            }
            _ if failed => Event::StartFailed(why),
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
        self.check_owner();
        let once = self.there.starts == 1;
        self.promise(once, |_| "started twice".into());
        self.promise(self.here.committed, |_| "started before the commit".into());
        let equal = self.there.pages == self.memory.pages;
        self.promise(equal, |world| {
            format!("started with other memory: {:?} instead of {:?}", world.there.pages, world.memory.pages)
        });
    }
}
