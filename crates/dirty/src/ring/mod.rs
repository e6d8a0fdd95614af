//! Tracking by KVM's dirty rings.
//!
//! | part | what it does |
//! |---|---|
//! | [`DirtyRings`] | the rings of a VM, for as long as the VM lives |
//! | [`RingVcpu`] | what a vCPU's thread calls when its ring is full |
//! | [`RingTracker`] | starts and stops tracking, and hands out what was found |
//! | [`ReaperPolicy`] | extension point: when the reaper, a thread that a tracker starts, harvests meanwhile |
//! | [`Predict`] | the product's policy |

mod core;
mod policy;
mod predict;
mod reaper;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod stats;
mod sync;
mod tracker;

use self::core::{Core, Found, Kernel};
use crate::{LogSlot, TrackerError};
pub use policy::{HarvestSchedule, ReaperPolicy, RingView, Rings};
pub use predict::Predict;
use reaper::Desk;
pub use stats::{ReaperReport, ReaperState, RingReport, VcpuRingReport};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
pub use tracker::RingTracker;
use vmferry_bitmap::AtomicBitmap;
use vmferry_sys::SysError;
use vmferry_sys::ring::{self, DirtyRing, RingEntries, RingPage};

/// The rings of one VM, and where their pages go. Made once, after the vCPUs; cloning gives another handle.
#[derive(Debug, Clone)]
pub struct DirtyRings(Arc<Shared>);

/// State that the handles of a VM's rings share.
#[derive(Debug)]
pub(crate) struct Shared {
    core: Core<Host>,
    slots: Vec<LogSlot>,
    /// For each slot, the pages that were harvested from the rings and not handed out yet.
    maps: Vec<Arc<AtomicBitmap>>,
    desk: Desk,
    /// True while a tracker is started.
    in_use: AtomicBool,
    /// True if a full ring has all rings harvested: [`ReaperPolicy::harvests_all`].
    full_harvests_all: AtomicBool,
}

impl Shared {
    pub(crate) fn core(&self) -> &Core<Host> {
        &self.core
    }

    pub(crate) fn desk(&self) -> &Desk {
        &self.desk
    }
}

impl DirtyRings {
    /// Maps the rings of all `vcpus` of the VM whose descriptor `vm` holds, in their order. `slots` are all its memory.
    ///
    /// # Errors
    /// If a slot is not whole pages, its marks are of another length, or a ring cannot be mapped.
    ///
    /// # Safety
    /// `vm` is a KVM VM's descriptor, open for as long as the `Arc` lives, and each of `slots` is a memory slot of that
    /// VM, with this number, place, length and mapping, until all handles and all trackers are dropped.
    pub unsafe fn new(
        vm: Arc<dyn AsRawFd + Send + Sync>,
        entries: RingEntries,
        vcpus: &[BorrowedFd<'_>],
        slots: Vec<LogSlot>,
    ) -> Result<Self, TrackerError> {
        slots.iter().try_for_each(LogSlot::check)?;
        let maps: Vec<_> = slots.iter().map(|slot| Arc::new(AtomicBitmap::new(slot.pages()))).collect();
        let rings = vcpus.iter().map(|vcpu| DirtyRing::map(*vcpu, entries)).collect::<Result<Vec<_>, _>>();
        let rings = rings.map_err(TrackerError::Unavailable)?;
        let found = Found::new(slots.iter().map(|slot| slot.spec.slot).zip(maps.iter().cloned()).collect());
        let count = rings.len();
        let core = Core::new(Host { vm, entries, rings }, count, found);
        Ok(Self(Arc::new(Shared {
            core,
            slots,
            maps,
            desk: Desk::new(count),
            in_use: AtomicBool::new(false),
            full_harvests_all: AtomicBool::new(false),
        })))
    }

    /// The handle for the thread of vCPU `index`, counted as they were given to [`new`](Self::new).
    ///
    /// # Panics
    /// If there is no such vCPU.
    #[must_use]
    pub fn vcpu(&self, index: usize) -> RingVcpu {
        assert!(index < self.0.core.len(), "vCPU {index} of {}", self.0.core.len());
        RingVcpu { shared: Arc::clone(&self.0), index }
    }

    /// Entries of each ring.
    #[must_use]
    pub fn entries(&self) -> RingEntries {
        self.0.core.kernel().entries
    }

    /// Entries that wait to be harvested, for each vCPU. Takes no lock, and nothing from the rings.
    #[must_use]
    pub fn used(&self) -> Vec<u32> {
        (0..self.0.core.len()).map(|ring| self.0.core.view(ring, 0).used).collect()
    }

    /// Returns the figures of rings and reaper since tracking was started last.
    #[must_use]
    pub fn report(&self) -> RingReport {
        RingReport {
            entries: self.0.core.entries(),
            vcpus: (0..self.0.core.len()).map(|ring| self.0.core.counters(ring).report()).collect(),
            reaper: self.0.desk.report(),
        }
    }
}

/// The ring of one vCPU, for the thread that runs it.
#[derive(Debug)]
pub struct RingVcpu {
    shared: Arc<Shared>,
    index: usize,
}

impl RingVcpu {
    /// To be called when `KVM_RUN` returned with exit reason [`EXIT_RING_FULL`](ring::EXIT_RING_FULL), before it is called
    /// again: makes room. Counts the exit and the time. Without a tracker, and with a policy that does not
    /// [harvest all](ReaperPolicy::harvests_all), only the ring of this vCPU is harvested, and nothing is locked that
    /// another running vCPU needs.
    ///
    /// # Errors
    /// If the ring cannot be reset. The vCPU cannot go on then: it may try again, or end; nothing that was harvested is lost.
    pub fn on_full(&self) -> Result<(), TrackerError> {
        self.shared.core.full(self.index, self.shared.full_harvests_all.load(Ordering::Relaxed))
    }

    /// May be called at any exit: if the ring is fuller than the reaper expects it to be before it looks again, wakes it. Two
    /// or three loads.
    pub fn on_exit(&self) {
        if let Some(mark) = self.shared.desk.mark(self.index)
            && self.shared.core.above(self.index, mark)
        {
            self.shared.desk.wake();
        }
    }
}

/// The host's KVM.
pub(crate) struct Host {
    vm: Arc<dyn AsRawFd + Send + Sync>,
    entries: RingEntries,
    rings: Vec<DirtyRing>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("rings", &self.rings).finish_non_exhaustive()
    }
}

impl Host {
    fn vm(&self) -> BorrowedFd<'_> {
        // SAFETY: the VM stays open for as long as `self.vm` is held, which is at least as long as this borrow
        // (promise of `DirtyRings::new`'s caller).
        unsafe { BorrowedFd::borrow_raw(self.vm.as_raw_fd()) }
    }
}

impl Kernel for Host {
    fn entries(&self) -> u32 {
        self.entries.get()
    }

    fn dirty(&self, ring: usize, index: u32) -> Option<RingPage> {
        self.rings[ring].dirty(index)
    }

    fn mark_harvested(&self, ring: usize, index: u32) {
        self.rings[ring].mark_harvested(index);
    }

    fn awaits_reset(&self, ring: usize, index: u32) -> bool {
        self.rings[ring].awaits_reset(index)
    }

    fn reset(&self) -> Result<u32, SysError> {
        ring::reset(self.vm())
    }
}
