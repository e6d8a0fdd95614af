//! Code that the test suites of several crates share.
//!
//! The crate has no dependencies, so every test suite can use it. Links and peers of a migration
//! need the wire and the engine. They are in `vmferry-testkit-peers` (`testkit/peers`).
//!
//! | item | use |
//! |---|---|
//! | [`skip`] | ends a test that this host cannot run, and counts it |
//! | [`wait`], [`wait_for`] | wait for an event; only a hang ends the wait |
//! | [`in_parallel`] | runs cases at the same time |
//! | [`alone`] | runs a test in a separate process |
//! | [`temp_path`], [`Folder`] | paths for files and sockets |
//! | [`print_line`] | prints a figure of a test that passes |
//!
//! ```
//! use vmferry_testkit::{Folder, in_parallel, wait};
//!
//! let folder = Folder::new();
//! in_parallel(2, ["a", "b", "c"], |name| std::fs::write(folder.file(name), name).unwrap());
//! wait("three files", || folder.names().len() == 3);
//! ```

mod alone;
mod parallel;
mod reflinks;
mod skip;
mod temp;
mod wait;

use std::fmt::Display;
use std::io::Write;

pub use alone::alone;
pub use parallel::in_parallel;
pub use reflinks::Reflinks;
pub use skip::{Need, emulator, skip, skip_if_emulated, skip_long_search_if_emulated, tries};
pub use temp::{Folder, temp_path};
pub use wait::{PATIENCE, wait, wait_for};

/// Writes `text` as one line to standard output, past the test harness, which hides the output of
/// passing tests.
pub fn print_line(text: impl Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
