//! Reaper thread, which harvests the rings.

use super::RingState;
use super::policy::{ReaperPolicy, RingView, Rings};
use super::predict::Predict;
use super::set::RingSet;
use super::stats::{ReaperReport, ReaperState};
use crate::TrackerError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
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

    /// Makes vCPUs stop waking the reaper.
    fn unmark(&self) {
        self.marks.iter().for_each(|mark| mark.store(u32::MAX, Ordering::Relaxed));
    }

    fn woke(&self) {
        let mut report = lock(&self.report);
        report.state = ReaperState::Working;
        report.iterations += 1;
    }

    /// Records that the reaper now sleeps for `time`, after a wake-up in which it `harvested` or
    /// not.
    fn falls_asleep(&self, time: Duration, harvested: bool) {
        let mut report = lock(&self.report);
        report.harvests += u64::from(harvested);
        report.state = ReaperState::Sleeping;
        report.sleep = time;
    }

    /// Logs that the reaper ended because of `why`, and records the failure for reports.
    fn fail(&self, why: String) {
        tracing::error!(
            "the reaper of the dirty rings failed: {why}; no write is lost, but the guest may run slower"
        );
        self.unmark();
        let mut report = lock(&self.report);
        report.sleep = Duration::ZERO;
        report.state = ReaperState::Failed(why);
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
            // `Worker::live` has caught and recorded a panic of the policy.
            let _ = thread.join();
        }
        control.unmark();
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

/// Returns the message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

impl Worker {
    /// Runs `policy` until the tracker stops or the policy fails.
    fn live(self, policy: &dyn ReaperPolicy) {
        // A panic of the policy leaves no broken state: the policy's own state is dropped, and the
        // data behind the locks of the rings is consistent at any moment.
        let ended = catch_unwind(AssertUnwindSafe(|| self.reap(policy)));
        let why = match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("its policy panicked: {}", message(&*panic)),
        };
        self.shared.control().fail(why);
    }

    fn reap(&self, policy: &dyn ReaperPolicy) -> Result<(), TrackerError> {
        let control = self.shared.control();
        let mut rings =
            RealRings { shared: &self.shared, used: vec![0; self.shared.core().len()], harvested: false };
        let mut schedule = policy.begin(&rings);
        let mut sleep = schedule.first_sleep();
        lock(&control.report).sleep = sleep;
        while control.sleep(sleep) {
            control.woke();
            rings.harvested = false;
            let step = schedule.step(&mut rings);
            lock(&control.report).cpu = vmferry_sys::cpu_time();
            sleep = step?;
            control.falls_asleep(sleep, rings.harvested);
            for (ring, mark) in control.marks.iter().enumerate() {
                mark.store(schedule.watermark(ring).unwrap_or(u32::MAX), Ordering::Relaxed);
            }
            control.woken.store(false, Ordering::Relaxed);
        }
        Ok(())
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
        let core = self.shared.core();
        core.harvest(&RingSet::named(rings, core.len())?)
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
