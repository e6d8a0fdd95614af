//! The target's side of a migration as a state machine without I/O: events in, actions out.
//!
//! The rule that everything else serves: the guest runs here only after [`ToTarget::Commit`], and whatever goes wrong
//! before that ends without it having run. If the source may have sent that word and its link is lost, this side gives the
//! guest up for good and stays to say so ([`State::Renounced`]). If the guest then runs before all of its memory is here, nothing that happens to the
//! link ends anything: what is lacking is waited for, over new channels if need be.

mod fenced;
mod lazy;
#[cfg(test)]
mod projection;
mod starting;

use crate::fence::{ArbiterError, Ruling, Word};
use crate::run;
use std::time::Duration;
use vmferry_core::{MachineConfig, Section};
use vmferry_wire::{
    LackingPages, LazyFigures, MAX_SECTIONS, MAX_STATE_BYTES, Mode, PageName, Refusal, RefusalCode, RunName,
    ToSource, ToTarget, Token,
};

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
    /// This host can take pages while the guest runs.
    Prepared,
    /// No page is lacking any more.
    AllHere(LazyFigures),
    /// The source has opened a new control channel.
    ControlBack,
    /// The fence has answered this word, or has not.
    Ruled(Word, Result<Ruling, ArbiterError>),
    /// Somebody here wants no guest any more.
    Stopped,
    /// What is lacking, `pages` pages, was told to the source; these are the tokens for its new channels.
    Retold {
        pages: u64,
        tokens: (Token, Token),
    },
}

/// What channels there are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Channels {
    pub(crate) bulk: u16,
    pub(crate) urgent: u16,
    pub(crate) probe: bool,
}

impl Channels {
    fn count(self) -> u32 {
        u32::from(self.bulk) + u32::from(self.urgent) + u32::from(self.probe)
    }
}

/// What the driver has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Send(ToSource),
    /// Make sure that this host can take pages while the guest runs: report [`Event::Prepared`], or [`Event::LocalFailure`].
    PrepareLazily,
    /// Take these channels, with the tokens that `Accept` or `Resume` names.
    AwaitChannels(Channels),
    /// Report [`Event::Suspects`].
    CountSuspects {
        pass: u32,
    },
    /// Report [`Event::Compared`].
    CountDifferences,
    /// Add these pages to those that are lacking.
    TakeLacking(LackingPages),
    /// `pages` pages were named: drop them, and take them as they come from now on.
    BeginLazily {
        pages: u64,
    },
    Load(Vec<Section>),
    /// Say this to the fence after a while, and report [`Event::Ruled`]; that the guest runs is said until it is heard, and not reported.
    Fence {
        word: Word,
        after: Duration,
    },
    Start,
    /// Close every channel: the link is lost.
    Disconnect,
    /// Tell the source over its new control channel what is lacking; report [`Event::Retold`].
    Retell,
    /// Ask for the pages that somebody waits for, on the new channels.
    AskAgain,
    /// Nothing is lacking: end the faults.
    EndLazily,
    Finish(Outcome),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The guest runs here, and all of it is here.
    Completed,
    /// The guest runs here, and pages are still to come: the same session goes on, without the VM.
    RunsLazily,
    /// The guest has not run here and will not.
    Failed(Refusal),
}

#[cfg_attr(test, derive(Hash))]
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum State {
    AwaitSetup,
    /// The guest fits, and its register is looked for.
    Looking,
    Preparing,
    AwaitChannels {
        missing: u32,
    },
    Receiving,
    Loading,
    Ready,
    /// The source has handed the guest over, and the fence is asked whether it may be run.
    Claiming,
    Starting,
    /// The guest will never run here, and its source, which may have told this side to run it, does not know that yet.
    Renounced,
    /// The guest runs, and its pages come.
    Lazy,
    /// The guest runs, and the link is lost.
    Suspended,
    /// The source is back: it is being told what is lacking.
    Retelling,
    /// Its channels are being opened.
    Reopening {
        missing: u32,
    },
    /// Everything is here, and the source was told.
    Thanking,
    Done,
}

