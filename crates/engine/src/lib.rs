//! The live-migration engine.

mod channel;
mod error;
mod source;
mod target;
mod vm;

pub use channel::{Listener, Uri, UriError};
pub use error::MigrateError;
pub use source::{OnTimeout, Outcome, Settings, Verification};
pub use vm::{
    DirtyTracker, GuestMemory, MachineConfig, Protect, Section, SourceVm, TargetVm, TrackerKind, VmError,
};
