//! Tests that all trackers report the same pages: those that the guest wrote, by its own account.

use crate::confined::kvm;
use crate::rig::working;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PAGE_BYTES, PageRun, PageSet};
use vmferry_engine::{DirtyTracker, SourceVm, TrackerKind};
use vmferry_testkit::{Need, print_line, skip, wait};
use vmferry_vmm::{Vm, VmOptions, largest_dirty_ring};

const MEMORY: u64 = 64 << 20;
const CPUS: u32 = 2;
/// Workload that writes each page of the working set several times between the two comparisons.
const WORKLOAD: &str = "sequential,ws=8M,data=16M,rate=20k,fill=random";
const WS_PAGES: u64 = (8 << 20) / PAGE_BYTES as u64;
/// Number of ring entries, so small that the ring fills up repeatedly.
const RING: u32 = 256;

fn writes(vm: &Vm) -> u64 {
    vm.handle().stats().map_or(0, |stats| stats.writes())
}

/// Returns the number of writes of each vCPU.
fn writes_by_cpu(vm: &Vm) -> Vec<u64> {
    vm.handle()
        .stats()
        .map_or_else(|_| Vec::new(), |stats| stats.cpus().iter().map(|cpu| cpu.writes).collect())
}

fn running(ring: Option<u32>) -> Vm {
    let mut options = VmOptions::new(MEMORY, CPUS);
    options.dirty_ring = ring;
    working(options, WORKLOAD, 5000)
}

/// Returns all of the guest's memory, in the order of its regions.
fn copy(vm: &Vm) -> Vec<Page> {
    let ram = vm.ram();
    let mut pages = Vec::new();
    for region in ram.layout().regions() {
        let window = ram.window(region.id, (0..region.pages()).into()).unwrap();
        for page in 0..window.pages() {
            let mut bytes = [0; PAGE_BYTES];
            window.copy_page(page, &mut bytes);
            pages.push(bytes);
        }
    }
    pages
}

fn protect_all(vm: &Vm, tracker: &dyn DirtyTracker) {
    let protector = tracker.protector();
    for region in vm.ram().layout().regions() {
        let mut all = Bitmap::new(region.pages());
        all.set_range(0..region.pages());
        for first in (0..region.pages()).step_by(usize::try_from(protector.chunk_pages()).unwrap()) {
            let end = (first + protector.chunk_pages()).min(region.pages());
            protector.protect(region.id, PageRun::from(first..end), &all).unwrap();
        }
    }
}

type Page = [u8; PAGE_BYTES];

fn word(page: &Page, index: usize) -> u64 {
    u64::from_le_bytes(page[8 * index..8 * index + 8].try_into().unwrap())
}

/// Returns the counters on the pages of the working set, by page number.
fn stamps(pages: &[Page]) -> Vec<u64> {
    let mut counters = vec![0; usize::try_from(WS_PAGES).unwrap()];
    for (page, next) in pages.iter().zip(&pages[1..]) {
        // Pages are numbered consecutively, which no other page is by chance.
        let number = word(page, 0);
        if number < WS_PAGES && (word(next, 0) == number + 1 || number + 1 == WS_PAGES) && word(page, 1) > 0 {
            counters[usize::try_from(number).unwrap()] = word(page, 1);
        }
    }
    counters
}

/// Returns the counters that the guest keeps of the same pages in a table, whose numbers match
/// those on the pages. If a vCPU was stopped between the two updates, they differ by one.
fn own_counters(pages: &[Page], stamps: &[u64]) -> Vec<u64> {
    let near = |page: &Page, stamps: &[u64]| {
        stamps.iter().enumerate().all(|(index, stamp)| word(page, index).abs_diff(*stamp) <= 1)
    };
    let words = PAGE_BYTES / 8;
    let first = pages.iter().position(|page| near(page, &stamps[..words])).expect("the guest's counters");
    let table = &pages[first..first + stamps.len() / words];
    table.iter().flat_map(|page| (0..words).map(move |index| word(page, index))).collect()
}

/// Counts of one comparison.
struct Compared {
    /// Number of pages that differ, and those of them that the tracker did not report.
    changed: usize,
    missed: Vec<usize>,
    reported: u64,
}

fn compare(before: &[Page], after: &[Page], vm: &Vm, dirty: &PageSet) -> Compared {
    let reported: Vec<bool> = vm
        .ram()
        .layout()
        .regions()
        .iter()
        .flat_map(|region| {
            let map = dirty.region(region.id);
            (0..region.pages()).map(move |page| map.is_some_and(|map| map.test(page)))
        })
        .collect();
    let differ = |index: &usize| before[*index] != after[*index];
    let changed: Vec<usize> = (0..before.len()).filter(differ).collect();
    let missed = changed.iter().copied().filter(|index| !reported[*index]).collect();
    Compared { changed: changed.len(), missed, reported: dirty.count() }
}

