//! The requests under way, between the device and the threads that do them.
//!
//! # One request's way
//! [`Blk`](super::Blk) takes it out of the ring and puts it in here (`queued`); a thread takes it (`running`), does it, puts it down as
//! done (`done`) and rings, whereupon the device, on that thread, gives its buffer back. A request is in exactly one of these places, and
//! the thread that rang is counted (`ringing`) until it is back.
//!
//! # The attendant
//! If there is a thread that waits for notifications, it rings for each, and what the device takes out of the ring then is its own: it
//! tries each request at once, gives all that were done back together, and looks into the ring again before it asks to be notified. So
//! the driver of a busy disk need not notify, and one interrupt stands for all that was done meanwhile. What would have to be waited for
//! it hands to the other threads (`handed`).
//!
//! # Coming to rest
//! From `running == 0` on no thread touches the guest's memory or the file for a request; whoever takes the buffers away under them (a
//! reset, a queue that is switched off) waits for that. From `ringing == 0` on every buffer was given back, unless there is no ring any
//! more to give it back in. Both together are rest: what is saved then has no request under way, and the file has all that was
//! answered. A thread that makes it so while somebody waits for it rings once more.
//!
//! # Missing pages
//! In postcopy a thread sleeps wherever it touches a page that has not come: in a request, or at the ring. Nobody but the guest waits for
//! it: the device's lock is held for the ring only, and a pause waits for a bounded time.

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

/// A buffer to be given back.
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
    /// Tried at once, in vain.
    handed: VecDeque<Queued>,
    /// What is queued is the attendant's, which looks for it.
    attending: bool,
    /// Threads that wait to be told of something to do.
    idle: usize,
    /// Threads that wait until nothing is running.
    forgetting: usize,
    running: usize,
    done: Vec<Done>,
    ringing: usize,
    /// Somebody waits until all rests; nothing new is begun.
    resting: bool,
    /// For the next ones.
    spare: Vec<Request>,
    ended: bool,
}

impl State {
    fn rests(&self) -> bool {
        self.queued.is_empty() && self.handed.is_empty() && self.running == 0 && self.ringing == 0
    }
}

/// What a disk's threads and its device share. Its lock is never held while guest memory or the file is touched.
#[derive(Debug)]
pub struct BlkWork {
    id: [u8; ID_BYTES],
    state: Mutex<State>,
    /// A request was queued, or it is over.
    wanted: Condvar,
    /// A request is done.
    calm: Condvar,
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
            calm: Condvar::new(),
            write_through: AtomicBool::new(true),
            metrics: Metrics::default(),
            doorbell,
        })
    }

    /// What the disk did so far.
    #[must_use]
    pub fn figures(&self) -> BlkFigures {
        self.metrics.figures()
    }

    /// Does requests over `memory` and `disk` until the device is dropped. For as many threads as there are to be requests at once; each
    /// of them may sleep as long as a page of the guest's is missing.
    pub fn run<M: GuestMemory, D: Disk>(&self, memory: &M, disk: &D) {
        while let Some(Queued { request, limits, since }) = self.next() {
            let written = self.job(disk, limits).run(&request, memory);
            self.finish(request, written, since, true);
            self.doorbell.ring(QUEUE);
            self.rang();
        }
    }

    /// Takes requests out of the ring whenever `wait` returns, which is to say that the driver has notified, and does those over `memory`
    /// and `disk` that take no waiting; the threads that [run](Self::run) do the others. Until the device is dropped; `wait` has to return
    /// then, too. For one thread.
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

    /// Whether the attendant looks for more requests before the driver has to notify again.
    pub(super) fn looks_again(&self) -> bool {
        let state = self.lock();
        state.attending && !state.queued.is_empty()
    }

    /// Tries all that is queued; says whether there was anything, and whether any was done, which then counts as ringing.
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

    /// What is queued from now on is the attendant's. Says whether it is over.
    fn begin_attending(&self) -> bool {
        let mut state = self.lock();
        state.attending = !state.ended;
        state.ended
    }

    fn next_to_attempt(&self) -> Option<Queued> {
        let mut state = self.lock();
        let next = state.queued.pop_front();
        // What comes from here on is anybody's.
        state.attending = next.is_some();
        state.running += usize::from(next.is_some());
        next
    }

    fn hand(&self, queued: Queued) {
        let mut state = self.lock();
        state.running -= 1;
        state.handed.push_back(queued);
        self.tell_one(state);
    }

    /// Wakes a thread, if one waits. Without the lock, or it would wake to wait for that.
    fn tell_one(&self, state: MutexGuard<'_, State>) {
        let idle = state.idle > 0;
        drop(state);
        if idle {
            self.wanted.notify_one();
        }
    }

    /// A request is done; whoever did it rings if it `rings`.
    fn finish(&self, request: Request, written: u32, since: Instant, rings: bool) {
        add(&self.metrics.busy_ns, u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let mut state = self.lock();
        state.done.push(Done { head: request.head, written });
        state.spare.push(request);
        state.running -= 1;
        state.ringing += usize::from(rings);
        if state.forgetting > 0 {
            self.calm.notify_all();
        }
    }

    /// Somebody has rung. Rings once more if that was all that the one who waits for rest had to wait for.
    fn rang(&self) {
        let mut state = self.lock();
        state.ringing -= 1;
        let told = state.resting && state.rests();
        drop(state);
        if told {
            self.doorbell.ring(QUEUE);
        }
    }

    /// A request to be filled in.
    pub(super) fn spare(&self) -> Request {
        self.lock().spare.pop().unwrap_or_default()
    }

    pub(super) fn keep(&self, request: Request) {
        self.lock().spare.push(request);
    }

    /// How many requests are in here that have buffers of the driver's.
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

    /// The buffers to be given back, into `done`, which is empty. Says whether new requests may be begun.
    pub(super) fn collect(&self, done: &mut Vec<Done>) -> bool {
        let mut state = self.lock();
        std::mem::swap(&mut state.done, done);
        !state.resting
    }

    /// See [`Device::quiesce`](crate::device::Device::quiesce).
    pub(super) fn rest(&self) -> bool {
        let mut state = self.lock();
        state.resting = true;
        let rests = state.rests();
        if rests {
            // Of a ring that there is no more: the driver has given up on the device, or switched the queue off.
            state.done.clear();
        }
        rests
    }

    pub(super) fn go_on(&self) {
        self.lock().resting = false;
    }

    /// The driver takes its buffers away: what was not begun is forgotten, and what was is waited for, as nothing must touch them when
    /// this returns.
    pub(super) fn forget(&self) {
        let mut state = self.lock();
        while let Some(queued) = state.queued.pop_front().or_else(|| state.handed.pop_front()) {
            state.spare.push(queued.request);
        }
        state.forgetting += 1;
        while state.running > 0 {
            state = self.calm.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.forgetting -= 1;
        state.done.clear();
    }

    /// Ends the threads once they have done what they are at; what is queued is not begun.
    pub fn end(&self) {
        self.lock().ended = true;
        self.wanted.notify_all();
    }
}
