//! Client side of the command `vmferry`: connections to the control sockets of running processes,
//! and processes `vmferry run` that are started for a guest that moves between them.
//!
//! The command uses this crate for its own subcommands and for `vmferry demo`. `vmferry-bench`
//! measures the command with it.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::atomic::AtomicBool;
//! use vmferry_client::{Pair, Setup};
//!
//! # fn main() -> anyhow::Result<()> {
//! let setup = Setup::new(Path::new("/usr/bin/vmferry"), 1 << 30, "uniform,ws=64M,rate=10k");
//! let mut pair = Pair::start(&setup, &AtomicBool::new(false))?;
//! let request = serde_json::json!({
//!     "uri": pair.uri, "channels": 2, "downtime-limit-ms": 300, "peer-timeout-ms": 10_000,
//! });
//! pair.migrate(&request)?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod connection;
mod process;

pub use connection::{Client, Unreachable, is_gone, printable};
pub use process::{Environment, Pair, Role, Runner, SameHost, Setup, SingleProcess};

/// Prefix of the commands on the control socket that only vmferry has.
pub const PREFIX: &str = "x-vmferry-";
