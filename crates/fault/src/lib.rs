//! Demand paging and write protection for guest memory that is mapped in this process, with
//! userfaultfd.
//!
//! [`UffdMemory`] implements [`DemandPaging`](vmferry_core::DemandPaging). Postcopy needs it, and
//! so does a restore that starts the guest before its memory has been read. [`UffdProtection`]
//! implements [`WriteProtection`](vmferry_core::WriteProtection), which snapshots of a running
//! guest need.
//!
//! ```no_run
//! use std::os::fd::OwnedFd;
//! use std::sync::Arc;
//! use vmferry_core::RegionId;
//! use vmferry_fault::{Backing, FaultError, PagedRegion, UffdMemory, UffdOptions, VcpuThreads};
//!
//! /// Guest memory of a memfd, mapped at `host`.
//! struct Ram {
//!     file: Arc<OwnedFd>,
//!     host: u64,
//!     len: u64,
//! }
//!
//! fn demand_paging(ram: Arc<Ram>, vcpus: u32) -> Result<UffdMemory, FaultError> {
//!     let backing = Backing::Memfd { file: Arc::clone(&ram.file), offset: 0 };
//!     let region = PagedRegion { id: RegionId(0), host: ram.host, len: ram.len, backing };
//!     // Each vCPU thread calls `register`, so that its faults are counted as those of its vCPU.
//!     let threads = Arc::new(VcpuThreads::new(vcpus));
//!     // SAFETY: `Ram` keeps the mapping for as long as it lives, and the program accesses its bytes as atomics only.
//!     unsafe { UffdMemory::new(vec![region], ram, &UffdOptions::new(threads)) }
//! }
//! ```
//!
//! # Faults do not wait for each other
//! The pages are divided into shards, each with its own userfaultfd. An access to a missing page
//! creates a message on the userfaultfd of the page's shard, and one thread reads the messages of a
//! shard. Threads that place pages never wait for each other on a lock of this crate. A lock
//! excludes them only while demand paging begins or ends.
//!
//! # Accesses that are not detected
//! Only accesses through the mappings that are given to this crate raise faults. An access through
//! another mapping of the same memfd, in this process or another, raises none, and reads zeros or
//! outdated content in place of a missing page.

mod discard;
mod error;
mod events;
mod huge;
mod memory;
mod placing;
mod protection;
mod region;
mod shards;
mod slot;

pub use error::FaultError;
pub use memory::{UffdMemory, UffdOptions};
pub use protection::UffdProtection;
pub use region::{Backing, PagedRegion};
pub use slot::PagingSlot;
pub use vmferry_thread::{VcpuThread, VcpuThreads};
