//! Host of the source in the model: performs the actions of the production session, and reports
//! their events.
//!
//! The effect of each action and the event that answers it are defined in [`Step::perform_here`]
//! only.

use super::Flaw;
use super::judge::Promise;
use super::step::{Deed, Mishap, Step};
use super::world::{ALL, Cargo, Dial, Down, Job, Keyed, Link, PAGES, Up, mask_of, mask_of_runs, piece_of};
use crate::fence::Side;
use crate::run::{self, Agenda};
use crate::source::session::{Phase, Session};
use crate::source::{MigrationMode, Settings};
use std::time::Duration;
use vmferry_core::RunState;
use vmferry_protocol::source::{Action, Event, Outcome, Pass};
use vmferry_wire::{Refusal, RefusalCode, ToSource, ToTarget};

/// Timeout of the migration. Below, two times at which the clock ticks: after this timeout only,
/// and after every limit.
pub(super) const TIMEOUT: Duration = Duration::from_secs(1);
const AT_TIMEOUT: Duration = Duration::from_secs(2);
const MUCH_LATER: Duration = Duration::from_secs(1000);

pub(super) fn failure() -> Refusal {
    Refusal::new(RefusalCode::Other, "a step failed")
}

fn rehearsed() -> Event {
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
    pub(super) fn happen_here(&mut self, deed: Deed) {
        match deed {
            Deed::SourceHears => self.source_hears(),
            Deed::SourceActs => {
                self.run_here(Agenda::begun(), None);
            }
            Deed::SourceNoticesLoss => self.source_notices_loss(),
            Deed::Sends => self.send_pages(),
            Deed::Serves => {
                if let Some((page, again)) = self.link_here().requests.pop_front() {
                    self.requested(page, again);
                }
            }
            Deed::TickSoon => self.tell_here(Duration::ZERO, Event::Tick),
            Deed::TickAtTimeout => {
                self.world.here.timed_out = true;
                self.tell_here(AT_TIMEOUT, Event::Tick);
            }
            Deed::TickMuchLater => {
                // A lost link may stay lost without limit, and so may the wait for a guest. In
                // other states, the silence of the peer is a fault.
                if self.world.here.connected && !self.world.here.session.is.is_resting() {
                    self.fault();
                }
                self.tell_here(MUCH_LATER, Event::Tick);
            }
            Deed::Dials => self.dial(),
            Deed::DialFails => self.dialled(false),
            Deed::Cancel => {
                self.fault();
                self.tell_here(Duration::ZERO, Event::Cancel);
            }
            Deed::SwitchNow => {
                self.world.here.switch_asked = true;
                self.tell_here(Duration::ZERO, Event::SwitchNow);
            }
            Deed::Pause => {
                self.fault();
                self.tell_here(Duration::ZERO, Event::Pause);
            }
            Deed::Recover => self.tell_here(Duration::ZERO, Event::Recover),
            Deed::Abandon => self.tell_here(Duration::ZERO, Event::Abandon),
            other => unreachable!("{other:?} is not the source's"),
        }
    }

    pub(super) fn tell_here(&mut self, now: Duration, event: Event) {
        self.run_here(Agenda::new(Vec::new()), Some((now, event)));
    }

    /// Lets the migration's timeout expire, which ends the passes. The event changes the session's
    /// urgency, and has no action yet.
    pub(super) fn tell_of_timeout(&mut self) {
        self.world.here.timed_out = true;
        let actions = self.handle_here(AT_TIMEOUT, Event::Tick);
        assert!(actions.iter().all(|action| matches!(action, Action::Send(ToTarget::Ping(_)))));
    }

    fn handle_here(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let before = self.world.here.session.is.phase();
        if self.world.here.committed && before == Phase::Switchover {
            self.world.here.given_back |= matches!(
                event,
                Event::NotSent(_) | Event::Message(ToSource::Returned(_) | ToSource::Failed(_))
            );
        }
        // Also over a new link, unless the guest ran on the target meanwhile.
        let late = before == Phase::PostcopyPaused
            && !self.world.here.session.is.runs_there()
            && matches!(event, Event::Message(ToSource::Returned(_)));
        let here = &mut self.world.here;
        let actions = here.session.change(|session| session.handle(now, event), Session::project);
        here.given_back |= late && here.session.is.phase() == Phase::Ended;
        actions
    }

    /// Runs the production loop with `agenda`, then with `event`, until no action is left.
    pub(super) fn run_here(&mut self, agenda: Agenda<Action>, event: Option<(Duration, Event)>) {
        let ended = run::advance(&mut AtSource { step: self, agenda, event, now: Duration::ZERO });
        let Ok(outcome) = ended else { return };
        if !self.dies_here() {
            self.perform_here(Action::Finish(outcome));
            self.at += 1;
        }
    }

    /// Returns true if the source has ended, or dies before its next action.
    fn dies_here(&mut self) -> bool {
        if self.world.here.ended() {
            return true;
        }
        let dies = self.at > 0 && self.goes_wrong(Mishap::SourceDiesBefore(self.at));
        if dies {
            self.crash_source();
        }
        dies
    }

    fn busy(&mut self) -> bool {
        self.goes_wrong(Mishap::Busy(self.at))
    }

    fn step_fails(&mut self) -> bool {
        self.goes_wrong(Mishap::StepFails(self.at))
    }

    /// Performs an action of the source. The effects of all actions are defined here only.
    fn perform_here(&mut self, action: Action) -> Option<Event> {
        let done = match action {
            Action::Send(message) => return self.send_here(message),
            Action::Remember { .. } | Action::Throttle(_) => return None,
            Action::OpenChannels { .. } => return Some(self.open_channels()),
            Action::StartTracker => {
                // Like KVM's log: every page is marked from the start, and none is protected.
                (self.world.here.protected, self.world.here.marked) = (0, ALL);
                Event::TrackerStarted
            }
            Action::TrialPause { .. } if self.busy() => return Some(still_busy()),
            Action::TrialPause { .. } => rehearsed(),
            Action::Harvest => self.harvest(),
            Action::SendPass { number, pass } => return self.begin_pass(number, pass),
            Action::Pause => {
                self.world.here.running = false;
                self.world.here.paused = true;
                Event::Paused { wanted: RunState::Running }
            }
            Action::Save { .. } if self.busy() => {
                // Requests that completed meanwhile have written memory.
                self.save();
                return Some(still_busy());
            }
            Action::Save { .. } => {
                if !self.flaw(Flaw::HarvestsBeforeSaving) {
                    self.save();
                }
                Event::Saved { sections: vec![] }
            }
            Action::StreamState => unreachable!("no guest of the model has streams of device state"),
            Action::Release => return Some(self.release()),
            Action::HandOver { also } => return Some(self.hand_over(mask_of_runs(&also))),
            Action::SendRest { number } => {
                self.world.here.job = self.world.here.claims.map(|_| Job::Rest { pass: number });
                return None;
            }
            Action::Disconnect => {
                self.disconnect_source();
                return None;
            }
            Action::Reconnect { .. } => {
                self.world.here.dial = Dial::Wanted;
                return None;
            }
            Action::TakeMissing(piece) => {
                self.world.here.lacking |= mask_of(&piece);
                return None;
            }
            Action::ServeMissing { pages } => return self.serve_again(pages),
            Action::RunOn => return Some(self.go_on()),
            Action::Resume => return Some(self.resume()),
            Action::AskArbiter { word, .. } => {
                self.ask_fence(Side::Source, word);
                return None;
            }
            Action::Finish(outcome) => {
                self.world.here.outcome = Some(outcome);
                // Like the driver: a register that is not needed any more is removed.
                let done = self.world.here.session.is.fence_done();
                self.world.fence.iter_mut().filter(|_| done).for_each(|fence| fence.register = None);
                self.end_source();
                return None;
            }
        };
        Some(if self.step_fails() { Event::LocalFailure(failure()) } else { done })
    }

    fn release(&mut self) -> Event {
        if self.step_fails() {
            return Event::LocalFailure(failure());
        }
        self.world.here.holds = self.flaw(Flaw::KeepsDisks);
        Event::Released
    }

    fn go_on(&mut self) -> Event {
        let ours = !self.world.here.committed;
        self.promise(Promise::NotTakenBack, ours);
        if self.step_fails() {
            return Event::LocalFailure(failure());
        }
        self.guest_runs_here();
        Event::Resumed
    }

    /// Saves the state, which may write guest memory while the guest is stopped.
    pub(super) fn save(&mut self) {
        self.write(PAGES - 1);
    }

    fn send_here(&mut self, message: ToTarget) -> Option<Event> {
        if matches!(message, ToTarget::Ping(_)) {
            // The answer does not depend on the state, and changes none.
            return None;
        }
        let commit = message == ToTarget::Commit;
        if commit {
            let right = !self.world.here.committed && !self.world.here.running;
            self.promise(Promise::CommitsOnce, right);
            self.world.here.committed = true;
        }
        let up = self.link_up();
        let at = self.at;
        if up {
            self.link_here().down.push_back(Down::Message(Keyed::message(message)));
            if commit && self.goes_wrong(Mishap::BreaksAfter(at)) {
                // The source cannot tell how much of the message was sent.
                self.link_here().cut = true;
                let unsent = self.flaw(Flaw::TakesForUnsent);
                return Some(if unsent { Event::NotSent(lost()) } else { Event::PeerLost(lost()) });
            }
            return None;
        }
        if self.goes_wrong(Mishap::NotSent(at)) {
            return Some(Event::NotSent(lost()));
        }
        self.goes_wrong(Mishap::SendFails(at)).then(|| Event::PeerLost(lost()))
    }

    fn open_channels(&mut self) -> Event {
        let again = self.world.here.claims.is_some();
        if !self.link_up() || self.link_here().pages_cut {
            return if again { Event::PeerLost(lost()) } else { Event::LocalFailure(failure()) };
        }
        self.link_here().bulk.push_back(Cargo::Hello);
        if self.model.mode != MigrationMode::Precopy {
            self.link_here().urgent.push_back(Cargo::Hello);
        }
        self.serve();
        Event::ChannelsOpened
    }

    fn begin_pass(&mut self, pass: u32, what: Pass) -> Option<Event> {
        let here = &mut self.world.here;
        let in_pass = match what {
            Pass::Dirty { .. } => std::mem::take(&mut here.pending),
            Pass::Again(runs) => mask_of_runs(&runs),
            Pass::Digests => {
                // Missing pages are compared when they arrive.
                let of = ALL & !here.claims.unwrap_or(0);
                here.job = Some(Job::Digests { pass, of });
                return Some(Event::Comparing { pages: of.count_ones().into() });
            }
        };
        here.live_passes += u8::from(!here.paused);
        here.in_pass = in_pass;
        here.job = Some(Job::Pages { pass, hand: None, told: false });
        None
    }

    fn hand_over(&mut self, also: u8) -> Event {
        let also = if self.flaw(Flaw::ForgetsSuspects) { 0 } else { also };
        let here = &mut self.world.here;
        let lacking = std::mem::take(&mut here.pending) | also;
        here.claims = Some(lacking);
        if lacking != 0
            && let Some(failed) = self.send_here(ToTarget::Lacking(piece_of(lacking)))
        {
            return failed;
        }
        self.serve();
        Event::HandedOver { pages: lacking.count_ones().into(), skipped: 0 }
    }

    fn serve_again(&mut self, pages: u64) -> Option<Event> {
        let here = &mut self.world.here;
        let lacking = std::mem::take(&mut here.lacking);
        if u64::from(lacking.count_ones()) != pages {
            return Some(Event::PeerLost("pages were not named".into()));
        }
        let left = if self.model.flaw == Some(Flaw::ClaimSurvives) { here.claims } else { None };
        here.claims = Some(lacking & left.unwrap_or(ALL));
        None
    }

    fn resume(&mut self) -> Event {
        let won = self.world.fence_gives_it_to(Side::Source) == Some(true);
        let ours = !self.world.here.committed || self.world.here.given_back || won;
        self.promise(Promise::NotTakenBack, ours);
        self.world.here.job = None;
        if self.step_fails() {
            self.world.here.resume_failed = true;
            return Event::LocalFailure(failure());
        }
        self.guest_runs_here();
        Event::Resumed
    }

    fn guest_runs_here(&mut self) {
        let (alone, free) = (!self.world.there.running, !self.world.there.holds);
        self.promise(Promise::OneRunner, alone);
        self.promise(Promise::OneHolder, free);
        (self.world.here.running, self.world.here.paused, self.world.here.holds) = (true, false, true);
    }

    fn source_hears(&mut self) {
        let Some(up) = self.link_here().up.pop_front() else { return };
        match up {
            Up::Reply(yes) => self.dialled(yes),
            Up::Message(message) => {
                let message = (*message.is).clone();
                // Like the driver: if a target claims to have pages that were never sent, the
                // source reconnects and asks again.
                let unsent = self.world.here.claims.is_some_and(|claims| claims != 0);
                let cannot_be = matches!(message, ToSource::Complete(_)) && unsent;
                let event = if cannot_be { Event::PeerLost(lost()) } else { Event::Message(message) };
                self.tell_here(Duration::ZERO, event);
            }
        }
    }

    fn source_notices_loss(&mut self) {
        if self.world.here.dial == Dial::Said {
            return self.dialled(false);
        }
        let phase = self.world.here.session.is.phase();
        let planted = match self.model.flaw {
            Some(Flaw::ResumesAfterCommit) => self.world.here.committed && phase == Phase::Switchover,
            Some(Flaw::ResumesInPostcopy) => phase == Phase::Postcopy,
            _ => false,
        };
        if planted {
            self.guest_runs_here();
            self.world.here.outcome = Some(Outcome::Failed(failure()));
            return self.end_source();
        }
        self.tell_here(Duration::ZERO, Event::PeerLost(lost()));
    }

    /// Opens a new control channel with a hello.
    fn dial(&mut self) {
        self.world.links.push(Link { down: [Down::Back].into(), ..Link::default() });
        let here = &mut self.world.here;
        here.link = self.world.links.len() - 1;
        here.connected = true;
        here.dial = Dial::Said;
    }

    fn dialled(&mut self, yes: bool) {
        let (gone, cut) = (self.world.there.ended(), self.link_here().cut);
        let here = &mut self.world.here;
        (here.dial, here.connected) = (Dial::No, yes);
        // The connection was refused, or there was no listener. The loss of a link says nothing
        // about the target.
        here.in_vain |= !yes && (!cut || gone);
        here.lacking = 0;
        let event = if yes { Event::Reconnected } else { Event::NotReconnected(lost()) };
        self.tell_here(Duration::ZERO, event);
    }

    fn disconnect_source(&mut self) {
        self.close_source();
        let here = &mut self.world.here;
        (here.connected, here.serving, here.job, here.in_pass) = (false, false, None, 0);
        here.early.clear();
        if self.model.flaw != Some(Flaw::ClaimSurvives) {
            here.claims = None;
        }
    }

    fn close_source(&mut self) {
        let connected = self.world.here.connected;
        let link = self.link_here();
        link.source_closed |= connected;
        link.up.clear();
        link.requests.clear();
    }

    /// Drops all remaining work of the source.
    fn end_source(&mut self) {
        self.close_source();
        self.world.here.todo = None;
        self.world.here.job = None;
        self.world.here.dial = Dial::No;
    }

    pub(super) fn crash_source(&mut self) {
        self.end_source();
        self.link_here().cut = true;
        let here = &mut self.world.here;
        (here.crashed, here.running, here.holds) = (true, false, false);
        self.world.fence.iter_mut().for_each(|fence| fence.dies(Side::Source));
    }
}

