//! What can fail, apart from saved state.

use crate::{NotPaused, StateError};
use std::io;
use vmferry_core::VmError;

/// Why KVM could not be set up for a guest that can be moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An ioctl failed.
    #[error("{what} failed")]
    Ioctl {
        /// Name of the ioctl, and its object.
        what: String,
        /// Answer of the kernel.
        #[source]
        source: io::Error,
    },
    /// KVM refuses a memory slot.
    #[error(
        "KVM on this host takes no {} MiB of guest memory at {gpa:#x} (KVM_SET_USER_MEMORY_REGION): it has a limit of its own, and \
         everywhere one piece has less than 8 TiB; give the guest less memory",
        .len >> 20
    )]
    MemorySlot {
        /// Length of the slot in bytes.
        len: u64,
        /// Guest-physical address of the slot.
        gpa: u64,
        /// Answer of the kernel.
        #[source]
        source: io::Error,
    },
    /// The VM cannot have dirty rings of this size.
    #[error("no dirty rings of {entries} entries: {why}")]
    DirtyRing {
        /// Entries of each ring.
        entries: u32,
        /// What KVM lacks.
        why: String,
    },
    /// Guest memory does not give the address of a region.
    #[error("guest memory has no whole {0}")]
    Memory(vmferry_core::RegionId, #[source] vmferry_core::VmError),
    /// A vCPU has to be paused for this and runs.
    #[error("vCPU {cpu} runs; pause the guest first")]
    Running {
        /// Number of the vCPU.
        cpu: u32,
    },
    /// The guest has ended, and has no state to be moved.
    #[error("the guest has ended")]
    Ended,
    /// The exit handler of a vCPU panicked, so that the state of the vCPU may be half changed.
    #[error("the exit handler of vCPU {cpu} has panicked")]
    Panicked {
        /// Number of the vCPU.
        cpu: u32,
    },
    /// The host starts no thread for a vCPU.
    #[error("no thread for vCPU {cpu}")]
    Thread {
        /// Number of the vCPU.
        cpu: u32,
        /// Answer of the host.
        #[source]
        source: io::Error,
    },
    /// The saved state does not fit, or KVM does not give or take a part of it.
    #[error(transparent)]
    State(#[from] StateError),
    /// A CPUID table has more entries than KVM takes.
    #[error("the CPUID table is full: KVM takes at most {} entries", kvm_bindings::KVM_MAX_CPUID_ENTRIES)]
    CpuidFull,
}

impl Error {
    /// The failure of ioctl `what`.
    pub(crate) fn ioctl(what: impl Into<String>, error: kvm_ioctls::Error) -> Self {
        Self::Ioctl { what: what.into(), source: io::Error::from_raw_os_error(error.errno()) }
    }
}

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

// For the methods of a VM that return `VmError`: `?` is enough.

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
