//! What can go wrong, in words for the person who runs the VM.

use crate::boot::BootError;
use crate::disk::DiskError;
use crate::memory::MemoryError;
use crate::state::StateError;
use std::io;
use std::time::Duration;
use vmferry_kvm::NotPaused;
use vmferry_sys::tap::TapError;

/// What went wrong: what failed, where, and what to do where that is known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no `/dev/kvm`.
    #[error(
        "no /dev/kvm on this host: load the module kvm_intel or kvm_amd, or switch virtualization on in the firmware"
    )]
    NoKvm,
    /// `/dev/kvm` may not be opened by this user.
    #[error(
        "no permission to open /dev/kvm: add this user to the group that owns it (often `kvm`), or run as root"
    )]
    NoPermission,
    /// `/dev/kvm` cannot be opened for another reason.
    #[error("cannot open /dev/kvm")]
    OpenKvm(#[source] io::Error),
    /// The kernel speaks another KVM API.
    #[error(
        "KVM speaks API version {found} here and this program speaks 12: the kernel is older than 2.6.22 or broken"
    )]
    ApiVersion {
        /// What the kernel says.
        found: i32,
    },
    /// Capabilities that the VMM cannot do without.
    #[error("KVM on this host lacks {}: the VM cannot be built", .0.join(", "))]
    MissingCaps(Vec<&'static str>),
    /// Options that no VM can have.
    #[error("{0}")]
    Options(String),
    /// KVM cannot be set up for a guest that can be moved.
    #[error(transparent)]
    Setup(#[from] vmferry_kvm::Error),
    /// An ioctl failed.
    #[error("{what} failed")]
    Kvm {
        /// Which, and on what.
        what: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Guest memory cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel image cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Saved state cannot be read or applied.
    #[error(transparent)]
    State(#[from] StateError),
    /// A vCPU thread could not be started.
    #[error("cannot start the thread of vCPU {cpu}")]
    Thread {
        /// Which.
        cpu: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A network interface's tap cannot be had.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A disk cannot be had.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A device's thread could not be started.
    #[error("{name}: no thread for it")]
    DeviceThread {
        /// Which device.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A device cannot do what is asked of the VM.
    #[error("{name}: {why}")]
    Device {
        /// Which.
        name: &'static str,
        /// Why.
        why: String,
    },
    /// A device has work under way that takes longer than it was given.
    #[error("{name}: it did not finish its work within {:.1} s", .within.as_secs_f64())]
    Busy {
        /// Which device.
        name: &'static str,
        /// How long it was waited for.
        within: Duration,
    },
    /// A vCPU did not answer.
    #[error("vCPU {cpu} did not {what} within {} ms", crate::vcpu::PATIENCE.as_millis())]
    Unresponsive {
        /// Which.
        cpu: u32,
        /// What it was asked to do.
        what: &'static str,
    },
    /// What was asked is not possible in the VM's present state.
    #[error("cannot {what}: {why}")]
    WrongState {
        /// What was asked.
        what: &'static str,
        /// Why it is not possible now.
        why: String,
    },
}

impl Error {
    /// Whether nothing is wrong but that I/O takes its time.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Disk(DiskError::Slow { .. }))
    }

    /// The failure of ioctl `what`.
    pub(crate) fn kvm(what: impl Into<String>, source: kvm_ioctls::Error) -> Self {
        Self::Kvm { what: what.into(), source: io::Error::from_raw_os_error(source.errno()) }
    }
}

impl From<NotPaused> for Error {
    fn from(error: NotPaused) -> Self {
        Self::Unresponsive { cpu: error.cpu, what: "pause" }
    }
}

/// The crate's results.
pub type Result<T> = std::result::Result<T, Error>;
