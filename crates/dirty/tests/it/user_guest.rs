//! Guest that only writes. It starts in user mode, so that it runs natively even if kernel mode is
//! emulated.

use crate::memory::Memory;
use kvm_bindings::{kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vmferry_core::{Gpa, Layout, PAGE_BYTES, Region, RegionId};
use vmferry_dirty::{DirtyRings, LogSlot, RingVcpu};
use vmferry_sys::kvm::SlotSpec;
use vmferry_sys::ring::{self, EXIT_RING_FULL, RingEntries};
use vmferry_testkit::{Need, skip};

/// Number of writes between two exits of the guest.
pub(crate) const STRETCH: u64 = 4096;

/// First page of the first vCPU's working set. Code and page tables are before it.
pub(crate) const FIRST: u64 = 512;

/// Guest code: increments the counter at the start of a random page in an endless loop, and leaves
/// the guest now and then.
///
/// ```text
/// next: imul rbx, r10           multiplier
///       add  rbx, r11           increment
///       mov  rax, rbx
///       shr  rax, 33
///       and  rax, r8            pages - 1
///       shl  rax, 12
///       add  rax, rsi           where the working set begins
///       inc  qword [rax]
///       dec  rcx
///       jnz  next
///       out  0x10, al
///       mov  rcx, r9            stretch
///       jmp  next
/// ```
const CODE: [u8; 39] = [
    0x49, 0x0f, 0xaf, 0xda, 0x4c, 0x01, 0xdb, 0x48, 0x89, 0xd8, 0x48, 0xc1, 0xe8, 0x21, 0x4c, 0x21, 0xc0,
    0x48, 0xc1, 0xe0, 0x0c, 0x48, 0x01, 0xf0, 0x48, 0xff, 0x00, 0x48, 0xff, 0xc9, 0x75, 0xe0, 0xe6, 0x10,
    0x4c, 0x89, 0xc9, 0xeb, 0xd9,
];

const CODE_PAGE: u64 = 16;
const TABLES_PAGE: u64 = 1;

/// VM with rings and vCPUs.
pub(crate) struct Guest {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) vcpus: Vec<VcpuFd>,
    pub(crate) rings: DirtyRings,
    pub(crate) layout: Layout,
}

/// Creates the VM. Skips the calling test without KVM. Each vCPU writes to its own `set` pages, a
/// power of two.
pub(crate) fn guest(memory: &Memory, entries: u32, vcpus: u64, set: u64) -> Option<Guest> {
    let vm = match Kvm::new().and_then(|kvm| kvm.create_vm()) {
        Ok(vm) => Arc::new(vm),
        Err(error) => {
            skip(Need::Kvm, format!("/dev/kvm: {error}"));
            return None;
        }
    };
    let entries = RingEntries::new(entries).unwrap();
    match ring::largest(fd(&vm)).unwrap() {
        Some(largest) if largest >= entries => {}
        largest => {
            skip(Need::Kvm, format!("rings of {entries} entries are wanted, the host has {largest:?}"));
            return None;
        }
    }
    ring::enable(fd(&vm), entries).unwrap();
    let slot = add_slot(&vm, 0, 0, memory);
    load(memory);
    let vcpus: Vec<_> = (0..vcpus).map(|index| vcpu(&vm, index, set)).collect();
    assert!(FIRST + vcpus.len() as u64 * set <= memory.pages);
    let layout = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: slot.spec.len }]).unwrap();
    let owner: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(&vm) as _;
    // SAFETY: the descriptors are open for as long as they are borrowed.
    let fds: Vec<_> = vcpus.iter().map(|vcpu| unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }).collect();
    // SAFETY: the slot was added to this VM and stays, and the memory outlives the VM in every
    // test.
    let rings = unsafe { DirtyRings::new(owner, entries, &fds, vec![slot]) }.unwrap();
    Some(Guest { vm, vcpus, rings, layout })
}

pub(crate) fn fd(vm: &VmFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as `vm` is borrowed.
    unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }
}

/// Adds `memory` to the VM as slot `slot` at `gpa`.
pub(crate) fn add_slot(vm: &VmFd, slot: u32, gpa: u64, memory: &Memory) -> LogSlot {
    add_slot_flags(vm, slot, gpa, memory, 0)
}

