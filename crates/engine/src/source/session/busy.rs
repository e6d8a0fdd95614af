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

impl Session {
    /// Somebody wants the guest to go, or the migration's time is up: then it is waited for as long as its VM thinks right.
    pub(super) fn insisted(&self) -> bool {
        self.switch_wanted || self.postcopy_wanted
    }

    fn has_passes(&self) -> bool {
        self.settings.mode != MigrationMode::Postcopy
    }

    /// By what was measured last, the guest cannot be stopped for as short as it has to be, whatever is to be sent.
    pub(super) fn cannot_stop(&self) -> bool {
        self.busy.is_some() || self.fixed.is_some_and(|fixed| fixed > self.settings.downtime_limit)
    }

    /// Whether it waits for the next rehearsal with what is left.
    pub(super) fn rests(&self) -> bool {
        let transfer = self.policy.predict(self.remaining, Duration::ZERO);
        let little = transfer.is_some_and(|time| time <= self.settings.downtime_limit / LITTLE);
        self.cannot_stop() && !self.insisted() && little
    }

    /// Time has passed, and perhaps enough.
    pub(super) fn rested(&mut self, now: Duration) -> Vec<Action> {
        let due = self.insisted() || now.saturating_sub(self.rehearsed) > self.rehearse_after;
        match (due, self.has_passes()) {
            (false, _) => self.ping(now),
            (true, true) => self.send_live(now, false),
            (true, false) => self.pause_for_postcopy(),
        }
    }

    /// How long the I/O of the guest, which stands still, has to come to rest: what the last pages leave of the limit.
    pub(super) fn settle_within(&self) -> Duration {
        if self.insisted() {
            return Duration::MAX;
        }
        if self.lazy {
            return self.patience_with_io();
        }
        let transfer = self.policy.predict(self.remaining, Duration::ZERO).unwrap_or_default();
        self.settings.downtime_limit.saturating_sub(transfer)
    }

    /// How long I/O may take to come to rest with nothing to send.
    pub(super) fn patience_with_io(&self) -> Duration {
        let limit = self.settings.downtime_limit;
        if self.settings.may_be_lazy() { limit.max(LEAST_PATIENCE) } else { limit }
    }

    /// The guest was stopped for so long, to learn what that takes. A VM that really takes longer than the limit is not stopped again and
    /// again.
    pub(super) fn was_stopped(&mut self, now: Duration, stood: Duration) {
        self.stopped_for(now, stood, REHEARSALS_SHARE);
    }

    /// In the long run the guest stands still for one part in `share` of its time, or less.
    fn stopped_for(&mut self, now: Duration, stood: Duration, share: u32) {
        self.rehearsed = now;
        let longest = LONGEST_BETWEEN_REHEARSALS.max(stood.saturating_mul(share));
        self.rehearse_after = self.rehearse_after.saturating_mul(2).min(longest);
    }

    pub(super) fn found_busy(&mut self, now: Duration, stood: Duration, why: String) {
        self.busy = Some(why);
        self.put_off += 1;
        self.stopped_for(now, stood, BUSY_SHARE);
    }

    /// The guest was to be moved, and its I/O is busy.
    pub(super) fn go_on(&mut self, now: Duration, stood: Duration, why: String) -> Vec<Action> {
        if self.insisted() {
            let detail = format!("bringing the guest to rest failed: {why}");
            return self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, detail)), true);
        }
        self.found_busy(now, stood, why);
        // The next passes say anew whether they are worth while.
        (self.lazy, self.left_before) = (false, None);
        self.state = State::GoingOn;
        vec![Action::GoOn]
    }

    /// It runs again.
    pub(super) fn went_on(&mut self, now: Duration) -> Vec<Action> {
        if self.has_passes() {
            return self.send_live(now, false);
        }
        self.state = State::Resting;
        Vec::new()
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
}
