//! Live-migration engine: moves a guest to another process or host while it runs, and saves guests
//! into files.
//!
//! Most VMMs depend on the crate `vmferry`, which re-exports this crate with a builder for
//! migrations. The engine does not depend on a particular VMM. It calls the traits of
//! `vmferry-core`: [`SourceVm`] and [`TargetVm`], [`GuestMemory`], [`DirtyTracker`], and, for
//! postcopy, [`DemandPaging`].
//!
//! | function | purpose |
//! |---|---|
//! | [`migrate`] | the source: moves a guest away by precopy, postcopy or both |
//! | [`receive`], [`Incoming`] | the target: receives a guest into a VM that exists, or into one that is created for the guest |
//! | [`save`], [`save_copy`] | writes a guest into a file, and ends it or lets it continue |
//! | [`restore`], [`restore_on_demand`] | reads a guest from a file, before it runs or while it runs |
//! | [`plan`] | predicts the duration and the downtime of a migration, and chooses its mode |
//! | [`arbiter`] | the arbiter that decides whether source or target owns a guest after a lost commit |
//!
//! Source and target are state machines without I/O, in the crate `vmferry-protocol`. This crate
//! performs their actions: it has the channels, the threads and the clock.
//!
//! ```no_run
//! use vmferry_engine::{
//!     Arrival, Ended, Listener, MigrationHandle, MigrationState, Settings, SourceVm, TargetVm, Uri, migrate,
//!     receive,
//! };
//!
//! /// On the source. `MigrationHandle` shows the progress to other threads, and cancels.
//! fn move_away(vm: &mut dyn SourceVm, to: &Uri) -> Result<bool, Box<dyn std::error::Error>> {
//!     let report = migrate(vm, to, None, &Settings::default(), &MigrationHandle::new())?;
//!     Ok(matches!(report.ended(), Some(Ended::Completed)))
//! }
//!
//! /// On the target. Returns when the guest runs on the target.
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
//! `tls` adds encrypted channels by rustls. `ring`, which is on by default, adds a provider of
//! cryptography.

pub mod arbiter;
mod awake;
mod channel;
mod clock;
mod demand;
mod error;
mod free;
mod handle;
mod heartbeat;
#[cfg(feature = "hostile")]
pub mod hostile;
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

/// Settings that the engine applies to TCP sockets, for `vmferry-bench`, which measures them.
#[doc(hidden)]
pub use channel::tcp;
pub use channel::{Accept, Attempt, ChannelCounts, Connect, Connected, Listener, Sockets, Uri, UriError};
#[cfg(feature = "tls")]
pub use channel::{Tls, TlsError};
pub use error::MigrateError;
pub use handle::{Change, MigrationHandle, MigrationState, Progress};
pub use mapped::MappedMemory;
pub use report::{
    Bytes, Cpu, Downtime, Ended, FaultFigures, FreePagesFigures, MigrationKind, PaceFigures, PassReport,
    PhaseReport, PostcopyFigures, Report, ThrottleFigures,
};
/// TLS library, for the providers of cryptography that [`Tls::with_provider`] takes.
#[cfg(feature = "tls")]
pub use rustls;
pub use snapshot::{
    FillState, OnDemandRestore, RestoreError, RestoreProgress, restore, restore_on_demand, save, save_copy,
};
/// Controller of the bulk rate in postcopy, for `vmferry-bench`, which measures it alone.
#[doc(hidden)]
pub use source::pace;
pub use source::{
    AutoConverge, BulkLimit, MigrationMode, OnTimeout, Outcome, Settings, SwitchoverBandwidth, UrgentPath,
    Verification, migrate,
};
pub use target::{
    Arrival, Incoming, PostcopyReceiver, PostcopyState, PostcopyWatch, ReceiveFailure, Received, receive,
};
pub use vmferry_core::{
    Answer, AnswerMode, DemandPaging, DirtyTracker, Fault, FreePages, FreeReport, GuestMemory, MachineConfig,
    Migratable, NothingToProtect, PauseCosts, Placed, Protect, RingFigures, RunState, Section, SourceVm,
    StateReader, StateWriter, StreamName, TargetVm, TrackerKind, VcpuRing, VmError,
};
pub use vmferry_wire::{Refusal, RefusalCode, Role as ChannelRole, WireError};

/// Returns random bits from the kernel by its system call. A library function would not do: crates
/// that look for one in the C library find none in a static program, and then open a file, which a
/// confined process may not.
fn random<const N: usize>() -> Result<[u8; N], MigrateError> {
    // A request of at most 256 bytes is answered completely or not at all (getrandom(2)).
    const { assert!(N <= 256) };
    let mut bits = [0; N];
    rustix::rand::getrandom(&mut bits[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| MigrateError::Host { what: "random bits", source: error.into() })?;
    Ok(bits)
}
