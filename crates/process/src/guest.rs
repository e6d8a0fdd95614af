//! The guest and its life: filled, running, paused, moved.

use crate::clock::Clock;
use crate::free::FreeHeap;
use crate::heap::{Churn, Counts, Heap, HeapFigures};
use crate::memory::Memory;
use crate::ram::{Ram, stats_page, usable_pages};
use crate::state::Saved;
use crate::worker::{Cpu, Gate, Shared, lock};
use crate::{Error, ProcessOptions};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE, PageRun, RunState};
use vmferry_engine::{GuestMemory, Section};
use vmferry_fault::LazySlot;
use vmferry_guest_abi::{
    MAX_CPUS, STATS_GPA, STATS_MAGIC, STATS_VERSION, State, StatsError, StatsSnapshot, Worker, Workload,
    stats_bytes,
};

/// A guest without KVM. Dropping it ends its threads.
#[derive(Debug)]
pub struct ProcessGuest {
    pub(crate) options: ProcessOptions,
    pub(crate) memory: Arc<Memory>,
    /// There once the guest has a workload: its own, or one that came with its state.
    running: Option<(Workload, Arc<Shared>)>,
    /// State that the operator wants.
    wanted: RunState,
    threads: Vec<JoinHandle<()>>,
    pub(crate) lazy: Arc<LazySlot>,
    counts: Arc<Counts>,
}

/// A view of a process guest for threads other than its owner's.
#[derive(Debug, Clone)]
pub struct ProcessHandle {
    memory: Arc<Memory>,
    lazy: Arc<LazySlot>,
    counts: Arc<Counts>,
}

/// How long threads may take to pause, or to end: they do within a millisecond, unless they wait for memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a thread that does not pause is looked at.
const LOOK: Duration = Duration::from_micros(50);
/// The longest that the guest's end waits before it takes threads for asleep on a missing page, and wakes them.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

impl ProcessGuest {
    /// A guest that will run `workload`, not started.
    ///
    /// # Errors
    /// If the options are impossible, the host has no memory, or the workload does not fit.
    pub fn new(options: ProcessOptions, workload: Workload) -> Result<Self, Error> {
        let mut guest = Self::new_incoming(options)?;
        if !options.heap.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Options(format!("a heap of {} bytes: whole pages are needed", options.heap)));
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

    /// An empty guest that takes one from elsewhere.
    ///
    /// # Errors
    /// If the options are impossible or the host has no memory.
    pub fn new_incoming(options: ProcessOptions) -> Result<Self, Error> {
        let (memory, lazy) = (Arc::new(Memory::new(&options)?), Arc::new(LazySlot::new(options.cpus)));
        let counts = Arc::default();
        let wanted = RunState::Running;
        Ok(Self { memory, options, running: None, wanted, threads: Vec::new(), lazy, counts })
    }

    /// Gives the guest its workers, each with whether it has filled its share of memory.
    fn furnish(
        &mut self,
        workload: Workload,
        (ram, heap): (Ram, u64),
        clock: Clock,
        workers: Vec<(Worker, bool)>,
    ) {
        // A guest that came with some content came with its heap's, or with what was done of that.
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
        let shared = Shared { gate, memory, ram, clock, cpus, filled, heap, counts };
        self.running = Some((workload, Arc::new(shared)));
    }

    pub(crate) fn shared(&self, what: &'static str) -> Result<&Arc<Shared>, Error> {
        let missing = Error::WrongState { what, why: "the guest has not come yet" };
        self.running.as_ref().map(|(_, shared)| shared).ok_or(missing)
    }

