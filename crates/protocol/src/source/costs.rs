//! Measured costs of stopping the guest.

use super::context::SourceContext;
use std::time::Duration;

/// Times of the parts of a switchover in which no page is sent.
#[derive(Debug, Clone, Default)]
pub(super) struct Costs {
    /// Shortest time that stopping the vCPUs and saving the device state took. `None` before the
    /// first trial pause.
    pub(super) stop: Option<Duration>,
    /// Shortest time that saving the device state took. Loading is expected to take as long, unless
    /// the target has announced another time.
    pub(super) save: Duration,
    /// Size in bytes of the device state that was saved last.
    pub(super) state_bytes: u64,
    /// Bytes of the streams of device state that would be left to send if the guest were paused
    /// now.
    pub(super) streams_left: u64,
    /// Time that quiescing the guest's I/O took in the last trial pause.
    pub(super) quiesce: Duration,
    /// Time that the last harvest took.
    pub(super) harvest: Duration,
    /// Time that listing the pages of the last pass took.
    pub(super) listing: Duration,
}

impl Costs {
    /// Stores the result of a trial pause. For stopping and saving, the shortest times are kept,
    /// because a busy host makes a pause longer and never shorter. For I/O, the last time is kept,
    /// because it depends on the guest's activity.
    pub(super) fn measured(&mut self, stop: Duration, save: Duration, quiesce: Duration, state_bytes: u64) {
        self.save = if self.stop.is_some() { self.save.min(save) } else { save };
        self.stop = Some(self.stop.map_or(stop, |before| before.min(stop)));
        self.quiesce = quiesce;
        self.state_bytes = state_bytes;
    }

    /// Returns the time for stopping the guest on the source and loading its device state on the
    /// target, without quiescing I/O and without anything to send.
    pub(super) fn stop_and_load(&self, context: &SourceContext) -> Duration {
        let Some(stop) = self.stop else { return context.target_load.unwrap_or_default() };
        stop.saturating_add(context.target_load.unwrap_or(self.save))
    }

    /// Returns the downtime if there is no page to send and the guest's I/O quiesces at once.
    pub(super) fn without_io(&self, context: &SourceContext) -> Duration {
        // The state is sent. The dirty pages are harvested once more and listed. The source waits
        // for the target three times: for the last pages, for the load, for the commit.
        let state = self.state_bytes.saturating_add(self.streams_left);
        let state = context.link.rate.send_time(state).unwrap_or_default();
        self.stop_and_load(context)
            .saturating_add(state)
            .saturating_add(self.harvest + self.listing + context.link.round_trip * 3)
    }

    /// Returns the downtime if there is no page to send.
    pub(super) fn all(&self, context: &SourceContext) -> Duration {
        self.quiesce.saturating_add(self.without_io(context))
    }
}

#[cfg(feature = "model")]
impl Costs {
    /// Hashes the fields that affect decisions. Nothing takes time in a model.
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { stop, save, state_bytes: _, streams_left: _, quiesce, harvest, listing } = self;
        assert!(stop.is_none_or(|stop| stop.is_zero()));
        assert!([*save, *quiesce, *harvest, *listing] == [Duration::ZERO; 4]);
        std::hash::Hash::hash(&stop.is_some(), hasher);
    }
}
