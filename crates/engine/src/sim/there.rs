//! Host of the target in the simulation.

use super::here::{Idle, MOST_LOOKS, layout, machine};
use super::link::Cargo;
use super::rng::Rng;
use super::there_lazy::Lazy;
use super::world::{BULK, Defect, Item, TO_SOURCE, TO_TARGET, World};
use crate::fence::{Ruled, Ruling, Side};
use crate::lacking::Collected;
use crate::run::{self, Agenda};
use crate::target::inbox::{self, Inbox, Input, Numbered, Sources};
use crate::target::receiver::ReceiveError;
use crate::target::session::{Action, Event, Outcome, Session, Tokens};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::time::Duration;
use vmferry_core::RegionId;
use vmferry_wire::{PageName, Refusal, RefusalCode, Role, RunName, ToTarget, Token};

pub(super) fn tokens() -> Tokens {
    Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) }
}

/// Connection with a hello.
#[derive(Debug)]
pub(super) enum Hail {
    /// A channel for pages.
    Channel,
    /// A control channel for a lost link, with the number of its set of channels.
    Back(usize),
}

pub(super) struct There {
    pub(super) session: Session,
    pub(super) agenda: Agenda<Action>,
    pub(super) inbox: Inbox,
    /// Reports of threads, oldest first.
    pub(super) inputs: VecDeque<Numbered<Hail>>,
    /// Events, and then connections, that were found while channels were ended.
    pub(super) found: VecDeque<Event>,
    pub(super) late: VecDeque<usize>,
    pub(super) answers: VecDeque<Ruled>,
    /// True if the operator has stopped the target.
    pub(super) stopped: bool,
    /// Result of the action that took time.
    done: Option<Event>,
    /// Time at which the loop wants to check the clock. `timer` is set once an item for that is
    /// queued.
    wake_at: Duration,
    pub(super) timer: bool,
    /// Number of checks for an event since the loop was woken.
    looks: u32,
    /// Time before which the loop does not run, although it was woken.
    asleep_until: u64,
    /// For [`Defect::DropsTheEnd`].
    asked: Cell<bool>,
    pub(super) running: bool,
    /// True if the target holds what only the host that runs the guest may hold.
    pub(super) holds: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) crashed: bool,
    /// True if the operator stopped the target while its source might still have asked.
    pub(super) was_stopped: bool,
    /// Number of the set of channels, and below, whether it is open.
    pub(super) link: usize,
    pub(super) connected: bool,
    pub(super) tokens: (Token, Token),
    pub(super) collected: Collected,
    /// True if a thread has found that a channel is lost.
    pub(super) lost: bool,
    /// State of demand paging, once the guest is about to run without all of its memory.
    pub(super) lazy: Option<Lazy>,
    /// True if the guest runs, and the rest of its memory is being received.
    pub(super) rest: bool,
    /// Time at which the link was lost.
    pub(super) lost_at: Option<u64>,
    pub(super) pages: Vec<u64>,
    pub(super) suspect: Vec<bool>,
    compared: u64,
    differ: Vec<usize>,
    pub(super) prepared: u32,
    /// Number of received bytes of each stream of device state, and whether the stream has ended.
    streams: Vec<(u64, bool)>,
    loads: u32,
    starts: u32,
}

