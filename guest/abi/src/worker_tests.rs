//! Tests of the workload: the failures that it detects, and the content that it writes.

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::vec;
use std::vec::Vec;

/// Guest memory for tests.
struct Memory {
    pages: RefCell<Vec<[u64; PAGE_WORDS]>>,
    counters: RefCell<Vec<u64>>,
}

fn index(page: u64) -> usize {
    usize::try_from(page).unwrap()
}

impl PageStore for Memory {
    fn load(&self, page: u64, word: usize) -> u64 {
        self.pages.borrow()[index(page)][word]
    }
    fn store(&self, page: u64, word: usize, value: u64) {
        self.pages.borrow_mut()[index(page)][word] = value;
    }
    fn counter(&self, page: u64) -> u64 {
        self.counters.borrow()[index(page)]
    }
    fn set_counter(&self, page: u64, value: u64) {
        self.counters.borrow_mut()[index(page)] = value;
    }
}

struct Guest {
    memory: Memory,
    layout: Layout,
    workers: Vec<Worker>,
    now: u64,
}

impl Guest {
    /// Returns a guest after its fill. Memory is dirty before, so the fill must write everything.
    fn new(spec: &str, cpus: u64) -> Self {
        let workload: Workload = spec.parse().unwrap();
        let layout = Layout::new(&workload, 1 << 20, cpus).unwrap();
        let memory = Memory {
            pages: RefCell::new(vec![[0xdead; PAGE_WORDS]; index(layout.data_pages)]),
            counters: RefCell::new(vec![0xdead; index(layout.ws_pages)]),
        };
        let mut workers: Vec<_> = (0..cpus).map(|cpu| Worker::new(&workload, &layout, cpu)).collect();
        for worker in &mut workers {
            while !worker.fill(&memory, 7) {}
        }
        Self { memory, layout, workers, now: 0 }
    }

    /// Runs `steps` steps on each vCPU, a microsecond each. Returns the failures.
    fn run(&mut self, steps: u64) -> Vec<Corrupt> {
        let mut found = Vec::new();
        for _ in 0..steps {
            self.now += 1000;
            for worker in &mut self.workers {
                if let Step::Corrupt(corrupt) = worker.step(&self.memory, self.now) {
                    found.push(corrupt);
                }
            }
        }
        found
    }

    /// Runs until every vCPU has checked all its pages. Returns the failures.
    fn verify(&mut self, request: u64) -> Vec<Corrupt> {
        for worker in &mut self.workers {
            worker.verify(request);
        }
        let found = self.run(self.layout.data_pages + 1);
        assert!(self.workers.iter().all(|worker| worker.verify_done == request));
        found
    }

    fn page(&self, page: u64) -> [u64; PAGE_WORDS] {
        self.memory.pages.borrow()[index(page)]
    }

    fn set_page(&self, page: u64, content: [u64; PAGE_WORDS]) {
        self.memory.pages.borrow_mut()[index(page)] = content;
    }
}

const SPECS: [&str; 9] = [
    "uniform,ws=256K,data=1M",
    "sequential,ws=256K,data=1M,fill=zero",
    "zipf:0.99,ws=256K,data=1M,fill=text",
    "uniform,ws=256K,data=1M,fill=mix:30,rate=100k",
    "uniform,ws=256K,data=1M,sweep=100k",
    "uniform,ws=256K,data=1M,write=whole,fill=mix:30",
    "sequential,ws=256K,data=1M,write=append,fill=pointers",
    "zipf:0.99,ws=256K,data=1M,write=append,fill=zero",
    "idle,data=1M",
];

#[test]
fn undisturbed_guest_detects_no_failure() {
    for spec in SPECS {
        for cpus in [1, 3] {
            let mut guest = Guest::new(spec, cpus);
            assert_eq!(guest.run(20_000), [], "{spec}");
            assert_eq!(guest.verify(1), [], "{spec}");
            let writes: u64 = guest.workers.iter().map(|worker| worker.writes).sum();
            assert_eq!(writes == 0, spec.starts_with("idle"), "{spec}");
        }
    }
}

