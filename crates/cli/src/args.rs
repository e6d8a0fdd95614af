//! What can be said on the command line. Names are those of the contract: others build on them.

use crate::choices::{AutoConvergeArg, ModeArg, OnOff, OnTimeoutArg, PaceArg, SwitchoverArg, UrgentArg};
use crate::disk::{DiskArg, disk};
use crate::net::net;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use vmferry_dirty::Policy;
use vmferry_engine::{TrackerKind, Uri};
use vmferry_guest_abi::Workload;
use vmferry_vmm::NetOptions;

/// Moves a running virtual machine to another host and keeps its guest fast while it does.
#[derive(Debug, Parser)]
#[command(version, about, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show it: two processes on this host, and a loaded guest moves between them
    Demo(DemoArgs),
    /// Run a guest, or wait for one from elsewhere
    Run(RunArgs),
    /// Move the guest of a running vmferry away
    Migrate(MigrateArgs),
    /// Stop the guest's vCPUs
    Pause(ApiArgs),
    /// Let the guest's vCPUs run again
    Resume(ApiArgs),
    /// End the guest and its process
    Quit(ApiArgs),
    /// How much of its memory the guest is to have, and what it says of it
    Balloon(BalloonArgs),
    /// How fast the guest dirties its memory
    DirtyRate(DirtyRateArgs),
    /// How the guest and its migration are doing, as JSON
    Status(ApiArgs),
    /// Call a migration off; the guest stays
    Cancel(ApiArgs),
    /// Let a hybrid migration's guest go on at the target now, and the rest of its memory follow
    Switch(ApiArgs),
    /// Take up a link that was lost in postcopy, or decide who owns a guest of which nobody knows
    Recover(RecoverArgs),
    /// What this host can do, and how to enable the rest
    Check(CheckArgs),
    /// Measure: ours, QEMU and the floor in one run
    Bench(BenchArgs),
    /// Print what makes a shell complete vmferry's words
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, one for each command, into a folder
    Man {
        /// The folder, which must exist
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
    #[command(name = vmferry_bench::floor::RECEIVER_SUBCOMMAND, hide = true)]
    FloorReceiver {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    #[command(name = vmferry_bench::rtt::SOURCE_SUBCOMMAND, hide = true)]
    RttSource { arguments: Vec<String> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GuestKind {
    /// A virtual machine under KVM
    Kvm,
    /// Threads of a process: needs no KVM
    Process,
}

impl std::fmt::Display for GuestKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Process => "process",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrackerArg {
    /// What the guest's kind does best
    Auto,
    /// KVM's dirty bitmap
    Log,
    /// KVM's dirty rings, of a guest that was started with --dirty-ring
    Ring,
    /// Write protection by userfaultfd
    Wp,
}

impl TrackerArg {
    pub(crate) fn kind(self) -> Option<TrackerKind> {
        match self {
            Self::Auto => None,
            Self::Log => Some(TrackerKind::Log),
            Self::Ring => Some(TrackerKind::Ring),
            Self::Wp => Some(TrackerKind::Wp),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The kind of guest; kvm if this host has it
    #[arg(long, value_enum)]
    pub(crate) guest: Option<GuestKind>,
    /// How to move it
    #[arg(long, value_enum, default_value = "precopy")]
    pub(crate) mode: ModeArg,
    /// The guest's memory
    #[arg(long, default_value = "1G", value_parser = size)]
    pub(crate) memory: u64,
    /// Its vCPUs
    #[arg(long, default_value_t = 1)]
    pub(crate) cpus: u32,
    /// What the guest does with its memory
    #[arg(long, default_value = "uniform,ws=256M,rate=100k,fill=random,data=768M", value_parser = workload)]
    pub(crate) workload: Workload,
    /// Pretend that the link is no faster than this, for example 2gbit
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) link: Option<u64>,
    /// Compare every page on both sides (the demo always does; here for symmetry with migrate)
    #[arg(long)]
    pub(crate) verify: bool,
    /// How the guest's writes are found
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) tracker: TrackerArg,
    /// Leave out what the guest says is free, where it can be asked
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) free_pages: OnOff,
    /// Parallel channels
    #[arg(long, default_value_t = 2)]
    pub(crate) channels: u16,
    /// Write the report as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackingArg {
    /// Anonymous memory
    Anonymous,
    /// A memfd, which other processes can map
    Memfd,
    /// A memfd of 2 MiB pages out of the host's pool; the other side of a migration may do otherwise
    Hugetlbfs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CpuArg {
    /// All that this host can offer
    Host,
    /// x86-64-v2: no AVX, no AES
    Baseline,
}

/// Entries of each vCPU's dirty ring; none for the dirty log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirtyRing(pub(crate) Option<u32>);

fn dirty_ring(text: &str) -> Result<DirtyRing, String> {
    if text == "off" {
        return Ok(DirtyRing(None));
    }
    let entries = text.parse().map_err(|_| format!("'{text}' is neither off nor a number of entries"))?;
    Ok(DirtyRing(Some(entries)))
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The kind of guest
    #[arg(long, value_enum, default_value = "kvm")]
    pub(crate) guest: GuestKind,
    /// The guest's memory
    #[arg(long, default_value = "1G", value_parser = size)]
    pub(crate) memory: u64,
    /// Its vCPUs
    #[arg(long, default_value_t = 1)]
    pub(crate) cpus: u32,
    /// Run the built-in measuring guest with this workload
    #[arg(long, value_parser = workload, conflicts_with_all = ["kernel", "incoming"])]
    pub(crate) workload: Option<Workload>,
    /// What else the measuring guest is told, as in report=async hints=incremental inflate=1G,by=ranges
    #[arg(long, value_name = "ARGS", default_value = "", requires = "workload")]
    pub(crate) guest_args: String,
    /// Boot this kernel: a Linux bzImage (vmlinuz), or an ELF file with a PVH entry
    #[arg(long, value_name = "FILE", conflicts_with = "incoming")]
    pub(crate) kernel: Option<PathBuf>,
    /// The kernel's initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    /// The kernel's command line
    #[arg(long, default_value = "", requires = "kernel")]
    pub(crate) cmdline: String,
    /// Which processor the guest is shown: all that this host can offer, or x86-64-v2, with which it moves to nearly any host of the same
    /// maker; with --incoming, the most that a guest may have been shown
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) cpu: CpuArg,
    /// What guest memory is made of
    #[arg(long, value_enum, default_value = "anonymous")]
    pub(crate) memory_backing: BackingArg,
    /// Ask for transparent huge pages
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) huge_pages: bool,
    /// Keep this host's processors awake while a guest waits for single pages (postcopy), where this user may ask for that
    /// (/dev/cpu_dma_latency)
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) stay_awake: OnOff,
    /// Give each vCPU a dirty ring of so many entries, a power of two; the guest then has no dirty log
    #[arg(long, default_value = "off", value_name = "SIZE|off", value_parser = dirty_ring)]
    pub(crate) dirty_ring: DirtyRing,
    /// Give it a balloon, by which it gives memory back and is asked for it; the same on both sides of a move
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) balloon: OnOff,
    /// Let the balloon follow the host: take memory while the host is short of it, but leave the guest at least this much
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) balloon_auto: Option<u64>,
    /// Give it a disk: a raw file or a block device, in storage that both sides of a move reach; may be given several times, the same
    /// on both sides
    #[arg(long = "disk", value_name = "FILE[,readonly]", value_parser = disk)]
    pub(crate) disks: Vec<DiskArg>,
    /// Give it a network interface at this tap of the host's, with this MAC address (random if left out; a guest that comes from elsewhere
    /// keeps its own); may be given several times, as often on both sides of a move
    #[arg(long = "net", value_name = "tap=NAME[,mac=MAC]", value_parser = net)]
    pub(crate) nets: Vec<NetOptions>,
    /// Give it a source of random numbers; the same on both sides of a move
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) rng: OnOff,
    /// Control socket
    #[arg(long, value_name = "PATH")]
    pub(crate) api: Option<PathBuf>,
    /// The guest's serial console: stdio (with input; on a terminal Ctrl-] ends vmferry), or a file for its output
    #[arg(long, value_name = "stdio|FILE")]
    pub(crate) serial: Option<String>,
    /// Wait for a guest at tcp:HOST:PORT, unix:PATH or fd:N (a listening socket), or take it out of file:PATH
    #[arg(long, value_name = "URI")]
    pub(crate) incoming: Option<Uri>,
    /// Allow unencrypted connections from other hosts
    #[arg(long)]
    pub(crate) insecure: bool,
    /// End together with the process that started this one
    #[arg(long, hide = true)]
    pub(crate) die_with_parent: bool,
    /// How long the source may be silent before it is given up
    #[arg(long, default_value = "10s", value_parser = time)]
    pub(crate) peer_timeout: Duration,
}

