//! A guest whose missing pages never arrive, because its source has died in postcopy.
#![cfg(all(feature = "kvm", feature = "vm-memory", feature = "fault", target_arch = "x86_64"))]

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry::fault::UffdOptions;
use vmferry::kvm::kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs, kvm_segment};
use vmferry::kvm::kvm_ioctls::{Kvm, VcpuExit};
use vmferry::kvm::{Guest, GuestOptions};
use vmferry::vm_memory::VmMemory;
use vmferry::{DemandPaging, GuestMemory, PageIndex, PageSet, RegionId};
use vmferry_testkit::{Need, PATIENCE, skip, wait};

const MEMORY: usize = 64 << 12;
const CODE: u64 = 0x1000;
/// The page that never arrives.
const MISSING: PageIndex = PageIndex(8);
/// `out dx, al; mov eax, [MISSING]; out dx, eax; hlt`, in 32-bit code.
const PROGRAM: [u8; 8] = [0xee, 0xa1, 0x00, 0x80, 0x00, 0x00, 0xef, 0xf4];

struct Lost {
    guest: Guest<&'static str>,
    paging: Arc<dyn DemandPaging>,
    exits: Arc<AtomicU64>,
}

/// Returns a guest whose vCPU is about to wait for the page. Without KVM or userfaultfd the calling
/// test is skipped.
fn guest() -> Option<Lost> {
    let kvm = Kvm::new().map_err(|error| skip(Need::Kvm, error)).ok()?;
    let ram = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    ram.write_slice(&PROGRAM, GuestAddress(CODE)).unwrap();
    let memory = Arc::new(VmMemory::new(ram).unwrap());
    let vm = kvm.create_vm().unwrap();
    vm.set_tss_address(0xfffb_d000).unwrap();
    vm.create_irq_chip().unwrap();
    // SAFETY: the VM is new, and the test makes no vCPUs of it.
    let made = unsafe { Guest::new(&kvm, vm, Arc::clone(&memory) as _, |_| None, &GuestOptions::new()) };
    let mut guest = made.unwrap();
    let paging =
        guest.demand_paging(|threads| Ok(Arc::new(memory.demand_paging(&UffdOptions::new(threads))?)));
    let paging = paging.map_err(|error| skip(Need::Uffd, error)).ok()?;
    boot(&guest);
    let exits = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&exits);
    guest
        .spawn(|_cpu| {
            let exits = Arc::clone(&counted);
            move |_: VcpuExit<'_>| {
                exits.fetch_add(1, Ordering::SeqCst);
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    let mut missing = PageSet::empty(memory.layout());
    missing.iter_mut().for_each(|(_, pages)| _ = pages.set(MISSING.0));
    paging.begin(&missing).unwrap();
    paging.started();
    guest.run();
    wait("the vCPU running", || exits.load(Ordering::SeqCst) == 1);
    let shard = paging.shard_of(RegionId(0), MISSING);
    let fault = paging.next_fault(shard, PATIENCE).unwrap().expect("a fault");
    assert_eq!((fault.page, fault.vcpu), (MISSING, Some(0)));
    Some(Lost { guest, paging, exits })
}

fn boot(guest: &Guest<&'static str>) {
    let vcpu = guest.vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    let segment = kvm_segment { base: 0, limit: u32::MAX, present: 1, s: 1, g: 1, db: 1, ..sregs.cs };
    sregs.cs = kvm_segment { selector: 8, type_: 0xb, ..segment };
    let data = kvm_segment { selector: 16, type_: 3, ..segment };
    (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
    (sregs.cr0, sregs.efer) = (0x11, 0);
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&kvm_regs { rip: CODE, rdx: 0x10, rflags: 2, ..Default::default() }).unwrap();
    vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE }).unwrap();
}

#[test]
fn vcpu_that_waits_for_a_page_runs_on_with_zeros_neither_before_nor_after_its_guest_is_dropped() {
    let Some(Lost { guest, paging, exits }) = guest() else { return };
    // The engine has dropped its clone, and the guest has another.
    drop(paging);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(exits.load(Ordering::SeqCst), 1, "the vCPU still waits");
    let (ended, ends) = mpsc::channel();
    std::thread::spawn(move || {
        drop(guest);
        ended.send(()).unwrap();
    });
    ends.recv_timeout(PATIENCE).expect("the guest ends although its vCPU waits for a page");
    assert_eq!(exits.load(Ordering::SeqCst), 1, "no instruction ran with a page of zeros");
}
