//! Baselines: published paths of an urgent page, kept for comparison with the dedicated path.
//!
//! No other part of the engine needs a baseline. The dedicated path is in
//! [`urgent`](super::urgent), and `vmferry-bench postcopy` measures all three in one run.
//!
//! | path | the thread that reads a request | the page is sent | published mean latency of a fault |
//! |---|---|---|---|
//! | `shared` | leaves the request to a bulk thread | on the bulk channel, behind the bytes that are queued there | 12093 us |
//! | `interleaved` | leaves the request to a bulk thread | on the urgent channel, between two bulk frames | 496 us |
//! | `dedicated`, the default | sends the page | at once, on the urgent channel | 229 us |
//!
//! The figures are from the work on QEMU that describes the three paths, for random writes to 18 GB
//! of a guest of 20 GB, over 10 Gb/s. The wire format is the same for all paths, so the target need
//! not know which path the source uses.
//!
//! # Why this is a module and not an extension point
//! A baseline is a queue between the threads that read requests and the bulk threads. A trait for
//! such paths would have to pass the claims, the senders and the locks of all channels to its
//! implementations, although this is the part of the engine that must never send a page twice.
//! Besides, on the dedicated path, each bulk thread would have to call the trait after each frame,
//! where it now tests one `Option`. Therefore the two baselines are inside the engine, and no other
//! part of postcopy depends on how they work: [`Claims::baseline`] is `None` on the dedicated path.

use super::super::sender::{FrameSink, Sender, SenderError};
use super::super::settings::UrgentPath;
use super::urgent::UrgentOut;
use super::{Claims, Wanted};
use crate::sync::{AtomicUsize, ClaimBitmap, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Maximum number of requests in the queue. It is larger than the number of vCPUs of any guest.
const MOST_QUEUED: usize = 4096;

/// Request that waits for a bulk thread.
#[derive(Debug, Clone, Copy)]
struct Left {
    wanted: Wanted,
    /// Urgent channel that the request came on.
    channel: usize,
}

/// Requests that wait for a bulk thread.
#[derive(Debug)]
pub(super) struct BulkQueue {
    /// True if the pages are sent on urgent channels, between two bulk frames.
    interleaved: bool,
    requests: Mutex<VecDeque<Left>>,
    /// Length of `requests`, readable without the lock.
    queued: AtomicUsize,
    /// Number of bulk threads at work, which serve the queue.
    bulk_at_work: AtomicUsize,
    #[cfg(test)]
    flaw: Flaw,
}

/// Planted defect, for tests that show that an order matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// The last bulk thread sees that no request waits, and only then removes itself.
    EndsLate,
    /// A request is left to the bulk threads because one was at work a moment ago.
    LeavesLate,
}

impl BulkQueue {
    /// Returns the queue of a baseline. `None` for the dedicated path.
    pub(super) fn of(path: UrgentPath) -> Option<Self> {
        let interleaved = match path {
            UrgentPath::Dedicated => return None,
            UrgentPath::Interleaved => true,
            UrgentPath::Shared => false,
        };
        Some(Self {
            interleaved,
            requests: Mutex::default(),
            queued: AtomicUsize::new(0),
            bulk_at_work: AtomicUsize::new(0),
            #[cfg(test)]
            flaw: Flaw::None,
        })
    }

    fn requests(&self) -> MutexGuard<'_, VecDeque<Left>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, mut requests: MutexGuard<'_, VecDeque<Left>>, left: Left) {
        requests.push_back(left);
        self.queued.store(requests.len(), Ordering::Release);
    }

    /// Leaves a request of `channel` to a bulk thread. Returns false if no bulk thread will serve
    /// the request.
    ///
    /// `map` has the pages of the request's region that no thread has claimed.
    pub(super) fn leave(&self, map: &ClaimBitmap, wanted: Wanted, channel: usize) -> bool {
        let left = Left { wanted, channel };
        if wanted.ahead == 0 && !wanted.again && !map.test(wanted.page) {
            // The page is already in flight.
            return true;
        }
        #[cfg(test)]
        if self.flaw == Flaw::LeavesLate {
            let at_work = self.bulk_at_work.load(Ordering::Relaxed) > 0;
            if at_work {
                self.push(self.requests(), left);
            }
            return at_work;
        }
        let requests = self.requests();
        // A target can send requests faster than bulk threads send pages. Then the thread that
        // reads requests sends the page, and reads no further request in the meantime.
        if requests.len() >= MOST_QUEUED {
            return false;
        }
        // This check needs the lock. The last bulk thread removes itself under the same lock, and
        // therefore finds every request that was queued before.
        if self.bulk_at_work.load(Ordering::Relaxed) == 0 {
            return false;
        }
        self.push(requests, left);
        true
    }

    /// Takes the oldest request.
    fn next(&self) -> Option<Left> {
        if self.queued.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut requests = self.requests();
        let left = requests.pop_front();
        self.queued.store(requests.len(), Ordering::Release);
        left
    }

    /// Counts a bulk thread that begins to serve the queue.
    pub(super) fn bulk_begins(&self) {
        let _requests = self.requests();
        self.bulk_at_work.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a bulk thread that has nothing left to send. Returns false if the thread must serve
    /// a request first.
    fn bulk_ends(&self) -> bool {
        let requests = self.requests();
        #[cfg(test)]
        if self.flaw == Flaw::EndsLate && requests.is_empty() {
            drop(requests);
            self.bulk_at_work.fetch_sub(1, Ordering::Relaxed);
            return true;
        }
        if requests.is_empty() || self.bulk_at_work.load(Ordering::Relaxed) > 1 {
            self.bulk_at_work.fetch_sub(1, Ordering::Relaxed);
            return true;
        }
        false
    }
}

impl<S: FrameSink> Sender<'_, S> {
    /// Serves the requests that were left to bulk threads. There are none on the dedicated path.
    pub(super) fn serve_left(
        &mut self,
        pass: u32,
        claims: &Claims,
        urgent: &[UrgentOut<'_>],
    ) -> Result<(), SenderError> {
        let Some(queue) = &claims.baseline else { return Ok(()) };
        while let Some(Left { wanted, channel }) = queue.next() {
            match urgent.get(channel) {
                Some(out) if queue.interleaved => out.send(claims, wanted)?,
                _ => {
                    self.send_wanted(pass, claims, wanted)?;
                    self.send_ahead(pass, claims, wanted, || false)?;
                }
            }
        }
        Ok(())
    }

    /// Ends the work of a bulk thread that has nothing left to send: serves the remaining requests,
    /// and removes the thread from the count.
    pub(super) fn end_serving(
        &mut self,
        pass: u32,
        claims: &Claims,
        urgent: &[UrgentOut<'_>],
    ) -> Result<(), SenderError> {
        let Some(queue) = &claims.baseline else { return Ok(()) };
        while !queue.bulk_ends() {
            self.serve_left(pass, claims, urgent)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
