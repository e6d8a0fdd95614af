//! The guest and its life cycle: filling, running, paused, migrated.

use crate::clock::Clock;
use crate::free::FreeHeap;
use crate::heap::{Churn, Counts, Heap, HeapFigures};
use crate::memory::Memory;
use crate::ram::{Ram, stats_page, usable_pages};
use crate::state::Saved;
use crate::worker::{Cpu, Gate, WorkerContext, lock};
use crate::{Error, ProcessOptions};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE, PageRun, RegionFile, RunState};
use vmferry_engine::{GuestMemory, Section};
use vmferry_fault::PagingSlot;
use vmferry_guest_abi::{
    MAX_CPUS, STATS_GPA, STATS_MAGIC, STATS_VERSION, State, StatsError, StatsSnapshot, Worker, Workload,
    stats_bytes,
};
use vmferry_thread::ThrottleShares;

/// Process guest: a guest without KVM, whose vCPUs are threads of this process. Dropping the guest
/// ends its threads.
#[derive(Debug)]
pub struct ProcessGuest {
    pub(crate) options: ProcessOptions,
    pub(crate) memory: Arc<Memory>,
    /// Workload and the state of the threads. `None` until the guest has its own workload, or that
    /// of a loaded state.
    running: Option<(Workload, Arc<WorkerContext>)>,
    /// Run state that the operator requested.
    wanted: RunState,
    threads: Vec<JoinHandle<()>>,
    pub(crate) paging: Arc<PagingSlot>,
    counts: Arc<Counts>,
    throttle: Arc<ThrottleShares>,
}

/// Handle with which threads other than the machine's owner observe a process guest. A clone refers
/// to the same guest.
#[derive(Debug, Clone)]
pub struct ProcessHandle {
    memory: Arc<Memory>,
    paging: Arc<PagingSlot>,
    counts: Arc<Counts>,
}

/// Maximum time that threads may take to pause. They take less than a millisecond unless they wait
/// for missing pages.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval at which a thread that has not paused yet is polled.
const LOOK: Duration = Duration::from_micros(50);
/// Maximum time for which [`ProcessGuest::stop`] waits for the threads to stop. After that time, it
/// assumes that they sleep on missing pages, and wakes them.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

