//! The reaper that sleeps a constant time.

use super::Reaped;
use std::time::Duration;

/// Between two harvests. As published: what QEMU's reaper does.
pub(crate) const SLEEP: Duration = Duration::from_secs(1);

/// Sleeps [`SLEEP`], whatever happens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fixed;

impl Fixed {
    #[expect(clippy::unused_self, reason = "as the other policies have it")]
    pub(crate) fn next(self, _: Reaped) -> Duration {
        SLEEP
    }
}
