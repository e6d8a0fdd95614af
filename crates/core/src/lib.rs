//! Types and traits between a VMM and the migration engine.
//!
//! | module | content |
//! |---|---|
//! | addresses | [`Gpa`], [`PageIndex`], [`PageRun`], [`RegionId`]: types of their own, because a mix-up of them loses pages |
//! | memory | [`Layout`] of regions, [`PageSet`], [`Window`] onto live bytes, [`PageDigest`] |
//! | machine | [`MachineConfig`], and the [`Section`]s of device state |
//! | VMM | [`Migratable`], [`SourceVm`], [`TargetVm`], [`GuestMemory`], [`DirtyTracker`], [`LazyMemory`], [`FreePages`]: the traits that a VMM implements |
//!
//! This crate has no I/O, no KVM and no sockets. It maps no memory: the owner of a mapping makes a [`Window`] of it.

mod addr;
pub mod bounded;
mod digest;
mod fold;
mod free;
mod layout;
mod lazy;
mod machine;
mod set;
mod stream;
mod tracker;
mod vm;
mod window;

pub use addr::{Gpa, PageIndex, PageRun, RegionId};
pub use digest::{PageDigest, ZERO_PAGE};
pub use free::{Answer, Answers, FreePages, FreeReport};
pub use layout::{Layout, LayoutError, MAX_PAGES, MAX_REGIONS, Region};
pub use lazy::{Fault, LazyMemory, Placed};
pub use machine::{MachineConfig, Section};
pub use set::PageSet;
pub use stream::{StateReader, StateWriter, StreamName};
pub use tracker::{DirtyTracker, NothingToProtect, Protect, RingFigures, TrackerKind, VcpuRing};
pub use vm::{GuestMemory, Migratable, PauseCosts, RunState, SourceVm, TargetVm, VmError};
pub use window::Window;

/// Shift of the page that everything here counts in: 4 KiB, the smallest page of x86-64 and of its dirty logs.
pub const PAGE_SHIFT: u8 = 12;
/// Bytes in a page.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
/// Bytes in a page, as an array length.
pub const PAGE_BYTES: usize = 1 << PAGE_SHIFT;
