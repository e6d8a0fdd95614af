//! The target's side of a migration as a state machine without I/O: events in, actions out.
//!
//! The rule that everything else serves: the guest runs here only after [`ToTarget::Commit`], and whatever goes wrong
//! before that ends without it having run.

use vmferry_wire::{
    MAX_STATE_BYTES, MachineConfig, PageName, Refusal, RefusalCode, RunName, Section, ToSource, ToTarget,
    Token,
};

/// Most sections of device state: far more than any machine has devices.
const MAX_SECTIONS: usize = 65_536;
/// Most runs of damaged pages that are named in one message.
pub(crate) const MAX_NAMED_RUNS: usize = 65_536;

/// What happened, reported by the driver.
#[derive(Debug)]
pub(crate) enum Event {
    Message(ToTarget),
    /// A bulk channel of this migration is up.
    ChannelUp,
    /// Channel `channel` has received everything of pass `pass`.
    Barrier {
        channel: u16,
        pass: u32,
    },
    /// Pages that do not match their digest, after pass `pass`.
    Suspects {
        pass: u32,
        pages: u64,
        runs: Vec<RunName>,
    },
    /// What comparing digests found.
    Compared {
        pages: u64,
        mismatched: u64,
        samples: Vec<PageName>,
    },
    Loaded {
        micros: u64,
    },
    Started {
        micros: u64,
        cpu_us: u64,
    },
    /// The state could not be loaded, a channel broke, memory could not be written.
    LocalFailure(Refusal),
    /// The vCPUs could not be started; none has run.
    StartFailed(Refusal),
    PeerLost(String),
}

/// What the driver has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Send(ToSource),
    /// Take bulk channels with the tokens that `Accept` names, this many.
    AwaitChannels(u16),
    /// Report [`Event::Suspects`].
    CountSuspects {
        pass: u32,
    },
    /// Report [`Event::Compared`].
    CountDifferences,
    Load(Vec<Section>),
    Start,
    Finish(Outcome),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The guest runs here.
    Completed,
    /// The guest has not run here and will not.
    Failed(Refusal),
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum State {
    AwaitSetup,
    AwaitChannels { missing: u16 },
    Receiving,
    Loading,
    Ready,
    Starting,
    Done,
}

#[derive(Debug)]
pub(crate) struct Session {
    machine: MachineConfig,
    tokens: (Token, Token),
    state: State,
    /// A guest that fits was announced: from then on memory is written to.
    accepted: bool,
    /// The newest pass whose barrier each channel reached, plus one.
    barriers: Vec<u32>,
    received: u32,
    last_pass: Option<u32>,
    verify_pass: Option<u32>,
    clean: bool,
    sections: Vec<Section>,
    state_bytes: usize,
    state_complete: bool,
}

impl Session {
    /// Begins: a control channel is up. `tokens` (bulk, urgent) are fresh random bits.
    pub(crate) fn begin(machine: MachineConfig, tokens: (Token, Token)) -> Self {
        Self {
            machine,
            tokens,
            state: State::AwaitSetup,
            accepted: false,
            barriers: Vec::new(),
            received: 0,
            last_pass: None,
            verify_pass: None,
            clean: false,
            sections: Vec::new(),
            state_bytes: 0,
            state_complete: false,
        }
    }

    /// Whether the source has announced a guest that fits.
    pub(crate) fn accepted(&self) -> bool {
        self.accepted
    }

    /// Whether all memory is here, so that the bulk channels have done their work.
    pub(crate) fn memory_complete(&self) -> bool {
        matches!(self.state, State::Loading | State::Ready | State::Starting)
    }

    /// Takes in what happened; gives out what to do, in this order.
    pub(crate) fn handle(&mut self, event: Event) -> Vec<Action> {
        if self.state == State::Done {
            return Vec::new();
        }
        match event {
            Event::Message(ToTarget::Ping(number)) => vec![Action::Send(ToSource::Pong(number))],
            Event::Started { micros, cpu_us } if self.state == State::Starting => {
                self.state = State::Done;
                vec![
                    Action::Send(ToSource::Running { start_us: micros, cpu_us }),
                    Action::Finish(Outcome::Completed),
                ]
            }
            Event::StartFailed(why) if self.state == State::Starting => {
                self.state = State::Done;
                vec![Action::Send(ToSource::Returned(why.clone())), Action::Finish(Outcome::Failed(why))]
            }
            // Once the commit is here nothing else counts, neither the source nor what a channel still reports: the
            // guest is ours and is being started, and only that start may say that it failed.
            _ if self.state == State::Starting => Vec::new(),
            Event::Message(message) => self.message(message),
            Event::ChannelUp => self.channel_up(),
            Event::Barrier { channel, pass } => self.barrier(channel, pass),
            Event::Suspects { pass, pages, runs } => {
                self.clean = pages == 0;
                vec![Action::Send(ToSource::Received { pass, suspects: pages, runs })]
            }
            Event::Compared { pages, mismatched, samples } => {
                vec![Action::Send(ToSource::Verified { pages, mismatched, samples })]
            }
            Event::Loaded { micros } if self.state == State::Loading => {
                self.state = State::Ready;
                vec![Action::Send(ToSource::Ready { load_us: micros })]
            }
            Event::LocalFailure(why) => self.fail(why, true),
            Event::PeerLost(why) => self.fail(Refusal::new(RefusalCode::Other, why), false),
            Event::Loaded { .. } | Event::Started { .. } | Event::StartFailed(_) => {
                self.fail(Refusal::new(RefusalCode::Protocol, "a step was reported twice"), true)
            }
        }
    }

