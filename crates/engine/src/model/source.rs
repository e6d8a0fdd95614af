//! Host of the source in the model: performs the actions of the production session, and reports
//! their events.
//!
//! The effect of each action and the event that answers it are defined in [`Step::perform_source`]
//! only.

use super::Flaw;
use super::judge::Promise;
use super::step::{Operation, Step, StepFault};
use super::world::{
    ALL, Cargo, DialState, Job, Keyed, Link, PAGES, REGION, ToSourceCargo, ToTargetCargo, mask_of,
    mask_of_runs, piece_of,
};
use crate::arbiter::Side;
use crate::run::{self, ActionQueue};
use crate::source::session::{Phase, Session};
use crate::source::{MigrationMode, Settings};
use std::time::Duration;
use vmferry_core::RunState;
use vmferry_protocol::source::{Action, Event, Outcome, Pass};
use vmferry_wire::{LocalRegion, Refusal, RefusalCode, ToSource, ToTarget};

/// Timeout of the migration. Below, two times at which the clock ticks: after this timeout only,
/// and after every limit.
pub(super) const TIMEOUT: Duration = Duration::from_secs(1);
const AT_TIMEOUT: Duration = Duration::from_secs(2);
const MUCH_LATER: Duration = Duration::from_secs(1000);

pub(super) fn failure() -> Refusal {
    Refusal::new(RefusalCode::Other, "a step failed")
}

fn trial_paused() -> Event {
    Event::TrialPaused {
        stop: Duration::ZERO,
        save: Duration::ZERO,
        quiesce: Duration::ZERO,
        paused: Duration::ZERO,
        state_bytes: 0,
        trial: None,
    }
}

fn still_busy() -> Event {
    Event::Busy { paused: Duration::ZERO, why: "requests are under way".into() }
}

fn lost() -> String {
    "the link is lost".into()
}

