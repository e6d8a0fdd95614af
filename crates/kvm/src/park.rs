//! Pausing vCPU threads, and letting them run again.

use crate::error::Result;
use crate::kick::{self, KickPage};
use kvm_ioctls::VcpuFd;
use rustix::thread::Pid;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a vCPU is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Its thread waits; its state can be saved and loaded.
    Paused,
    /// It runs the guest, or is about to.
    Running,
    /// It asked for the end of the VM or failed; it will not run again.
    Ended,
    /// Its thread is gone.
    Gone,
}

#[derive(Debug)]
struct Entry {
    phase: Phase,
    page: Arc<KickPage>,
    // There while the thread can receive signals.
    thread: Option<Pid>,
}

#[derive(Debug)]
struct Entries<E> {
    vcpus: Vec<Entry>,
    /// Whether vCPUs may run. Phases follow this, each when its thread gets to it.
    run: bool,
    /// Whether the threads are to end.
    quit: bool,
    exit: Option<E>,
}

/// A vCPU that did not stop in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("vCPU {cpu} did not pause within {} ms", .within.as_millis())]
#[non_exhaustive]
pub struct NotPaused {
    /// Number of the vCPU.
    pub cpu: u32,
    /// Time that it was given.
    pub within: Duration,
}

/// Pauses the vCPU threads of a VM, lets them run again, and records how the guest ended.
///
/// [`Guest`](crate::Guest) has these threads ready made.
///
/// The owner of the VM calls [`run_all`](Self::run_all) and [`pause_all`](Self::pause_all). Each vCPU thread
/// [enters](Self::enter) once and then works in turns:
///
/// ```no_run
/// use kvm_ioctls::{VcpuExit, VcpuFd};
/// use std::sync::{Arc, Mutex};
/// use vmferry_kvm::VcpuPark;
///
/// fn vcpu_thread(park: &Arc<VcpuPark<String>>, vcpu: &Mutex<VcpuFd>) {
///     let runner = park.enter(0);
///     while runner.wait_to_run() {
///         // The owner takes this lock to save or to load the state of a paused vCPU.
///         let mut vcpu = vcpu.lock().expect("no thread panics while it holds the lock");
///         let ended = loop {
///             match vcpu.run() {
///                 Ok(VcpuExit::IoOut(port, data)) => println!("{port:#x}: {data:?}"),
///                 Ok(exit) => break Some(format!("{exit:?}")),
///                 Err(error) if error.errno() == libc::EINTR && runner.pause_requested() => break None,
///                 Err(error) if error.errno() == libc::EINTR => {}
///                 Err(error) => break Some(error.to_string()),
///             }
///         };
///         drop(vcpu);
///         match ended {
///             None => runner.paused(),
///             Some(why) => runner.ended(why),
///         }
///     }
/// }
/// ```
///
/// `E` says how a guest ended.
///
/// # Why a pause is never lost
/// A vCPU that runs has to be brought out of `KVM_RUN`, wherever it is at that moment. `pause_all` does two things in
/// this order, holding a lock:
/// 1. It stores 1 into `kvm_run.immediate_exit`, through a mapping of its own.
/// 2. It sends the thread a signal (`SIGRTMIN`) whose handler does nothing.
///
/// The thread may be
/// * *before `KVM_RUN`*, in user space: the signal, whenever it comes, is taken and does nothing; `KVM_RUN` then reads
///   `immediate_exit`, which was stored before, and returns `EINTR` without running the guest.
/// * *inside `KVM_RUN`, having read 0*: the signal stays pending, because only a return to user space would deliver it;
///   it takes the vCPU out of the guest, and the kernel looks for pending signals before each entry: `EINTR`.
/// * *after `KVM_RUN`*, handling an exit: as before `KVM_RUN`, once the exit is handled.
///
/// `immediate_exit` stays 1 until the thread has seen `EINTR` and calls [`VcpuRunner::paused`]. So a kick is spent exactly
/// once, and it never outlives the pause that it asked for, because only running vCPUs are kicked. `EINTR` for another
/// reason (a debugger, a stray signal) finds 0 there and changes nothing.
///
/// # Why a pause leaves no I/O half done
/// A thread calls [`VcpuRunner::paused`] after `KVM_RUN` returned `EINTR` with a request standing, and at no other place.
/// The kernel completes the port or memory access of the last exit before it looks at `immediate_exit`, and if that leads
/// to another exit (the second half of an access) it returns that one, which is handled before `KVM_RUN` is called again
/// (virt/kvm/api.rst, 4.10 and 5). So registers that are read after a pause are those after the access.
#[derive(Debug)]
pub struct VcpuPark<E> {
    // One lock for all, taken when a phase changes, never while the guest runs.
    entries: Mutex<Entries<E>>,
    changed: Condvar,
}

