//! Pausing vCPU threads, and resuming them.

use crate::error::Result;
use crate::kick::{self, KickPage};
use kvm_ioctls::VcpuFd;
use rustix::thread::Pid;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Phase of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The thread of the vCPU waits, and the state of the vCPU can be saved and loaded.
    Paused,
    /// The vCPU runs the guest, or is about to.
    Running,
    /// The vCPU ended the guest or failed, and will not run again.
    Ended,
    /// The thread of the vCPU has ended.
    Gone,
}

#[derive(Debug)]
struct Entry {
    phase: Phase,
    page: Arc<KickPage>,
    // Set while the thread can receive signals.
    thread: Option<Pid>,
}

#[derive(Debug)]
struct Entries<E> {
    vcpus: Vec<Entry>,
    /// True if vCPUs may run. Each phase follows when the thread of the vCPU reads this flag.
    run: bool,
    /// True if the threads must end.
    quit: bool,
    exit: Option<E>,
}

/// Error of a pause: at least one vCPU did not stop in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("vCPU {cpu} did not pause within {} ms", .within.as_millis())]
#[non_exhaustive]
pub struct NotPaused {
    /// Number of the first vCPU that did not stop.
    pub cpu: u32,
    /// Time limit of the pause.
    pub within: Duration,
}

/// Control of the vCPU threads of a VM, which pauses and resumes the threads and records the end of
/// the guest.
///
/// [`Guest`](crate::Guest) already uses this type. Use it directly if the VMM has its own vCPU
/// threads.
///
/// The owner of the VM calls [`run_all`](Self::run_all) and [`pause_all`](Self::pause_all). Each
/// vCPU thread calls [`enter`](Self::enter) once, and then alternates between waiting and running:
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
/// `E` is the type of the value that describes the end of a guest.
///
/// # Why a pause is never lost
/// A pause must bring a running vCPU out of `KVM_RUN`, wherever its thread is at that moment. For
/// this, `pause_all` takes two steps in this order, while it holds a lock:
/// 1. It stores 1 into `kvm_run.immediate_exit`, through its own mapping.
/// 2. It sends the thread a signal (`SIGRTMIN`) whose handler does nothing.
///
/// The thread may be
/// * *before `KVM_RUN`*, in user space: the signal is handled at any time and does nothing.
///   `KVM_RUN` then reads `immediate_exit`, which was stored before, and returns `EINTR` without
///   running the guest.
/// * *inside `KVM_RUN`, having read 0*: the signal stays pending, because only a return to user
///   space would deliver it. The signal brings the vCPU out of the guest. Because the kernel checks
///   for pending signals before each entry into the guest, `KVM_RUN` returns `EINTR`.
/// * *after `KVM_RUN`*, handling an exit: the same happens as before `KVM_RUN`, once the exit is
///   handled.
///
/// `immediate_exit` stays 1 until the thread has received `EINTR` and calls [`VcpuRunner::paused`].
/// Therefore each kick is consumed exactly once, and it never outlives the pause that requested it,
/// because only running vCPUs are kicked. An `EINTR` for another reason (a debugger, a stray
/// signal) finds 0 in `immediate_exit` and changes nothing.
///
/// # Why a pause leaves no I/O incomplete
/// A thread calls [`VcpuRunner::paused`] only after `KVM_RUN` has returned `EINTR` while a request
/// was set. The kernel completes the port or memory access of the last exit before it checks
/// `immediate_exit`. If the completion causes another exit (the second half of an access), the
/// kernel returns that exit, which is handled before the next call of `KVM_RUN` (virt/kvm/api.rst,
/// 4.10 and 5). Therefore registers that are read after a pause have their values from after the
/// access.
#[derive(Debug)]
pub struct VcpuPark<E> {
    // One lock for all vCPUs. It is taken when a phase changes, never while the guest runs.
    entries: Mutex<Entries<E>>,
    changed: Condvar,
}

