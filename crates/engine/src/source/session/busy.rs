//! A guest whose I/O does not come to rest in the time that it may stand still: it goes on, and is stopped again later.
//!
//! Until the state is saved nothing has been said to the target of a pause, so the way back is that the guest runs and the passes go on.
//! What was written meanwhile, by requests that ended, is the tracker's, as everything else. A postcopy from the start has no passes, and
//! nothing that it must know of writes: it only waits.

use super::{LONGEST_BETWEEN_REHEARSALS, Phase, REHEARSALS_SHARE, Session, State};
use crate::source::events::{Action, Outcome};
use crate::source::settings::MigrationMode;
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode};

/// What would take less than this part of the limit to send can wait.
const LITTLE: u32 = 4;

/// Where a guest may go over to postcopy it does so however long stopping it takes: a limit below what a flush of any storage takes must not
/// keep it.
const LEAST_PATIENCE: Duration = Duration::from_millis(300);

/// I/O comes to rest by itself some time, and must then be met.
const BUSY_SHARE: u32 = 10;

/// A guest that stood still in vain runs for at least so many times that long before it is stopped again.
const RUNS_BETWEEN: u32 = 3;

impl Session {
    /// Somebody wants the guest to go, or the migration's time is up: then it is waited for as long as its VM thinks right.
    pub(super) fn insisted(&self) -> bool {
        self.switch_wanted || self.postcopy_wanted
    }

    fn has_passes(&self) -> bool {
        self.settings.mode != MigrationMode::Postcopy
    }

    /// By what was measured last, the guest cannot be stopped for as short as it has to be, whatever is to be sent; or could be but for what
    /// its I/O took then.
    pub(super) fn cannot_stop(&self) -> bool {
        let least = self.fixed.map(|_| self.stopping().saturating_add(self.settle));
        self.waits_for_io() || least.is_some_and(|least| least > self.settings.downtime_limit)
    }

    /// Nothing but its I/O keeps it from being stopped.
    pub(super) fn waits_for_io(&self) -> bool {
        let limit = self.settings.downtime_limit;
        let too_long = |all: Duration| all > limit && all.saturating_sub(self.settle) <= limit;
        self.busy.is_some() || self.predicted_downtime().is_some_and(too_long)
    }

    /// Its I/O comes to rest, but stopping it takes longer than it may whatever is to be sent: where it may go over to postcopy it need not
    /// wait for that to change.
    pub(super) fn goes_lazily_instead(&mut self, now: Duration) -> bool {
        if self.busy.is_some() || !self.cannot_stop() || !self.little_is_left() {
            return false;
        }
        self.settings.mode == MigrationMode::Hybrid || self.stopping_takes_too_long(now)
    }

    /// Whether nearly nothing is left to send; to a guest that is slowed for it, all that fits its limit is as good.
    fn little_is_left(&self) -> bool {
        let limit = self.settings.downtime_limit;
        let little = if self.slowed() { limit } else { limit / LITTLE };
        self.policy.predict(self.remaining, Duration::ZERO).is_some_and(|time| time <= little)
    }

    /// Whether it waits for the next rehearsal with what is left.
    pub(super) fn rests(&self) -> bool {
        self.cannot_stop() && !self.insisted() && self.little_is_left()
    }

    /// What could be done for it is done: it is not slowed for that, however long the wait.
    pub(super) fn rest(&mut self, now: Duration) -> Vec<Action> {
        self.state = State::Resting;
        self.rests_since = now;
        let slowed = self.slowed();
        self.shares.clear();
        slowed.then(|| Action::Throttle(vec![0.0])).into_iter().collect()
    }

    /// Time has passed, and perhaps enough.
    pub(super) fn rested(&mut self, now: Duration) -> Vec<Action> {
        if !self.insisted() && !self.rehearsal_is_due(now) {
            return self.ping(now);
        }
        self.rested += now.saturating_sub(self.rests_since);
        if !self.has_passes() {
            return self.pause_for_postcopy();
        }
        // What was written meanwhile is no pass's, and nothing is to be judged by it. If it is more than a little it is sent first: the
        // guest is stopped to see whether its I/O is at rest when it can go at once.
        self.begin_anew();
        self.after_rest = true;
        self.state = State::Harvesting;
        self.harvest_began = now;
        vec![Action::Harvest]
    }

    pub(super) fn rehearsal_is_due(&self, now: Duration) -> bool {
        now.saturating_sub(self.rehearsed) > self.rehearse_after
    }

    /// It is known what was written while it rested.
    pub(super) fn woken(&mut self, now: Duration) -> Vec<Action> {
        if !self.little_is_left() {
            self.after_rest = false;
            return self.send_live(now, false);
        }
        if !self.insisted() && self.rehearsal_is_due(now) {
            return self.rehearse();
        }
        self.after_rest = false;
        let ready = self.busy.is_none() || self.insisted();
        let fits = self.predicted_downtime().is_some_and(|time| time <= self.settings.downtime_limit);
        if ready && (fits || self.switch_wanted) {
            return self.pause();
        }
        if ready && (self.postcopy_wanted || self.postcopy_advised) {
            return self.pause_for_postcopy();
        }
        if self.goes_lazily_instead(now) {
            return self.pause_for_postcopy();
        }
        if self.rests() { self.rest(now) } else { self.send_live(now, false) }
    }

