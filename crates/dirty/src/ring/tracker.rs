//! Dirty tracker for dirty rings.

use super::reaper::Reaper;
use super::{CHUNK_PAGES, DirtyRings, Predict, ReaperPolicy, RingReport, RingState};
use crate::region::{check_chunk, collect, forget, map_of, word_of};
use crate::{LogSlot, TrackerError};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{DirtyTracker, PageRun, PageSet, Protect, RegionId, RingFigures, TrackerKind, VmError};
use vmferry_sys::kvm::{self, ManualProtect};

/// Tracker that finds written pages in the dirty rings that KVM keeps for each vCPU, and in the
/// VMM's own marks.
///
/// # Why no write is lost
/// `start` makes KVM protect all pages before it returns. From then on, each page is protected, or
/// it is in a ring, or it was harvested and is being protected again. A harvest returns a page only
/// after KVM has protected it again (`ring/core.rs`). Therefore every page that a harvest reports
/// is protected, and [`Protect::protect`] need not be called.
///
/// # Pages that are written before their turn
/// A page of a pass that the guest writes again before its turn would be sent in this pass and in
/// the next one. [`Protect::protect`] prevents that for a guest that writes slower than its memory
/// is sent. If the rings have pages of the chunk, it harvests them, so that KVM protects these
/// pages again. In each pass, it harvests at most one entry for every two pages that the source
/// sends: a harvest makes a guest that writes fast fault on all pages that it writes. Then the
/// method takes the pages of the chunk out of the bitmaps of harvested pages. These pages are
/// protected, so their content is read after all writes that the bitmaps recorded, and a later
/// write adds the page to a ring again.
///
/// *Manual protection* of the dirty log must be off: with "initially set", KVM would protect no
/// page at the start, and never add a page to a ring. The tracker disables manual protection and
/// does not restore it, because a VM with rings has no dirty log to which it could apply.
///
/// *Writes of the VMM* are in the marks, as for [`KvmLogTracker`](crate::KvmLogTracker). Each slot
/// has a bitmap for the pages from the rings: the reaper, the vCPUs and the harvests add pages, and
/// a harvest takes them by an atomic swap.
///
/// *PML.* Processors with page-modification logging record written pages in a buffer of each vCPU,
/// which KVM copies to the ring when the vCPU exits. Unlike the log, the ring has no call that
/// flushes these buffers. An earlier harvest may therefore miss some pages, which a later one
/// finds. Before the last harvest of a migration, all vCPUs have left the guest, so the content of
/// their buffers is in the rings.
///
/// # Failures
/// If a ring cannot be reset, the harvest fails and the ring keeps its harvested pages, which the
/// next successful harvest reports. Until then, a vCPU whose ring is full cannot continue:
/// [`RingVcpu::on_full`](super::RingVcpu::on_full) returns the error. If KVM reports a page outside
/// all slots, every later harvest fails, because that page would be lost.
///
/// If the reaper fails or its policy panics, the reaper thread ends and logs the reason, which
/// [`ReaperState::Failed`](super::ReaperState::Failed) also contains. The vCPUs continue to empty
/// their full rings, and each harvest empties all rings, so the guest only gets slower. The next
/// start of tracking starts a new reaper.
#[derive(Debug)]
pub struct RingTracker {
    rings: DirtyRings,
    policy: Arc<dyn ReaperPolicy>,
    reaper: Option<Reaper>,
    /// Time that the last harvest spent on emptying the rings, which includes
    /// `KVM_RESET_DIRTY_RINGS`.
    in_kernel: Option<Duration>,
}

impl RingTracker {
    /// Creates a tracker that uses `rings`. Its reaper harvests with the policy [`Predict`].
    #[must_use]
    pub fn new(rings: &DirtyRings) -> Self {
        Self::with_policy(rings, Arc::new(Predict))
    }

    /// Creates a tracker that uses `rings`. Its reaper harvests with the policy `policy`.
    #[must_use]
    pub fn with_policy(rings: &DirtyRings, policy: Arc<dyn ReaperPolicy>) -> Self {
        Self { rings: rings.clone(), policy, reaper: None, in_kernel: None }
    }

    /// Returns the figures of rings and reaper since tracking started.
    #[must_use]
    pub fn report(&self) -> RingReport {
        self.rings.report()
    }

    /// Puts back pages that were harvested but not sent. The next harvest reports them again.
    ///
    /// Each page must have been harvested since tracking started. Then it is protected, or was
    /// written since and is in a ring, which [`Protect::protect`] relies on.
    ///
    /// # Errors
    /// Returns [`TrackerError::NoRegion`] if the tracker does not have a region of `pages`, and
    /// [`TrackerError::Length`] if a region has another length. Regions before the failing one may
    /// have been put back.
    pub fn put_back(&self, pages: &PageSet) -> Result<(), TrackerError> {
        for (region, map) in pages.iter() {
            let shared = self.shared();
            let found = shared.slots.iter().zip(&shared.maps).find(|(slot, _)| slot.region() == region);
            let (slot, harvested) = found.ok_or(TrackerError::NoRegion(region))?;
            if map.len() != slot.pages() {
                return Err(TrackerError::Length { region, have: slot.pages(), bits: map.len() });
            }
            map.runs().for_each(|run| harvested.set_range(run));
        }
        Ok(())
    }

    fn shared(&self) -> &Arc<RingState> {
        &self.rings.0
    }

