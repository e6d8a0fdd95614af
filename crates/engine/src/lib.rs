//! The live-migration engine.

mod awake;
mod channel;
mod clock;
mod demand;
mod error;
pub mod fence;
mod free;
mod heartbeat;
#[cfg(feature = "hostile")]
pub mod hostile;
mod lacking;
mod mapped;
#[cfg(test)]
mod model;
mod monitor;
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

pub use channel::{
    Accept, Attempt, ChannelCounts, Connect, Connected, Listener, Sockets, Uri, UriError, tcp,
};
#[cfg(feature = "tls")]
pub use channel::{Tls, TlsError};
pub use error::MigrateError;
pub use mapped::MappedMemory;
pub use monitor::{Change, MigrationState, Monitor, Progress};
pub use report::{
    Bytes, Cpu, Downtime, Ended, FaultFigures, FreePagesFigures, PaceFigures, PassReport, PhaseReport,
    PostcopyFigures, Report, ThrottleFigures, Way,
};
/// The TLS library, whose providers of cryptography [`Tls::with_provider`] takes.
#[cfg(feature = "tls")]
pub use rustls;
pub use snapshot::{
    FillState, LazyProgress, LazyRestore, RestoreError, restore, restore_lazy, save, save_copy,
};
pub use source::{
    AutoConverge, MigrationMode, OnTimeout, Outcome, Pace, Settings, SwitchoverBandwidth, UrgentPath,
    Verification, migrate, pace,
};
pub use target::{Arrival, Incoming, ReceiveFailure, Received, Rest, RestState, RestWatch, receive};
pub use vmferry_core::{
    Answer, Answers, DirtyTracker, Fault, FreePages, FreeReport, GuestMemory, LazyMemory, MachineConfig,
    Migratable, NothingToProtect, PauseCosts, Placed, Protect, RingFigures, RunState, Section, SourceVm,
    StateReader, StateWriter, StreamName, TargetVm, TrackerKind, VcpuRing, VmError,
};
pub use vmferry_wire::{Refusal, RefusalCode, Role as ChannelRole, WireError};

/// Random bits from the kernel: by its system call, whatever the C library has. (Crates that look for a function of that name find none in a
/// static program, and then open a file, which a confined process may not.)
fn random<const N: usize>() -> Result<[u8; N], MigrateError> {
    // So many come whole, or not at all (getrandom(2)).
    const { assert!(N <= 256) };
    let mut bits = [0; N];
    rustix::rand::getrandom(&mut bits[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| MigrateError::Host { what: "random bits", source: error.into() })?;
    Ok(bits)
}