impl There {
    pub(super) fn new(rng: &mut Rng, pages: usize, fenced: bool) -> Self {
        let wants_trial = rng.per_mille(300);
        Self {
            session: Session::begin(machine(pages), tokens()).fenced(fenced).wanting_trial(wants_trial),
            agenda: Agenda::new(Vec::new()),
            inbox: Inbox::new(Duration::ZERO),
            inputs: VecDeque::new(),
            found: VecDeque::new(),
            late: VecDeque::new(),
            answers: VecDeque::new(),
            stopped: false,
            done: None,
            wake_at: Duration::ZERO,
            timer: false,
            looks: 0,
            asleep_until: 0,
            asked: Cell::new(false),
            running: false,
            holds: false,
            outcome: None,
            crashed: false,
            was_stopped: false,
            link: 0,
            connected: true,
            tokens: (tokens().bulk, tokens().urgent),
            collected: Collected::new(&layout(pages)),
            lost: false,
            lazy: None,
            rest: false,
            lost_at: None,
            pages: vec![0; pages],
            suspect: vec![false; pages],
            compared: 0,
            differ: Vec::new(),
            prepared: 0,
            streams: Vec::new(),
            loads: 0,
            starts: 0,
        }
    }

    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

impl World {
    /// Queues a report of a thread of the target's host.
    pub(super) fn target_input(&mut self, link: usize, input: Input<Hail>) {
        self.there.inputs.push_back((link as u64, input));
        if self.there.asleep_until <= self.now && self.rng.per_mille(200) {
            // The loop's thread is woken and runs later. Other inputs may arrive before that.
            let delay = self.rng.latency(200);
            self.there.asleep_until = self.now + delay;
            self.at(delay, Item::Runs);
        }
    }

    fn target_handle(&mut self, event: Event) -> Vec<Action> {
        let back = matches!(event, Event::ControlReopened);
        let mut actions = self.there.session.handle(event);
        let closes = back && actions.contains(&Action::Disconnect);
        self.promise(!closes, |_| "the target closes the control channel that it has just taken".into());
        if self.defect == Defect::EndsRenounced && self.there.session.renounced() {
            let why = Refusal::new(RefusalCode::Other, "renounced");
            actions.push(Action::Finish(Outcome::Failed(why)));
        }
        actions
    }

    /// Reports the loss of the control channel, as its thread does.
    pub(super) fn target_lost(&mut self, link: usize) {
        if link == self.there.link && self.there.connected {
            self.target_lost_early();
            self.target_input(link, Input::ControlLost(ErrorKind::ConnectionReset.into()));
        }
    }

    /// Delivers cargo: messages go to the session, and the channels' own threads write pages to
    /// memory, whatever the session does.
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
            Cargo::ToTarget(message) => self.target_input(link, Input::Message(message)),
            Cargo::Hello(token) => {
                let (bulk, urgent) = self.there.tokens;
                let wanted = if stream < self.streams.urgent(0) { bulk } else { urgent };
                self.promise(token == wanted, |_| "a channel with another token".into());
                self.target_input(link, Input::Connected(Hail::Channel));
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
            Cargo::Barrier(pass) => self.target_input(link, Input::Barrier { channel, pass }),
            Cargo::Eof if stream == TO_TARGET => self.target_lost(link),
            Cargo::Eof => {
                self.target_lost_early();
                let role = if stream < self.streams.urgent(0) { Role::Bulk } else { Role::Urgent };
                let error = ReceiveError::Link(ErrorKind::UnexpectedEof.into());
                self.target_input(link, Input::ChannelLost { role, channel, error });
            }
            _ => {}
        }
    }

    /// Runs the target's loop until it has nothing to do.
    pub(super) fn pump_target(&mut self) {
        if self.now < self.there.asleep_until {
            return;
        }
        while !self.there.ended() {
            self.there.looks = 0;
            match run::advance(&mut AtTarget(self)) {
                Ok(Outcome::Running) => self.there.rest = true,
                Ok(outcome) => {
                    self.there.outcome = Some(outcome);
                    self.transmit(TO_SOURCE, Cargo::Eof);
                }
                Err(Idle) => return self.set_target_timer(),
            }
        }
        self.refuse_who_waits();
    }

    /// Schedules a run of the loop at the time that it wants, or later.
    fn set_target_timer(&mut self) {
        if self.there.agenda.is_under_way() || std::mem::replace(&mut self.there.timer, true) {
            return;
        }
        let longest = if self.now < 5_000_000 { 100_000 } else { 2_000_000 };
        let late = self.rng.below(longest);
        let wanted = u64::try_from(self.there.wake_at.as_micros()).expect("short");
        self.at(wanted.saturating_sub(self.now) + late, Item::TargetWakes);
    }

