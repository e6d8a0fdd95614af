//! Options `--sandbox` and `--jail`: confinement of `run`.

use crate::arbiter::ArbiterArg;
use crate::args::{GuestKind, RunArgs, heading};
use crate::choices::IncomingArg;
use crate::net::NetArg;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::net::ToSocketAddrs;
use std::path::{Component, Path, PathBuf};
use vmferry_confine::{Capability, ConfineError, Confinement, File, Jail, Measure, Mode, Plan, Ports, Use};
use vmferry_engine::Uri;

/// Extent of the confinement of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SandboxArg {
    /// Confine as far as the host supports it; forbidden calls fail
    #[default]
    On,
    /// Confine; a forbidden call ends the process and its guest
    Kill,
    /// Forbid nothing; the kernel logs the calls that `on` would forbid
    Log,
    /// Do not confine
    Off,
}

impl SandboxArg {
    const fn mode(self) -> Mode {
        match self {
            Self::On => Mode::On,
            Self::Kill => Mode::Kill,
            Self::Log => Mode::Log,
            Self::Off => Mode::Off,
        }
    }

    /// Returns the value as it is written on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Kill => "kill",
            Self::Log => "log",
            Self::Off => "off",
        }
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct SandboxArgs {
    /// Confine the process to the files and system calls it needs
    ///
    /// The process can use only the files, TCP ports and system calls that its options require. The
    /// confinement begins before the guest runs and before a peer can send data.
    #[arg(long, value_enum, default_value = "on", help_heading = heading::CONFINEMENT, value_name = "MODE")]
    pub(crate) sandbox: SandboxArg,
    /// Allow file:PATH and unix:PATH in this folder (repeatable)
    ///
    /// The commands migrate and migrate-incoming may then use and create files in the folder.
    #[arg(long = "migrate-dir", value_name = "DIR", help_heading = heading::CONFINEMENT)]
    migrate_dirs: Vec<PathBuf>,
    /// Use this empty folder as the root directory; needs root
    ///
    /// The new root directory contains only the files that the options name.
    #[arg(long, value_name = "DIR", requires_all = ["uid", "gid"], help_heading = heading::CONFINEMENT)]
    jail: Option<PathBuf>,
    /// User id of the process in the jail
    #[arg(long, value_name = "NUMBER", requires = "jail", help_heading = heading::CONFINEMENT)]
    uid: Option<u32>,
    /// Group id of the process in the jail
    #[arg(long, value_name = "NUMBER", requires = "jail", help_heading = heading::CONFINEMENT)]
    gid: Option<u32>,
}

impl SandboxArgs {
    /// Returns true if the process enters a jail.
    pub(crate) const fn is_jailed(&self) -> bool {
        self.jail.is_some()
    }

    /// Returns the jail that the options name.
    fn jail(&self) -> Option<Jail> {
        let (folder, uid, gid) = (self.jail.clone()?, self.uid?, self.gid?);
        Some(Jail { folder, uid, gid })
    }
}

/// Files that every process with a guest reads: the kernel's information about the process,
/// processors and memory.
const HOST: [&str; 5] =
    ["/proc", "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/kernel/mm", "/sys/fs/cgroup"];
/// Files for the resolution of host names.
const RESOLVER: [&str; 7] = [
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/run/systemd/resolve",
];
/// Lowest port that needs no capability ([`Capability::CAP_NET_BIND_SERVICE`]).
const PRIVILEGED: u16 = 1024;

/// Begins the confinement of the process, as far as its setup still works. The process must have
/// one thread.
///
/// # Errors
/// If a folder of `--migrate-dir` does not exist, or the jail cannot be entered.
pub(crate) fn begin(args: &RunArgs) -> Result<Confinement> {
    for folder in &args.sandbox.migrate_dirs {
        // A folder that is created later would stay out of reach.
        if !folder.is_dir() {
            bail!("--migrate-dir {}: there is no such folder; make it first", folder.display());
        }
    }
    let plan = plan(args);
    if plan.mode != Mode::Off || plan.jail.is_some() {
        // The resolver loads its modules on the first call, which is impossible later. This call
        // looks up no name.
        let _ = ("localhost", 0).to_socket_addrs();
    }
    let confinement = Confinement::begin(&plan)?;
    let in_force = confinement.in_force();
    if in_force.mode.forbids() {
        for (name, measure) in in_force.measures() {
            if !measure.in_force && matches!(name, "seccomp" | "landlock") {
                tracing::warn!("this process is not confined by {name}: {}", measure.detail);
            }
        }
    }
    Ok(confinement)
}

/// Calls `work`, which opens files before [`begin`], with the rights that the process has
/// afterwards: in a jail, those of its user. The process must have one thread.
///
/// # Errors
/// If `work` fails, or the process cannot take the rights of the user.
pub(crate) fn as_user<T>(args: &SandboxArgs, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match args.jail() {
        Some(jail) => jail.as_user(work).map_err(ConfineError::from)?,
        None => work(),
    }
}

/// Checks that this process can reach `uri`, the target of its guest. Outside of a jail, an
/// existing Unix socket can be reached: landlock does not restrict connections before Linux 7.1. A
/// jail contains no socket of another process.
pub(crate) fn goes_to(uri: &Uri, args: &SandboxArgs) -> Result<()> {
    match uri {
        Uri::Unix(_) if args.jail.is_none() => Ok(()),
        _ => reachable(uri, args),
    }
}

