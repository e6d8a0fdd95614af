//! Passes over memory while the guest runs, until the guest can be stopped to send the rest.

use super::costs::Costs;
use super::judge::Judged;
use super::shared::{Shared, Urgency};
use super::stopping::{Origin, Stopping};
use super::switchover::Kind;
use super::throttling::Throttling;
use super::{Next, State, ending, misplaced};
use crate::source::Verdict;
use crate::source::events::{Action, Event, Outcome, Pass};
use crate::source::policy::{CONVERGING, Convergence, Decision, PassOutcome};
use crate::source::settings::MigrationMode;
use std::time::Duration;
use vmferry_core::Section;
use vmferry_wire::{RunName, ToSource, ToTarget};

/// Fraction of the downtime limit. Pages that take less than this time to send can wait.
const LITTLE: u32 = 4;

/// Passes of a migration.
#[derive(Debug, Clone)]
pub(super) struct Precopy {
    step: Step,
    /// Pages that the last harvest found.
    dirty: u64,
    costs: Costs,
    convergence: Convergence,
    judged: Judged,
    throttling: Throttling,
    /// Number of pages that the pass before left, in hybrid mode.
    left_before: Option<u64>,
    /// Time for which the source waited for the guest with nothing to send.
    rested: Duration,
    /// Pages that arrived with a digest mismatch in the last pass.
    damaged: Vec<RunName>,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq)]
pub(super) enum Step {
    /// A pass is in progress. `sent` is the number of bytes after the source has sent all pages,
    /// `received` is true after the target has received them, and `streamed` is the number of bytes
    /// of device state that were sent in parallel.
    Passing {
        began: Duration,
        sent: Option<u64>,
        received: bool,
        streamed: Option<u64>,
    },
    Harvesting {
        began: Duration,
        of: Written,
    },
    TrialPause {
        of: Written,
    },
    /// The target's VM prepares itself with the state of the trial pause.
    Preparing {
        of: Written,
    },
    /// Almost nothing is left to send, and the guest cannot be stopped yet. A pass would only cause
    /// faults in the guest.
    Resting {
        since: Duration,
    },
}

/// Time in which the pages of a harvest were written.
#[derive(Debug, Hash, Clone, Copy, PartialEq)]
pub(super) enum Written {
    /// During a pass, with the number of sent bytes and its duration.
    DuringPass { bytes: u64, took: Duration },
    /// Not during a pass. Such pages are not used for judgements.
    DuringRest,
}

impl Precopy {
    /// Begins: the target is ready, and the tracker has started.
    pub(super) fn begin(shared: &Shared, now: Duration) -> Next {
        let precopy = Self {
            step: Step::Passing { began: now, sent: None, received: false, streamed: None },
            dirty: 0,
            costs: Costs::default(),
            convergence: Convergence::of(&shared.settings),
            judged: Judged::default(),
            throttling: Throttling::new(shared.settings.auto_converge),
            left_before: None,
            rested: Duration::ZERO,
            damaged: Vec::new(),
        };
        Box::new(precopy).send_pass(shared, now, true)
    }

    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn is_resting(&self) -> bool {
        matches!(self.step, Step::Resting { .. })
    }

    /// Returns true if the next harvest finds pages that were not written during a pass.
    pub(super) fn is_waking(&self) -> bool {
        matches!(self.step, Step::Harvesting { of: Written::DuringRest, .. })
    }

    pub(super) fn verdict(&self) -> Option<&Verdict> {
        self.judged.verdict.as_ref()
    }

    /// Returns the pages that arrived with a digest mismatch in the last pass.
    pub(super) fn damaged(self) -> Vec<RunName> {
        self.damaged
    }

    /// Returns the downtime to expect if the guest were stopped now.
    pub(super) fn predicted(&self, shared: &Shared) -> Option<Duration> {
        shared.link.rate.predict(self.dirty, self.costs.all(shared))
    }