fn switchover(text: &str) -> Result<SwitchoverArg, String> {
    if text == "unlimited" { Ok(SwitchoverArg::Unlimited) } else { rate(text).map(SwitchoverArg::AtMost) }
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// Control socket of the vmferry whose guest is to be moved
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Where to: tcp:HOST:PORT, unix:PATH, or file:PATH (the guest stops and is written there)
    pub(crate) uri: Uri,
    /// How to move it
    #[arg(long, value_enum, default_value = "precopy")]
    pub(crate) mode: ModeArg,
    /// How a page that the guest waits for is sent in postcopy
    #[arg(long, value_enum, default_value = "dedicated")]
    pub(crate) urgent: UrgentArg,
    /// Channels for pages that the guest waits for
    #[arg(long, default_value_t = 2)]
    pub(crate) urgent_channels: u16,
    /// How fast the rest is sent meanwhile: auto keeps the queues on the way short; off; or a rate such as 2gbit
    #[arg(long, default_value_t, value_name = "auto|off|RATE")]
    pub(crate) pace: PaceArg,
    /// How long a link that is lost in postcopy is tried to be taken up again before that needs `vmferry recover`
    #[arg(long, value_name = "T", default_value = "60s", value_parser = time)]
    pub(crate) reconnect_for: Duration,
    /// How the guest's writes are found
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) tracker: TrackerArg,
    /// Who says when dirty rings are harvested: fixed, gears, aimd or predict
    #[arg(long, default_value_t, value_name = "POLICY")]
    pub(crate) reaper: Policy,
    /// Parallel channels
    #[arg(long, default_value_t = 2)]
    pub(crate) channels: u16,
    /// Stop the guest once that takes no longer than this
    #[arg(long, default_value = "300ms", value_parser = time)]
    pub(crate) downtime_limit: Duration,
    /// Use no more than this, for example 2gbit or 250M/s: a promise to whoever shares the link, kept while the guest is
    /// stopped too
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) max_bandwidth: Option<u64>,
    /// What holds instead while the guest is stopped; a rate also tells the prediction of the downtime what to count on
    #[arg(long, value_name = "RATE|unlimited", value_parser = switchover)]
    pub(crate) switchover_bandwidth: Option<SwitchoverArg>,
    /// How long the migration may take
    #[arg(long, value_name = "T", value_parser = time)]
    pub(crate) timeout: Option<Duration>,
    /// What to do then
    #[arg(long, value_enum, default_value = "cancel")]
    pub(crate) on_timeout: OnTimeoutArg,
    /// Slow a guest that dirties faster than the link carries
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) auto_converge: AutoConvergeArg,
    /// Leave out what the guest says is free, where it can be asked
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) free_pages: OnOff,
    /// Compare every page on both sides while the guest is stopped
    #[arg(long)]
    pub(crate) verify: bool,
    /// With file:PATH: the guest goes on here when it has been written, and the file is a copy of it
    #[arg(long)]
    pub(crate) keep_running: bool,
    /// Allow an unencrypted connection to another host
    #[arg(long)]
    pub(crate) insecure: bool,
    /// How long the target may be silent before it is given up
    #[arg(long, default_value = "10s", value_parser = time)]
    pub(crate) peer_timeout: Duration,
    /// Write the report as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write one JSON object a line as it goes to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ApiArgs {
    /// Control socket of the vmferry that is meant
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct BalloonArgs {
    /// Control socket of the vmferry whose guest is meant
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Let the guest have this much of its memory
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) target: Option<u64>,
    /// Write the answer as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DirtyRateArgs {
    /// Control socket of the vmferry whose guest is measured
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Count the pages written within each of these; all begin together
    #[arg(
        long,
        value_name = "T,T,..",
        value_delimiter = ',',
        default_value = "50ms,100ms,200ms,500ms,1s,2s",
        value_parser = time
    )]
    pub(crate) windows: Vec<Duration>,
    /// How the guest's writes are found
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) tracker: TrackerArg,
    /// Who says when dirty rings are harvested
    #[arg(long, default_value_t, value_name = "POLICY")]
    pub(crate) reaper: Policy,
    /// Write the result as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Write what was found as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    /// Control socket of the source
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    #[command(flatten)]
    pub(crate) decision: Decision,
}