#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
pub(crate) struct Session {
    machine: MachineConfig,
    tokens: Tokens,
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
    mode: Mode,
    channels: Channels,
    /// The guest is started before all of its memory is here.
    lazy: bool,
    /// The link was lost while the guest was being started.
    lost: bool,
    /// Set once nothing is lacking.
    complete: Option<LazyFigures>,
    /// Why the guest was renounced, once it was.
    renounced: Option<Refusal>,
    /// With a fence.
    fenced: Option<fenced::Fenced>,
    /// Microseconds that the guest is expected to stand still here, for a source that wants to know.
    load_us: Option<u64>,
}

/// Fresh random bits, given to the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) bulk: Token,
    pub(crate) urgent: Token,
    pub(crate) resume: Token,
}

/// The link was lost when the guest was as good as started.
fn lost_before(why: &str) -> Refusal {
    let detail = format!("the link was lost before the guest was started on the target ({why})");
    Refusal::new(RefusalCode::Other, detail)
}

impl Session {
    /// Begins: a control channel is up.
    pub(crate) fn begin(machine: MachineConfig, tokens: Tokens) -> Self {
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
            mode: Mode::Precopy,
            channels: Channels { bulk: 0, urgent: 0, probe: false },
            lazy: false,
            lost: false,
            complete: None,
            renounced: None,
            fenced: None,
            load_us: None,
        }
    }

    /// The same session, which tells the source how long loading the state and starting the guest are expected to take.
    pub(crate) fn expecting(self, load: Option<Duration>) -> Self {
        Self { load_us: load.map(|load| u64::try_from(load.as_micros()).unwrap_or(u64::MAX)), ..self }
    }

    /// Whether the source has announced a guest that fits.
    pub(crate) fn accepted(&self) -> bool {
        self.accepted
    }

    /// Returns whether the source has not announced its guest yet.
    pub(crate) fn awaits_setup(&self) -> bool {
        self.state == State::AwaitSetup
    }

    /// Returns whether a stop changes anything now.
    ///
    /// While this is true, an [`Event::Stopped`] ends the session or renounces the guest. The driver
    /// reports a stop only while this is true: the stop flag stays set, and an event that changes
    /// nothing would keep the driver from all others.
    pub(crate) fn heeds_stop(&self) -> bool {
        match self.state {
            // With an arbiter the guest is being given back. The session ends with the answer.
            State::Renounced => self.fenced.is_none(),
            State::Starting | State::Done => false,
            _ => !self.running_lazily(),
        }
    }

    /// Whether all memory is here, so that the bulk channels have done their work.
    pub(crate) fn memory_complete(&self) -> bool {
        !self.lazy && matches!(self.state, State::Loading | State::Ready | State::Claiming | State::Starting)
    }

    /// Whether it is over: what was still to be done is moot.
    pub(crate) fn ended(&self) -> bool {
        self.state == State::Done
    }

    /// Takes in what happened; gives out what to do, in this order.
    pub(crate) fn handle(&mut self, event: Event) -> Vec<Action> {
        if self.state == State::Done {
            return Vec::new();
        }
        match event {
            Event::Message(ToTarget::Ping(number)) => vec![Action::Send(ToSource::Pong(number))],
            Event::Ruled(word, answer) => self.ruled(word, answer),
            event if self.running_lazily() => self.lazily(event),
            event if self.state == State::Renounced => self.after_renouncing(event),
            Event::AllHere(figures) => {
                // So few pages were lacking that they came while the state was loaded. Told when the guest runs.
                self.complete = Some(figures);
                Vec::new()
            }
            // Before `Stopped`: a target that may own the guest has to give it back to the arbiter.
            event if self.state == State::Claiming => self.claiming(event),
            event if self.state == State::Starting => self.starting(event),
            Event::Stopped => {
                self.fail(Refusal::new(RefusalCode::Cancelled, "the target was told to stop"), true)
            }
            // The source would not take up a link that it did not know to be lost.
            Event::ControlBack if self.may_be_asked() => {
                let given_back = self.renounce(lost_before("the source opened a new one"));
                self.after_renouncing(Event::ControlBack).into_iter().chain(given_back).collect()
            }
            Event::PeerLost(why) if self.may_be_asked() => self.fail(lost_before(&why), false),
            Event::Message(message) => self.message(message),
            Event::Prepared if self.state == State::Preparing => self.accept(),
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
            Event::Loaded { .. }
            | Event::Started { .. }
            | Event::StartFailed(_)
            | Event::Prepared
            | Event::ControlBack
            | Event::Retold { .. } => {
                self.fail(Refusal::new(RefusalCode::Protocol, "a step was reported twice"), true)
            }
        }
    }

    fn fail(&mut self, why: Refusal, tell: bool) -> Vec<Action> {
        let told = tell.then(|| Action::Send(ToSource::Failed(why.clone())));
        if self.may_be_asked() {
            // The commit may be on its way.
            let given_back = self.renounce(why);
            return [told.unwrap_or(Action::Disconnect)].into_iter().chain(given_back).collect();
        }
        self.end(why, told)
    }

    fn end(&mut self, why: Refusal, tell: Option<Action>) -> Vec<Action> {
        self.state = State::Done;
        tell.into_iter().chain([Action::Finish(Outcome::Failed(why))]).collect()
    }

    fn message(&mut self, message: ToTarget) -> Vec<Action> {
        match (self.state, message) {
            // A source that cancels has not committed.
            (_, ToTarget::Cancel(why)) => self.end(why, None),
            (
                State::AwaitSetup,
                ToTarget::Setup { machine, mode, bulk_channels: bulk, urgent_channels: urgent, probe },
            ) => self.setup(&machine, mode, Channels { bulk, urgent, probe }),
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
            (State::Receiving, ToTarget::Lacking(piece)) if self.mode.may_be_lazy() => {
                vec![Action::TakeLacking(piece)]
            }
            (State::Receiving, ToTarget::LoadLazily { pages }) if self.mode.may_be_lazy() => {
                self.load_lazily(pages)
            }
            (State::Ready, ToTarget::Commit) if self.fenced.is_some() => self.claim(),
            (State::Ready, ToTarget::Commit) => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (state, message) => {
                let name = message.name();
                let detail = format!("the source sent {name}, which does not fit this moment ({state:?})");
                self.fail(Refusal::new(RefusalCode::Protocol, detail), true)
            }
        }
    }

    fn setup(&mut self, machine: &MachineConfig, mode: Mode, channels: Channels) -> Vec<Action> {
        if let Some(difference) = self.machine.difference(machine) {
            let detail = format!("{difference} (here = target, there = source); start the target alike");
            return self.fail(Refusal::new(RefusalCode::Machine, detail), true);
        }
        let Channels { bulk, urgent, probe } = channels;
        let most = crate::Settings::MAX_CHANNELS;
        if !(1..=most).contains(&bulk) {
            let detail = format!("{bulk} bulk channels were asked for, 1 to {most} are possible");
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        let right = if mode.may_be_lazy() { (1..=most).contains(&urgent) } else { urgent == 0 && !probe };
        if !right {
            let detail = format!(
                "{urgent} urgent channels were asked for ({mode:?}); 1 to {most} are possible, and none in precopy"
            );
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        self.mode = mode;
        self.channels = channels;
        self.barriers = vec![0; usize::from(bulk)];
        if self.fenced.is_some() { self.look() } else { self.prepare() }
    }

    fn prepare(&mut self) -> Vec<Action> {
        if !self.mode.may_be_lazy() {
            return self.accept();
        }
        // A host that cannot do it says so before anything else, and goes on waiting for somebody else.
        self.state = State::Preparing;
        vec![Action::PrepareLazily]
    }

    fn accept(&mut self) -> Vec<Action> {
        self.state = State::AwaitChannels { missing: self.channels.count() };
        self.accepted = true;
        let Tokens { bulk, urgent, resume } = self.tokens;
        let costs = self.load_us.map(|load_us| Action::Send(ToSource::Costs { load_us }));
        [Action::AwaitChannels(self.channels), Action::Send(ToSource::Accept { bulk, urgent, resume })]
            .into_iter()
            .chain(costs)
            .collect()
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

impl run::Session for Session {
    type Event = Event;
    type Action = Action;
    type Outcome = Outcome;

    fn handle(&mut self, _: Duration, event: Event) -> Vec<Action> {
        self.handle(event)
    }

    fn decided(&self) -> bool {
        self.ended()
    }

    fn outcome(action: Action) -> Result<Outcome, Action> {
        if let Action::Finish(outcome) = action { Ok(outcome) } else { Err(action) }
    }
}
