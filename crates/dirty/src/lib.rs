//! Dirty trackers: find the pages that a guest has written.
//!
//! | tracker | finds writes by | needs | costs the guest |
//! |---|---|---|---|
//! | [`KvmLogTracker`] | KVM's dirty bitmap, plus marks of the VMM's own writes | a KVM VM without a dirty ring | a fault in KVM for the first write to each page after each protection |
//! | [`RingTracker`] | KVM's dirty rings, one for each vCPU, plus the same marks | a KVM VM started with rings ([`DirtyRings`]) | the same fault, and a stop when a ring is full |
//! | [`WpTracker`] | write protection of this process's page tables | Linux 6.7 | the same fault in the host kernel, and written huge pages are split |
//!
//! All trackers keep the contract of [`DirtyTracker`](vmferry_core::DirtyTracker). [`ReaperPolicy`]
//! decides when dirty rings are harvested, and [`Predict`] is the policy of this crate. [`touched`]
//! finds the pages that were touched. All other pages hold zeros and need not be sent.
//!
//! No tracker detects that memory is *dropped* (a balloon's `MADV_DONTNEED`, a hole punched into a
//! memfd): the memory changes to zeros without a write. After the VMM has dropped pages, it marks
//! them in the region's [`Marks`].
//!
//! ```no_run
//! use std::time::Duration;
//! use vmferry_core::{DirtyTracker, GuestMemory, VmError};
//! use vmferry_dirty::{MappedRegion, WpTracker, measure};
//!
//! /// Prints how many bytes per second a migration would have to send again. The guest runs meanwhile.
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

mod error;
mod log;
mod rate;
mod region;
mod residency;
mod ring;
mod wp;

pub use error::TrackerError;
pub use log::{KvmLogTracker, LogSlot};
pub use rate::{RatePoint, check_windows, measure};
pub use region::{Backing, MappedRegion, Marks};
pub use residency::{prepare, touched};
#[cfg(any(test, feature = "sim"))]
pub use ring::sim;
pub use ring::{
    DirtyRings, HarvestSchedule, Predict, ReaperPolicy, ReaperReport, ReaperState, RingReport, RingTracker,
    RingVcpu, RingView, Rings, VcpuRingReport,
};
/// Exit reason of a vCPU whose ring is full: `VcpuExit::Unsupported(EXIT_RING_FULL)` of kvm-ioctls.
pub use vmferry_sys::ring::EXIT_RING_FULL;
pub use wp::WpTracker;
