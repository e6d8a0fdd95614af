//! Options of the command.

use clap::{Parser, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BenchName {
    /// Whole migrations: ours, QEMU and the floor
    Migrate,
    /// Ways through a dirty bitmap: the published ones, ours, and other crates'
    Scan,
    /// What tracking dirty pages costs the guest: the log, and rings by each policy
    Reaper,
    /// What it takes to know a guest's free pages, and migrations with and without them
    FreePage,
    /// How many guests fit that give back what they free, and what that costs them
    Density,
    /// How long a guest waits for its pages in postcopy: ours and QEMU's, beside the floor
    Postcopy,
    /// What `plan` says of migrations, and what they are
    Plan,
    /// The floor of a remote fault: round trips of a page, alone and beside bulk, and a local fault
    Rtt,
    /// Every fault at every moment of a migration, and what became of the guest
    Faults,
    /// A thousand migrations in a row through one process, which must not grow
    Soak,
    /// What guests bear beside many others, very large, with peers that mean harm, and before a crowd at the door
    Limits,
    /// What it adds to downtimes that an etcd decides who owns the guest
    Fence,
    /// All but faults, soak, limits and fence
    All,
}

/// Measure vmferry beside QEMU and the floor, in one run
#[derive(Debug, Parser)]
#[command(name = "vmferry-bench", version)]
pub(super) struct BenchArgs {
    /// Bench to run
    #[arg(value_enum, value_name = "BENCH")]
    pub(super) name: BenchName,
    /// Fewer repeats
    #[arg(long)]
    pub(super) quick: bool,
    /// So many repeats
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) rounds: Option<u16>,
    /// Only cases and sides whose names have this in them, as in idle/floor-2; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(super) only: Vec<String>,
    /// Which of the cases of `faults --quick` are run: each fault at each moment once, in a mode and with a guest that this chooses
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// So many cases of `faults` at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(super) jobs: u8,
    /// Executable vmferry to measure; the one beside this executable if left out
    #[arg(long, value_name = "PATH")]
    pub(super) vmferry: Option<PathBuf>,
    /// Write the results as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Write the results as a page with charts to this file (not scan, migrate, rtt, plan, faults, soak, limits and fence)
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
}
