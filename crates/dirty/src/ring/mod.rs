//! Tracking with the dirty rings of KVM.
//!
//! | part | what it does |
//! |---|---|
//! | [`DirtyRings`] | holds the rings of a VM, for as long as the VM lives |
//! | [`RingVcpu`] | makes room in the ring of a vCPU, when the vCPU thread finds it full |
//! | [`RingTracker`] | starts and stops tracking, and returns the harvested pages |
//! | [`ReaperPolicy`] | decides when the reaper, a thread that the tracker starts, harvests (extension point) |
//! | [`Predict`] | default policy |

mod core;
mod policy;
mod predict;
mod reaper;
mod set;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod stats;
mod sync;
mod tracker;

use self::core::{Core, Found, Kernel};
use crate::{LogSlot, TrackerError};
pub use policy::{HarvestSchedule, ReaperPolicy, RingView, Rings};
pub use predict::Predict;
use reaper::Control;
pub use stats::{ReaperReport, ReaperState, RingReport, VcpuRingReport};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub use tracker::RingTracker;
use vmferry_bitmap::AtomicBitmap;
use vmferry_sys::SysError;
use vmferry_sys::ring::{self, DirtyRing, RingEntries, RingPage};

/// Dirty rings of one VM, and the bitmaps that receive the harvested pages. Create this value once
/// for each VM, after all of its vCPUs have been created. A clone is a handle to the same rings.
#[derive(Debug, Clone)]
pub struct DirtyRings(Arc<RingState>);

/// Number of pages of a chunk: 8 MiB, as for the log. For each chunk with pages that were written
/// again, all rings are harvested once, if the [`Allowance`] permits it.
pub(crate) const CHUNK_PAGES: u64 = 2048;

/// Number of entries that senders may harvest before they read a chunk.
///
/// Such a harvest saves the second transfer of pages that the guest wrote before their turn. In
/// return, the guest faults once more on each harvested page that it writes again. If the guest
/// writes faster than the senders send, it writes nearly every page again after its turn. The
/// harvest then saves nothing, and the vCPUs spend their time on faults. Therefore the senders may
/// harvest one entry for every two pages that they send in a pass.
#[derive(Debug, Default)]
pub(crate) struct Allowance(AtomicU64);

