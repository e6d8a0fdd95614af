//! Harvesting of dirty rings: which entries are taken, in which order, and which locks are held.
//!
//! All calls to KVM are behind [`Kernel`], so that tests can use a model instead and check every
//! interleaving of the code that ships.

use super::policy::RingView;
use super::set::RingSet;
use super::stats::Counters;
use super::sync::{Mutex, MutexGuard, lock, try_lock};
use crate::TrackerError;
use crate::region::forget;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_bitmap::AtomicBitmap;
use vmferry_core::RegionId;
use vmferry_sys::SysError;
use vmferry_sys::ring::{RESERVED_ENTRIES, RingPage};

/// Number of consecutive calls of `KVM_RESET_DIRTY_RINGS` without a freed entry after which a ring
/// counts as stuck. Each signal ends a call early, after about a microsecond. No thread gets ten
/// thousand signals in a row.
const FRUITLESS_RESETS: u32 = 10_000;

/// Number of pages in the buffer of a vCPU's processor with PML, which KVM copies to the ring when
/// the vCPU exits (Linux `arch/x86/kvm/vmx/vmx.h`).
const PML_ENTRIES: u32 = 512;

/// Memory of the rings, and the call that resets them. The methods correspond to
/// [`vmferry_sys::ring`].
pub(crate) trait Kernel: Send + Sync {
    /// Returns the number of entries of each ring, a power of two.
    fn entries(&self) -> u32;
    fn dirty(&self, ring: usize, index: u32) -> Option<RingPage>;
    fn mark_harvested(&self, ring: usize, index: u32);
    fn awaits_reset(&self, ring: usize, index: u32) -> bool;
    fn reset(&self) -> Result<u32, SysError>;
}

/// Destination of harvested pages: one bitmap for each slot.
#[derive(Debug)]
pub(crate) struct Found {
    maps: Vec<(u32, Arc<AtomicBitmap>)>,
    /// Number of pages that are in none of the slots.
    outside: AtomicU64,
    /// Slot of the last page that is in none of the slots.
    outside_slot: AtomicU32,
}

impl Found {
    pub(crate) fn new(maps: Vec<(u32, Arc<AtomicBitmap>)>) -> Self {
        Self { maps, outside: AtomicU64::new(0), outside_slot: AtomicU32::new(0) }
    }

    /// Returns the bitmap of the slot at `position`.
    pub(crate) fn map(&self, position: usize) -> &AtomicBitmap {
        &self.maps[position].1
    }

    /// Discards all pages.
    pub(crate) fn clear(&self) {
        self.maps.iter().for_each(|(_, map)| forget(Some(&**map), None));
    }

    /// Discards `pages`.
    fn discard(&self, pages: &[RingPage]) {
        for page in pages {
            if let Some((_, map)) = self.maps.iter().find(|(slot, _)| *slot == page.slot)
                && let Ok(word) = usize::try_from(page.offset / 64)
            {
                map.take_word(word, 1 << (page.offset % 64));
            }
        }
    }

    fn publish(&self, pages: &[RingPage]) {
        for page in pages {
            match self.maps.iter().find(|(slot, map)| *slot == page.slot && page.offset < map.len()) {
                // Release, after the reset: see `Core::harvest`.
                Some((_, map)) => {
                    map.set(page.offset);
                }
                None => {
                    self.outside_slot.store(page.slot, Ordering::Relaxed);
                    self.outside.fetch_add(1, Ordering::Release);
                }
            }
        }
    }

    /// Returns an error if KVM ever reported a page that is in none of the slots and would be lost.
    pub(crate) fn check(&self) -> Result<(), TrackerError> {
        match self.outside.load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(TrackerError::NoRegion(RegionId(self.outside_slot.load(Ordering::Relaxed)))),
        }
    }
}

/// Index of the next entry to take. It increases forever and wraps around at 2^32, a multiple of
/// every ring size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor(u32);

impl Cursor {
    fn plus(self, entries: u32) -> u32 {
        self.0.wrapping_add(entries)
    }

    /// Returns the index of the previous entry, which was taken last.
    fn last(self) -> u32 {
        self.0.wrapping_sub(1)
    }
}

/// State of a ring that belongs to the thread that harvests the ring.
#[derive(Debug)]
struct Harvester {
    next: Cursor,
    /// Index of the next entry for [`Core::look`]. If it is not within the ring's entries from
    /// `next` on, `next` is.
    unseen: Cursor,
    /// Pages whose entries were taken and marked as harvested, but that KVM may not have protected
    /// again yet. They are not published yet. Empty between two harvests, unless a reset failed:
    /// then the pages wait for the next attempt.
    batch: Vec<RingPage>,
}

