//! Arguments of the command line. Their names are stable: scripts depend on them.

mod examples;
pub(crate) mod heading;
mod values;

use crate::arbiter::ArbiterArg;
use crate::balloon::squeeze::SqueezeArg;
use crate::branch::BranchArgs;
use crate::choices::{
    AutoConvergeArg, ChannelsArg, FreePagesArg, IncomingArg, ModeArg, OnOff, OnTimeoutArg, PaceArg,
    SwitchoverArg, UrgentArg,
};
use crate::codecs::EncodingArgs;
use crate::dirty_rate::DirtyRateArgs;
use crate::disk::{DiskArg, disk};
use crate::net::{NetArg, net};
use crate::plan::PlanArgs;
use crate::report::ReportArgs;
use crate::sandbox::{SandboxArg, SandboxArgs};
use crate::snapshot::SnapshotArgs;
use crate::tls::TlsArgs;
#[cfg(feature = "top")]
use crate::top::TopArgs;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use values::{address, dirty_ring, memory, positive_time, workload};
pub(crate) use values::{rate, size, time};
use vmferry_baselines::Policy;
use vmferry_engine::{TrackerKind, Uri};
use vmferry_guest_abi::Workload;

/// Run virtual machines, and move running ones between hosts
#[derive(Debug, Parser)]
#[command(name = "vmferry", version, propagate_version = true, after_long_help = examples::ALL)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Groups of commands in the help, with their headings.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Guests", &["run", "branch", "pause", "resume", "powerdown", "balloon", "snapshot", "record", "quit"]),
    ("Migrations", &["migrate", "upgrade", "plan", "cancel", "switch", "recover", "demo"]),
    ("Measurements", &["status", "top", "dirty-rate", "report"]),
    ("Host", &["check", "completions", "man"]),
];

