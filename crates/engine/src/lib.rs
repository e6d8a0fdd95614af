//! The live-migration engine.

mod awake;
mod channel;
mod error;
mod free;
mod lacking;
mod latency;
mod lazy;
mod mapped;
mod monitor;
pub mod plan;
mod report;
mod scratch;
#[cfg(test)]
mod sim;
mod snapshot;
mod source;
mod sync;
mod target;
mod vm;

pub use channel::{Listener, Tls, TlsError, Uri, UriError, tcp};
pub use error::MigrateError;
pub use free::{Answer, Answers, FreePages, FreeReport};
pub use latency::prefer_latency_of;
pub use lazy::{Fault, LazyMemory, Placed};
pub use mapped::MappedMemory;
pub use monitor::{Change, MigrationState, Monitor, Progress};
pub use report::{
    Bytes, Cpu, Downtime, FaultFigures, FreePagesFigures, PaceFigures, PassReport, PhaseReport,
    PostcopyFigures, Report, RingFigures, ThrottleFigures, VcpuRing,
};
pub use snapshot::{
    FillState, LazyProgress, LazyRestore, RestoreError, restore, restore_lazy, save, save_copy,
};
pub use source::{
    AutoConverge, MigrationMode, OnTimeout, Outcome, Pace, Settings, SwitchoverBandwidth, UrgentPath,
    Verification, migrate, pace,
};
pub use target::{Arrival, ReceiveFailure, Received, Rest, RestState, RestWatch, receive};
pub use vm::{
    DirtyTracker, GuestMemory, MachineConfig, NothingToProtect, Protect, Section, SourceVm, TargetVm,
    TrackerKind, VmError,
};

/// Random bits from the kernel.
fn random<const N: usize>() -> Result<[u8; N], MigrateError> {
    let mut bits = [0; N];
    getrandom::fill(&mut bits)
        .map_err(|error| MigrateError::Host { what: "random bits", source: std::io::Error::other(error) })?;
    Ok(bits)
}