impl<E: Clone> VcpuPark<E> {
    /// Returns a park for `vcpus`, all of them paused. Installs a handler for `SIGRTMIN` that does nothing, once in the
    /// process.
    ///
    /// # Errors
    /// [`Error::Ioctl`](crate::Error::Ioctl) if the host maps no `kvm_run` page.
    pub fn new(vcpus: &[VcpuFd]) -> Result<Self> {
        kick::install_handler();
        let pages = vcpus.iter().map(|vcpu| KickPage::new(vcpu).map(Arc::new));
        Ok(Self::of_pages(pages.collect::<Result<_>>()?))
    }

    fn of_pages(pages: Vec<Arc<KickPage>>) -> Self {
        let vcpus =
            pages.into_iter().map(|page| Entry { phase: Phase::Paused, page, thread: None }).collect();
        let entries = Entries { vcpus, run: false, quit: false, exit: None };
        Self { entries: Mutex::new(entries), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Entries<E>> {
        // Every change is a single assignment: a panic elsewhere cannot leave one half done.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.lock().vcpus.len()
    }

    /// Makes the calling thread the thread of vCPU `cpu`. It can be interrupted from now on, until the returned value is
    /// dropped, which says that the thread is gone.
    ///
    /// # Panics
    /// If there is no such vCPU.
    pub fn enter(self: &Arc<Self>, cpu: usize) -> VcpuRunner<E> {
        kick::unblock_for_this_thread();
        let mut entries = self.lock();
        let entry = &mut entries.vcpus[cpu];
        entry.thread = Some(kick::this_thread());
        VcpuRunner { cpu, page: Arc::clone(&entry.page), park: Arc::clone(self) }
    }

    /// Lets every paused vCPU run.
    pub fn run_all(&self) {
        let mut entries = self.lock();
        entries.run = true;
        for entry in entries.vcpus.iter_mut().filter(|e| e.phase == Phase::Paused) {
            entry.phase = Phase::Running;
        }
        drop(entries);
        self.changed.notify_all();
    }

    /// Brings every running vCPU out of the guest and waits until all have stopped, for `patience` at most. When this
    /// returns without an error, no vCPU runs, and no access to a device is half done.
    ///
    /// # Errors
    /// [`NotPaused`] names a vCPU that still runs. It stops when it can; the others have stopped.
    pub fn pause_all(&self, patience: Duration) -> Result<(), NotPaused> {
        let mut entries = self.lock();
        entries.run = false;
        kick_running(&entries);
        // For those that are being held, or wait to run.
        self.changed.notify_all();
        let running = |entries: &mut Entries<E>| entries.vcpus.iter().any(|e| e.phase == Phase::Running);
        let waited = self.changed.wait_timeout_while(entries, patience, running);
        let (entries, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match entries.vcpus.iter().position(|e| e.phase == Phase::Running) {
            None => Ok(()),
            Some(cpu) => Err(NotPaused { cpu: u32::try_from(cpu).unwrap_or(u32::MAX), within: patience }),
        }
    }

    /// Has [`VcpuRunner::wait_to_run`] return false in every thread, and brings running vCPUs out of the guest.
    pub fn quit(&self) {
        let mut entries = self.lock();
        (entries.quit, entries.run) = (true, false);
        kick_running(&entries);
        drop(entries);
        self.changed.notify_all();
    }

    /// Brings vCPU `cpu` out of the guest for a moment if it runs, unless it is outside at this moment.
    pub(crate) fn nudge(&self, cpu: usize) {
        let entries = self.lock();
        let entry = &entries.vcpus[cpu];
        if let Some(thread) = entry.thread.filter(|_| entry.phase == Phase::Running) {
            kick::interrupt(thread);
        }
    }

    /// Keeps the calling thread, that of vCPU `cpu`, waiting for `time`, or until the vCPU is to pause.
    pub(crate) fn hold(&self, cpu: usize, time: Duration) {
        let entries = self.lock();
        let undisturbed = |entries: &mut Entries<E>| !entries.vcpus[cpu].page.requested();
        let _ = self.changed.wait_timeout_while(entries, time, undisturbed);
    }

    /// Returns how the guest ended. Returns `None` if it has not ended.
    #[must_use]
    pub fn exit(&self) -> Option<E> {
        self.lock().exit.clone()
    }

    /// Forgets how the guest ended: it is to start anew. All vCPUs are paused.
    pub fn renew(&self) {
        let mut entries = self.lock();
        entries.exit = None;
        for entry in entries.vcpus.iter_mut().filter(|entry| entry.phase == Phase::Ended) {
            entry.phase = Phase::Paused;
        }
    }

    /// Records `exit` as the end of the guest, unless the guest has ended before. Does not pause the vCPUs.
    pub fn record_exit(&self, exit: E) {
        self.lock().exit.get_or_insert(exit);
        self.changed.notify_all();
    }

    /// Waits until the guest has ended, or for `timeout`. Returns how it ended.
    pub fn wait_exit(&self, timeout: Option<Duration>) -> Option<E> {
        let end = timeout.map(|t| Instant::now() + t);
        let mut entries = self.lock();
        while entries.exit.is_none() {
            entries = match end.map(|end| end.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => break,
                Some(left) => {
                    self.changed.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        entries.exit.clone()
    }

    fn leave_running(&self, cpu: usize, phase: Phase, exit: Option<E>) {
        let mut entries = self.lock();
        let entry = &mut entries.vcpus[cpu];
        entry.phase = phase;
        entry.page.clear();
        if let Some(exit) = exit {
            entries.exit.get_or_insert(exit);
            entries.run = false;
            kick_running(&entries);
        }
        drop(entries);
        self.changed.notify_all();
    }
}

/// Kicks every vCPU that runs; see [`VcpuPark`] for why this cannot be missed. A thread that has not entered yet has
/// nothing to be interrupted in, and finds the request when it calls `KVM_RUN`.
fn kick_running<E>(entries: &Entries<E>) {
    for entry in entries.vcpus.iter().filter(|e| e.phase == Phase::Running) {
        entry.page.request();
        if let Some(thread) = entry.thread {
            kick::interrupt(thread);
        }
    }
}

/// The side of a vCPU's own thread: see [`VcpuPark`]. Dropping it says that the thread is gone.
#[derive(Debug)]
pub struct VcpuRunner<E: Clone> {
    cpu: usize,
    page: Arc<KickPage>,
    park: Arc<VcpuPark<E>>,
}

impl<E: Clone> VcpuRunner<E> {
    /// Returns the number of the vCPU.
    #[must_use]
    pub fn cpu(&self) -> usize {
        self.cpu
    }

    /// Returns the park of all vCPUs.
    #[must_use]
    pub fn park(&self) -> &Arc<VcpuPark<E>> {
        &self.park
    }

    /// Waits until the vCPU is to run. Returns false if the thread is to end: see [`VcpuPark::quit`].
    #[must_use]
    pub fn wait_to_run(&self) -> bool {
        let mut entries = self.park.lock();
        loop {
            let (run, quit) = (entries.run, entries.quit);
            let entry = &mut entries.vcpus[self.cpu];
            if run && !quit && matches!(entry.phase, Phase::Paused | Phase::Running) {
                entry.phase = Phase::Running;
                return true;
            }
            if entry.phase == Phase::Running {
                // Told to run, and to pause before it got here.
                entry.phase = Phase::Paused;
                entry.page.clear();
                self.park.changed.notify_all();
            }
            if quit {
                return false;
            }
            entries = self.park.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// For a thread that is told to run by other means, such as a channel: returns whether the vCPU may run. If not, it is
    /// paused.
    ///
    /// The command may be old: a vCPU that did not stop within the patience of [`VcpuPark::pause_all`] and was told to
    /// run again finds the command when it has stopped at last, perhaps after the next pause.
    #[must_use]
    pub fn may_run(&self) -> bool {
        let mut entries = self.park.lock();
        if entries.run {
            entries.vcpus[self.cpu].phase = Phase::Running;
            return true;
        }
        drop(entries);
        self.paused();
        false
    }

    /// Returns whether the vCPU is to pause. `KVM_RUN` returns `EINTR` as long as this is so.
    #[must_use]
    pub fn pause_requested(&self) -> bool {
        self.page.requested()
    }

    /// Makes the next `KVM_RUN` complete the access of the last exit and return `EINTR`, without running the guest on. For
    /// a guest that has ended, whose vCPUs are to be loaded anew. [`paused`](Self::paused) and [`ended`](Self::ended) take
    /// the request back.
    pub fn request_completion(&self) {
        self.page.request();
    }

    /// Says that the vCPU is paused. Takes the request back that led to this.
    pub fn paused(&self) {
        self.park.leave_running(self.cpu, Phase::Paused, None);
    }

    /// Says that the guest has ended. The other vCPUs are asked to pause. The first `exit` of all counts.
    pub fn ended(&self, exit: E) {
        self.park.leave_running(self.cpu, Phase::Ended, Some(exit));
    }
}

impl<E: Clone> Drop for VcpuRunner<E> {
    fn drop(&mut self) {
        self.park.lock().vcpus[self.cpu].thread = None;
        self.park.leave_running(self.cpu, Phase::Gone, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Park = Arc<VcpuPark<&'static str>>;

    /// A park of two vCPUs, without KVM: the pages are memory of the test.
    fn park() -> (Park, Vec<Arc<KickPage>>) {
        kick::install_handler();
        let pages: Vec<_> = (0..2).map(|_| Arc::new(KickPage::detached().unwrap())).collect();
        (Arc::new(VcpuPark::of_pages(pages.clone())), pages)
    }

    /// The sides of both vCPUs' threads. Signals of theirs go to the thread of the test and do nothing.
    fn runners(park: &Park) -> [VcpuRunner<&'static str>; 2] {
        [park.enter(0), park.enter(1)]
    }

    #[test]
    fn a_kick_is_spent_by_the_pause_that_it_asked_for() {
        let (park, pages) = park();
        let [first, second] = runners(&park);
        park.run_all();
        assert!(first.may_run() && second.may_run());
        let late = park.pause_all(Duration::from_millis(5)).unwrap_err();
        assert_eq!(late.to_string(), "vCPU 0 did not pause within 5 ms");
        assert!(first.pause_requested() && second.pause_requested());
        first.paused();
        second.paused();
        assert!(pages.iter().all(|page| !page.requested()));
        park.pause_all(Duration::ZERO).unwrap();
        assert!(pages.iter().all(|page| !page.requested()), "a vCPU that stands still is not kicked");
    }

    #[test]
    fn pause_ends_a_hold() {
        let (park, _pages) = park();
        let runners = runners(&park);
        park.run_all();
        assert!(runners.iter().all(VcpuRunner::may_run));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                park.hold(0, 2 * vmferry_testkit::PATIENCE);
                runners.iter().for_each(VcpuRunner::paused);
            });
            park.pause_all(vmferry_testkit::PATIENCE).unwrap();
        });
    }

    #[test]
    fn a_command_to_run_that_comes_late_is_not_obeyed() {
        let (park, pages) = park();
        let [first, second] = runners(&park);
        park.run_all();
        park.pause_all(Duration::ZERO).unwrap_err();
        // Told to run again before it stopped, and then to pause: the second command is found after both.
        park.run_all();
        park.pause_all(Duration::ZERO).unwrap_err();
        first.paused();
        assert!(!first.may_run());
        assert!(!second.may_run(), "nor does one that was paused before it began");
        park.pause_all(Duration::ZERO).unwrap();
        assert!(pages.iter().all(|page| !page.requested()));
        park.run_all();
        assert!(first.may_run() && second.may_run());
    }

    #[test]
    fn the_end_stops_the_others_and_the_first_reason_counts() {
        let (park, pages) = park();
        let [first, second] = runners(&park);
        park.run_all();
        assert_eq!(park.wait_exit(Some(Duration::from_millis(1))), None);
        first.ended("reset");
        assert!(pages[1].requested() && !pages[0].requested());
        second.ended("off");
        assert_eq!(park.wait_exit(None), Some("reset"));
        park.record_exit("stopped");
        assert_eq!(park.exit(), Some("reset"));
        park.run_all();
        assert!(park.pause_all(Duration::ZERO).is_ok(), "vCPUs that ended are not made to run");
        park.renew();
        assert_eq!(park.exit(), None);
        park.run_all();
        assert!(first.may_run() && second.may_run(), "a guest that starts anew has all its vCPUs");
    }

    #[test]
    fn threads_that_wait_run_pause_and_end_when_they_are_told() {
        let (park, _pages) = park();
        let turns = std::sync::atomic::AtomicU32::new(0);
        let ordering = std::sync::atomic::Ordering::SeqCst;
        std::thread::scope(|scope| {
            for cpu in 0..2 {
                let (park, turns) = (&park, &turns);
                scope.spawn(move || {
                    let runner = park.enter(cpu);
                    while runner.wait_to_run() {
                        turns.fetch_add(1, ordering);
                        while !runner.pause_requested() {
                            std::thread::sleep(Duration::from_micros(100));
                        }
                        runner.paused();
                    }
                });
            }
            for round in 1..=20 {
                park.run_all();
                vmferry_testkit::wait("both vCPUs running", || turns.load(ordering) >= 2 * round);
                park.pause_all(vmferry_testkit::PATIENCE).unwrap();
                assert_eq!(turns.load(ordering), 2 * round);
            }
            // Told to run and to pause at once: they may run for a moment or not at all, and stand still afterwards.
            for _ in 0..200 {
                park.run_all();
                park.pause_all(vmferry_testkit::PATIENCE).unwrap();
            }
            park.quit();
        });
    }
}
