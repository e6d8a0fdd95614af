//! The balloon's saved state.

use super::control::{DONE, FIRST, STOP};
use super::device::{Balloon, Role, Roles};
use super::extension::MapInUse;
use super::stats::GuestStats;
use crate::device::QueueSpec;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

/// State of a balloon that was added to the format of [`BalloonSaved`] later.
///
/// The default value is the state that a device has after it loads a state without these additions.
/// A VMM that saves other values has to transfer them beside the serialized [`BalloonSaved`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonAdditions {
    /// True if the operator has switched free page reporting off.
    pub reporting_off: bool,
    /// The guest's map of free pages that the device uses.
    pub map_in_use: MapInUse,
}

/// State of a balloon, apart from its registers and queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonSaved {
    /// Number of pages that the host requests the balloon to have.
    pub target: u32,
    /// Number of pages in the balloon, as the driver reports.
    pub actual: u32,
    /// Command to the driver about hints.
    pub command: u32,
    /// ID of the latest request for hints.
    pub hint_request: u32,
    /// Value with which the driver fills free pages.
    pub poison: u32,
    /// First descriptor of the statistics buffer that the device keeps.
    pub held: Option<u16>,
    /// Registers of the extension: address and number of pages of the guest's map of free pages, if
    /// written.
    pub map: Option<(u64, u64)>,
    /// The guest's latest statistics.
    pub stats: GuestStats,
    /// State that is not part of the serialized form, whose bytes are frozen.
    #[serde(skip)]
    pub additions: BalloonAdditions,
}

impl BalloonSaved {
    pub(super) fn of(balloon: &Balloon) -> Self {
        let shared = &balloon.shared;
        Self {
            target: shared.target.load(Ordering::Acquire),
            actual: shared.actual.load(Ordering::Acquire),
            command: shared.command.load(Ordering::Acquire),
            hint_request: shared.hint_request.load(Ordering::Acquire),
            poison: shared.poison.load(Ordering::Acquire),
            held: balloon.held,
            map: balloon.extension.saved(),
            stats: shared.stats(),
            additions: BalloonAdditions {
                reporting_off: !shared.reporting.load(Ordering::Acquire),
                map_in_use: balloon.extension.saved_in_use(),
            },
        }
    }

    /// Loads this state. The kept statistics buffer must be one that the queue can have. Every
    /// other field may have any value, because a driver may write any value.
    ///
    /// A request for hints does not survive a migration, because the thread that made it is on the
    /// source. Therefore the guest is told that the request is over. Otherwise the guest would
    /// never use the hinted pages again.
    pub(super) fn load(
        &self,
        balloon: &mut Balloon,
        active: Option<(u128, &[QueueSpec])>,
    ) -> Result<bool, String> {
        let (features, queues) = active.unwrap_or_default();
        let ready: Vec<_> = queues.iter().map(|queue| queue.index).collect();
        let roles = Roles::new(features, &ready);
        let stats = queues.iter().find(|queue| roles.of(queue.index) == Some(Role::Stats));
        if let Some(held) = self.held
            && stats.is_none_or(|queue| held >= queue.max_size)
        {
            return Err(format!(
                "the balloon keeps a statistics buffer at descriptor {held}, which does not exist"
            ));
        }
        let BalloonAdditions { reporting_off, map_in_use } = self.additions;
        balloon.extension.check(self.map, map_in_use)?;
        let command = if self.hint_request >= FIRST { DONE } else { STOP };
        let shared = &balloon.shared;
        shared.target.store(self.target, Ordering::Release);
        shared.actual.store(self.actual, Ordering::Release);
        shared.hint_request.store(self.hint_request, Ordering::Release);
        shared.command.store(command, Ordering::Release);
        shared.poison.store(self.poison, Ordering::Release);
        shared.reporting.store(!reporting_off, Ordering::Release);
        shared.note_progress();
        shared.set_stats(self.stats);
        shared.set_features(features);
        balloon.roles = roles;
        balloon.held = self.held;
        balloon.stream = None;
        balloon.extension.load(&balloon.shared, self.map, map_in_use);
        Ok(command != self.command)
    }
}
