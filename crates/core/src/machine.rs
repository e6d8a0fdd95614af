//! Description of a machine, which source and target compare, and sections of device state. Both
//! are part of the wire format.

use crate::bounded;
use crate::{Layout, MAX_REGIONS, Region};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Description of a machine as its guest sees it. Source and target compare their descriptions
/// before the migration begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Kind of machine, for example `kvm` or `process`. Each string in a description from a peer
    /// has at most [`MAX_NAME_BYTES`](bounded::MAX_NAME_BYTES) bytes.
    #[serde(deserialize_with = "bounded::name")]
    pub kind: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Memory regions.
    #[serde(deserialize_with = "bounded::list::<_, _, MAX_REGIONS>")]
    pub regions: Vec<Region>,
    /// Further properties, as pairs of name and value. Source and target must list equal pairs in
    /// the same order. At most [`MAX_PROPERTIES`](bounded::MAX_PROPERTIES).
    #[serde(deserialize_with = "bounded::properties")]
    pub extra: Vec<(String, String)>,
    /// Names of processor features, in ascending order. For a VM with a guest, they are the
    /// features that the guest was shown. For a target that waits for a guest, they are the
    /// features that it can offer: all features of the guest, and perhaps more. At most
    /// [`MAX_FEATURES`](bounded::MAX_FEATURES).
    #[serde(deserialize_with = "bounded::features")]
    pub features: Vec<String>,
}

/// Maximum number of missing features that a message names.
const MAX_NAMES: usize = 12;

impl MachineConfig {
    /// Returns the description of a machine with this memory, without properties and processor
    /// features.
    #[must_use]
    pub fn new(kind: impl Into<String>, vcpus: u32, memory: &Layout) -> Self {
        let regions = memory.regions().to_vec();
        Self { kind: kind.into(), vcpus, regions, extra: Vec::new(), features: Vec::new() }
    }

    /// Returns a text that describes the first difference between this machine, which is the
    /// target, and `guest`, the machine that the guest needs. Returns `None` if the target can run
    /// the guest.
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

    /// Returns a text that names the `features` that this machine does not offer, or `None` if it
    /// offers all of them.
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

/// Saved state of one device, vCPU or clock.
///
/// The name and the version determine the format of the payload. The payload is never the raw
/// memory of a runtime type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Kind of object whose state the section holds, for example `vcpu`.
    #[serde(deserialize_with = "bounded::name")]
    pub name: String,
    /// Number of the object among those of its kind, for example the number of the vCPU.
    pub instance: u32,
    /// Version of the format of the payload.
    pub version: u32,
    /// Encoded state.
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
    fn target_may_offer_more_features_than_the_guest_has_but_not_fewer() {
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
