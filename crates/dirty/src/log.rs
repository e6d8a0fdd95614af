//! Tracking with the dirty bitmap of KVM.

use crate::region::{check_chunk, check_marks, collect, forget, map_of, word_of};
use crate::{Marks, TrackerError};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{
    DirtyTracker, PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, Protect, RegionId, TrackerKind, VmError,
};
use vmferry_sys::SysError;
use vmferry_sys::kvm::{self, ManualProtect, SlotSpec};

/// Maximum number of bitmap words in one `KVM_CLEAR_DIRTY_LOG` call. The words are on the stack,
/// where they occupy 256 bytes.
const CHUNK_WORDS: usize = 32;

/// Number of pages per call for which [`Protect::protect`] works best: 2048 pages, which are 8 MiB
/// of guest memory.
///
/// Each clear takes KVM's MMU lock once and ends with one TLB flush of all vCPUs. Smaller chunks
/// need more flushes. With larger chunks, vCPUs that fault wait longer for the lock. More time also
/// passes between the protection of a page and its transfer, so the guest writes more pages again
/// before they were sent even once. Protecting 4 GiB was measured to take 37 ms in chunks of 64
/// pages, 9.1 ms with 512, 4.0 ms with 2048 and 3.9 ms with 8192.
const CHUNK_PAGES: u64 = CHUNK_WORDS as u64 * 64;

/// Memory slot of a KVM VM in which a tracker finds written pages. The slot number is also the id
/// of its region.
#[derive(Debug, Clone)]
pub struct LogSlot {
    /// Description with which the slot was registered with KVM.
    pub spec: SlotSpec,
    /// Marks for the pages that the VMM itself has written or dropped, because KVM does not record
    /// these changes. The VMM must mark a page *after* it has changed the page. The marks must
    /// cover exactly the pages of the slot.
    pub marks: Option<Arc<dyn Marks>>,
    /// Bitmap to which a tracker adds every page that it takes out of the slot's dirty log or out
    /// of `marks`. It must have one bit for each page of the slot.
    ///
    /// Pass a bitmap if the VMM uses the log or the marks itself, for example for differential
    /// snapshots. If a migration leaves the guest on the source, the VMM must then count the pages
    /// in this bitmap as dirty, in addition to those in its log and its marks. With `None`, the
    /// pages that the tracker takes are not recorded.
    pub returned_pages: Option<Arc<AtomicBitmap>>,
}

impl LogSlot {
    /// Creates a slot without [`returned_pages`](Self::returned_pages), for a VMM that does not use
    /// the log and the marks itself.
    #[must_use]
    pub fn new(spec: SlotSpec, marks: Option<Arc<dyn Marks>>) -> Self {
        Self { spec, marks, returned_pages: None }
    }

    /// Checks the conditions that trackers depend on.
    pub(crate) fn check(&self) -> Result<(), TrackerError> {
        if self.spec.len == 0 || !self.spec.len.is_multiple_of(PAGE_SIZE) {
            return Err(TrackerError::NotPages(self.region()));
        }
        check_marks(self.region(), self.pages(), self.marks.as_deref().map(Marks::pages))?;
        check_marks(self.region(), self.pages(), self.returned_pages.as_deref().map(AtomicBitmap::len))
    }

    pub(crate) fn region(&self) -> RegionId {
        RegionId(self.spec.slot)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.spec.len >> PAGE_SHIFT
    }
}

/// Way in which the log is cleared. Part of the state that the tracker and its protectors share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Mode {
    /// The log is off.
    Off,
    /// `KVM_CLEAR_DIRTY_LOG` clears the log, right before pages are read.
    ByHand,
    /// Reading the log clears it: KVM before 5.0, without manual protection.
    ByReading,
}

/// State that the tracker and its protectors share.
struct LogState {
    vm: Arc<dyn AsRawFd + Send + Sync>,
    slots: Vec<LogSlot>,
    /// For each slot, true if its log was on before tracking and belongs to the VMM.
    found_on: Vec<AtomicBool>,
    mode: AtomicU8,
}