    /// Lets the threads run, for the first time or after a pause.
    ///
    /// # Errors
    /// If there is nothing to run, or the host refuses a thread.
    pub fn start(&mut self) -> Result<(), Error> {
        let shared = Arc::clone(self.shared("run the guest")?);
        for index in self.threads.len()..shared.cpus.len() {
            let (own, ids) = (Arc::clone(&shared), Arc::clone(self.lazy.threads()));
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

    /// Stops the threads: when this returns none writes, and none will before [`start`](Self::start).
    ///
    /// # Errors
    /// If there is no guest; [`Error::Unresponsive`] if a thread does not stop, for it sleeps on a missing page.
    pub fn pause(&mut self) -> Result<(), Error> {
        let shared = self.shared("pause the guest")?;
        shared.gate.set(false, false);
        stopped(shared, PATIENCE)
    }

    /// State that the operator wants.
    #[must_use]
    pub fn run_state(&self) -> RunState {
        self.wanted
    }

    /// Stops the threads, or lets them run, as the operator wants. A guest that is paused so stays paused where it is moved to.
    ///
    /// # Errors
    /// As for [`pause`](Self::pause) and [`start`](Self::start).
    pub fn set_run_state(&mut self, wanted: RunState) -> Result<(), Error> {
        match wanted {
            RunState::Paused => self.pause()?,
            RunState::Running => self.start()?,
        }
        self.wanted = wanted;
        Ok(())
    }

    /// The state besides memory. The guest must be paused.
    ///
    /// # Errors
    /// If there is no guest.
    pub(crate) fn save_state(&self) -> Result<Vec<Section>, Error> {
        let Some((workload, shared)) = &self.running else {
            return Err(Error::WrongState { what: "save the guest", why: "the guest has not come yet" });
        };
        let workers = shared.cpus.iter().map(|cpu| lock(&cpu.worker).save()).collect();
        let heap = shared.heap.as_ref().map_or(0, |(heap, _)| heap.all_pages());
        Saved { workload: *workload, clock: shared.clock.save(), workers, heap }.sections()
    }

    /// Takes the state of a guest whose memory is here. It stays paused.
    ///
    /// # Errors
    /// If this guest is not empty, or the state is not one of a guest like this.
    pub(crate) fn load_state(&mut self, sections: &[Section]) -> Result<(), Error> {
        if self.running.is_some() {
            return Err(Error::WrongState { what: "load a guest", why: "there is one already" });
        }
        let saved = Saved::from_sections(sections, self.options.cpus)?;
        let (ram, layout) = Ram::new(&self.memory, &saved.workload, self.options.cpus, saved.heap)?;
        let restore = |(state, cpu)| {
            let mut worker = Worker::new(&saved.workload, &layout, cpu);
            worker.restore(state);
            // From the pause on, by the guest's own clock: what passes until the first step is a stall that it sees.
            worker.resume(saved.clock.ns);
            // Fills nothing, but says whether there is nothing left to fill.
            let filled = worker.fill(&ram, 0);
            (worker, filled)
        };
        let workers = saved.workers.iter().zip(0..).map(restore).collect();
        self.furnish(saved.workload, (ram, saved.heap), Clock::restore(saved.clock), workers);
        Ok(())
    }

    /// What says which of its pages are free, if it has a heap.
    pub(crate) fn free_heap(&self) -> Option<FreeHeap> {
        let (_, shared) = self.running.as_ref()?;
        let (heap, _) = shared.heap.as_ref()?;
        Some(FreeHeap::new(heap.clone(), shared.ram.clone()))
    }

    /// Looks at every page in use of the heap; says how many are not as the guest left them. The guest must be paused.
    ///
    /// # Errors
    /// If there is no guest.
    pub fn check_heap(&self) -> Result<u64, Error> {
        let shared = self.shared("check the guest's heap")?;
        Ok(shared.heap.as_ref().map_or(0, |(heap, _)| heap.check_all()))
    }

    /// Ends the threads. Memory stays until the guest is dropped.
    pub fn stop(&mut self) {
        if let Some((_, shared)) = &self.running {
            shared.gate.set(false, true);
        }
        if let Some((_, shared)) = &self.running
            && !self.lazy.stop_or_sleep(LAST_PATIENCE, |within| stopped(shared, within).is_ok())
        {
            tracing::warn!("the guest is ended while it waits for pages that have not come");
        }
        // Whoever sleeps on a missing page wakes, and ends.
        self.lazy.end();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the guest panicked");
            }
        }
    }

    /// A view for other threads.
    #[must_use]
    pub fn handle(&self) -> ProcessHandle {
        let (memory, lazy, counts) =
            (Arc::clone(&self.memory), Arc::clone(&self.lazy), Arc::clone(&self.counts));
        ProcessHandle { memory, lazy, counts }
    }
}

/// Waits until no thread works. A thread holds its worker's lock for as long as it does: who gets the lock has seen it
/// stop.
fn stopped(shared: &Shared, within: Duration) -> Result<(), Error> {
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
    /// What the guest did with its heap since it came here.
    #[must_use]
    pub fn heap(&self) -> HeapFigures {
        self.counts.figures()
    }

    /// What the guest reports of itself on its statistics page.
    ///
    /// # Errors
    /// If there is no guest yet, or a thread wrote its report at every attempt; or if the page has not come yet: this never
    /// waits for one.
    pub fn stats(&self) -> Result<StatsSnapshot, StatsError> {
        let page = stats_page(&self.memory);
        // What the page says of their number is taken once: the loads of the snapshot are bounded by what was looked for.
        let cpus = self.look(0, || page.header.cpus.load(Ordering::Relaxed).min(MAX_CPUS as u64))?;
        self.look(cpus, || page.snapshot_of(usize::try_from(cpus).unwrap_or(0)))?
    }

    /// Asks the guest to check every page that it has; [`StatsSnapshot::verified`] with the same number says when it has.
    /// `false` if its statistics page has not come yet.
    pub fn request_verify(&self, request: u64) -> bool {
        let page = stats_page(&self.memory);
        self.look(0, || page.header.verify_request.store(request, Ordering::Relaxed)).is_ok()
    }

    /// What `read` says if the header and the blocks of `cpus` threads are there: these are threads that must never sleep on
    /// guest memory (hazards.md 18).
    fn look<T>(&self, cpus: u64, read: impl FnOnce() -> T) -> Result<T, StatsError> {
        let region = self.memory.layout().regions()[0].id;
        let first = STATS_GPA >> PAGE_SHIFT;
        let run = PageRun::from(first..first + stats_bytes(cpus).div_ceil(PAGE_SIZE));
        self.lazy.look(region, run, read).ok_or(StatsError::Elsewhere)
    }
}
