//! Slowing vCPUs by holding them outside the guest for a share of their time.

use super::board::Board;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// A vCPU is held once in each of these, for its share of it: short enough that no guest takes it for a fault.
pub(crate) const SLICE: Duration = Duration::from_millis(10);

/// What the vCPU threads share with those who slow them.
#[derive(Debug)]
pub(crate) struct Throttle {
    made: Instant,
    vcpus: Vec<Held>,
    /// Who brings vCPUs out of the guest, while somebody does.
    nudger: Mutex<Option<Thread>>,
}

#[derive(Debug, Default)]
struct Held {
    /// Millionths of its time that the vCPU is to stand still.
    share: AtomicU32,
    /// When it is to be brought out of the guest next, in microseconds since `made`; `u64::MAX` while it is held, because a
    /// nudge that comes then is lost, and it would run for a whole slice.
    due_us: AtomicU64,
    /// How long it stood still so far.
    total_us: AtomicU64,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Throttle {
    pub(crate) fn new(vcpus: usize) -> Self {
        Self {
            made: Instant::now(),
            vcpus: (0..vcpus).map(|_| Held::default()).collect(),
            nudger: Mutex::new(None),
        }
    }

    /// Sets the shares, 0 to 1; the last stands for all further vCPUs. Says whether anybody is to be held.
    pub(crate) fn set(&self, shares: &[f64]) -> bool {
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

    /// How long each vCPU stood still because of this.
    pub(crate) fn totals(&self) -> Vec<Duration> {
        self.vcpus.iter().map(|vcpu| Duration::from_micros(vcpu.total_us.load(Ordering::Relaxed))).collect()
    }

    /// Brings out of the guest whoever is due; says for how long nobody else is.
    fn nudge(&self, board: &Board) -> Duration {
        let now = micros(self.made.elapsed());
        let mut next = now + micros(SLICE);
        for (cpu, vcpu) in self.vcpus.iter().enumerate() {
            if vcpu.share.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let due = vcpu.due_us.load(Ordering::Relaxed);
            if due <= now {
                // If it misses this one, because it is outside just now, the next comes a slice later.
                vcpu.due_us.store(now + micros(SLICE), Ordering::Relaxed);
                board.nudge(cpu);
            } else {
                next = next.min(due);
            }
        }
        Duration::from_micros(next - now)
    }

    /// Called by the thread of `cpu` between two runs of its vCPU: holds it if its turn has come. `last` is when it was
    /// held before. A pause ends it at once.
    pub(crate) fn pass(&self, cpu: usize, last: &mut Option<Instant>, board: &Board) {
        let vcpu = &self.vcpus[cpu];
        let share = vcpu.share.load(Ordering::Relaxed);
        if share == 0 {
            *last = None;
            return;
        }
        let now = Instant::now();
        // Of the time since it was held last, so that a turn that it missed is made up for.
        let since = last.map_or(SLICE, |last| now - last);
        // The nudge comes once a slice; at other exits it is not its turn.
        if since < SLICE / 2 {
            return;
        }
        *last = Some(now);
        let share = f64::from(share) / 1e6;
        vcpu.due_us.store(u64::MAX, Ordering::Relaxed);
        board.hold(cpu, since.mul_f64(share).min(SLICE));
        vcpu.total_us.fetch_add(micros(now.elapsed()), Ordering::Relaxed);
        // By when the hold really ended, which on a busy host is later than it should have.
        let due = self.made.elapsed() + SLICE.mul_f64(1.0 - share);
        vcpu.due_us.store(micros(due), Ordering::Relaxed);
        if let Some(nudger) = &*lock(&self.nudger) {
            nudger.unpark();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread that brings vCPUs out of the guest to be held. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Nudger {
    throttle: Arc<Throttle>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Nudger {
    pub(crate) fn start(throttle: Arc<Throttle>, board: Arc<Board>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (own, stopped) = (Arc::clone(&throttle), Arc::clone(&stop));
        let nudge = move || {
            while !stopped.load(Ordering::Acquire) {
                std::thread::park_timeout(own.nudge(&board));
            }
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Tracker, "throttle", nudge)?;
        *lock(&throttle.nudger) = Some(thread.thread().clone());
        Ok(Self { throttle, stop, thread: Some(thread) })
    }
}

impl Drop for Nudger {
    fn drop(&mut self) {
        *lock(&self.throttle.nudger) = None;
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread was printed when it happened; vCPUs are held no more.
            let _ = thread.join();
        }
    }
}