impl std::fmt::Debug for LogState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogState")
            .field("slots", &self.slots)
            .field("mode", &self.mode())
            .finish_non_exhaustive()
    }
}

impl LogState {
    fn vm(&self) -> BorrowedFd<'_> {
        // SAFETY: the VM stays open for as long as `self.vm` is held, which is at least as long as
        // this borrow (guaranteed by the caller of `KvmLogTracker::new`).
        unsafe { BorrowedFd::borrow_raw(self.vm.as_raw_fd()) }
    }

    fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Acquire) {
            1 => Mode::ByHand,
            2 => Mode::ByReading,
            _ => Mode::Off,
        }
    }

    fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Release);
    }

    /// Reads the log of `slot` into the start of `log`, which is long enough for the largest slot.
    fn read<'l>(&self, slot: &LogSlot, log: &'l mut [u64]) -> Result<&'l [u64], SysError> {
        let log = &mut log[..kvm::log_words(slot.spec.len)];
        // SAFETY: the slot has this length (guaranteed by the caller of `KvmLogTracker::new`).
        unsafe { kvm::get_dirty_log(self.vm(), slot.spec.slot, slot.spec.len, log) }?;
        Ok(log)
    }

    /// Enables or disables the log of `slot`.
    fn log(&self, slot: &LogSlot, on: bool) -> Result<(), TrackerError> {
        // SAFETY: the slot exists on this VM (guaranteed by the caller of `KvmLogTracker::new`).
        unsafe { kvm::set_slot_flags(self.vm(), &slot.spec, on) }.map_err(TrackerError::host(slot.region()))
    }
}

/// Tracker that finds written pages in the dirty bitmap that KVM keeps for each memory slot, and in
/// the VMM's own marks.
///
/// # Why no write is lost
/// *With manual protection* (Linux 5.0 or newer). A guest write to a page that the log protects
/// faults, and KVM sets the bit of the page and lifts its protection. A harvest copies the log
/// without changing it. Right before the engine reads a page, [`Protect::protect`] makes KVM clear
/// the bit, protect the page, and flush the TLBs. Therefore the engine reads the result of every
/// write that preceded the clear. A write after the clear faults and sets the bit again, and the
/// next harvest reports the page. A bit is never cleared without a later read of its page, because
/// `protect` receives only the pages that are about to be sent. The bits of the other pages of the
/// chunk stay set.
///
/// *Initially set.* If KVM offers this mode, enabling a log sets every bit and protects no page,
/// which avoids a pause of all vCPUs at the start. A page is then not tracked until its bit has
/// been cleared once, because writes to it do not change the log. No write is lost, because the bit
/// stays set, and every harvest reports the page until `protect` has been called for it. A caller
/// that wants to skip a page because it is free or was never touched must protect the page *before*
/// it checks whether the page may be skipped. Otherwise a write after the check would not set the
/// bit.
///
/// *Without manual protection*, a harvest itself clears the log and protects the pages before it
/// returns. Therefore `protect` has nothing to do.
///
/// # A VMM that uses the log itself
/// If a slot has [`LogSlot::returned_pages`] and its log is already on when tracking starts, the
/// log stays on when tracking stops. The tracker clears a bit of that log only after it has added
/// the page to `returned_pages`. A write between these two steps is not lost for the VMM, because
/// the page is already in the bitmap. Therefore, after tracking has stopped, every page that the
/// VMM would have found dirty is in the log or in `returned_pages`. The VMM must not read or clear
/// the log while the tracker is started.
///
/// *Manual protection* is a capability of the VM, and KVM does not report whether it is enabled.
/// When tracking stops, the tracker disables manual protection, which is the initial state of a VM,
/// unless [`restoring`](Self::restoring) was called with other flags.
///
/// # Writes of the VMM, and PML
/// *Writes of the VMM* are not in KVM's log but in the marks. The writer first writes the page and
/// then marks it with release ordering. A harvest takes the marks by an atomic swap with acquire
/// ordering, and the engine reads the pages later. Therefore the engine reads the result of every
/// write whose mark was taken.
///
/// *PML.* Processors with page-modification logging record written pages in a buffer of each vCPU,
/// which KVM copies to the log when the vCPU exits. When the log is read, KVM makes all vCPUs exit.
/// At the last harvest of a migration, all vCPUs have left the guest, so their buffers are already
/// in the log.
#[derive(Debug)]
pub struct KvmLogTracker {
    shared: Arc<LogState>,
    /// Buffer for the log of the largest slot, allocated only while the tracker is started.
    log: Vec<u64>,
    /// Mode of manual protection that is set when tracking stops.
    manual: ManualProtect,
    /// Time that the last harvest spent in `KVM_GET_DIRTY_LOG`.
    in_kernel: Option<Duration>,
}

