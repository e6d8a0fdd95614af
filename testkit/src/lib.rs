//! Code that the test suites of several crates share.
//!
//! The crate has no dependencies, so that every test suite can use it.

mod skip;
mod wait;

use std::fmt::Display;
use std::io::Write;

pub use skip::{Need, skip};
pub use wait::{PATIENCE, wait, wait_for};

/// Writes `text` as one line to standard output past the test harness, which hides what passing tests print.
pub fn say(text: impl Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
