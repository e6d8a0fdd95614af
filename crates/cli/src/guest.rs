//! One interface for both kinds of machines.

use crate::Status;
use crate::api::GuestPlace;
use crate::args::{BackingArg, CpuArg, GuestKind, PreallocArg, RunArgs};
use crate::choices::OnOff;
use crate::console;
use crate::disk::DiskArg;
use crate::usage::{Usage, wrong_usage};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use vmferry_baselines::Policy;
use vmferry_engine::{RunState, SourceVm, TargetVm};
use vmferry_guest_abi::{GuestArgs, PANIC_EXIT, StatsError, StatsSink, StatsSnapshot, Workload};
use vmferry_process::{ProcessGuest, ProcessHandle, ProcessOptions};
use vmferry_vmm::{
    Backing, BalloonHandle, CpuChoice, Exit, Kernel, NetOptions, Prealloc, SerialSink, Vm, VmHandle,
    VmOptions,
};

/// A machine. Its owner is the thread that runs it.
pub(crate) enum Machine {
    Kvm(Box<Vm>),
    Process(Box<ProcessGuest>),
}

/// View of a machine for other threads.
#[derive(Clone)]
pub(crate) enum Probe {
    Kvm(VmHandle),
    Process(ProcessHandle),
}

impl Machine {
    /// Makes the machine that `args` describe: loaded but not started, or empty for an arriving
    /// guest.
    /// `nets` are its network interfaces.
    pub(crate) fn build(args: &RunArgs, nets: Vec<NetOptions>) -> Result<Self> {
        match args.guest {
            GuestKind::Kvm => Self::build_kvm(args, nets),
            GuestKind::Process => Self::build_process(args),
        }
    }

    fn build_kvm(args: &RunArgs, nets: Vec<NetOptions>) -> Result<Self> {
        let mut options = VmOptions::new(args.memory, args.cpus);
        options.backing = match args.memory_backing {
            BackingArg::Anonymous => Backing::Anonymous,
            BackingArg::Memfd => Backing::Memfd,
            BackingArg::Hugetlbfs => Backing::HugePages,
        };
        options.cpu = match args.cpu {
            CpuArg::Host => CpuChoice::Host,
            CpuArg::Baseline => CpuChoice::Baseline,
        };
        options.huge_pages = args.huge_pages;
        options.prealloc = prealloc(args);
        options.incoming = args.incoming.is_some();
        options.dirty_ring = args.dirty_ring.0;
        options.balloon = args.balloon == OnOff::On;
        options.balloon_extension = args.balloon_extension == OnOff::On;
        options.rng = args.rng == OnOff::On;
        options.kicks = args.ioeventfd == OnOff::On;
        options.disks = args.disks.iter().map(DiskArg::options).collect();
        options.nets = nets;
        options.new_macs = args.new_mac;
        options.serial = serial(args.serial.as_deref(), args.successor)?;
        let mut vm = Vm::new(options)?;
        for note in vm.notes() {
            tracing::warn!("{note}");
        }
        if args.incoming.is_none() {
            load(&mut vm, args)?;
        }
        Ok(Self::Kvm(Box::new(vm)))
    }

    /// Starts a guest again that has reset its machine.
    pub(crate) fn restart(&mut self, args: &RunArgs) -> Result<()> {
        let Self::Kvm(vm) = self else { bail!("a process guest has no machine to reset") };
        vm.reset()?;
        load(vm, args)?;
        Ok(vm.start()?)
    }

    fn build_process(args: &RunArgs) -> Result<Self> {
        let mut options = ProcessOptions::new(args.memory, args.cpus);
        options.memfd = args.memory_backing == BackingArg::Memfd;
        options.huge_pages = args.huge_pages;
        options.prealloc = prealloc(args);
        let guest = if args.incoming.is_some() {
            ProcessGuest::new_incoming(options)?
        } else {
            ProcessGuest::new(options, wanted(args))?
        };
        Ok(Self::Process(Box::new(guest)))
    }

    /// Sets the harvest policy of dirty rings for later migrations.
    pub(crate) fn set_reaper(&mut self, policy: Policy) {
        match self {
            Self::Kvm(vm) => vm.set_reaper(Arc::new(policy)),
            Self::Process(_) => {}
        }
    }

