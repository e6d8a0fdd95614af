//! What both sides must agree on, and the state that is moved: as it goes over the wire.

use crate::bounded;
use crate::{Layout, MAX_REGIONS, Region};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a machine is like as far as its guest can tell, so that two sides can find out whether they agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// The kind of machine, for example `kvm` or `process`. From a peer: at most [`MAX_NAME_BYTES`](bounded::MAX_NAME_BYTES), as each text here.
    #[serde(deserialize_with = "bounded::name")]
    pub kind: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The memory regions.
    #[serde(deserialize_with = "bounded::list::<_, _, MAX_REGIONS>")]
    pub regions: Vec<Region>,
    /// Anything else that must be equal, as name and value, in a fixed order; at most [`MAX_PROPERTIES`](bounded::MAX_PROPERTIES).
    #[serde(deserialize_with = "bounded::properties")]
    pub extra: Vec<(String, String)>,
    /// What a guest may use of the processor, by name, sorted: of a guest that runs what it was shown, of a machine that waits for one what
    /// it can offer. It may be more there, and nothing may be missing. At most [`MAX_FEATURES`](bounded::MAX_FEATURES).
    #[serde(deserialize_with = "bounded::features")]
    pub features: Vec<String>,
}

/// Most names in a sentence.
const MAX_NAMES: usize = 12;

impl MachineConfig {
    /// Returns the description of a machine with this memory, without properties and processor features.
    #[must_use]
    pub fn new(kind: impl Into<String>, vcpus: u32, memory: &Layout) -> Self {
        let regions = memory.regions().to_vec();
        Self { kind: kind.into(), vcpus, regions, extra: Vec::new(), features: Vec::new() }
    }

    /// Compares this machine, the target, with `guest`, the machine of a guest that is to run on it. Returns the first difference
    /// as a sentence. Returns `None` if the target can take the guest.
    #[must_use]
    pub fn difference(&self, guest: &Self) -> Option<String> {
        let differ = |what: &str, guest: &dyn fmt::Display, target: &dyn fmt::Display| {
            Some(format!("{what}: the guest has {guest}, the target has {target}"))
        };
        if self.kind != guest.kind {
            return differ("kind of machine", &guest.kind, &self.kind);
        }
        if self.vcpus != guest.vcpus {
            return differ("vCPUs", &guest.vcpus, &self.vcpus);
        }
        if self.regions != guest.regions {
            let show = |config: &Self| {
                let regions: Vec<String> =
                    config.regions.iter().map(|r| format!("{} MiB at {}", r.len >> 20, r.gpa)).collect();
                regions.join(" + ")
            };
            return differ("memory", &show(guest), &show(self));
        }
        let mut pairs = guest.extra.iter().zip(&self.extra);
        if let Some((guest, target)) = pairs.find(|(guest, target)| guest != target) {
            if guest.0 == target.0 {
                return differ(&guest.0, &guest.1, &target.1);
            }
            return differ("properties", &guest.0, &target.0);
        }
        if self.extra.len() != guest.extra.len() {
            return differ("number of properties", &guest.extra.len(), &self.extra.len());
        }
        self.lacks(&guest.features)
    }

    fn lacks(&self, features: &[String]) -> Option<String> {
        let lacks = |name: &&String| self.features.binary_search(name).is_err();
        let mut missing: Vec<&str> =
            features.iter().filter(lacks).take(MAX_NAMES + 1).map(String::as_str).collect();
        if missing.is_empty() {
            return None;
        }
        if missing.len() > MAX_NAMES {
            missing[MAX_NAMES] = "...";
        }
        Some(format!(
            "the guest may use processor features that the target does not offer: {}",
            missing.join(", ")
        ))
    }
}

/// A piece of saved state: a device, a vCPU, a clock.
///
/// The name, instance and version say how to read the payload; the payload is never a runtime type dumped raw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// What it is the state of, for example `vcpu`.
    #[serde(deserialize_with = "bounded::name")]
    pub name: String,
    /// Which one of its kind, for example the vCPU's number.
    pub instance: u32,
    /// Version of the payload's format.
    pub version: u32,
    /// The state.
    pub payload: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(features: &[&str]) -> MachineConfig {
        let features = features.iter().map(|name| (*name).to_owned()).collect();
        MachineConfig { kind: "test".into(), vcpus: 1, regions: vec![], extra: vec![], features }
    }

    #[test]
    fn a_machine_may_offer_more_than_a_guest_was_shown_and_not_less() {
        let (old, new) = (machine(&["avx", "sse2"]), machine(&["avx", "avx2", "sse2", "vaes"]));
        assert_eq!(new.difference(&old), None);
        assert_eq!(
            old.difference(&new).unwrap(),
            "the guest may use processor features that the target does not offer: avx2, vaes"
        );
        let names: Vec<String> = (10..60).map(|n| format!("f{n}")).collect();
        let many = machine(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let text = old.difference(&many).unwrap();
        assert!(text.ends_with("f20, f21, ..."), "{text}");
    }
}
