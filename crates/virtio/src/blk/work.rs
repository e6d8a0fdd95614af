//! Requests under way, between the device and the threads that do them.
//!
//! # States of a request
//! [`Blk`](super::Blk) takes a request out of the ring and queues it (`queued`). A thread takes the
//! request (`running`), does it, marks it as done (`done`) and rings the doorbell. On that thread,
//! the device then gives the buffer back. A request is in exactly one of these states. The thread
//! that rings is counted (`ringing`) until it returns.
//!
//! # The attendant
//! The thread that waits for notifications is the attendant. It rings the doorbell for each
//! notification, and owns the requests that the device then takes out of the ring. It tries each
//! request without waiting, gives the buffers of all completed requests back together, and checks
//! the ring again before it waits for the next notification. Therefore the driver of a busy disk
//! need not notify, and one interrupt covers all requests that were completed meanwhile. The
//! attendant passes requests that need a wait to the other threads (`handed`).
//!
//! # Quiescing
//! Once `running == 0`, no thread touches guest memory or the file for a request. An operation that
//! takes the buffers away (a reset, a queue that is switched off) waits for this state. Once
//! `ringing == 0`, every buffer has been given back, unless the ring no longer exists. Both
//! together mean that the disk is quiesced: the saved state has no request under way, and the file
//! has everything that was answered. A thread that establishes this while the disk is quiescing
//! rings once more.
//!
//! # Missing pages
//! In postcopy, a thread sleeps when it accesses a missing page, in a request or in the ring. Only
//! the guest waits for this thread, because the device's lock is held only for accesses to the
//! ring, and a pause waits only for a bounded time.

use super::metrics::{BlkFigures, Metrics, add};
use super::request::{Limits, Request};
use super::run::{ID_BYTES, Job};
use super::{Disk, QUEUE};
use crate::device::Doorbell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use vm_memory::GuestMemory;

/// Buffer to be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) head: u16,
    pub(super) written: u32,
}

#[derive(Debug)]
struct Queued {
    request: Request,
    limits: Limits,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    queued: VecDeque<Queued>,
    /// Requests that the attendant tried but that need a wait.
    handed: VecDeque<Queued>,
    /// True if the attendant owns the queued requests and checks for new ones.
    attending: bool,
    /// Number of threads that wait for a request.
    idle: usize,
    /// Number of threads that wait until nothing is running.
    forgetting: usize,
    running: usize,
    done: Vec<Done>,
    ringing: usize,
    /// True while the disk is quiescing or quiesced: no new request is begun.
    quiescing: bool,
    /// Allocated requests for reuse.
    spare: Vec<Request>,
    ended: bool,
}

impl State {
    fn is_quiesced(&self) -> bool {
        self.queued.is_empty() && self.handed.is_empty() && self.running == 0 && self.ringing == 0
    }
}

/// State that a disk's threads share with its device. Its lock is never held during an access to
/// guest memory or to the file.
#[derive(Debug)]
pub struct BlkWork {
    id: [u8; ID_BYTES],
    state: Mutex<State>,
    /// Signalled when a request was queued or the work ends.
    wanted: Condvar,
    /// Signalled when a request is done or dropped.
    idle_again: Condvar,
    pub(super) write_through: AtomicBool,
    pub(super) metrics: Metrics,
    doorbell: Arc<dyn Doorbell>,
}

impl BlkWork {
    pub(super) fn new(id: [u8; ID_BYTES], doorbell: Arc<dyn Doorbell>) -> Arc<Self> {
        Arc::new(Self {
            id,
            state: Mutex::default(),
            wanted: Condvar::new(),
            idle_again: Condvar::new(),
            write_through: AtomicBool::new(true),
            metrics: Metrics::default(),
            doorbell,
        })
    }

    /// Returns the counters of the disk.
    #[must_use]
    pub fn figures(&self) -> BlkFigures {
        self.metrics.figures()
    }

    /// Executes requests with `memory` and `disk` until the device is dropped. Call this method on
    /// as many threads as requests should be executed at the same time. A thread may sleep for as
    /// long as a page of the guest is missing.
    pub fn run<M: GuestMemory, D: Disk>(&self, memory: &M, disk: &D) {
        while let Some(Queued { request, limits, since }) = self.next() {
            let written = self.job(disk, limits).run(&request, memory);
            self.finish(request, written, since, true);
            self.doorbell.ring(QUEUE);
            self.rang();
        }
    }

    /// Takes requests out of the ring whenever `wait` returns, which means that the driver has
    /// notified. The method executes those requests that need no wait, and the threads in
    /// [`run`](Self::run) execute the others. Call this method on one thread only. It returns when
    /// the device is dropped, so `wait` must return then as well.
    pub fn attend<M: GuestMemory, D: Disk>(&self, memory: &M, disk: &D, mut wait: impl FnMut()) {
        wait();
        while !self.begin_attending() {
            let mut done = false;
            loop {
                self.doorbell.ring(QUEUE);
                if done {
                    self.rang();
                }
                let some;
                (some, done) = self.attempt(memory, disk);
                if !some || self.begin_attending() {
                    break;
                }
            }
            wait();
        }
    }

    /// Returns true if the attendant checks for more requests before the driver has to notify
    /// again.
    pub(super) fn looks_again(&self) -> bool {
        let state = self.lock();
        state.attending && !state.queued.is_empty()
    }

