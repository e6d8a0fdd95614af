//! Description of the host of a measurement.

use serde::{Deserialize, Serialize};

/// A host, as far as it matters to a migration. No names and no addresses.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Host {
    /// The processor's model name.
    pub cpu: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory of the host in bytes.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Kind of KVM: `kvm_intel`, `kvm_amd`, `kvm_pvm`, or `none: ` and the reason.
    pub kvm: String,
    /// QEMU's version. None: not installed.
    pub qemu: Option<String>,
    /// TCP congestion control that a socket gets unless it asks for another.
    pub congestion_control: String,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub thp: String,
    /// Load average of the minute before the run: other work on the host shows here, and spoils
    /// what follows.
    pub load_1m: f64,
    /// Time at which the run started: UTC, RFC 3339.
    pub date: String,
}

impl Host {
    /// A line that warns of figures from a host that had something else to do.
    pub fn busy_text(&self) -> Option<String> {
        (self.load_1m > BUSY_LOAD).then(|| {
            format!(
                "The load was {:.1} when the run began: something else was using this host, and the figures suffer from it.\n",
                self.load_1m
            )
        })
    }
}

/// A load average above this means that the host was not ours alone. An idle host stays below 0.2.
const BUSY_LOAD: f64 = 0.5;