impl KvmLogTracker {
    /// Creates a tracker for the VM with the descriptor `vm`. `slots` must be all memory slots of
    /// the VM.
    ///
    /// # Errors
    /// Returns [`TrackerError::NotPages`] if a slot is empty or does not consist of whole pages.
    /// Returns [`TrackerError::Length`] if `marks` or `returned_pages` of a slot do not have one
    /// bit for each page of the slot.
    ///
    /// # Safety
    /// `vm` is the descriptor of a KVM VM and stays open for as long as the `Arc` lives. Each of
    /// `slots` is a memory slot of that VM, with this number, address, length and mapping, until
    /// the tracker and all its protectors are dropped.
    pub unsafe fn new(vm: Arc<dyn AsRawFd + Send + Sync>, slots: Vec<LogSlot>) -> Result<Self, TrackerError> {
        slots.iter().try_for_each(LogSlot::check)?;
        let found_on = slots.iter().map(|_| AtomicBool::new(false)).collect();
        let shared = LogState { vm, slots, found_on, mode: AtomicU8::new(Mode::Off as u8) };
        Ok(Self { shared: Arc::new(shared), log: Vec::new(), manual: ManualProtect::NONE, in_kernel: None })
    }

    /// Sets the mode of manual protection that [`stop`](DirtyTracker::stop) restores, for a VMM
    /// that has enabled `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` with the flags `manual`.
    #[must_use]
    pub fn restoring(mut self, manual: ManualProtect) -> Self {
        self.manual = manual;
        self
    }

    fn try_start(&mut self) -> Result<(), TrackerError> {
        self.try_stop()?;
        let words = self.shared.slots.iter().map(|slot| kvm::log_words(slot.spec.len)).max().unwrap_or(0);
        self.log.resize(words, 0);
        // Read the logs before manual protection is enabled, because while it is off, a read also
        // clears the log.
        self.take_own_logs()?;
        let manual = kvm::manual_protect_offered(self.shared.vm()).map_err(TrackerError::Unavailable)?;
        if manual.enabled() {
            kvm::enable_manual_protect(self.shared.vm(), manual).map_err(TrackerError::Unavailable)?;
        }
        for (index, (slot, own)) in self.shared.slots.iter().zip(&self.shared.found_on).enumerate() {
            forget(slot.marks.as_deref(), slot.returned_pages.as_deref());
            if own.load(Ordering::Acquire) {
                continue;
            }
            if let Err(error) = self.shared.log(slot, true) {
                // The first error is reported. A log that stays on only makes the guest slower.
                let _ = self.restore(index);
                return Err(error);
            }
        }
        self.shared.set_mode(if manual.enabled() { Mode::ByHand } else { Mode::ByReading });
        Ok(())
    }

