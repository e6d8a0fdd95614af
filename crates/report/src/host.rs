//! Description of the host of a measurement.

use serde::{Deserialize, Serialize};

/// Properties of a host that influence a migration. They contain no names and no addresses of the
/// host.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Host {
    /// Model name of the processor.
    pub cpu: String,
    /// Number of processors that this process may use.
    pub cores: usize,
    /// Memory of the host in bytes.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Kind of KVM: `kvm_intel`, `kvm_amd`, `kvm_pvm`, or `none: ` and the reason.
    pub kvm: String,
    /// Version of QEMU, or `None` if it is not installed.
    pub qemu: Option<String>,
    /// Default TCP congestion control of a socket.
    pub congestion_control: String,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub thp: String,
    /// Load average of the minute before the run. It shows other work on the host, which distorts
    /// the results.
    pub load_1m: f64,
    /// Time at which the run started, in UTC and in the format of RFC 3339.
    pub date: String,
}

impl Host {
    /// Returns a line that warns of distorted figures if the host was busy with other work, and
    /// `None` otherwise.
    pub fn busy_text(&self) -> Option<String> {
        (self.load_1m > BUSY_LOAD).then(|| {
            format!(
                "The load was {:.1} when the run began: other work was using this host, and the figures suffer from it.\n",
                self.load_1m
            )
        })
    }
}

/// Load average above which the host was busy with other work. An idle host stays below 0.2.
const BUSY_LOAD: f64 = 0.5;
