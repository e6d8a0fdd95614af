//! The memory balloon (virtio 1.2, section 5.5), and an optional [`extension`] of it.
//!
//! | module | content |
//! |---|---|
//! | `device` | queues and their roles, features, configuration |
//! | `inflate` | page numbers, in both directions |
//! | `report` | free pages that are given back |
//! | `hint` | free pages that a migration need not send |
//! | `stats` | statistics of guest memory |
//! | `metrics` | counters |
//! | `persist` | saved state |
//! | [`extension`] | additions to the specification: ranges, a map of free pages, reports by a hypercall |
//!
//! [`Balloon`] is the device, which its transport owns. [`BalloonControl`] is the handle for other
//! threads of the VMM, none of which ever waits for a request that is being processed. The VMM
//! implements [`BalloonHost`], the operations on guest memory.

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

pub use control::{BalloonControl, HintError};
pub use device::Balloon;
pub use metrics::BalloonFigures;
pub use persist::{BalloonAdditions, BalloonSaved};
pub use stats::GuestStats;

use crate::runs::GuestRun;
use extension::WholePages;
use std::fmt::Debug;
use vmferry_core::Layout;

/// Feature bits of the specification that the device offers.
///
/// The queues of the specification always exist, whatever a driver accepts.
pub mod feature {
    /// The guest reports statistics.
    pub const STATS: u32 = 1;
    /// The guest may take pages back when it runs out of memory.
    pub const DEFLATE_ON_OOM: u32 = 2;
    /// The guest reports its free pages on request.
    pub const FREE_PAGE_HINT: u32 = 3;
    /// The guest fills free pages with a value.
    pub const PAGE_POISON: u32 = 4;
    /// The guest reports pages that it does not use.
    pub const REPORTING: u32 = 5;
}

/// Reason for which pages are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The guest put the pages into the balloon.
    Inflated,
    /// The guest reported the pages as unused.
    Reported,
}

/// Result of a request to drop pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// The pages were dropped.
    Done,
    /// The pages were kept, because their content must not be lost at the moment.
    Held,
}

/// Error of an operation of the host.
pub type HostError = Box<dyn std::error::Error + Send + Sync>;

/// Operations on guest memory that a VMM provides for the balloon. Several vCPU threads may call
/// them at the same time. All pages are in the layout of guest memory. The runs of one call neither
/// overlap nor adjoin each other.
pub trait BalloonHost: Send + Sync + Debug {
    /// Gives `runs` back to the host, because the guest does not need the content of these pages.
    /// Afterwards each page must read as zeros or have its previous content. After this call has
    /// returned, the guest may use the pages again.
    ///
    /// # Errors
    /// Returns an error if the host refuses. Some of the pages may have been dropped.
    fn drop_pages(&self, why: Why, runs: &[GuestRun]) -> Result<Dropped, HostError>;

    /// Makes `runs` read as zeros. The guest may use these pages again.
    ///
    /// # Errors
    /// Returns an error if the host refuses. Some of the pages may read as zeros.
    fn make_zeros(&self, runs: &[GuestRun]) -> Result<(), HostError>;

    /// Receives hints for the request with the ID `command`: the guest does not need the content of
    /// `runs`.
    fn hinted(&self, command: u32, runs: &[GuestRun]);

    /// Receives the information that no more hints follow for the request with the ID `command`.
    fn hints_end(&self, command: u32);
}

/// Options of a balloon.
#[derive(Debug, Clone)]
pub struct BalloonOptions {
    /// Layout of guest memory.
    pub layout: Layout,
    /// True if the device offers the [`extension`]. Otherwise it has only the features of virtio
    /// 1.2.
    pub extension: bool,
    /// Runs of whole pages of RAM as the memory map reported them to the guest, which the extension
    /// needs for the map of free pages.
    pub ram: Vec<WholePages>,
}
