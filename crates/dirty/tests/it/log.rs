//! Tests of log tracking and write protection on a real VM with a guest of a few instructions.

use crate::memory::{Kind, Memory};
use crate::user_guest::{add_slot, add_slot_flags, fd};
use crate::wp::available;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{DirtyTracker, Gpa, Layout, PAGE_BYTES, PageIndex, PageRun, PageSet, Region, RegionId};
use vmferry_dirty::{KvmLogTracker, LogSlot, WpTracker};
use vmferry_sys::kvm::{self, ManualProtect, SlotSpec};
use vmferry_testkit::{Need, skip, wait};

/// Number of pages of 1 MiB of memory from address 0, all that real mode can access.
const PAGES: u64 = 256;

/// Number of pauses in the test of lost writes.
const EPISODES: u64 = 40;

/// Real-mode code at 0x1000: increments a counter in one of 127 pages from 0x2000 up, chosen by a
/// linear congruential generator, in an endless loop. After every 64 rounds it leaves the guest by
/// `out 0x10, al`.
///
/// ```text
/// next: imul bx, bx, 25173      69 db 55 62
///       add  bx, 13849          81 c3 19 36
///       mov  ax, bx             89 d8
///       and  ax, 0x7e00         25 00 7e       (segments 0x000..0x7e00, step 0x200: every second page)
///       add  ax, 0x0200         05 00 02
///       mov  ds, ax             8e d8
///       inc  word [0]           ff 06 00 00
///       inc  cl                 fe c1
///       test cl, 63             f6 c1 3f
///       jnz  next               75 e3
///       out  0x10, al           e6 10
///       jmp  next               eb df
/// ```
const CODE: [u8; 33] = [
    0x69, 0xdb, 0x55, 0x62, 0x81, 0xc3, 0x19, 0x36, 0x89, 0xd8, 0x25, 0x00, 0x7e, 0x05, 0x00, 0x02, 0x8e,
    0xd8, 0xff, 0x06, 0x00, 0x00, 0xfe, 0xc1, 0xf6, 0xc1, 0x3f, 0x75, 0xe3, 0xe6, 0x10, 0xeb, 0xdf,
];

/// Creates a VM without a vCPU. Skips the calling test without KVM.
fn vm() -> Option<Arc<VmFd>> {
    match Kvm::new().and_then(|kvm| kvm.create_vm()) {
        Ok(vm) => Some(Arc::new(vm)),
        Err(error) => {
            skip(Need::Kvm, format!("/dev/kvm: {error}"));
            None
        }
    }
}

fn tracker(vm: &Arc<VmFd>, slots: &[LogSlot]) -> (KvmLogTracker, Layout) {
    let regions = slots.iter().map(|slot| Region {
        id: RegionId(slot.spec.slot),
        gpa: Gpa(slot.spec.gpa),
        len: slot.spec.len,
    });
    let layout = Layout::new(regions.collect()).unwrap();
    let vm: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(vm) as _;
    // SAFETY: the slots were added to this VM and stay.
    (unsafe { KvmLogTracker::new(vm, slots.to_vec()) }.unwrap(), layout)
}

fn vcpu(vm: &VmFd) -> VcpuFd {
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = 0x1000;
    regs.rflags = 2;
    regs.rbx = 1;
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

/// Runs the guest until `stop` is set, and counts its exits.
fn run(vcpu: &mut VcpuFd, stop: &AtomicBool, exits: &AtomicU64) {
    while !stop.load(Ordering::Acquire) {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x10, _)) => {
                exits.fetch_add(1, Ordering::Release);
            }
            Ok(other) => panic!("unexpected exit {other:?}"),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => panic!("KVM_RUN: {error}"),
        }
    }
}

fn load_code(memory: &Memory) {
    let mut page = [0; PAGE_BYTES];
    page[..CODE.len()].copy_from_slice(&CODE);
    memory.window().write_page(1, &page);
}