    /// Whether the next harvest, or the one that was just made, has what was written during no pass.
    pub(crate) fn is_waking(&self) -> bool {
        self.after_rest
    }

    pub(super) fn rehearse(&mut self) -> Vec<Action> {
        self.state = State::Rehearsing;
        vec![Action::Rehearse { within: self.patience_with_io() }]
    }

    /// Passes to come are not compared with those before.
    fn begin_anew(&mut self) {
        self.left_before = None;
        self.judged.begin_anew();
        self.policy.begin_anew();
    }

    /// How long the I/O of the guest, which stands still, has to come to rest: what the last pages leave of the limit.
    pub(super) fn settle_within(&self) -> Duration {
        if self.insisted() {
            return Duration::MAX;
        }
        if self.lazy {
            return self.patience_with_io();
        }
        let others = self.costs_without_io();
        let others = self.policy.predict(self.remaining, others).unwrap_or(others);
        self.settings.downtime_limit.saturating_sub(others)
    }

    /// How long I/O may take to come to rest with nothing to send.
    pub(super) fn patience_with_io(&self) -> Duration {
        let limit = self.settings.downtime_limit;
        let auto = self.settings.auto.as_ref().is_some_and(|auto| auto.postcopy);
        let lazily = self.settings.mode != MigrationMode::Precopy || auto;
        if lazily { limit.max(LEAST_PATIENCE) } else { limit }
    }

    /// The guest was stopped for an instant, and its I/O came to rest.
    pub(super) fn learnt(
        &mut self,
        now: Duration,
        (fixed, save): (Duration, Duration),
        settle: Duration,
        stood: Duration,
    ) {
        // A busy host makes it longer, never shorter; what I/O takes changes with what the guest does.
        self.save = if self.fixed.is_some() { self.save.min(save) } else { save };
        self.fixed = Some(self.fixed.map_or(fixed, |before| before.min(fixed)));
        (self.settle, self.busy) = (settle, None);
        self.rehearsed = now;
        // A VM that really takes longer than the limit is not stopped again and again. One that can be stopped, and then finds its I/O busy
        // after all, waits for longer than the last time.
        if self.cannot_stop() {
            self.stopped_for(now, stood, REHEARSALS_SHARE, Duration::ZERO);
        }
    }

    /// In the long run the guest stands still for one part in `share` of its time, or less.
    fn stopped_for(&mut self, now: Duration, stood: Duration, share: u32, least: Duration) {
        self.rehearsed = now;
        let longest = LONGEST_BETWEEN_REHEARSALS.max(stood.saturating_mul(share));
        self.rehearse_after = self.rehearse_after.saturating_mul(2).min(longest).max(least);
    }

    pub(super) fn found_busy(&mut self, now: Duration, stood: Duration, why: String) {
        self.busy = Some(why);
        self.put_off += 1;
        self.put_off_for += stood;
        self.stopped_for(now, stood, BUSY_SHARE, stood.saturating_mul(RUNS_BETWEEN));
    }

    /// The guest was to be moved, and its I/O is busy.
    pub(super) fn go_on(&mut self, now: Duration, stood: Duration, why: String) -> Vec<Action> {
        if self.insisted() {
            let detail = format!("bringing the guest to rest failed: {why}");
            return self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, detail)), true);
        }
        self.found_busy(now, stood, why);
        self.lazy = false;
        self.begin_anew();
        self.state = State::GoingOn;
        vec![Action::GoOn]
    }

    /// It runs again.
    pub(super) fn went_on(&mut self, now: Duration) -> Vec<Action> {
        if self.has_passes() {
            return self.send_live(now, false);
        }
        self.rest(now)
    }

    /// Why its I/O kept it from being stopped when that was tried last; none from when it is stopped for good.
    pub(crate) fn busy(&self) -> Option<&str> {
        self.busy.as_deref().filter(|_| matches!(self.phase(), Phase::Setup | Phase::Precopy))
    }

    /// Whether its I/O was too busy when it was tried last, before somebody insisted.
    #[cfg(test)]
    pub(crate) fn was_busy(&self) -> bool {
        self.busy.is_some()
    }

    /// Whether it does nothing until the next attempt.
    #[cfg(test)]
    pub(crate) fn is_resting(&self) -> bool {
        self.state == State::Resting
    }

    /// How often the guest's I/O was too busy for it to be stopped.
    pub(crate) fn put_off(&self) -> u64 {
        self.put_off
    }

    /// How long it stood still for that, all together.
    pub(crate) fn put_off_for(&self) -> Duration {
        self.put_off_for
    }
}
