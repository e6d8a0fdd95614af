//! The threads that take faults, one a stripe.

use super::ahead::{Ahead, Guess};
use super::{Lazy, Origin, Place};
use crate::sync::fence;
use crate::vm::caught;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_core::{Fault, VmError};

/// How long a thread sleeps at most before it looks whether it is to stop, should the interrupt be lost.
const LOOK: Duration = Duration::from_secs(1);
/// A host that fails at reading faults is asked again after this long: giving up would leave the guest asleep.
pub(super) const AGAIN: Duration = Duration::from_millis(100);

/// Calls `serve` until it returns, and again after each panic, which the VM's own code may cause. A guest without a thread for its faults
/// would sleep at its next fault for ever.
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

/// Takes the faults of `stripe` until [`Lazy::stop`].
pub(crate) fn serve_faults<O: Origin>(lazy: &Lazy<O>, stripe: usize) {
    vmferry_thread::scheduling::prefer_latency();
    let (mut ahead, mut hands) = (Ahead::default(), lazy.origin.hands());
    while !lazy.stopped() {
        match lazy.memory.next_fault(stripe, LOOK) {
            Ok(None) => {}
            Ok(Some(fault)) => lazy.serve(fault, &mut ahead, &mut hands),
            Err(error) => {
                tracing::error!("faults of the guest cannot be read: {error}; trying again");
                std::thread::sleep(AGAIN);
            }
        }
    }
}

impl<O: Origin> Lazy<O> {
    pub(super) fn serve(&self, fault: Fault, ahead: &mut Ahead, hands: &mut O::Hands) {
        let now = self.now();
        let Some(place) = self.place_of(fault.region, fault.page) else {
            // The embedder's `LazyMemory` and its layout disagree; nobody can answer that.
            tracing::error!("a fault on page {} of {}, which is not there", fault.page, fault.region);
            return;
        };
        if !self.unit_lacks(place) {
            return self.answer_here(place);
        }
        // Who waits is written down before the page is looked at again: see the module's documentation.
        let measured = self.waiters.add(place, now, fault.vcpu);
        fence(Ordering::SeqCst);
        #[cfg(test)]
        if self.flaw == super::Flaw::LooksOnce {
            return;
        }
        if !self.unit_lacks(place) {
            self.release(place.region, self.unit(place));
            return self.answer_here(place);
        }
        if !measured {
            tracing::debug!("more faults at once than can be watched");
        }
        // A huge page is run enough.
        let single = self.single(place.region);
        let Guess { ahead, used } =
            if single { ahead.fault(place.region, place.page) } else { Guess::default() };
        self.counters.ahead.fetch_add(ahead.into(), Ordering::Relaxed);
        self.counters.ahead_used.fetch_add(used.into(), Ordering::Relaxed);
        O::bring(self, hands, place, ahead);
    }
}

impl<O> Lazy<O> {
    /// The page is zero, or came in the meantime.
    fn answer_here(&self, place: Place) {
        self.counters.zero_faults.fetch_add(1, Ordering::Relaxed);
        self.zero_at_last(place);
    }

    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// These pages are taken off the set: whoever waited for one whose unit lacks nothing now goes on.
    pub(super) fn release_units(&self, region: usize, pages: Range<u64>) {
        if self.single(region) {
            return self.release(region, pages);
        }
        let mut page = pages.start;
        while page < pages.end {
            let unit = self.unit(Place { region, page });
            page = unit.end;
            if !self.unit_lacks(Place { region, page: unit.start }) {
                self.release(region, unit);
            }
        }
    }

    /// Whoever waited for these pages goes on.
    pub(super) fn release(&self, region: usize, pages: Range<u64>) {
        self.waiters.take(region, pages, |waiter| {
            self.latencies.record(waiter.vcpu, self.now().saturating_sub(waiter.since));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_thread_goes_on_after_a_panic() {
        let mut calls = 0;
        again_after_panics(|| {
            calls += 1;
            assert!(calls > 2, "a clumsy VM");
        });
        assert_eq!(calls, 3);
    }
}
