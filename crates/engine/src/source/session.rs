//! The source's side of a migration as a state machine without I/O: events in, actions out.
//!
//! The driver performs the actions and reports what came of them; the simulation does the same with a fake clock and a
//! link that breaks. Nothing here blocks, allocates per page or knows a socket.
//!
//! The rule that everything else serves: until [`ToTarget::Commit`] has been handed out, any failure ends in
//! [`Action::Resume`] (if the guest was paused) and the guest goes on here. From the moment it has been handed out, this
//! side never resumes the guest on its own, because the target may already run it; only the target's own word
//! [`ToSource::Returned`], by which it renounces the guest for good, gives it back, over whatever link that comes; or the fence's
//! ([`fenced`]).

mod busy;
mod ending;
mod fenced;
mod judge;
mod passes;
mod postcopy;
#[cfg(test)]
mod projection;
pub(crate) use postcopy::CONVERGING;
mod slow_down;
mod switchover;

use super::events::{Action, Event, Outcome, Pass, Verification};
use super::policy::Convergence;
use super::settings::{MigrationMode, Settings};
use crate::run;
use std::time::Duration;
use vmferry_core::MachineConfig;
use vmferry_wire::{LazyFigures, Refusal, RefusalCode, RunName, ToSource, ToTarget};

/// How many times pages that arrived damaged are sent again after the guest has stopped, before the link is given up.
const MAX_RESENDS: u32 = 4;
/// How long after a rehearsal that found the pause too long for the limit it is tried again; then twice as long, and so on.
const REHEARSE_AGAIN: Duration = Duration::from_millis(250);
/// A longer wait than that, or than this many times what the rehearsal took, would only keep a guest whose time has come.
const LONGEST_BETWEEN_REHEARSALS: Duration = Duration::from_secs(30);
const REHEARSALS_SHARE: u32 = 100;

#[cfg_attr(test, derive(Hash))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitAccept,
    /// Channels are being opened: `opened` here, `up` there.
    Opening {
        opened: bool,
        up: bool,
    },
    StartingTracker,
    /// A live pass: `sent` by us, `received` by the target.
    Passing {
        sent: bool,
        received: bool,
    },
    Harvesting,
    Rehearsing,
    /// Nearly nothing is left to send, and the guest cannot be stopped yet: passes would only cost it faults.
    Resting,
    Pausing,
    Saving,
    /// The guest's I/O is busy, and it is let run on.
    GoingOn,
    LastHarvest,
    LastPass {
        sent: bool,
        received: bool,
    },
    Verifying {
        sent: bool,
        received: bool,
        verified: bool,
    },
    /// The target is being told what it lacks.
    HandingOver,
    Loading,
    /// The target is ready, and this side lets go of what only one may hold.
    Releasing,
    Committed,
    /// Nobody knows whether the target runs the guest, and the fence is asked.
    Claiming,
    /// The guest runs on the target, and its pages are on their way.
    Postcopy,
    /// The link is lost in postcopy: waiting to try again, or for somebody to say so.
    Suspended,
    Reconnecting,
    /// The target says what it still lacks.
    Hearing,
    /// Channels are being opened anew.
    Reopening {
        opened: bool,
        up: bool,
    },
    /// Cleaning up: the guest is being resumed, then `ended` is reported.
    Resuming,
    Done,
}

/// The phase as people know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Setup,
    Precopy,
    Switchover,
    /// Nobody knows who owns the guest.
    Unknown,
    Postcopy,
    PostcopyPaused,
    Ended,
}

