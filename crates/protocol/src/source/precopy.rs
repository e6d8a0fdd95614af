//! Precopy phase: the source sends passes over memory while the guest runs, until the guest can be
//! stopped and the rest can be sent.

use super::context::{SourceContext, Urgency};
use super::costs::Costs;
use super::judge::Judged;
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
use vmferry_wire::{RegionRun, ToSource, ToTarget};

/// Divisor of the downtime limit. If sending all remaining pages takes less than this fraction of
/// the limit, almost nothing is left to send.
const LITTLE: u32 = 4;

/// State of the passes of a migration.
#[derive(Debug, Clone)]
pub(super) struct Precopy {
    step: Step,
    /// Number of pages that the last harvest found.
    dirty: u64,
    costs: Costs,
    convergence: Convergence,
    judged: Judged,
    throttling: Throttling,
    /// Number of pages that the previous pass left, for hybrid mode.
    left_before: Option<u64>,
    /// Total time for which the source waited until the guest could be stopped, with almost nothing
    /// to send.
    waited: Duration,
    /// Time for which the pages of the last pass were held back. The link's rate does not include
    /// this time.
    held: Duration,
    /// Pages that arrived with a digest mismatch in the last pass.
    mismatched: Vec<RegionRun>,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq)]
pub(super) enum Step {
    /// A pass is in progress. `sent` is the number of bytes of the pass, once the source has sent
    /// all pages. `received` is true once the target has received them. `streamed` is the number of
    /// bytes of device state that were sent in parallel, once the streams have no more data.
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
    /// Almost nothing is left to send, but the guest cannot be stopped yet. No pass is sent,
    /// because it would only cause faults in the guest.
    Waiting {
        since: Duration,
    },
}

/// Period in which the guest wrote the pages of a harvest.
#[derive(Debug, Hash, Clone, Copy, PartialEq)]
pub(super) enum Written {
    /// During a pass that sent `bytes` bytes and took the time `took`.
    DuringPass { bytes: u64, took: Duration },
    /// Not during a pass. The number of such pages is not used for predictions.
    WhileWaiting,
}

