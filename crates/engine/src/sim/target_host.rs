//! Host of the target in the simulation.

use super::link::Cargo;
use super::rng::Rng;
use super::source_host::{Idle, MOST_LOOKS, layout, local_memory, machine};
use super::target_postcopy::Paging;
use super::world::{BULK, Defect, Item, TO_SOURCE, TO_TARGET, World};
use crate::arbiter::{ArbiterAnswer, Ownership, Side};
use crate::missing_pages::CollectedPages;
use crate::run::{self, ActionQueue};
use crate::target::inbox::{self, Inbox, Input, Numbered, Sources};
use crate::target::receiver::ReceiveError;
use crate::target::session::{Action, Event, Outcome, Session, Tokens};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::time::Duration;
use vmferry_core::RegionId;
use vmferry_wire::{Refusal, RefusalCode, RegionPage, RegionRun, Role, ToTarget, Token};

pub(super) fn tokens() -> Tokens {
    Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) }
}

/// Connection with a hello.
#[derive(Debug)]
pub(super) enum HelloConnection {
    /// A channel for pages.
    Channel,
    /// A control channel for a lost link, with the number of its set of channels.
    Back(usize),
}

pub(super) struct TargetHost {
    pub(super) session: Session,
    pub(super) action_queue: ActionQueue<Action>,
    pub(super) inbox: Inbox,
    /// Reports of threads, oldest first.
    pub(super) inputs: VecDeque<Numbered<HelloConnection>>,
    /// Events, and then connections, that were found while channels were ended.
    pub(super) found: VecDeque<Event>,
    pub(super) late: VecDeque<usize>,
    pub(super) answers: VecDeque<ArbiterAnswer>,
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
    pub(super) collected: CollectedPages,
    /// True if a thread has found that a channel is lost.
    pub(super) lost: bool,
    /// State of demand paging, once the guest is about to run without all of its memory.
    pub(super) paging: Option<Paging>,
    /// True if the guest runs, and the rest of its memory is being received.
    pub(super) in_postcopy: bool,
    /// Time at which the link was lost.
    pub(super) lost_at: Option<u64>,
    pub(super) pages: Vec<u64>,
    pub(super) mismatched: Vec<bool>,
    /// Number of pages that arrived as deltas.
    pub(super) deltas: u64,
    compared: u64,
    differ: Vec<usize>,
    pub(super) prepared: u32,
    /// Number of received bytes of each stream of device state, and whether the stream has ended.
    streams: Vec<(u64, bool)>,
    loads: u32,
    starts: u32,
}

