//! Interleavings of a guest that writes, a fault thread and writers, on the production state
//! (shuttle). A thread that waits for ever is a deadlock, which shuttle finds.

use super::{Block, Copies, Live, UNIT_BYTES, units};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;
use std::collections::VecDeque;
use std::sync::Arc;
use vmferry_core::{PAGE_BYTES, PageRun, VmError};
use vmferry_testkit::tries;

/// Three units, of which the last is short.
const PAGES: usize = 40;
/// Pages that the guest writes: the last of each unit, which is copied last, and the first one
/// twice.
const WRITES: [usize; 4] = [15, 31, 15, 39];
const TRIES: usize = 2000;

#[derive(Debug)]
struct State {
    content: [u8; PAGES],
    protected: [bool; PAGES],
    faults: VecDeque<u64>,
    /// True once the writers have ended.
    ended: bool,
}

/// Memory whose writers wait like those of the kernel.
#[derive(Debug)]
struct Memory {
    state: Mutex<State>,
    changed: Condvar,
}

/// Content at the instant of the snapshot.
fn content(page: usize) -> u8 {
    u8::try_from(page).unwrap() + 1
}

impl Memory {
    fn new() -> Self {
        let state = State {
            content: std::array::from_fn(content),
            protected: [true; PAGES],
            faults: VecDeque::new(),
            ended: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Writes a page as a vCPU, which sleeps while the page is protected.
    fn write(&self, page: usize) {
        let mut state = self.state.lock().unwrap();
        if state.protected[page] {
            state.faults.push_back(page as u64);
            self.changed.notify_all();
        }
        while state.protected[page] {
            state = self.changed.wait(state).unwrap();
        }
        state.content[page] = 200;
    }

    fn serve(&self, copies: &Copies) {
        loop {
            let mut state = self.state.lock().unwrap();
            let page = loop {
                match state.faults.pop_front() {
                    Some(page) => break page,
                    None if state.ended => return,
                    None => state = self.changed.wait(state).unwrap(),
                }
            };
            drop(state);
            copies.fault(self, 0, page).unwrap();
        }
    }

    fn end(&self) {
        self.state.lock().unwrap().ended = true;
        self.changed.notify_all();
    }
}

impl Live for Memory {
    fn copy(&self, position: usize, run: PageRun, to: &mut [u8]) -> Result<(), VmError> {
        assert_eq!((position, to.len() as u64), (0, run.bytes()));
        for (page, to) in run.range().zip(to.chunks_exact_mut(PAGE_BYTES)) {
            // Other threads may run between two pages.
            to[0] = self.state.lock().unwrap().content[usize::try_from(page).unwrap()];
        }
        Ok(())
    }

    fn unprotect(&self, _: usize, run: PageRun) -> Result<(), VmError> {
        let mut state = self.state.lock().unwrap();
        run.range().for_each(|page| state.protected[usize::try_from(page).unwrap()] = false);
        self.changed.notify_all();
        Ok(())
    }
}

/// Defect that is planted into a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Unprotects the pages before it has copied them.
    UnprotectsFirst,
    /// Unprotects also the pages that a fault thread is copying.
    UnprotectsTheirs,
}

/// Copies blocks as the production writer does, into `image`.
fn write(memory: &Memory, copies: &Copies, image: &Mutex<[u8; PAGES]>, flaw: Flaw) {
    while let Some(block) = copies.next() {
        let claimed = copies.claim(block);
        let put = |run: PageRun, bytes: &[u8]| {
            let mut image = image.lock().unwrap();
            for (page, byte) in run.range().zip(bytes.iter().step_by(PAGE_BYTES)) {
                let page = &mut image[usize::try_from(page).unwrap()];
                assert_eq!(*page, 0, "copied twice");
                *page = *byte;
            }
        };
        let runs =
            || units().map(|unit| (unit, copies.unit_run(block, unit))).filter(|(_, run)| run.count > 0);
        let mine = || runs().filter(|(unit, _)| claimed.is_mine(*unit));
        let unprotect = || {
            mine().for_each(|(_, run)| memory.unprotect(block.position, run).unwrap());
        };
        if flaw == Flaw::UnprotectsTheirs {
            runs().filter(|(unit, _)| !claimed.is_mine(*unit)).for_each(|(_, run)| {
                memory.unprotect(block.position, run).unwrap();
            });
        }
        if flaw == Flaw::UnprotectsFirst {
            unprotect();
        }
        for (_, run) in mine() {
            let mut bytes = vec![0; usize::try_from(run.bytes()).unwrap()];
            memory.copy(block.position, run, &mut bytes).unwrap();
            put(run, &bytes);
        }
        unprotect();
        copies.unprotected(block);
        for (unit, run) in runs().filter(|(unit, _)| !claimed.is_mine(*unit)) {
            let copied = copies.copied(block, unit).expect("the snapshot was not given up");
            put(run, copied.bytes());
            copies.give_back(copied);
        }
    }
}

fn run(buffer_units: u64, flaw: Flaw) {
    let copies = Arc::new(Copies::new([PAGES as u64], buffer_units * UNIT_BYTES as u64));
    let (memory, image) = (Arc::new(Memory::new()), Arc::new(Mutex::new([0; PAGES])));
    let guest = {
        let memory = Arc::clone(&memory);
        thread::spawn(move || WRITES.iter().for_each(|page| memory.write(*page)))
    };
    let server = {
        let (memory, copies) = (Arc::clone(&memory), Arc::clone(&copies));
        thread::spawn(move || memory.serve(&copies))
    };
    let writers: Vec<_> = (0..2)
        .map(|_| {
            let (memory, copies, image) = (Arc::clone(&memory), Arc::clone(&copies), Arc::clone(&image));
            thread::spawn(move || write(&memory, &copies, &image, flaw))
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    guest.join().unwrap();
    memory.end();
    server.join().unwrap();
    assert_eq!(*image.lock().unwrap(), std::array::from_fn(content), "another content");
    let figures = copies.figures();
    assert!(figures.peak_bytes <= buffer_units * UNIT_BYTES as u64, "{figures:?}");
    assert_eq!(copies.used.load(std::sync::atomic::Ordering::Relaxed), 0);
    assert!(copies.queue.lock().unwrap().waits.is_empty());
}

#[test]
fn image_has_the_content_of_the_instant_and_no_thread_waits_for_ever() {
    for buffer_units in [1, 2, 8] {
        shuttle::check_random(move || run(buffer_units, Flaw::None), tries(TRIES));
    }
}

/// Searches the same interleavings in each run, because the seed is fixed.
fn search(flaw: Flaw) {
    let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(1, 20 * TRIES);
    shuttle::Runner::new(scheduler, shuttle::Config::new()).run(move || run(8, flaw));
}

#[test]
#[should_panic(expected = "another content")]
fn page_that_is_unprotected_before_its_copy_is_noticed() {
    search(Flaw::UnprotectsFirst);
}

#[test]
#[should_panic(expected = "another content")]
fn unit_of_a_fault_thread_that_a_writer_unprotects_is_noticed() {
    search(Flaw::UnprotectsTheirs);
}

#[test]
fn blocks_are_taken_once_and_waiting_ones_first() {
    shuttle::check_random(
        || {
            let copies = Copies::new([600, 40, 1024], UNIT_BYTES as u64);
            let block = |position, number| Block { position, number };
            copies.wait_for_writer(block(2, 1), 3);
            copies.enqueue(|queue| queue.written.push_back(block(1, 0)));
            let order: Vec<_> = std::iter::from_fn(|| copies.next()).collect();
            assert_eq!(order, [block(2, 1), block(1, 0), block(0, 0), block(0, 1), block(2, 0)]);
            copies.claim(block(2, 1));
            copies.unprotected(block(2, 1));
            assert_eq!(copies.figures().waits, 1);
            // A claimed unit needs no wait: its claimer wakes the thread.
            copies.wait_for_writer(block(2, 1), 3);
            assert!(copies.queue.lock().unwrap().waits.is_empty());
        },
        1,
    );
}