    /// Tries all queued requests. Returns two flags: true if there was any request, and true if any
    /// was completed. If one was completed, this thread counts as ringing.
    fn attempt<M: GuestMemory, D: Disk>(&self, memory: &M, disk: &D) -> (bool, bool) {
        let (mut some, mut done) = (false, false);
        while let Some(Queued { request, limits, since }) = self.next_to_attempt() {
            some = true;
            match self.job(disk, limits).run_at_once(&request, memory) {
                Some(written) => {
                    self.finish(request, written, since, !done);
                    done = true;
                }
                None => self.hand(Queued { request, limits, since }),
            }
        }
        (some, done)
    }

    fn job<'a, D>(&'a self, disk: &'a D, limits: Limits) -> Job<'a, D> {
        let write_through = self.write_through.load(Ordering::Acquire);
        Job { disk, limits, id: self.id, write_through, metrics: &self.metrics }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Queued> {
        let mut state = self.lock();
        while !state.ended {
            let mut next = state.handed.pop_front();
            if next.is_none() && !state.attending {
                next = state.queued.pop_front();
            }
            if let Some(queued) = next {
                state.running += 1;
                return Some(queued);
            }
            state.idle += 1;
            state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
        None
    }

    /// Makes the attendant the owner of requests that are queued from now on. Returns true if the
    /// work has ended.
    fn begin_attending(&self) -> bool {
        let mut state = self.lock();
        state.attending = !state.ended;
        state.ended
    }

    fn next_to_attempt(&self) -> Option<Queued> {
        let mut state = self.lock();
        let next = state.queued.pop_front();
        // From here on, any thread may take queued requests.
        state.attending = next.is_some();
        state.running += usize::from(next.is_some());
        next
    }

    fn hand(&self, queued: Queued) {
        let mut state = self.lock();
        state.running -= 1;
        if state.forgetting > 0 {
            // The driver has taken the buffers away. Another thread must not begin the request.
            state.spare.push(queued.request);
            self.idle_again.notify_all();
            return;
        }
        state.handed.push_back(queued);
        self.tell_one(state);
    }

    /// Wakes an idle thread, if there is one. Releases the lock first, so that the thread does not
    /// wait for it.
    fn tell_one(&self, state: MutexGuard<'_, State>) {
        let idle = state.idle > 0;
        drop(state);
        if idle {
            self.wanted.notify_one();
        }
    }

    /// Records that a request is done. If `rings`, the calling thread counts as ringing.
    fn finish(&self, request: Request, written: u32, since: Instant, rings: bool) {
        add(&self.metrics.busy_ns, u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let mut state = self.lock();
        state.done.push(Done { head: request.head, written });
        state.spare.push(request);
        state.running -= 1;
        state.ringing += usize::from(rings);
        if state.forgetting > 0 {
            self.idle_again.notify_all();
        }
    }

    /// Records that the calling thread has rung. Rings once more if this was the last step towards
    /// a quiesced disk.
    fn rang(&self) {
        let mut state = self.lock();
        state.ringing -= 1;
        let told = state.quiescing && state.is_quiesced();
        drop(state);
        if told {
            self.doorbell.ring(QUEUE);
        }
    }

    /// Returns a request to be filled in.
    pub(super) fn spare(&self) -> Request {
        self.lock().spare.pop().unwrap_or_default()
    }

    pub(super) fn keep(&self, request: Request) {
        self.lock().spare.push(request);
    }

    /// Returns the number of requests that hold buffers of the driver.
    pub(super) fn held(&self) -> usize {
        let state = self.lock();
        state.queued.len() + state.handed.len() + state.running + state.done.len()
    }

    pub(super) fn push(&self, request: Request, limits: Limits) {
        let mut state = self.lock();
        state.queued.push_back(Queued { request, limits, since: Instant::now() });
        if !state.attending {
            self.tell_one(state);
        }
    }

    /// Moves the buffers to be given back into `done`, which must be empty. Returns true if new
    /// requests may be begun.
    pub(super) fn collect(&self, done: &mut Vec<Done>) -> bool {
        let mut state = self.lock();
        std::mem::swap(&mut state.done, done);
        !state.quiescing
    }

    /// Implements [`Device::quiesce`](crate::device::Device::quiesce).
    pub(super) fn quiesce(&self) -> bool {
        let mut state = self.lock();
        state.quiescing = true;
        let is_quiesced = state.is_quiesced();
        if is_quiesced {
            // These buffers belong to a ring that no longer exists: the driver has failed, or has
            // switched the queue off.
            state.done.clear();
        }
        is_quiesced
    }

    pub(super) fn resume(&self) {
        self.lock().quiescing = false;
    }

    /// Takes the driver's buffers away. Requests that were not begun are dropped, and the method
    /// waits for those that were, because nothing may access the buffers after it has returned.
    pub(super) fn forget(&self) {
        let mut state = self.lock();
        while let Some(queued) = state.queued.pop_front().or_else(|| state.handed.pop_front()) {
            state.spare.push(queued.request);
        }
        state.forgetting += 1;
        while state.running > 0 {
            state = self.idle_again.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.forgetting -= 1;
        assert!(state.queued.is_empty() && state.handed.is_empty(), "no request was begun or handed over");
        state.done.clear();
    }

    /// Ends the threads after their current requests. Queued requests are not begun.
    pub fn end(&self) {
        self.lock().ended = true;
        self.wanted.notify_all();
    }
}
