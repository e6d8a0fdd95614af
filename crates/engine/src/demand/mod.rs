//! Demand paging: the guest runs on the target before all of its memory is there.
//!
//! # A page's way
//! 1. A vCPU, or another thread of the VMM, accesses a page that is missing. The fault thread of the page's stripe reads the fault
//!    ([`serve_faults`]).
//! 2. The [pager](DemandPager) notes the waiter in [`MissingPages`], and calls [`PageSource::fetch`]. If the page is not missing, it
//!    is known to be zero, or it arrived in between, and the pager answers the fault itself.
//! 3. The source fetches the page once. A link requests it on an urgent channel ([`UrgentChannels`](crate::target::urgent)), and the
//!    page arrives on any channel. Out of a snapshot file the fault thread reads it itself (`snapshot::fill`).
//! 4. The thread that has the content compares it with its digest and passes it to [`MissingPages::place_run`], which places it and
//!    only then removes the page from the missing set. A page of zeros is passed to [`MissingPages::take_zeros`]: it is placed only if
//!    a thread waits for it, and a later fault is answered at step 2.
//!
//! # The sets
//! | set of [`MissingPages`] | invariant |
//! |---|---|
//! | `missing` | A page leaves it once, after its content was placed or when it is known to be zero. |
//! | `claimed` | A page that is missing and claimed is being fetched, or cannot be had. One thread claims a page; a lost link clears the set. |
//! | `waiters` | Each thread that waits for a missing page and found room in the table. |
//!
//! # Each waiter goes on
//! The fault thread notes the waiter and then checks whether the page is still missing; the thread that brings a page removes it
//! from the missing set and then looks for waiters. Both with a full fence between, so at least one of them sees the other: the
//! fault thread a page that is no longer missing, or the bringing thread a waiter. A page with content was placed before either
//! looked, and placing wakes by itself; a page of zeros is placed by the thread that sees the other. Of several threads that could
//! bring a page one does, by the claim.
//!
//! # Units
//! Where the guest runs on huge pages, a page that arrived cannot be seen before the others of its huge page: the unit
//! ([`LazyMemory::unit_pages`]). A fault is then on a unit, and all missing pages of the unit are fetched. All of the above holds for
//! the unit: it is missing while any page of it is, zeros are placed like contents, and the thread that removes the last page from
//! the set looks for waiters. With units of one page it is the same thing.
//!
//! # Each page once
//! A source gives each page out once, so none comes twice. If one does all the same it is left as it is, because placing never
//! overwrites, and counted.

// What a peer or the host says must not panic a thread of the engine. Tests may.
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
pub(crate) use missing::{MissingPages, Place};

use crate::vm::caught;
use readahead::{Guess, ReadAhead};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{Fault, LazyMemory, PageSet, VmError};

/// Interval at which a fault thread that sleeps checks whether it is to stop, should the interrupt be lost.
const LOOK: Duration = Duration::from_secs(1);
/// Time after which a host that fails at reading faults is asked again: giving up would leave the guest asleep.
const AGAIN: Duration = Duration::from_millis(100);

/// Where missing pages come from.
pub(crate) trait PageSource: Debug + Send + Sync {
    /// What each fault thread has of its own, such as buffers.
    type Local;

    /// Returns the state of one more fault thread.
    fn local(&self) -> Self::Local;

    /// Fetches `place` and all that is missing of its unit, unless another thread has claimed it. A thread waits for it and is
    /// noted. The `ahead` pages behind it are likely to be needed next.
    ///
    /// The pages are passed to [`MissingPages::place_run`] or [`MissingPages::take_zeros`], now or later, by any thread.
    fn fetch(&self, pages: &MissingPages, local: &mut Self::Local, place: Place, ahead: u16);
}

/// The missing pages of a guest that runs, and the source that they come from. Shared by the fault threads and the threads that
/// bring pages.
#[derive(Debug)]
pub(crate) struct DemandPager<S> {
    pub(crate) pages: MissingPages,
    pub(crate) source: S,
}

impl<S: PageSource> DemandPager<S> {
    /// The pages of `missing` come from `source`, for a guest of `vcpus`.
    pub(crate) fn new(source: S, memory: Arc<dyn LazyMemory>, missing: &PageSet, vcpus: u32) -> Self {
        Self { pages: MissingPages::new(memory, missing, vcpus), source }
    }

    fn serve(&self, fault: Fault, read_ahead: &mut ReadAhead, local: &mut S::Local) {
        let Some(place) = self.pages.place_of(fault.region, fault.page) else {
            // The embedder's `LazyMemory` and its layout disagree; no source can answer that.
            tracing::error!("a fault on page {} of {}, which is not there", fault.page, fault.region);
            return;
        };
        if !self.pages.wait_for(place, fault.vcpu) {
            return;
        }
        // A huge page is read-ahead enough.
        let single = self.pages.single(place.region);
        let Guess { ahead, used } =
            if single { read_ahead.fault(place.region, place.page) } else { Guess::default() };
        self.pages.count_ahead(ahead, used);
        self.source.fetch(&self.pages, local, place, ahead);
    }
}

/// Serves the faults of `stripe` until [`MissingPages::stop`].
pub(crate) fn serve_faults<S: PageSource>(pager: &DemandPager<S>, stripe: usize) {
    vmferry_thread::scheduling::prefer_latency();
    let (mut read_ahead, mut local) = (ReadAhead::default(), pager.source.local());
    while !pager.pages.stopped() {
        match pager.pages.memory.next_fault(stripe, LOOK) {
            Ok(None) => {}
            Ok(Some(fault)) => pager.serve(fault, &mut read_ahead, &mut local),
            Err(error) => {
                tracing::error!("faults of the guest cannot be read: {error}; trying again");
                std::thread::sleep(AGAIN);
            }
        }
    }
}

/// Calls `serve` until it returns, and again after each panic, which the VM's own code may cause. A guest without a thread for its
/// faults would sleep at its next fault for ever.
pub(crate) fn again_after_panics(mut serve: impl FnMut()) {
    let mut served = || {
        serve();
        Ok::<_, VmError>(())
    };
    while let Err(panic) = caught(&mut served) {
        tracing::error!("a fault of the guest was not served: {panic}; the thread goes on");
        std::thread::sleep(AGAIN);
    }
}

#[cfg(test)]
mod tests;