impl Step<'_> {
    pub(super) fn happen_on_source(&mut self, operation: Operation) {
        match operation {
            Operation::SourceReceives => self.source_receives(),
            Operation::SourceActs => {
                self.run_source(ActionQueue::with_begun_action(), None);
            }
            Operation::SourceNoticesLoss => self.source_notices_loss(),
            Operation::Sends => self.send_pages(),
            Operation::Serves => {
                if let Some((page, again)) = self.source_link().requests.pop_front() {
                    self.requested(page, again);
                }
            }
            Operation::TickSoon => self.tell_source(Duration::ZERO, Event::Tick),
            Operation::TickAtTimeout => {
                self.world.source.timed_out = true;
                self.tell_source(AT_TIMEOUT, Event::Tick);
            }
            Operation::TickMuchLater => {
                // A lost link may stay lost without limit, and so may the wait for a guest. In
                // other states, the silence of the peer is a fault.
                if self.world.source.connected && !self.world.source.session.is.is_waiting() {
                    self.fault();
                }
                self.tell_source(MUCH_LATER, Event::Tick);
            }
            Operation::Dials => self.dial(),
            Operation::DialFails => self.dialled(false),
            Operation::Cancel => {
                self.fault();
                self.tell_source(Duration::ZERO, Event::Cancel);
            }
            Operation::SwitchNow => {
                self.world.source.switch_requested = true;
                self.tell_source(Duration::ZERO, Event::SwitchNow);
            }
            Operation::Pause => {
                self.fault();
                self.tell_source(Duration::ZERO, Event::Pause);
            }
            Operation::Recover => self.tell_source(Duration::ZERO, Event::Recover),
            Operation::Abandon => self.tell_source(Duration::ZERO, Event::Abandon),
            other => unreachable!("{other:?} is not the source's"),
        }
    }

    pub(super) fn tell_source(&mut self, now: Duration, event: Event) {
        self.run_source(ActionQueue::new(Vec::new()), Some((now, event)));
    }

    /// Lets the migration's timeout expire, which ends the passes. The event changes the session's
    /// urgency, and has no action yet.
    pub(super) fn tell_of_timeout(&mut self) {
        self.world.source.timed_out = true;
        let actions = self.handle_source(AT_TIMEOUT, Event::Tick);
        assert!(actions.iter().all(|action| matches!(action, Action::Send(ToTarget::Ping(_)))));
    }

    fn handle_source(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let before = self.world.source.session.is.phase();
        if self.world.source.committed && before == Phase::Switchover {
            self.world.source.given_back |= matches!(
                event,
                Event::NotSent(_) | Event::Message(ToSource::Returned(_) | ToSource::Failed(_))
            );
        }
        // Also over a new link, unless the guest ran on the target meanwhile.
        let late = before == Phase::PostcopyPaused
            && !self.world.source.session.is.runs_on_target()
            && matches!(event, Event::Message(ToSource::Returned(_)));
        let source = &mut self.world.source;
        let actions = source.session.change(|session| session.handle(now, event), Session::project);
        source.given_back |= late && source.session.is.phase() == Phase::Ended;
        actions
    }

    /// Runs the production loop with `action_queue`, then with `event`, until no action is left.
    pub(super) fn run_source(&mut self, action_queue: ActionQueue<Action>, event: Option<(Duration, Event)>) {
        let ended = run::advance(&mut AtSource { step: self, action_queue, event, now: Duration::ZERO });
        let Ok(outcome) = ended else { return };
        if !self.source_dies() {
            self.perform_source(Action::Finish(outcome));
            self.at += 1;
        }
    }

    /// Returns true if the source has ended, or dies before its next action.
    fn source_dies(&mut self) -> bool {
        if self.world.source.ended() {
            return true;
        }
        let dies = self.at > 0 && self.injects(StepFault::SourceDiesBefore(self.at));
        if dies {
            self.crash_source();
        }
        dies
    }

    fn busy(&mut self) -> bool {
        self.injects(StepFault::Busy(self.at))
    }

    fn source_step_fails(&mut self) -> bool {
        self.injects(StepFault::StepFails(self.at))
    }

    /// Performs an action of the source. The effects of all actions are defined here only.
    fn perform_source(&mut self, action: Action) -> Option<Event> {
        let done = match action {
            Action::Send(message) => return self.source_sends(message),
            Action::Remember { .. } | Action::Throttle(_) => return None,
            Action::TakeAnswer { .. } => unreachable!("no target of the model has known pages"),
            Action::OpenChannels { .. } => return Some(self.open_channels()),
            Action::ShareMemory => {
                let region = LocalRegion { region: REGION, len: (PAGES as u64) << 12, offset: 0 };
                return self.source_sends(ToTarget::LocalMemory { regions: vec![region] });
            }
            Action::StartTracker => {
                // Like KVM's log: every page is marked from the start, and none is protected.
                (self.world.source.protected, self.world.source.marked) = (0, ALL);
                Event::TrackerStarted
            }
            Action::TrialPause { .. } if self.busy() => return Some(still_busy()),
            Action::TrialPause { .. } => trial_paused(),
            Action::Harvest => self.harvest(),
            Action::SendPass { number, pass } => return self.begin_pass(number, pass),
            Action::Pause => {
                self.world.source.running = false;
                self.world.source.paused = true;
                Event::Paused { wanted: RunState::Running }
            }
            Action::Save { .. } if self.busy() => {
                // Requests that completed meanwhile have written memory.
                self.save();
                return Some(still_busy());
            }
            Action::Save { .. } => self.save_quiesced(),
            Action::StreamState => unreachable!("no guest of the model has streams of device state"),
            Action::Release => return Some(self.release()),
            Action::HandOver { also } => return Some(self.hand_over(mask_of_runs(&also))),
            Action::SendRemaining { number } => {
                self.world.source.job = self.world.source.claims.map(|_| Job::Remaining { pass: number });
                return None;
            }
            Action::Disconnect => {
                self.disconnect_source();
                return None;
            }
            Action::Reconnect { .. } => {
                self.world.source.dial = DialState::Wanted;
                return None;
            }
            Action::TakeMissing(piece) => {
                self.world.source.missing |= mask_of(&piece);
                return None;
            }
            Action::ServeMissing { pages } => return self.serve_again(pages),
            Action::RunOn => return Some(self.go_on()),
            Action::Resume => return Some(self.resume()),
            Action::AskArbiter { request, .. } => {
                self.ask_arbiter(Side::Source, request);
                return None;
            }
            Action::Finish(outcome) => {
                self.finish_source(outcome);
                return None;
            }
        };
        Some(if self.source_step_fails() { Event::LocalFailure(failure()) } else { done })
    }

    /// Saves the state of a guest whose devices have no requests.
    fn save_quiesced(&mut self) -> Event {
        if !self.flaw(Flaw::HarvestsBeforeSaving) {
            self.save();
        }
        self.world.source.saved = Some(self.world.source.memory);
        if self.flaw(Flaw::WritesAfterSaving) {
            self.write(0);
        }
        Event::Saved { sections: vec![] }
    }

    fn finish_source(&mut self, outcome: Outcome) {
        self.world.source.outcome = Some(outcome);
        // Like the driver: a register that is not needed any more is removed.
        let done = self.world.source.session.is.register_unneeded();
        self.world.arbiter.iter_mut().filter(|_| done).for_each(|arbiter| arbiter.register = None);
        self.end_source();
    }

    fn release(&mut self) -> Event {
        if self.source_step_fails() {
            return Event::LocalFailure(failure());
        }
        self.world.source.holds = self.flaw(Flaw::KeepsDisks);
        Event::Released
    }

    fn go_on(&mut self) -> Event {
        let ours = !self.world.source.committed;
        self.promise(Promise::NotTakenBack, ours);
        if self.source_step_fails() {
            return Event::LocalFailure(failure());
        }
        self.guest_runs_on_source();
        Event::Resumed
    }

    /// Saves the state, which may write guest memory while the guest is stopped.
    pub(super) fn save(&mut self) {
        self.write(PAGES - 1);
    }

    fn source_sends(&mut self, message: ToTarget) -> Option<Event> {
        if matches!(message, ToTarget::Ping(_)) {
            // The answer does not depend on the state, and changes none.
            return None;
        }
        let commit = message == ToTarget::Commit;
        if commit {
            let right = !self.world.source.committed && !self.world.source.running;
            self.promise(Promise::CommitsOnce, right);
            self.world.source.committed = true;
        }
        let up = self.link_up();
        let at = self.at;
        if up {
            self.source_link().down.push_back(ToTargetCargo::Message(Keyed::message(message)));
            if commit && self.injects(StepFault::BreaksAfter(at)) {
                // The source cannot tell how much of the message was sent.
                self.source_link().cut = true;
                let unsent = self.flaw(Flaw::TakesForUnsent);
                return Some(if unsent { Event::NotSent(lost()) } else { Event::PeerLost(lost()) });
            }
            return None;
        }
        if self.injects(StepFault::NotSent(at)) {
            return Some(Event::NotSent(lost()));
        }
        self.injects(StepFault::SendFails(at)).then(|| Event::PeerLost(lost()))
    }

    fn open_channels(&mut self) -> Event {
        let again = self.world.source.claims.is_some();
        if !self.link_up() || self.source_link().pages_cut {
            return if again { Event::PeerLost(lost()) } else { Event::LocalFailure(failure()) };
        }
        self.source_link().bulk.push_back(Cargo::Hello);
        if matches!(self.model.mode, MigrationMode::Postcopy | MigrationMode::Hybrid) {
            self.source_link().urgent.push_back(Cargo::Hello);
        }
        self.serve();
        Event::ChannelsOpened
    }

    fn begin_pass(&mut self, pass: u32, what: Pass) -> Option<Event> {
        let source = &mut self.world.source;
        let in_pass = match what {
            Pass::Dirty { .. } => std::mem::take(&mut source.pending),
            Pass::Again(runs) => mask_of_runs(&runs),
            Pass::Digests => {
                // Missing pages are compared when they arrive.
                let of = ALL & !source.claims.unwrap_or(0);
                source.job = Some(Job::Digests { pass, of });
                return Some(Event::Comparing { pages: of.count_ones().into() });
            }
        };
        source.live_passes += u8::from(!source.paused);
        source.in_pass = in_pass;
        source.job = Some(Job::Pages { pass, hand: None, told: false });
        None
    }

    fn hand_over(&mut self, also: u8) -> Event {
        let also = if self.flaw(Flaw::ForgetsSuspects) { 0 } else { also };
        let source = &mut self.world.source;
        let missing = std::mem::take(&mut source.pending) | also;
        source.claims = Some(missing);
        if missing != 0
            && let Some(failed) = self.source_sends(ToTarget::Lacking(piece_of(missing)))
        {
            return failed;
        }
        self.serve();
        Event::HandedOver { pages: missing.count_ones().into(), skipped: 0 }
    }

    fn serve_again(&mut self, pages: u64) -> Option<Event> {
        let source = &mut self.world.source;
        let missing = std::mem::take(&mut source.missing);
        if u64::from(missing.count_ones()) != pages {
            return Some(Event::PeerLost("pages were not named".into()));
        }
        let left = if self.model.flaw == Some(Flaw::ClaimSurvives) { source.claims } else { None };
        source.claims = Some(missing & left.unwrap_or(ALL));
        None
    }

    fn resume(&mut self) -> Event {
        let won = self.world.arbiter_permits(Side::Source) == Some(true);
        let ours = !self.world.source.committed || self.world.source.given_back || won;
        self.promise(Promise::NotTakenBack, ours);
        self.world.source.job = None;
        if self.source_step_fails() {
            self.world.source.resume_failed = true;
            return Event::LocalFailure(failure());
        }
        self.guest_runs_on_source();
        Event::Resumed
    }

    fn guest_runs_on_source(&mut self) {
        let (alone, free) = (!self.world.target.running, !self.world.target.holds);
        self.promise(Promise::OneRunner, alone);
        self.promise(Promise::OneHolder, free);
        // What the target maps is still the memory of the source.
        let saved = self.world.source.saved.take();
        let same = saved.is_none_or(|saved| saved == self.world.source.memory);
        self.promise(Promise::NoPageMissed, same);
        (self.world.source.running, self.world.source.paused, self.world.source.holds) = (true, false, true);
    }

    fn source_receives(&mut self) {
        let Some(up) = self.source_link().up.pop_front() else { return };
        match up {
            ToSourceCargo::Reply(yes) => self.dialled(yes),
            ToSourceCargo::Message(message) => {
                let message = (*message.is).clone();
                // Like the driver: if a target claims to have pages that were never sent, the
                // source reconnects and asks again.
                let unsent = self.world.source.claims.is_some_and(|claims| claims != 0);
                let cannot_be = matches!(message, ToSource::Complete(_)) && unsent;
                let event = if cannot_be { Event::PeerLost(lost()) } else { Event::Message(message) };
                self.tell_source(Duration::ZERO, event);
            }
        }
    }

    fn source_notices_loss(&mut self) {
        if self.world.source.dial == DialState::Said {
            return self.dialled(false);
        }
        let phase = self.world.source.session.is.phase();
        let planted = match self.model.flaw {
            Some(Flaw::ResumesAfterCommit) => self.world.source.committed && phase == Phase::Switchover,
            Some(Flaw::ResumesInPostcopy) => phase == Phase::Postcopy,
            _ => false,
        };
        if planted {
            self.guest_runs_on_source();
            self.world.source.outcome = Some(Outcome::Failed(failure()));
            return self.end_source();
        }
        self.tell_source(Duration::ZERO, Event::PeerLost(lost()));
    }

    /// Opens a new control channel with a hello.
    fn dial(&mut self) {
        self.world.links.push(Link { down: [ToTargetCargo::Back].into(), ..Link::default() });
        let source = &mut self.world.source;
        source.link = self.world.links.len() - 1;
        source.connected = true;
        source.dial = DialState::Said;
    }

    fn dialled(&mut self, yes: bool) {
        let (gone, cut) = (self.world.target.ended(), self.source_link().cut);
        let source = &mut self.world.source;
        (source.dial, source.connected) = (DialState::No, yes);
        // The connection was refused, or there was no listener. The loss of a link says nothing
        // about the target.
        source.in_vain |= !yes && (!cut || gone);
        source.missing = 0;
        let event = if yes { Event::Reconnected } else { Event::NotReconnected(lost()) };
        self.tell_source(Duration::ZERO, event);
    }

    fn disconnect_source(&mut self) {
        self.close_source();
        let source = &mut self.world.source;
        (source.connected, source.serving, source.job, source.in_pass) = (false, false, None, 0);
        source.early.clear();
        if self.model.flaw != Some(Flaw::ClaimSurvives) {
            source.claims = None;
        }
    }

    fn close_source(&mut self) {
        let connected = self.world.source.connected;
        let link = self.source_link();
        link.source_closed |= connected;
        link.up.clear();
        link.requests.clear();
    }

    /// Drops all remaining work of the source.
    fn end_source(&mut self) {
        self.close_source();
        self.world.source.todo = None;
        self.world.source.job = None;
        self.world.source.dial = DialState::No;
    }

    pub(super) fn crash_source(&mut self) {
        self.end_source();
        self.source_link().cut = true;
        let source = &mut self.world.source;
        (source.crashed, source.running, source.holds) = (true, false, false);
        self.world.arbiter.iter_mut().for_each(|arbiter| arbiter.dies(Side::Source));
    }
}