#[test]
fn content_matches_the_fill() {
    let guest = Guest::new("idle,data=256K,fill=mix:40", 2);
    for page in 0..64 {
        let want: Vec<u64> = (0..PAGE_WORDS).map(|word| Fill::Mix(40).word(page, word)).collect();
        assert_eq!(guest.page(page)[..], want[..]);
    }
}

/// Replaces a page by other content. Returns the failures that the guest then detects.
fn disturbed(spec: &str, page: u64, other: impl Fn(&Guest) -> [u64; PAGE_WORDS]) -> Vec<Corrupt> {
    let mut guest = Guest::new(spec, 2);
    assert_eq!(guest.run(5000), []);
    let content = other(&guest);
    guest.set_page(page, content);
    guest.verify(9)
}

#[test]
fn lost_page_is_detected_at_any_position() {
    // Pages 0..64 are the working set. The others are only filled.
    for page in [0, 1, 31, 32, 63, 64, 100, 255] {
        for spec in ["uniform,ws=256K,data=1M", "idle,data=1M", "uniform,ws=256K,data=1M,fill=text"] {
            let zero = disturbed(spec, page, |_| [0; PAGE_WORDS]);
            assert!(zero.iter().any(|corrupt| corrupt.page == page), "{spec}: page {page} became zero");
            let neighbour = disturbed(spec, page, |guest| guest.page(page ^ 1));
            assert!(
                neighbour.iter().any(|corrupt| corrupt.page == page),
                "{spec}: page {page} is its neighbour"
            );
        }
    }
}

#[test]
fn zero_page_with_content_is_detected() {
    let mut stamped = [0; PAGE_WORDS];
    stamped[0] = 100;
    let found = disturbed("uniform,ws=256K,data=1M,fill=zero", 100, |_| stamped);
    assert_eq!(found[0], Corrupt { page: 100, word: 0, want: 0, got: 100 });
}

#[test]
fn old_version_of_a_page_is_detected() {
    for spec in ["uniform,ws=256K,data=1M", "sequential,ws=256K,fill=zero", "zipf:1.1,ws=4K,rate=100k"] {
        let mut guest = Guest::new(spec, 1);
        guest.run(3000);
        let old = guest.page(0);
        guest.run(3000);
        assert_ne!(old, guest.page(0));
        guest.set_page(0, old);
        let found = guest.verify(2);
        assert_eq!(found[0].page, 0, "{spec}");
        assert_eq!(found[0].got, old[1], "{spec}");
        assert!(found[0].want > old[1], "{spec}");
        assert!(guest.workers[0].corrupt >= 1 && guest.workers[0].first_corrupt == Some(found[0]));
    }
}

#[test]
fn old_content_under_a_new_stamp_is_detected() {
    for spec in ["uniform,ws=256K,write=whole,fill=text", "sequential,ws=256K,write=append"] {
        let mut guest = Guest::new(spec, 1);
        guest.run(3000);
        let old = guest.page(0);
        guest.run(3000);
        let new = guest.page(0);
        assert!(old[2..].iter().zip(&new[2..]).any(|(old, new)| old != new), "{spec}");
        let mut torn = old;
        torn[..2].copy_from_slice(&new[..2]);
        guest.set_page(0, torn);
        // A further write would repair a part of the page before the sweep reads it.
        guest.workers[0].picker = Picker::new(Pattern::Idle, 64, 0);
        let found: Vec<Corrupt> = (1..=170).flat_map(|request| guest.verify(request)).collect();
        assert!(found.iter().any(|corrupt| corrupt.page == 0 && corrupt.word >= 2), "{spec}: {found:?}");
    }
}

#[test]
fn lost_counter_is_detected() {
    let mut guest = Guest::new("uniform,ws=256K", 1);
    guest.run(3000);
    guest.memory.set_counter(5, guest.memory.counter(5) - 1);
    assert!(guest.verify(2).iter().any(|corrupt| corrupt.page == 5));
}

#[test]
fn sweeps_check_every_word() {
    let mut guest = Guest::new("idle,data=16K", 1);
    let mut page = guest.page(2);
    page[333] ^= 1;
    guest.set_page(2, page);
    let found: Vec<Corrupt> = (1..=170).flat_map(|request| guest.verify(request)).collect();
    assert!(found.iter().any(|corrupt| (corrupt.page, corrupt.word) == (2, 333)), "{found:?}");
}