/// Protects the harvested pages chunk by chunk and copies them, as the engine does in a pass.
/// `guest_writes` returns when the guest, if it runs, has made further writes.
fn send(
    tracker: &dyn DirtyTracker,
    memory: &Memory,
    dirty: &Bitmap,
    copy: &mut [u8],
    guest_writes: impl Fn(),
) {
    let protector = tracker.protector();
    let mut first = 0;
    while first < memory.pages {
        let count = protector.chunk_pages().min(memory.pages - first);
        let chunk = PageRun::new(PageIndex(first), count);
        protector.protect(RegionId(0), chunk, dirty).unwrap();
        // The guest writes between the two steps: with the steps swapped, these writes would be
        // lost and the test would fail.
        guest_writes();
        for page in dirty.runs_in(chunk.range()).flatten() {
            let at = usize::try_from(page).unwrap() * PAGE_BYTES;
            copy[at..at + PAGE_BYTES].copy_from_slice(&memory.page(page));
        }
        first += count;
    }
}

fn lost(memory: &Memory, copy: &[u8]) -> Vec<u64> {
    copy.chunks(PAGE_BYTES)
        .zip(0..)
        .filter(|(copied, page)| **copied != memory.page(*page))
        .map(|(_, page)| page)
        .collect()
}

#[test]
fn no_guest_write_is_lost() {
    let Some(vm) = vm() else { return };
    let memory = Memory::new(Kind::Small, PAGES);
    let slot = add_slot(&vm, 0, 0, &memory);
    let (mut tracker, layout) = tracker(&vm, &[slot]);
    nothing_is_lost(&vm, &memory, &mut tracker, &layout);
}

#[test]
fn no_guest_write_is_lost_with_write_protection() {
    if !available() {
        return;
    }
    for kind in [Kind::Small, Kind::Huge, Kind::Memfd] {
        let Some(vm) = self::vm() else { return };
        let memory = Memory::new(kind, PAGES);
        add_slot(&vm, 0, 0, &memory);
        let layout = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: PAGES * 4096 }]).unwrap();
        let mut tracker = WpTracker::new(vec![memory.region(0)]).unwrap();
        nothing_is_lost(&vm, &memory, &mut tracker, &layout);
    }
}

/// Runs the guest in `memory` repeatedly while it is copied pass by pass, and compares the copy at
/// each pause.
fn nothing_is_lost(vm: &VmFd, memory: &Memory, tracker: &mut dyn DirtyTracker, layout: &Layout) {
    load_code(memory);
    let mut vcpu = vcpu(vm);
    let mut copy = vec![0; usize::try_from(PAGES).unwrap() * PAGE_BYTES];
    let mut dirty = PageSet::full(layout);
    tracker.start().unwrap();
    // Only the last write to a page before a pause can remain lost, so the test makes many pauses.
    for episode in 0..EPISODES {
        let (stop, exits) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| run(&mut vcpu, &stop, &exits));
            let guest_writes = || {
                let before = exits.load(Ordering::Acquire);
                wait("writes of the guest", || exits.load(Ordering::Acquire) > before);
            };
            for _ in 0..3 {
                let pages = dirty.region(RegionId(0)).unwrap();
                send(tracker, memory, pages, &mut copy, guest_writes);
                dirty.clear();
                tracker.harvest(&mut dirty).unwrap();
            }
            wait("writes of the guest", || exits.load(Ordering::Acquire) >= 5);
            stop.store(true, Ordering::Release);
        });
        // The vCPU has stopped, so this is the last harvest.
        tracker.harvest(&mut dirty).unwrap();
        send(tracker, memory, dirty.region(RegionId(0)).unwrap(), &mut copy, || ());
        dirty.clear();
        assert_eq!(lost(memory, &copy), [], "pages lost before pause {episode}");
    }
    let counted: u64 = (0..PAGES)
        .map(|page| u64::from(u16::from_le_bytes([memory.page(page)[0], memory.page(page)[1]])))
        .sum();
    assert!(counted > 64 * 5 * EPISODES, "the guest wrote: {counted}");
}

