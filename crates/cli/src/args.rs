//! What can be said on the command line. Names are those of the contract: others build on them.

mod values;

use crate::choices::{
    AutoConvergeArg, IncomingArg, ModeArg, OnOff, OnTimeoutArg, PaceArg, SwitchoverArg, UrgentArg,
};
use crate::dirty_rate::DirtyRateArgs;
use crate::disk::{DiskArg, disk};
use crate::fence::FenceArg;
use crate::net::net;
use crate::plan::PlanArgs;
use crate::report::ReportArgs;
use crate::sandbox::{SandboxArg, SandboxArgs};
use crate::tls::TlsArgs;
#[cfg(feature = "top")]
use crate::top::TopArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use values::{address, dirty_ring, memory, size, workload};
pub(crate) use values::{rate, time};
use vmferry_baselines::Policy;
use vmferry_engine::{TrackerKind, Uri};
use vmferry_guest_abi::Workload;
use vmferry_vmm::NetOptions;

/// Moves a running virtual machine to another host and keeps its guest fast while it does.
#[derive(Debug, Parser)]
#[command(name = "vmferry", version, about, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show it: two processes on this host, and a loaded guest moves between them
    Demo(DemoArgs),
    /// Run a guest, or wait for one from elsewhere
    Run(Box<RunArgs>),
    /// Move the guest of a running vmferry away
    Migrate(Box<MigrateArgs>),
    /// Stop the guest's vCPUs
    Pause(ApiArgs),
    /// Let the guest's vCPUs run again
    Resume(ApiArgs),
    /// Press the guest's power button: it shuts down by itself, if it listens
    Powerdown(ApiArgs),
    /// End the guest and its process
    Quit(ApiArgs),
    /// How much of its memory the guest is to have, and what it says of it
    Balloon(BalloonArgs),
    /// How fast the guest dirties its memory
    DirtyRate(DirtyRateArgs),
    /// What a migration would be like, before anything moves: time, downtime, bytes, whether it converges, and which mode to take
    Plan(PlanArgs),
    /// How the guest and its migration are doing, as JSON
    Status(ApiArgs),
    /// Watch guests and their migrations on one screen
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Call a migration off; the guest stays
    Cancel(ApiArgs),
    /// Let the guest of a hybrid migration, or of a postcopy that waits for I/O, go on at the target now, and its memory follow
    Switch(ApiArgs),
    /// Take up a link that was lost in postcopy, or decide who owns a guest of which nobody knows
    Recover(RecoverArgs),
    /// What this host can do, and how to enable the rest
    Check(CheckArgs),
    /// Make one page, to be looked at in a browser, of any results: of migrations (--json, --events) and benches (--json)
    Report(ReportArgs),
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
    /// The guest's memory, as in 512M or 4G
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: u64,
    /// Its vCPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=254))]
    pub(crate) cpus: u32,
    /// What the guest does with its memory, as in `vmferry run --workload`
    #[arg(long, value_name = "PATTERN[,KEY=VALUE]", default_value = "uniform,ws=256M,rate=100k,fill=random,data=768M", value_parser = workload)]
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
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) channels: u16,
    /// Whether the two processes confine themselves, as `run --sandbox` has it
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) sandbox: SandboxArg,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnReset {
    /// Start the guest again
    Restart,
    /// End with status 5
    Exit,
}