#[derive(Debug)]
struct Ring {
    harvester: Mutex<Harvester>,
    /// Copy of `harvester.next` for [`Core::used`], which takes no lock.
    next: AtomicU32,
    counters: Counters,
}

/// Deliberately wrong order of steps, for tests that show that the order matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// Pages can be sent before they are protected again.
    PublishFirst,
    /// Treats an entry that KVM has freed as a page that KVM has protected.
    ResetsAtOnce,
}

/// Returns the number of entries after which a vCPU is stopped on a processor without PML.
fn computed_usable(kernel: &impl Kernel) -> u32 {
    kernel.entries().saturating_sub(RESERVED_ENTRIES).max(1)
}

#[derive(Debug)]
pub(crate) struct Core<K> {
    kernel: K,
    rings: Vec<Ring>,
    /// Lock that is held for each call of `reset`. A call resets all marked entries, including
    /// those of other threads. Without the lock, a call of another thread could be resetting the
    /// entries of this thread. This thread would find its entries free, and its own call would
    /// return with nothing to do, before KVM has protected the pages and flushed the TLBs.
    resets: Mutex<()>,
    /// Lock of policies that harvest all rings at once: see [`Core::harvest_all`].
    one: Mutex<()>,
    found: Found,
    /// Pages that [`look`](Self::look) saw in the rings, and that no thread has harvested or passed
    /// to [`discard`](Self::discard) since. Only a hint: a page that two vCPUs wrote is missing
    /// once the ring of one of them is harvested.
    seen: Found,
    /// Number of entries after which a vCPU may be stopped: the smallest number that a full ring
    /// held, because the true number depends on the processor. Before the first full ring, computed
    /// from the size of the ring.
    usable: AtomicU32,
    made: Instant,
    #[cfg(test)]
    pub(crate) flaw: Flaw,
}

impl<K: Kernel> Core<K> {
    /// Creates the state of `rings` rings, one for each vCPU, to which KVM has not added any page.
    /// `found` and `seen` have the same slots.
    pub(crate) fn new(kernel: K, rings: usize, (found, seen): (Found, Found)) -> Self {
        let ring = |_| Ring {
            harvester: Mutex::new(Harvester { next: Cursor(0), unseen: Cursor(0), batch: Vec::new() }),
            next: AtomicU32::new(0),
            counters: Counters::default(),
        };
        let usable = computed_usable(&kernel);
        Self {
            kernel,
            rings: (0..rings).map(ring).collect(),
            resets: Mutex::new(()),
            one: Mutex::new(()),
            found,
            seen,
            usable: AtomicU32::new(usable),
            made: Instant::now(),
            #[cfg(test)]
            flaw: Flaw::None,
        }
    }

    pub(crate) fn kernel(&self) -> &K {
        &self.kernel
    }

    pub(crate) fn found(&self) -> &Found {
        &self.found
    }

    pub(crate) fn seen(&self) -> &Found {
        &self.seen
    }

    pub(crate) fn entries(&self) -> u32 {
        self.kernel.entries()
    }

    /// Returns the number of rings.
    pub(crate) fn len(&self) -> usize {
        self.rings.len()
    }

    /// Returns the number of entries of a ring that a vCPU can fill before it has to stop.
    pub(crate) fn usable(&self) -> u32 {
        self.usable.load(Ordering::Relaxed)
    }

    /// Forgets the learned number of usable entries.
    pub(crate) fn unlearn(&self) {
        self.usable.store(computed_usable(&self.kernel), Ordering::Relaxed);
    }

    pub(crate) fn counters(&self, ring: usize) -> &Counters {
        &self.rings[ring].counters
    }

    /// Returns the time since the rings were created, the clock of [`RingView::emptied_at`].
    pub(crate) fn now(&self) -> Duration {
        self.made.elapsed()
    }

    /// Takes all entries of `rings`, makes KVM protect their pages again, and then publishes the
    /// pages. Returns the number of pages.
    ///
    /// # Why no write is lost
    /// The first guest write to a protected page adds the page to the ring. Later writes leave no
    /// trace until the page is protected again. Therefore the engine must read the page after it
    /// has been protected again, and a page is published only after the reset that protects it has
    /// returned. The engine reads the result of every write before that reset. A write after the
    /// reset faults on the protected page, and KVM adds the page to the ring again.
    ///
    /// # Locks
    /// A thread that harvests a ring holds the lock of that ring until the pages are published.
    /// Therefore no other thread holds back pages when a harvest of all rings returns. A vCPU takes
    /// a lock only when its ring is full. The order of a [`RingSet`] keeps two harvests from
    /// waiting for each other.
    ///
    /// # Errors
    /// Returns an error if the reset fails. The taken pages stay with the ring, and its next
    /// harvest tries again.
    pub(crate) fn harvest(&self, rings: &RingSet) -> Result<u64, TrackerError> {
        let mut held = Vec::new();
        for ring in rings.iter() {
            let mut harvester = lock(&self.rings[ring].harvester);
            self.collect(ring, &mut harvester);
            if !harvester.batch.is_empty() {
                held.push((ring, harvester));
            }
        }
        if held.is_empty() {
            return Ok(0);
        }
        #[cfg(test)]
        if self.flaw == Flaw::PublishFirst {
            held.iter().for_each(|(_, harvester)| self.found.publish(&harvester.batch));
        }
        self.protect(&held)?;
        let mut pages = 0;
        for (ring, harvester) in &mut held {
            #[cfg(test)]
            if self.flaw == Flaw::PublishFirst {
                harvester.batch.clear();
            }
            self.found.publish(&harvester.batch);
            self.seen.discard(&harvester.batch);
            self.rings[*ring].counters.harvested(self.now());
            pages += harvester.batch.len() as u64;
            harvester.batch.clear();
        }
        Ok(pages)
    }

