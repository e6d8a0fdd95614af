//! What users write: on the command line, at the control socket, in a guest's command line; and what a guest writes on its serial line.

use std::fmt::{Debug, Display};
use std::str::FromStr;
use vmferry_baselines::Policy;
use vmferry_engine::Uri;
use vmferry_engine::fence::MigrationId;
use vmferry_guest_abi::{GuestArgs, Line, Workload, parse_rate, parse_size};
use vmferry_vmm::Mac;

/// What was read is written, and read again alike.
fn again<T: FromStr + Display + PartialEq + Debug>(text: &str)
where
    T::Err: Debug + Display,
{
    match text.parse::<T>() {
        Ok(value) => {
            let written = value.to_string();
            match written.parse::<T>() {
                Ok(back) => assert_eq!(back, value, "'{text}' was written as '{written}'"),
                Err(error) => panic!("'{text}' was written as '{written}', and then: {error}"),
            }
        }
        // What people are told of it has a bound.
        Err(error) => assert!(error.to_string().len() <= 400 + 4 * text.len(), "{error}"),
    }
}

/// Reads `bytes`, as text, as each of these.
pub(crate) fn drive(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    again::<Workload>(&text);
    again::<GuestArgs>(&text);
    again::<Uri>(&text);
    again::<Policy>(&text);
    again::<Mac>(&text);
    again::<MigrationId>(&text);
    let _ = (parse_size(&text), parse_rate(&text));
    for line in text.lines() {
        // Of a long reason only the beginning is kept.
        if line.starts_with("PANIC") {
            let _ = line.parse::<Line>();
        } else {
            again::<Line>(line);
        }
    }
}
