//! Start of a guest from a file before its memory was read. Pages that the guest touches are read
//! first, and all other pages are read in order.

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

/// Guest that runs while its memory is being read from a file.
///
/// Dropping the value ends the reading. A vCPU that then accesses a missing page sleeps for ever.
/// Therefore keep the value until [`wait`](Self::wait) returns
/// [`FillState::Completed`](crate::FillState::Completed).
#[must_use = "dropping it stops the pages that the guest waits for"]
#[derive(Debug)]
pub struct OnDemandRestore {
    received: Received,
    filling: Filling,
}

/// Threads that fill memory. When the value is dropped, the threads are stopped and joined.
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
    /// Returns the restored guest. [`Received::pages`] is the number of pages that were present
    /// when the guest was about to start.
    pub fn received(&self) -> &Received {
        &self.received
    }

    /// Returns the progress of reading the memory.
    #[must_use]
    pub fn progress(&self) -> RestoreProgress {
        self.filling.pager.source.progress(&self.filling.pager.pages)
    }

    /// Returns a function that returns the progress. Other threads can call it at any time, even
    /// after this value was dropped.
    pub fn watch(&self) -> impl Fn() -> RestoreProgress + Send + Sync + 'static {
        let pager = Arc::clone(&self.filling.pager);
        move || pager.source.progress(&pager.pages)
    }

    /// Waits until all pages are present, a page cannot be read, or the reading is stopped, for at
    /// most `within`. Returns the progress.
    pub fn wait(&self, within: Duration) -> RestoreProgress {
        self.filling.pager.source.wait(&self.filling.pager.pages, within)
    }

    /// Ends the reading, even if pages are missing. These pages stay missing, and a vCPU that needs
    /// one of them sleeps for ever. Therefore call this method only for a guest that is being
    /// ended.
    pub fn stop(&self) {
        self.filling.pager.source.stop(&self.filling.pager.pages);
    }
}

/// Starts the guest in the file at `path` in `vm` before its memory was read. Pages are read when
/// the guest touches them, and all other pages are read in the background.
///
/// # Errors
/// [`MigrateError::NoDemandPaging`] if the VM or the host has no demand paging. In that case, `vm`
/// is unchanged and can be passed to [`restore`](super::restore). Another error if the file cannot
/// be read, does not contain a complete guest that fits the machine of `vm`, or if the guest cannot
/// be started. The guest has not run.
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
        // The sweep starts only now. Until this point, only pages that loading the device state
        // touches are read, so that the guest starts soon.
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
                known_pages: 0,
                paused: false,
                postcopy: None,
            };
            Ok(OnDemandRestore { received, filling })
        }
        Err(error) => {
            let pager = Arc::clone(&filling.pager);
            // The threads must end first, because placing a page after the end of demand paging
            // would be an error.
            drop(filling);
            pager.pages.end();
            Err(error)
        }
    }
}
