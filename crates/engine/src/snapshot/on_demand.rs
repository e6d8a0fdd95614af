//! Start of a guest from a file before its memory was read: pages are read when the guest touches
//! them, and the rest in order.

use super::fill::{DemandPager, SnapshotFile};
use super::open::{RestoreError, open};
use super::progress::RestoreProgress;
use super::restore::load;
use super::{identity, ms, uri};
use crate::MigrateError;
use crate::demand::{again_after_panics, serve_faults};
use crate::handle::thread_cpu_us;
use crate::target::Received;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::{RunState, TargetVm, VmError};

/// Guest that runs while its memory is read from a file.
///
/// Dropping the value ends the reading. The guest then sleeps at the first access to a missing
/// page. Keep the value until [`wait`](Self::wait) returns a completed state.
#[must_use = "dropping it stops the pages that the guest waits for"]
#[derive(Debug)]
pub struct OnDemandRestore {
    received: Received,
    filling: Filling,
}

/// Threads that fill memory. They are stopped and joined when the value is dropped.
#[derive(Debug)]
struct Filling {
    pager: Arc<DemandPager>,
    threads: Vec<JoinHandle<()>>,
}

impl Filling {
    fn spawn(
        &mut self,
        name: String,
        work: impl FnOnce(&DemandPager) + Send + 'static,
    ) -> Result<(), MigrateError> {
        let pager = Arc::clone(&self.pager);
        let spawned = vmferry_thread::spawn(vmferry_thread::Role::Fault, name, move || work(&pager));
        self.threads.push(spawned.map_err(|source| MigrateError::Host { what: "a thread", source })?);
        Ok(())
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.pager.source.stop(&self.pager.pages);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that fills memory panicked");
            }
        }
    }
}

impl OnDemandRestore {
    /// Returns the restored guest. Its `pages` are those that were present when it began to run.
    pub fn received(&self) -> &Received {
        &self.received
    }

    /// Returns the progress.
    #[must_use]
    pub fn progress(&self) -> RestoreProgress {
        self.filling.pager.source.progress(&self.filling.pager.pages)
    }

    /// Returns a function that reads the progress from another thread, without a limit in time.
    pub fn watch(&self) -> impl Fn() -> RestoreProgress + Send + Sync + 'static {
        let pager = Arc::clone(&self.filling.pager);
        move || pager.source.progress(&pager.pages)
    }

    /// Waits until all pages are present, until one cannot be read, or for `within`.
    pub fn wait(&self, within: Duration) -> RestoreProgress {
        self.filling.pager.source.wait(&self.filling.pager.pages, within)
    }

    /// Ends the reading, also if pages are missing. Such pages stay missing, and a vCPU that needs
    /// one sleeps for ever. Use this for a guest that is being ended.
    pub fn stop(&self) {
        self.filling.pager.source.stop(&self.filling.pager.pages);
    }
}

/// Starts the guest in the file at `path` in `vm` at once. Its pages are read when the guest
/// touches them.
///
/// # Errors
/// [`MigrateError::NoDemandPaging`] if this VM or this host has no demand paging: `vm` is
/// unchanged, and [`restore`](super::restore) is possible. All other errors mean that the file is
/// not a complete guest that fits this machine. The guest has not run.
pub fn restore_on_demand(vm: &mut dyn TargetVm, path: &Path) -> Result<OnDemandRestore, MigrateError> {
    let no_demand_paging = |error: VmError| MigrateError::NoDemandPaging { why: error.to_string() };
    let failed = |source| MigrateError::Snapshot { uri: uri(path), source };
    let memory = vm.demand_paging().map_err(no_demand_paging)?;
    let pages = open(path, vm)?;
    let (id, copy_of) = identity(&pages)?;
    let sections = pages.sections().map_err(failed)?;
    let missing = pages.missing_pages();
    memory.begin(&missing).map_err(no_demand_paging)?;
    let pager = DemandPager::new(SnapshotFile::new(pages), memory, &missing, vm.config().vcpus);
    pager.pages.hold(vm.memory());
    let mut filling = Filling { pager: Arc::new(pager), threads: Vec::new() };
    let start = |filling: &mut Filling| {
        for shard in 0..filling.pager.pages.memory.shards() {
            filling.spawn(format!("fault-{shard}"), move |pager| {
                again_after_panics(|| serve_faults(pager, shard));
            })?;
        }
        let began = Instant::now();
        load(vm, &sections, copy_of.is_some()).map_err(|error| failed(error.into()))?;
        let (load_ms, early) = (ms(began.elapsed()), filling.pager.pages.figures().pages);
        if !filling.pager.pages.commit() {
            let why = filling.pager.source.failure().unwrap_or_default();
            return Err(failed(RestoreError::Vm(VmError::new(why))));
        }
        // The sweep starts only now: until here only the pages that the state needs are read, so
        // that the guest starts soon.
        filling.spawn("restore".into(), move |pager| {
            pager.source.sweep(&pager.pages, &missing);
        })?;
        vm.start(RunState::Running).map_err(|error| failed(error.into()))?;
        filling.pager.pages.memory.started();
        Ok((load_ms, early))
    };
    match start(&mut filling) {
        Ok((load_ms, pages)) => {
            let cpu_ms = thread_cpu_us() as f64 / 1e3;
            let received = Received {
                id,
                copy_of,
                source: uri(path),
                pages,
                load_ms,
                cpu_ms,
                paused: false,
                postcopy: None,
            };
            Ok(OnDemandRestore { received, filling })
        }
        Err(error) => {
            let pager = Arc::clone(&filling.pager);
            // The threads end first: placing a page after the end would be an error.
            drop(filling);
            pager.pages.end();
            Err(error)
        }
    }
}