impl Precopy {
    /// Begins the first pass. The target must be ready, and the tracker must have started.
    pub(super) fn begin(context: &SourceContext, now: Duration) -> Next {
        let precopy = Self {
            step: Step::Passing { began: now, sent: None, received: false, streamed: None },
            dirty: 0,
            costs: Costs::default(),
            convergence: Convergence::of(&context.settings),
            judged: Judged::default(),
            throttling: Throttling::new(context.settings.auto_converge),
            left_before: None,
            waited: Duration::ZERO,
            held: Duration::ZERO,
            mismatched: Vec::new(),
        };
        Box::new(precopy).send_pass(context, now, true)
    }

    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.step, Step::Waiting { .. })
    }

    /// Returns true if the next harvest finds pages that were not written during a pass.
    pub(super) fn harvests_after_wait(&self) -> bool {
        matches!(self.step, Step::Harvesting { of: Written::WhileWaiting, .. })
    }

    pub(super) fn verdict(&self) -> Option<&Verdict> {
        self.judged.verdict.as_ref()
    }

    /// Returns the pages that arrived with a digest mismatch in the last pass.
    pub(super) fn mismatched(self) -> Vec<RegionRun> {
        self.mismatched
    }

    /// Returns the downtime to expect if the guest were stopped now.
    pub(super) fn predicted(&self, context: &SourceContext) -> Option<Duration> {
        context.link.rate.predict(self.dirty, self.costs.all(context))
    }

    pub(super) fn handle(
        mut self: Box<Self>,
        context: &mut SourceContext,
        now: Duration,
        event: Event,
    ) -> Next {
        match (self.step, event) {
            (
                Step::Passing { began, sent: None, received, streamed },
                Event::PassSent { bytes, listing, held },
            ) => {
                (self.costs.listing, self.held) = (listing, held);
                self.passing(now, began, (Some(bytes), received, streamed))
            }
            (
                Step::Passing { began, sent, streamed, .. },
                Event::Message(ToSource::Received { pass, runs, .. }),
            ) if pass == context.pass => {
                // Pages with a digest mismatch count as dirty, so the next pass sends them again. A
                // handover names them explicitly.
                self.mismatched = runs;
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
                self.harvested(context, now, of)
            }
            (
                Step::TrialPause { of },
                Event::TrialPaused { stop, save, quiesce, paused, state_bytes, trial },
            ) => {
                self.costs.measured(stop, save, quiesce, state_bytes);
                context.deferral.found_quiet(now);
                if self.cannot_stop(context) {
                    context.deferral.found_too_long(now, paused);
                }
                match trial.filter(|_| std::mem::take(&mut context.wants_trial)) {
                    Some(trial) => self.prepare(of, trial),
                    None => self.decide(context, now, of),
                }
            }
            (Step::Preparing { of }, Event::Message(ToSource::Prepared)) => self.prepared(context, now, of),
            (Step::TrialPause { of }, Event::Busy { paused, why }) => {
                context.deferral.found_busy(now, paused, why);
                self.decide(context, now, of)
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
    pub(super) fn send_pass(
        mut self: Box<Self>,
        context: &SourceContext,
        now: Duration,
        first: bool,
    ) -> Next {
        let streams = !context.streams.is_empty();
        let streamed = (!streams).then_some(0);
        self.step = Step::Passing { began: now, sent: None, received: false, streamed };
        let mut actions = vec![
            Action::Send(ToTarget::Pass { pass: context.pass, pages: self.dirty }),
            Action::SendPass { number: context.pass, pass: Pass::Dirty { first } },
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

    fn harvested(self: Box<Self>, context: &mut SourceContext, now: Duration, of: Written) -> Next {
        let Written::DuringPass { took, .. } = of else { return self.after_wait(context, now) };
        // A pass includes exactly one wait for the target. Therefore its duration is an upper bound
        // of the round trip, which a late answer to a ping can overestimate.
        context.link.round_trip = context.link.round_trip.min(took);
        // A trial pause measures the cost of stopping the guest. One trial pause suffices, unless
        // it found that the guest cannot be stopped within its limit, for example because the host
        // was busy at that time.
        let never = self.costs.stop.is_none() && context.deferral.busy().is_none();
        let again = self.cannot_stop(context) && context.deferral.is_due(now) && !context.urgency.insists();
        if never || again {
            return self.trial_pause(context, of);
        }
        self.decide(context, now, of)
    }

    fn trial_pause(mut self: Box<Self>, context: &SourceContext, of: Written) -> Next {
        self.step = Step::TrialPause { of };
        (State::Precopy(self), vec![Action::TrialPause { within: context.io_patience() }])
    }

    /// Lets the target's VM prepare itself with the state of the trial pause, while the guest runs.
    fn prepare(mut self: Box<Self>, of: Written, trial: Vec<Section>) -> Next {
        self.step = Step::Preparing { of };
        let sections = u32::try_from(trial.len()).unwrap_or(u32::MAX);
        let messages = trial.into_iter().map(ToTarget::TrialSection);
        let messages = messages.chain([ToTarget::TrialEnd { sections }]);
        (State::Precopy(self), messages.map(Action::Send).collect())
    }

    /// Continues after the target's VM was prepared. Because this may have taken long, the guest
    /// has written more pages since the harvest, and the pass is not used for a prediction.
    fn prepared(mut self: Box<Self>, context: &mut SourceContext, now: Duration, of: Written) -> Next {
        if let Written::DuringPass { bytes, took } = of {
            self.learn(context, PassOutcome { bytes, elapsed: took, remaining: self.dirty });
            context.pass += 1;
        }
        self.begin_anew();
        self.harvest(now, Written::WhileWaiting)
    }

    /// Updates the link's rate with a pass, without the time for which its pages were held back.
    /// The guest wrote pages during that time, too, so other figures include it.
    fn learn(&self, context: &mut SourceContext, pass: PassOutcome) {
        let elapsed = pass.elapsed.saturating_sub(self.held);
        context.link.rate.learn(PassOutcome { elapsed, ..pass });
    }

    /// Decides on the next step after a pass.
    fn decide(mut self: Box<Self>, context: &mut SourceContext, now: Duration, of: Written) -> Next {
        let Written::DuringPass { bytes, took } = of else { return self.after_wait(context, now) };
        let outcome = PassOutcome { bytes, elapsed: took, remaining: self.dirty };
        // Updated first, because the time for sending the state is one of the costs.
        self.learn(context, outcome);
        let decision = self.convergence.decide(outcome, self.costs.all(context), &context.link.rate);
        context.pass += 1;
        self.judge(context, now, outcome, decision);
        let ready = context.deferral.busy().is_none() || context.urgency.insists();
        if (decision == Decision::Switch && ready) || context.urgency == Urgency::Switch {
            return self.stop(context, Kind::Complete);
        }
        if self.wants_postcopy(context) && ready {
            return self.stop(context, Kind::HandOver);
        }
        if self.hands_over_instead(context, now) {
            return self.stop(context, Kind::HandOver);
        }
        if self.should_wait(context) {
            return self.wait(now);
        }
        let predicted = self.predicted(context);
        let throttle = self.throttling.adapt(context, outcome, predicted).map(Action::Throttle);
        let (state, pass) = self.send_pass(context, now, false);
        (state, throttle.into_iter().chain(pass).collect())
    }

    /// Returns true if the guest must go over to postcopy, on request or because in hybrid mode
    /// another pass is not worthwhile.
    fn wants_postcopy(&mut self, context: &SourceContext) -> bool {
        let before = self.left_before.replace(self.dirty);
        let slow = before.is_some_and(|before| self.dirty as f64 > before as f64 * CONVERGING);
        context.urgency >= Urgency::Advised || (context.settings.mode == MigrationMode::Hybrid && slow)
    }

    fn stop(self: Box<Self>, context: &SourceContext, kind: Kind) -> Next {
        let (within, predicted) = match kind {
            Kind::Complete => (self.io_may_take(context), self.predicted(context)),
            Kind::HandOver | Kind::Shared => (context.io_patience(), None),
        };
        Stopping::begin(Origin::Precopy(self), kind, within, predicted)
    }

    /// Returns the time within which the I/O of the paused guest must be quiesced: the downtime
    /// limit without the time that the other parts of the switchover need.
    fn io_may_take(&self, context: &SourceContext) -> Duration {
        let others = self.costs.without_io(context);
        let others = context.link.rate.predict(self.dirty, others).unwrap_or(others);
        context.settings.downtime_limit.saturating_sub(others)
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
    /// Returns true if, according to the last measurement, the guest cannot be stopped within the
    /// limit even with nothing to send, or if only its I/O prevents that.
    fn cannot_stop(&self, context: &SourceContext) -> bool {
        let stop = self.costs.stop_and_load(context).saturating_add(self.costs.quiesce);
        let too_long = self.costs.stop.is_some() && stop > context.settings.downtime_limit;
        self.waits_for_io(context) || too_long
    }

    /// Returns true if only the guest's I/O prevents stopping it.
    pub(super) fn waits_for_io(&self, context: &SourceContext) -> bool {
        let limit = context.settings.downtime_limit;
        let too_long = |all: Duration| all > limit && all.saturating_sub(self.costs.quiesce) <= limit;
        context.deferral.busy().is_some() || self.predicted(context).is_some_and(too_long)
    }

    /// Returns true if the guest goes over to postcopy because it cannot be stopped within the
    /// limit, even with almost nothing to send. Its I/O must have quiesced at the last attempt.
    fn hands_over_instead(&mut self, context: &mut SourceContext, now: Duration) -> bool {
        if context.deferral.busy().is_some() || !self.cannot_stop(context) || !self.little_is_left(context) {
            return false;
        }
        context.settings.mode == MigrationMode::Hybrid || self.stopping_takes_too_long(context, now)
    }

    /// Returns true if almost nothing is left to send. For a throttled guest, any amount that can
    /// be sent within the downtime limit counts as such.
    fn little_is_left(&self, context: &SourceContext) -> bool {
        let limit = context.settings.downtime_limit;
        let little = if self.throttling.slows() { limit } else { limit / LITTLE };
        context.link.rate.predict(self.dirty, Duration::ZERO).is_some_and(|time| time <= little)
    }

    /// Returns true if the source must wait for the next attempt to stop the guest, without sending
    /// the remaining pages.
    fn should_wait(&self, context: &SourceContext) -> bool {
        self.cannot_stop(context) && !context.urgency.insists() && self.little_is_left(context)
    }

    /// Waits for the next attempt. The guest is not throttled meanwhile, because the wait can be
    /// long.
    fn wait(mut self: Box<Self>, now: Duration) -> Next {
        self.step = Step::Waiting { since: now };
        let release = self.throttling.release().map(Action::Throttle);
        (State::Precopy(self), release.into_iter().collect())
    }

    /// Handles a tick while the source waits.
    pub(super) fn tick(mut self: Box<Self>, context: &mut SourceContext, now: Duration) -> Next {
        let Step::Waiting { since } = self.step else { return (State::Precopy(self), Vec::new()) };
        if !context.urgency.insists() && !context.deferral.is_due(now) {
            let ping = context.ping(now);
            return (State::Precopy(self), ping);
        }
        self.waited += now.saturating_sub(since);
        // Pages that were written during the wait belong to no pass, and are not used for
        // predictions. If there are more than a few, a pass sends them first, so that the trial
        // pause takes place when the guest could move at once.
        self.begin_anew();
        self.harvest(now, Written::WhileWaiting)
    }

    /// Decides on the next step after a wait, once the pages that the guest wrote meanwhile are
    /// known.
    fn after_wait(mut self: Box<Self>, context: &mut SourceContext, now: Duration) -> Next {
        if !self.little_is_left(context) {
            return self.send_pass(context, now, false);
        }
        let insists = context.urgency.insists();
        if !insists && context.deferral.is_due(now) {
            return self.trial_pause(context, Written::WhileWaiting);
        }
        let ready = context.deferral.busy().is_none() || insists;
        let fits = self.predicted(context).is_some_and(|time| time <= context.settings.downtime_limit);
        if ready && (fits || context.urgency == Urgency::Switch) {
            return self.stop(context, Kind::Complete);
        }
        if ready && context.urgency >= Urgency::Advised {
            return self.stop(context, Kind::HandOver);
        }
        if self.hands_over_instead(context, now) {
            return self.stop(context, Kind::HandOver);
        }
        if self.should_wait(context) { self.wait(now) } else { self.send_pass(context, now, false) }
    }
}

/// Decisions that the migration makes by itself.
impl Precopy {
    /// Makes the prediction after a pass has ended, and changes the course if necessary. `decision`
    /// is the policy's decision.
    fn judge(&mut self, context: &mut SourceContext, now: Duration, pass: PassOutcome, decision: Decision) {
        let Some(pass_state) = self.judged.pass_state(context, pass, &self.costs, self.throttling.slows())
        else {
            return;
        };
        let waits_for_io = self.waits_for_io(context);
        let seen = self.judged.seen(context, now, pass, pass_state, (waits_for_io, self.waited));
        if decision == Decision::Switch || context.urgency != Urgency::Normal || waits_for_io {
            // No change of course is needed, or none helps: the migration cannot make I/O quiesce.
            return;
        }
        if let Some(how) = self.judged.change_course(context, &seen) {
            self.throttling.how = how;
        }
    }

    /// Handles a guest that cannot be stopped within the limit although almost nothing is left to
    /// send. If the `auto` settings allow postcopy, chooses postcopy and returns true.
    fn stopping_takes_too_long(&mut self, context: &mut SourceContext, now: Duration) -> bool {
        let allowed = context.settings.auto.as_ref().is_some_and(|auto| auto.postcopy);
        if !allowed || !context.settings.may_hand_over() {
            return false;
        }
        let costs = self.costs.all(context);
        Judged::note_long_stop(context, now, costs);
        context.urgency.raise(Urgency::Advised);
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
            waited: _,
            held,
            mismatched,
        } = self;
        assert!(held.is_zero());
        match step {
            Step::Passing { began, .. } => *began = Duration::ZERO,
            Step::Harvesting { began, of } => {
                *began = Duration::ZERO;
                of.forget();
            }
            Step::TrialPause { of } | Step::Preparing { of } => of.forget(),
            Step::Waiting { since } => *since = Duration::ZERO,
        }
        costs.project(hasher);
        throttling.project(hasher);
        (dirty, left_before).hash(hasher);
        mismatched.iter().for_each(|run| (run.region, run.first, run.count).hash(hasher));
    }

    #[cfg(test)]
    pub(super) fn waited(&self) -> Duration {
        self.waited
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
