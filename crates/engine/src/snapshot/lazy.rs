//! Running a guest out of a file at once: its pages come when it touches them, and the rest in order.

use super::open::{RestoreError, SnapshotPages, open, slot};
use super::{identity, ms, uri};
use crate::MigrateError;
use crate::fill::{Fill, Filler, LazyProgress, PageOrigin, Why};
use crate::monitor::thread_cpu_us;
use crate::target::Received;
use crate::vm::TargetVm;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_memory::{PageIndex, PageRun, PageSet, RegionId};
use vmferry_wire::{PageTable, TABLE_PAGES};

/// A guest that runs while its memory comes out of a file. Dropping it stops that, and the guest then sleeps at the first
/// page that has not come: keep it until [`wait`](Self::wait) says that all is there.
#[derive(Debug)]
pub struct LazyRestore {
    received: Received,
    filling: Filling,
}

/// The thread that fills; ended and waited for when dropped.
#[derive(Debug)]
struct Filling {
    fill: Arc<Fill>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.fill.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that fills memory panicked");
        }
    }
}

impl LazyRestore {
    /// The guest; its `pages` are those that were there when it began to run.
    #[must_use]
    pub fn received(&self) -> &Received {
        &self.received
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> LazyProgress {
        self.filling.fill.progress()
    }

    /// Looks at the progress from another thread, for as long as it likes.
    pub fn watch(&self) -> impl Fn() -> LazyProgress + Send + Sync + 'static {
        let fill = Arc::clone(&self.filling.fill);
        move || fill.progress()
    }

    /// Waits until all pages are there, or one cannot be had, or `within` is over.
    pub fn wait(&self, within: Duration) -> LazyProgress {
        self.filling.fill.wait(within)
    }

    /// Ends it, also if pages are missing. Those stay missing, and a vCPU that needs one sleeps for ever: this is for a
    /// guest that is being ended.
    pub fn stop(&self) {
        self.filling.fill.stop();
    }
}

/// Runs the guest in the file at `path` in `vm` at once; its pages are read when they are touched.
///
/// # Errors
/// [`MigrateError::NotLazy`] if this VM or this host cannot do that: `vm` is as it was, and [`restore`](super::restore)
/// will do. All others say that the file is not a whole guest that fits this machine; it has not run.
pub fn restore_lazy(vm: &mut dyn TargetVm, path: &Path) -> Result<LazyRestore, MigrateError> {
    let not_lazy = |error: crate::VmError| MigrateError::NotLazy { why: error.to_string() };
    let failed = |source| MigrateError::Snapshot { uri: uri(path), source };
    let memory = vm.lazy_memory().map_err(not_lazy)?;
    let pages = Arc::new(open(path, vm)?);
    let (id, copy_of) = identity(&pages)?;
    let sections = pages.sections().map_err(failed)?;
    let lacking = pages.lacking();
    memory.begin(&lacking).map_err(not_lazy)?;
    let fill = Arc::new(Fill::new(memory, pages.layout(), pages.contents()));
    let own = Arc::clone(&fill);
    let spawned = std::thread::Builder::new().name("restore".into()).spawn(move || {
        let origin = || FileOrigin { pages: Arc::clone(&pages), cached: None };
        own.run(origin, |filler| sweep(filler, &lacking));
    });
    let spawned = spawned.map_err(|source| MigrateError::Host { what: "a thread", source });
    let started = spawned.and_then(|thread| {
        let filling = Filling { fill: Arc::clone(&fill), thread: Some(thread) };
        let began = Instant::now();
        vm.load(&sections).map_err(|error| failed(error.into()))?;
        let load_ms = ms(began.elapsed());
        let early = filling.fill.progress().placed;
        filling.fill.commit().map_err(|why| failed(RestoreError::Vm(crate::VmError::new(why))))?;
        vm.start().map_err(|error| failed(error.into()))?;
        Ok((filling, load_ms, early))
    });
    match started {
        Ok((filling, load_ms, pages)) => {
            let cpu_ms = thread_cpu_us() as f64 / 1e3;
            let received = Received { id, copy_of, source: uri(path), pages, load_ms, cpu_ms, rest: None };
            Ok(LazyRestore { received, filling })
        }
        Err(error) => {
            // The threads have ended, with `filling`.
            if let Err(error) = fill.abandon() {
                tracing::error!("a restore that failed could not be ended: {error}");
            }
            Err(error)
        }
    }
}

/// Everything that may have content, in order.
fn sweep(filler: &mut Filler<'_, FileOrigin>, lacking: &PageSet) {
    for (region, map) in lacking.iter() {
        map.runs().for_each(|run| filler.sweep(region, run.into()));
    }
}

/// The file as one thread reads it.
struct FileOrigin {
    pages: Arc<SnapshotPages>,
    /// The table that was read last: whoever sweeps needs it again, and whoever asks what pages are reads them next.
    cached: Option<Cached>,
}

struct Cached {
    position: usize,
    block: u64,
    /// `None` if none of its pages has content.
    table: Option<PageTable>,
}

impl FileOrigin {
    fn position(&self, region: RegionId) -> Result<usize, Why> {
        self.pages.layout().position(region).ok_or_else(|| format!("the snapshot has no {region}").into())
    }

    /// The table of `page`.
    fn table(&mut self, position: usize, page: PageIndex) -> Result<Option<&PageTable>, Why> {
        let block = page.0 / TABLE_PAGES as u64;
        let cached = match self.cached.take() {
            Some(cached) if (cached.position, cached.block) == (position, block) => cached,
            _ => Cached { position, block, table: self.pages.table(position, block)? },
        };
        Ok(self.cached.insert(cached).table.as_ref())
    }
}

impl PageOrigin for FileOrigin {
    fn contents(&mut self, region: RegionId, run: PageRun) -> Result<u64, Why> {
        let position = self.position(region)?;
        let Some(table) = self.table(position, run.first)? else { return Ok(0) };
        let bits = run.range().enumerate().filter(|(_, page)| table.has_content(slot(PageIndex(*page))));
        Ok(bits.fold(0, |bits, (bit, _)| bits | 1 << bit))
    }

    fn read(&mut self, region: RegionId, run: PageRun, to: &mut [u8]) -> Result<(), Why> {
        let position = self.position(region)?;
        let pages = Arc::clone(&self.pages);
        match self.table(position, run.first)? {
            Some(table) => Ok(pages.read(position, run.first, to, table)?),
            None => Err(format!("{region} {run} has no content").into()),
        }
    }

    fn expect(&mut self, region: RegionId, run: PageRun) {
        if let Ok(position) = self.position(region) {
            self.pages.will_need(position, run);
        }
    }
}
