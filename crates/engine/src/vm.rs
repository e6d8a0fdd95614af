//! What a VMM implements to be moved.
//!
//! | trait | who calls it | what it is |
//! |---|---|---|
//! | [`GuestMemory`] | both sides, many threads | the guest's pages |
//! | [`DirtyTracker`], [`Protect`] | the source | which pages the guest wrote since they were read |
//! | [`SourceVm`] | the source | pause, settle, save, resume |
//! | [`FreePages`] | the source | which pages the guest does not use |
//! | [`TargetVm`] | the target | load, start |
//! | [`LazyMemory`] | the target, many threads | pages that come while the guest runs |
//!
//! The engine calls [`SourceVm`], [`FreePages`] and [`TargetVm`] from one thread; it calls [`GuestMemory`] and [`Protect`] from all its
//! channel threads at once.
//!
//! # Panics
//! A panic of these on a thread of the engine fails the migration as any other error does, where panics unwind. In a program that is built
//! with `panic = "abort"` every panic ends the process, and the guest with it. The engine warns of that once.

use crate::free::FreePages;
use crate::lazy::LazyMemory;
use crate::report::RingFigures;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_memory::{Layout, PageRun, PageSet, RegionId, Window};
pub use vmferry_wire::{MachineConfig, Section};

/// What went wrong inside a VMM's implementation, in its own words.
#[derive(Debug)]
pub struct VmError {
    source: Box<dyn std::error::Error + Send + Sync>,
    busy: bool,
}

impl VmError {
    /// Wraps any error, or a text.
    pub fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { source: error.into(), busy: false }
    }

    /// The same of something that is well and only takes longer than it was given: see [`SourceVm::settle`].
    pub fn busy(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { source: error.into(), busy: true }
    }

    /// What it wraps.
    #[must_use]
    pub fn get_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.source
    }

    /// Whether it may succeed if it is tried again later.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.busy
    }
}

impl fmt::Display for VmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for VmError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

/// Calls `work` on a thread of the engine's. A panic in it, which may be the VM's own code's, becomes a failure like any other: whoever
/// waits for the thread's word is told, and the guest goes on where it is. (Not in a program that aborts at a panic.)
pub(crate) fn caught<T, E: From<VmError>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    // What was left half-way is not used again: an error ends the channel and with it the migration.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(VmError::new(format!("a thread panicked: {}", text.unwrap_or("it did not say why"))).into())
    })
}

/// Returns what `work` returns, or an error that tells of its panic.
pub(crate) fn caught_io<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    caught(|| Ok::<_, VmError>(work())).unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Warns once where no panic can be caught.
pub(crate) fn warn_if_panics_abort() {
    static WARNED: Once = Once::new();
    if cfg!(panic = "abort") {
        WARNED.call_once(|| {
            tracing::warn!(
                "this program is built with panic = \"abort\": a panic on any thread ends it, and its guest with it; build with \
                 panic = \"unwind\" to have such a panic end the migration only"
            );
        });
    }
}

/// Calls code of the VM's, or of whoever watches, on which nothing depends any more: a panic in it must not take away what the caller is
/// about to be told of its guest.
pub(crate) fn shielded<T: Default>(what: &str, work: impl FnOnce() -> T) -> T {
    caught(|| Ok::<_, VmError>(work())).unwrap_or_else(|error| {
        tracing::error!("{what}: {error}");
        T::default()
    })
}

/// Protects the pages of `run` that are set in `pages`, in pieces that `protect` takes.
pub(crate) fn protect_run(
    protect: &dyn Protect,
    region: RegionId,
    run: PageRun,
    pages: &Bitmap,
) -> Result<(), VmError> {
    let piece = protect.chunk_pages().max(1);
    let mut first = run.first.0;
    while first < run.end() {
        let end = run.end().min((first / piece + 1) * piece);
        protect.protect(region, PageRun::from(first..end), pages)?;
        first = end;
    }
    Ok(())
}

/// What it takes to stop a guest.
pub(crate) struct Rehearsal {
    pub(crate) pause: Duration,
    /// Until its I/O was at rest.
    pub(crate) settle: Duration,
    pub(crate) save: Duration,
    /// For how long it stood still.
    pub(crate) stood: Duration,
    /// Its state; or why its I/O did not come to rest in time, which is all that can be wrong.
    pub(crate) sections: Result<Vec<Section>, VmError>,
}