    /// Moves the dirty entries of `ring` to the batch.
    fn collect(&self, ring: usize, harvester: &mut Harvester) {
        let before = harvester.batch.len();
        // At most one round, because a vCPU may continue to write.
        for _ in 0..self.kernel.entries() {
            let Some(page) = self.kernel.dirty(ring, harvester.next.plus(0)) else { break };
            harvester.batch.push(page);
            self.kernel.mark_harvested(ring, harvester.next.plus(0));
            harvester.next = Cursor(harvester.next.plus(1));
        }
        let ring = &self.rings[ring];
        ring.next.store(harvester.next.plus(0), Ordering::Relaxed);
        // Counted at once: the entries of this ring are not in use any more, so that a policy which
        // looks at the ring before the reset is complete would miss their pages otherwise.
        ring.counters.taken((harvester.batch.len() - before) as u64);
    }

    /// Adds the pages of entries that were added to the rings since the last call to
    /// [`seen`](Self::seen), and leaves the entries where they are. The next harvest of all rings
    /// publishes these pages to [`found`](Self::found). Returns the number of entries that a
    /// harvest would take.
    ///
    /// The pages of a ring that another thread harvests or looks at are left out. The entries of
    /// such a ring are counted without the lock, so the number is inexact during a harvest.
    pub(crate) fn look(&self) -> u64 {
        let mut entries = 0;
        for (number, ring) in self.rings.iter().enumerate() {
            // The lock is needed: without it, an entry that is harvested and used again in the
            // meantime could show the slot of one page and the offset of another.
            let Some(mut harvester) = try_lock(&ring.harvester) else {
                entries += u64::from(self.used(number, 0));
                continue;
            };
            let ahead = harvester.unseen.plus(0).wrapping_sub(harvester.next.plus(0));
            let mut end = if ahead <= self.kernel.entries() { ahead } else { 0 };
            while end < self.kernel.entries()
                && let Some(page) = self.kernel.dirty(number, harvester.next.plus(end))
            {
                self.seen.publish(&[page]);
                end += 1;
            }
            harvester.unseen = Cursor(harvester.next.plus(end));
            entries += u64::from(end);
        }
        entries
    }

    /// Discards the recorded writes to some pages of a slot, if KVM has protected these pages again
    /// since. If a ring has any of the pages, all rings are harvested first, unless `may_harvest`
    /// returns false for the number of entries in the rings. The caller then reads the pages.
    ///
    /// `slot` is the position of the slot in [`found`](Self::found). `wanted` returns the pages as
    /// words of a bitmap, with their indexes, and `each` receives the discarded pages in the same
    /// form.
    ///
    /// # Why no write is lost
    /// A page in `found` was published after its reset. So it is protected, or was written since
    /// and is in a ring. In both cases the content that is read afterwards has every write that was
    /// recorded in `found`, and a later harvest finds every other write.
    ///
    /// # Errors
    /// Returns an error if the reset fails. Nothing has been discarded then.
    pub(crate) fn discard<W: Iterator<Item = (usize, u64)>>(
        &self,
        slot: usize,
        wanted: impl Fn() -> W,
        may_harvest: impl FnOnce(u64) -> bool,
        mut each: impl FnMut(usize, u64),
    ) -> Result<(), TrackerError> {
        let entries = self.look();
        let mut in_a_ring = 0;
        wanted().for_each(|(index, pages)| in_a_ring |= self.seen.map(slot).take_word(index, pages));
        if in_a_ring != 0 && may_harvest(entries) {
            self.harvest_every()?;
        }
        for (index, pages) in wanted() {
            match self.found.map(slot).take_word(index, pages) {
                0 => {}
                discarded => each(index, discarded),
            }
        }
        Ok(())
    }