impl ProcessGuest {
    /// Creates a guest that will run `workload`, and does not start it.
    ///
    /// # Errors
    /// Returns an error if the options are not valid, if the host cannot map the memory, or if the
    /// workload does not fit into the guest.
    pub fn new(options: ProcessOptions, workload: Workload) -> Result<Self, Error> {
        let mut guest = Self::new_incoming(options)?;
        if !options.heap.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Options(format!(
                "a heap of {} bytes is not a whole number of pages",
                options.heap
            )));
        }
        let heap = options.heap / PAGE_SIZE;
        let (ram, layout) = Ram::new(&guest.memory, &workload, options.cpus, heap)?;
        let header = &stats_page(&guest.memory).header;
        header.version.store(STATS_VERSION, Ordering::Relaxed);
        header.cpus.store(layout.cpus, Ordering::Relaxed);
        header.data_pages.store(layout.data_pages, Ordering::Relaxed);
        header.ws_pages.store(layout.ws_pages, Ordering::Relaxed);
        header.magic.store(STATS_MAGIC, Ordering::Release);
        stats_page(&guest.memory).raise(State::Filling);
        let workers = (0..layout.cpus).map(|cpu| Worker::new(&workload, &layout, cpu));
        let cpus = workers.map(|worker| (worker, false)).collect();
        guest.furnish(workload, (ram, heap), Clock::new(), cpus);
        Ok(guest)
    }

    /// Creates an empty guest, into which a guest from another process can move.
    ///
    /// # Errors
    /// Returns an error if the options are not valid, or if the host cannot map the memory.
    pub fn new_incoming(options: ProcessOptions) -> Result<Self, Error> {
        let (memory, paging) = (Arc::new(Memory::new(&options)?), Arc::new(PagingSlot::new(options.cpus)));
        let counts = Arc::default();
        let wanted = RunState::Running;
        let throttle = Arc::new(ThrottleShares::new(options.cpus as usize));
        Ok(Self { memory, options, running: None, wanted, threads: Vec::new(), paging, counts, throttle })
    }

    /// Gives the guest its workload and its workers. The flag of each worker is true if the worker
    /// has already filled its share of the memory.
    fn furnish(
        &mut self,
        workload: Workload,
        (ram, heap): (Ram, u64),
        clock: Clock,
        workers: Vec<(Worker, bool)>,
    ) {
        // If a guest arrives with filled memory, its heap also has content, complete or in part.
        let churn = Churn::new(workers.iter().all(|(_, filled)| *filled));
        let heap = Heap::new(&ram, usable_pages(&self.memory), heap).map(|heap| (heap, Mutex::new(churn)));
        let filled = AtomicU64::new(workers.iter().map(|(_, filled)| u64::from(*filled)).sum());
        let cpu = |(index, (worker, filled)): (usize, (Worker, bool))| Cpu {
            index,
            worker: worker.into(),
            filled: AtomicBool::new(filled),
        };
        let cpus: Vec<Cpu> = workers.into_iter().enumerate().map(cpu).collect();
        let (gate, memory) = (Gate::default(), Arc::clone(&self.memory));
        let counts = Arc::clone(&self.counts);
        let throttle = Arc::clone(&self.throttle);
        let shared = WorkerContext { gate, memory, ram, clock, cpus, filled, heap, counts, throttle };
        self.running = Some((workload, Arc::new(shared)));
    }

    pub(crate) fn shared(&self, what: &'static str) -> Result<&Arc<WorkerContext>, Error> {
        let missing = Error::WrongState { what, why: "no guest is loaded" };
        self.running.as_ref().map(|(_, shared)| shared).ok_or(missing)
    }

    /// Starts the threads, or lets them continue after a pause.
    ///
    /// # Errors
    /// Returns an error if no guest is loaded, or if the host cannot create a thread.
    pub fn start(&mut self) -> Result<(), Error> {
        let shared = Arc::clone(self.shared("run the guest")?);
        for index in self.threads.len()..shared.cpus.len() {
            let (own, ids) = (Arc::clone(&shared), Arc::clone(self.paging.threads()));
            let name = format!("vcpu-{index}");
            let run = move || {
                let _registered = ids.register(u32::try_from(index).unwrap_or(u32::MAX));
                own.run(index);
            };
            let thread = vmferry_thread::spawn(vmferry_thread::Role::Worker, name, run);
            self.threads.push(thread.map_err(Error::Thread)?);
        }
        shared.gate.set(true, false);
        Ok(())
    }

    /// Pauses the threads. After this call has returned, no thread writes to memory until
    /// [`start`](Self::start) is called.
    ///
    /// # Errors
    /// Returns an error if no guest is loaded. Returns [`Error::Unresponsive`] if a thread has not
    /// paused within 10 seconds, for example because it sleeps on a missing page.
    pub fn pause(&mut self) -> Result<(), Error> {
        let shared = self.shared("pause the guest")?;
        shared.gate.set(false, false);
        stopped(shared, PATIENCE)
    }

    /// Returns the run state that the operator requested.
    #[must_use]
    pub fn run_state(&self) -> RunState {
        self.wanted
    }

    /// Pauses the threads or lets them run, at the request of the operator. A guest that this call
    /// has paused stays paused on the target of a migration.
    ///
    /// # Errors
    /// Returns an error in the cases of [`pause`](Self::pause) and [`start`](Self::start).
    pub fn set_run_state(&mut self, wanted: RunState) -> Result<(), Error> {
        match wanted {
            RunState::Paused => self.pause()?,
            RunState::Running => self.start()?,
        }
        self.wanted = wanted;
        Ok(())
    }

    /// Throttles the threads. `shares[i]` is the share of its time, from 0 to 1, for which thread
    /// `i` is stopped, at most 10 ms at a time. The last share also applies to all further threads.
    /// A pause of the guest ends the stop of each thread at once.
    pub fn throttle(&self, shares: &[f64]) {
        self.throttle.set(shares);
    }

    /// Returns the total time for which [`throttle`](Self::throttle) has stopped each thread.
    #[must_use]
    pub fn throttled(&self) -> Vec<Duration> {
        self.throttle.totals()
    }

    /// Returns the total time for which each thread has waited for a processor.
    #[must_use]
    pub fn run_delays(&self) -> Vec<Duration> {
        self.paging.threads().run_delays()
    }

    /// Returns the guest's state besides its memory. The guest must be paused.
    ///
    /// # Errors
    /// Returns an error if no guest is loaded.
    pub(crate) fn save_state(&self) -> Result<Vec<Section>, Error> {
        let Some((workload, shared)) = &self.running else {
            return Err(Error::WrongState { what: "save the guest", why: "no guest is loaded" });
        };
        let workers = shared.cpus.iter().map(|cpu| lock(&cpu.worker).save()).collect();
        let heap = shared.heap.as_ref().map_or(0, |(heap, _)| heap.all_pages());
        Saved { workload: *workload, clock: shared.clock.save(), workers, heap }.sections()
    }

    /// Loads the state of a guest whose memory is already in this process. The guest stays paused.
    ///
    /// # Errors
    /// Returns an error if a guest is already loaded, or if the state does not fit the options of
    /// this guest.
    pub(crate) fn load_state(&mut self, sections: &[Section]) -> Result<(), Error> {
        if self.running.is_some() {
            return Err(Error::WrongState { what: "load a guest", why: "a guest is loaded already" });
        }
        let saved = Saved::from_sections(sections, self.options.cpus)?;
        let (ram, layout) = Ram::new(&self.memory, &saved.workload, self.options.cpus, saved.heap)?;
        let restore = |(state, cpu)| {
            let mut worker = Worker::new(&saved.workload, &layout, cpu);
            worker.restore(state);
            // The stall starts at the pause, in guest time, so that the guest sees all time until
            // its first step.
            worker.resume(saved.clock.ns);
            // Fills no page. Returns true if no page is left to fill.
            let filled = worker.fill(&ram, 0);
            (worker, filled)
        };
        let workers = saved.workers.iter().zip(0..).map(restore).collect();
        self.furnish(saved.workload, (ram, saved.heap), Clock::restore(saved.clock), workers);
        Ok(())
    }

    /// Replaces the empty memory by that of a guest in another process, which has the same layout.
    ///
    /// # Errors
    /// Returns an error if a guest is loaded, or if the memory cannot be mapped.
    pub(crate) fn take_shared(&mut self, regions: Vec<RegionFile>) -> Result<(), Error> {
        if self.running.is_some() {
            return Err(Error::WrongState {
                what: "take a guest's memory",
                why: "a guest is loaded already",
            });
        }
        self.memory.take(&regions)
    }

    /// Returns the reader of the heap's free pages, or `None` if the guest has no heap.
    pub(crate) fn free_heap(&self) -> Option<FreeHeap> {
        let (_, shared) = self.running.as_ref()?;
        let (heap, _) = shared.heap.as_ref()?;
        Some(FreeHeap::new(heap.clone(), shared.ram.clone()))
    }

    /// Checks every heap page that is in use, and returns the number of pages whose content is not
    /// what the guest wrote. The guest must be paused.
    ///
    /// # Errors
    /// Returns an error if no guest is loaded.
    pub fn check_heap(&self) -> Result<u64, Error> {
        let shared = self.shared("check the guest's heap")?;
        Ok(shared.heap.as_ref().map_or(0, |(heap, _)| heap.check_all()))
    }

    /// Ends the threads. The memory stays mapped until the guest is dropped.
    pub fn stop(&mut self) {
        if let Some((_, shared)) = &self.running {
            shared.gate.set(false, true);
        }
        if let Some((_, shared)) = &self.running
            && !self.paging.stop_or_sleep(LAST_PATIENCE, |within| stopped(shared, within).is_ok())
        {
            tracing::warn!("the guest is ended while its threads wait for missing pages");
        }
        // Wakes threads that sleep on missing pages, so that they end.
        self.paging.end();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the guest panicked");
            }
        }
    }

    /// Returns a handle with which other threads observe the guest.
    #[must_use]
    pub fn handle(&self) -> ProcessHandle {
        let (memory, paging, counts) =
            (Arc::clone(&self.memory), Arc::clone(&self.paging), Arc::clone(&self.counts));
        ProcessHandle { memory, paging, counts }
    }
}

