//! Code that the test suites of several crates share.
//!
//! The crate has no dependencies, so that every test suite can use it.

mod skip;

pub use skip::{Need, skip};