/// Brings to rest what the guest's devices have under way, within that time, and saves the state.
pub(crate) fn save(vm: &mut dyn SourceVm, within: Duration) -> Result<Vec<Section>, VmError> {
    vm.settle(within)?;
    vm.save()
}

/// Stops the guest for an instant, to learn what that takes; its I/O has so long to come to rest. It goes on whatever fails.
pub(crate) fn rehearse(vm: &mut dyn SourceVm, within: Duration) -> Result<Rehearsal, VmError> {
    let began = Instant::now();
    let paused = vm.pause();
    let pause = began.elapsed();
    let settled = paused.and_then(|()| vm.settle(within));
    let settle = began.elapsed().saturating_sub(pause);
    let saved = settled.and_then(|()| vm.save());
    let save = began.elapsed().saturating_sub(pause + settle);
    let resumed = vm.resume();
    let stood = began.elapsed();
    let sections = match saved {
        Err(error) if !error.is_busy() => return Err(error),
        saved => saved,
    };
    resumed?;
    Ok(Rehearsal { pause, settle, save, stood, sections })
}

/// The pages of a guest. Shared by every thread of the engine.
pub trait GuestMemory: Send + Sync {
    /// Its regions. Does not change during a migration.
    fn layout(&self) -> &Layout;

    /// The live bytes of `run`, mapped in this process for as long as the window lives.
    ///
    /// Memory of another process serves as well: map its memfd here.
    ///
    /// # Errors
    /// If region `region` has no such pages.
    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError>;

    /// Adds to `touched`, a bitmap of the whole region, those pages of `run` that may hold anything but zeros.
    ///
    /// Called after the pages are protected ([`Protect`]), so that a page touched later is found by a harvest. Saying
    /// yes too often costs time, saying no wrongly loses the page: a page that was swapped out, or that was written
    /// through another mapping, is touched. When in doubt, leave this default, which says yes to all.
    ///
    /// # Errors
    /// If the host does not answer.
    fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
        let _ = region;
        touched.set_range(run.range());
        Ok(())
    }
}

/// How pages that the guest writes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrackerKind {
    /// KVM's dirty bitmap, cleared by hand chunk by chunk.
    Log,
    /// KVM's dirty rings, one for each vCPU.
    Ring,
    /// Write protection by userfaultfd, read by `PAGEMAP_SCAN`.
    Wp,
    /// Something of the embedder's own.
    Custom,
}

impl fmt::Display for TrackerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Log => "log",
            Self::Ring => "ring",
            Self::Wp => "wp",
            Self::Custom => "custom",
        })
    }
}

/// Finds the pages that were written: by the guest, by the VMM, by the kernel on behalf of either.
///
/// The contract that keeps pages from being lost, for every page `p` between [`start`](Self::start) and
/// [`stop`](Self::stop):
///
/// > Once [`Protect::protect`] has returned for `p`, every write to `p` that happens after that return is reported by a
/// > later harvest.
///
/// The engine in turn reads `p` only after `protect` returned for it. A tracker that re-protects while it harvests
/// (write protection) has an empty `protect`; one that leaves pages writable until told (KVM's bitmap with manual
/// protection) does its work there, chunk by chunk, right before the pages are read, so that no lock is held long.
pub trait DirtyTracker: Send {
    /// What it is, for reports.
    fn kind(&self) -> TrackerKind {
        TrackerKind::Custom
    }

    /// Starts tracking. The engine sends every page once after this, so what was written before need not be known.
    ///
    /// # Errors
    /// If the host cannot track this memory; the guest is as before.
    fn start(&mut self) -> Result<(), VmError>;

    /// Adds to `dirty` the pages written since they were last protected, and forgets them; `dirty` may already have
    /// pages in it. A page whose harvest failed is reported again by the next one.
    ///
    /// # Errors
    /// If the host no longer answers. What was collected before the failure is in `dirty`.
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError>;

    /// The part that channel threads call before they read pages.
    fn protector(&self) -> Arc<dyn Protect>;

    /// How its rings are doing since [`start`](Self::start), for reports; `None` for a tracker without rings.
    fn ring(&self) -> Option<RingFigures> {
        None
    }

    /// Stops tracking and lets the guest run at its full speed. Nobody calls [`Protect::protect`] any more.
    ///
    /// The guest may stay on this side: the migration failed, or was none. A tracker that shares its record of writes with the VMM leaves
    /// that record as [`start`](Self::start) found it, and hands the pages to the VMM that it took out of the record (`vmferry-dirty` does:
    /// `LogSlot::handed_back`).
    ///
    /// # Errors
    /// If the host refuses; the guest still runs, perhaps slower.
    fn stop(&mut self) -> Result<(), VmError>;
}