#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
pub(crate) struct Session {
    settings: Settings,
    state: State,
    started: Duration,
    policy: Convergence,
    /// Number of the pass under way.
    pass: u32,
    pass_began: Duration,
    pass_bytes: u64,
    /// Pages harvested and not yet handed to a pass.
    remaining: u64,
    /// Least time that stopping the vCPUs and saving the state took.
    fixed: Option<Duration>,
    /// Least time that saving the state took: loading is taken to be as long where the target does not say.
    save: Duration,
    /// Bytes of the state that was saved last.
    state_bytes: u64,
    /// Time that the target expects to need for loading the state and starting the guest.
    expected_load: Option<Duration>,
    /// Time that listing the pages of the last pass took.
    listing: Duration,
    /// What bringing I/O to rest took besides.
    settle: Duration,
    /// When that was measured, and how long after that it may be again.
    rehearsed: Duration,
    rehearse_after: Duration,
    /// Why the guest could not be brought to rest in time when that was tried last.
    busy: Option<String>,
    /// How often that was so, and for how long it stood still for that.
    put_off: u64,
    put_off_for: Duration,
    /// How long it has rested so far, and since when it does.
    rested: Duration,
    rests_since: Duration,
    /// The next harvest is of such a rest, and no pass's.
    after_rest: bool,
    harvest_began: Duration,
    last_harvest: Duration,
    switch_wanted: bool,
    /// Somebody, or the timeout, wants the guest to run on the target before the rest of its memory is there.
    postcopy_wanted: bool,
    /// The same of the migration itself, which can wait.
    postcopy_advised: bool,
    /// This switchover is of that kind.
    lazy: bool,
    /// Pages that the target was told it lacks.
    lacking: u64,
    /// Pages that were left by the pass before, in hybrid mode.
    left_before: Option<u64>,
    recovery: postcopy::Recovery,
    /// With a fence.
    fenced: Option<fenced::Fenced>,
    /// The target's account of the time after the switchover.
    pub(crate) figures: Option<LazyFigures>,
    /// Pages that each vCPU wrote during the last pass.
    writers: Vec<u64>,
    /// How much of its time each vCPU stands still; empty if never asked for.
    shares: Vec<f64>,
    judged: judge::Judged,
    resends: u32,
    again: Vec<RunName>,
    last_ping: (u64, Duration),
    round_trip: Duration,
    ended: Option<Outcome>,
    /// The guest is ours, and could not be resumed.
    stands_still: bool,
    /// Pages of all regions.
    pages: u64,
    /// What a verification has to cover.
    comparing: Option<u64>,
    /// When the state last changed.
    last_step: Duration,
    /// When the guest stood still for the last time.
    stopped: Duration,
    pub(crate) suspects_resent: u64,
    pub(crate) verification: Option<Verification>,
    pub(crate) load_time: Duration,
    pub(crate) start_time: Duration,
    pub(crate) target_cpu: Duration,
}

impl Session {
    /// Begins: the control channel is up. The guest has `pages` pages.
    pub(crate) fn begin(
        settings: Settings,
        machine: MachineConfig,
        pages: u64,
        now: Duration,
    ) -> (Self, Vec<Action>) {
        let setup = ToTarget::Setup {
            machine,
            mode: settings.wire_mode(),
            bulk_channels: settings.channels,
            urgent_channels: settings.urgent_count(),
            probe: settings.probe(),
        };
        let session = Self {
            policy: Convergence::of(&settings),
            fenced: settings.fence.is_some().then(fenced::Fenced::default),
            settings,
            state: State::AwaitAccept,
            started: now,
            pass: 0,
            pass_began: now,
            pass_bytes: 0,
            remaining: 0,
            fixed: None,
            save: Duration::ZERO,
            state_bytes: 0,
            expected_load: None,
            listing: Duration::ZERO,
            settle: Duration::ZERO,
            rehearsed: now,
            rehearse_after: REHEARSE_AGAIN / 2,
            busy: None,
            put_off: 0,
            put_off_for: Duration::ZERO,
            rested: Duration::ZERO,
            rests_since: now,
            after_rest: false,
            harvest_began: now,
            last_harvest: Duration::ZERO,
            switch_wanted: false,
            postcopy_wanted: false,
            postcopy_advised: false,
            lazy: false,
            lacking: 0,
            left_before: None,
            recovery: postcopy::Recovery::default(),
            figures: None,
            writers: Vec::new(),
            shares: Vec::new(),
            judged: judge::Judged::default(),
            resends: 0,
            again: Vec::new(),
            last_ping: (0, now),
            round_trip: Duration::ZERO,
            ended: None,
            stands_still: false,
            pages,
            comparing: None,
            last_step: now,
            stopped: now,
            suspects_resent: 0,
            verification: None,
            load_time: Duration::ZERO,
            start_time: Duration::ZERO,
            target_cpu: Duration::ZERO,
        };
        (session, vec![Action::Send(setup)])
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.state {
            State::AwaitAccept | State::Opening { .. } | State::StartingTracker => Phase::Setup,
            // With nothing sent, and nothing tracked.
            State::Resting if self.settings.mode == MigrationMode::Postcopy => Phase::Setup,
            State::Passing { .. } | State::Harvesting | State::Rehearsing | State::Resting => Phase::Precopy,
            State::Pausing
            | State::Saving
            | State::GoingOn
            | State::LastHarvest
            | State::LastPass { .. }
            | State::HandingOver
            | State::Verifying { .. }
            | State::Loading
            | State::Releasing
            | State::Committed => Phase::Switchover,
            State::Claiming => Phase::Unknown,
            State::Postcopy => Phase::Postcopy,
            State::Suspended | State::Reconnecting | State::Hearing | State::Reopening { .. } => {
                Phase::PostcopyPaused
            }
            State::Resuming | State::Done => Phase::Ended,
        }
    }

