//! The guest and its life: filled, running, paused, moved.

use crate::clock::Clock;
use crate::memory::Memory;
use crate::ram::{Ram, stats_page};
use crate::state::Saved;
use crate::worker::{Cpu, Gate, Shared, lock};
use crate::{Error, ProcessOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use vmferry_engine::Section;
use vmferry_guest_abi::{STATS_MAGIC, STATS_VERSION, State, StatsError, StatsSnapshot, Worker, Workload};

/// A guest without KVM. Dropping it ends its threads.
#[derive(Debug)]
pub struct ProcessGuest {
    pub(crate) options: ProcessOptions,
    pub(crate) memory: Arc<Memory>,
    /// There once the guest has a workload: its own, or one that came with its state.
    running: Option<(Workload, Arc<Shared>)>,
    threads: Vec<JoinHandle<()>>,
}

/// A view of a process guest for threads other than its owner's.
#[derive(Debug, Clone)]
pub struct ProcessHandle(Arc<Memory>);

impl ProcessGuest {
    /// A guest that will run `workload`, not started.
    ///
    /// # Errors
    /// If the options are impossible, the host has no memory, or the workload does not fit.
    pub fn new(options: ProcessOptions, workload: Workload) -> Result<Self, Error> {
        let mut guest = Self::new_incoming(options)?;
        let (ram, layout) = Ram::new(&guest.memory, &workload, options.cpus)?;
        let header = &stats_page(&guest.memory).header;
        header.version.store(STATS_VERSION, Ordering::Relaxed);
        header.cpus.store(layout.cpus, Ordering::Relaxed);
        header.data_pages.store(layout.data_pages, Ordering::Relaxed);
        header.ws_pages.store(layout.ws_pages, Ordering::Relaxed);
        header.magic.store(STATS_MAGIC, Ordering::Release);
        stats_page(&guest.memory).raise(State::Filling);
        let workers = (0..layout.cpus).map(|cpu| Worker::new(&workload, &layout, cpu));
        let cpus = workers.map(|worker| (worker, false)).collect();
        guest.furnish(workload, ram, Clock::new(), cpus);
        Ok(guest)
    }

    /// An empty guest that takes one from elsewhere.
    ///
    /// # Errors
    /// If the options are impossible or the host has no memory.
    pub fn new_incoming(options: ProcessOptions) -> Result<Self, Error> {
        Ok(Self { memory: Arc::new(Memory::new(&options)?), options, running: None, threads: Vec::new() })
    }

    /// Gives the guest its workers, each with whether it has filled its share of memory.
    fn furnish(&mut self, workload: Workload, ram: Ram, clock: Clock, workers: Vec<(Worker, bool)>) {
        let filled = AtomicU64::new(workers.iter().map(|(_, filled)| u64::from(*filled)).sum());
        let cpu = |(index, (worker, filled)): (usize, (Worker, bool))| Cpu {
            index,
            worker: worker.into(),
            filled: AtomicBool::new(filled),
        };
        let cpus: Vec<Cpu> = workers.into_iter().enumerate().map(cpu).collect();
        let (gate, memory) = (Gate::default(), Arc::clone(&self.memory));
        self.running = Some((workload, Arc::new(Shared { gate, memory, ram, clock, cpus, filled })));
    }

    fn shared(&self, what: &'static str) -> Result<&Arc<Shared>, Error> {
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
            let own = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("vcpu-{index}"));
            self.threads.push(thread.spawn(move || own.run(index)).map_err(Error::Thread)?);
        }
        shared.gate.set(true, false);
        Ok(())
    }

    /// Stops the threads: when this returns none writes, and none will before [`start`](Self::start).
    ///
    /// # Errors
    /// If there is no guest.
    pub fn pause(&mut self) -> Result<(), Error> {
        let shared = self.shared("pause the guest")?;
        shared.gate.set(false, false);
        // A thread holds its worker's lock for as long as it runs: who gets the lock has seen it stop.
        shared.cpus.iter().for_each(|cpu| drop(lock(&cpu.worker)));
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
        Saved { workload: *workload, clock: shared.clock.save(), workers }.sections()
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
        let (ram, layout) = Ram::new(&self.memory, &saved.workload, self.options.cpus)?;
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
        self.furnish(saved.workload, ram, Clock::restore(saved.clock), workers);
        Ok(())
    }

    /// Ends the threads. Memory stays until the guest is dropped.
    pub fn stop(&mut self) {
        if let Some((_, shared)) = &self.running {
            shared.gate.set(false, true);
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the guest panicked");
            }
        }
    }

    /// A view for other threads.
    #[must_use]
    pub fn handle(&self) -> ProcessHandle {
        ProcessHandle(Arc::clone(&self.memory))
    }
}

impl Drop for ProcessGuest {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ProcessHandle {
    /// What the guest reports of itself on its statistics page.
    ///
    /// # Errors
    /// If there is no guest yet, or a thread wrote its report at every attempt.
    pub fn stats(&self) -> Result<StatsSnapshot, StatsError> {
        stats_page(&self.0).snapshot()
    }

    /// Asks the guest to check every page that it has; [`StatsSnapshot::verified`] with the same number says when it has.
    pub fn request_verify(&self, request: u64) {
        stats_page(&self.0).header.verify_request.store(request, Ordering::Relaxed);
    }
}