    /// Waits until the pages of all batches are protected again.
    fn protect(&self, held: &[(usize, MutexGuard<'_, Harvester>)]) -> Result<(), TrackerError> {
        // KVM resets the entries of a ring in order, so it is sufficient to check the last one.
        // After the reset, that entry is free or already in use again.
        let waiting = || held.iter().find(|(ring, h)| self.kernel.awaits_reset(*ring, h.next.last()));
        #[cfg(test)]
        let _unlocked = if self.flaw == Flaw::ResetsAtOnce { Some(Mutex::new(())) } else { None };
        #[cfg(test)]
        let _one_at_a_time = lock(_unlocked.as_ref().unwrap_or(&self.resets));
        #[cfg(not(test))]
        let _one_at_a_time = lock(&self.resets);
        let mut fruitless = 0;
        // No other call is running at this point. If the entries of this thread do not wait any
        // more, a call that has returned has protected them.
        while let Some((ring, _)) = waiting() {
            match self.kernel.reset() {
                Ok(0) => fruitless += 1,
                Ok(_) => fruitless = 0,
                Err(error) if error.errno() == Some(libc::EINTR) => fruitless += 1,
                Err(error) => return Err(TrackerError::RingReset(error)),
            }
            if fruitless > FRUITLESS_RESETS {
                return Err(TrackerError::RingStuck { vcpu: *ring });
            }
        }
        Ok(())
    }

    /// Takes all entries of all rings.
    pub(crate) fn harvest_every(&self) -> Result<u64, TrackerError> {
        self.harvest(&RingSet::all(self.rings.len()))
    }

    /// Takes all entries of all rings under one lock. Every other caller waits, also a vCPU whose
    /// ring is full.
    pub(crate) fn harvest_all(&self) -> Result<u64, TrackerError> {
        let _one = lock(&self.one);
        self.harvest_every()
    }

    /// Makes room in `ring` for its vCPU, which was stopped because the ring is full. If `all` is
    /// true, harvests all rings under one lock.
    pub(crate) fn full(&self, ring: usize, all: bool) -> Result<(), TrackerError> {
        let begin = Instant::now();
        let counters = &self.rings[ring].counters;
        // Another thread that is harvesting the ring has taken some of its entries.
        let alone = try_lock(&self.rings[ring].harvester).is_some();
        counters.full();
        let pages = if all { self.harvest_all() } else { self.harvest(&RingSet::one(ring)) };
        counters.stalled(begin.elapsed());
        let pages = pages?;
        if alone && !all {
            self.learn_usable(pages);
        }
        Ok(())
    }

    /// Learns the number of usable entries from a full ring with `pages` entries.
    ///
    /// On a processor with PML, KVM stops the vCPU 512 entries earlier, but then the vCPU's buffer
    /// adds up to 511 further entries. Therefore the smallest number is the number after which a
    /// vCPU may be stopped. A ring with fewer entries was harvested by another thread shortly
    /// before, and says nothing. No other thread may be harvesting the ring.
    fn learn_usable(&self, pages: u64) {
        let least = self.kernel.entries().saturating_sub(RESERVED_ENTRIES + PML_ENTRIES);
        if let Ok(pages) = u32::try_from(pages)
            && pages >= least.max(self.kernel.entries() / 4)
        {
            self.usable.fetch_min(pages, Ordering::Relaxed);
        }
    }

    /// Returns the state of `ring`. `before` is the number of entries in use at the last look.
    ///
    /// Takes no lock. The number of loads is two if nothing was written since the last look, and
    /// the logarithm of the ring's size otherwise.
    pub(crate) fn view(&self, ring: usize, before: u32) -> RingView {
        // In this order, a page that another thread takes meanwhile is counted later, and not
        // twice.
        let counted = self.rings[ring].counters.view();
        RingView { used: self.used(ring, before), ..counted }
    }

    fn used(&self, ring: usize, before: u32) -> u32 {
        let next = Cursor(self.rings[ring].next.load(Ordering::Relaxed));
        let dirty = |entries: u32| self.kernel.dirty(ring, next.plus(entries)).is_some();
        // Dirty entries are one stretch that starts at `next`. A concurrent harvest makes the
        // result slightly inexact.
        let (mut low, mut high) = match before {
            0 => (0, self.kernel.entries()),
            before if dirty(before - 1) => (before, self.kernel.entries()),
            before => (0, before - 1),
        };
        if low < high && !dirty(low) {
            return low;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if dirty(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Returns true if more than `entries` entries of `ring` are in use. Takes no lock, and reads a
    /// single entry.
    pub(crate) fn above(&self, ring: usize, entries: u32) -> bool {
        let next = Cursor(self.rings[ring].next.load(Ordering::Relaxed));
        self.kernel.dirty(ring, next.plus(entries)).is_some()
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