    /// Whether the target has been told that the guest is its own.
    pub(crate) fn committed(&self) -> bool {
        matches!(self.state, State::Committed | State::Claiming)
            || self.handed_over()
            || matches!(self.ended, Some(Outcome::Unknown(_) | Outcome::Completed | Outcome::Lost(_)))
    }

    pub(crate) fn bandwidth(&self) -> Option<f64> {
        self.policy.bandwidth()
    }

    /// The downtime that is expected for a switch at this moment.
    pub(crate) fn predicted_downtime(&self) -> Option<Duration> {
        if self.lazy {
            // Pages do not count then, and for the rest there is no rehearsal of a handover.
            return None;
        }
        self.policy.predict(self.remaining, self.fixed_costs())
    }

    fn fixed_costs(&self) -> Duration {
        self.settle.saturating_add(self.costs_without_io())
    }

    fn costs_without_io(&self) -> Duration {
        // The state travels; harvest once more; list the last pages; three waits for the target: last pages, load, commit.
        let state = self.policy.send_time(self.state_bytes).unwrap_or_default();
        self.stopping()
            .saturating_add(state)
            .saturating_add(self.last_harvest + self.listing + self.round_trip * 3)
    }

    /// What stopping the guest here and loading it there take, without I/O and with nothing to send.
    fn stopping(&self) -> Duration {
        let Some(fixed) = self.fixed else { return self.expected_load.unwrap_or_default() };
        fixed.saturating_add(self.expected_load.unwrap_or(self.save))
    }

