//! Guests that boot and check themselves, and test VMs that forward all but some methods to the
//! real one.

use vmferry_engine::Settings;
use vmferry_guest_abi::{GuestArgs, StatsSink, StatsSnapshot};
use vmferry_testkit::{PATIENCE, wait, wait_for};
use vmferry_vmm::{Vm, VmHandle, VmOptions};

/// Settings with a peer timeout that only a hang reaches.
///
/// A thread of a starved host can be stopped for longer than the default timeout.
pub(crate) fn patient() -> Settings {
    Settings { peer_timeout: PATIENCE, ..Settings::default() }
}

pub(crate) fn stats(handle: &VmHandle) -> Option<StatsSnapshot> {
    handle.stats().ok()
}

/// Boots the bare-metal guest with `workload`.
pub(crate) fn boot(options: VmOptions, workload: &str) -> Vm {
    boot_with(options, workload, |_| {})
}

/// Boots the bare-metal guest with `workload` and the default arguments as changed by `change`.
pub(crate) fn boot_with(options: VmOptions, workload: &str, change: impl FnOnce(&mut GuestArgs)) -> Vm {
    let cpus = options.cpus;
    let mut vm = Vm::new(options).expect("a VM");
    let mut args = GuestArgs::new(workload.parse().unwrap());
    (args.stats, args.cpus, args.tsc_khz) = (StatsSink::Page, Some(cpus), Some(vm.tsc_khz()));
    change(&mut args);
    vm.load_kernel(vmferry_guest_image::ELF, &args.to_string()).unwrap();
    vm.start().unwrap();
    vm
}

/// Boots the guest, and waits until it has written more than `writes` times.
pub(crate) fn working(options: VmOptions, workload: &str, writes: u64) -> Vm {
    let vm = boot(options, workload);
    let handle = vm.handle();
    wait("the guest's work", || stats(&handle).is_some_and(|stats| stats.writes() > writes));
    vm
}

/// Returns a VM without a guest, which can receive one.
pub(crate) fn empty(mut options: VmOptions) -> Vm {
    options.incoming = true;
    Vm::new(options).unwrap()
}

/// Has the guest check all its pages.
pub(crate) fn verified(handle: &VmHandle, request: u64) -> StatsSnapshot {
    wait("a guest that can be asked", || handle.request_verify(request));
    wait("the guest checking itself", || stats(handle).is_some_and(|stats| stats.verified(request)));
    wait_for("a report", || handle.stats())
}

/// Returns the number of pages whose content differs from what the guest wrote, by the guest's own
/// check.
pub(crate) fn corrupt(vm: &Vm) -> u64 {
    verified(&vm.handle(), 5).corrupt()
}

/// Forwards methods of a test's VM or tracker to the real one, in the field `vm` or `tracker`.
macro_rules! forward {
    (Migratable) => {
        fn config(&self) -> MachineConfig {
            self.vm.config()
        }
        fn memory(&self) -> Arc<dyn GuestMemory> {
            self.vm.memory()
        }
    };
    (SourceVm) => {
        fn save(&mut self) -> Result<Vec<Section>, VmError> {
            SourceVm::save(&mut self.vm)
        }
        fn release(&mut self) -> Result<(), VmError> {
            SourceVm::release(&mut self.vm)
        }
    };
    (DirtyTracker) => {
        fn kind(&self) -> TrackerKind {
            self.tracker.kind()
        }
        fn start(&mut self) -> Result<(), VmError> {
            self.tracker.start()
        }
        fn protector(&self) -> Arc<dyn Protect> {
            self.tracker.protector()
        }
        fn stop(&mut self) -> Result<(), VmError> {
            self.tracker.stop()
        }
    };
}
pub(crate) use forward;