#[test]
fn only_written_pages_are_reported_and_protecting_a_page_keeps_its_neighbours_dirty() {
    let Some(vm) = vm() else { return };
    let memory = Memory::new(Kind::Small, PAGES);
    load_code(&memory);
    let slot = add_slot(&vm, 0, 0, &memory);
    let (mut tracker, layout) = tracker(&vm, &[slot]);
    let mut vcpu = vcpu(&vm);
    tracker.start().unwrap();
    let protector = tracker.protector();
    let harvest = |tracker: &mut KvmLogTracker| {
        let mut set = PageSet::empty(&layout);
        tracker.harvest(&mut set).unwrap();
        set.region(RegionId(0)).unwrap().clone()
    };
    let all = PageRun::from(0..PAGES);
    protector.protect(RegionId(0), all, &Bitmap::full(PAGES)).unwrap();
    assert_eq!(harvest(&mut tracker).count(), 0, "all pages are protected and none was written");
    let once = AtomicBool::new(false);
    let exits = AtomicU64::new(0);
    // One stretch of 64 increments.
    while exits.load(Ordering::Relaxed) == 0 {
        match vcpu.run().unwrap() {
            VcpuExit::IoOut(..) => exits.fetch_add(1, Ordering::Relaxed),
            other => panic!("unexpected exit {other:?}"),
        };
    }
    let written: BTreeSet<u64> =
        (2..PAGES).filter(|page| memory.word(*page).load(Ordering::Relaxed) & 0xffff != 0).collect();
    assert!(written.len() > 10, "{written:?}");
    let found: BTreeSet<u64> = harvest(&mut tracker).runs().flatten().collect();
    assert!(found.is_superset(&written), "written {written:?}, found {found:?}");
    assert!(found.len() <= written.len() + 2, "written {written:?}, found {found:?}");
    // Protect one page of a word: the others are still reported.
    let page = *written.first().unwrap();
    let mut one = Bitmap::new(PAGES);
    one.set(page);
    protector.protect(RegionId(0), PageRun::new(PageIndex(page), 1), &one).unwrap();
    let left: BTreeSet<u64> = harvest(&mut tracker).runs().flatten().collect();
    assert_eq!(found.difference(&left).copied().collect::<Vec<_>>(), [page]);
    // A page that is in the bitmap but not in the chunk also stays dirty.
    protector.protect(RegionId(0), PageRun::new(PageIndex(0), 1), &Bitmap::full(PAGES)).unwrap();
    assert_eq!(harvest(&mut tracker).runs().flatten().collect::<BTreeSet<_>>(), left);
    tracker.stop().unwrap();
    let error = protector.protect(RegionId(0), all, &one).unwrap_err().to_string();
    assert!(error.contains("not started"), "{error}");
    run_briefly(&mut vcpu, &once, &exits);
    tracker.start().unwrap();
    protector.protect(RegionId(0), all, &Bitmap::full(PAGES)).unwrap();
    assert_eq!(harvest(&mut tracker).count(), 0, "started anew");
}

fn run_briefly(vcpu: &mut VcpuFd, stop: &AtomicBool, exits: &AtomicU64) {
    let until = exits.load(Ordering::Relaxed) + 3;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait("exits of the guest", || exits.load(Ordering::Acquire) >= until);
            stop.store(true, Ordering::Release);
        });
        run(vcpu, stop, exits);
    });
}

#[test]
fn slots_of_odd_length_marks_and_wrong_arguments_are_handled() {
    let Some(vm) = vm() else { return };
    // The lengths are not multiples of 64 pages: the last clear reaches the end.
    let (low, high) = (Memory::new(Kind::Small, 70), Memory::new(Kind::Small, 1000));
    let marks = Arc::new(AtomicBitmap::new(1000));
    let slots = [
        add_slot(&vm, 0, 0, &low),
        LogSlot { marks: Some(Arc::clone(&marks) as _), ..add_slot(&vm, 1, 4 << 30, &high) },
    ];
    let (mut tracker, layout) = tracker(&vm, &slots);
    let protector = tracker.protector();
    let error = tracker.harvest(&mut PageSet::empty(&layout)).unwrap_err().to_string();
    assert!(error.contains("not started"), "{error}");
    marks.set(3);
    tracker.start().unwrap();
    protector.protect(RegionId(0), PageRun::from(0..70), &Bitmap::full(70)).unwrap();
    protector.protect(RegionId(1), PageRun::from(0..1000), &Bitmap::full(1000)).unwrap();
    marks.set(999);
    let mut set = PageSet::empty(&layout);
    assert_eq!(tracker.harvest_kernel_time(), None);
    let began = Instant::now();
    tracker.harvest(&mut set).unwrap();
    let (took, in_kernel) = (began.elapsed(), tracker.harvest_kernel_time().unwrap());
    assert!(Duration::ZERO < in_kernel && in_kernel < took, "{in_kernel:?} of {took:?}");
    assert!(set.region(RegionId(0)).unwrap().is_empty());
    assert_eq!(set.region(RegionId(1)).unwrap().runs().flatten().collect::<Vec<_>>(), [999], "marks only");
    for (region, run, len, reason) in [
        (2, 0..1, 70, "region 2 is not tracked"),
        (0, 0..71, 70, "region 0 has 70 pages"),
        (0, 0..70, 71, "a bitmap for it has 71"),
    ] {
        let error = protector
            .protect(RegionId(region), PageRun::from(run), &Bitmap::new(len))
            .unwrap_err()
            .to_string();
        assert!(error.contains(reason), "{error}");
    }
    let foreign = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 64 * 4096 }]).unwrap();
    assert!(tracker.harvest(&mut PageSet::empty(&foreign)).is_err());
}

