//! State of the current or latest migration.

use super::{GuestPlace, Migration, RunContext, lock};
use crate::api::migration;
use crate::arbiter::ArbiterThread;
use crate::speed::Start;
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vmferry_engine::{MigrationHandle, MigrationState};

impl RunContext {
    /// Returns the arbiter of the current or latest migration.
    pub(crate) fn current_arbiter(&self) -> Option<ArbiterThread> {
        lock(&self.current_arbiter).clone()
    }

    pub(crate) fn begin_migration(&self, arbiter: Option<ArbiterThread>, goes_over: bool) {
        *lock(&self.current_arbiter) = arbiter;
        self.audience.forget();
        self.stay.store(false, Ordering::Release);
        let event_sender = self.event_sender.clone();
        let handle = Arc::new(MigrationHandle::watched(move |change| event_sender.change(change)));
        self.event_sender.migration("setup");
        let start = Some(Start::now(&self.speed, &self.probe));
        *lock(&self.migration) = Migration { handle: Some(handle), report: None, start, goes_over };
        self.set_place(GuestPlace::Moving);
    }

    /// Records that the planning has ended: times of the migration and the guest's speed during it
    /// count from this moment. The guest's speed before is that before the planning.
    pub(crate) fn end_planning(&self) {
        let planned = self.start();
        lock(&self.migration).start = Some(planned.again(&self.probe));
    }

    /// Returns the handle of the migration that was begun.
    pub(crate) fn handle(&self) -> Arc<MigrationHandle> {
        lock(&self.migration).handle.get_or_insert_default().clone()
    }

    /// Returns the state of the guest at the beginning of the current or latest migration.
    pub(crate) fn start(&self) -> Start {
        *lock(&self.migration).start.get_or_insert_with(|| Start::now(&self.speed, &self.probe))
    }

    /// Returns the report of the latest migration if it has ended, or else the handle of the
    /// current one.
    pub(crate) fn latest(&self) -> (Option<Value>, Option<Arc<MigrationHandle>>) {
        let migration = lock(&self.migration);
        match &migration.report {
            Some(report) => (Some(report.clone()), None),
            None => (None, migration.handle.clone()),
        }
    }

    /// Returns the handle of the current migration, if there is one.
    pub(crate) fn under_way(&self) -> Option<Arc<MigrationHandle>> {
        let migration = lock(&self.migration);
        if migration.report.is_some() { None } else { migration.handle.clone() }
    }

    pub(crate) fn end_migration(&self, report: Value, place: GuestPlace) {
        let status = migration::status_of(&report);
        self.set_place(place);
        lock(&self.migration).report = Some(report);
        match place {
            GuestPlace::Running => self.event_sender.guest_runs(),
            GuestPlace::Paused => self.event_sender.guest_stopped(),
            _ => {}
        }
        self.event_sender.migration(status);
    }

    /// Records that the guest runs again. The report of the latest migration no longer says that
    /// the guest is stopped at the source.
    pub(crate) fn was_resumed(&self) {
        if let Some(report) = &mut lock(&self.migration).report {
            report["stands_still"] = json!(false);
        }
    }

    /// Records that the operator has taken the guest back, whose owner was unknown. The report of
    /// the latest migration says that the guest is at the source.
    pub(crate) fn was_taken_back(&self) {
        if let Some(report) = &mut lock(&self.migration).report {
            let why = report["error"].as_str().unwrap_or("the owner of the guest was unknown");
            let why = format!("{why}; the operator has taken the guest back (recover --take)");
            let failed = MigrationState::Failed;
            (report["error"], report["state"]) = (json!(why), json!(failed));
            report["outcome"] = json!("failed");
        }
    }

    /// Returns an error if the guest runs at the target, or may run there, although its migration
    /// has not ended here.
    pub(crate) fn require_not_handed_over(&self) -> Result<()> {
        if self.handed_over() {
            bail!("the guest runs at the target; send the command to its process there");
        }
        if self.undecided() {
            bail!("it is not known whether the target runs this guest");
        }
        Ok(())
    }

    /// Returns whether the guest runs at the target while this process still has pages of the
    /// guest.
    pub(super) fn handed_over(&self) -> bool {
        use MigrationState::{Postcopy, PostcopyPaused};
        self.under_way().is_some_and(|handle| {
            let progress = handle.progress();
            progress.state == Postcopy || progress.state == PostcopyPaused && progress.runs_on_target
        })
    }

    /// Returns whether the owner of the migrating guest is unknown: this process has sent the
    /// commit, and does not know whether the target runs the guest.
    pub(super) fn undecided(&self) -> bool {
        self.under_way().is_some_and(|handle| handle.progress().owner_unknown)
    }
}