    /// Sets the files that become copies of the disks at a branch.
    pub(crate) fn set_disk_copies(&mut self, copies: Vec<OwnedFd>) {
        match self {
            Self::Kvm(vm) => vm.set_disk_copies(copies),
            // A process guest has no disks.
            Self::Process(_) => drop(copies),
        }
    }

    pub(crate) fn start(&mut self) -> Result<()> {
        match self {
            Self::Kvm(vm) => vm.start()?,
            Self::Process(guest) => guest.start()?,
        }
        Ok(())
    }

    /// Returns the state that the operator has requested.
    pub(crate) fn run_state(&self) -> RunState {
        match self {
            Self::Kvm(vm) => vm.run_state(),
            Self::Process(guest) => guest.run_state(),
        }
    }

    /// Pauses or resumes the guest, as the operator has requested.
    pub(crate) fn set_run_state(&mut self, wanted: RunState) -> Result<()> {
        match self {
            Self::Kvm(vm) => vm.set_run_state(wanted)?,
            Self::Process(guest) => guest.set_run_state(wanted)?,
        }
        Ok(())
    }

    /// Returns the place of a guest that is not being migrated.
    pub(crate) fn place(&self) -> GuestPlace {
        match self.run_state() {
            RunState::Running => GuestPlace::Running,
            RunState::Paused => GuestPlace::Paused,
        }
    }

    pub(crate) fn source(&mut self) -> &mut dyn SourceVm {
        match self {
            Self::Kvm(vm) => &mut **vm,
            Self::Process(guest) => &mut **guest,
        }
    }

    pub(crate) fn target(&mut self) -> &mut dyn TargetVm {
        match self {
            Self::Kvm(vm) => &mut **vm,
            Self::Process(guest) => &mut **guest,
        }
    }

    pub(crate) fn probe(&self) -> Probe {
        match self {
            Self::Kvm(vm) => Probe::Kvm(vm.handle()),
            Self::Process(guest) => Probe::Process(guest.handle()),
        }
    }

    pub(crate) fn stop(&mut self) {
        match self {
            Self::Kvm(vm) => vm.stop(),
            Self::Process(guest) => guest.stop(),
        }
    }
}

impl Probe {
    /// Returns the statistics that the guest reports.
    pub(crate) fn stats(&self) -> Result<StatsSnapshot, StatsError> {
        match self {
            Self::Kvm(vm) => vm.stats(),
            Self::Process(guest) => guest.stats(),
        }
    }

    /// Returns the handle of a KVM guest; `None` for a process guest.
    pub(crate) fn kvm(&self) -> Option<&VmHandle> {
        match self {
            Self::Kvm(vm) => Some(vm),
            Self::Process(_) => None,
        }
    }

    /// Asks the guest to check all its pages; see `StatsSnapshot::verified`. Returns `false` if the
    /// guest cannot be asked now.
    pub(crate) fn request_verify(&self, request: u64) -> bool {
        match self {
            Self::Kvm(vm) => vm.request_verify(request),
            Self::Process(guest) => guest.request_verify(request),
        }
    }

    /// Returns the guest's balloon, if it has one.
    pub(crate) fn balloon(&self) -> Option<BalloonHandle> {
        match self {
            Self::Kvm(vm) => vm.balloon(),
            Self::Process(_) => None,
        }
    }

    /// Returns how the guest ended, as text, and the exit status for that end; `None` while the
    /// guest exists.
    pub(crate) fn exit(&self) -> Option<(String, Status)> {
        match self {
            Self::Kvm(vm) => {
                let exit = vm.exit()?;
                let status = match &exit {
                    exit if exit.is_clean() => Status::Done,
                    exit if exit.is_reset() => Status::Reset,
                    _ => Status::Failed,
                };
                let how = match &exit {
                    Exit::PoweredOff(PANIC_EXIT) => {
                        "it panicked, and its serial console says why: run it with --serial stdio".to_owned()
                    }
                    Exit::PoweredOff(code) => format!("with code {code}"),
                    exit => exit.to_string(),
                };
                Some((how, status))
            }
            Self::Process(_) => None,
        }
    }
}