#[test]
fn missing_slot_is_refused_and_the_other_slots_are_restored() {
    let Some(vm) = vm() else { return };
    let (low, high) = (Memory::new(Kind::Small, 64), Memory::new(Kind::Small, 64));
    let first = add_slot(&vm, 0, 0, &low);
    // The slot overlaps the first one, so KVM cannot create it as a new slot.
    let wrong = LogSlot::new(SlotSpec { slot: 5, host: high.host(), ..first.spec }, None);
    let vm_fd: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(&vm) as _;
    // SAFETY: the second slot does not exist. KVM refuses it because it overlaps the first one, and
    // would map memory of this test otherwise.
    let mut tracker = unsafe { KvmLogTracker::new(vm_fd, vec![first, wrong]) }.unwrap();
    let error = tracker.start().unwrap_err().to_string();
    assert!(error.contains("region 5") && error.contains("KVM_SET_USER_MEMORY_REGION on slot 5"), "{error}");
    let mut log = [0];
    // SAFETY: the slot has 64 pages.
    let error = unsafe {
        vmferry_sys::kvm::get_dirty_log(
            std::os::fd::BorrowedFd::borrow_raw(vm.as_raw_fd()),
            0,
            64 * 4096,
            &mut log,
        )
    }
    .unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOENT), "the first slot's log is off again: {error}");
}

/// Returns the pages that the VMM finds dirty in its own log.
fn own_log(vm: &VmFd) -> BTreeSet<u64> {
    let mut log = vec![0; usize::try_from(PAGES / 64).unwrap()];
    // SAFETY: the slot has this many pages.
    unsafe { kvm::get_dirty_log(fd(vm), 0, PAGES * 4096, &mut log) }.unwrap();
    let mut pages = Bitmap::new(PAGES);
    pages.union_words(&log);
    pages.bits().collect()
}

fn set_of(marks: &AtomicBitmap) -> BTreeSet<u64> {
    let mut pages = Bitmap::new(PAGES);
    marks.harvest(&mut pages);
    pages.bits().collect()
}

/// Runs the guest for one stretch of 64 increments.
fn stretch(vcpu: &mut VcpuFd) {
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(0x10, _) => {}
        other => panic!("unexpected exit {other:?}"),
    }
}

/// Tests a VMM whose own log has the mode `manual`, with a migration that fails in its first pass
/// and one that fails after some passes.
fn log_survives_a_failed_migration(manual: ManualProtect) {
    log_survives(manual, 1);
    log_survives(manual, 3);
}