impl<E: Clone> VcpuPark<E> {
    /// Creates a park for `vcpus`, which are all paused. The first call in the process installs a
    /// handler for `SIGRTMIN` that does nothing.
    ///
    /// # Errors
    /// Returns [`Error::Ioctl`](crate::Error::Ioctl) if a `kvm_run` page cannot be mapped.
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
        // Every change is a single assignment, so a panic of another thread cannot leave the state
        // inconsistent.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.lock().vcpus.len()
    }

    /// Registers the calling thread as the thread of vCPU `cpu`. The thread can be interrupted
    /// until the returned value is dropped, which records that the thread has ended.
    ///
    /// # Panics
    /// Panics if the park has no such vCPU.
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

    /// Brings every running vCPU out of the guest and waits until all vCPUs have stopped, at most
    /// for `patience`. If the result is `Ok`, no vCPU runs, and no access to a device is
    /// incomplete.
    ///
    /// # Errors
    /// Returns [`NotPaused`], which names the first vCPU that still runs. Other vCPUs may still run
    /// as well. Each of them stops as soon as it can.
    pub fn pause_all(&self, patience: Duration) -> Result<(), NotPaused> {
        let mut entries = self.lock();
        entries.run = false;
        kick_running(&entries);
        // Wakes the vCPU threads that are held or wait to run.
        self.changed.notify_all();
        let running = |entries: &mut Entries<E>| entries.vcpus.iter().any(|e| e.phase == Phase::Running);
        let waited = self.changed.wait_timeout_while(entries, patience, running);
        let (entries, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match entries.vcpus.iter().position(|e| e.phase == Phase::Running) {
            None => Ok(()),
            Some(cpu) => Err(NotPaused { cpu: u32::try_from(cpu).unwrap_or(u32::MAX), within: patience }),
        }
    }

    /// Makes [`VcpuRunner::wait_to_run`] return false in every thread, and brings running vCPUs out
    /// of the guest.
    pub fn quit(&self) {
        let mut entries = self.lock();
        (entries.quit, entries.run) = (true, false);
        kick_running(&entries);
        drop(entries);
        self.changed.notify_all();
    }

    /// Brings vCPU `cpu` out of the guest for a moment if it runs. Has no effect if the vCPU is
    /// already outside the guest.
    pub(crate) fn nudge(&self, cpu: usize) {
        let entries = self.lock();
        let entry = &entries.vcpus[cpu];
        if let Some(thread) = entry.thread.filter(|_| entry.phase == Phase::Running) {
            kick::interrupt(thread);
        }
    }

    /// Makes the calling thread, which is the thread of vCPU `cpu`, wait for `time`, or until a
    /// pause is requested.
    pub(crate) fn hold(&self, cpu: usize, time: Duration) {
        let entries = self.lock();
        let undisturbed = |entries: &mut Entries<E>| !entries.vcpus[cpu].page.requested();
        let _ = self.changed.wait_timeout_while(entries, time, undisturbed);
    }

    /// Returns the recorded end of the guest, or `None` if the guest has not ended.
    #[must_use]
    pub fn exit(&self) -> Option<E> {
        self.lock().exit.clone()
    }

    /// Clears the recorded end of the guest, so that a new guest can start. Call this method only
    /// while no vCPU runs. It makes vCPUs that have ended paused again.
    pub fn renew(&self) {
        let mut entries = self.lock();
        entries.exit = None;
        for entry in entries.vcpus.iter_mut().filter(|entry| entry.phase == Phase::Ended) {
            entry.phase = Phase::Paused;
        }
    }

    /// Records `exit` as the end of the guest, unless an end was already recorded. Does not pause
    /// the vCPUs.
    pub fn record_exit(&self, exit: E) {
        self.lock().exit.get_or_insert(exit);
        self.changed.notify_all();
    }

    /// Waits until the guest has ended, at most for `timeout` if there is one. Returns the recorded
    /// end of the guest, or `None` if the guest has not ended in this time.
    ///
    /// # Panics
    /// Panics if `timeout` is so long that an [`Instant`] cannot represent its end.
    pub fn wait_exit(&self, timeout: Option<Duration>) -> Option<E> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
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

/// Kicks every vCPU that runs; see [`VcpuPark`] for the reason why a kick is never lost. A thread
/// that has not entered yet need not be interrupted: it finds the request when it calls `KVM_RUN`.
fn kick_running<E>(entries: &Entries<E>) {
    for entry in entries.vcpus.iter().filter(|e| e.phase == Phase::Running) {
        entry.page.request();
        if let Some(thread) = entry.thread {
            kick::interrupt(thread);
        }
    }
}

/// Handle with which the thread of a vCPU takes part in a [`VcpuPark`]. Dropping the handle records
/// that the thread has ended.
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

    /// Waits until the vCPU may run, and returns true. Returns false if the thread must end: see
    /// [`VcpuPark::quit`].
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
                // A run and then a pause were requested before the thread reached this point.
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

    /// Returns whether the vCPU may run, for a thread that receives run commands in another way,
    /// such as a channel. If the result is false, the vCPU is paused.
    ///
    /// The check is necessary because a run command can be outdated when the thread reads it. For
    /// example, a vCPU may not stop within the `patience` of [`VcpuPark::pause_all`], and then
    /// receive a run command. The thread reads this command only after the vCPU has stopped, and
    /// the next pause may have been requested meanwhile.
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

    /// Returns whether a pause is requested. As long as it is, `KVM_RUN` returns `EINTR`.
    #[must_use]
    pub fn pause_requested(&self) -> bool {
        self.page.requested()
    }

    /// Makes the next `KVM_RUN` complete the access of the last exit and return `EINTR`, without
    /// running the guest further.
    ///
    /// Use this method after a guest has ended, if new state will be loaded into its vCPUs.
    /// [`paused`](Self::paused) and [`ended`](Self::ended) clear the request.
    pub fn request_completion(&self) {
        self.page.request();
    }

    /// Records that the vCPU is paused, and clears the request for the pause.
    pub fn paused(&self) {
        self.park.leave_running(self.cpu, Phase::Paused, None);
    }

    /// Records that the guest has ended, and requests a pause of the other vCPUs. If an end was
    /// already recorded, `exit` is ignored.
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

    /// Creates a park of two vCPUs without KVM: the pages are memory of the test.
    fn park() -> (Park, Vec<Arc<KickPage>>) {
        kick::install_handler();
        let pages: Vec<_> = (0..2).map(|_| Arc::new(KickPage::detached().unwrap())).collect();
        (Arc::new(VcpuPark::of_pages(pages.clone())), pages)
    }

    /// Returns the handles of both vCPU threads. Their signals go to the thread of the test and do
    /// nothing.
    fn runners(park: &Park) -> [VcpuRunner<&'static str>; 2] {
        [park.enter(0), park.enter(1)]
    }

    #[test]
    fn kick_is_consumed_by_the_pause_that_requested_it() {
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
        assert!(pages.iter().all(|page| !page.requested()), "a paused vCPU is not kicked");
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
    fn late_run_command_is_ignored() {
        let (park, pages) = park();
        let [first, second] = runners(&park);
        park.run_all();
        park.pause_all(Duration::ZERO).unwrap_err();
        // The vCPU was told to run again before it stopped, and then to pause. It reads the run
        // command after both.
        park.run_all();
        park.pause_all(Duration::ZERO).unwrap_err();
        first.paused();
        assert!(!first.may_run());
        assert!(!second.may_run(), "a vCPU that was paused before its first run does not run either");
        park.pause_all(Duration::ZERO).unwrap();
        assert!(pages.iter().all(|page| !page.requested()));
        park.run_all();
        assert!(first.may_run() && second.may_run());
    }

    #[test]
    fn end_of_one_vcpu_stops_the_others_and_the_first_exit_is_kept() {
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
        assert!(first.may_run() && second.may_run(), "a new guest has all its vCPUs");
    }

    #[test]
    fn waiting_threads_run_pause_and_end_on_request() {
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
            // The vCPUs are told to run and to pause at once. They may run for a moment or not at
            // all, and are paused afterwards.
            for _ in 0..200 {
                park.run_all();
                park.pause_all(vmferry_testkit::PATIENCE).unwrap();
            }
            park.quit();
        });
    }
}
