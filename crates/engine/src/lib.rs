//! Live-migration engine: moves a running guest to another process or host, and saves guests to
//! files.
//!
//! Most VMMs depend on the crate `vmferry`, which re-exports this crate with a builder for
//! migrations. The engine does not depend on a particular VMM. It calls the traits of
//! `vmferry-core`: [`SourceVm`] and [`TargetVm`], [`GuestMemory`], [`DirtyTracker`], and, for
//! postcopy, [`DemandPaging`].
//!
//! | item | purpose |
//! |---|---|
//! | [`migrate`] | on the source: moves a guest to a target by precopy, postcopy or both |
//! | [`receive`], [`Incoming`] | on the target: receives a guest into an existing VM, or into a VM that is created for the guest |
//! | [`save`], [`save_copy`] | writes a guest to a file; after `save_copy`, the guest continues to run |
//! | [`snapshot_background`] | writes a guest to a file while it runs, and pauses it only to save its device state |
//! | [`restore`], [`restore_on_demand`] | starts a guest from a file, after its memory was read or while its memory is being read |
//! | [`branch`](branch()) | takes one instant of a running guest, from which other guests continue with [`join_branch`] and share its memory |
//! | [`plan`] | predicts the duration and the downtime of a migration, and chooses its mode |
//! | [`arbiter`] | decides whether source or target owns a guest after the answer to the commit was lost |
//!
//! Source and target are state machines without I/O, which are defined in the crate
//! `vmferry-protocol`. This crate performs the actions that they return, and therefore owns the
//! channels, the threads and the clock.
//!
//! ```no_run
//! use vmferry_engine::{
//!     Arrival, Ended, Listener, MigrationHandle, MigrationState, Settings, SourceVm, TargetVm, Uri, migrate,
//!     receive,
//! };
//!
//! /// Runs on the source. Other threads can watch or cancel through the `MigrationHandle`.
//! fn move_away(vm: &mut dyn SourceVm, to: &Uri) -> Result<bool, Box<dyn std::error::Error>> {
//!     let report = migrate(vm, to, None, &Settings::default(), &MigrationHandle::new())?;
//!     Ok(matches!(report.ended(), Some(Ended::Completed)))
//! }
//!
//! /// Runs on the target. Returns once the guest runs there with all of its memory.
//! fn take_in(vm: &mut dyn TargetVm, at: &Uri) -> Result<(), Box<dyn std::error::Error>> {
//!     let (listener, arrival) = (Listener::bind(at, false)?, Arrival::new(Settings::default().peer_timeout));
//!     let received = receive(vm, &listener, &arrival)?;
//!     // After a postcopy, the rest of the memory still arrives.
//!     if let Some(postcopy) = received.postcopy {
//!         let end = postcopy.finish(&listener, &arrival);
//!         if end.state != MigrationState::Completed {
//!             return Err(format!("the guest has lost memory: {:?}", end.why).into());
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Features
//! `tls` adds encrypted channels, which use rustls. `ring` adds `tls` and a provider of
//! cryptography, and is enabled by default.

pub mod arbiter;
mod awake;
mod branch;
mod breaks;
mod channel;
mod clock;
mod demand;
mod error;
mod free;
mod handle;
mod handoff;
mod heartbeat;
#[cfg(feature = "hostile")]
pub mod hostile;
mod idle;
mod known;
mod mapped;
mod missing_pages;
#[cfg(test)]
mod model;
pub mod plan;
mod reason_wait;
mod report;
mod scratch;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod snapshot;
mod source;
mod sync;
mod target;
mod vm;
mod wake;

use vmferry_protocol::run;

pub use branch::{BranchError, BranchPoint, Branched, branch, join_branch};
/// Settings that the engine applies to TCP sockets. Public for `vmferry-bench`, which measures
/// their effect.
#[doc(hidden)]
pub use channel::tcp;
pub use channel::{Accept, Attempt, ChannelCounts, Connect, Connected, Listener, Sockets, Uri, UriError};
#[cfg(feature = "tls")]
pub use channel::{Tls, TlsError};
pub use error::MigrateError;
pub use handle::{Change, MigrationHandle, MigrationState, Progress};
pub use known::KnownPages;
pub use mapped::MappedMemory;
pub use report::{
    Bytes, CodecFigures, Cpu, DeltaCacheFigures, Downtime, EncodingFigures, Ended, FaultFigures,
    FreePagesFigures, KnownPagesFigures, MigrationKind, PaceFigures, PassReport, PhaseReport,
    PostcopyFigures, Report, SenderFigures, SnapshotFigures, ThrottleFigures,
};
/// TLS library. Callers of [`Tls::with_provider`] need its type for a provider of cryptography.
#[cfg(feature = "tls")]
pub use rustls;
pub use snapshot::{
    FillState, Merged, OnDemandRestore, PauseHook, PrefetchProgress, RestoreError, RestoreProgress,
    SharedRestore, SharedSettings, SnapshotSettings, merge_snapshot, read_working_set, restore,
    restore_on_demand, restore_shared, restore_shared_with, save, save_copy, snapshot_background,
    snapshot_bases,
};
/// Walk of a sender over the pages of a pass. Public for `vmferry-bench`, which compares the walk
/// with plain scanners.
#[doc(hidden)]
pub use source::WalkedPass;
/// Controller of the bulk rate in postcopy. Public for `vmferry-bench`, which measures the
/// controller without a migration.
#[doc(hidden)]
pub use source::pace;
pub use source::{
    AutoConverge, BulkLimit, Deltas, MigrationMode, OnTimeout, Outcome, PageCodec, Settings,
    SwitchoverBandwidth, UrgentPath, Verification, migrate,
};
pub use target::{
    Arrival, Incoming, PostcopyReceiver, PostcopyState, PostcopyWatch, ReceiveFailure, Received, receive,
};
/// Level of Zstandard, for [`PageCodec`].
pub use vmferry_codec::Level as ZstdLevel;
pub use vmferry_core::{
    Answer, AnswerMode, BranchMemory, DemandPaging, DirtyTracker, Fault, FreePages, FreeReport, GuestMemory,
    MachineConfig, Migratable, NothingToProtect, PauseCosts, Placed, Protect, ReaperFigures, ReaperState,
    RegionFile, RetiredMemory, RingFigures, RunState, Section, SourceVm, StateReader, StateWriter,
    StreamName, TargetVm, TrackerKind, UsedPages, VcpuRing, VmError, WriteProtection,
};
pub use vmferry_wire::{Refusal, RefusalCode, Role as ChannelRole, WireError, WorkingSet, WorkingSetError};

/// Returns random bytes from the `getrandom` system call.
///
/// The system call is made directly, because a confined process may not open files. Crates that
/// look up the C library's wrapper at run time do not find the wrapper in a static program, and
/// open a file instead.
fn random<const N: usize>() -> Result<[u8; N], MigrateError> {
    // The kernel answers a request for at most 256 bytes either completely or not at all
    // (getrandom(2)).
    const { assert!(N <= 256) };
    let mut bits = [0; N];
    rustix::rand::getrandom(&mut bits[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| MigrateError::Host { what: "random bits", source: error.into() })?;
    Ok(bits)
}
