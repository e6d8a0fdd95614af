//! Options of `vmferry-bench`.

use clap::{Parser, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BenchName {
    /// Whole migrations: vmferry, QEMU and the floor
    Migrate,
    /// Scans of a dirty bitmap: baselines, vmferry and other crates
    Scan,
    /// Cost of dirty tracking to the guest: dirty log and dirty ring
    Reaper,
    /// Cost of free page reports, and migrations with and without them
    FreePage,
    /// Number of guests that fit if they return free memory, and the cost
    Density,
    /// Page latency in postcopy: vmferry, QEMU and the floor
    Postcopy,
    /// Stalls of a guest during precopy, outside the blackout: vmferry and QEMU
    Stalls,
    /// Cost of a migration by memory, vCPUs, guests and working set
    Scale,
    /// Codecs of pages: ratio, speed, and whole migrations
    Codec,
    /// Snapshots of a running guest: vmferry and QEMU
    Snapshot,
    /// Pause of a guest that is branched, and memory of its children
    Branch,
    /// Predictions of `plan`, compared with real migrations
    Plan,
    /// Floor of a remote fault: page round trips, and a local fault
    Rtt,
    /// Each fault at each phase of a migration, and what becomes of the guest
    Faults,
    /// A thousand migrations, snapshots, branches or upgrades in a row
    Soak,
    /// Guests that continue in a new process of this host: vmferry and QEMU
    Upgrade,
    /// Limits: many guests, large guests, hostile peers, many connections
    Limits,
    /// Cost of an arbiter (etcd) to downtimes
    Fence,
    /// All benches except faults, soak, upgrade, limits and fence
    All,
}

/// Examples at the end of the long help, under a heading in the style of clap's headings.
const EXAMPLES: &str = "\x1b[1m\x1b[4mExamples:\x1b[0m
  vmferry-bench migrate --quick
  # One case, with a report for programs and a page with charts
  vmferry-bench postcopy --only idle --json postcopy.json --html postcopy.html";

/// Heading of the options that select what a bench runs.
const RUNS: &str = "Runs";
/// Heading of the options for results.
const RESULTS: &str = "Results";

/// Measure vmferry, QEMU and a lower bound in one run
///
/// The lower bound is the floor: a plain copy of the same bytes, or the round trip of a page
/// request on the idle link plus a local fault. SIGINT and SIGTERM end a comparison after its
/// current run, and the runs before it are written as results.
#[derive(Debug, Parser)]
#[command(name = "vmferry-bench", version, after_long_help = EXAMPLES)]
pub(super) struct BenchArgs {
    /// Bench to run
    #[arg(value_enum, value_name = "BENCH")]
    pub(super) name: BenchName,
    /// Run fewer rounds, and fewer or smaller cases
    #[arg(long, help_heading = RUNS)]
    pub(super) quick: bool,
    /// Number of rounds [default: depends on the bench and on --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100), help_heading = RUNS)]
    pub(super) rounds: Option<u16>,
    /// Run only cases and sides whose names contain this text
    ///
    /// For example: idle/floor-2. If the option is given several times, cases that contain any of
    /// the texts run.
    #[arg(long, value_name = "TEXT", help_heading = RUNS)]
    pub(super) only: Vec<String>,
    /// Seed of the cases of `faults --quick` and of the contents of `codec`
    ///
    /// `faults --quick` runs each fault at each phase once. The seed selects the mode and the
    /// guest. The pages that `codec` encodes depend on the seed.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = RUNS)]
    pub(super) seed: u64,
    /// Number of cases of `faults` that run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16), help_heading = RUNS)]
    pub(super) jobs: u8,
    /// Simulate the settings of the policy aimd instead of migrations
    ///
    /// Only for the bench reaper. Each combination of thresholds, sleeps and counts of `aimd` is
    /// played on each simulated guest and compared with `predict`. The sweep needs no KVM. --only
    /// selects traces, such as bursts/4096.
    #[arg(long, conflicts_with = "rounds", help_heading = RUNS)]
    pub(super) traces: bool,
    /// Move guests to targets whose memory was never touched
    ///
    /// Only for the bench migrate. Each side also runs with a target that has allocated its memory
    /// before.
    #[arg(long, help_heading = RUNS)]
    pub(super) cold: bool,
    /// Record dirty bitmaps for `scan` in this file, and replay only them
    ///
    /// The bench moves KVM guests of 512 MiB within its process and writes the bitmap and the times
    /// of each harvest as JSON. Without this option, `scan` replays the recording that it ships.
    #[arg(long, value_name = "FILE", help_heading = RUNS)]
    pub(super) record: Option<PathBuf>,
    /// Executable of vmferry to measure
    ///
    /// The default is `vmferry` in the folder of this executable.
    #[arg(long, value_name = "PATH")]
    pub(super) vmferry: Option<PathBuf>,
    /// Write the results as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE", help_heading = RESULTS)]
    pub(super) json: Option<PathBuf>,
    /// Write the results as a page with charts to this file
    ///
    /// Only the benches reaper, free-page, density, postcopy, stalls, scale, codec, snapshot,
    /// branch and upgrade have a page.
    #[arg(long, value_name = "FILE", help_heading = RESULTS)]
    pub(super) html: Option<PathBuf>,
}
