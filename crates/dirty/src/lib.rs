//! Dirty trackers: which pages of a guest were written.
//!
//! | tracker | finds writes by | needs | costs the guest |
//! |---|---|---|---|
//! | [`KvmLogTracker`] | KVM's dirty bitmap, plus marks of the VMM's own writes | a KVM VM without a dirty ring | a fault in KVM for the first write to each page after each protection |
//! | [`RingTracker`] | KVM's dirty rings, one a vCPU, plus the same marks | a KVM VM started with rings ([`DirtyRings`]) | the same fault; and a stop when a ring is full |
//! | [`WpTracker`] | write protection of this process's page tables | Linux 6.7 | the same fault in the host kernel, and huge pages are split where they are written |
//!
//! A VMM can choose when rings are harvested: [`ReaperPolicy`]. [`Predict`] is the policy of this crate.
//!
//! All keep the contract of [`DirtyTracker`](vmferry_core::DirtyTracker). [`touched`] tells which pages were never
//! touched and need not be sent at all.
//!
//! No tracker sees memory that is *dropped* (a balloon's `MADV_DONTNEED`, a hole punched into a memfd): it changes to zeros
//! without a write. The VMM marks dropped memory in the region's marks, after it is dropped.

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
/// The exit reason of a vCPU whose ring is full: `VcpuExit::Unsupported(EXIT_RING_FULL)` of kvm-ioctls.
pub use vmferry_sys::ring::EXIT_RING_FULL;
pub use wp::WpTracker;