    /// Determines which logs belong to the VMM, and adds the pages in these logs to
    /// `returned_pages`.
    fn take_own_logs(&mut self) -> Result<(), TrackerError> {
        for (slot, own) in self.shared.slots.iter().zip(&self.shared.found_on) {
            let Some(returned_pages) = &slot.returned_pages else { continue };
            let on = match self.shared.read(slot, &mut self.log) {
                Ok(log) => {
                    let mut found = Bitmap::new(slot.pages());
                    found.union_words(log);
                    found.for_each_run(|run| returned_pages.set_range(run));
                    true
                }
                Err(error) if error.errno() == Some(libc::ENOENT) => false,
                Err(error) => return Err(TrackerError::host(slot.region())(error)),
            };
            own.store(on, Ordering::Release);
        }
        Ok(())
    }

    /// Disables the logs of the first `count` slots, except those that belong to the VMM, and
    /// restores the mode of manual protection.
    fn restore(&self, count: usize) -> Result<(), TrackerError> {
        let mut result = Ok(());
        for (slot, own) in self.shared.slots.iter().zip(&self.shared.found_on).take(count) {
            if own.load(Ordering::Acquire) {
                continue;
            }
            // Continue with every slot after an error, and report the first error.
            let switched = self.shared.log(slot, false);
            result = result.and(switched);
        }
        let vm = self.shared.vm();
        let manual = kvm::manual_protect_offered(vm).and_then(|offered| match offered.enabled() {
            true => kvm::enable_manual_protect(vm, self.manual),
            false => Ok(()),
        });
        result.and(manual.map_err(TrackerError::Unavailable))
    }

    fn try_stop(&mut self) -> Result<(), TrackerError> {
        if self.shared.mode() == Mode::Off {
            return Ok(());
        }
        self.shared.set_mode(Mode::Off);
        self.log = Vec::new();
        self.restore(self.shared.slots.len())
    }
}

impl DirtyTracker for KvmLogTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Log
    }

    fn start(&mut self) -> Result<(), VmError> {
        Ok(self.try_start()?)
    }

    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        if self.shared.mode() == Mode::Off {
            return Err(TrackerError::NotStarted.into());
        }
        let mut in_kernel = Duration::ZERO;
        for slot in &self.shared.slots {
            // Look up the bitmap before the log is read: without manual protection, reading clears
            // the log, and the pages must not be lost.
            let map = map_of(dirty, slot.region(), slot.pages())?;
            let (log, in_kernel) = (&mut self.log, &mut in_kernel);
            collect(map, slot.returned_pages.as_deref(), |map| {
                if let Some(marks) = &slot.marks {
                    marks.harvest(map);
                }
                let began = Instant::now();
                let log = self.shared.read(slot, log).map_err(TrackerError::host(slot.region()))?;
                *in_kernel += began.elapsed();
                map.union_words(log);
                Ok(())
            })?;
        }
        self.in_kernel = Some(in_kernel);
        Ok(())
    }

    fn harvest_kernel_time(&self) -> Option<Duration> {
        self.in_kernel
    }

    fn protector(&self) -> Arc<dyn Protect> {
        Arc::clone(&self.shared) as _
    }

    fn stop(&mut self) -> Result<(), VmError> {
        Ok(self.try_stop()?)
    }
}

impl Drop for KvmLogTracker {
    fn drop(&mut self) {
        // No caller receives the error. A log that stays on only makes the guest slower.
        let _ = self.try_stop();
    }
}

impl Protect for LogState {
    /// Without manual protection, a harvest protects the pages.
    fn is_needed(&self) -> bool {
        self.mode() == Mode::ByHand
    }

