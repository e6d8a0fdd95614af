//! Process guest whose state is loaded from arbitrary bytes, for the fuzz target and for a test
//! with seeded noise.

use crate::clock::SavedClock;
use crate::ram::stats_page;
use crate::state::Saved;
use crate::worker::lock;
use crate::{ProcessGuest, ProcessOptions};
use std::sync::atomic::Ordering;
use vmferry_engine::Section;
use vmferry_guest_abi::SavedWorker;

/// Guest memory, in bytes.
const MEMORY: u64 = 8 << 20;
const CPUS: u32 = 2;
/// Number of steps that each worker takes.
const STEPS: u64 = 64;
/// Maximum number of changes that are made to the sections. Bytes after these changes are not used.
const CHANGES: usize = 32;

const WORKLOADS: [&str; 4] =
    ["uniform,ws=2M,rate=100k,fill=random", "sequential,ws=1M", "idle", "zipf:0.9,ws=1M,data=2M,sweep=10k"];

/// Returns the sections of a guest, with the changes that `bytes` describe.
fn sections(bytes: &[u8]) -> Vec<Section> {
    let Some((&[workload, heap], mut rest)) = bytes.split_first_chunk::<2>() else { return Vec::new() };
    let saved = Saved {
        workload: WORKLOADS[usize::from(workload) % WORKLOADS.len()].parse().expect("a workload"),
        clock: SavedClock { ns: 7, realtime_ns: 9 },
        workers: (0..CPUS).map(|_| SavedWorker { words: [0; SavedWorker::WORDS] }).collect(),
        heap: u64::from(heap) * 8,
    };
    let mut sections = saved.sections().expect("sections");
    for _ in 0..CHANGES {
        let Some((&[which, low, high, len], more)) = rest.split_first_chunk::<4>() else { break };
        let (change, more) = more.split_at(more.len().min(usize::from(len % 32)));
        rest = more;
        let at = usize::from(which) % sections.len();
        let section = &mut sections[at];
        let at = usize::from(u16::from_le_bytes([low, high])) % (section.payload.len() + 1);
        match which / 32 {
            0..3 => {
                let end = (at + change.len()).min(section.payload.len());
                section.payload.splice(at..end, change.iter().copied());
            }
            3 | 4 => drop(section.payload.splice(at..at, change.iter().copied())),
            5 => section.payload.truncate(at),
            6 => section.instance ^= u32::from(low),
            _ => section.payload = change.to_vec(),
        }
    }
    sections
}

/// Loads the sections that `bytes` describe. If the guest accepts them, the function lets it take
/// some steps.
///
/// # Panics
/// Panics if the guest panics.
pub fn drive(bytes: &[u8]) {
    let mut guest = ProcessGuest::new_incoming(ProcessOptions::new(MEMORY, CPUS)).expect("memory");
    if guest.load_state(&sections(bytes)).is_err() {
        return;
    }
    let shared = guest.shared("look at the guest").expect("the state was loaded");
    for cpu in &shared.cpus {
        let mut worker = lock(&cpu.worker);
        worker.fill(&shared.ram, 32);
        for step in 0..STEPS {
            let _ = worker.step(&shared.ram, 1000 + step * 10_000);
        }
        worker.verify(3);
        let report = worker.report(2_000_000);
        stats_page(&shared.memory).cpus[cpu.index].publish(&report);
    }
    stats_page(&shared.memory).header.cpus.store(CPUS.into(), Ordering::Relaxed);
    if let Some((heap, churn)) = &shared.heap {
        let mut churn = lock(churn);
        (0..8).for_each(|_| {
            let _ = heap.step(&mut churn, &shared.counts);
        });
        let _ = heap.check_all();
    }
    guest.save_state().expect("what was loaded is saved");
}
