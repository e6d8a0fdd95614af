//! Resolution of unknown ownership: the arbiter, and decisions of the operator.

use super::RunContext;
use crate::arbiter::MigrationArbiter;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use vmferry_engine::MigrationState;

impl RunContext {
    /// Returns the arbiter of the current or latest migration, if it has one.
    pub(crate) fn arbiter(&self) -> Option<MigrationArbiter> {
        let arbiter = self.current_arbiter()?;
        let (report, handle) = self.latest();
        let id = match (report, handle) {
            (Some(report), _) => report["id"].as_str().unwrap_or_default().to_owned(),
            (None, Some(handle)) => handle.progress().id,
            (None, None) => return None,
        };
        Some(MigrationArbiter(arbiter, id.parse().ok()?))
    }

    /// Takes up a lost link again, or gives it up.
    pub(super) fn recover(&self, arguments: &Value) -> Result<()> {
        let handle = self.under_way().context("no migration is under way")?;
        if !matches!(handle.progress().state, MigrationState::PostcopyPaused | MigrationState::Unknown) {
            bail!("the link of this migration is not lost");
        }
        match arguments["take"].as_bool() {
            None => handle.recover(),
            Some(false) => handle.abandon(),
            // The migrating thread asks the arbiter as well, and gets the same answer.
            Some(true) if !handle.progress().runs_on_target && self.arbiter().is_some() => {
                self.arbiter().map_or(Ok(()), |arbiter| arbiter.take())?;
                handle.recover();
            }
            Some(true) if !handle.progress().runs_on_target => bail!(
                "it is not known yet whether the target runs this guest: restore the link, or look at the target. Only if the target does not have \
                 the guest, use recover --abandon to end the attempts to reach the target, and then recover --take"
            ),
            Some(true) => bail!(
                "the guest has run on the target since: its state at the source is old and must not run; --abandon gives the guest up"
            ),
        }
        Ok(())
    }
}
