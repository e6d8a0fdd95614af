//! Types and traits that a VMM and the migration engine share.
//!
//! | part | content |
//! |---|---|
//! | addresses | [`Gpa`], [`PageIndex`], [`PageRun`], [`RegionId`]: distinct types, because confusing them would lose pages |
//! | memory | [`Layout`] of regions, [`PageSet`], [`Window`] onto live bytes, [`PageDigest`], [`RegionFile`] for other processes of this host |
//! | machine | [`MachineConfig`], and the [`Section`]s of device state |
//! | VMM | [`Migratable`], [`SourceVm`], [`TargetVm`], [`GuestMemory`], [`DirtyTracker`], [`DemandPaging`], [`FreePages`]: the traits that a VMM implements |
//!
//! This crate performs no I/O and does not use KVM. It does not map memory either: the owner of a
//! mapping creates a [`Window`] onto the mapping.
//!
//! A VMM should depend on the crate `vmferry`, which re-exports these types. A crate that only
//! implements one of the traits, such as a dirty tracker, can depend on this crate alone.
//!
//! # A dirty tracker
//!
//! In this example, the VMM marks each page after the guest has written the page. A harvest takes
//! the marks. Because a later write marks its page again, the tracker need not protect pages.
//!
//! ```
//! use std::sync::Arc;
//! use vmferry_bitmap::AtomicBitmap;
//! use vmferry_core::{DirtyTracker, Gpa, Layout, NothingToProtect, PageSet, Protect, Region, RegionId, VmError};
//!
//! struct Marked(Arc<AtomicBitmap>);
//!
//! impl DirtyTracker for Marked {
//!     fn start(&mut self) -> Result<(), VmError> {
//!         Ok(())
//!     }
//!     fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
//!         for (_, pages) in dirty.iter_mut() {
//!             self.0.harvest(pages);
//!         }
//!         Ok(())
//!     }
//!     fn protector(&self) -> Arc<dyn Protect> {
//!         Arc::new(NothingToProtect)
//!     }
//!     fn stop(&mut self) -> Result<(), VmError> {
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let layout = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 64 << 20 }])?;
//! let marks = Arc::new(AtomicBitmap::new(layout.pages()));
//! let mut tracker = Marked(Arc::clone(&marks));
//! tracker.start()?;
//! marks.set(7);
//! let mut dirty = PageSet::empty(&layout);
//! tracker.harvest(&mut dirty)?;
//! assert_eq!(dirty.count(), 1);
//! # Ok(()) }
//! ```

mod addr;
pub mod bounded;
mod branch;
mod digest;
mod fold;
mod free;
mod layout;
mod machine;
mod paging;
mod region_file;
mod set;
mod stream;
mod tracker;
mod used;
mod vm;
mod window;
mod write_protection;

pub use addr::{Gpa, PageIndex, PageRun, RegionId};
pub use branch::{BranchMemory, RetiredMemory};
pub use digest::{PageDigest, ZERO_PAGE};
pub use free::{Answer, AnswerMode, FreePages, FreeReport};
pub use layout::{Layout, LayoutError, MAX_PAGES, MAX_REGIONS, Region};
pub use machine::{MachineConfig, Section};
pub use paging::{DemandPaging, Fault, Placed};
pub use region_file::RegionFile;
pub use set::PageSet;
pub use stream::{StateReader, StateWriter, StreamName};
pub use tracker::{
    DirtyTracker, NothingToProtect, Protect, ReaperFigures, ReaperState, RingFigures, TrackerKind, VcpuRing,
};
pub use used::UsedPages;
pub use vm::{GuestMemory, Migratable, PauseCosts, RunState, SourceVm, TargetVm, VmError};
pub use window::Window;
pub use write_protection::WriteProtection;

/// Binary logarithm of the page size. All page numbers count pages of 4 KiB, which is the smallest
/// page size of x86-64 and the unit of KVM's dirty log.
pub const PAGE_SHIFT: u8 = 12;
/// Page size in bytes.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
/// Page size in bytes, as an array length.
pub const PAGE_BYTES: usize = 1 << PAGE_SHIFT;