/// Host of the source in the model.
struct AtSource<'m, 'a> {
    step: &'m mut Step<'a>,
    action_queue: ActionQueue<Action>,
    /// Next event, and its time. The events that follow from it take no time.
    event: Option<(Duration, Event)>,
    now: Duration,
}

/// Error of a host that has no event before something else happens.
struct Idle;

impl run::Host for AtSource<'_, '_> {
    type Session = Session;
    type Idle = Idle;

    fn now(&self) -> Duration {
        self.now
    }

    fn session(&self) -> &Session {
        &self.step.world.source.session.is
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        let now = std::mem::take(&mut self.now);
        self.step.handle_source(now, event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        if self.step.world.source.ended() {
            return Err(Idle);
        }
        let live = !self.step.world.source.paused;
        if live && matches!(action, Action::StartTracker | Action::Harvest | Action::Pause) {
            // The guest runs meanwhile, so other steps may happen first.
            assert!(self.action_queue.is_empty(), "{action:?} is the last of its actions");
            self.step.world.source.todo = Some(action);
            return Err(Idle);
        }
        if self.step.source_dies() {
            return Err(Idle);
        }
        let event = self.step.perform_source(action);
        self.step.at += 1;
        Ok(event)
    }

    fn performed(&mut self) -> Result<Option<Event>, Idle> {
        let action = self.step.world.source.todo.take().ok_or(Idle)?;
        if self.step.source_dies() {
            return Err(Idle);
        }
        let event = self.step.perform_source(action);
        self.step.at += 1;
        Ok(event)
    }

    fn next(&mut self) -> Result<Option<Event>, Idle> {
        let (now, event) = self.event.take().ok_or(Idle)?;
        self.now = now;
        Ok(Some(event))
    }
}

/// Returns the settings of the model's migrations.
pub(super) fn settings(mode: MigrationMode, verify: bool) -> Settings {
    use crate::source::{BulkLimit, OnTimeout};
    Settings {
        mode,
        verify,
        channels: 1,
        urgent_channels: 1,
        pace: BulkLimit::Off,
        // Set for migrations that would not end otherwise.
        timeout: matches!(mode, MigrationMode::Precopy | MigrationMode::Hybrid).then_some(TIMEOUT),
        on_timeout: if mode == MigrationMode::Precopy { OnTimeout::Switch } else { OnTimeout::Postcopy },
        ..Settings::default()
    }
}
