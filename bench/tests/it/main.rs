//! Tests of benches that start processes: the executable `vmferry-bench`, and the command `vmferry`
//! beside it.

mod command;
mod docs;
mod floor;
mod rtt;

/// Executable whose hidden subcommands are the other processes of the floor and of the round trips.
const VMFERRY_BENCH: &str = env!("CARGO_BIN_EXE_vmferry-bench");
