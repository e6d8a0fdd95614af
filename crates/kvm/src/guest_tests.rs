//! Guests of two vCPUs that count. Each vCPU counts in a register and writes its count to its own
//! port.

use super::*;
use crate::testing::Memory;
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_core::{Gpa, PAGE_BYTES};
use vmferry_testkit::{Need, PATIENCE, skip, wait};

const PAGES: usize = 16;
const VCPUS: u32 = 2;
const CODE: u64 = 0x1000;
/// First port: vCPU `n` writes its count to port `PORT + n`.
const PORT: u16 = 0x10;
/// Code `again: inc rax/eax; out dx, eax; jmp again`, for 32-bit mode.
const PROGRAM: [u8; 4] = [0x40, 0xef, 0xeb, 0xfc];

fn memory() -> Arc<Memory> {
    let mut pages = vec![[0; PAGE_BYTES]; PAGES];
    pages[1][..PROGRAM.len()].copy_from_slice(&PROGRAM);
    Memory::new(RegionId(0), Gpa(0), pages)
}

fn guest(kvm: &Kvm, options: &GuestOptions, pit: bool) -> Guest<&'static str> {
    let vm = kvm.create_vm().unwrap();
    vm.set_tss_address(0xfffb_d000).unwrap();
    vm.create_irq_chip().unwrap();
    if pit {
        vm.create_pit2(kvm_bindings::kvm_pit_config::default()).unwrap();
    }
    // SAFETY: the VM is new, and the tests create no vCPUs in it.
    unsafe { Guest::new(kvm, vm, memory() as _, |_| None, options) }.unwrap()
}

fn two() -> GuestOptions {
    GuestOptions::new().vcpus(VCPUS)
}

