//! Tests of a KVM guest that runs before its memory has arrived.

use crate::confined::kvm;
use crate::rig::{boot, empty, verified};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PageRun, PageSet};
use vmferry_engine::{DemandPaging, TargetVm};
use vmferry_guest_abi::{State, StatsSnapshot};
use vmferry_testkit::{Need, PATIENCE, print_line, skip, wait};
use vmferry_vmm::{Backing, Vm, VmOptions};

const MEMORY: u64 = 64 << 20;
const CPUS: u32 = 2;

fn running() -> Vm {
    let vm = boot(VmOptions::new(MEMORY, CPUS), "uniform,ws=16M,rate=20k,fill=mix:30");
    let handle = vm.handle();
    let busy = |stats: StatsSnapshot| stats.state == State::Running && stats.writes() > 2000;
    wait("the guest's work", || handle.stats().is_ok_and(busy));
    vm
}

/// Guest during its move: the paused source, which has all pages, and the target, which has none.
struct Move {
    source: Vm,
    target: Vm,
    paging: Arc<dyn DemandPaging>,
}

/// Returns a guest during its move, or `None`, where the calling test is skipped, if this host
/// cannot do demand paging.
fn moving(backing: Backing) -> Option<Move> {
    if !kvm() {
        return None;
    }
    let mut options = VmOptions::new(MEMORY, CPUS);
    options.backing = backing;
    let mut target = empty(options);
    let paging = match target.demand_paging() {
        Ok(paging) => paging,
        Err(error) => {
            skip(Need::Uffd, format!("{backing}: {error}"));
            return None;
        }
    };
    let mut source = running();
    source.pause().unwrap();
    let saved = source.save_state().unwrap();
    // Stale content everywhere, as a precopy leaves it.
    for ram in target.ram().regions() {
        let window = target.ram().window(ram.region().id, ram.region().run()).unwrap();
        (0..window.pages()).for_each(|page| window.write_page(page, &[0xa5; PAGE_BYTES]));
    }
    paging.begin(&PageSet::full(target.ram().layout())).unwrap();
    TargetVm::load(&mut target, &saved).unwrap();
    Some(Move { source, target, paging })
}

#[derive(Default)]
struct Counts {
    done: AtomicBool,
    /// Locked by the test while no fault may be resolved.
    gate: Mutex<()>,
    /// Number of faults that were read and are not resolved yet. A thread sleeps for each.
    waiting: AtomicU64,
    placed: AtomicU64,
    of_vcpus: AtomicU64,
    others: AtomicU64,
}

fn serve(source: &Vm, paging: &dyn DemandPaging, shard: usize, counts: &Counts) {
    let mut page = [0; PAGE_BYTES];
    while !counts.done.load(Ordering::Acquire) {
        let Some(fault) = paging.next_fault(shard, Duration::from_millis(200)).unwrap() else { continue };
        let whose = if fault.vcpu.is_some() { &counts.of_vcpus } else { &counts.others };
        whose.fetch_add(1, Ordering::Relaxed);
        counts.waiting.fetch_add(1, Ordering::AcqRel);
        let open = counts.gate.lock().unwrap();
        let run = PageRun::new(fault.page, 1);
        let window = source.ram().window(fault.region, run).unwrap();
        let placed = if window.copy_page(0, &mut page) {
            paging.place_zeros(fault.region, run)
        } else {
            paging.place(fault.region, run, &page)
        };
        drop(open);
        counts.waiting.fetch_sub(1, Ordering::AcqRel);
        counts.placed.fetch_add(placed.unwrap().pages, Ordering::Relaxed);
    }
}

fn with_served(moving: &mut Move, work: impl FnOnce(&mut Vm, &Counts)) -> Counts {
    let counts = Counts::default();
    let (source, paging, target) = (&moving.source, &*moving.paging, &mut moving.target);
    std::thread::scope(|scope| {
        for shard in 0..paging.shards() {
            let counts = &counts;
            scope.spawn(move || serve(source, paging, shard, counts));
        }
        work(target, &counts);
        counts.done.store(true, Ordering::Release);
        paging.interrupt();
    });
    counts
}