    pub(super) fn handle(mut self: Box<Self>, shared: &mut Shared, now: Duration, event: Event) -> Next {
        match (self.step, event) {
            (Step::Passing { began, sent: None, received, streamed }, Event::PassSent { bytes, listing }) => {
                self.costs.listing = listing;
                self.passing(now, began, (Some(bytes), received, streamed))
            }
            (
                Step::Passing { began, sent, streamed, .. },
                Event::Message(ToSource::Received { pass, runs, .. }),
            ) if pass == shared.pass => {
                // Such pages are dirty as well and are sent again. A handover also names them
                // explicitly.
                self.damaged = runs;
                self.passing(now, began, (sent, true, streamed))
            }
            (
                Step::Passing { began, sent, received, streamed: None },
                Event::StateStreamed { bytes, left },
            ) => {
                self.costs.streams_left = left;
                self.passing(now, began, (sent, received, Some(bytes)))
            }
            (Step::Harvesting { began, of }, Event::Harvested { pages, writers }) => {
                self.costs.harvest = now.saturating_sub(began);
                self.throttling.writers = writers;
                self.dirty = pages;
                self.harvested(shared, now, of)
            }
            (
                Step::TrialPause { of },
                Event::TrialPaused { stop, save, quiesce, paused, state_bytes, trial },
            ) => {
                self.costs.measured(stop, save, quiesce, state_bytes);
                shared.deferral.found_quiet(now);
                if self.cannot_stop(shared) {
                    shared.deferral.found_too_long(now, paused);
                }
                match trial.filter(|_| std::mem::take(&mut shared.wants_trial)) {
                    Some(trial) => self.prepare(of, trial),
                    None => self.decide(shared, now, of),
                }
            }
            (Step::Preparing { of }, Event::Message(ToSource::Prepared)) => self.prepared(shared, now, of),
            (Step::TrialPause { of }, Event::Busy { paused, why }) => {
                shared.deferral.found_busy(now, paused, why);
                self.decide(shared, now, of)
            }
            (step, event) => {
                let why = misplaced(&event, super::Step::Precopy(step));
                ending::give_up(Outcome::Failed(why), true)
            }
        }
    }
}

/// Sequence of passes.
impl Precopy {
    pub(super) fn send_pass(mut self: Box<Self>, shared: &Shared, now: Duration, first: bool) -> Next {
        let streams = !shared.streams.is_empty();
        let streamed = (!streams).then_some(0);
        self.step = Step::Passing { began: now, sent: None, received: false, streamed };
        let mut actions = vec![
            Action::Send(ToTarget::Pass { pass: shared.pass, pages: self.dirty }),
            Action::SendPass { number: shared.pass, pass: Pass::Dirty { first } },
        ];
        actions.extend(streams.then_some(Action::StreamState));
        (State::Precopy(self), actions)
    }

    fn passing(
        mut self: Box<Self>,
        now: Duration,
        began: Duration,
        (sent, received, streamed): (Option<u64>, bool, Option<u64>),
    ) -> Next {
        if let (Some(bytes), true, Some(state)) = (sent, received, streamed) {
            // Pages and device state were sent over the same link.
            let bytes = bytes.saturating_add(state);
            let of = Written::DuringPass { bytes, took: now.saturating_sub(began) };
            return self.harvest(now, of);
        }
        self.step = Step::Passing { began, sent, received, streamed };
        (State::Precopy(self), Vec::new())
    }

    fn harvest(mut self: Box<Self>, now: Duration, of: Written) -> Next {
        self.step = Step::Harvesting { began: now, of };
        (State::Precopy(self), vec![Action::Harvest])
    }

    fn harvested(self: Box<Self>, shared: &mut Shared, now: Duration, of: Written) -> Next {
        let Written::DuringPass { took, .. } = of else { return self.woken(shared, now) };
        // A pass waits for the target exactly once. Its duration therefore bounds the round trip,
        // which a late answer to a ping can overestimate.
        shared.link.round_trip = shared.link.round_trip.min(took);
        // A trial pause measures the cost of stopping. One suffices, unless the host was so busy at
        // that time that the guest would never fit its limit.
        let never = self.costs.stop.is_none() && shared.deferral.busy().is_none();
        let again = self.cannot_stop(shared) && shared.deferral.is_due(now) && !shared.urgency.insists();
        if never || again {
            return self.trial_pause(shared, of);
        }
        self.decide(shared, now, of)
    }

    fn trial_pause(mut self: Box<Self>, shared: &Shared, of: Written) -> Next {
        self.step = Step::TrialPause { of };
        (State::Precopy(self), vec![Action::TrialPause { within: shared.io_patience() }])
    }

    /// Has the target's VM prepare itself with the state of the trial pause, while the guest runs.
    fn prepare(mut self: Box<Self>, of: Written, trial: Vec<Section>) -> Next {
        self.step = Step::Preparing { of };
        let sections = u32::try_from(trial.len()).unwrap_or(u32::MAX);
        let messages = trial.into_iter().map(ToTarget::TrialSection);
        let messages = messages.chain([ToTarget::TrialEnd { sections }]);
        (State::Precopy(self), messages.map(Action::Send).collect())
    }

    /// Continues after the target's VM was prepared, which may have taken long. The pass is not
    /// judged, because the guest has written more since its harvest.
    fn prepared(mut self: Box<Self>, shared: &mut Shared, now: Duration, of: Written) -> Next {
        if let Written::DuringPass { bytes, took } = of {
            shared.link.rate.learn(PassOutcome { bytes, elapsed: took, remaining: self.dirty });
            shared.pass += 1;
        }
        self.begin_anew();
        self.harvest(now, Written::DuringRest)
    }

