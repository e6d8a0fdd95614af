//! Dirty trackers, which find the pages that a guest has written.
//!
//! | tracker | source of the dirty pages | needs | costs the guest |
//! |---|---|---|---|
//! | [`KvmLogTracker`] | KVM's dirty bitmap, plus marks of the VMM's own writes | a KVM VM without a dirty ring | a fault in KVM for the first write to each page after each protection |
//! | [`RingTracker`] | KVM's dirty rings, one for each vCPU, plus the same marks | a KVM VM started with rings ([`DirtyRings`]) | the same fault, and a stop when a ring is full |
//! | [`WpTracker`] | write protection of this process's page tables | Linux 6.7 | the same fault, but in the host kernel; huge pages are split when the guest writes to them |
//!
//! All trackers fulfil the contract of [`DirtyTracker`](vmferry_core::DirtyTracker). A
//! [`ReaperPolicy`] decides when dirty rings are harvested, and [`Predict`] is the default policy.
//! [`touched`] finds the pages that may have been written at least once. All other pages hold only
//! zeros, so their content need not be sent.
//!
//! [`populate_all`] and [`populate`] allocate memory before the guest or a migration writes to it,
//! according to a [`Prealloc`].
//!
//! [`adopt`] and the functions next to it share memory between a guest and its branches.
//! [`MappedPages`] finds the pages of such memory that the guest has used, and [`map_pages`] maps
//! pages before the guest uses them.
//!
//! No tracker detects that memory is *dropped* (for example by a balloon's `MADV_DONTNEED`, or by a
//! hole that is punched into a memfd), because the content becomes zero without a write. Therefore
//! the VMM must mark the pages in the region's [`Marks`] after it has dropped them.
//!
//! ```no_run
//! use std::time::Duration;
//! use vmferry_core::{DirtyTracker, GuestMemory, VmError};
//! use vmferry_dirty::{MappedRegion, WpTracker, measure};
//!
//! /// Prints how many bytes per second a migration would have to send again, while the guest runs.
//! fn print_dirty_rate(regions: Vec<MappedRegion>, memory: &dyn GuestMemory) -> Result<(), VmError> {
//!     WpTracker::available()?;
//!     let mut tracker = WpTracker::new(regions)?;
//!     let windows = [Duration::from_millis(100), Duration::from_secs(1)];
//!     for point in measure(&mut tracker, memory, &windows, || false)? {
//!         println!("{:?}: {:.0} bytes/s", point.window, point.bytes_per_s());
//!     }
//!     Ok(())
//! }
//! ```

mod branch;
mod error;
mod log;
mod prealloc;
mod rate;
mod region;
mod residency;
mod ring;
mod used;
mod wp;

pub use branch::{adopt, branch_memory, release_entries, renew};
pub use error::TrackerError;
pub use log::{KvmLogTracker, LogSlot};
pub use prealloc::{PopulateError, Prealloc, available_memory, populate, populate_all};
pub use rate::{RatePoint, check_windows, measure};
pub use region::{Backing, MappedRegion, Marks};
pub use residency::{next_touched, prepare, touched};
#[cfg(any(test, feature = "sim"))]
pub use ring::sim;
pub use ring::{
    DirtyRings, HarvestSchedule, Predict, ReaperPolicy, ReaperReport, ReaperState, RingReport, RingTracker,
    RingVcpu, RingView, Rings, VcpuRingReport,
};
pub use used::{MappedPages, map_pages};
/// Old mapping that [`adopt`] has replaced.
pub use vmferry_sys::mapping::Retired;
/// Exit reason of a vCPU whose dirty ring is full. kvm-ioctls returns it as
/// `VcpuExit::Unsupported(EXIT_RING_FULL)`.
pub use vmferry_sys::ring::EXIT_RING_FULL;
pub use wp::WpTracker;