    fn try_start(&mut self) -> Result<(), TrackerError> {
        self.try_stop()?;
        let shared = Arc::clone(self.shared());
        if shared.in_use.swap(true, Ordering::AcqRel) {
            return Err(TrackerError::RingsInUse);
        }
        let reaper = shared.log_all().and_then(|()| {
            let core = shared.core();
            core.unlearn();
            (0..core.len()).for_each(|ring| core.counters(ring).restart(core.now()));
            shared.full_harvests_all.store(self.policy.harvests_all(), Ordering::Relaxed);
            Reaper::start(&shared, &self.policy)
        });
        match reaper {
            Ok(reaper) => {
                self.reaper = Some(reaper);
                Ok(())
            }
            Err(error) => {
                // The first error is reported. A log that stays on only makes the guest slower.
                let _ = shared.log_none();
                shared.in_use.store(false, Ordering::Release);
                Err(error)
            }
        }
    }

    fn try_stop(&mut self) -> Result<(), TrackerError> {
        let Some(reaper) = self.reaper.take() else { return Ok(()) };
        drop(reaper);
        let shared = self.shared();
        shared.full_harvests_all.store(false, Ordering::Relaxed);
        let switched = shared.log_none();
        // Entries that remained in the rings would occupy them permanently. The next start discards
        // the pages.
        let emptied = shared.core().harvest_every();
        shared.in_use.store(false, Ordering::Release);
        switched.and(emptied.map(|_| ()))
    }
}

impl RingState {
    /// Enables logging for all slots, which also protects their pages. Stops at the first error.
    fn log_all(&self) -> Result<(), TrackerError> {
        let vm = self.core.kernel().vm();
        if kvm::manual_protect_offered(vm).map_err(TrackerError::Unavailable)?.enabled() {
            kvm::enable_manual_protect(vm, ManualProtect::NONE).map_err(TrackerError::Unavailable)?;
        }
        // Take the marks before any page is protected: from then on no mark may be lost.
        for (slot, map) in self.slots.iter().zip(&self.maps) {
            forget(Some(&**map), slot.returned_pages.as_deref());
            forget(slot.marks.as_deref(), slot.returned_pages.as_deref());
        }
        self.core.seen().clear();
        self.allowance.begin();
        self.slots.iter().try_for_each(|slot| self.log(slot, true))
    }

    /// Disables logging for all slots. Continues after an error, and returns the first error.
    fn log_none(&self) -> Result<(), TrackerError> {
        let mut result = Ok(());
        for slot in &self.slots {
            let switched = self.log(slot, false);
            result = result.and(switched);
        }
        result
    }

    fn log(&self, slot: &LogSlot, on: bool) -> Result<(), TrackerError> {
        // SAFETY: the slot exists on this VM (guaranteed by the caller of `DirtyRings::new`).
        unsafe { kvm::set_slot_flags(self.core.kernel().vm(), &slot.spec, on) }
            .map_err(TrackerError::host(slot.region()))
    }
}

impl DirtyTracker for RingTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Ring
    }

    fn ring(&self) -> Option<RingFigures> {
        Some(self.report().figures())
    }

    fn start(&mut self) -> Result<(), VmError> {
        Ok(self.try_start()?)
    }

    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        if self.reaper.is_none() {
            return Err(TrackerError::NotStarted.into());
        }
        let began = Instant::now();
        let harvested = self.shared().core().harvest_every();
        self.in_kernel = Some(began.elapsed());
        let shared = self.shared();
        shared.allowance.begin();
        for (slot, entered) in shared.slots.iter().zip(&shared.maps) {
            let map = map_of(dirty, slot.region(), slot.pages())?;
            collect(map, slot.returned_pages.as_deref(), |map| {
                entered.harvest(map);
                if let Some(marks) = &slot.marks {
                    marks.harvest(map);
                }
                Ok(())
            })?;
        }
        harvested?;
        Ok(shared.core().found().check()?)
    }

    fn harvest_kernel_time(&self) -> Option<Duration> {
        self.in_kernel
    }

    fn protector(&self) -> Arc<dyn Protect> {
        Arc::clone(self.shared()) as _
    }

    fn stop(&mut self) -> Result<(), VmError> {
        Ok(self.try_stop()?)
    }
}

impl Protect for RingState {
    fn is_needed(&self) -> bool {
        false
    }

    fn is_useful(&self) -> bool {
        true
    }

    fn chunk_pages(&self) -> u64 {
        CHUNK_PAGES
    }

    /// Discards the writes to `pages` that the rings or the maps have, if KVM has protected the
    /// pages again since. If the rings have any, they are harvested first, if the allowance permits
    /// it.
    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        let found = self.slots.iter().position(|slot| slot.region() == region);
        let position = found.ok_or(TrackerError::NoRegion(region))?;
        let slot = &self.slots[position];
        check_chunk(region, slot.pages(), chunk, pages)?;
        let words = chunk.first.0 / 64..chunk.end().div_ceil(64);
        let wanted = || {
            words.clone().filter_map(|word| Some((usize::try_from(word).ok()?, word_of(chunk, pages, word))))
        };
        self.allowance.add(wanted().map(|(_, pages)| u64::from(pages.count_ones())).sum());
        let may_harvest = |entries| self.allowance.take(entries);
        self.core().discard(position, wanted, may_harvest, |index, discarded| {
            if let Some(returned_pages) = &slot.returned_pages {
                let first = index as u64 * 64;
                for page in (0..64).filter(|page| discarded >> page & 1 == 1) {
                    returned_pages.set(first + page);
                }
            }
        })?;
        Ok(())
    }
}

impl Drop for RingTracker {
    fn drop(&mut self) {
        // No caller receives the error. A log that stays on only makes the guest slower.
        let _ = self.try_stop();
    }
}