    fn perform_target(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        Ok(match action {
            Action::Send(message) => self.target_transmits(message),
            Action::AwaitChannels(channels) => {
                let streams = self.streams;
                let right = usize::from(channels.bulk) == streams.bulk
                    && usize::from(channels.urgent) == streams.urgent
                    && channels.probe == streams.probe;
                self.promise(right, |_| "another number of channels".into());
                None
            }
            Action::PrepareDemandPaging => {
                let why = Refusal::new(RefusalCode::Feature, "a step failed");
                let failed = self.rng.per_mille(self.faults.step_fails);
                Some(if failed { Event::LocalFailure(why) } else { Event::Prepared })
            }
            Action::TakeMissing(piece) => {
                self.there.collected.add(&piece).expect("honest pieces");
                None
            }
            Action::BeginDemandPaging { pages } => self.begin_lazily(pages),
            Action::NameMissing => Some(self.retell()),
            Action::RequestAgain => {
                self.ask_again();
                None
            }
            Action::Disconnect => {
                self.disconnect_target();
                None
            }
            Action::AskArbiter { word, after } => {
                self.ask_fence(Side::Target, word, after);
                None
            }
            Action::EndDemandPaging => {
                self.end_lazily();
                None
            }
            part @ (Action::OpenStream(_) | Action::WriteStream { .. } | Action::FinishStream { .. }) => {
                self.take_stream(part);
                None
            }
            Action::CountDamaged { pass } => {
                let suspects = self.suspects();
                Some(Event::Damaged { pass, pages: suspects.len() as u64, runs: suspects })
            }
            Action::CountMismatches => {
                let name = |page: &usize| PageName { region: RegionId(0), page: *page as u64 };
                let (pages, mismatched) = (self.there.compared, self.there.differ.len() as u64);
                let samples = self.there.differ.iter().map(name).collect();
                Some(Event::Compared { pages, mismatched, samples })
            }
            step => {
                let mut delay = self.rng.latency(300);
                if matches!(step, Action::Start { .. }) {
                    delay += self.stopped_for();
                }
                self.at(delay, Item::TargetStep(step));
                return Err(Idle);
            }
        })
    }

    /// Takes a part of a stream of device state, which must be the one that was sent.
    fn take_stream(&mut self, part: Action) {
        match part {
            Action::OpenStream(name) => {
                let next = self.there.streams.len() == usize::try_from(name.instance).expect("few");
                self.promise(next, |_| "streams are opened in another order".into());
                self.there.streams.push((0, false));
            }
            Action::WriteStream { stream, bytes } => {
                let (came, ended) = &mut self.there.streams[usize::try_from(stream).expect("few")];
                let wanted = (*came..).map(|at| at.to_le_bytes()[0]);
                let right = !*ended && bytes.iter().copied().zip(wanted).all(|(is, wanted)| is == wanted);
                *came += bytes.len() as u64;
                self.promise(right, |_| "a stream has other bytes than were sent".into());
            }
            Action::FinishStream { stream } => {
                let ended = &mut self.there.streams[usize::try_from(stream).expect("few")].1;
                let once = !std::mem::replace(ended, true);
                self.promise(once, |_| "a stream ends twice".into());
            }
            other => panic!("{other:?} is no part of a stream"),
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
        let why = Refusal::new(RefusalCode::State, "a step failed");
        let event = match action {
            Action::Load(_) => {
                self.there.loads += 1;
                let first = self.there.loads == 1;
                self.promise(first, |_| "loaded twice".into());
                let whole = self.there.streams == self.here.streams;
                self.promise(whole, |_| "loaded before all device state had come".into());
                if self.defect == Defect::StartsAtLoad {
                    self.start();
                }
                match failed {
                    _ if self.abandoned() => Event::PeerLost("while the state was loaded".into()),
                    true => Event::LocalFailure(why),
                    false => Event::Loaded { micros: 9 },
                }
            }
            Action::PrepareVm(_) => {
                self.there.prepared += 1;
                let runs = self.here.running || self.here.ended();
                let in_time = self.there.prepared == 1 && self.there.loads == 0 && runs;
                self.promise(in_time, |_| "prepared twice, or while the guest is paused".into());
                if failed { Event::LocalFailure(why) } else { Event::VmPrepared { load_us: Some(9) } }
            }
            _ if failed || !self.commit_lazily() => Event::StartFailed(why),
            step => {
                let as_wanted = step == Action::Start { wanted: self.here.wanted };
                self.promise(as_wanted, |_| {
                    "the operator's pause is lost, or a running guest is paused".into()
                });
                self.start();
                Event::Started { micros: 9, cpu_us: 9 }
            }
        };
        self.there.done = Some(event);
    }

    /// Starts the guest, and checks the promises of a start: the guest runs on the target only if
    /// it was handed over, and only with the memory that it had.
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

/// Simulated host of the target.
struct AtTarget<'a>(&'a mut World);

impl run::Host for AtTarget<'_> {
    type Session = Session;
    type Idle = Idle;

