//! Texts of users (command line, control socket, kernel command line of a guest) and lines that a
//! guest writes to its serial port.

use std::fmt::{Debug, Display};
use std::str::FromStr;
use vmferry_baselines::Policy;
use vmferry_engine::Uri;
use vmferry_engine::arbiter::MigrationId;
use vmferry_guest_abi::{GuestArgs, Line, Workload, parse_rate, parse_size};
use vmferry_vmm::Mac;

/// Parses `text`, writes the value as text, and checks that parsing the result returns the same
/// value.
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
        // The length of the error message is bounded.
        Err(error) => assert!(error.to_string().len() <= 400 + 4 * text.len(), "{error}"),
    }
}

/// Parses `bytes`, as text, as each of these types.
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
        // Only the beginning of a long reason is kept, so such a line is not written back.
        if line.starts_with("PANIC") {
            let _ = line.parse::<Line>();
        } else {
            again::<Line>(line);
        }
    }
}
