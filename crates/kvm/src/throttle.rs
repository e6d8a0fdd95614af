//! Throttling of vCPUs, which are held outside the guest for a share of their time.

use crate::park::{VcpuPark, VcpuRunner};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use vmferry_thread::ThrottleShares;

/// Throttle that stops each vCPU for its share of the time, for at most 10 ms at once.
///
/// [`SourceVm::throttle`](vmferry_core::SourceVm::throttle) calls [`set`](Self::set), and
/// [`SourceVm::throttled`](vmferry_core::SourceVm::throttled) returns [`totals`](Self::totals). The
/// thread of each vCPU calls [`pass`](Self::pass) between two runs of its vCPU. If a pause is
/// requested while a vCPU is held, the hold ends at once.
#[derive(Debug)]
pub struct Throttle<E> {
    shared: Arc<ThrottleState<E>>,
    /// Thread that brings vCPUs out of the guest, while a vCPU is throttled.
    kick_thread: Mutex<Option<KickThread>>,
}

/// State that the vCPU threads share with the thread that brings them out of the guest.
#[derive(Debug)]
struct ThrottleState<E> {
    park: Arc<VcpuPark<E>>,
    shares: ThrottleShares,
    /// Thread that brings vCPUs out of the guest, while there is one.
    kick_thread: Mutex<Option<Thread>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<E: Clone + Send + 'static> Throttle<E> {
    /// Creates a throttle for the vCPUs of `park`. No vCPU is throttled until [`set`](Self::set) is
    /// called.
    #[must_use]
    pub fn new(park: Arc<VcpuPark<E>>) -> Self {
        let shares = ThrottleShares::new(park.vcpus());
        let shared = ThrottleState { park, shares, kick_thread: Mutex::new(None) };
        Self { shared: Arc::new(shared), kick_thread: Mutex::new(None) }
    }

    /// Sets the share of the time for which each vCPU is stopped, from 0 to 1. The last share also
    /// applies to all further vCPUs. If all shares are 0 or the list is empty, all vCPUs run
    /// freely.
    ///
    /// # Errors
    /// Returns an error if the host cannot start the thread that brings vCPUs out of the guest. All
    /// vCPUs then run freely.
    pub fn set(&self, shares: &[f64]) -> io::Result<()> {
        let mut kick_thread = lock(&self.kick_thread);
        if !self.shared.shares.set(shares) {
            *kick_thread = None;
        } else if kick_thread.is_none() {
            match KickThread::start(&self.shared) {
                Ok(started) => *kick_thread = Some(started),
                Err(error) => {
                    self.shared.shares.set(&[]);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Returns the total time for which this throttle has stopped each vCPU.
    #[must_use]
    pub fn totals(&self) -> Vec<Duration> {
        self.shared.shares.totals()
    }

    /// Holds the calling vCPU thread for its share of the time, if the next hold is due. Call this
    /// method between two runs of the vCPU.
    ///
    /// `last` is the time of the previous hold, which this method updates. Keep the variable
    /// between the calls, and reset it to `None` after a pause.
    pub fn pass(&self, runner: &VcpuRunner<E>, last: &mut Option<Instant>) {
        self.shared.pass(runner.cpu(), last);
    }
}

impl<E: Clone> ThrottleState<E> {
    /// Brings the vCPUs that are due out of the guest. Returns the time until the next one is due.
    /// A vCPU that is outside the guest misses this nudge.
    fn nudge(&self) -> Duration {
        self.shares.nudge(|cpu| self.park.nudge(cpu))
    }

    fn pass(&self, cpu: usize, last: &mut Option<Instant>) {
        if self.shares.pass(cpu, last, |time| self.park.hold(cpu, time))
            && let Some(kick_thread) = &*lock(&self.kick_thread)
        {
            kick_thread.unpark();
        }
    }
}

/// Thread that brings vCPUs out of the guest to be held. Dropping the value ends the thread.
#[derive(Debug)]
struct KickThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl KickThread {
    fn start<E: Clone + Send + 'static>(shared: &Arc<ThrottleState<E>>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (own, stopped) = (Arc::clone(shared), Arc::clone(&stop));
        let nudge = move || {
            while !stopped.load(Ordering::Acquire) {
                std::thread::park_timeout(own.nudge());
            }
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Tracker, "throttle", nudge)?;
        *lock(&shared.kick_thread) = Some(thread.thread().clone());
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for KickThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread was printed when it happened, and vCPUs are not held any more.
            let _ = thread.join();
        }
    }
}