#[test]
fn guest_runs_before_its_memory_has_arrived() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let Some(mut moving) = moving(backing) else { return };
        let before = moving.source.handle().stats().unwrap().writes();
        // A reader of statistics must not wait for a page: none arrives yet, so a reader that waits
        // never returns.
        assert!(moving.target.handle().stats().is_err());
        assert!(!moving.target.handle().request_verify(1));
        let paging = Arc::clone(&moving.paging);
        let counts = with_served(&mut moving, |target, _| {
            target.start().unwrap();
            let stats = verified(&target.handle(), 7);
            assert_eq!(stats.corrupt(), 0, "{:?}", stats.first_corrupt());
            assert!(stats.writes() > before);
            target.pause().unwrap();
            paging.end().unwrap();
            target.resume().unwrap();
        });
        let placed = counts.placed.into_inner();
        print_line(format!(
            "{backing}: {placed} pages placed, faults of vCPUs {}, of others {}",
            counts.of_vcpus.load(Ordering::Relaxed),
            counts.others.load(Ordering::Relaxed)
        ));
        assert!((4096..=MEMORY >> 12).contains(&placed), "{placed} pages");
        // KVM proper may hand a fault to a kernel worker and halt the vCPU meanwhile, so that an
        // interrupt finds it. Such a fault is not attributed to a vCPU. kvm_pvm handles all faults
        // in the vCPU's thread.
        if std::path::Path::new("/sys/module/kvm_pvm").exists() {
            assert!(counts.of_vcpus.into_inner() >= placed);
        }
        // Pages that were never requested read as zeros, and the guest does not need them.
        let stats = verified(&moving.target.handle(), 8);
        assert_eq!(stats.corrupt(), 0, "{:?}", stats.first_corrupt());
    }
}

#[test]
fn vcpu_that_sleeps_on_a_missing_page_can_be_paused_and_resumed() {
    let Some(mut moving) = moving(Backing::Anonymous) else { return };
    with_served(&mut moving, |target, counts| {
        target.start().unwrap();
        let mut slowest = Duration::ZERO;
        for _ in 0..20 {
            let placed = counts.placed.load(Ordering::Relaxed);
            wait("pages to arrive", || counts.placed.load(Ordering::Relaxed) > placed + 10);
            // From here on no page arrives.
            let gate = counts.gate.lock().unwrap();
            wait("a thread that sleeps on a page", || counts.waiting.load(Ordering::Acquire) > 0);
            let begin = Instant::now();
            let paused = target.pause();
            slowest = slowest.max(begin.elapsed());
            drop(gate);
            match paused {
                Ok(()) => target.resume().unwrap(),
                Err(error) => {
                    print_line(format!(
                        "pause of a sleeping vCPU: the host's kernel does not interrupt it: {error}"
                    ));
                    assert!(slowest < PATIENCE, "the pause hung");
                    target.pause().unwrap();
                    target.resume().unwrap();
                    break;
                }
            }
        }
        print_line(format!("slowest pause of sleeping vCPUs: {slowest:?}"));
        let stats = verified(&target.handle(), 3);
        assert_eq!(stats.corrupt(), 0, "{:?}", stats.first_corrupt());
    });
}

#[test]
fn vm_whose_vcpus_sleep_can_be_dropped() {
    let Some(Move { source, mut target, paging }) = moving(Backing::Anonymous) else { return };
    target.start().unwrap();
    let fault = |shard| paging.next_fault(shard, Duration::ZERO).unwrap().is_some();
    wait("a vCPU that sleeps on a page", || (0..paging.shards()).any(fault));
    let begin = Instant::now();
    drop(target);
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    print_line(format!("a VM with sleeping vCPUs was dropped after {:?}", begin.elapsed()));
    // The engine may still hold a reference to it.
    paging.end().unwrap();
    drop((paging, source));
}