    fn now(&self) -> Duration {
        Duration::from_micros(self.0.now)
    }

    fn session(&self) -> &Session {
        &self.0.there.session
    }

    fn agenda(&mut self) -> &mut Agenda<Action> {
        &mut self.0.there.agenda
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.0.target_handle(event)
    }

    fn decided(&self) -> bool {
        let there = &self.0.there;
        // With the defect, each event after the session's decision removes the waiting actions.
        let first = !there.asked.replace(!there.asked.get());
        there.session.ended() && !(first && self.0.defect == Defect::DropsTheEnd)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        self.0.perform_target(action)
    }

    fn performed(&mut self) -> Result<Option<Event>, Idle> {
        self.0.there.done.take().map(Some).ok_or(Idle)
    }

    fn next(&mut self) -> Result<Option<Event>, Idle> {
        self.0.there.asked.set(false);
        self.0.there.looks += 1;
        if self.0.there.looks > MOST_LOOKS {
            self.0.promise(false, |world| format!("the target's loop spins while {:?}", world.there.session));
            return Err(Idle);
        }
        if self.0.defect == Defect::RepeatsStop && self.0.there.stopped {
            return Ok(Some(Event::Stopped));
        }
        inbox::next(self)
    }
}

impl Sources for AtTarget<'_> {
    type Connection = Hail;

    fn inbox(&mut self) -> &mut Inbox {
        &mut self.0.there.inbox
    }

    fn peer(&self) -> &'static str {
        "the source"
    }

    fn peer_timeout(&self) -> Duration {
        self.0.here.settings.peer_timeout
    }

    fn attempt(&self) -> u64 {
        self.0.there.link as u64
    }

    fn stopped(&self) -> bool {
        self.0.there.stopped
    }

    fn setup_timeout(&self) -> Duration {
        // In the simulation, the first message may be stalled for longer than the limit.
        Duration::MAX
    }

    fn answer(&mut self) -> Option<Ruled> {
        self.0.there.answers.pop_front()
    }

    fn found(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.0.there.found.pop_front() {
                return Some(event);
            }
            let link = self.0.there.late.pop_front()?;
            if let Some(event) = self.0.take_up(link) {
                return Some(event);
            }
        }
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered<Hail>>, Idle> {
        self.0.there.wake_at = until;
        self.0.there.inputs.pop_front().map(Some).ok_or(Idle)
    }

    fn connected(&mut self, connection: Hail) -> Option<Event> {
        match connection {
            Hail::Channel => Some(Event::ChannelUp),
            Hail::Back(link) => self.0.take_up(link),
        }
    }

    fn all_here(&self) -> Option<Event> {
        self.0.there.lazy.as_ref().map(|lazy| Event::MissingArrived(lazy.figures.clone()))
    }
}