    fn chunk_pages(&self) -> u64 {
        CHUNK_PAGES
    }

    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        match self.mode() {
            Mode::Off => return Err(TrackerError::NotStarted.into()),
            // The harvest that reported a page has protected it.
            Mode::ByReading => return Ok(()),
            Mode::ByHand => {}
        }
        let mut slots = self.slots.iter().zip(&self.found_on);
        let (slot, own) =
            slots.find(|(slot, _)| slot.region() == region).ok_or(TrackerError::NoRegion(region))?;
        let have = slot.pages();
        check_chunk(region, have, chunk, pages)?;
        let returned_pages = slot.returned_pages.as_deref().filter(|_| own.load(Ordering::Acquire));
        let clear = |first: u64, count: u32, bits: &mut [u64]| {
            if let Some(returned_pages) = returned_pages {
                // Do not clear the bit of a page that is not in `returned_pages`, because the VMM
                // would lose the page. If the bit is set, the next harvest reports the page. If it
                // is not set, the page is protected already.
                for (word, index) in bits.iter_mut().zip(first / 64..) {
                    *word &= usize::try_from(index).map_or(0, |index| returned_pages.word(index));
                }
                if bits.iter().all(|word| *word == 0) {
                    return Ok(());
                }
            }
            kvm::clear_dirty_log(self.vm(), slot.spec.slot, first, count, bits)
                .map_err(TrackerError::host(region))
        };
        Ok(for_each_clear(chunk, pages, clear)?)
    }
}

/// Calls `clear(first page, pages, bits)` for stretches that together contain exactly the pages of
/// `chunk` that are set in `pages`.
///
/// As KVM requires, each stretch starts at a multiple of 64 pages. Its length is a multiple of 64,
/// or it reaches the end of the slot, whose length is that of `pages`. Leading and trailing words
/// without pages are omitted.
fn for_each_clear(
    chunk: PageRun,
    pages: &Bitmap,
    mut clear: impl FnMut(u64, u32, &mut [u64]) -> Result<(), TrackerError>,
) -> Result<(), TrackerError> {
    // Bits of pages before and after the chunk, in its first and last word, must not be cleared.
    let word = |index: u64| word_of(chunk, pages, index);
    let (mut at, end) = (chunk.first.0 / 64, chunk.end().div_ceil(64));
    while at < end {
        if word(at) == 0 {
            at += 1;
            continue;
        }
        let (first, mut bits, mut used) = (at, [0; CHUNK_WORDS], 0);
        for (offset, (slot, index)) in bits.iter_mut().zip(first..end).enumerate() {
            *slot = word(index);
            if *slot != 0 {
                used = offset + 1;
            }
        }
        at = first + CHUNK_WORDS as u64;
        let count = (used as u64 * 64).min(pages.len() - first * 64);
        clear(first * 64, u32::try_from(count).expect("at most 8192"), &mut bits[..used])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vmferry_core::PageIndex;

    proptest! {
        #[test]
        fn clears_are_aligned_and_cover_exactly_the_pages(
            len in 1u64..30_000,
            seeds in prop::collection::vec((0u64..30_000, 1u64..300), 0..40),
            from in 0u64..30_000,
            count in 0u64..30_000,
        ) {
            let mut pages = Bitmap::new(len);
            for (first, run) in seeds {
                pages.set_range(first.min(len)..(first + run).min(len));
            }
            let first = from.min(len);
            let chunk = PageRun::new(PageIndex(first), count.min(len - first));
            let mut cleared = Bitmap::new(len);
            for_each_clear(chunk, &pages, |first, count, bits| {
                let end = first + u64::from(count);
                assert!(first.is_multiple_of(64) && count > 0);
                assert!(end == len || (count.is_multiple_of(64) && end < len), "{first}+{count} of {len}");
                assert_eq!(bits.len() as u64, u64::from(count).div_ceil(64));
                for (index, word) in bits.iter().enumerate() {
                    for bit in (0..64).filter(|bit| word >> bit & 1 != 0) {
                        assert!(!cleared.set(first + index as u64 * 64 + bit), "cleared twice");
                    }
                }
                Ok(())
            })
            .unwrap();
            let mut expected = pages.clone();
            expected.clear_range(0..first);
            expected.clear_range(chunk.end()..len);
            prop_assert_eq!(cleared, expected);
        }
    }
}