/// Host of the source in the model.
struct AtSource<'m, 'a> {
    step: &'m mut Step<'a>,
    agenda: Agenda<Action>,
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
        &self.step.world.here.session.is
    }

    fn agenda(&mut self) -> &mut Agenda<Action> {
        &mut self.agenda
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        let now = std::mem::take(&mut self.now);
        self.step.handle_here(now, event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        if self.step.world.here.ended() {
            return Err(Idle);
        }
        let live = !self.step.world.here.paused;
        if live && matches!(action, Action::StartTracker | Action::Harvest | Action::Pause) {
            // The guest runs meanwhile, so other steps may happen first.
            assert!(self.agenda.is_empty(), "{action:?} is the last of its actions");
            self.step.world.here.todo = Some(action);
            return Err(Idle);
        }
        if self.step.dies_here() {
            return Err(Idle);
        }
        let event = self.step.perform_here(action);
        self.step.at += 1;
        Ok(event)
    }

    fn performed(&mut self) -> Result<Option<Event>, Idle> {
        let action = self.step.world.here.todo.take().ok_or(Idle)?;
        if self.step.dies_here() {
            return Err(Idle);
        }
        let event = self.step.perform_here(action);
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
    use crate::source::{OnTimeout, Pace};
    Settings {
        mode,
        verify,
        channels: 1,
        urgent_channels: 1,
        pace: Pace::Off,
        // Set for migrations that would not end otherwise.
        timeout: (mode != MigrationMode::Postcopy).then_some(TIMEOUT),
        on_timeout: if mode == MigrationMode::Precopy { OnTimeout::Switch } else { OnTimeout::Postcopy },
        ..Settings::default()
    }
}
