//! Errors of the VMM, as messages for the operator.

use crate::boot::BootError;
use crate::disk::DiskError;
use crate::memory::MemoryError;
use crate::state::StateError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use vmferry_kvm::NotPaused;
use vmferry_sys::tap::TapError;

/// Error of the VMM. The message names the operation, the object and the cause and, where it is
/// known, the action to take.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no `/dev/kvm`.
    #[error(
        "no /dev/kvm on this host: load the module kvm_intel or kvm_amd, or switch virtualization on in the firmware"
    )]
    NoKvm,
    /// This user may not open `/dev/kvm`.
    #[error(
        "no permission to open /dev/kvm: add this user to the group that owns it (often `kvm`), or run as root"
    )]
    NoPermission,
    /// `/dev/kvm` cannot be opened for another reason.
    #[error("cannot open /dev/kvm")]
    OpenKvm(#[source] io::Error),
    /// The kernel has another version of the KVM API.
    #[error(
        "KVM on this host has API version {found} and this program needs 12: the kernel is older than 2.6.22 or broken"
    )]
    ApiVersion {
        /// Version that the kernel reports.
        found: i32,
    },
    /// KVM does not have required capabilities.
    #[error("KVM on this host lacks {}: cannot create the VM", .0.join(", "))]
    MissingCaps(Vec<&'static str>),
    /// KVM supports fewer vCPUs than the options request.
    #[error("{cpus} vCPUs are not possible: KVM on this host runs at most {most}")]
    TooManyCpus {
        /// Number of vCPUs in the options.
        cpus: u32,
        /// Largest number of vCPUs of a VM on this host.
        most: usize,
    },
    /// The VM has dirty rings, so KVM keeps no dirty log of it.
    #[error(
        "this VM has dirty rings, so KVM keeps no dirty log of it; use the tracker `ring` or `wp`, or start the VM without dirty rings"
    )]
    NoLog,
    /// The VM was started without dirty rings.
    #[error(
        "this VM was started without dirty rings and cannot get them now; use the tracker `log` or `wp`, or start the VM with dirty rings"
    )]
    NoRings,
    /// The host gave no random bits for a MAC address.
    #[error("cannot get a random MAC address: {0}; choose an address")]
    RandomMac(#[source] io::Error),
    /// The host gave no random bits for a VM generation ID.
    #[error("cannot get a random VM generation ID")]
    RandomId(#[source] io::Error),
    /// The options contradict each other or exceed a limit.
    #[error("{0}")]
    Options(String),
    /// KVM cannot be set up for a guest that can be migrated.
    #[error(transparent)]
    Setup(#[from] vmferry_kvm::Error),
    /// An ioctl failed.
    #[error("{what} failed")]
    Kvm {
        /// Name of the ioctl and its object.
        what: String,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// Guest memory cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel image cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Saved state cannot be read or applied.
    #[error(transparent)]
    State(#[from] StateError),
    /// The thread of a vCPU cannot be started.
    #[error("cannot start the thread of vCPU {cpu}")]
    Thread {
        /// Number of the vCPU.
        cpu: u32,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The tap of a network interface cannot be used.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The guest cannot be branched, because its branches would write to the same disk.
    #[error(
        "the guest can write to {}, which its branches would share; give each branch a copy of the disk, or make the disk read-only",
        .path.display()
    )]
    SharedDisk {
        /// Path of the disk.
        path: PathBuf,
    },
    /// The thread of a device cannot be started.
    #[error("{name}: cannot start the device's thread")]
    DeviceThread {
        /// Name of the device.
        name: &'static str,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// A device cannot do what was requested of the VM.
    #[error("{name}: {why}")]
    Device {
        /// Name of the device.
        name: &'static str,
        /// Reason.
        why: String,
    },
    /// A device has work under way that did not end in the given time.
    #[error("{name}: the device did not finish its work within {:.1} s", .within.as_secs_f64())]
    Busy {
        /// Name of the device.
        name: &'static str,
        /// Time for which the caller waited.
        within: Duration,
    },
    /// A vCPU did not respond.
    #[error("vCPU {cpu} did not {what} within {} ms", crate::vcpu::PATIENCE.as_millis())]
    Unresponsive {
        /// Number of the vCPU.
        cpu: u32,
        /// Action that was requested of the vCPU.
        what: &'static str,
    },
    /// The operation is not possible in the VM's present state.
    #[error("cannot {what}: {why}")]
    WrongState {
        /// Operation that was requested.
        what: &'static str,
        /// Reason.
        why: String,
    },
}

impl Error {
    /// Returns true if slow I/O is the only cause, so that the operation can succeed later.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Disk(DiskError::Slow { .. }))
    }

    /// Returns the error of a failed ioctl `what`.
    pub(crate) fn kvm(what: impl Into<String>, source: kvm_ioctls::Error) -> Self {
        Self::Kvm { what: what.into(), source: io::Error::from_raw_os_error(source.errno()) }
    }
}

impl From<NotPaused> for Error {
    fn from(error: NotPaused) -> Self {
        Self::Unresponsive { cpu: error.cpu, what: "pause" }
    }
}

/// Result of the operations of this crate.
pub type Result<T> = std::result::Result<T, Error>;