/// Returns the command line. The help lists the commands in groups. clap has groups only for
/// options.
pub(crate) fn command() -> clap::Command {
    let command = Cli::command();
    let mut listed = String::new();
    for (heading, names) in GROUPS {
        listed.push_str(&format!("\x1b[1m\x1b[4m{heading}:\x1b[0m\n"));
        for sub in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            listed.push_str(&format!("  \x1b[1m{:<13}\x1b[0m{about}\n", sub.get_name()));
        }
        listed.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{listed}\x1b[1m\x1b[4mOptions:\x1b[0m\n{{options}}{{after-help}}"
    ))
}

/// Parses the command line of this process. Wrong usage, `--help` and `--version` end the process.
pub(crate) fn parse() -> Command {
    let parsed = command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed {
        Ok(cli) => cli.command.with_origin(),
        Err(error) => crate::usage::refuse(&error),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Demonstrate a migration between two processes on this host
    #[command(after_long_help = examples::DEMO)]
    Demo(DemoArgs),
    /// Run a guest, or wait for one from another host
    #[command(after_long_help = examples::RUN)]
    Run(Box<RunArgs>),
    /// Start guests that continue from one instant of a running guest
    ///
    /// The children run in processes of their own and share the memory of the parent until they
    /// write to it. The parent continues. Its memory must be a memfd (run --memory-backing memfd).
    /// If it has a disk that it can write to, use --disk-overlay.
    #[command(after_long_help = examples::BRANCH)]
    Branch(BranchArgs),
    /// Move a running guest to a target, or save it to a file
    #[command(after_long_help = examples::MIGRATE)]
    Migrate(Box<MigrateArgs>),
    /// Write a snapshot of the guest to a file while it runs
    ///
    /// The guest is paused only to save its device state. The file has the state of that instant.
    #[command(after_long_help = examples::SNAPSHOT)]
    Snapshot(SnapshotArgs),
    /// Write the working set that `run --record` has recorded
    ///
    /// The recording ends, and the guest continues to run.
    #[command(after_long_help = examples::RECORD)]
    Record(ApiArgs),
    /// Continue a guest in a new process, without copying its memory
    ///
    /// The new process runs another version of vmferry, or the same one, with the options of the
    /// old process. It has the control socket of the old process afterwards. If anything fails, the
    /// guest stays in the old process.
    #[command(after_long_help = examples::UPGRADE)]
    Upgrade(UpgradeArgs),
    /// Stop the guest's vCPUs
    #[command(after_long_help = examples::PAUSE)]
    Pause(ApiArgs),
    /// Resume the guest's vCPUs
    #[command(after_long_help = examples::RESUME)]
    Resume(ApiArgs),
    /// Press the power button of the guest
    ///
    /// A guest whose operating system handles the button shuts itself down.
    #[command(after_long_help = examples::POWERDOWN)]
    Powerdown(ApiArgs),
    /// End the guest and its process
    #[command(after_long_help = examples::QUIT)]
    Quit(ApiArgs),
    /// Show or set the memory that the guest may use
    #[command(after_long_help = examples::BALLOON)]
    Balloon(BalloonArgs),
    /// Measure how fast the guest dirties its memory
    #[command(after_long_help = examples::DIRTY_RATE)]
    DirtyRate(DirtyRateArgs),
    /// Predict a migration before it begins
    ///
    /// The plan contains the time, the downtime, the bytes, the probability that the migration ends
    /// by itself, and a recommended mode.
    #[command(after_long_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Print the state of the guest and its migration as JSON
    #[command(after_long_help = examples::STATUS)]
    Status(ApiArgs),
    /// Watch guests and their migrations on one screen
    #[cfg(feature = "top")]
    #[command(after_long_help = examples::TOP)]
    Top(TopArgs),
    /// Cancel a migration; the guest stays at the source
    #[command(after_long_help = examples::CANCEL)]
    Cancel(ApiArgs),
    /// Switch the guest to the target now; its memory follows
    ///
    /// The command works if the migration may go over to postcopy: with --mode hybrid, auto or
    /// postcopy, or with --on-timeout postcopy.
    #[command(after_long_help = examples::SWITCH)]
    Switch(ApiArgs),
    /// Reconnect a lost postcopy link, or resolve unknown ownership
    ///
    /// Without --take and --abandon, the source tries at once to reconnect a lost postcopy link.
    /// Read docs/runbook.md before you use --take or --abandon.
    #[command(after_long_help = examples::RECOVER)]
    Recover(RecoverArgs),
    /// Show what this host supports, and how to enable the rest
    #[command(after_long_help = examples::CHECK)]
    Check(CheckArgs),
    /// Make an HTML page from results of migrations and benches
    ///
    /// The results are files that `migrate --json`, `migrate --events` or `vmferry-bench --json`
    /// has written.
    #[command(after_long_help = examples::REPORT)]
    Report(ReportArgs),
    /// Print the completion script of a shell
    #[command(after_long_help = examples::COMPLETIONS)]
    Completions {
        /// Shell for which the script is written
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write a manual page for each command into a folder
    #[command(after_long_help = examples::MAN)]
    Man {
        /// Existing folder for the manual pages
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
}

impl Command {
    /// Combines the options that describe the origin of a guest.
    fn with_origin(mut self) -> Self {
        if let Self::Run(args) = &mut self
            && let Some(path) = args.from.take()
        {
            args.incoming =
                Some(if args.shared { IncomingArg::Shared(path) } else { IncomingArg::At(Uri::File(path)) });
        }
        self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GuestKind {
    /// A virtual machine under KVM
    Kvm,
    /// Threads of a process, without KVM
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
    /// The best tracker for this kind of guest
    Auto,
    /// KVM's dirty bitmap
    Log,
    /// KVM's dirty rings, for a guest started with --dirty-ring
    Ring,
    /// Write protection with userfaultfd
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
    /// Kind of guest [default: kvm if this host has KVM, else process]
    #[arg(long, value_enum, help_heading = heading::GUEST, value_name = "KIND")]
    pub(crate) guest: Option<GuestKind>,
    /// Migration mode
    #[arg(long, value_enum, default_value = "precopy", help_heading = heading::MIGRATION, value_name = "MODE")]
    pub(crate) mode: ModeArg,
    /// Guest memory, for example 512M or 4G
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = memory, help_heading = heading::GUEST)]
    pub(crate) memory: u64,
    /// Number of vCPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=254), help_heading = heading::GUEST)]
    pub(crate) cpus: u32,
    /// Memory workload of the guest, as in `vmferry run --workload`
    #[arg(long, value_name = "PATTERN[,KEY=VALUE]", default_value = "uniform,ws=256M,rate=100k,fill=random,data=768M", value_parser = workload, help_heading = heading::GUEST)]
    pub(crate) workload: Workload,
    /// Limit the link to this rate, such as 2gbit [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = heading::TRANSFER)]
    pub(crate) link: Option<u64>,
    /// No effect: the demo always compares every page on source and target
    #[arg(long, help_heading = heading::MIGRATION)]
    pub(crate) verify: bool,
    /// Tracker of the guest's writes
    #[arg(long, value_enum, default_value = "auto", help_heading = heading::TRACKING, value_name = "TRACKER")]
    pub(crate) tracker: TrackerArg,
    /// Skip pages that the guest reports as free
    #[arg(long, value_enum, default_value = "on", help_heading = heading::TRANSFER, value_name = "on|off", hide_possible_values = true)]
    pub(crate) free_pages: OnOff,
    /// Number of bulk channels
    ///
    /// `auto` is one channel for each processor, from 1 to 4. While the guest runs, only as many of
    /// them send at the same time as there are processors that the guest leaves idle, or up to
    /// two if there are none.
    #[arg(long, default_value_t, value_name = "auto|N", help_heading = heading::TRANSFER)]
    pub(crate) channels: ChannelsArg,
    /// Confinement of the two processes, as in `run --sandbox`
    #[arg(long, value_enum, default_value = "on", help_heading = heading::GUEST, value_name = "MODE")]
    pub(crate) sandbox: SandboxArg,
    /// Write the report as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackingArg {
    /// Anonymous memory
    Anonymous,
    /// A memfd, which other processes can map
    Memfd,
    /// A memfd of 2 MiB pages from the host's pool
    Hugetlbfs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PreallocArg {
    /// Allocate all guest memory before the guest runs or arrives
    On,
    /// Allocate each page when it is first written
    Off,
    /// Allocate the pages of an arriving guest shortly before they arrive
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CpuArg {
    /// All features that this host offers
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

/// Entries of each vCPU's dirty ring; `None` for the dirty log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirtyRing(pub(crate) Option<u32>);

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Kind of guest
    #[arg(long, value_enum, default_value = "kvm", help_heading = heading::GUEST, value_name = "KIND")]
    pub(crate) guest: GuestKind,
    /// Guest memory, for example 512M or 4G
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = memory, help_heading = heading::GUEST)]
    pub(crate) memory: u64,
    /// Number of vCPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=254), help_heading = heading::GUEST)]
    pub(crate) cpus: u32,
    /// Run the built-in measuring guest with this memory workload
    ///
    /// The pattern of the writes is idle, uniform, sequential or zipf:THETA. Settings follow after
    /// commas. The guest writes to memory of the size ws=256M. Memory of the size data=1G has
    /// content. Each vCPU writes rate=100k times per second. With burst=500, all vCPUs write for
    /// 500 ms and then sleep as long, in turn. With write=counter, append or whole, a write changes
    /// a counter, 272 bytes, or all of its page. The content at start is fill=random, zero, text,
    /// pointers or mix:PERCENT. Without --kernel and --workload, the measuring guest runs and is
    /// idle.
    #[arg(long, value_name = "PATTERN[,KEY=VALUE]", value_parser = workload, conflicts_with_all = ["kernel", "incoming"], help_heading = heading::GUEST)]
    pub(crate) workload: Option<Workload>,
    /// Further arguments of the measuring guest
    ///
    /// For example: "report=async hints=incremental inflate=1G,by=ranges".
    #[arg(long, value_name = "ARGS", default_value = "", requires = "workload", help_heading = heading::GUEST)]
    pub(crate) guest_args: String,
    /// Kernel to boot: a Linux bzImage (vmlinuz), or an ELF file with PVH
    #[arg(long, value_name = "FILE", conflicts_with = "incoming", help_heading = heading::GUEST)]
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk of the kernel
    ///
    /// The measuring guest does not read it, and keeps it in its memory. Use it to fill the memory
    /// with any content.
    #[arg(long, value_name = "FILE", conflicts_with = "incoming", help_heading = heading::GUEST)]
    pub(crate) initrd: Option<PathBuf>,
    /// Command line of the kernel
    #[arg(long, value_name = "TEXT", default_value = "", requires = "kernel", help_heading = heading::GUEST)]
    pub(crate) cmdline: String,
    /// Processor that the guest sees
    ///
    /// A guest with `baseline` (x86-64-v2) can move to nearly any host with a processor of the same
    /// maker. With --incoming, a guest that has seen features beyond this model is refused.
    #[arg(long, value_enum, default_value = "host", help_heading = heading::GUEST, value_name = "MODEL")]
    pub(crate) cpu: CpuArg,
    /// Kind of memory that backs the guest memory
    ///
    /// Source and target may use different kinds.
    #[arg(long, value_enum, default_value = "anonymous", help_heading = heading::MEMORY, value_name = "KIND")]
    pub(crate) memory_backing: BackingArg,
    /// Back guest memory with transparent huge pages where possible
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL", help_heading = heading::MEMORY)]
    pub(crate) huge_pages: bool,
    /// Guest memory that the host allocates before it is used
    ///
    /// A page that is written for the first time costs a page fault, which slows a guest that
    /// arrives. `on` avoids these faults, but the guest then takes all of its memory from the host.
    /// `auto` allocates only pages that the source announces.
    #[arg(long, value_enum, default_value = "auto", help_heading = heading::MEMORY, value_name = "WHEN")]
    pub(crate) prealloc: PreallocArg,
    /// Keep this host's processors awake while a guest waits for pages
    ///
    /// The option has an effect only in postcopy, and only if vmferry may write to
    /// /dev/cpu_dma_latency.
    #[arg(long, value_enum, default_value = "on", help_heading = heading::MIGRATION, value_name = "on|off", hide_possible_values = true)]
    pub(crate) stay_awake: OnOff,
    /// Entries of each vCPU's dirty ring, a power of two
    ///
    /// A guest with dirty rings can be tracked with --tracker ring, but not with --tracker log.
    #[arg(long, default_value = "off", value_name = "SIZE|off", value_parser = dirty_ring, help_heading = heading::MIGRATION)]
    pub(crate) dirty_ring: DirtyRing,
    /// Give the guest a balloon; same value at source and target
    ///
    /// Through the balloon, the guest returns free memory to the host. `vmferry balloon` can make
    /// the guest return more.
    #[arg(long, value_enum, default_value = "on", help_heading = heading::MEMORY, value_name = "on|off", hide_possible_values = true)]
    pub(crate) balloon: OnOff,
    /// Offer the balloon extension; same value at source and target
    ///
    /// The extension consists of three feature bits beyond virtio 1.2, which
    /// docs/balloon-extension.md specifies. The drivers of Linux do not accept these bits. With
    /// `off`, the balloon is exactly the device of virtio 1.2.
    #[arg(long, value_enum, default_value = "on", help_heading = heading::MEMORY, value_name = "on|off", hide_possible_values = true)]
    pub(crate) balloon_extension: OnOff,
    /// Shrink the guest while host memory is short, but not below SIZE
    ///
    /// The size of the balloon follows the memory pressure of the host. Without the option, only
    /// `vmferry balloon` changes the size.
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = heading::MEMORY)]
    pub(crate) balloon_auto: Option<u64>,
    /// Give the guest a disk: a raw file or a block device (repeatable)
    ///
    /// Source and target must have access to the same storage, and need the same --disk options in
    /// the same order.
    #[arg(long = "disk", value_name = "FILE[,readonly]", value_parser = disk, help_heading = heading::DEVICES)]
    pub(crate) disks: Vec<DiskArg>,
    /// Give the guest a network interface on this tap device (repeatable)
    ///
    /// The tap is a device of the host. With `none`, the interface has no tap, and its link is
    /// down. Without mac=, the MAC address is random. A guest that comes
    /// from another host keeps its MAC address. Source and target need the same number of --net
    /// options.
    #[arg(long = "net", value_name = "tap=NAME|none[,mac=MAC]", value_parser = net, help_heading = heading::DEVICES)]
    pub(crate) nets: Vec<NetArg>,
    /// Give the restored copy of a guest new MAC addresses
    ///
    /// Use the option with --incoming file:PATH, if `migrate --keep-running` wrote the file. Each
    /// interface gets the address in its --net option, or a random address. The driver in the guest
    /// reads the address when the driver starts next. A guest that moves keeps its addresses.
    #[arg(long, requires = "origin", help_heading = heading::DEVICES)]
    pub(crate) new_mac: bool,
    /// Give the guest a random number device; same at source and target
    #[arg(long, value_enum, default_value = "on", help_heading = heading::DEVICES, value_name = "on|off", hide_possible_values = true)]
    pub(crate) rng: OnOff,
    /// Action when the guest resets its machine
    ///
    /// `restart` reads the kernel again and starts the guest. `exit` ends the process with status
    /// 5. A guest that came from another host has no kernel on this host. Its process therefore
    /// ends in both cases.
    #[arg(long, value_enum, default_value = "restart", help_heading = heading::GUEST, value_name = "ACTION")]
    pub(crate) on_reset: OnReset,
    /// Let KVM wake device threads when the guest notifies a device
    #[arg(long, value_enum, default_value = "on", help_heading = heading::DEVICES, value_name = "on|off", hide_possible_values = true)]
    pub(crate) ioeventfd: OnOff,
    /// Create a control socket at this path
    ///
    /// Commands such as `vmferry migrate --api PATH` connect to this socket. Without the option,
    /// the process has no control socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) api: Option<PathBuf>,
    /// Serve Prometheus metrics at this address, under /metrics
    #[arg(long, value_name = "HOST:PORT", value_parser = address, help_heading = heading::METRICS)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Inherited socket that listens at the address of --metrics
    #[arg(long, hide = true, requires = "metrics", value_name = "N")]
    pub(crate) metrics_descriptor: Option<i32>,
    /// Let other hosts read the metrics, without encryption or login
    #[arg(long, requires = "metrics", help_heading = heading::METRICS)]
    pub(crate) metrics_public: bool,
    /// Serial console of the guest: stdio, or a file for the output
    ///
    /// With stdio, the guest also reads standard input, and on a terminal Ctrl-] ends vmferry.
    /// Without the option, the output is discarded.
    #[arg(long, value_name = "stdio|FILE", help_heading = heading::DEVICES)]
    pub(crate) serial: Option<String>,
    /// Wait for a guest at this address
    ///
    /// The address is tcp:HOST:PORT, unix:PATH or fd:N[,N...]. In fd:N, N is the number of an
    /// inherited socket, which listens or is connected to the source. Several numbers are sockets
    /// that are all connected to the source. file:PATH restores the guest from a file. With
    /// `defer`, the address is given later, by the command migrate-incoming of the control socket.
    #[arg(long, value_name = "URI|defer", group = "origin", help_heading = heading::MIGRATION)]
    pub(crate) incoming: Option<IncomingArg>,
    /// Restore the guest from this file
    ///
    /// Without --shared, the option has the effect of --incoming file:FILE.
    #[arg(long, value_name = "FILE", group = "origin", conflicts_with_all = ["incoming", "kernel", "workload"], help_heading = heading::MIGRATION)]
    pub(crate) from: Option<PathBuf>,
    /// Share the pages of --from FILE with other processes
    ///
    /// The guest runs at once, and its memory is the file until it writes to a page. Any number of
    /// guests can run from one file. Each of them gets a new identity. The file must not change
    /// while a guest runs from it, so only its owner may have permission to write to it.
    #[arg(long, requires = "from", help_heading = heading::MIGRATION)]
    pub(crate) shared: bool,
    /// Record the working set of the guest into this file
    ///
    /// The working set consists of the pages of the snapshot that the guest uses, in the order of
    /// their use. The file is written when the guest ends, after the time of --record-for, on the
    /// command `vmferry record`, and before the guest is migrated, branched or saved. An existing
    /// file is replaced.
    #[arg(long, value_name = "FILE", requires = "shared", conflicts_with = "prefetch", help_heading = heading::MIGRATION)]
    pub(crate) record: Option<PathBuf>,
    /// End the recording of the working set after this time
    #[arg(long, value_name = "T", requires = "record", value_parser = positive_time, help_heading = heading::MIGRATION)]
    pub(crate) record_for: Option<Duration>,
    /// Bring in the pages that an earlier run has recorded
    ///
    /// The file comes from --record of a run of the same snapshot. A thread reads and maps its
    /// pages in their order while the guest runs, so that the guest rarely waits for the disk.
    #[arg(long, value_name = "FILE", requires = "shared", help_heading = heading::MIGRATION)]
    pub(crate) prefetch: Option<PathBuf>,
    /// Take pages from this file or the files in this folder (repeatable)
    ///
    /// The source sends hashes of pages, and only pages that no file contains. A file is a snapshot
    /// or a raw image of memory, for example an old snapshot of the guest or an image of its
    /// template. Files with other contents have no effect.
    #[arg(long, value_name = "FILE|DIR", requires = "incoming", help_heading = heading::MIGRATION)]
    pub(crate) have: Vec<PathBuf>,
    /// Keep inherited socket N for a migration, as fd:N (repeatable)
    ///
    /// One command migrate or migrate-incoming of the control socket can then use the socket.
    /// Sockets that --incoming names or that a service manager passes (LISTEN_FDS) are kept without
    /// this option.
    #[arg(long = "pass-fd", value_name = "N", help_heading = heading::MIGRATION)]
    pub(crate) pass_fds: Vec<i32>,
    /// Arbiter that decides which host owns the guest after a lost link
    ///
    /// The arbiter is an etcd cluster, which must be the same for source and target. Further URLs
    /// and settings follow after commas: prefix=PREFIX, ca=FILE, cert=FILE with key=FILE, user=NAME
    /// with password=FILE.
    #[arg(long = "fence", value_name = "etcd:URL", help_heading = heading::MIGRATION)]
    pub(crate) arbiter: Option<ArbiterArg>,
    /// Allow unencrypted connections to and from other hosts
    #[arg(long, help_heading = heading::ENCRYPTION)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    /// End together with the process that started this one
    #[arg(long, hide = true)]
    pub(crate) die_with_parent: bool,
    /// Take the place of the process at --api once the guest has arrived
    #[arg(long, hide = true, requires_all = ["api", "incoming"])]
    pub(crate) successor: bool,
    /// Time without a message after which the source is given up
    #[arg(long, default_value = "10s", value_name = "T", value_parser = positive_time, help_heading = heading::MIGRATION)]
    pub(crate) peer_timeout: Duration,
}

fn switchover(text: &str) -> Result<SwitchoverArg, String> {
    if text == "unlimited" { Ok(SwitchoverArg::Unlimited) } else { rate(text).map(SwitchoverArg::AtMost) }
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// Control socket of the process whose guest moves
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Target: tcp:HOST:PORT, unix:PATH, fd:N[,N...] or file:PATH
    ///
    /// With file:PATH, the guest stops and is written into a file. In fd:N, N is the number of a
    /// socket that this command has inherited and that is connected to the target. One socket
    /// carries all channels; several sockets carry one channel each. A name instead of a number is
    /// a socket that the process of --api already has.
    pub(crate) uri: Uri,
    /// Migration mode
    #[arg(long, value_enum, default_value = "precopy", help_heading = heading::MIGRATION, value_name = "MODE")]
    pub(crate) mode: ModeArg,
    /// Path of the pages that the guest waits for in postcopy
    #[arg(long, value_enum, default_value = "dedicated", help_heading = heading::POSTCOPY, value_name = "PATH")]
    pub(crate) urgent: UrgentArg,
    /// Number of channels for pages that the guest waits for
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64), help_heading = heading::POSTCOPY)]
    pub(crate) urgent_channels: u16,
    /// Rate of the bulk transfer in postcopy
    ///
    /// `auto` keeps the queues on the link short, so that pages that the guest waits for arrive
    /// soon. `off` sends without a limit. A rate, such as 2gbit, is a fixed limit.
    #[arg(long, default_value_t, value_name = "auto|off|RATE", help_heading = heading::POSTCOPY)]
    pub(crate) pace: PaceArg,
    /// Time for which the source tries to reconnect a lost postcopy link
    ///
    /// After this time, the source reconnects the link only when you run `vmferry recover`.
    #[arg(long, value_name = "T", default_value = "60s", value_parser = time, help_heading = heading::POSTCOPY)]
    pub(crate) reconnect_for: Duration,
    /// Tracker of the guest's writes
    #[arg(long, value_enum, default_value = "auto", help_heading = heading::TRACKING, value_name = "TRACKER")]
    pub(crate) tracker: TrackerArg,
    /// Harvest policy of dirty rings
    ///
    /// `predict` is the policy of vmferry. `fixed`, `gears` and `aimd` are published policies, for
    /// comparison. `aimd-own` is `aimd` with a harvest of each ring on its own.
    #[arg(long, default_value_t, value_name = "POLICY", help_heading = heading::TRACKING)]
    pub(crate) reaper: Policy,
    /// Number of bulk channels [default: auto]
    ///
    /// `auto` is one channel for each processor, from 1 to 4. While the guest runs, only as many of
    /// them send at the same time as there are processors that the guest leaves idle, or up to
    /// two if there are none. If the target is given as several sockets (fd:N,N...), the default is
    /// the number of sockets that no other channel needs.
    #[arg(long, value_name = "auto|N", help_heading = heading::TRANSFER)]
    pub(crate) channels: Option<ChannelsArg>,
    /// Stop the guest once the expected downtime is at most T
    #[arg(long, default_value = "300ms", value_name = "T", value_parser = time, help_heading = heading::MIGRATION)]
    pub(crate) downtime_limit: Duration,
    /// Bandwidth limit, for example 2gbit or 250M/s [default: no limit]
    ///
    /// The limit also holds while the guest is stopped. It does not hold for pages that the guest
    /// waits for in postcopy.
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = heading::TRANSFER)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Bandwidth limit while the guest is stopped
    ///
    /// The default is the limit of --max-bandwidth. The prediction of the downtime assumes this
    /// rate.
    #[arg(long, value_name = "RATE|unlimited", value_parser = switchover, help_heading = heading::TRANSFER)]
    pub(crate) switchover_bandwidth: Option<SwitchoverArg>,
    /// Time limit of the migration [default: no limit]
    #[arg(long, value_name = "T", value_parser = time, help_heading = heading::MIGRATION)]
    pub(crate) timeout: Option<Duration>,
    /// Action when the time limit expires
    #[arg(long, value_enum, default_value = "cancel", help_heading = heading::MIGRATION, value_name = "ACTION")]
    pub(crate) on_timeout: OnTimeoutArg,
    /// vCPUs to slow if the guest dirties memory faster than it is sent
    ///
    /// With --mode auto, the option allows the plan to slow the guest.
    #[arg(long, value_enum, default_value = "off", help_heading = heading::MIGRATION, value_name = "VCPUS")]
    pub(crate) auto_converge: AutoConvergeArg,
    /// Predict the migration before it begins, and score the prediction
    ///
    /// The report contains the score in `plan`. --mode auto always predicts and scores.
    #[arg(long, help_heading = heading::MIGRATION)]
    pub(crate) plan: bool,
    /// Skip pages that the guest reports as free
    ///
    /// With wait=MS, the source sends no page until the guest has named all of its free pages, or
    /// until MS milliseconds have passed. A source that does not wait sends some free pages while
    /// the guest looks for them. MS is from 1 to 60000; a time such as 200ms is also accepted.
    #[arg(long, default_value = "on", help_heading = heading::TRANSFER, value_name = "on|off|wait=MS")]
    pub(crate) free_pages: FreePagesArg,
    #[command(flatten)]
    pub(crate) encoding: EncodingArgs,
    /// Make the guest drop page cache before the first page is sent
    ///
    /// The balloon takes up to SIZE of the guest's memory, or as much as the guest can spare
    /// (auto), for at most 10 s. The guest keeps a reserve, and gets the memory back when the first
    /// pass has been sent or when the migration ends.
    #[arg(long, value_name = "SIZE|auto", help_heading = heading::TRANSFER)]
    pub(crate) squeeze_cache: Option<SqueezeArg>,
    /// Compare every page on source and target while the guest is stopped
    #[arg(long, help_heading = heading::MIGRATION)]
    pub(crate) verify: bool,
    /// Hand the guest to a process of this host without copying its memory
    ///
    /// The target is at unix:PATH. It maps the memory of the guest, which needs a guest that was
    /// started with --memory-backing memfd or hugetlbfs. Source and target must run as the same
    /// user. `vmferry upgrade` does the same, and also starts the target.
    #[arg(long, help_heading = heading::MIGRATION)]
    pub(crate) local: bool,
    /// With file:PATH: copy the guest into the file, and keep it running
    #[arg(long, help_heading = heading::MIGRATION)]
    pub(crate) keep_running: bool,
    /// Arbiter that decides which host owns the guest after a lost link
    ///
    /// The arbiter is an etcd cluster, which must be the same for source and target. The default is
    /// the --fence option of the `vmferry run` whose guest moves. Further URLs and settings follow
    /// after commas: prefix=PREFIX, ca=FILE, cert=FILE with key=FILE, user=NAME with password=FILE.
    #[arg(long = "fence", value_name = "etcd:URL", help_heading = heading::MIGRATION)]
    pub(crate) arbiter: Option<ArbiterArg>,
    /// Allow an unencrypted connection to another host
    #[arg(long, help_heading = heading::ENCRYPTION)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Time without a message after which the target is given up
    #[arg(long, default_value = "10s", value_name = "T", value_parser = positive_time, help_heading = heading::MIGRATION)]
    pub(crate) peer_timeout: Duration,
    /// Write the report as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write the progress as JSON lines to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// Control socket of the process whose guest continues in a new process
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Executable of the new process [default: this executable]
    #[arg(long, value_name = "FILE")]
    pub(crate) binary: Option<PathBuf>,
    /// Append the messages of the new process to this file
    ///
    /// By default, the new process has the standard error of this command.
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Time within which the new process must be ready for the guest
    #[arg(long, default_value = "30s", value_name = "T", value_parser = positive_time)]
    pub(crate) start_timeout: Duration,
    /// Write the report as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ApiArgs {
    /// Control socket of the vmferry process
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct BalloonArgs {
    /// Control socket of the vmferry process
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Set the memory that the guest may use, for example 2G
    ///
    /// Without the option, the command only shows the state of the balloon.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) target: Option<u64>,
    /// Take back the pages that the guest reports as unused, or not
    ///
    /// The setting moves with the guest. With `off`, each report is answered at once, and its pages
    /// stay with the guest. A guest reports such a page again only after it has used the page.
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true)]
    pub(crate) reporting: Option<OnOff>,
    /// Write the answer as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Write the findings as JSON to this file (- for standard output)
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