    /// Takes in what happened; gives out what to do, in this order.
    pub(crate) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let before = self.state;
        let actions = self.react(now, event);
        if self.state != before {
            self.last_step = now;
        }
        actions
    }

    fn react(&mut self, now: Duration, event: Event) -> Vec<Action> {
        if self.state == State::Done {
            return Vec::new();
        }
        if self.state == State::Resuming {
            return match event {
                Event::Resumed => self.finish(),
                Event::LocalFailure(why) => self.not_resumed(&why),
                _ => Vec::new(),
            };
        }
        if let Event::Ruled(answer) = event {
            return self.ruled(answer);
        }
        if self.state == State::Claiming {
            return self.claiming(now, event);
        }
        if self.handed_over() {
            return self.after_handover(now, event);
        }
        match event {
            Event::Message(message) => self.message(now, message),
            Event::LocalFailure(why) => self.give_up(Outcome::Failed(why), true),
            Event::PeerLost(why) => self.peer_lost(why),
            Event::NotSent(why) => {
                if self.state == State::Committed {
                    // The commit was the newest message, and it never left: the guest is still ours beyond doubt.
                    self.state = State::Loading;
                }
                self.peer_lost(why)
            }
            Event::Cancel => self.give_up(Outcome::Cancelled("cancelled on request".into()), true),
            Event::Tick => self.tick(now),
            Event::SwitchNow => {
                self.postcopy_wanted = self.settings.may_be_lazy();
                Vec::new()
            }
            // There is no lost link to take up again: a link that is lost now takes the migration with it.
            Event::Pause | Event::Recover | Event::Abandon => Vec::new(),
            done => self.step(now, done),
        }
    }

    /// A step that this side was asked to do is done.
    fn step(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Opening { up, .. }, Event::ChannelsOpened) => self.opening(true, up),
            (State::StartingTracker, Event::TrackerStarted) => self.send_live(now, true),
            (State::Passing { received, .. }, Event::PassSent { bytes, listing }) => {
                self.pass_bytes = bytes;
                self.listing = listing;
                self.passing(now, true, received)
            }
            (State::Harvesting, Event::Harvested { pages, writers }) => {
                self.writers = writers;
                self.harvested(now, pages)
            }
            (State::Rehearsing, Event::Rehearsed { fixed, save, settle, stood, state_bytes }) => {
                self.state_bytes = state_bytes;
                self.learnt(now, (fixed, save), settle, stood);
                self.decide(now)
            }
            (State::Rehearsing, Event::Busy { stood, why }) => {
                self.found_busy(now, stood, why);
                self.decide(now)
            }
            (State::Pausing, Event::Paused) => {
                self.state = State::Saving;
                self.stopped = now;
                vec![Action::Save { within: self.settle_within() }]
            }
            (State::Saving, Event::Busy { stood, why }) => self.go_on(now, stood, why),
            (State::GoingOn, Event::Resumed) => self.went_on(now),
            (State::Saving, Event::Saved { sections }) => self.saved(now, sections),
            (State::LastHarvest, Event::Harvested { pages, .. }) if self.lazy => {
                self.last_harvest = now.saturating_sub(self.harvest_began);
                self.remaining = pages;
                self.hand_over()
            }
            (State::HandingOver, Event::HandedOver { pages, skipped }) => self.named(pages, skipped),
            (State::LastHarvest, Event::Harvested { pages, .. }) => {
                self.last_harvest = now.saturating_sub(self.harvest_began);
                self.remaining = pages;
                self.send_last(Pass::Dirty { first: false })
            }
            (State::Releasing, Event::Released) => {
                self.state = State::Committed;
                vec![Action::Send(ToTarget::Commit)]
            }
            (State::LastPass { received, .. }, Event::PassSent { .. }) => self.last_pass(true, received),
            (State::Verifying { .. }, Event::Comparing { pages }) => {
                self.comparing = Some(pages);
                Vec::new()
            }
            (State::Verifying { received, verified, .. }, Event::PassSent { .. }) => {
                self.verifying(true, received, verified)
            }
            (state, event) => self.give_up(
                Outcome::Failed(Refusal::new(
                    RefusalCode::Protocol,
                    format!("{event:?} came while {state:?}"),
                )),
                true,
            ),
        }
    }

    fn message(&mut self, now: Duration, message: ToSource) -> Vec<Action> {
        match (self.state, message) {
            (_, ToSource::Pong(number)) => {
                self.pong(now, number);
                Vec::new()
            }
            (_, ToSource::Costs { load_us }) => {
                self.expected_load = Some(Duration::from_micros(load_us));
                Vec::new()
            }
            (State::Committed, message) => self.after_commit(now, message),
            // A target that was about to be told to run the guest waits to hear that it was not.
            (_, ToSource::Failed(why)) => self.give_up(Outcome::Failed(why), self.lazy),
            (State::AwaitAccept, ToSource::Accept { bulk, urgent, resume }) => {
                self.state = State::Opening { opened: false, up: false };
                vec![Action::Remember { resume }, Action::OpenChannels { bulk, urgent }]
            }
            (State::Opening { opened, .. }, ToSource::ChannelsUp) => self.opening(opened, true),
            (State::Passing { sent, .. }, ToSource::Received { pass, runs, .. }) if pass == self.pass => {
                // Damaged pages are dirty and come again; a handover names them to be sure.
                self.again = runs;
                self.passing(now, sent, true)
            }
            (State::LastPass { sent, .. }, ToSource::Received { pass, suspects, runs })
                if pass == self.pass =>
            {
                // Later damage is found by the next `Received`; this one's runs are what is sent again.
                self.again = if suspects == 0 { Vec::new() } else { runs };
                if suspects != 0 && self.again.is_empty() {
                    return self.unexpected("suspect pages without their names");
                }
                self.last_pass(sent, true)
            }
            (State::Verifying { sent, verified, .. }, ToSource::Received { pass, .. })
                if pass == self.pass =>
            {
                self.verifying(sent, true, verified)
            }
            (State::Verifying { sent, received, .. }, ToSource::Verified { pages, mismatched, samples }) => {
                self.verification = Some(Verification { pages, mismatched, samples });
                self.verifying(sent, received, true)
            }
            (State::Loading, ToSource::Ready { load_us }) => {
                self.load_time = Duration::from_micros(load_us);
                self.state = State::Releasing;
                vec![Action::Release]
            }
            (_, message) => self.unexpected(message.name()),
        }
    }

    fn unexpected(&mut self, what: &str) -> Vec<Action> {
        let detail = format!("the target sent {what}, which does not fit this moment ({:?})", self.state);
        self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Protocol, detail)), true)
    }

    fn after_commit(&mut self, now: Duration, message: ToSource) -> Vec<Action> {
        match message {
            ToSource::Running { start_us, .. } if self.lazy => {
                self.start_time = Duration::from_micros(start_us);
                self.running_lazily(now)
            }
            ToSource::Running { start_us, cpu_us } => {
                self.target_cpu = Duration::from_micros(cpu_us);
                self.start_time = Duration::from_micros(start_us);
                self.ended = Some(Outcome::Completed);
                self.finish()
            }
            // The target's promise that the guest never ran there and never will (it says `Failed` if it gave up just
            // before it read the commit): it is ours again.
            ToSource::Returned(why) | ToSource::Failed(why) => self.given_back(why),
            other if self.lazy && self.fenced.is_some() => {
                self.suspend(now, format!("the target answered the commit with {}", other.name()))
            }
            other => self.peer_lost(format!("the target answered the commit with {}", other.name())),
        }
    }
}

impl run::Session for Session {
    type Event = Event;
    type Action = Action;
    type Outcome = Outcome;

    fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.handle(now, event)
    }

    fn decided(&self) -> bool {
        self.phase() == Phase::Ended
    }

    fn outcome(action: Action) -> Result<Outcome, Action> {
        if let Action::Finish(outcome) = action { Ok(outcome) } else { Err(action) }
    }
}

#[cfg(test)]
mod tests;
