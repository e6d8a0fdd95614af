//! Errors other than those of saved state.

use crate::{NotPaused, StateError};
use std::io;
use vmferry_core::VmError;

/// Error of KVM or of the host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An ioctl failed.
    #[error("{what} failed")]
    Ioctl {
        /// Name of the ioctl, and the object that it was called for.
        what: String,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// KVM refuses to create a memory slot.
    #[error(
        "KVM on this host refuses {} MiB of guest memory at {gpa:#x} (KVM_SET_USER_MEMORY_REGION): {source}; KVM limits the size of \
         a slot, on every host to less than 8 TiB; give the guest less memory",
        .len >> 20
    )]
    MemorySlot {
        /// Length of the slot in bytes.
        len: u64,
        /// Guest-physical address of the slot.
        gpa: u64,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// Dirty rings of this size are not available for the VM.
    #[error("no dirty rings of {entries} entries: {why}")]
    DirtyRing {
        /// Number of entries of each ring.
        entries: u32,
        /// Reason why the rings are not available.
        why: String,
    },
    /// [`GuestMemory::window`](vmferry_core::GuestMemory::window) returns no window onto a whole
    /// region.
    #[error("guest memory does not provide the whole {0}")]
    Memory(vmferry_core::RegionId, #[source] vmferry_core::VmError),
    /// The vCPU runs, but must be paused for this operation.
    #[error("vCPU {cpu} runs; pause the guest first")]
    Running {
        /// Number of the vCPU.
        cpu: u32,
    },
    /// The guest has ended, so it has no state that could be moved.
    #[error("the guest has ended")]
    Ended,
    /// The exit handler of a vCPU panicked, so the state of the vCPU may be inconsistent.
    #[error("the exit handler of vCPU {cpu} has panicked")]
    Panicked {
        /// Number of the vCPU.
        cpu: u32,
    },
    /// The host cannot start a thread for a vCPU.
    #[error("the thread of vCPU {cpu} cannot be started")]
    Thread {
        /// Number of the vCPU.
        cpu: u32,
        /// Error that the host returned.
        #[source]
        source: io::Error,
    },
    /// The saved state does not match the VM, or KVM refuses to return or to accept a part of it.
    #[error(transparent)]
    State(#[from] StateError),
    /// A CPUID table has more entries than KVM accepts.
    #[error("the CPUID table is full: KVM accepts at most {} entries", kvm_bindings::KVM_MAX_CPUID_ENTRIES)]
    CpuidFull,
}

impl Error {
    /// Returns the error for a failure of ioctl `what`.
    pub(crate) fn ioctl(what: impl Into<String>, error: kvm_ioctls::Error) -> Self {
        Self::Ioctl { what: what.into(), source: io::Error::from_raw_os_error(error.errno()) }
    }
}

/// Result type of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

// With these conversions, methods of a VM that return `VmError` can use `?`.

impl From<Error> for VmError {
    fn from(error: Error) -> Self {
        Self::new(error)
    }
}

impl From<StateError> for VmError {
    fn from(error: StateError) -> Self {
        Self::new(error)
    }
}

impl From<NotPaused> for VmError {
    fn from(error: NotPaused) -> Self {
        Self::new(error)
    }
}