fn log_survives(manual: ManualProtect, passes: u32) {
    let Some(vm) = kvm_vm() else { return };
    let memory = Memory::new(Kind::Small, PAGES);
    load_code(&memory);
    kvm::enable_manual_protect(fd(&vm), manual).unwrap();
    let (returned_pages, marks) = (Arc::new(AtomicBitmap::new(PAGES)), Arc::new(AtomicBitmap::new(PAGES)));
    let slot = LogSlot {
        returned_pages: Some(Arc::clone(&returned_pages)),
        marks: Some(Arc::clone(&marks) as _),
        ..add_slot_flags(&vm, 0, 0, &memory, kvm::MEM_LOG_DIRTY_PAGES)
    };
    let slot = LogSlot { spec: SlotSpec { flags: 0, ..slot.spec }, ..slot };
    let (tracker, layout) = tracker(&vm, &[slot]);
    let mut tracker = tracker.restoring(manual);
    let mut vcpu = vcpu(&vm);
    // Pages that the VMM has already handled are not dirty.
    own_log(&vm);
    kvm::clear_dirty_log(fd(&vm), 0, 0, 256, &[u64::MAX; 4]).unwrap();
    stretch(&mut vcpu);
    marks.set(130);
    let word = |page: u64| memory.word(page).load(Ordering::Relaxed);
    let before: Vec<u64> = (0..PAGES).map(word).collect();
    tracker.start().unwrap();
    // Runs the guest between the start and the first pass, which protects every page.
    stretch(&mut vcpu);
    let mut copy = vec![0; usize::try_from(PAGES).unwrap() * PAGE_BYTES];
    let mut dirty = PageSet::full(&layout);
    for pass in 0..passes {
        send(&tracker, &memory, dirty.region(RegionId(0)).unwrap(), &mut copy, || ());
        dirty.clear();
        // After a first pass that is the only one, the guest writes nothing: otherwise lost pages
        // would be found by chance.
        if pass > 0 {
            stretch(&mut vcpu);
        }
        tracker.harvest(&mut dirty).unwrap();
    }
    send(&tracker, &memory, dirty.region(RegionId(0)).unwrap(), &mut copy, || ());
    assert_eq!(lost(&memory, &copy), [], "the guest is paused, and all of its pages were sent");
    if passes > 1 {
        stretch(&mut vcpu);
    }
    tracker.stop().unwrap();
    let written: BTreeSet<u64> = (2..PAGES).filter(|page| word(*page) != 0).collect();
    assert!(
        written.len() > 30 && (2..PAGES).any(|page| before[usize::try_from(page).unwrap()] != word(page)),
        "{written:?}"
    );
    let found = &own_log(&vm) | &set_of(&returned_pages);
    assert!(found.is_superset(&written) && found.contains(&130), "written {written:?}, found {found:?}");
    // The guest writes 127 pages at most.
    assert!(found.len() <= 130, "{} pages", found.len());
    log_is_as_before(&vm, &mut vcpu, &memory, manual);
}

/// Checks that the log is on, and that reading clears it unless `manual` enables manual protection.
fn log_is_as_before(vm: &VmFd, vcpu: &mut VcpuFd, memory: &Memory, manual: ManualProtect) {
    let word = |page: u64| memory.word(page).load(Ordering::Relaxed);
    if manual.enabled() {
        kvm::clear_dirty_log(fd(vm), 0, 0, 256, &[u64::MAX; 4]).unwrap();
    } else {
        own_log(vm);
    }
    let before: Vec<u64> = (0..PAGES).map(word).collect();
    stretch(vcpu);
    let written: BTreeSet<u64> =
        (2..PAGES).filter(|page| before[usize::try_from(*page).unwrap()] != word(*page)).collect();
    let found = own_log(vm);
    assert!(found.is_superset(&written) && found.len() <= written.len() + 2, "{written:?}, {found:?}");
    assert_eq!(own_log(vm), if manual.enabled() { found } else { BTreeSet::new() }, "read again");
}

#[test]
fn log_that_the_vmm_clears_by_reading_survives_a_failed_migration() {
    log_survives_a_failed_migration(ManualProtect::NONE);
}

#[test]
fn log_that_the_vmm_clears_explicitly_survives_a_failed_migration() {
    log_survives_a_failed_migration(ManualProtect::new(ManualProtect::ENABLE));
    log_survives_a_failed_migration(ManualProtect::new(ManualProtect::ENABLE | ManualProtect::INITIALLY_SET));
}

#[test]
fn stop_leaves_the_log_off_and_manual_protection_off() {
    let Some(vm) = kvm_vm() else { return };
    let memory = Memory::new(Kind::Small, PAGES);
    load_code(&memory);
    let slot = add_slot(&vm, 0, 0, &memory);
    let (mut tracker, _) = tracker(&vm, std::slice::from_ref(&slot));
    let mut vcpu = vcpu(&vm);
    tracker.start().unwrap();
    tracker.stop().unwrap();
    // The VMM may enable the log at any later time.
    // SAFETY: the slot was added to this VM.
    unsafe { kvm::set_slot_flags(fd(&vm), &slot.spec, true) }.unwrap();
    log_is_as_before(&vm, &mut vcpu, &memory, ManualProtect::NONE);
}

/// Creates a VM without a vCPU. Skips the calling test without KVM.
fn kvm_vm() -> Option<Arc<VmFd>> {
    match Kvm::new().and_then(|kvm| kvm.create_vm()) {
        Ok(vm) => Some(Arc::new(vm)),
        Err(error) => {
            vmferry_testkit::skip(vmferry_testkit::Need::Kvm, format_args!("/dev/kvm: {error}"));
            None
        }
    }
}