impl TargetHost {
    pub(super) fn new(rng: &mut Rng, pages: usize, has_arbiter: bool) -> Self {
        let wants_trial = rng.per_mille(300);
        Self {
            session: Session::begin(machine(pages), tokens())
                .with_arbiter(has_arbiter)
                .wanting_trial(wants_trial),
            action_queue: ActionQueue::new(Vec::new()),
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
            collected: CollectedPages::new(&layout(pages)),
            lost: false,
            paging: None,
            in_postcopy: false,
            lost_at: None,
            pages: vec![0; pages],
            mismatched: vec![false; pages],
            deltas: 0,
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
    pub(super) fn target_input(&mut self, link: usize, input: Input<HelloConnection>) {
        self.target.inputs.push_back((link as u64, input));
        if self.target.asleep_until <= self.now && self.rng.per_mille(200) {
            // The loop's thread is woken and runs later. Other inputs may arrive before that.
            let delay = self.rng.latency(200);
            self.target.asleep_until = self.now + delay;
            self.at(delay, Item::Runs);
        }
    }

    fn target_handle(&mut self, event: Event) -> Vec<Action> {
        let back = matches!(event, Event::ControlReopened);
        let mut actions = self.target.session.handle(event);
        let closes = back && actions.contains(&Action::Disconnect);
        self.promise(!closes, |_| "the target closes the control channel that it has just taken".into());
        if self.defect == Defect::EndsRenounced && self.target.session.renounced() {
            let why = Refusal::new(RefusalCode::Other, "renounced");
            actions.push(Action::Finish(Outcome::Failed(why)));
        }
        actions
    }

    /// Reports the loss of the control channel, as its thread does.
    pub(super) fn target_lost(&mut self, link: usize) {
        if link == self.target.link && self.target.connected {
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
        let ours = link == self.target.link && self.target.connected;
        if self.target.ended() || !(ours || late) {
            return;
        }
        let channel = u16::try_from(stream.saturating_sub(BULK)).expect("few channels");
        match cargo {
            Cargo::ToTarget(ToTarget::Commit)
                if self.defect == Defect::StartsRenounced && self.target.session.renounced() =>
            {
                self.start();
            }
            Cargo::ToTarget(message) => self.target_input(link, Input::Message(message)),
            Cargo::Hello(token) => {
                let (bulk, urgent) = self.target.tokens;
                let wanted = if stream < self.streams.urgent(0) { bulk } else { urgent };
                self.promise(token == wanted, |_| "a channel with another token".into());
                self.target_input(link, Input::Connected(HelloConnection::Channel));
            }
            Cargo::Pages(pages) if self.target.paging.is_some() => self.take_pages(pages),
            Cargo::Pages(pages) => {
                let frozen = self.target.loads > 0;
                self.promise(!frozen, |_| "pages came after the state was loaded".into());
                for sent in pages {
                    let content = self.decode(&sent);
                    self.target.pages[sent.page] = content;
                    self.target.mismatched[sent.page] = content != sent.digest;
                }
            }
            Cargo::Digests(digests) => {
                for (page, digest) in digests {
                    self.target.compared += 1;
                    if self.target.pages[page] != digest {
                        self.target.differ.push(page);
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
        if self.now < self.target.asleep_until {
            return;
        }
        while !self.target.ended() {
            self.target.looks = 0;
            match run::advance(&mut AtTarget(self)) {
                Ok(Outcome::Running) => self.target.in_postcopy = true,
                Ok(outcome) => {
                    self.target.outcome = Some(outcome);
                    self.transmit(TO_SOURCE, Cargo::Eof);
                }
                Err(Idle) => return self.set_target_timer(),
            }
        }
        self.refuse_who_waits();
    }

    /// Schedules a run of the loop at the time that it wants, or later.
    fn set_target_timer(&mut self) {
        if self.target.action_queue.is_under_way() || std::mem::replace(&mut self.target.timer, true) {
            return;
        }
        let longest = if self.now < 5_000_000 { 100_000 } else { 2_000_000 };
        let late = self.rng.below(longest);
        let wanted = u64::try_from(self.target.wake_at.as_micros()).expect("short");
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
                self.target.collected.add(&piece).expect("honest pieces");
                None
            }
            Action::BeginDemandPaging { pages } => self.begin_paging(pages),
            Action::NameMissing => Some(self.retell()),
            Action::RequestAgain => {
                self.request_again();
                None
            }
            Action::Disconnect => {
                self.disconnect_target();
                None
            }
            Action::AskArbiter { request, after } => {
                self.ask_arbiter(Side::Target, request, after);
                None
            }
            Action::EndDemandPaging => {
                self.end_paging();
                None
            }
            part @ (Action::OpenStream(_) | Action::WriteStream { .. } | Action::FinishStream { .. }) => {
                self.take_stream(part);
                None
            }
            Action::CountDigestMismatches { pass } => {
                let mismatches = self.mismatches();
                Some(Event::DigestMismatches { pass, pages: mismatches.len() as u64, runs: mismatches })
            }
            Action::CountMismatches => {
                let name = |page: &usize| RegionPage { region: RegionId(0), page: *page as u64 };
                let (pages, mismatched) = (self.target.compared, self.target.differ.len() as u64);
                let samples = self.target.differ.iter().map(name).collect();
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
                let next = self.target.streams.len() == usize::try_from(name.instance).expect("few");
                self.promise(next, |_| "streams are opened in another order".into());
                self.target.streams.push((0, false));
            }
            Action::WriteStream { stream, bytes } => {
                let (came, ended) = &mut self.target.streams[usize::try_from(stream).expect("few")];
                let wanted = (*came..).map(|at| at.to_le_bytes()[0]);
                let right = !*ended && bytes.iter().copied().zip(wanted).all(|(is, wanted)| is == wanted);
                *came += bytes.len() as u64;
                self.promise(right, |_| "a stream has other bytes than were sent".into());
            }
            Action::FinishStream { stream } => {
                let ended = &mut self.target.streams[usize::try_from(stream).expect("few")].1;
                let once = !std::mem::replace(ended, true);
                self.promise(once, |_| "a stream ends twice".into());
            }
            other => panic!("{other:?} is no part of a stream"),
        }
    }

    fn mismatches(&self) -> Vec<RegionRun> {
        let name =
            |(page, _): (usize, &bool)| RegionRun { region: RegionId(0), first: page as u64, count: 1 };
        let blind = self.defect == Defect::BlindToDamage;
        self.target
            .mismatched
            .iter()
            .enumerate()
            .filter(|(_, mismatched)| **mismatched && !blind)
            .map(name)
            .collect()
    }

    pub(super) fn target_step_done(&mut self, action: Action) {
        if self.target.ended() {
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
                self.target.loads += 1;
                let first = self.target.loads == 1;
                self.promise(first, |_| "loaded twice".into());
                let whole = self.target.streams == self.source.streams;
                self.promise(whole, |_| "loaded before all device state had come".into());
                if self.defect == Defect::StartsAtLoad {
                    self.start();
                }
                if self.is_local() && self.defect == Defect::WritesAtLoad {
                    self.memory.write_in_use(&mut self.rng);
                }
                match failed {
                    _ if self.abandoned() => Event::PeerLost("while the state was loaded".into()),
                    true => Event::LocalFailure(why),
                    false => Event::Loaded { micros: 9 },
                }
            }
            Action::TakeMemory(regions) => {
                let right = regions == local_memory(self.memory.pages.len());
                self.promise(right, |_| "other memory is taken than was shared".into());
                if failed { Event::LocalFailure(why) } else { Event::MemoryTaken }
            }
            Action::PrepareVm(_) => {
                self.target.prepared += 1;
                let runs = self.source.running || self.source.ended();
                let in_time = self.target.prepared == 1 && self.target.loads == 0 && runs;
                self.promise(in_time, |_| "prepared twice, or while the guest is paused".into());
                if failed { Event::LocalFailure(why) } else { Event::VmPrepared { load_us: Some(9) } }
            }
            _ if failed || !self.commit_paging() => Event::StartFailed(why),
            step => {
                let as_wanted = step == Action::Start { wanted: self.source.wanted };
                self.promise(as_wanted, |_| {
                    "the operator's pause is lost, or a running guest is paused".into()
                });
                self.start();
                Event::Started { micros: 9, cpu_us: 9 }
            }
        };
        self.target.done = Some(event);
    }

    /// Starts the guest, and checks the promises of a start: the guest runs on the target only if
    /// it was handed over, and only with the memory that it had.
    fn start(&mut self) {
        self.target.running = true;
        self.target.starts += 1;
        self.target.holds = true;
        let free = !self.source.holds;
        self.promise(free, |_| "started without its disks".into());
        self.check_owner();
        let once = self.target.starts == 1;
        self.promise(once, |_| "started twice".into());
        self.promise(self.source.committed, |_| "started before the commit".into());
        let ours = !self.has_arbiter() || matches!(self.arbiter.register, Some(Ownership::Target { .. }));
        self.promise(ours, |world| format!("started, and the fence holds {:?}", world.arbiter.register));
        self.thaw();
        if self.is_local() {
            self.target.pages.clone_from(&self.memory.pages);
        }
        self.start_paging();
        let paging = self.target.paging.as_ref();
        let present = |page: &usize| paging.is_none_or(|paging| paging.present[*page]);
        let pages = (0..self.target.pages.len()).filter(present);
        let same = |page: usize| self.target.pages[page] == self.memory.pages[page];
        let equal = pages.clone().all(|page| !self.memory.counts(page) || same(page));
        self.promise(equal, |world| {
            format!("started with other memory: {:?} instead of {:?}", world.target.pages, world.memory.pages)
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
        &self.0.target.session
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.0.target.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.0.target_handle(event)
    }

    fn decided(&self) -> bool {
        let target = &self.0.target;
        // With the defect, each event after the session's decision removes the waiting actions.
        let first = !target.asked.replace(!target.asked.get());
        target.session.ended() && !(first && self.0.defect == Defect::DropsTheEnd)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        self.0.perform_target(action)
    }

    fn performed(&mut self) -> Result<Option<Event>, Idle> {
        self.0.target.done.take().map(Some).ok_or(Idle)
    }

    fn next(&mut self) -> Result<Option<Event>, Idle> {
        self.0.target.asked.set(false);
        self.0.target.looks += 1;
        if self.0.target.looks > MOST_LOOKS {
            self.0
                .promise(false, |world| format!("the target's loop spins while {:?}", world.target.session));
            return Err(Idle);
        }
        if self.0.defect == Defect::RepeatsStop && self.0.target.stopped {
            return Ok(Some(Event::Stopped));
        }
        inbox::next(self)
    }
}

impl Sources for AtTarget<'_> {
    type Connection = HelloConnection;

    fn inbox(&mut self) -> &mut Inbox {
        &mut self.0.target.inbox
    }

    fn peer(&self) -> &'static str {
        "the source"
    }

    fn peer_timeout(&self) -> Duration {
        self.0.source.settings.peer_timeout
    }

    fn attempt(&self) -> u64 {
        self.0.target.link as u64
    }

    fn stopped(&self) -> bool {
        self.0.target.stopped
    }

    fn setup_timeout(&self) -> Duration {
        // In the simulation, the first message may be stalled for longer than the limit.
        Duration::MAX
    }

    fn answer(&mut self) -> Option<ArbiterAnswer> {
        self.0.target.answers.pop_front()
    }

    fn found(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.0.target.found.pop_front() {
                return Some(event);
            }
            let link = self.0.target.late.pop_front()?;
            if let Some(event) = self.0.take_up(link) {
                return Some(event);
            }
        }
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered<HelloConnection>>, Idle> {
        self.0.target.wake_at = until;
        self.0.target.inputs.pop_front().map(Some).ok_or(Idle)
    }

    fn connected(&mut self, connection: HelloConnection) -> Option<Event> {
        match connection {
            HelloConnection::Channel => Some(Event::ChannelUp),
            HelloConnection::Back(link) => self.0.take_up(link),
        }
    }

    fn all_arrived(&self) -> Option<Event> {
        self.0.target.paging.as_ref().map(|paging| Event::MissingArrived(paging.figures.clone()))
    }
}