impl Allowance {
    /// Begins a pass.
    fn begin(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Adds the allowance for `pages` pages that are sent next.
    fn add(&self, pages: u64) {
        self.0.fetch_add(pages.div_ceil(2), Ordering::Relaxed);
    }

    /// Takes the allowance for `entries` entries. Returns false, and takes nothing, if it is not
    /// sufficient.
    fn take(&self, entries: u64) -> bool {
        let less = |allowed: u64| allowed.checked_sub(entries);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

/// State that the handles of a VM's rings share.
#[derive(Debug)]
pub(crate) struct RingState {
    core: Core<Host>,
    slots: Vec<LogSlot>,
    /// For each slot, the pages that were harvested from the rings and not returned to the engine
    /// yet.
    maps: Vec<Arc<AtomicBitmap>>,
    allowance: Allowance,
    control: Control,
    /// True while a tracker is started.
    in_use: AtomicBool,
    /// True if a full ring makes its vCPU harvest all rings: [`ReaperPolicy::harvests_all`].
    full_harvests_all: AtomicBool,
}

impl RingState {
    pub(crate) fn core(&self) -> &Core<Host> {
        &self.core
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }
}

impl DirtyRings {
    /// Maps the dirty rings of `vcpus`, the descriptors of all vCPUs of the VM with the descriptor
    /// `vm`. `entries` is the size for which the rings were [enabled](ring::enable), and `slots`
    /// are all memory slots of the VM.
    ///
    /// # Errors
    /// Returns [`TrackerError::NotPages`] if a slot is empty or does not consist of whole pages,
    /// [`TrackerError::Length`] if `marks` or `returned_pages` of a slot do not have one bit for
    /// each page, and [`TrackerError::Unavailable`] if a ring cannot be mapped.
    ///
    /// # Safety
    /// `vm` is the descriptor of a KVM VM and stays open for as long as the `Arc` lives. Each of
    /// `slots` is a memory slot of that VM, with this number, address, length and mapping, until
    /// all handles and all trackers are dropped.
    pub unsafe fn new(
        vm: Arc<dyn AsRawFd + Send + Sync>,
        entries: RingEntries,
        vcpus: &[BorrowedFd<'_>],
        slots: Vec<LogSlot>,
    ) -> Result<Self, TrackerError> {
        slots.iter().try_for_each(LogSlot::check)?;
        let empty = || slots.iter().map(|slot| Arc::new(AtomicBitmap::new(slot.pages()))).collect::<Vec<_>>();
        let by_slot = |maps: Vec<_>| Found::new(slots.iter().map(|slot| slot.spec.slot).zip(maps).collect());
        let maps = empty();
        let rings = vcpus.iter().map(|vcpu| DirtyRing::map(*vcpu, entries)).collect::<Result<Vec<_>, _>>();
        let rings = rings.map_err(TrackerError::Unavailable)?;
        let count = rings.len();
        let core = Core::new(Host { vm, entries, rings }, count, (by_slot(maps.clone()), by_slot(empty())));
        Ok(Self(Arc::new(RingState {
            core,
            allowance: Allowance::default(),
            slots,
            maps,
            control: Control::new(count),
            in_use: AtomicBool::new(false),
            full_harvests_all: AtomicBool::new(false),
        })))
    }

    /// Returns the handle for the thread of a vCPU. `index` is the position of the vCPU in the list
    /// that [`new`](Self::new) received.
    ///
    /// # Panics
    /// Panics if `index` is not less than the number of vCPUs.
    #[must_use]
    pub fn vcpu(&self, index: usize) -> RingVcpu {
        assert!(index < self.0.core.len(), "vCPU {index} of {}", self.0.core.len());
        RingVcpu { shared: Arc::clone(&self.0), index }
    }

    /// Returns the number of entries of each ring.
    #[must_use]
    pub fn entries(&self) -> RingEntries {
        self.0.core.kernel().entries
    }

    /// Returns, for each vCPU, the number of entries in its ring that wait to be harvested. Takes
    /// no lock, and removes nothing from the rings.
    #[must_use]
    pub fn used(&self) -> Vec<u32> {
        (0..self.0.core.len()).map(|ring| self.0.core.view(ring, 0).used).collect()
    }

    /// Returns the figures of rings and reaper since the last start of tracking.
    #[must_use]
    pub fn report(&self) -> RingReport {
        RingReport {
            entries: self.0.core.entries(),
            vcpus: (0..self.0.core.len()).map(|ring| self.0.core.counters(ring).report()).collect(),
            reaper: self.0.control.report(),
        }
    }
}

/// Handle to the dirty ring of one vCPU, for the thread that runs the vCPU.
#[derive(Debug)]
pub struct RingVcpu {
    shared: Arc<RingState>,
    index: usize,
}

impl RingVcpu {
    /// Makes room in the ring of this vCPU, and records the full exit and the time that it took.
    /// Call this function when `KVM_RUN` has returned with the exit reason
    /// [`EXIT_RING_FULL`](ring::EXIT_RING_FULL), before the next `KVM_RUN`.
    ///
    /// If no tracker is started, or if its policy does not [harvest all
    /// rings](ReaperPolicy::harvests_all), the call harvests only the ring of this vCPU.
    ///
    /// # Errors
    /// Returns an error if the ring cannot be reset. The vCPU must not run then: its thread can
    /// call this function again, or end the vCPU. No harvested page is lost.
    pub fn on_full(&self) -> Result<(), TrackerError> {
        self.shared.core.full(self.index, self.shared.full_harvests_all.load(Ordering::Relaxed))
    }

    /// Wakes the reaper if the ring holds more entries than the
    /// [watermark](HarvestSchedule::watermark) of the policy. The call is optional, and the vCPU
    /// thread may make it after any exit. It costs only a few atomic loads.
    pub fn on_exit(&self) {
        if let Some(mark) = self.shared.control.mark(self.index)
            && self.shared.core.above(self.index, mark)
        {
            self.shared.control.wake();
        }
    }
}

/// KVM of the host.
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
        // SAFETY: the VM stays open for as long as `self.vm` is held, which is at least as long as
        // this borrow (guaranteed by the caller of `DirtyRings::new`).
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