    fn fail(&mut self, why: Refusal, tell: bool) -> Vec<Action> {
        self.state = State::Done;
        let tell = tell.then(|| Action::Send(ToSource::Failed(why.clone())));
        tell.into_iter().chain([Action::Finish(Outcome::Failed(why))]).collect()
    }

    fn message(&mut self, message: ToTarget) -> Vec<Action> {
        match (self.state, message) {
            (_, ToTarget::Cancel(why)) => self.fail(why, false),
            (State::AwaitSetup, ToTarget::Setup { machine, mode: _, bulk_channels }) => {
                self.setup(&machine, bulk_channels)
            }
            (State::Receiving, ToTarget::Pass { .. }) => Vec::new(),
            (State::Receiving, ToTarget::Final { pass }) => {
                self.last_pass = Some(pass);
                Vec::new()
            }
            (State::Receiving, ToTarget::Section(section)) => self.section(section),
            (State::Receiving, ToTarget::StateEnd { sections }) => {
                self.state_complete = true;
                if usize::try_from(sections) == Ok(self.sections.len()) {
                    return Vec::new();
                }
                let detail = format!("{} of {sections} sections of device state came", self.sections.len());
                self.fail(Refusal::new(RefusalCode::State, detail), true)
            }
            (State::Receiving, ToTarget::Verify { pass }) => {
                self.verify_pass = Some(pass);
                self.compared_if_complete()
            }
            (State::Receiving, ToTarget::Load) => self.load(),
            (State::Ready, ToTarget::Commit) => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (state, message) => {
                let name = format!("{message:?}");
                let name = name.split([' ', '(', '{']).next().unwrap_or_default();
                let detail = format!("the source sent {name}, which does not fit this moment ({state:?})");
                self.fail(Refusal::new(RefusalCode::Protocol, detail), true)
            }
        }
    }

    fn setup(&mut self, machine: &MachineConfig, bulk_channels: u16) -> Vec<Action> {
        if let Some(difference) = self.machine.difference(machine) {
            let detail = format!("{difference} (here = target, there = source); start the target alike");
            return self.fail(Refusal::new(RefusalCode::Machine, detail), true);
        }
        if !(1..=crate::Settings::MAX_CHANNELS).contains(&bulk_channels) {
            let detail = format!("{bulk_channels} bulk channels were asked for, 1 to 64 are possible");
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        self.state = State::AwaitChannels { missing: bulk_channels };
        self.accepted = true;
        self.barriers = vec![0; usize::from(bulk_channels)];
        let (bulk, urgent) = self.tokens;
        vec![Action::AwaitChannels(bulk_channels), Action::Send(ToSource::Accept { bulk, urgent })]
    }

    fn channel_up(&mut self) -> Vec<Action> {
        match self.state {
            State::AwaitChannels { missing: 1 } => {
                self.state = State::Receiving;
                vec![Action::Send(ToSource::ChannelsUp)]
            }
            State::AwaitChannels { missing } => {
                self.state = State::AwaitChannels { missing: missing - 1 };
                Vec::new()
            }
            _ => self.fail(Refusal::new(RefusalCode::Protocol, "a channel too many"), true),
        }
    }

    fn barrier(&mut self, channel: u16, pass: u32) -> Vec<Action> {
        let Some(newest) = self.barriers.get_mut(usize::from(channel)) else {
            return self.fail(Refusal::new(RefusalCode::Protocol, "a barrier on an unknown channel"), true);
        };
        if pass != *newest {
            let detail = format!("channel {channel} ended pass {pass}, expected was {newest}");
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        *newest = newest.saturating_add(1);
        let complete = self.barriers.iter().copied().min().unwrap_or(0);
        if complete == self.received {
            return Vec::new();
        }
        self.received = complete;
        // Unknown until they are counted.
        self.clean = false;
        let mut actions = vec![Action::CountSuspects { pass }];
        actions.extend(self.compared_if_complete());
        actions
    }

    fn compared_if_complete(&mut self) -> Vec<Action> {
        match self.verify_pass {
            Some(pass) if self.received > pass => {
                self.verify_pass = None;
                vec![Action::CountDifferences]
            }
            _ => Vec::new(),
        }
    }

    fn section(&mut self, section: Section) -> Vec<Action> {
        self.state_bytes += section.name.len() + section.payload.len();
        if self.state_bytes > MAX_STATE_BYTES || self.sections.len() == MAX_SECTIONS || self.state_complete {
            let detail =
                format!("more device state than the protocol allows ({} MiB)", MAX_STATE_BYTES >> 20);
            return self.fail(Refusal::new(RefusalCode::State, detail), true);
        }
        self.sections.push(section);
        Vec::new()
    }

    /// The commit is prepared only over memory that is complete and undamaged, whatever the source believes.
    fn load(&mut self) -> Vec<Action> {
        let arrived = self.last_pass.is_some_and(|pass| self.received > pass);
        if !(arrived && self.clean && self.state_complete) {
            let detail = format!(
                "load came too early (last pass complete: {arrived}, pages undamaged: {}, state complete: {})",
                self.clean, self.state_complete
            );
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        self.state = State::Loading;
        vec![Action::Load(std::mem::take(&mut self.sections))]
    }
}
