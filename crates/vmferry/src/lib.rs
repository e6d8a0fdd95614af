//! Live migration for any VMM.
//!
//! A VMM provides the memory, vCPUs and devices of its guest. This crate moves the running guest to
//! another process or another host by precopy, postcopy or a hybrid of both. Pages are sent over
//! several channels in parallel, and the caller sets a limit for the downtime. The crate does not
//! depend on KVM or on a device model, because a VMM connects its guest to the engine by
//! implementing a few traits.
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
//! the target. A target that creates its VM only when a guest arrives calls [`Incoming::accept`]
//! instead. It then creates the VM from the source's announcement, and calls [`Incoming::receive`].
//!
//! # What a VMM implements
//!
//! | trait | implemented by | needed for |
//! |---|---|---|
//! | [`GuestMemory`] | source, target | every migration. [`MappedMemory`] implements it for memory that is mapped in this process, and the feature `vm-memory` for a `GuestMemoryMmap` |
//! | [`Migratable`] | source, target | every migration |
//! | [`SourceVm`] | source | every migration |
//! | [`DirtyTracker`], [`Protect`] | source | every migration. The feature `dirty` provides trackers for KVM, and one that write-protects pages |
//! | [`TargetVm`] | target | every migration |
//! | [`DemandPaging`] | target | postcopy and on-demand restores. The feature `fault` implements it with userfaultfd |
//! | [`FreePages`] | source | skipping free pages |
//! | [`WriteProtection`] | source | snapshots of a running guest ([`snapshot_background`]). The feature `fault` implements it with userfaultfd |
//!
//! The example `embed` is a complete VMM in about 150 lines, and `transport` moves the guest of the
//! same VMM over connections that the caller creates. The example `vm_memory` is a VMM based on
//! `kvm-ioctls` and `vm-memory` that boots a guest and moves it. This VMM uses `kvm::Guest` for all
//! state that is in KVM.
//!
//! # Connections
//!
//! A [`Uri`] names a TCP port or a Unix socket. If you create the connections yourself, implement
//! [`Connect`] on the source and pass it to [`Migration::through`], and implement [`Accept`] on the
//! target and pass it to [`Listener::through`]. If the sockets are already connected, pass
//! [`Sockets`] to [`Migration::over`] on the source, and use [`Listener::passed`] on the target.
//!
//! # Branches
//!
//! [`branch`] takes one instant of a running guest, from which other guests continue with
//! [`join_branch`] and share its memory. [`restore_shared`] starts guests that share the pages of a
//! snapshot.
//!
//! # Event loops of devices
//!
//! After a guest has left, the source must not handle any further event of the guest's devices,
//! because the event could, for example, write to a disk that the target now owns. [`Park`] stops
//! the event loops of devices in time.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `ring` | yes | `tls`, with `ring` as the cryptography provider |
//! | `tls` | with `ring` | `Tls`: encrypted channels with [rustls](https://docs.rs/rustls), with a cryptography provider that the caller passes or installs |
//! | `dirty` | no | dirty page trackers for KVM, and one that write-protects pages |
//! | `fault` | no | demand paging and write protection with userfaultfd, for postcopy, on-demand restores and snapshots of a running guest |
//! | `kvm` | no | what a VMM on `kvm-ioctls` needs: state of vCPUs and VM, memory slots, CPU features, pausing vCPUs. Includes `dirty` |
//! | `vm-memory` | no | a `GuestMemoryMmap` of the crate `vm-memory` as guest memory. Includes `dirty` |
//!
//! The examples in the documentation of re-exported items use the names of the crates that define
//! these items. In a program that depends only on `vmferry`, write `vmferry` for `vmferry_core` and
//! `vmferry_engine`, `vmferry::kvm` for `vmferry_kvm`, `vmferry::dirty` for `vmferry_dirty`, and
//! `vmferry::fault` for `vmferry_fault`.
//!
//! # Threads
//!
//! [`Migration::run`] and [`receive`] block the calling thread. They call the methods of
//! [`SourceVm`] and [`TargetVm`] only on that thread, so a VM need not be `Send`. The engine starts
//! additional threads for the channels. With [`on_thread_start`], the VMM can bind each of these
//! threads to processors, or confine the thread with a seccomp filter.

mod migration;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;

pub use migration::Migration;

/// Bitmaps that hold sets of pages.
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
    Answer, AnswerMode, BranchMemory, DemandPaging, DirtyTracker, Fault, FreePages, FreeReport, Gpa,
    GuestMemory, Layout, LayoutError, MachineConfig, Migratable, NothingToProtect, PAGE_SIZE, PageIndex,
    PageRun, PageSet, PauseCosts, Placed, Protect, ReaperFigures, ReaperState, Region, RegionFile, RegionId,
    RetiredMemory, RingFigures, RunState, Section, SourceVm, StateReader, StateWriter, StreamName, TargetVm,
    TrackerKind, UsedPages, VcpuRing, VmError, Window, WriteProtection,
};
pub use vmferry_engine::{
    Accept, Arrival, Attempt, AutoConverge, BranchError, BranchPoint, Branched, BulkLimit, Bytes, Change,
    ChannelCounts, ChannelRole, CodecFigures, Connect, Connected, Cpu, DeltaCacheFigures, Deltas, Downtime,
    EncodingFigures, Ended, FaultFigures, FillState, FreePagesFigures, Incoming, KnownPages,
    KnownPagesFigures, Listener, MappedMemory, Merged, MigrateError, MigrationHandle, MigrationKind,
    MigrationMode, MigrationState, OnDemandRestore, OnTimeout, PaceFigures, PageCodec, PassReport, PauseHook,
    PhaseReport, PostcopyFigures, PostcopyReceiver, PostcopyState, PostcopyWatch, PrefetchProgress, Progress,
    ReceiveFailure, Received, Refusal, RefusalCode, Report, RestoreError, RestoreProgress, SenderFigures,
    Settings, SharedRestore, SharedSettings, SnapshotFigures, SnapshotSettings, Sockets, SwitchoverBandwidth,
    ThrottleFigures, UrgentPath, Uri, UriError, WorkingSet, WorkingSetError, ZstdLevel, arbiter, branch,
    join_branch, merge_snapshot, plan, read_working_set, receive, restore, restore_on_demand, restore_shared,
    restore_shared_with, save, save_copy, snapshot_background, snapshot_bases,
};
#[cfg(feature = "tls")]
pub use vmferry_engine::{Tls, TlsError, rustls};
pub use vmferry_thread::{Park, Role as ThreadRole, StillWorking, Working, on_start as on_thread_start};