/// Neither: take up the lost link of a postcopy again.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct Decision {
    /// The guest does not run on the target, and that process is gone: run it here
    #[arg(long)]
    pub(crate) take: bool,
    /// The guest runs on the target, or is to be given up: end it here
    #[arg(long)]
    pub(crate) abandon: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchName {
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
    /// The floor of a remote fault: round trips of a page, alone and beside bulk, and a local fault
    Rtt,
    /// Everything there is
    All,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Which
    #[arg(value_enum)]
    pub(crate) name: BenchName,
    /// Fewer repeats
    #[arg(long)]
    pub(crate) quick: bool,
    /// So many repeats
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) rounds: Option<u16>,
    /// Only cases and sides whose names have this in them, as in idle/floor-2; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,
    /// Write the results as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write the results as a page with charts to this file (not scan, migrate and rtt)
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    vmferry_guest_abi::parse_size(text)
        .ok_or_else(|| format!("'{text}' is no size; write bytes, or 64K, 256M, 4G, 1T (powers of 1024)"))
}

fn workload(text: &str) -> Result<Workload, String> {
    text.parse().map_err(|error: vmferry_guest_abi::WorkloadError| error.to_string())
}

fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 300ms, 5s or 2m"))
}

/// A rate in bytes a second: `2gbit`, `500mbit` (decimal bits), `250M/s`, `1.5G/s` (decimal bytes).
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is no rate; write 2gbit, 500mbit, 250M/s or 1G/s");
    let lower = text.to_ascii_lowercase();
    let (number, bits) = match (lower.strip_suffix("bit"), lower.strip_suffix("/s")) {
        (Some(number), _) => (number, true),
        (_, Some(number)) => (number, false),
        _ => return Err(wrong()),
    };
    let number = number.strip_suffix('b').filter(|_| !bits).unwrap_or(number);
    let split = number.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(number.len());
    let factor = match &number[split..] {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        "t" => 1e12,
        _ => return Err(wrong()),
    };
    let value: f64 = number[..split].parse().map_err(|_| wrong())?;
    let bytes = value * factor / if bits { 8.0 } else { 1.0 };
    if !(1.0..1e15).contains(&bytes) {
        return Err(format!("{text} is out of range: between one byte and a petabyte a second"));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be between 1 and 1e15"
    )]
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn rates_are_bits_or_bytes() {
        assert_eq!(rate("2gbit"), Ok(250_000_000));
        assert_eq!(rate("250M/s"), Ok(250_000_000));
        assert_eq!(rate("250MB/s"), Ok(250_000_000));
        assert_eq!(rate("1.5G/s"), Ok(1_500_000_000));
        assert_eq!(rate("800bit"), Ok(100));
        for wrong in ["", "2g", "gbit", "-1gbit", "0gbit", "nanbit", "infbit", "1xbit", "2e30gbit", "é/s"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
