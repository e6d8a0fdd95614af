//! Throttling of vCPUs, which are held outside the guest for a share of their time.

use crate::park::{VcpuPark, VcpuRunner};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Period in which a vCPU is held once, for its share of the period. The period is so short that no
/// guest treats a hold as a fault.
const SLICE: Duration = Duration::from_millis(10);

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
    made: Instant,
    vcpus: Vec<VcpuShare>,
    /// Thread that brings vCPUs out of the guest, while there is one.
    kick_thread: Mutex<Option<Thread>>,
}

#[derive(Debug, Default)]
struct VcpuShare {
    /// Share of the time for which the vCPU must be stopped, in millionths.
    share: AtomicU32,
    /// Time at which the vCPU must next be brought out of the guest, in microseconds since `made`.
    /// The value is `u64::MAX` while the vCPU is held: a nudge at that time would be lost, and the
    /// vCPU would then run for a whole slice.
    due_us: AtomicU64,
    /// Total time for which the vCPU was stopped.
    total_us: AtomicU64,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<E: Clone + Send + 'static> Throttle<E> {
    /// Creates a throttle for the vCPUs of `park`. No vCPU is throttled until [`set`](Self::set) is
    /// called.
    #[must_use]
    pub fn new(park: Arc<VcpuPark<E>>) -> Self {
        let vcpus = (0..park.vcpus()).map(|_| VcpuShare::default()).collect();
        let shared = ThrottleState { park, made: Instant::now(), vcpus, kick_thread: Mutex::new(None) };
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
        if !self.shared.set(shares) {
            *kick_thread = None;
        } else if kick_thread.is_none() {
            match KickThread::start(&self.shared) {
                Ok(started) => *kick_thread = Some(started),
                Err(error) => {
                    self.shared.set(&[]);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Returns the total time for which this throttle has stopped each vCPU.
    #[must_use]
    pub fn totals(&self) -> Vec<Duration> {
        let total = |vcpu: &VcpuShare| Duration::from_micros(vcpu.total_us.load(Ordering::Relaxed));
        self.shared.vcpus.iter().map(total).collect()
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
    /// Sets the shares. Returns whether any vCPU must be held.
    fn set(&self, shares: &[f64]) -> bool {
        let mut any = false;
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            let share = shares.get(index).or(shares.last()).copied().unwrap_or(0.0).clamp(0.0, 1.0);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to a million")]
            let millionths = (share * 1e6) as u32;
            any |= millionths > 0;
            vcpu.share.store(millionths, Ordering::Relaxed);
        }
        any
    }

    /// Brings the vCPUs that are due out of the guest. Returns the time until the next one is due.
    fn nudge(&self) -> Duration {
        let now = micros(self.made.elapsed());
        let mut next = now + micros(SLICE);
        for (cpu, vcpu) in self.vcpus.iter().enumerate() {
            if vcpu.share.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let due = vcpu.due_us.load(Ordering::Relaxed);
            if due <= now {
                // If the vCPU misses this nudge because it is outside the guest, the next nudge
                // comes a slice later.
                vcpu.due_us.store(now + micros(SLICE), Ordering::Relaxed);
                self.park.nudge(cpu);
            } else {
                next = next.min(due);
            }
        }
        Duration::from_micros(next - now)
    }

    fn pass(&self, cpu: usize, last: &mut Option<Instant>) {
        let vcpu = &self.vcpus[cpu];
        let share = vcpu.share.load(Ordering::Relaxed);
        if share == 0 {
            *last = None;
            return;
        }
        let now = Instant::now();
        // The hold depends on the time since the previous hold, so a missed turn is made up for.
        let since = last.map_or(SLICE, |last| now - last);
        // A nudge comes once in each slice. At other exits the vCPU is not due.
        if since < SLICE / 2 {
            return;
        }
        *last = Some(now);
        let share = f64::from(share) / 1e6;
        vcpu.due_us.store(u64::MAX, Ordering::Relaxed);
        self.park.hold(cpu, since.mul_f64(share).min(SLICE));
        vcpu.total_us.fetch_add(micros(now.elapsed()), Ordering::Relaxed);
        // Measured from the real end of the hold, which is later than planned on a busy host.
        let due = self.made.elapsed() + SLICE.mul_f64(1.0 - share);
        vcpu.due_us.store(micros(due), Ordering::Relaxed);
        if let Some(kick_thread) = &*lock(&self.kick_thread) {
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