/// Decision about the owner of the guest. Without one, `recover` takes up a lost postcopy link.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct Decision {
    /// Resume the guest at the source; the target's process must be gone
    #[arg(long, help_heading = heading::DECISION)]
    pub(crate) take: bool,
    /// End the guest at the source; it runs at the target, or is given up
    #[arg(long, help_heading = heading::DECISION)]
    pub(crate) abandon: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    #[test]
    fn command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn summaries_are_short_and_commands_have_examples() {
        let mut top = command();
        top.build();
        let own = |sub: &&Command| sub.get_name() != "help";
        for command in top.get_subcommands().filter(own).chain([&top]) {
            let name = command.get_name();
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            assert!((1..=70).contains(&about.chars().count()), "{name}: {about}");
            let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            assert!(examples.starts_with("Examples:\n"), "{name}: {examples}");
            assert!(examples.lines().all(|line| line.chars().count() <= 80), "{name}: {examples}");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                assert!((1..=70).contains(&help.chars().count()), "{name}: {}: {help}", arg.get_id());
                assert!(!help.ends_with('.'), "{name}: {}: {help}", arg.get_id());
                for value in arg.get_possible_values() {
                    let help = value.get_help().map(ToString::to_string).unwrap_or_default();
                    assert!(help.chars().count() <= 70, "{name}: {}: {help}", value.get_name());
                }
            }
        }
    }

    #[test]
    fn help_lists_every_command_once() {
        let listed: Vec<_> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        for sub in Cli::command().get_subcommands() {
            let times = listed.iter().filter(|name| **name == sub.get_name()).count();
            assert_eq!(times, 1, "{}", sub.get_name());
        }
    }

    #[test]
    fn help_fits_into_80_columns() {
        let mut top = command().term_width(80);
        top.build();
        let names: Vec<_> = top.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
        let fits = |command: &mut Command| {
            let name = command.get_name().to_owned();
            for help in [command.render_help(), command.render_long_help()] {
                for line in help.to_string().lines() {
                    assert!(line.chars().count() <= 80, "{name}: {line}");
                }
            }
        };
        fits(&mut top);
        for name in names.iter().filter(|name| *name != "help") {
            fits(&mut top.find_subcommand_mut(name).unwrap().clone().term_width(80));
        }
    }

    #[test]
    fn examples_are_valid() {
        let mut parsed = 0;
        for sub in Cli::command().get_subcommands().chain([&Cli::command()]) {
            let text = sub.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            // A line that ends with a backslash continues.
            for line in
                text.replace("\\\n", " ").lines().map(str::trim).filter(|line| line.starts_with("vmferry "))
            {
                let words = line.split_whitespace().take_while(|word| !["|", ">"].contains(word));
                match command().try_get_matches_from(words) {
                    Ok(_) => parsed += 1,
                    Err(error) if error.kind() == clap::error::ErrorKind::DisplayHelp => parsed += 1,
                    Err(error) => panic!("{line}: {error}"),
                }
            }
        }
        assert!(parsed > 20, "{parsed}");
    }
}
