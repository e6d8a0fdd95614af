//! Resolution of unknown ownership: the arbiter, and decisions of the operator.

use super::Shared;
use crate::fence::Fence;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use vmferry_engine::MigrationState;

impl Shared {
    /// Returns the arbiter of the current or latest migration, if it has one.
    pub(crate) fn fence(&self) -> Option<Fence> {
        let arbiter = self.fence_now()?;
        let (report, monitor) = self.latest();
        let id = match (report, monitor) {
            (Some(report), _) => report["id"].as_str().unwrap_or_default().to_owned(),
            (None, Some(monitor)) => monitor.progress().id,
            (None, None) => return None,
        };
        Some(Fence(arbiter, id.parse().ok()?))
    }

    /// Returns whether the owner of the migrating guest is unknown.
    pub(super) fn undecided(&self) -> bool {
        let under_way = self.under_way();
        under_way.is_some_and(|monitor| monitor.progress().state == MigrationState::Unknown)
    }

    /// Takes up a lost link again, or gives it up.
    pub(super) fn recover(&self, arguments: &Value) -> Result<()> {
        let monitor = self.under_way().context("no migration is under way")?;
        if !matches!(monitor.progress().state, MigrationState::PostcopyPaused | MigrationState::Unknown) {
            bail!("the link of this migration is not lost");
        }
        match arguments["take"].as_bool() {
            None => monitor.recover(),
            Some(false) => monitor.abandon(),
            // The migrating thread asks the arbiter as well, and gets the same answer.
            Some(true) if !monitor.progress().runs_there && self.fence().is_some() => {
                self.fence().map_or(Ok(()), |fence| fence.take())?;
                monitor.recover();
            }
            Some(true) if !monitor.progress().runs_there => bail!(
                "it is not known yet whether the target runs this guest: use recover --abandon to end the attempts to reach the target, and then \
                 decide with --take or --abandon"
            ),
            Some(true) => bail!(
                "the guest has run on the target since: its state at the source is old and must not run; --abandon gives the guest up"
            ),
        }
        Ok(())
    }
}
