//! What both sides must agree on, and the state that is moved: as it goes over the wire.

use serde::{Deserialize, Serialize};
use vmferry_memory::Region;

/// What a machine is like as far as its guest can tell, so that two sides can find out whether they agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// The kind of machine, for example `kvm` or `process`.
    pub kind: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The memory regions.
    pub regions: Vec<Region>,
    /// Anything else that must be equal, as name and value, in a fixed order.
    pub extra: Vec<(String, String)>,
}

impl MachineConfig {
    /// The first way in which `theirs` differs from this, as a sentence for a person; `None` if they agree.
    #[must_use]
    pub fn difference(&self, theirs: &Self) -> Option<String> {
        if self.kind != theirs.kind {
            return Some(format!("the kind of guest is {} here and {} there", self.kind, theirs.kind));
        }
        if self.vcpus != theirs.vcpus {
            return Some(format!("vCPUs: {} here and {} there", self.vcpus, theirs.vcpus));
        }
        if self.regions != theirs.regions {
            let show = |config: &Self| {
                let regions: Vec<String> =
                    config.regions.iter().map(|r| format!("{} MiB at {}", r.len >> 20, r.gpa)).collect();
                regions.join(" + ")
            };
            return Some(format!("memory: {} here and {} there", show(self), show(theirs)));
        }
        let mut pairs = self.extra.iter().zip(&theirs.extra);
        if let Some((ours, theirs)) = pairs.find(|(a, b)| a != b) {
            return Some(format!("{}={} here and {}={} there", ours.0, ours.1, theirs.0, theirs.1));
        }
        (self.extra.len() != theirs.extra.len())
            .then(|| format!("{} machine properties here and {} there", self.extra.len(), theirs.extra.len()))
    }
}

/// A piece of saved state: a device, a vCPU, a clock.
///
/// The name, instance and version say how to read the payload; the payload is never a runtime type dumped raw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// What it is the state of, for example `vcpu`.
    pub name: String,
    /// Which one of its kind, for example the vCPU's number.
    pub instance: u32,
    /// Version of the payload's format.
    pub version: u32,
    /// The state.
    pub payload: Vec<u8>,
}