/// Adds `memory` like [`add_slot`], with the flags `flags` of KVM, or changes the flags of the
/// slot.
pub(crate) fn add_slot_flags(vm: &VmFd, slot: u32, gpa: u64, memory: &Memory, flags: u32) -> LogSlot {
    let spec = SlotSpec { slot, flags, gpa, len: memory.pages * 4096, host: memory.host() };
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: spec.len,
        userspace_addr: spec.host,
    };
    // SAFETY: the memory outlives the VM in every test.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    LogSlot::new(spec, None)
}

/// Loads the code, and page tables that map the first 4 GiB to themselves, accessible in user mode.
/// All accessed and dirty bits are set already, so the processor does not write to the tables.
fn load(memory: &Memory) {
    const LINK: u64 = 0x27;
    const LEAF: u64 = 0xe7;
    let mut code = [0; PAGE_BYTES];
    code[..CODE.len()].copy_from_slice(&CODE);
    memory.window().write_page(usize::try_from(CODE_PAGE).unwrap(), &code);
    let table = |index: u64, entry: &dyn Fn(u64) -> u64| {
        let mut page = [0; PAGE_BYTES];
        for (at, bytes) in (0..).zip(page.chunks_mut(8)) {
            bytes.copy_from_slice(&entry(at).to_le_bytes());
        }
        memory.window().write_page(usize::try_from(TABLES_PAGE + index).unwrap(), &page);
    };
    table(0, &|at| if at == 0 { (TABLES_PAGE + 1) << 12 | LINK } else { 0 });
    table(1, &|at| if at < 4 { (TABLES_PAGE + 2 + at) << 12 | LINK } else { 0 });
    for gib in 0..4 {
        table(2 + gib, &|at| gib << 30 | at << 21 | LEAF);
    }
}

fn vcpu(vm: &VmFd, index: u64, set: u64) -> VcpuFd {
    let vcpu = vm.create_vcpu(index).unwrap();
    let segment = |selector, type_, l| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs = segment(0x33, 11, 1);
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *data = segment(0x2b, 3, 0);
    }
    sregs.cr3 = TABLES_PAGE << 12;
    sregs.cr4 = 0x20;
    sregs.cr0 = 0x8001_0033;
    sregs.efer = 0x500;
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = CODE_PAGE << 12;
    // IOPL 3.
    regs.rflags = 0x3002;
    regs.rbx = index + 1;
    regs.rsi = (FIRST + index * set) << 12;
    regs.r8 = set - 1;
    regs.r9 = STRETCH;
    regs.rcx = STRETCH;
    regs.r10 = 6_364_136_223_846_793_005;
    regs.r11 = 1_442_695_040_888_963_407;
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

/// Runs a vCPU until `stop` is set, counts its exits, and makes room when its ring is full.
pub(crate) fn run(vcpu: &mut VcpuFd, ring: &RingVcpu, stop: &AtomicBool, stretches: &AtomicU64) {
    while !stop.load(Ordering::Acquire) {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x10, _)) => {
                stretches.fetch_add(1, Ordering::Release);
                ring.on_exit();
            }
            Ok(VcpuExit::Unsupported(EXIT_RING_FULL)) => ring.on_full().unwrap(),
            Ok(other) => panic!("unexpected exit {other:?}"),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => panic!("KVM_RUN: {error}"),
        }
    }
}

/// Ends the vCPUs when it is dropped, also by a panic: otherwise the scope would wait for them.
struct EndVcpus<'a>(&'a AtomicBool);

impl Drop for EndVcpus<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Runs all vCPUs until `meanwhile` returns, and then stops them. Returns the result of `meanwhile`
/// and the number of writes.
///
/// `meanwhile` receives the number of stretches that each vCPU has made.
pub(crate) fn running<T>(guest: &mut Guest, meanwhile: impl FnOnce(&[AtomicU64]) -> T) -> (T, u64) {
    let stop = AtomicBool::new(false);
    let stretches: Vec<_> = guest.vcpus.iter().map(|_| AtomicU64::new(0)).collect();
    let rings = guest.rings.clone();
    let result = std::thread::scope(|scope| {
        for (index, vcpu) in guest.vcpus.iter_mut().enumerate() {
            let ring = rings.vcpu(index);
            let (stop, stretches) = (&stop, &stretches[index]);
            scope.spawn(move || run(vcpu, &ring, stop, stretches));
        }
        let _end = EndVcpus(&stop);
        meanwhile(&stretches)
    });
    let stretches: u64 = stretches.into_iter().map(AtomicU64::into_inner).sum();
    (result, stretches * STRETCH)
}
