//! Live migration for any VMM.
//!
//! A VMM provides its guest's memory, vCPUs and devices. This crate moves the guest to another
//! process or another host while the guest runs: precopy, postcopy or a hybrid of both, over
//! several channels, with bounded downtime. The crate does not depend on KVM or a device model: a
//! VMM implements a few traits.
//!
//! # Source and target
//!
//! The source implements [`SourceVm`] and runs a [`Migration`]:
//!
//! ```no_run
//! use std::time::Duration;
//! use vmferry::{Ended, Migration, MigrationMode, SourceVm};
//!
//! fn move_away(vm: &mut dyn SourceVm) -> Result<(), Box<dyn std::error::Error>> {
//!     let report = Migration::to("unix:/run/target.sock".parse()?)
//!         .mode(MigrationMode::Hybrid)
//!         .downtime_limit(Duration::from_millis(50))
//!         .run(vm)?;
//!     match report.ended().ok_or("the migration has not ended")? {
//!         Ended::Completed => println!("moved in {:.0} ms", report.total_ms),
//!         Ended::Cancelled { why } | Ended::Failed { why, .. } => println!("the guest stays: {why}"),
//!         Ended::OwnershipUnknown { why } => println!("look at the target before anything else: {why}"),
//!         Ended::Lost { why } => println!("the guest is lost: {why}"),
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The target implements [`TargetVm`] and calls [`receive`], which returns once the guest runs on
//! the target. A target that creates its VM only when a guest arrives calls [`Incoming::accept`],
//! creates its VM from the source's announcement, and calls [`Incoming::receive`].
//!
//! # What a VMM implements
//!
//! | trait | side | needed for |
//! |---|---|---|
//! | [`GuestMemory`] | both | every migration. [`MappedMemory`] serves memory that is mapped in this process, and the feature `vm-memory` a `GuestMemoryMmap` |
//! | [`Migratable`] | both | every migration |
//! | [`SourceVm`] | source | every migration |
//! | [`DirtyTracker`], [`Protect`] | source | every migration. The feature `dirty` has trackers for KVM and for write protection |
//! | [`TargetVm`] | target | every migration |
//! | [`DemandPaging`] | target | postcopy and lazy restores. The feature `fault` has it for userfaultfd |
//! | [`FreePages`] | source | skipping free pages |
//!
//! The example `embed` is a complete VMM in about 150 lines, and `transport` moves its guest over
//! connections that the caller creates. The example `vm_memory` is a VMM on `kvm-ioctls` and
//! `vm-memory` that boots a guest and moves it. It uses `kvm::Guest` for everything that is in KVM.
//!
//! # Connections
//!
//! A [`Uri`] names a TCP port or a Unix socket. A caller that creates its own connections
//! implements [`Connect`] for [`Migration::through`], and [`Accept`] for [`Listener::through`]. For
//! sockets that are already connected, use [`Sockets`] with [`Migration::over`], and
//! [`Listener::passed`].
//!
//! # Event loops of devices
//!
//! Once a guest has left, the source must not handle any event of its devices. [`Park`] helps with
//! this.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `ring` | yes | `tls`, with `ring` as the cryptography provider |
//! | `tls` | with `ring` | `Tls`: encrypted channels by [rustls](https://docs.rs/rustls), with a cryptography provider that the caller passes or installs |
//! | `dirty` | no | trackers of dirty pages for KVM and for write protection |
//! | `fault` | no | demand paging by userfaultfd, for postcopy and lazy restores |
//! | `kvm` | no | what a VMM on `kvm-ioctls` needs: state of vCPUs and VM, memory slots, CPU features, pausing vCPUs |
//! | `vm-memory` | no | memory of the crate `vm-memory` as the guest's memory |
//!
//! The examples in the documentation of re-exported items name the original crates. In a program
//! that depends on `vmferry` only, write `vmferry` for `vmferry_core` and `vmferry_engine`,
//! `vmferry::kvm` for `vmferry_kvm`, `vmferry::dirty` for `vmferry_dirty`, and `vmferry::fault` for
//! `vmferry_fault`.
//!
//! # Threads
//!
//! [`Migration::run`] and [`receive`] block, and call the VM on the caller's thread only, so a VM
//! need not be `Send`. The engine starts its own threads for the channels. [`on_thread_start`] lets
//! the VMM bind each of them to processors or confine them.

mod migration;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;

pub use migration::Migration;

/// Sets of pages.
pub mod bitmap {
    pub use vmferry_bitmap::{AtomicBitmap, Bitmap};
}

#[cfg(feature = "dirty")]
#[doc(inline)]
pub use vmferry_dirty as dirty;
#[cfg(feature = "fault")]
#[doc(inline)]
pub use vmferry_fault as fault;
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
#[doc(inline)]
pub use vmferry_kvm as kvm;

pub use vmferry_core::{
    Answer, AnswerMode, DemandPaging, DirtyTracker, Fault, FreePages, FreeReport, Gpa, GuestMemory, Layout,
    LayoutError, MachineConfig, Migratable, NothingToProtect, PAGE_SIZE, PageIndex, PageRun, PageSet,
    PauseCosts, Placed, Protect, Region, RegionId, RingFigures, RunState, Section, SourceVm, StateReader,
    StateWriter, StreamName, TargetVm, TrackerKind, VcpuRing, VmError, Window,
};
pub use vmferry_engine::{
    Accept, Arrival, Attempt, AutoConverge, BulkLimit, Bytes, Change, ChannelCounts, ChannelRole, Connect,
    Connected, Cpu, Downtime, Ended, FaultFigures, FillState, FreePagesFigures, Incoming, Listener,
    MappedMemory, MigrateError, MigrationHandle, MigrationKind, MigrationMode, MigrationState,
    OnDemandRestore, OnTimeout, PaceFigures, PassReport, PhaseReport, PostcopyFigures, PostcopyReceiver,
    PostcopyState, PostcopyWatch, Progress, ReceiveFailure, Received, Refusal, RefusalCode, Report,
    RestoreError, RestoreProgress, Settings, Sockets, SwitchoverBandwidth, ThrottleFigures, UrgentPath, Uri,
    UriError, arbiter, plan, receive, restore, restore_on_demand, save, save_copy,
};
#[cfg(feature = "tls")]
pub use vmferry_engine::{Tls, TlsError, rustls};
pub use vmferry_thread::{Park, Role as ThreadRole, StillWorking, Working, on_start as on_thread_start};
