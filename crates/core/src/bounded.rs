//! Decoding of lists and strings with a limit on their length.
//!
//! Without a limit, a short message could make the receiver allocate a lot of memory, because an
//! empty string in a list takes 1 byte of the message but 24 bytes of memory.

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Maximum length of a name in bytes. The limit applies to the strings in a
/// [`MachineConfig`](crate::MachineConfig), and to the names of sections and streams.
pub const MAX_NAME_BYTES: usize = 1024;
/// Maximum number of properties in [`MachineConfig::extra`](crate::MachineConfig::extra).
pub const MAX_PROPERTIES: usize = 256;
/// Maximum number of names in [`MachineConfig::features`](crate::MachineConfig::features).
pub const MAX_FEATURES: usize = 4096;

struct List<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for List<T, MOST> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MOST}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<T>, A::Error> {
        // The list grows as items arrive. The length that the peer claims reserves no memory.
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

/// Decodes a list of at most `MOST` items. Use it as
/// `#[serde(deserialize_with = "list::<_, _, MOST>")]`.
///
/// # Errors
/// If the list has more than `MOST` items, or an item is not valid.
pub fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>, const MOST: usize>(
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

/// Decodes a string of at most [`MAX_NAME_BYTES`] bytes.
///
/// # Errors
/// If the string is longer.
pub fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_str(Name)
}

/// String of at most [`MAX_NAME_BYTES`] bytes, as an item of a list.
#[derive(serde::Deserialize)]
struct Named(#[serde(deserialize_with = "name")] String);

/// Decodes the names of processor features.
pub(crate) fn features<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let names = list::<Named, D, MAX_FEATURES>(deserializer)?;
    Ok(names.into_iter().map(|Named(name)| name).collect())
}

/// Decodes properties, which are pairs of a name and a value.
pub(crate) fn properties<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<(String, String)>, D::Error> {
    let pairs = list::<(Named, Named), D, MAX_PROPERTIES>(deserializer)?;
    Ok(pairs.into_iter().map(|(Named(name), Named(value))| (name, value)).collect())
}
