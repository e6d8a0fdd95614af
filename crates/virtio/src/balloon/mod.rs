//! The memory balloon (virtio 1.2, section 5.5), and an [`extension`] of it that can be left out.
//!
//! | module | what |
//! |---|---|
//! | `device` | queues and their roles, features, configuration |
//! | `inflate` | page numbers, in and out |
//! | `report` | free pages that are given back |
//! | `hint` | free pages that a migration need not send |
//! | `stats` | what the guest says of its memory |
//! | `metrics` | what happened |
//! | `persist` | saved state |
//! | [`extension`] | what the device has beyond the specification: ranges, a map of free pages, reports by a hypercall |
//!
//! [`Balloon`] is the device, which its transport owns; [`BalloonControl`] is what the VMM's other threads have of it, none of which
//! ever waits for a request that is being processed. [`BalloonHost`] is what the VMM does with memory.

mod control;
mod device;
pub mod extension;
mod hint;
mod inflate;
mod metrics;
mod persist;
mod report;
mod stats;
#[cfg(test)]
mod tests;

pub use control::{AskError, BalloonControl};
pub use device::Balloon;
pub use metrics::BalloonFigures;
pub use persist::BalloonSaved;
pub use stats::GuestStats;

use crate::runs::GuestRun;
use extension::WholePages;
use std::fmt::Debug;
use vmferry_core::Layout;

/// Feature bits of the specification that the device offers.
///
/// The queues of the specification are always there, whatever a driver accepts.
pub mod feature {
    /// The guest reports statistics.
    pub const STATS: u32 = 1;
    /// The guest may take pages back when it runs out of memory.
    pub const DEFLATE_ON_OOM: u32 = 2;
    /// The guest says which pages are free when it is asked.
    pub const FREE_PAGE_HINT: u32 = 3;
    /// The guest fills free pages with a value.
    pub const PAGE_POISON: u32 = 4;
    /// The guest reports pages that it does not use.
    pub const REPORTING: u32 = 5;
}

/// Reason for which pages are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The guest put them into the balloon.
    Inflated,
    /// The guest does not use them.
    Reported,
}

/// Result of a request to drop pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// They are gone.
    Done,
    /// They stay for now: their content cannot be lost at the moment.
    Held,
}

/// Error of the host.
pub type HostError = Box<dyn std::error::Error + Send + Sync>;

/// Operations of the VMM on guest memory for the balloon. Called from vCPUs' threads, several at once; never with pages that are
/// not in the layout. The runs of one call neither overlap nor touch.
pub trait BalloonHost: Send + Sync + Debug {
    /// Gives `runs` back to the host: the guest does not need what is in them, and must find zeros or what was there. When this
    /// returns, the guest may use them again.
    ///
    /// # Errors
    /// If the host refuses; some may be gone.
    fn drop_pages(&self, why: Why, runs: &[GuestRun]) -> Result<Dropped, HostError>;

    /// Makes `runs`, which are the guest's again, read as zeros.
    ///
    /// # Errors
    /// If the host refuses; some may be zeros.
    fn make_zeros(&self, runs: &[GuestRun]) -> Result<(), HostError>;

    /// The guest does not need what is in `runs`; asked by `command`.
    fn hinted(&self, command: u32, runs: &[GuestRun]);

    /// The guest has no more hints for `command`.
    fn hints_end(&self, command: u32);
}

/// Options of a balloon.
#[derive(Debug, Clone)]
pub struct BalloonOptions {
    /// The guest's memory.
    pub layout: Layout,
    /// Whether the [`extension`] is offered. A device without it is the one of virtio 1.2.
    pub extension: bool,
    /// The whole pages of its RAM as the memory map told the guest, for its map of free pages.
    pub ram: Vec<WholePages>,
}