    /// Decides on the next step after a pass.
    fn decide(mut self: Box<Self>, shared: &mut Shared, now: Duration, of: Written) -> Next {
        let Written::DuringPass { bytes, took } = of else { return self.woken(shared, now) };
        let outcome = PassOutcome { bytes, elapsed: took, remaining: self.dirty };
        // Updated first, because the time for sending the state is one of the costs.
        shared.link.rate.learn(outcome);
        let decision = self.convergence.decide(outcome, self.costs.all(shared), &shared.link.rate);
        shared.pass += 1;
        self.judge(shared, now, outcome, decision);
        let ready = shared.deferral.busy().is_none() || shared.urgency.insists();
        if (decision == Decision::Switch && ready) || shared.urgency == Urgency::Switch {
            return self.stop(shared, Kind::Complete);
        }
        if self.wants_postcopy(shared) && ready {
            return self.stop(shared, Kind::HandOver);
        }
        if self.hands_over_instead(shared, now) {
            return self.stop(shared, Kind::HandOver);
        }
        if self.rests(shared) {
            return self.rest(now);
        }
        let predicted = self.predicted(shared);
        let throttle = self.throttling.adapt(shared, outcome, predicted).map(Action::Throttle);
        let (state, pass) = self.send_pass(shared, now, false);
        (state, throttle.into_iter().chain(pass).collect())
    }

    /// Returns true if the guest must go over to postcopy: on request, or because another pass is
    /// not justified in hybrid mode.
    fn wants_postcopy(&mut self, shared: &Shared) -> bool {
        let before = self.left_before.replace(self.dirty);
        let slow = before.is_some_and(|before| self.dirty as f64 > before as f64 * CONVERGING);
        shared.urgency >= Urgency::Advised || (shared.settings.mode == MigrationMode::Hybrid && slow)
    }

    fn stop(self: Box<Self>, shared: &Shared, kind: Kind) -> Next {
        let (within, predicted) = match kind {
            Kind::Complete => (self.io_may_take(shared), self.predicted(shared)),
            Kind::HandOver => (shared.io_patience(), None),
        };
        Stopping::begin(Origin::Precopy(self), kind, within, predicted)
    }

    /// Returns the time within which the I/O of the paused guest must be quiesced: the part of the
    /// limit that the last pages do not need.
    fn io_may_take(&self, shared: &Shared) -> Duration {
        let others = self.costs.without_io(shared);
        let others = shared.link.rate.predict(self.dirty, others).unwrap_or(others);
        shared.settings.downtime_limit.saturating_sub(others)
    }

    /// Forgets earlier passes, so that the next ones are not compared with them.
    pub(super) fn begin_anew(&mut self) {
        self.left_before = None;
        self.judged.begin_anew();
        self.convergence.begin_anew();
    }
}

/// Deferred switchover.
impl Precopy {
    /// Returns true if, by the last measurement, the guest cannot be stopped within the limit,
    /// whatever is left to send, or if only its I/O prevents that.
    fn cannot_stop(&self, shared: &Shared) -> bool {
        let stop = self.costs.stop_and_load(shared).saturating_add(self.costs.quiesce);
        let too_long = self.costs.stop.is_some() && stop > shared.settings.downtime_limit;
        self.waits_for_io(shared) || too_long
    }

    /// Returns true if only the guest's I/O prevents stopping it.
    pub(super) fn waits_for_io(&self, shared: &Shared) -> bool {
        let limit = shared.settings.downtime_limit;
        let too_long = |all: Duration| all > limit && all.saturating_sub(self.costs.quiesce) <= limit;
        shared.deferral.busy().is_some() || self.predicted(shared).is_some_and(too_long)
    }

    /// Returns true if the guest's I/O can be quiesced, but stopping the guest takes longer than
    /// the limit, whatever is left to send. A guest that may go over to postcopy does not wait for
    /// a change.
    fn hands_over_instead(&mut self, shared: &mut Shared, now: Duration) -> bool {
        if shared.deferral.busy().is_some() || !self.cannot_stop(shared) || !self.little_is_left(shared) {
            return false;
        }
        shared.settings.mode == MigrationMode::Hybrid || self.stopping_takes_too_long(shared, now)
    }

    /// Returns true if almost nothing is left to send. For a throttled guest, any amount that fits
    /// the limit counts as such.
    fn little_is_left(&self, shared: &Shared) -> bool {
        let limit = shared.settings.downtime_limit;
        let little = if self.throttling.slows() { limit } else { limit / LITTLE };
        shared.link.rate.predict(self.dirty, Duration::ZERO).is_some_and(|time| time <= little)
    }

    /// Returns true if the source waits for the next attempt without sending the remaining pages.
    fn rests(&self, shared: &Shared) -> bool {
        self.cannot_stop(shared) && !shared.urgency.insists() && self.little_is_left(shared)
    }

