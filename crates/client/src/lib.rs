//! Client side of the command `vmferry`: connections to the control sockets of running processes,
//! and pairs of `vmferry run` processes between which a guest moves.
//!
//! The command uses this crate for the subcommands that talk to a running process, and for `vmferry
//! demo`. `vmferry-bench` uses it to measure the command.
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

/// Prefix of the commands that only vmferry has on its control socket.
pub const PREFIX: &str = "x-vmferry-";