fn check(kind: TrackerKind) {
    let mut vm = running((kind == TrackerKind::Ring).then_some(RING));
    let mut tracker = vm.tracker(Some(kind)).unwrap();
    tracker.start().unwrap();
    protect_all(&vm, &*tracker);
    vm.pause().unwrap();
    let (before, written, begun) = (copy(&vm), writes(&vm), writes_by_cpu(&vm));
    assert_eq!(begun.len(), usize::try_from(CPUS).unwrap());
    // Writes up to this point may be reported, but need not be.
    let layout = vm.ram().layout().clone();
    tracker.harvest(&mut PageSet::empty(&layout)).unwrap();
    protect_all(&vm, &*tracker);
    vm.resume().unwrap();
    // Between two harvests each vCPU writes to more pages than a ring of this size holds.
    let (mut dirty, mut next) = (PageSet::empty(&layout), written);
    wait("every page being written", || {
        let now = writes(&vm);
        if now >= next {
            next = now + 4 * u64::from(RING);
            tracker.harvest(&mut dirty).unwrap();
        }
        // Checked for each vCPU, since a busy host may run one of them much later than the other.
        let rounds = |(now, begun): (u64, &u64)| now > begun + 2 * WS_PAGES;
        let by_cpu = writes_by_cpu(&vm);
        !by_cpu.is_empty() && by_cpu.into_iter().zip(&begun).all(rounds)
    });
    vm.pause().unwrap();
    tracker.harvest(&mut dirty).unwrap();
    let (after, written) = (copy(&vm), writes(&vm) - written);
    let found = compare(&before, &after, &vm, &dirty);
    print_line(format!(
        "{kind}: {written} writes, {} pages changed, {} reported, {}",
        found.changed,
        found.reported,
        tracker.ring().map_or("no ring".to_owned(), |ring| format!("ring full {} times", ring.full_exits))
    ));
    assert!(found.missed.is_empty(), "{kind} missed {} pages: {:?}", found.missed.len(), found.missed);
    // The comparison itself is sound: it sees what the guest counted.
    let (from, to) = (own_counters(&before, &stamps(&before)), own_counters(&after, &stamps(&after)));
    assert!(from.iter().zip(&to).all(|(from, to)| to > from), "the guest writes all of its working set");
    assert!(found.changed >= to.len(), "{} changed, {} were written", found.changed, to.len());
    assert!(found.reported < layout.pages() / 2, "{kind} reports nearly everything: {}", found.reported);
    tracker.stop().unwrap();
    vm.resume().unwrap();
    let written = writes(&vm);
    wait("writes of the guest", || writes(&vm) > written + 1000);
    assert_eq!(vm.handle().stats().unwrap().corrupt(), 0);
}

#[test]
fn each_tracker_reports_what_the_guest_wrote() {
    if !kvm() {
        return;
    }
    check(TrackerKind::Log);
    match vmferry_dirty::WpTracker::available() {
        Ok(()) => check(TrackerKind::Wp),
        Err(error) => skip(Need::Uffd, error),
    }
    match largest_dirty_ring().unwrap() {
        Some(_) => check(TrackerKind::Ring),
        None => skip(Need::Kvm, "KVM on this host has no dirty rings"),
    }
}

/// The choice between ring and log is made when the VM starts (hazards.md 2).
#[test]
fn tracker_that_the_vm_was_not_started_for_is_refused_with_the_reason() {
    if !kvm() {
        return;
    }
    let refused = |vm: &mut Vm, kind| match vm.tracker(Some(kind)) {
        Ok(_) => panic!("{kind} was given"),
        Err(error) => error.to_string(),
    };
    let why = refused(&mut Vm::new(VmOptions::new(MEMORY, 1)).unwrap(), TrackerKind::Ring);
    assert!(why.contains("with dirty rings"), "{why}");
    let Some(largest) = largest_dirty_ring().unwrap() else {
        return skip(Need::Kvm, "KVM on this host has no dirty rings");
    };
    let mut options = VmOptions::new(MEMORY, 1);
    options.dirty_ring = Some(RING);
    let why = refused(&mut Vm::new(options.clone()).unwrap(), TrackerKind::Log);
    assert!(why.contains("no dirty log"), "{why}");
    for (entries, word) in [(1000, "power of two"), (largest * 2, "at most")] {
        options.dirty_ring = Some(entries);
        let why = Vm::new(options.clone()).unwrap_err().to_string();
        assert!(why.contains(word), "{why}");
    }
}
