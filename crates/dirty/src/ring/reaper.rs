//! Reaper thread, which harvests the rings.

use super::RingState;
use super::policy::{ReaperPolicy, RingView, Rings};
use super::predict::Predict;
use super::stats::{ReaperReport, ReaperState};
use crate::TrackerError;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// State that the reaper thread shares with the threads that observe, wake and stop it.
#[derive(Debug)]
pub(crate) struct Control {
    report: Mutex<ReaperReport>,
    requests: Mutex<ReaperRequests>,
    changed: Condvar,
    /// For each ring, the number of entries above which the vCPU wakes the reaper. `u32::MAX` for
    /// none.
    marks: Vec<AtomicU32>,
    /// Set by the first vCPU that finds its ring above the mark, so that the others need not wake
    /// the reaper.
    woken: AtomicBool,
}

#[derive(Debug, Default)]
struct ReaperRequests {
    stop: bool,
    look: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the report of a reaper that has done nothing yet.
fn fresh(policy: &dyn ReaperPolicy, state: ReaperState) -> ReaperReport {
    ReaperReport {
        policy: policy.name().to_owned(),
        state,
        iterations: 0,
        harvests: 0,
        sleep: Duration::ZERO,
        cpu: Duration::ZERO,
    }
}

impl Control {
    pub(crate) fn new(rings: usize) -> Self {
        Self {
            report: Mutex::new(fresh(&Predict, ReaperState::Off)),
            requests: Mutex::default(),
            changed: Condvar::new(),
            marks: (0..rings).map(|_| AtomicU32::new(u32::MAX)).collect(),
            woken: AtomicBool::new(false),
        }
    }

    pub(crate) fn report(&self) -> ReaperReport {
        lock(&self.report).clone()
    }

    fn begin(&self, policy: &dyn ReaperPolicy) {
        *lock(&self.report) = fresh(policy, ReaperState::Sleeping);
        *lock(&self.requests) = ReaperRequests::default();
    }

    /// Returns the number of entries of `ring` above which a vCPU wakes the reaper. `None` if no
    /// vCPU should, or one already has.
    pub(crate) fn mark(&self, ring: usize) -> Option<u32> {
        let mark = self.marks[ring].load(Ordering::Relaxed);
        (mark != u32::MAX && !self.woken.load(Ordering::Relaxed)).then_some(mark)
    }

    /// Wakes the reaper, unless another vCPU has just done so.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::Relaxed) {
            lock(&self.requests).look = true;
            self.changed.notify_all();
        }
    }

    /// Sleeps for `time`, or until woken. Returns false if the thread must stop.
    fn sleep(&self, time: Duration) -> bool {
        let requests = lock(&self.requests);
        let quiet = |requests: &mut ReaperRequests| !requests.stop && !requests.look;
        let waited = self.changed.wait_timeout_while(requests, time, quiet);
        let (mut requests, _) = waited.unwrap_or_else(PoisonError::into_inner);
        requests.look = false;
        !requests.stop
    }

    fn stop(&self) {
        lock(&self.requests).stop = true;
        self.changed.notify_all();
    }
}

/// Handle of a running reaper thread. Dropping it stops the thread.
#[derive(Debug)]
pub(crate) struct Reaper {
    shared: Arc<RingState>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    /// Starts the thread.
    pub(crate) fn start(
        shared: &Arc<RingState>,
        policy: &Arc<dyn ReaperPolicy>,
    ) -> Result<Self, TrackerError> {
        shared.control().begin(&**policy);
        let worker = Worker { shared: Arc::clone(shared) };
        let policy = Arc::clone(policy);
        let thread =
            vmferry_thread::spawn(vmferry_thread::Role::Tracker, "reaper", move || worker.live(&*policy));
        let thread = thread.map_err(|error| {
            lock(&shared.control().report).state = ReaperState::Off;
            TrackerError::Reaper(error)
        })?;
        Ok(Self { shared: Arc::clone(shared), thread: Some(thread) })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        let control = self.shared.control();
        control.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened, and the state says so.
            let _ = thread.join();
        }
        control.marks.iter().for_each(|mark| mark.store(u32::MAX, Ordering::Relaxed));
        let mut report = lock(&control.report);
        report.sleep = Duration::ZERO;
        if !matches!(report.state, ReaperState::Failed(_)) {
            report.state = ReaperState::Off;
        }
    }
}

struct Worker {
    shared: Arc<RingState>,
}

/// Guard that records a panic of the reaper thread.
struct PanicGuard<'a>(&'a Control);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.0.report).state = ReaperState::Failed("it panicked".to_owned());
        }
    }
}

impl Worker {
    fn live(self, policy: &dyn ReaperPolicy) {
        let control = self.shared.control();
        let _panic_guard = PanicGuard(control);
        let mut rings =
            RealRings { shared: &self.shared, used: vec![0; self.shared.core().len()], harvested: false };
        let mut schedule = policy.begin(&rings);
        let mut sleep = schedule.first_sleep();
        lock(&control.report).sleep = sleep;
        while control.sleep(sleep) {
            lock(&control.report).state = ReaperState::Working;
            rings.harvested = false;
            let step = schedule.step(&mut rings);
            let mut report = lock(&control.report);
            report.iterations += 1;
            report.cpu = vmferry_sys::cpu_time();
            match step {
                Ok(next) => {
                    report.harvests += u64::from(rings.harvested);
                    report.state = ReaperState::Sleeping;
                    report.sleep = next;
                    sleep = next;
                }
                Err(error) => {
                    report.state = ReaperState::Failed(error.to_string());
                    return;
                }
            }
            drop(report);
            for (ring, mark) in control.marks.iter().enumerate() {
                mark.store(schedule.watermark(ring).unwrap_or(u32::MAX), Ordering::Relaxed);
            }
            control.woken.store(false, Ordering::Relaxed);
        }
    }
}

/// Rings of a VM, as a policy uses them.
struct RealRings<'a> {
    shared: &'a RingState,
    /// Number of entries of each ring that were in use at the last look, where the next look
    /// begins.
    used: Vec<u32>,
    /// True if the policy harvested in this turn.
    harvested: bool,
}

impl Rings for RealRings<'_> {
    fn now(&self) -> Duration {
        self.shared.core().now()
    }

    fn entries(&self) -> u32 {
        self.shared.core().entries()
    }

    fn usable(&self) -> u32 {
        self.shared.core().usable()
    }

    fn observe(&mut self, views: &mut Vec<RingView>) {
        views.clear();
        for (ring, used) in self.used.iter_mut().enumerate() {
            let view = self.shared.core().view(ring, *used);
            *used = view.used;
            views.push(view);
        }
    }

    fn harvest(&mut self, rings: &[usize]) -> Result<u64, TrackerError> {
        self.harvested |= !rings.is_empty();
        self.shared.core().harvest(rings.iter().copied())
    }

    fn harvest_all(&mut self) -> Result<u64, TrackerError> {
        self.harvested = true;
        self.shared.core().harvest_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::PATIENCE;

    #[test]
    fn sleeping_reaper_is_woken_and_stopped_at_once() {
        let control = Control::new(1);
        let began = std::time::Instant::now();
        std::thread::scope(|scope| {
            let sleeping = scope.spawn(|| (control.sleep(2 * PATIENCE), control.sleep(2 * PATIENCE)));
            control.wake();
            vmferry_testkit::wait("the wake-up", || !lock(&control.requests).look);
            control.stop();
            assert_eq!(sleeping.join().unwrap(), (true, false));
        });
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    }
}