#[test]
fn paced_writers_keep_their_rate() {
    let mut guest = Guest::new("uniform,ws=256K,rate=100k", 1);
    guest.run(100_000);
    assert!(guest.workers[0].writes.abs_diff(10_000) < 10, "{}", guest.workers[0].writes);
    assert!(guest.workers[0].checks.abs_diff(10_400) < 20, "{}", guest.workers[0].checks);
}

#[test]
fn bursts_and_rests_take_turns() {
    let mut guest = Guest::new("uniform,ws=64K,rate=10k,burst=10,sweep=0", 1);
    assert!(guest.workers[0].rests());
    for burst in 1..=3 {
        // A rest of 10 ms comes first. Each step takes a microsecond.
        let before = guest.workers[0].writes;
        while guest.now + 1000 < (2 * burst - 1) * 10_000_000 {
            guest.now += 1000;
            assert_eq!(guest.workers[0].step(&guest.memory, guest.now), Step::Rested);
        }
        assert_eq!(guest.workers[0].writes, before);
        guest.run(10_000);
        let written = guest.workers[0].writes - before;
        // A debt of up to one millisecond is caught up.
        assert!((100..=111).contains(&written), "{written}");
    }
    assert!(!Guest::new("uniform,ws=64K,rate=10k", 1).workers[0].rests());
    assert!(Guest::new("idle", 1).workers[0].rests());
}

#[test]
fn sweep_rate_is_independent_of_the_writes() {
    let mut none = Guest::new("uniform,ws=256K,sweep=0", 1);
    none.run(10_000);
    assert_eq!((none.workers[0].checks, none.workers[0].writes), (0, 10_000));
    let mut some = Guest::new("uniform,ws=256K,sweep=10k", 1);
    some.run(100_000);
    assert!(some.workers[0].checks.abs_diff(1000) < 5);
}

#[test]
fn gaps_between_steps_are_stalls_and_sleep_is_not() {
    let mut guest = Guest::new("idle,data=16K", 1);
    guest.run(10);
    guest.now += 100_000;
    guest.run(1);
    guest.workers[0].slept(guest.now + 10_000_000, guest.now + 10_500_000);
    guest.workers[0].slept(guest.now + 20_000_000, guest.now + 50_000_000);
    let report = guest.workers[0].report(guest.now);
    assert_eq!((report.stalls, report.stall_max_us, report.window_max_us), (2, 30_000, 30_000));
    assert_eq!(report.stall_sum_us, 30_101);
    assert_eq!(guest.workers[0].report(guest.now).window_max_us, 0);
}

#[test]
fn stall_before_other_work_counts_and_the_other_work_does_not() {
    let mut guest = Guest::new("idle,data=16K", 1);
    guest.run(10);
    guest.now += 100_000;
    guest.workers[0].pause(guest.now);
    guest.now += 700_000;
    guest.workers[0].resume(guest.now);
    guest.run(1);
    let report = guest.workers[0].report(guest.now);
    assert_eq!((report.stalls, report.stall_sum_us), (1, 100));
}

proptest! {
    #[test]
    fn restored_worker_continues_like_the_original(steps in 0u64..3000, spec in 0usize..SPECS.len()) {
        let mut moved = Guest::new(SPECS[spec], 2);
        moved.run(steps);
        let saved: Vec<SavedWorker> = moved.workers.iter().map(Worker::save).collect();
        let workload: Workload = SPECS[spec].parse().unwrap();
        for (cpu, saved) in saved.iter().enumerate() {
            let mut worker = Worker::new(&workload, &moved.layout, cpu as u64);
            worker.restore(saved);
            prop_assert_eq!(worker.save(), *saved);
            moved.workers[cpu] = worker;
        }
        prop_assert_eq!(moved.run(3000), []);
        prop_assert_eq!(moved.verify(5), []);
    }

    #[test]
    fn restoring_invalid_state_does_not_panic(words in proptest::array::uniform32(any::<u64>())) {
        let mut guest = Guest::new("sequential,ws=256K,data=512K", 2);
        let mut saved = guest.workers[0].save();
        saved.words[..32].copy_from_slice(&words);
        saved.words[8..11].fill(0);
        saved.words[16..].fill(0);
        guest.workers[0].restore(&saved);
        guest.run(500);
    }
}
