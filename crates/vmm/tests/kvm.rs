//! Real guests on real KVM: booting, pausing, and moving one by hand.
//!
//! Every test prints `KVM: ran`, or `KVM: not run` and why.

use std::time::{Duration, Instant};
use vmferry_guest_abi::{GuestArgs, State, StatsSink, StatsSnapshot, Workload};
use vmferry_vmm::{Captured, Error, SerialSink, Vm, VmHandle, VmOptions, open_kvm};

/// How long a guest may take for anything: hosts under test do other things too.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this host has a KVM that may be used. Says so either way.
fn kvm() -> bool {
    match open_kvm() {
        Ok(_) => {
            println!("KVM: ran");
            true
        }
        Err(error @ (Error::NoKvm | Error::NoPermission)) => {
            println!("KVM: not run: {error}");
            false
        }
        Err(error) => panic!("KVM is there and cannot be used: {error}"),
    }
}

struct Guest {
    vm: Vm,
    handle: VmHandle,
    serial: Captured,
}

impl Guest {
    fn new(memory: u64, cpus: u32, change: impl FnOnce(&mut VmOptions)) -> Self {
        let (sink, serial) = SerialSink::capture();
        let mut options = VmOptions::new(memory, cpus);
        options.serial = sink;
        change(&mut options);
        let vm = Vm::new(options).expect("a VM");
        let handle = vm.handle();
        Self { vm, handle, serial }
    }

    fn boot(memory: u64, cpus: u32, workload: &str, change: impl FnOnce(&mut VmOptions)) -> Self {
        let mut guest = Self::new(memory, cpus, change);
        let workload: Workload = workload.parse().unwrap();
        let args = GuestArgs {
            stats: StatsSink::Page,
            cpus: Some(cpus),
            tsc_khz: Some(guest.vm.tsc_khz()),
            ..GuestArgs::new(workload)
        };
        guest.vm.load_kernel(vmferry_guest_image::ELF, &args.to_string()).unwrap();
        guest.vm.start().unwrap();
        guest
    }

    /// Waits until the guest's report satisfies `wanted`.
    fn wait(&self, what: &str, wanted: impl Fn(&StatsSnapshot) -> bool) -> StatsSnapshot {
        let start = Instant::now();
        loop {
            if let Ok(stats) = self.handle.stats()
                && wanted(&stats)
            {
                return stats;
            }
            let exit = self.handle.exit();
            assert!(exit.is_none(), "{what}: {} serial: {}", exit.unwrap(), self.serial.text());
            assert!(
                start.elapsed() < PATIENCE,
                "{what}: {:?}; serial: {}",
                self.handle.stats().map(|s| s.state),
                self.serial.text()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn wait_running(&self) -> StatsSnapshot {
        self.wait("the guest fills its memory", |s| s.state == State::Running && s.writes() > 1000)
    }

    /// Waits until every vCPU wrote, and checked all its pages once more.
    fn wait_sweep(&self, cpus: u32) -> StatsSnapshot {
        let before = self.wait("the guest reports", |_| true);
        let sweeps: Vec<u64> = before.cpus().iter().map(|cpu| cpu.sweeps).collect();
        let stats = self.wait("every vCPU checks all its pages", |s| {
            s.cpus().iter().zip(&sweeps).all(|(cpu, before)| cpu.sweeps > before + 1)
        });
        assert_eq!(stats.cpus().len(), cpus as usize);
        stats
    }
}

#[test]
fn the_guest_boots_and_counts() {
    if !kvm() {
        return;
    }
    let started = Instant::now();
    let guest = Guest::boot(128 << 20, 2, "uniform,ws=8M,rate=20k", |_| {});
    let stats = guest.wait_running();
    println!("running after {:?}", started.elapsed());
    for note in guest.vm.notes() {
        println!("note: {note}");
    }
    let later = guest.wait("it counts on", |s| s.writes() > stats.writes() + 1000);
    assert_eq!(later.corrupt(), 0);
    assert_eq!(later.cpus().len(), 2);
}
