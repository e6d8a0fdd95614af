//! Tests of the allocation workload: the state that it leaves, and the failures that it detects.

use super::*;
use crate::heap::tests::{Model, advance_past_flush, buffers, entries, machine, own_heap, spans, words};
use crate::{ASYNC_ENTRIES, Batch, Reports, SYNC_ENTRIES};
use std::sync::atomic::{AtomicBool, Ordering};
use std::vec::Vec;

const MIB: u64 = 1 << 20;

fn spec(bytes: u64, rounds: u64, frag: u64) -> Allocation {
    Allocation { bytes, rounds, frag }
}

/// Runs all rounds on one vCPU. Returns the failures.
fn run(machine: &Model<'_>, churn: &mut Churn, heap: &mut Heap<'_>) -> Vec<Corrupt> {
    let mut wrong = Vec::new();
    while churn.step(machine, heap, &mut |corrupt| wrong.push(corrupt)) == Progress::Worked {
        heap.tick(machine, machine.now_ns());
    }
    wrong
}

#[test]
fn everything_is_touched_checked_freed_and_reported() {
    machine!(machine, 8192);
    let start = machine.with(|buddy| buddy.check());
    own_heap!(mut heap, SYNC_ENTRIES, 512);
    let mut churn = Churn::new(spec(24 * MIB, 5, 0), 0, 1);
    assert_eq!(run(&machine, &mut churn, &mut heap), []);
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    let stats = heap.stats();
    assert_eq!((stats.rounds, stats.short_rounds, stats.done), (5, 0, 1));
    for bytes in [stats.alloc_bytes, stats.touched_bytes, stats.freed_bytes] {
        assert_eq!(bytes, 5 * 24 * MIB);
    }
    assert_eq!(stats.alloc_hist.iter().sum::<u64>(), stats.allocs);
    assert_eq!(stats.free_hist.iter().sum::<u64>(), stats.frees);
    // The blocks are the same as in the beginning, and all of them count as reported.
    assert_eq!(machine.with(|buddy| buddy.check()), start);
}

#[test]
fn fragmented_memory_is_reported_too() {
    machine!(machine, 16_384);
    own_heap!(mut heap, SYNC_ENTRIES, 512);
    let mut churn = Churn::new(spec(48 * MIB, 2, 64), 0, 1);
    assert_eq!(run(&machine, &mut churn, &mut heap), []);
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(churn.kept.pages(), 48 * 256 / 64);
    // Freed memory is in pieces of at most 32 pages, except at some borders of the allocated
    // memory.
    let large = machine.with(|buddy| {
        let free = buddy.check().into_iter().filter(|(block, _)| block.order > 5);
        free.map(|(block, _)| block.pages()).sum::<u64>()
    });
    assert!(large < 16_384 - 48 * 256 + 1000, "{large}");
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
    // The kept pages are still allocated.
    let mut wrong = Vec::new();
    churn.verify(&machine, &mut |corrupt| wrong.push(corrupt));
    assert_eq!(wrong, []);
}

#[test]
fn host_that_drops_more_than_reported_is_detected() {
    for frag in [0, 8] {
        machine!(mut machine, 8192);
        machine.greed = 1;
        own_heap!(mut heap, SYNC_ENTRIES, 512);
        let mut churn = Churn::new(spec(24 * MIB, 3, frag), 0, 1);
        let mut wrong = run(&machine, &mut churn, &mut heap);
        churn.verify(&machine, &mut |corrupt| wrong.push(corrupt));
        assert!(!wrong.is_empty(), "frag={frag}");
        assert!(wrong[0].page >= ALLOC_PAGE && wrong[0].got == 0);
    }
}

#[test]
fn page_of_an_earlier_round_is_detected() {
    machine!(machine, 4096);
    let mut slots = [Block::default(); 8];
    let mut heap = Heap::new(&[], 0, Reports::Off, false, Batch::new(&mut slots));
    let mut churn = Churn::new(spec(8 * MIB, 0, 4), 0, 1);
    let mut old = Vec::new();
    let mut wrong = Vec::new();
    let gpa = 0x12_3000;
    for round in 1..=2 {
        while churn.round < round || !matches!(churn.phase, Phase::Next) {
            churn.step(&machine, &mut heap, &mut |corrupt| wrong.push(corrupt));
        }
        if round == 1 {
            old = (0..512).map(|word| machine.load(gpa + 8 * word)).collect();
        } else {
            (0..512).zip(&old).for_each(|(word, value)| machine.store(gpa + 8 * word, *value));
        }
        assert_eq!(wrong, []);
        while matches!(churn.phase, Phase::Next | Phase::Check { .. }) {
            churn.step(&machine, &mut heap, &mut |corrupt| wrong.push(corrupt));
        }
    }
    churn.verify(&machine, &mut |corrupt| wrong.push(corrupt));
    assert_eq!(wrong.iter().map(|corrupt| corrupt.page).collect::<Vec<_>>(), [ALLOC_PAGE + gpa / PAGE_SIZE]);
}

#[test]
fn shares_add_up() {
    for cpus in [1, 2, 3, 7, 64] {
        let pages: u64 = (0..cpus).map(|cpu| Churn::new(spec(100 * MIB + 4096, 1, 0), cpu, cpus).share).sum();
        assert_eq!(pages, 25_601);
    }
}

/// Runs several vCPUs at once in memory that is barely enough, so that they take from each other
/// and wait.
fn together(reports: [Reports; 3], entries_each: usize, frag: u64) {
    const PAGES: u64 = 8192;
    machine!(machine, PAGES);
    let entries = entries(3, entries_each);
    let buffers = buffers(&entries);
    let mut slots = [const { [Block { frame: 0, order: 0 }; 512] }; 3];
    let working = AtomicBool::new(true);
    let mut heaps = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (cpu, slots) in slots.iter_mut().enumerate() {
            let (machine, buffers, working) = (&machine, &buffers, &working);
            threads.push(scope.spawn(move || {
                let mut heap = Heap::new(buffers, cpu, reports[cpu], cpu == 2, Batch::new(slots));
                let mut churn = Churn::new(spec(PAGES * 4096 / 100 * 97, 12, frag), cpu as u64, 3);
                assert_eq!(run(machine, &mut churn, &mut heap), []);
                let mut wrong = Vec::new();
                churn.verify(machine, &mut |corrupt| wrong.push(corrupt));
                assert_eq!(wrong, []);
                if cpu == 2 {
                    working.store(false, Ordering::Relaxed);
                }
                assert_eq!(heap.stats().rounds, 12);
                heap
            }));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(!working.load(Ordering::Relaxed));
    advance_past_flush(&machine, &mut heaps);
    machine.with(|buddy| {
        buddy.check();
        assert_eq!((buddy.pages().unreported, buddy.pages().isolated), (0, 0));
    });
    assert!(machine.reports.load(Ordering::Relaxed) > 0);
}

#[test]
fn vcpus_that_report_themselves_do_not_disturb_each_other() {
    for frag in [0, 16] {
        together([Reports::Own; 3], SYNC_ENTRIES, frag);
    }
}

#[test]
fn vcpus_with_one_reporter_do_not_disturb_each_other() {
    for frag in [0, 16] {
        together([Reports::Handed, Reports::Handed, Reports::ForAll], ASYNC_ENTRIES, frag);
    }
}
