//! Demand paging: the guest runs on the target before all of its memory has arrived.
//!
//! # Steps of a fault
//! 1. A vCPU, or another thread of the VMM, accesses a page that is missing. The fault thread of
//!    the page's shard reads the fault ([`serve_faults`]).
//! 2. The [pager](DemandPager) records the waiter in [`MissingSet`], and calls
//!    [`PageSource::fetch`]. If the page is not missing, because it is known to be zero or has
//!    arrived in between, the pager answers the fault itself instead.
//! 3. The page source fetches the page once. If the source is a link, the page is requested on an
//!    urgent channel ([`UrgentChannels`](crate::target::urgent)), and arrives on any channel. If
//!    the source is a snapshot file, the fault thread reads the page itself (`snapshot::fill`).
//! 4. The thread that has the content compares it with its digest and passes it to
//!    [`MissingSet::place_run`], which places it and only then removes the page from the missing
//!    set. A page of zeros is passed to [`MissingSet::take_zeros`]: it is placed only if a thread
//!    waits for it, and a later fault is answered at step 2.
//!
//! # Sets of pages
//! | set of [`MissingSet`] | invariant |
//! |---|---|
//! | `missing` | A page leaves the set once, after its content was placed or when it is known to be zero. |
//! | `claimed` | A page that is missing and claimed is being fetched, or cannot be read. One thread claims a page. A lost link clears the set. |
//! | `waiters` | Each thread that waits for a missing page and found room in the table. |
//!
//! # Why each waiter continues
//! The fault thread records the waiter, and then checks whether the page is still missing. The
//! thread that delivers a page removes it from the missing set, and then looks for waiters. Both
//! threads execute a full fence between their two steps. Therefore at least one of them sees the
//! effect of the other: the fault thread sees that the page is no longer missing, or the delivering
//! thread sees the waiter. A page with content was placed before it was removed from the missing
//! set, and placing it wakes the waiters. A page of zeros is placed by the thread that sees the
//! effect of the other. Only the thread that has claimed a page delivers it.
//!
//! # Units
//! If the guest runs on huge pages, a page that has arrived cannot be accessed before all other
//! pages of its huge page have arrived. The huge page is then the unit
//! ([`DemandPaging::unit_pages`]): a fault concerns a unit, and all missing pages of the unit are
//! fetched. All rules above apply to units instead of pages: a unit is missing while any of its
//! pages is missing, zeros are placed like contents, and the thread that removes the last page of a
//! unit from the set looks for waiters.
//!
//! # Duplicates
//! A correct source sends each page once. If a page nevertheless arrives twice, it is counted, and
//! its first content remains, because placing never overwrites a page.

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod arriving;
mod latency;
mod missing;
mod readahead;
mod waiters;

pub(crate) use arriving::still_arrives;
#[cfg(test)]
pub(crate) use missing::Flaw;
pub(crate) use missing::{MissingSet, PageLocation};

use crate::vm::caught;
use readahead::{Prefetch, ReadAhead};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{DemandPaging, Fault, PageSet, VmError};

/// Interval at which a sleeping fault thread checks whether it must stop, in case it has missed the
/// interrupt.
const LOOK: Duration = Duration::from_secs(1);
/// Delay before a fault thread reads faults again, after the host has returned an error. The thread
/// must not give up, because the guest would sleep for ever.
const AGAIN: Duration = Duration::from_millis(100);

/// Source of missing pages.
pub(crate) trait PageSource: Debug + Send + Sync {
    /// State of each fault thread, such as buffers.
    type Local;

    /// Returns the state of one more fault thread.
    fn local(&self) -> Self::Local;

    /// Fetches the page `place` and all missing pages of its unit, unless another thread has
    /// claimed them. A thread waits for `place`, and is already recorded as a waiter. The guest is
    /// likely to need the next `ahead` pages soon.
    ///
    /// The pages are passed to [`MissingSet::place_run`] or [`MissingSet::take_zeros`], now or
    /// later, by any thread.
    fn fetch(&self, pages: &MissingSet, local: &mut Self::Local, place: PageLocation, ahead: u16);
}

/// Missing pages of a running guest, and the source that they come from. The fault threads and the
/// threads that deliver pages share the value.
#[derive(Debug)]
pub(crate) struct DemandPager<S> {
    pub(crate) pages: MissingSet,
    pub(crate) source: S,
}

impl<S: PageSource> DemandPager<S> {
    /// Returns a pager that gets the pages of `missing` from `source`, for a guest of `vcpus`
    /// vCPUs.
    pub(crate) fn new(source: S, memory: Arc<dyn DemandPaging>, missing: &PageSet, vcpus: u32) -> Self {
        Self { pages: MissingSet::new(memory, missing, vcpus), source }
    }

    fn serve(&self, fault: Fault, read_ahead: &mut ReadAhead, local: &mut S::Local) {
        let Some(place) = self.pages.location_of(fault.region, fault.page) else {
            // The VMM's `DemandPaging` and its memory layout contradict each other. No source can
            // answer such a fault.
            tracing::error!("a fault on page {} of {}, which does not exist", fault.page, fault.region);
            return;
        };
        if !self.pages.wait_for(place, fault.vcpu) {
            return;
        }
        // A fault on a huge page already fetches many pages, so it needs no read-ahead.
        let single = self.pages.single(place.region);
        let Prefetch { ahead, used } =
            if single { read_ahead.fault(place.region, place.page) } else { Prefetch::default() };
        self.pages.count_ahead(ahead, used);
        self.source.fetch(&self.pages, local, place, ahead);
    }
}

/// Serves the faults of `shard` until [`MissingSet::stop`].
pub(crate) fn serve_faults<S: PageSource>(pager: &DemandPager<S>, shard: usize) {
    vmferry_thread::scheduling::prefer_latency();
    let (mut read_ahead, mut local) = (ReadAhead::default(), pager.source.local());
    while !pager.pages.stopped() {
        match pager.pages.memory.next_fault(shard, LOOK) {
            Ok(None) => {}
            Ok(Some(fault)) => pager.serve(fault, &mut read_ahead, &mut local),
            Err(error) => {
                tracing::error!("faults of the guest cannot be read: {error}; trying again");
                std::thread::sleep(AGAIN);
            }
        }
    }
}

/// Calls `serve`, and calls it again after each panic, which the VMM's code may cause. Without a
/// thread for its faults, the guest would sleep for ever at its next fault.
pub(crate) fn again_after_panics(mut serve: impl FnMut()) {
    let mut served = || {
        serve();
        Ok::<_, VmError>(())
    };
    while let Err(panic) = caught(&mut served) {
        tracing::error!("a fault of the guest was not served: {panic}; the thread continues");
        std::thread::sleep(AGAIN);
    }
}

#[cfg(test)]
mod tests;