/// Waits until no thread works. A thread holds the lock of its worker while it works, so a caller
/// that gets the lock knows that the thread has stopped.
fn stopped(shared: &WorkerContext, within: Duration) -> Result<(), Error> {
    let begin = Instant::now();
    for cpu in &shared.cpus {
        while matches!(cpu.worker.try_lock(), Err(TryLockError::WouldBlock)) {
            if begin.elapsed() >= within {
                return Err(Error::Unresponsive { cpu: cpu.index, within });
            }
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}

impl Drop for ProcessGuest {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ProcessHandle {
    /// Returns the figures of the guest's heap, counted since the guest has been in this process.
    #[must_use]
    pub fn heap(&self) -> HeapFigures {
        self.counts.figures()
    }

    /// Returns the figures that the guest reports on its statistics page.
    ///
    /// # Errors
    /// Returns an error if no guest is loaded, if a thread wrote its report during every attempt to
    /// read it, or if the statistics page is missing. The call never waits for a missing page.
    pub fn stats(&self) -> Result<StatsSnapshot, StatsError> {
        let page = stats_page(&self.memory);
        // Read the number of vCPUs only once. It limits the loads of the snapshot to the pages that
        // were found present.
        let cpus =
            self.read_if_present(0, || page.header.cpus.load(Ordering::Relaxed).min(MAX_CPUS as u64))?;
        self.read_if_present(cpus, || page.snapshot_of(usize::try_from(cpus).unwrap_or(0)))?
    }

    /// Asks the guest to check all of its pages. When the guest has done so,
    /// [`StatsSnapshot::verified`] returns true for the number `request`. Returns false if the
    /// request cannot be made because the statistics page is missing.
    pub fn request_verify(&self, request: u64) -> bool {
        let page = stats_page(&self.memory);
        self.read_if_present(0, || page.header.verify_request.store(request, Ordering::Relaxed)).is_ok()
    }

    /// Returns the result of `read` if the statistics header and the blocks of `cpus` threads are
    /// present. The check is necessary because the calling threads must never sleep on guest memory
    /// (hazards.md 18).
    fn read_if_present<T>(&self, cpus: u64, read: impl FnOnce() -> T) -> Result<T, StatsError> {
        let region = self.memory.layout().regions()[0].id;
        let first = STATS_GPA >> PAGE_SHIFT;
        let run = PageRun::from(first..first + stats_bytes(cpus).div_ceil(PAGE_SIZE));
        self.paging.read_if_present(region, run, read).ok_or(StatsError::Elsewhere)
    }
}