/// Protects pages right before they are read; see [`DirtyTracker`]. Called by all bulk channels' threads at once, and by the thread
/// that migrates.
pub trait Protect: Send + Sync {
    /// Which runs `protect` works on best: aligned to this many pages, a power of two, and the same for as long as this lives. No run
    /// that the engine calls it with crosses a multiple of this.
    fn chunk_pages(&self) -> u64 {
        512
    }

    /// From its return on, writes to those pages of `chunk` that are set in `pages` (a bitmap of the whole region) are
    /// reported by a later harvest. Pages that are not set must be left as they are: a write to one of them that is
    /// already recorded must not be forgotten.
    ///
    /// # Errors
    /// If the host refuses. The migration fails; the guest goes on.
    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError>;
}

/// For trackers that need no [`Protect`]: their harvest re-protects, or takes marks that later writes set anew.
#[derive(Debug, Clone, Copy, Default)]
pub struct NothingToProtect;

impl Protect for NothingToProtect {
    fn protect(&self, _: RegionId, _: PageRun, _: &Bitmap) -> Result<(), VmError> {
        Ok(())
    }
}

/// A VM that can be moved away. Its guest runs when that begins.
///
/// The guest is stopped more often than once: before it goes the engine learns what that takes by `pause`, `settle`, `save`, `resume`,
/// throwing away what was saved; a guest whose I/O is busy goes on; and whatever fails up to the commit ends with `resume`, as it does
/// after it if the target, or the fence, gives the guest back.
///
/// While one of these calls takes its time, the other side hears that this one is there, for three times
/// [`Settings::peer_timeout`](crate::Settings::peer_timeout); then it is given up.
pub trait SourceVm: Send {
    /// What the target must be like to take this guest.
    fn config(&self) -> MachineConfig;

    /// The guest's memory.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// A tracker for all of the guest's memory, not started.
    ///
    /// # Errors
    /// If `kind` cannot be had: which, and why, and what can.
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError>;

    /// Who says which pages are free, for one migration; `None`, the default, if nobody can.
    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        None
    }

    /// Slows the guest so that it dirties less: each vCPU stands still for its share of the time, 0 to 1, in slices of at most
    /// 10 ms. The last share stands for all further vCPUs; a single 0 ends it.
    ///
    /// # Errors
    /// If this VM cannot be slowed. The migration goes on without.
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        let _ = shares;
        Err(VmError::new("this VM cannot be slowed"))
    }

    /// How long each vCPU has stood still because of [`throttle`](Self::throttle).
    fn throttled(&self) -> Vec<Duration> {
        Vec::new()
    }

    /// Stops the vCPUs: when this returns, none runs guest code and none will before [`resume`](Self::resume).
    ///
    /// # Errors
    /// If a vCPU does not stop. The engine then calls `resume`.
    fn pause(&mut self) -> Result<(), VmError>;

    /// Brings what devices have under way to its end, and what they wrote to where the target finds it. Nothing new is begun before
    /// [`resume`](Self::resume). Called between pause and save; may write guest memory, as what is under way does.
    ///
    /// `within` is for how long the guest may stand still for that: what cannot be done in this time goes on, and is not waited for. It is
    /// [`Duration::MAX`] where somebody wants the guest to go whatever that takes: then wait for as long as you think right, and no longer.
    ///
    /// # Errors
    /// [`VmError::busy`] if it takes longer: the engine calls `resume`, and tries to stop the guest again later; after [`Duration::MAX`] that
    /// ends the migration. Any other error ends it at once, and the engine calls `resume`, too.
    fn settle(&mut self, within: Duration) -> Result<(), VmError> {
        let _ = within;
        Ok(())
    }

    /// Saves vCPUs, interrupt controllers and devices, which have [come to rest](Self::settle). Called between pause and resume;
    /// may write guest memory, which the following harvest finds, and must change nothing else: what it gives may be thrown away.
    ///
    /// A section may have 4 MiB, less 64 bytes, with its name, all of them 64 MiB, and there may be 65,536.
    ///
    /// # Errors
    /// If some state cannot be read. The engine then calls `resume`.
    fn save(&mut self) -> Result<Vec<Section>, VmError>;

    /// Lets go of what only the side that runs the guest may hold, such as locks on its disks: the target is about to be told to
    /// run it, and takes them in [`TargetVm::start`]. Called between save and commit, of a guest that stands still. If the guest comes
    /// back, [`resume`](Self::resume) takes them again before it runs.
    ///
    /// Not earlier: up to the commit this side must be able to go on whatever the target does, and after it must not touch what may be
    /// the target's already. In between, while nobody has them, nobody runs.
    ///
    /// # Errors
    /// If something may still be held. The engine then calls `resume`.
    fn release(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Lets the vCPUs run again. Called only while this side owns the guest; does nothing if they run.
    ///
    /// # Errors
    /// If a vCPU cannot be started.
    fn resume(&mut self) -> Result<(), VmError>;
}

