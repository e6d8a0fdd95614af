//! Threads that take the role of vCPUs.

use crate::clock::Clock;
use crate::heap::{Churn, Counts, Heap};
use crate::memory::Memory;
use crate::ram::{Ram, stats_page};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_guest_abi::{CpuBlock, Every, REPORT_NS, State, Step, Worker};
use vmferry_thread::ThrottleShares;

/// Number of steps between two checks of the gate, which take some microseconds.
const STEPS: u32 = 64;
/// Number of pages that are filled between two checks of the gate.
const FILL_PAGES: u64 = 64;
/// Interval between two series of heap operations, in ns. It results in 20,000 operations per
/// second.
const HEAP_NS: u64 = 400_000;
/// Maximum sleep of an idle thread.
const NAP: Duration = Duration::from_millis(1);

/// Gate that lets the threads run, or holds them. Its state changes only under the lock, so that a
/// thread that is about to wait cannot miss a change.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// `(running, ending)`.
    state: Mutex<(bool, bool)>,
    changed: Condvar,
    /// Copy of `running && !ending`, which the hot loop can read with a single load.
    go: AtomicBool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    pub(crate) fn set(&self, running: bool, ending: bool) {
        let mut state = lock(&self.state);
        *state = (running, ending);
        self.go.store(running && !ending, Ordering::Release);
        self.changed.notify_all();
    }

    /// Waits until the threads may run. Returns false if they must end.
    fn pass(&self) -> bool {
        let mut state = lock(&self.state);
        loop {
            match *state {
                (_, true) => return false,
                (true, false) => return true,
                (false, false) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn open(&self) -> bool {
        self.go.load(Ordering::Acquire)
    }

    fn nap(&self) {
        let state = lock(&self.state);
        if *state == (true, false) {
            // The thread wakes as soon as the gate changes, so that a pause need not wait for the
            // end of the sleep.
            drop(self.changed.wait_timeout(state, NAP));
        }
    }

    /// Holds the calling thread for `time`, or until the gate changes, so that a pause need not
    /// wait for the end of the hold.
    fn hold(&self, time: Duration) {
        let open = |state: &mut (bool, bool)| *state == (true, false);
        drop(self.changed.wait_timeout_while(lock(&self.state), time, open));
    }
}

/// State of one vCPU thread. The thread holds the lock of the worker while it runs. If a caller has
/// closed the gate and then gets the lock, only that caller uses the worker.
#[derive(Debug)]
pub(crate) struct Cpu {
    pub(crate) index: usize,
    pub(crate) worker: Mutex<Worker>,
    /// True if the thread has written the initial content of its share of memory.
    pub(crate) filled: AtomicBool,
}

/// State that all threads share.
#[derive(Debug)]
pub(crate) struct WorkerContext {
    pub(crate) gate: Gate,
    pub(crate) memory: Arc<Memory>,
    pub(crate) ram: Ram,
    pub(crate) clock: Clock,
    pub(crate) cpus: Vec<Cpu>,
    pub(crate) filled: AtomicU64,
    /// Heap, and the state of the work on it. The first thread works on the heap, in addition to
    /// its other work.
    pub(crate) heap: Option<(Heap, Mutex<Churn>)>,
    pub(crate) counts: Arc<Counts>,
    /// Shares of the throttle. Each thread holds itself, between two checks of the gate.
    pub(crate) throttle: Arc<ThrottleShares>,
}

impl WorkerContext {
    /// Runs thread `index` until the guest ends.
    pub(crate) fn run(&self, index: usize) {
        let cpu = &self.cpus[index];
        while self.gate.pass() {
            let mut worker = lock(&cpu.worker);
            // A pause may have begun after the thread passed the gate and before it got the lock,
            // and the caller of the pause may already have had the lock. In that case, the thread
            // must not write anything, not even a report. If the pause begins later, its caller
            // waits for the lock.
            if self.gate.open() {
                let mut held = None;
                self.fill(cpu, &mut worker, &mut held);
                self.work(cpu, &mut worker, &mut held);
            }
        }
    }

    /// Holds the calling thread, the thread of `cpu`, if the throttle requires a hold now. `held`
    /// is the time of the previous hold since the last pause.
    fn throttle(&self, cpu: &Cpu, held: &mut Option<Instant>) {
        if self.throttle.is_due(cpu.index) {
            self.throttle.pass(cpu.index, held, |time| self.gate.hold(time));
        }
    }

    fn fill(&self, cpu: &Cpu, worker: &mut Worker, held: &mut Option<Instant>) {
        if cpu.filled.load(Ordering::Acquire) {
            return;
        }
        while self.gate.open() {
            if worker.fill(&self.ram, FILL_PAGES) {
                cpu.filled.store(true, Ordering::Release);
                worker.resume(self.clock.ns());
                if self.filled.fetch_add(1, Ordering::AcqRel) + 1 == self.cpus.len() as u64 {
                    self.ready();
                }
                return;
            }
            self.throttle(cpu, held);
        }
    }

    fn ready(&self) {
        let page = stats_page(&self.memory);
        page.header.ready_us.store((self.clock.ns() / 1000).max(1), Ordering::Relaxed);
        page.raise(State::Running);
    }

    fn work(&self, cpu: &Cpu, worker: &mut Worker, held: &mut Option<Instant>) {
        let page = stats_page(&self.memory);
        let block: &CpuBlock = &page.cpus[cpu.index];
        let mut reports = Every::new(REPORT_NS, self.clock.ns());
        let mut deeds = Every::new(HEAP_NS, self.clock.ns());
        while self.gate.open() && cpu.filled.load(Ordering::Relaxed) {
            for _ in 0..STEPS {
                let now = self.clock.ns();
                match worker.step(&self.ram, now) {
                    Step::Worked => {}
                    Step::Rested => {
                        self.gate.nap();
                        worker.slept(now + 1_000_000, self.clock.ns());
                        break;
                    }
                    Step::Waited => std::hint::spin_loop(),
                    Step::Corrupt(_) => page.raise(State::Corrupt),
                }
            }
            let now = self.clock.ns();
            if let (Some((heap, churn)), 0) = (&self.heap, cpu.index) {
                let mut churn = lock(churn);
                if (deeds.due(now) || heap.is_new(&churn)) && !heap.step(&mut churn, &self.counts) {
                    page.raise(State::Corrupt);
                }
            }
            if reports.due(now) {
                worker.verify(page.header.verify_request.load(Ordering::Relaxed));
                block.publish(&worker.report(now));
            }
            self.throttle(cpu, held);
        }
        // Publish a last report before a pause, so that the newest figures move with the guest.
        if cpu.filled.load(Ordering::Relaxed) {
            block.publish(&worker.report(self.clock.ns()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::PATIENCE;

    #[test]
    fn pause_ends_a_hold() {
        let gate = Gate::default();
        gate.set(true, false);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let held = scope.spawn(|| gate.hold(4 * PATIENCE));
            gate.set(false, false);
            held.join().unwrap();
        });
        // Also if the pause comes before the hold.
        gate.hold(4 * PATIENCE);
        assert!(begin.elapsed() < 2 * PATIENCE, "{:?}", begin.elapsed());
    }
}
