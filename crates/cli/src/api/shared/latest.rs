//! State of the current or latest migration.

use super::{Migration, Place, Shared, lock};
use crate::api::migration;
use crate::fence::Asked;
use crate::speed::Start;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vmferry_engine::{MigrationState, Monitor};

impl Shared {
    /// Returns the arbiter of the current or latest migration.
    pub(crate) fn fence_now(&self) -> Option<Asked> {
        lock(&self.fence_now).clone()
    }

    pub(crate) fn begin_migration(&self, fence: Option<Asked>, goes_over: bool) {
        *lock(&self.fence_now) = fence;
        self.audience.forget();
        self.stay.store(false, Ordering::Release);
        let tell = self.tell.clone();
        let monitor = Arc::new(Monitor::watched(move |change| tell.change(change)));
        self.tell.migration("setup");
        let start = Some(Start::now(&self.speed, &self.probe));
        *lock(&self.migration) = Migration { monitor: Some(monitor), report: None, start, goes_over };
        self.set_place(Place::Moving);
    }

    /// Returns the monitor of the migration that was begun.
    pub(crate) fn monitor(&self) -> Arc<Monitor> {
        lock(&self.migration).monitor.get_or_insert_default().clone()
    }

    /// Returns the state of the guest at the beginning of the current or latest migration.
    pub(crate) fn start(&self) -> Start {
        *lock(&self.migration).start.get_or_insert_with(|| Start::now(&self.speed, &self.probe))
    }

    /// Returns the report of the latest migration if it has ended, or else the monitor of the
    /// current one.
    pub(crate) fn latest(&self) -> (Option<Value>, Option<Arc<Monitor>>) {
        let migration = lock(&self.migration);
        match &migration.report {
            Some(report) => (Some(report.clone()), None),
            None => (None, migration.monitor.clone()),
        }
    }

    /// Returns the monitor of the current migration, if there is one.
    pub(crate) fn under_way(&self) -> Option<Arc<Monitor>> {
        let migration = lock(&self.migration);
        if migration.report.is_some() { None } else { migration.monitor.clone() }
    }

    pub(crate) fn end_migration(&self, report: Value, place: Place) {
        let status = migration::status_of(&report);
        self.set_place(place);
        lock(&self.migration).report = Some(report);
        match place {
            Place::Running => self.tell.runs(),
            Place::Paused => self.tell.stands(),
            _ => {}
        }
        self.tell.migration(status);
    }

    /// Records that the guest runs again. The report of the latest migration no longer says that
    /// the guest is stopped at the source.
    pub(crate) fn was_resumed(&self) {
        if let Some(report) = &mut lock(&self.migration).report {
            report["stands_still"] = json!(false);
        }
    }

    /// Returns whether the guest runs at the target while this process still has pages of the
    /// guest.
    pub(super) fn handed_over(&self) -> bool {
        use MigrationState::{Postcopy, PostcopyPaused};
        let migration = lock(&self.migration);
        let state = migration.monitor.as_ref().map(|monitor| monitor.progress().state);
        migration.report.is_none() && matches!(state, Some(Postcopy | PostcopyPaused))
    }
}
