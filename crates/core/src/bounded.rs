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

/// A text of at most [`MAX_NAME_BYTES`].
pub fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
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
