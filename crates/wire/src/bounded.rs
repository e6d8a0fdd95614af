//! Lists and texts whose length is checked while they are decoded: a list of empty texts costs a peer a byte each, and us 24 times that.

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Most bytes of a machine's kind, and of each of its names and values.
pub const MAX_NAME_BYTES: usize = 1024;
/// Most of a machine's further properties.
pub const MAX_PROPERTIES: usize = 256;
/// Most names of processor features.
pub const MAX_FEATURES: usize = 4096;
/// Most runs of damaged pages that are named in one message.
pub const MAX_NAMED_RUNS: usize = 65_536;
/// Most vCPUs whose faults are told of, and one for everybody else.
pub const MAX_LATENCIES: usize = 4097;
/// Most buckets of a histogram: one for each bit of a number.
pub const MAX_BUCKETS: usize = 64;

struct List<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for List<T, MOST> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MOST}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<T>, A::Error> {
        // It grows as items come: what a peer says of their number reserves nothing.
        let mut items = Vec::new();
        while let Some(item) = from.next_element()? {
            if items.len() == MOST {
                return Err(A::Error::custom(format_args!("a list of more than {MOST}")));
            }
            items.push(item);
        }
        Ok(items)
    }
}

/// A list of at most `MOST`: `#[serde(deserialize_with = "list::<_, _, MOST>")]`.
pub(crate) fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>, const MOST: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_seq(List::<T, MOST>(PhantomData))
}

struct Name;

impl Visitor<'_> for Name {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a text of at most {MAX_NAME_BYTES} bytes")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        if text.len() > MAX_NAME_BYTES {
            return Err(E::custom(format_args!("a name of {} bytes", text.len())));
        }
        Ok(text.to_owned())
    }
}

/// A text of at most [`MAX_NAME_BYTES`].
pub(crate) fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_str(Name)
}

/// A text as an item of a list.
#[derive(serde::Deserialize)]
struct Named(#[serde(deserialize_with = "name")] String);

/// Names of features.
pub(crate) fn features<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let names = list::<Named, D, MAX_FEATURES>(deserializer)?;
    Ok(names.into_iter().map(|Named(name)| name).collect())
}

/// Properties: names and values.
pub(crate) fn properties<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<(String, String)>, D::Error> {
    let pairs = list::<(Named, Named), D, MAX_PROPERTIES>(deserializer)?;
    Ok(pairs.into_iter().map(|(Named(name), Named(value))| (name, value)).collect())
}

#[cfg(test)]
mod tests {
    use crate::{CONTROL_HEADER_BYTES, ControlHeader, Mode, RunName, ToTarget};
    use crate::{MachineConfig, Section, ToSource, WireError, decode_control, encode_control};
    use vmferry_memory::RegionId;

    fn machine() -> MachineConfig {
        MachineConfig { kind: "kvm".into(), vcpus: 1, regions: vec![], extra: vec![], features: vec![] }
    }

    fn came(machine: MachineConfig) -> Result<ToTarget, WireError> {
        let (mode, bulk_channels, urgent_channels, probe) = (Mode::Precopy, 1, 0, false);
        back(&ToTarget::Setup { machine, mode, bulk_channels, urgent_channels, probe })
    }

    fn back<M: serde::Serialize + serde::de::DeserializeOwned>(message: &M) -> Result<M, WireError> {
        let bytes = encode_control(message)?;
        decode_control(ControlHeader::decode(bytes.first_chunk().unwrap())?, &bytes[CONTROL_HEADER_BYTES..])
    }

    #[test]
    fn as_much_as_is_allowed_comes_and_no_more() {
        let name = "x".repeat(super::MAX_NAME_BYTES);
        let pair = ("a".to_owned(), name.clone());
        let most = MachineConfig {
            kind: name.clone(),
            extra: vec![pair.clone(); super::MAX_PROPERTIES],
            features: vec!["f".to_owned(); super::MAX_FEATURES],
            ..machine()
        };
        let Ok(ToTarget::Setup { machine: back, .. }) = came(most.clone()) else { panic!("refused") };
        assert_eq!(back, most);
        let more = |change: &dyn Fn(&mut MachineConfig)| {
            let mut machine = most.clone();
            change(&mut machine);
            assert!(matches!(came(machine), Err(WireError::Message(_))));
        };
        more(&|machine| machine.kind.push('x'));
        more(&|machine| machine.extra[7].1.push('x'));
        more(&|machine| machine.extra.push(pair.clone()));
        more(&|machine| machine.features.push("f".into()));
        more(&|machine| machine.features[3] = "f".repeat(super::MAX_NAME_BYTES + 1));
    }

    #[test]
    fn a_target_names_so_many_runs_and_no_more() {
        let run = RunName { region: RegionId(0), first: 1, count: 1 };
        let received = |count| ToSource::Received { pass: 0, suspects: 1, runs: vec![run; count] };
        assert!(back(&received(super::MAX_NAMED_RUNS)).is_ok());
        assert!(back(&received(super::MAX_NAMED_RUNS + 1)).is_err());
    }

    #[test]
    fn a_section_may_be_long_and_its_name_not() {
        let section = |name: usize, payload| Section {
            name: "n".repeat(name),
            instance: 0,
            version: 0,
            payload: vec![7; payload],
        };
        assert!(back(&section(super::MAX_NAME_BYTES, 1 << 20)).is_ok());
        assert!(back(&section(super::MAX_NAME_BYTES + 1, 0)).is_err());
    }
}