/// Checks that `args` name nothing that a process guest does not have.
///
/// # Errors
/// The first such option, as wrong usage.
pub(crate) fn fits_a_process(args: &RunArgs) -> Result<()> {
    let hugetlbfs = args.memory_backing == BackingArg::Hugetlbfs;
    for (given, option, lacks) in [
        (args.kernel.is_some(), "--kernel", "boots no kernel"),
        (args.initrd.is_some(), "--initrd", "has no initrd"),
        (!args.guest_args.is_empty(), "--guest-args", "has no allocator and no balloon"),
        (args.dirty_ring.0.is_some(), "--dirty-ring", "has no vCPUs, and therefore no dirty rings"),
        (hugetlbfs, "--memory-backing hugetlbfs", "takes no pages out of the host's pool"),
        (!args.disks.is_empty(), "--disk", "has no disks"),
        (!args.nets.is_empty(), "--net", "has no network interfaces"),
        (args.new_mac, "--new-mac", "has no network interfaces"),
        (args.serial.is_some(), "--serial", "has no serial console"),
        (args.balloon_auto.is_some(), "--balloon-auto", "has no balloon"),
    ] {
        if given {
            wrong_usage!("a process guest {lacks}; omit {option}, or use --guest kvm");
        }
    }
    Ok(())
}

/// Loads the kernel and the initrd of `args`, or the measuring guest.
fn load(vm: &mut Vm, args: &RunArgs) -> Result<()> {
    let initrd = args.initrd.as_ref().map(|path| read(path, "initrd", args.memory)).transpose()?;
    if let Some(path) = &args.kernel {
        let image = read(path, "kernel", args.memory)?;
        let kernel = Kernel { image: &image, initrd: initrd.as_deref(), cmdline: &args.cmdline };
        return vm.load(&kernel).with_context(|| path.display().to_string());
    }
    let line = format!("workload={} {}", wanted(args), args.guest_args);
    let mut guest: GuestArgs = line.parse().map_err(|error| Usage(format!("--guest-args: {error}")))?;
    guest.stats = StatsSink::Page;
    guest.cpus = Some(args.cpus);
    guest.tsc_khz = Some(vm.tsc_khz());
    let (image, cmdline) = (vmferry_guest_image::ELF, guest.to_string());
    Ok(vm.load(&Kernel { image, initrd: initrd.as_deref(), cmdline: &cmdline })?)
}

fn prealloc(args: &RunArgs) -> Prealloc {
    match args.prealloc {
        PreallocArg::On => Prealloc::On,
        PreallocArg::Off => Prealloc::Off,
        PreallocArg::Auto => Prealloc::Auto,
    }
}

fn wanted(args: &RunArgs) -> Workload {
    args.workload.unwrap_or_else(|| Workload::new(vmferry_guest_abi::Pattern::Idle))
}

/// Reads the file at `path`. A file that is larger than the guest's memory is refused, so no more
/// bytes are read.
fn read(path: &Path, what: &str, memory: u64) -> Result<Vec<u8>> {
    let failed = || format!("cannot read the {what} {}", path.display());
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).with_context(failed)?;
    file.take(memory.saturating_add(1)).read_to_end(&mut bytes).with_context(failed)?;
    if bytes.len() as u64 > memory {
        bail!("the {what} {} is larger than the guest's memory ({} MiB)", path.display(), memory >> 20);
    }
    Ok(bytes)
}

/// Returns the output of the serial console. With `append`, a file keeps what an earlier process of
/// the same guest has written.
fn serial(to: Option<&str>, append: bool) -> Result<SerialSink> {
    Ok(match to {
        None => SerialSink::discard(),
        Some("stdio") => SerialSink::new(console::Output::start(std::io::stdout())?),
        Some(path) => {
            // The output of a console may be confidential, so only this user can read the file.
            let mut options = std::fs::File::options();
            options.write(true).create(true).append(append).truncate(!append).mode(0o600);
            let file = options.open(path);
            let file = file.with_context(|| format!("cannot write serial output to {path}"))?;
            match file.metadata()?.is_file() {
                true => SerialSink::new(file),
                // A named pipe or a terminal has a reader, which may stall.
                false => SerialSink::new(console::Output::start(file)?),
            }
        }
    })
}

/// Returns why this host cannot run a KVM guest; `None` if it can.
pub(crate) fn no_kvm() -> Option<String> {
    vmferry_vmm::open_kvm().err().map(|error| error.to_string())
}

/// Probe that the threads of the control socket share.
pub(crate) type SharedProbe = Arc<Probe>;
