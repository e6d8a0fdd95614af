//! Guests that move between machines within this process, which acts as source and target.

use anyhow::{Result, bail, ensure};
use std::time::{Duration, Instant};
use vmferry_engine::{
    Arrival, Listener, MigrationHandle, MigrationState, Report, Settings, SourceVm, TargetVm, Uri, migrate,
    receive,
};
use vmferry_guest_abi::{GuestArgs, State, StatsError, StatsSink, StatsSnapshot};
use vmferry_process::{ProcessGuest, ProcessOptions};
use vmferry_vmm::{Vm, VmOptions};

const PATIENCE: Duration = Duration::from_secs(60);

/// Description of the machines between which a guest moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    /// Set if the guest runs under KVM. Otherwise the guest consists of threads of this process.
    pub(super) kvm: bool,
    /// Memory of the guest in bytes.
    pub(super) memory: u64,
}

/// Machine in this process.
#[derive(Debug)]
pub(super) enum Machine {
    Kvm(Box<Vm>),
    Process(Box<ProcessGuest>),
}

impl Kind {
    /// Starts a guest, and waits until its workload runs.
    pub(super) fn running(self, load: &str) -> Result<Machine> {
        let machine = if self.kvm {
            let mut vm = Vm::new(self.vm_options())?;
            let mut args = GuestArgs::new(load.parse()?);
            (args.stats, args.cpus, args.tsc_khz) = (StatsSink::Page, Some(1), Some(vm.tsc_khz()));
            vm.load_kernel(vmferry_guest_image::ELF, &args.to_string())?;
            vm.start()?;
            Machine::Kvm(Box::new(vm))
        } else {
            let mut guest = ProcessGuest::new(ProcessOptions::new(self.memory, 1), load.parse()?)?;
            guest.start()?;
            Machine::Process(Box::new(guest))
        };
        let runs = || machine.stats().is_ok_and(|stats| stats.state >= State::Running);
        wait("the guest filling its memory", runs)?;
        Ok(machine)
    }

    /// Creates a machine that a guest can move to.
    fn waiting(self) -> Result<Machine> {
        Ok(if self.kvm {
            let mut options = self.vm_options();
            options.incoming = true;
            Machine::Kvm(Box::new(Vm::new(options)?))
        } else {
            Machine::Process(Box::new(ProcessGuest::new_incoming(ProcessOptions::new(self.memory, 1))?))
        })
    }

    /// Returns the options with which `vmferry run` creates a VM.
    fn vm_options(self) -> VmOptions {
        let mut options = VmOptions::new(self.memory, 1);
        options.rng = true;
        options
    }
}

impl Machine {
    /// Returns the machine as the source of a migration.
    pub(super) fn source(&mut self) -> &mut dyn SourceVm {
        match self {
            Self::Kvm(vm) => &mut **vm,
            Self::Process(guest) => &mut **guest,
        }
    }

    fn target(&mut self) -> &mut dyn TargetVm {
        match self {
            Self::Kvm(vm) => &mut **vm,
            Self::Process(guest) => &mut **guest,
        }
    }

    /// Returns the guest's own statistics.
    pub(super) fn stats(&self) -> Result<StatsSnapshot, StatsError> {
        match self {
            Self::Kvm(vm) => vm.handle().stats(),
            Self::Process(guest) => guest.handle().stats(),
        }
    }

    /// Asks the guest to check all its pages. Returns `false` if the guest cannot be asked now.
    pub(super) fn request_verify(&self, request: u64) -> bool {
        match self {
            Self::Kvm(vm) => vm.handle().request_verify(request),
            Self::Process(guest) => guest.handle().request_verify(request),
        }
    }
}

/// Moves the guest into a new machine of the same kind. The old machine is dropped.
pub(super) fn once(mut source: Machine, kind: Kind, settings: &Settings) -> Result<(Machine, Report)> {
    moved(source.source(), kind, settings)
}

/// Moves the guest of `source`, a machine of this `kind`, into a new machine.
pub(super) fn moved(source: &mut dyn SourceVm, kind: Kind, settings: &Settings) -> Result<(Machine, Report)> {
    let mut target = kind.waiting()?;
    let listener = Listener::bind(&Uri::Tcp { host: "127.0.0.1".into(), port: 0 }, false)?;
    let uri = listener.uri()?;
    let arrival = Arrival::new(settings.peer_timeout).stay_awake(false);
    let handle = MigrationHandle::new();
    let report = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let mut received = receive(target.target(), &listener, &arrival)?;
            let postcopy = received.postcopy.take();
            anyhow::Ok(postcopy.map(|postcopy| postcopy.finish(&listener, &arrival)))
        });
        let report = migrate(source, &uri, None, settings, &handle);
        if !matches!(&report, Ok(report) if report.state == MigrationState::Completed) {
            arrival.abandon();
        }
        match taking.join() {
            Ok(taken) => taken.and_then(|_| Ok(report?)),
            Err(_) => bail!("the target's thread panicked"),
        }
    })?;
    ensure!(
        report.state == MigrationState::Completed,
        "the migration ended as {:?}: {:?}",
        report.state,
        report.error
    );
    Ok((target, report))
}

/// Waits until `done` returns `true`.
pub(super) fn wait(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < deadline, "timed out while waiting for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