/// Sets the registers of both vCPUs to the start of the program, in flat protected mode.
fn boot(guest: &Guest<&'static str>) {
    for cpu in 0..VCPUS {
        let vcpu = guest.vcpu(cpu).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        let segment =
            kvm_bindings::kvm_segment { limit: u32::MAX, present: 1, s: 1, g: 1, db: 1, ..sregs.cs };
        sregs.cs = kvm_bindings::kvm_segment { base: 0, selector: 8, type_: 0xb, ..segment };
        let data = kvm_bindings::kvm_segment { base: 0, selector: 16, type_: 3, ..segment };
        (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
        (sregs.cr0, sregs.efer) = (0x11, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let rdx = u64::from(PORT) + u64::from(cpu);
        vcpu.set_regs(&kvm_bindings::kvm_regs { rip: CODE, rdx, rflags: 2, ..Default::default() }).unwrap();
        // vCPU 1 would otherwise wait for its start by vCPU 0.
        let running = kvm_bindings::kvm_mp_state { mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE };
        vcpu.set_mp_state(running).unwrap();
    }
}

/// Last count of each vCPU. 0 means that the vCPU has not run.
#[derive(Default)]
struct Counts([AtomicU64; VCPUS as usize]);

impl Counts {
    fn get(&self) -> [u64; VCPUS as usize] {
        self.0.each_ref().map(|count| count.load(Ordering::SeqCst))
    }

    /// Records the next count, which must be the successor of the last one.
    fn count(&self, cpu: u32, data: &[u8]) {
        let next = u64::from(u32::from_le_bytes(data.try_into().unwrap()));
        let last = self.0[cpu as usize].swap(next, Ordering::SeqCst);
        assert!(last == 0 || next == last + 1, "vCPU {cpu} counted {last} and then {next}");
    }
}

fn counting(guest: &mut Guest<&'static str>) -> Arc<Counts> {
    let counts = Arc::<Counts>::default();
    guest
        .spawn(|cpu| {
            let counts = Arc::clone(&counts);
            move |exit: VcpuExit<'_>| {
                if let VcpuExit::IoOut(port, data) = exit {
                    assert_eq!(u32::from(port - PORT), cpu);
                    counts.count(cpu, data);
                }
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    counts
}

fn kvm() -> Option<Kvm> {
    Kvm::new().map_err(|error| skip(Need::Kvm, error)).ok()
}

#[test]
fn guest_pauses_and_continues_where_it_was_in_another_vm() {
    let Some(kvm) = kvm() else { return };
    let mut source = guest(&kvm, &two(), true);
    boot(&source);
    let counts = counting(&mut source);
    assert_eq!(counts.get(), [0, 0], "vCPUs are paused at first");
    source.run();
    wait("both vCPUs counting", || counts.get().iter().all(|count| *count > 100));
    assert!(matches!(source.save(), Err(Error::Running { .. })));
    source.pause(PATIENCE).unwrap();
    let at = counts.get();
    let sections = source.save().unwrap();
    assert_eq!(counts.get(), at, "a paused guest does not run");

    let mut target = guest(&kvm, &two().incoming(true), true);
    assert_eq!(target.config("test").difference(&source.config("test")), None);
    let there = counting(&mut target);
    let mut parts = Sections::new(&sections).unwrap();
    let state = target.take(&mut parts).unwrap();
    parts.finish().unwrap();
    target.load(state).unwrap();
    for (count, at) in there.0.iter().zip(at) {
        count.store(at, Ordering::SeqCst);
    }
    target.start(RunState::Paused);
    assert_eq!(there.get(), at);
    target.start(RunState::Running);
    wait("both vCPUs counting on", || (0..2).all(|cpu| there.get()[cpu] > at[cpu] + 100));
    target.pause(PATIENCE).unwrap();
    assert_eq!((target.park().exit(), source.park().exit()), (None, None), "no count was lost or repeated");
    source.run();
    wait("the source counting on", || (0..2).all(|cpu| counts.get()[cpu] > at[cpu]));
}

#[test]
fn handler_ends_the_guest_and_an_ended_guest_is_not_saved() {
    let Some(kvm) = kvm() else { return };
    let mut guest = guest(&kvm, &two(), true);
    boot(&guest);
    guest
        .spawn(|cpu| {
            let mut left = 50;
            move |_: VcpuExit<'_>| {
                left -= i32::from(cpu == 1);
                if left == 0 { ControlFlow::Break("counted") } else { ControlFlow::Continue(()) }
            }
        })
        .unwrap();
    guest.run();
    let exit = guest.park().wait_exit(Some(PATIENCE));
    assert_eq!(exit, Some(GuestExit::Handler("counted")));
    guest.pause(PATIENCE).unwrap();
    assert_eq!(guest.save().unwrap_err().to_string(), "the guest has ended");
}

#[test]
fn handler_that_panics_ends_the_guest() {
    let Some(kvm) = kvm() else { return };
    let mut guest = guest(&kvm, &two(), true);
    boot(&guest);
    guest
        .spawn(|cpu| {
            move |_: VcpuExit<'_>| {
                assert_eq!(cpu, 0, "a test's panic");
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    guest.run();
    let exit = guest.park().wait_exit(Some(PATIENCE)).unwrap();
    assert_eq!(exit.to_string(), "vCPU 1 cannot continue: its exit handler panicked");
    guest.pause(PATIENCE).unwrap();
    assert!(guest.vcpu(0).is_ok());
    assert_eq!(guest.vcpu(1).unwrap_err().to_string(), "the exit handler of vCPU 1 has panicked");
}

#[test]
fn target_with_other_chips_is_refused_by_name() {
    let Some(kvm) = kvm() else { return };
    let (source, target) = (guest(&kvm, &two(), false), guest(&kvm, &two().incoming(true), true));
    let difference = target.config("test").difference(&source.config("test"));
    assert_eq!(difference.unwrap(), "kvm: the guest has irqchip, the target has irqchip, pit");
}

#[test]
fn tracker_is_the_one_that_the_vm_has() {
    let Some(kvm) = kvm() else { return };
    let log = guest(&kvm, &two(), true);
    assert_eq!(log.tracker(None).unwrap().kind(), TrackerKind::Log);
    let error = log.tracker(Some(TrackerKind::Ring)).err().unwrap().to_string();
    assert_eq!(error, "this VM has no tracker `ring`; use `log`");
    let entries = RingEntries::new(4096).unwrap();
    match crate::largest_dirty_ring(&kvm.create_vm().unwrap()).unwrap() {
        Some(largest) if largest.get() >= entries.get() => {}
        _ => return skip(Need::Kvm, "dirty rings of 4096 entries are missing; the dirty log was tested"),
    }
    let mut ring = guest(&kvm, &two().dirty_rings(entries), true);
    assert_eq!(ring.tracker(None).unwrap().kind(), TrackerKind::Ring);
    let error = ring.tracker(Some(TrackerKind::Wp)).err().unwrap().to_string();
    assert_eq!(error, "this VM has no tracker `wp`; use `ring`");
    boot(&ring);
    let counts = counting(&mut ring);
    ring.run();
    wait("both vCPUs counting", || counts.get().iter().all(|count| *count > 10));
    ring.pause(PATIENCE).unwrap();
    assert_eq!(ring.park().exit(), None);
}