    /// Waits for the next attempt. The guest is not throttled meanwhile, because the wait can be
    /// long.
    fn rest(mut self: Box<Self>, now: Duration) -> Next {
        self.step = Step::Resting { since: now };
        let release = self.throttling.release().map(Action::Throttle);
        (State::Precopy(self), release.into_iter().collect())
    }

    /// Handles a tick while the source waits.
    pub(super) fn tick(mut self: Box<Self>, shared: &mut Shared, now: Duration) -> Next {
        let Step::Resting { since } = self.step else { return (State::Precopy(self), Vec::new()) };
        if !shared.urgency.insists() && !shared.deferral.is_due(now) {
            let ping = shared.ping(now);
            return (State::Precopy(self), ping);
        }
        self.rested += now.saturating_sub(since);
        // Pages that were written meanwhile belong to no pass, and are not used for judgements. If
        // there are more than a few, they are sent first: the trial pause takes place when the
        // guest could move at once.
        self.begin_anew();
        self.harvest(now, Written::DuringRest)
    }

    /// Decides on the next step after a wait, once the pages that the guest wrote meanwhile are
    /// known.
    fn woken(mut self: Box<Self>, shared: &mut Shared, now: Duration) -> Next {
        if !self.little_is_left(shared) {
            return self.send_pass(shared, now, false);
        }
        let insists = shared.urgency.insists();
        if !insists && shared.deferral.is_due(now) {
            return self.trial_pause(shared, Written::DuringRest);
        }
        let ready = shared.deferral.busy().is_none() || insists;
        let fits = self.predicted(shared).is_some_and(|time| time <= shared.settings.downtime_limit);
        if ready && (fits || shared.urgency == Urgency::Switch) {
            return self.stop(shared, Kind::Complete);
        }
        if ready && shared.urgency >= Urgency::Advised {
            return self.stop(shared, Kind::HandOver);
        }
        if self.hands_over_instead(shared, now) {
            return self.stop(shared, Kind::HandOver);
        }
        if self.rests(shared) { self.rest(now) } else { self.send_pass(shared, now, false) }
    }
}

/// Decisions that the migration makes by itself.
impl Precopy {
    /// Judges a pass that has ended and left pages. `decision` is the policy's decision.
    fn judge(&mut self, shared: &mut Shared, now: Duration, pass: PassOutcome, decision: Decision) {
        let Some(standing) = self.judged.standing(shared, pass, &self.costs, self.throttling.slows()) else {
            return;
        };
        let waits_for_io = self.waits_for_io(shared);
        let seen = self.judged.seen(shared, now, pass, standing, (waits_for_io, self.rested));
        if decision == Decision::Switch || shared.urgency != Urgency::Normal || waits_for_io {
            // No action of the migration helps against I/O.
            return;
        }
        if let Some(how) = self.judged.change_course(shared, &seen) {
            self.throttling.how = how;
        }
    }

    /// Handles the case that nothing is left to send and the guest still cannot be stopped within
    /// the limit. Chooses postcopy if the settings allow it, and returns true in that case.
    fn stopping_takes_too_long(&mut self, shared: &mut Shared, now: Duration) -> bool {
        let allowed = shared.settings.auto.as_ref().is_some_and(|auto| auto.postcopy);
        if !allowed || !shared.settings.may_hand_over() {
            return false;
        }
        let costs = self.costs.all(shared);
        Judged::note_long_stop(shared, now, costs);
        shared.urgency.raise(Urgency::Advised);
        true
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let Self {
            step,
            dirty,
            costs,
            convergence: _,
            judged: _,
            throttling,
            left_before,
            rested: _,
            damaged,
        } = self;
        match step {
            Step::Passing { began, .. } => *began = Duration::ZERO,
            Step::Harvesting { began, of } => {
                *began = Duration::ZERO;
                of.forget();
            }
            Step::TrialPause { of } | Step::Preparing { of } => of.forget(),
            Step::Resting { since } => *since = Duration::ZERO,
        }
        costs.project(hasher);
        throttling.project(hasher);
        (dirty, left_before).hash(hasher);
        damaged.iter().for_each(|run| (run.region, run.first, run.count).hash(hasher));
    }

    #[cfg(test)]
    pub(super) fn rested(&self) -> Duration {
        self.rested
    }

    #[cfg(test)]
    pub(super) fn slows(&self) -> bool {
        self.throttling.slows()
    }

    #[cfg(test)]
    pub(super) fn stuck(&self) -> u32 {
        self.judged.stuck
    }

    #[cfg(test)]
    pub(super) fn in_trial_pause(&self) -> bool {
        matches!(self.step, Step::TrialPause { .. })
    }
}

#[cfg(feature = "model")]
impl Written {
    fn forget(&mut self) {
        if let Self::DuringPass { took, .. } = self {
            *took = Duration::ZERO;
        }
    }
}