/// An empty VM that takes a guest.
///
/// Its memory reads as zeros and its vCPUs have not run: pages that the guest never touched are not sent.
///
/// [`load`](Self::load) and [`start`](Self::start) have three times the peer's timeout (30 s) each. A guest whose `load` takes longer goes on
/// at its source. One whose `start` does, in precopy without a fence, is given up there as one of which nobody knows where it runs.
pub trait TargetVm: Send {
    /// What this machine is like; must equal the source's.
    fn config(&self) -> MachineConfig;

    /// The memory that the guest is received into.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// The same memory, for pages that are placed while the guest runs: postcopy and lazy restores need it. Asked for
    /// before anything is received, so that a host that cannot do it says so while the guest still runs at its source.
    ///
    /// # Errors
    /// If this VM or this host cannot do that: what is missing, and how to permit it.
    fn lazy_memory(&mut self) -> Result<Arc<dyn LazyMemory>, VmError> {
        Err(VmError::new("this VM cannot take pages while its guest runs; move it by precopy"))
    }

    /// Returns how long [`load`](Self::load) and [`start`](Self::start) are expected to take together; `None`, the default, if that is not
    /// known.
    ///
    /// The guest stands still meanwhile, so the source adds this time to the downtime that it predicts, and leaves as much less to the last
    /// pages. Without it the source assumes that loading takes as long as saving. A VMM whose `load` does more than that, such as building
    /// the VM, says here what that took before on this host. Called once, when a guest that fits was announced.
    fn expected_load(&self) -> Option<Duration> {
        None
    }

    /// Loads the state that [`SourceVm::save`] gave, vCPUs stay stopped. All memory has arrived; or, after
    /// [`LazyMemory::begin`], comes when it is touched.
    ///
    /// # Errors
    /// If a section is missing, unknown, of another version or not valid. The source then resumes.
    fn load(&mut self, sections: &[Section]) -> Result<(), VmError>;

    /// Gives the guest a new identity: a new VM generation ID, and what else tells machines apart.
    ///
    /// The engine calls this between [`load`](Self::load) and [`start`](Self::start) for a guest that is taken out of a copy
    /// ([`save_copy`](crate::save_copy)), because its original goes on. A guest that moves keeps its identity. May write guest memory, under
    /// the rules of [`load`](Self::load). The default changes nothing.
    ///
    /// # Errors
    /// If the guest would run with the identity of its original. It has not run then.
    fn renew_identity(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Takes what only the side that runs the guest may hold ([`SourceVm::release`]), and lets the vCPUs run. From here on this side
    /// owns the guest.
    ///
    /// # Errors
    /// If a vCPU cannot be started, or something cannot be had: none has run, nothing is held, and the guest goes back.
    fn start(&mut self) -> Result<(), VmError>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Notes what it is asked to protect.
    struct Noted(u64, Mutex<Vec<(u64, u64)>>);

    impl Protect for Noted {
        fn chunk_pages(&self) -> u64 {
            self.0
        }

        fn protect(&self, _: RegionId, chunk: PageRun, _: &Bitmap) -> Result<(), VmError> {
            self.1.lock().unwrap().push((chunk.first.0, chunk.end()));
            Ok(())
        }
    }

    #[test]
    fn no_run_is_longer_than_who_protects_takes_or_crosses_its_chunks() {
        for (chunk, run, want) in [
            (64, 512..700, vec![(512, 576), (576, 640), (640, 700)]),
            (64, 100..130, vec![(100, 128), (128, 130)]),
            (2048, 512..1024, vec![(512, 1024)]),
            (1, 7..9, vec![(7, 8), (8, 9)]),
        ] {
            let noted = Noted(chunk, Mutex::default());
            protect_run(&noted, RegionId(0), PageRun::from(run), &Bitmap::full(1024)).unwrap();
            assert_eq!(noted.1.into_inner().unwrap(), want, "{chunk}");
        }
    }
}