/// Entries of each vCPU's dirty ring; none for the dirty log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirtyRing(pub(crate) Option<u32>);

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The kind of guest
    #[arg(long, value_enum, default_value = "kvm")]
    pub(crate) guest: GuestKind,
    /// The guest's memory, as in 512M or 4G
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: u64,
    /// Its vCPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=254))]
    pub(crate) cpus: u32,
    /// Run the built-in measuring guest, which writes to its memory so: idle, uniform, sequential or zipf:THETA, then ws=256M (what is
    /// written to), data=1G (what has content), rate=100k (writes a second and vCPU), each after a comma; idle if there is no kernel either
    #[arg(long, value_name = "PATTERN[,KEY=VALUE]", value_parser = workload, conflicts_with_all = ["kernel", "incoming"])]
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
    #[arg(long, value_name = "TEXT", default_value = "", requires = "kernel")]
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
    /// Offer the balloon's extension beyond virtio 1.2; the same on both sides of a move
    ///
    /// The extension has three feature bits that no driver of Linux accepts. docs/balloon-extension.md specifies them. With `off` the
    /// balloon is the device of virtio 1.2, and nothing else.
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) balloon_extension: OnOff,
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
    /// Give a copy in a file MAC addresses other than its original's
    ///
    /// With --incoming file:PATH, for a file that `migrate --keep-running` wrote: each interface gets the address that --net gives it, or
    /// a random one. The guest's driver reads it when it starts the next time. A guest that moves keeps its addresses.
    #[arg(long, requires = "incoming")]
    pub(crate) new_mac: bool,
    /// Give it a source of random numbers; the same on both sides of a move
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) rng: OnOff,
    /// When the guest resets its machine: start it again, with its kernel read anew, or end with status 5. (A guest that came from
    /// elsewhere has no kernel here: that ends.)
    #[arg(long, value_enum, default_value = "restart")]
    pub(crate) on_reset: OnReset,
    /// Let KVM wake devices' threads by itself when the guest notifies a device, where it can
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) ioeventfd: OnOff,
    /// Control socket
    #[arg(long, value_name = "PATH")]
    pub(crate) api: Option<PathBuf>,
    /// Tell Prometheus, at this address and the path /metrics, how the guest and its migration are doing
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Let other hosts read --metrics too, unencrypted and whoever asks
    #[arg(long, requires = "metrics")]
    pub(crate) metrics_public: bool,
    /// The guest's serial console: stdio (with input; on a terminal Ctrl-] ends vmferry), or a file for its output
    #[arg(long, value_name = "stdio|FILE")]
    pub(crate) serial: Option<String>,
    /// Wait for a guest here
    ///
    /// At tcp:HOST:PORT, unix:PATH or fd:N[,N...]; or take the guest out of file:PATH. The sockets of fd: are one that listens, one that is connected to the source, or several
    /// such. With `defer`, migrate-incoming on the control socket says where to wait.
    #[arg(long, value_name = "URI|defer")]
    pub(crate) incoming: Option<IncomingArg>,
    /// Keep inherited socket N for a migration, as fd:N (repeatable)
    ///
    /// The control socket can then name it in migrate and migrate-incoming, once. Sockets that a
    /// service manager passes (LISTEN_FDS) are kept without this option, as are those that
    /// --incoming names.
    #[arg(long = "pass-fd", value_name = "N")]
    pub(crate) pass_fds: Vec<i32>,
    /// Who decides who owns a guest of which neither side can know after a lost link: an etcd, the same for both sides; in full
    /// etcd:URL, and after commas further URLs, prefix=PREFIX, ca=FILE, cert=FILE with key=FILE, user=NAME with password=FILE
    #[arg(long, value_name = "etcd:URL")]
    pub(crate) fence: Option<FenceArg>,
    /// Allow unencrypted connections from other hosts
    #[arg(long)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    /// End together with the process that started this one
    #[arg(long, hide = true)]
    pub(crate) die_with_parent: bool,
    /// How long the source may be silent before it is given up
    #[arg(long, default_value = "10s", value_name = "T", value_parser = time)]
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
    /// Target: tcp:HOST:PORT, unix:PATH, fd:N[,N...] or file:PATH
    ///
    /// With file: the guest stops and is written into the file.
    /// fd:N is a socket of this command that is connected to the target, and carries all channels.
    /// Several sockets carry one channel each. A word instead of a number names a socket that the
    /// other vmferry has.
    pub(crate) uri: Uri,
    /// How to move it
    #[arg(long, value_enum, default_value = "precopy")]
    pub(crate) mode: ModeArg,
    /// How a page that the guest waits for is sent in postcopy
    #[arg(long, value_enum, default_value = "dedicated")]
    pub(crate) urgent: UrgentArg,
    /// Channels for pages that the guest waits for
    #[arg(long, value_name = "N", default_value_t = 2)]
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
    /// Harvest policy of dirty rings: predict, or the baselines fixed, gears and aimd
    #[arg(long, default_value_t, value_name = "POLICY")]
    pub(crate) reaper: Policy,
    /// Parallel channels [default: 2, or what several sockets leave]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) channels: Option<u16>,
    /// Stop the guest once that takes no longer than this
    #[arg(long, default_value = "300ms", value_name = "T", value_parser = time)]
    pub(crate) downtime_limit: Duration,
    /// Use no more than this, for example 2gbit or 250M/s: a promise to whoever shares the link, kept while the guest is
    /// stopped too; pages that a guest waits for in postcopy come on top
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
    /// Slow a guest that dirties faster than the link carries; with --mode auto, whether that is allowed
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) auto_converge: AutoConvergeArg,
    /// Predict how it will go before it begins, and score the prediction afterwards (in the report's `plan`); --mode auto always does
    #[arg(long)]
    pub(crate) plan: bool,
    /// Leave out what the guest says is free, where it can be asked
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) free_pages: OnOff,
    /// Compare every page on both sides while the guest is stopped
    #[arg(long)]
    pub(crate) verify: bool,
    /// With file:PATH: the guest goes on here when it has been written, and the file is a copy of it
    #[arg(long)]
    pub(crate) keep_running: bool,
    /// Who decides who owns a guest of which neither side can know after a lost link: an etcd, the same as the target's; what `run` was given if it is left out; in full
    /// etcd:URL, and after commas further URLs, prefix=PREFIX, ca=FILE, cert=FILE with key=FILE, user=NAME with password=FILE
    #[arg(long, value_name = "etcd:URL")]
    pub(crate) fence: Option<FenceArg>,
    /// Allow an unencrypted connection to another host
    #[arg(long)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// How long the target may be silent before it is given up
    #[arg(long, default_value = "10s", value_name = "T", value_parser = time)]
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Cli::command().debug_assert();
    }
}