/// Checks that this process can reach `uri` to wait for a guest.
pub(crate) fn reachable(uri: &Uri, args: &SandboxArgs) -> Result<()> {
    let (Uri::File(path) | Uri::Unix(path)) = uri else { return Ok(()) };
    if !args.sandbox.mode().forbids() && args.jail.is_none() {
        return Ok(());
    }
    let named = folder_of(path);
    let Ok(folder) = named.canonicalize() else {
        bail!(
            "cannot use {uri}: the folder {} does not exist, or this vmferry cannot reach it",
            named.display()
        );
    };
    let within = |dir: &PathBuf| dir.canonicalize().is_ok_and(|dir| folder.starts_with(dir));
    let upwards = path.components().any(|part| part == Component::ParentDir);
    if !upwards && args.migrate_dirs.iter().any(within) {
        return Ok(());
    }
    bail!(
        "cannot use {uri}: this vmferry is confined to what its command line names, and the path is in no --migrate-dir; start it with \
         --migrate-dir {}, or with --sandbox off",
        folder.display()
    );
}

fn plan(args: &RunArgs) -> Plan {
    let sandbox = &args.sandbox;
    let mut plan = Plan::new(sandbox.sandbox.mode());
    plan.files = files(args);
    plan.ports = ports(args);
    plan.keep = keep(&plan.ports, sandbox.jail.is_some());
    plan.jail = sandbox.jail();
    plan
}

/// Returns all files that the command line names, and those that every guest needs.
fn files(args: &RunArgs) -> Vec<File> {
    let read = |path: &Path| File::new(path, Use::Read);
    let mut files: Vec<_> = HOST.into_iter().chain(RESOLVER).map(|path| read(path.as_ref())).collect();
    // A panic reads the executable for its backtrace.
    files.extend(std::env::current_exe().ok().map(|path| read(&path)));
    files.push(File::new("/dev/null", Use::Device));
    files.push(File::new("/dev/userfaultfd", Use::Device));
    if bool::from(args.stay_awake) {
        files.push(File::new("/dev/cpu_dma_latency", Use::Write));
    }
    if args.guest == GuestKind::Kvm {
        files.push(File::new("/dev/kvm", Use::Device));
    }
    if args.nets.iter().any(NetArg::has_tap) {
        files.push(File::new("/dev/net/tun", Use::Device));
    }
    let certificates = args.tls.files().chain(args.arbiter.iter().flat_map(ArbiterArg::files));
    files.extend(args.kernel.iter().chain(&args.initrd).chain(certificates).map(|path| read(path)));
    files.extend(args.disks.iter().map(|disk| File::new(disk.path(), disk.use_for())));
    let serial = args.serial.as_deref().filter(|to| *to != "stdio");
    files.extend(serial.map(|path| File::new(path, Use::Output)));
    files.extend(args.api.iter().map(|path| File::new(folder_of(path), Use::Sockets)));
    match &args.incoming {
        Some(IncomingArg::At(Uri::Unix(path))) => files.push(File::new(folder_of(path), Use::Sockets)),
        Some(IncomingArg::At(Uri::File(path)) | IncomingArg::Shared(path)) => {
            files.push(read(path));
            files.extend(
                vmferry_engine::snapshot_bases(path).into_iter().map(|base| File::new(base, Use::Read)),
            );
        }
        _ => {}
    }
    files.extend(args.prefetch.iter().map(|path| read(path)));
    files.extend(args.record.iter().map(|path| File::new(path, Use::Output)));
    files.extend(args.sandbox.migrate_dirs.iter().map(|path| File::new(path, Use::Folder)));
    files
}

fn ports(args: &RunArgs) -> Ports {
    let incoming = match &args.incoming {
        Some(IncomingArg::Defer) => return Ports::Any,
        Some(IncomingArg::At(Uri::Tcp { port, .. })) => Some(*port),
        _ => None,
    };
    Ports::Only(incoming.into_iter().chain(args.metrics.map(|address| address.port())).collect())
}

/// Returns the capabilities that a process of root keeps. With `CAP_SYS_PTRACE`, a process could
/// leave its jail through another process of the host.
fn keep(ports: &Ports, jailed: bool) -> Vec<vmferry_confine::KeptCapability> {
    let mut keep = Vec::new();
    if !jailed && !Path::new("/dev/userfaultfd").exists() {
        keep.push((Capability::CAP_SYS_PTRACE, "(for userfaultfd, because /dev/userfaultfd is missing)"));
    }
    let low = |port: &u16| (1..PRIVILEGED).contains(port);
    if matches!(ports, Ports::Only(ports) if ports.iter().any(low)) || *ports == Ports::Any {
        keep.push((Capability::CAP_NET_BIND_SERVICE, "(to listen at a port below 1024)"));
    }
    keep
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Returns the confinement that this host supports, for `check`.
pub(crate) fn available() -> [Result<String, String>; 2] {
    let result = |measure: Measure| if measure.in_force { Ok(measure.detail) } else { Err(measure.detail) };
    vmferry_confine::available().map(result)
}
