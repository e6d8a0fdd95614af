//! Dirty trackers: which pages of a guest were written.
//!
//! | tracker | finds writes by | needs | costs the guest |
//! |---|---|---|---|
//! | [`KvmLogTracker`] | KVM's dirty bitmap, plus marks of the VMM's own writes | a KVM VM without a dirty ring | a fault in KVM for the first write to each page after each protection |
//! | [`WpTracker`] | write protection of this process's page tables | Linux 6.7 | the same fault in the host kernel, and huge pages are split where they are written |
//!
//! Both keep the contract of [`DirtyTracker`](vmferry_engine::DirtyTracker). [`touched`] tells which pages were never
//! touched and need not be sent at all.
//!
//! What neither sees is memory that is *dropped* (a balloon's `MADV_DONTNEED`, a hole punched into a memfd): it changes
//! to zeros without a write. Whoever drops memory marks it in the region's marks, after it is dropped.

mod error;
mod log;
mod region;
mod residency;
mod wp;

pub use error::TrackerError;
pub use log::{KvmLogTracker, LogSlot};
pub use region::{Backing, MappedRegion};
pub use residency::touched;
pub use wp::WpTracker;
