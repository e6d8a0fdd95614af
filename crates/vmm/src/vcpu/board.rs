//! Where everybody sees what every vCPU is doing.

use super::kick::{self, KickPage};
use crate::error::{Error, Result};
use rustix::thread::Pid;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a vCPU is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits for commands; its state can be saved and loaded.
    Paused,
    /// It runs the guest, or is about to.
    Running,
    /// It asked for the end of the VM or failed; it will not run again.
    Ended,
    /// Its thread is gone.
    Gone,
}

/// What made a vCPU fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuFault {
    /// Which vCPU.
    pub cpu: u32,
    /// What KVM said.
    pub what: String,
    /// Where it was.
    pub rip: Option<u64>,
}

impl fmt::Display for VcpuFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {} failed: {}", self.cpu, self.what)?;
        match self.rip {
            Some(rip) => write!(f, " (rip {rip:#x})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for VcpuFault {}

/// How a guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// It switched itself off, as operating systems do (ACPI S5).
    SwitchedOff,
    /// It wrote this code to the exit port, as measuring guests do.
    PoweredOff(u8),
    /// It asked for a reset, by one of the ways that a PC has.
    Reset,
    /// A vCPU met a fault on its way to a fault on its way to a fault, which resets a PC: a crash, or the last way to reset that an
    /// operating system tries.
    TripleFault(VcpuFault),
    /// A vCPU cannot go on.
    Failed(VcpuFault),
    /// [`Vm::stop`](crate::Vm::stop) was called, or the VM was dropped.
    Stopped,
}

impl Exit {
    /// Whether the guest ended because it or its owner wanted it to: switched off, powered off with code 0, or stopped.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        matches!(self, Self::SwitchedOff | Self::PoweredOff(0) | Self::Stopped)
    }

    /// Whether the guest would start anew on a PC.
    #[must_use]
    pub fn is_reset(&self) -> bool {
        matches!(self, Self::Reset | Self::TripleFault(_))
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwitchedOff => f.write_str("the guest switched itself off"),
            Self::PoweredOff(code) => write!(f, "the guest ended with code {code}"),
            Self::Reset => f.write_str("the guest asked for a reset"),
            Self::Failed(fault) | Self::TripleFault(fault) => fault.fmt(f),
            Self::Stopped => f.write_str("the VM was stopped"),
        }
    }
}

#[derive(Debug)]
struct Entry {
    phase: Phase,
    page: Arc<KickPage>,
    // There while the thread can receive signals.
    thread: Option<Pid>,
}

#[derive(Debug)]
struct Entries {
    vcpus: Vec<Entry>,
    /// Whether vCPUs may run. Phases follow this, each when its thread gets to it.
    run: bool,
    exit: Option<Exit>,
}

/// The phase of every vCPU, and how the guest ended. One lock for all, taken when a phase changes, never while the guest
/// runs.
#[derive(Debug)]
pub(crate) struct Board {
    entries: Mutex<Entries>,
    changed: Condvar,
}

impl Board {
    /// A board for vCPUs with these pages, all paused.
    pub(crate) fn new(pages: Vec<Arc<KickPage>>) -> Self {
        let vcpus =
            pages.into_iter().map(|page| Entry { phase: Phase::Paused, page, thread: None }).collect();
        Self { entries: Mutex::new(Entries { vcpus, run: false, exit: None }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // Every change is a single assignment: a panic elsewhere cannot leave one half done.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU's thread says that it is there.
    pub(crate) fn arrived(&self, cpu: usize) {
        self.lock().vcpus[cpu].thread = Some(kick::this_thread());
    }

    /// A vCPU's thread says that it is paused. Spends the kick that led to this.
    pub(crate) fn paused(&self, cpu: usize) {
        self.leave_running(cpu, Phase::Paused, None);
    }

    /// A vCPU's thread says that the guest has ended; the other vCPUs are told to pause. The first reason counts.
    pub(crate) fn ended(&self, cpu: usize, exit: Exit) {
        self.leave_running(cpu, Phase::Ended, Some(exit));
    }

    /// A vCPU's thread says good-bye.
    pub(crate) fn gone(&self, cpu: usize) {
        self.lock().vcpus[cpu].thread = None;
        self.leave_running(cpu, Phase::Gone, None);
    }

    fn leave_running(&self, cpu: usize, phase: Phase, exit: Option<Exit>) {
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

    /// Says that every paused vCPU now runs. Its thread is sent the command to do so after this, so that a pause that
    /// comes at once finds it running, kicks it, and waits for it.
    pub(crate) fn run_all(&self) {
        let mut entries = self.lock();
        entries.run = true;
        for entry in entries.vcpus.iter_mut().filter(|e| e.phase == Phase::Paused) {
            entry.phase = Phase::Running;
        }
    }

    /// A vCPU's thread that was told to run asks whether that still holds. If not it is paused.
    ///
    /// The command may be old: a vCPU that did not stop within [`pause_all`](Self::pause_all)'s patience and was told to
    /// run again finds the command when it has stopped at last, perhaps after the next pause.
    pub(crate) fn may_run(&self, cpu: usize) -> bool {
        let mut entries = self.lock();
        if entries.run {
            entries.vcpus[cpu].phase = Phase::Running;
            return true;
        }
        drop(entries);
        self.paused(cpu);
        false
    }

    /// Brings every running vCPU out of the guest and waits until all have stopped.
    pub(crate) fn pause_all(&self, patience: Duration) -> Result<()> {
        let mut entries = self.lock();
        entries.run = false;
        kick_running(&entries);
        // For those that are being held.
        self.changed.notify_all();
        let running = |entries: &mut Entries| entries.vcpus.iter().any(|e| e.phase == Phase::Running);
        let waited = self.changed.wait_timeout_while(entries, patience, running);
        let (entries, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match entries.vcpus.iter().position(|e| e.phase == Phase::Running) {
            None => Ok(()),
            Some(cpu) => {
                Err(Error::Unresponsive { cpu: u32::try_from(cpu).unwrap_or(u32::MAX), what: "pause" })
            }
        }
    }

    /// Brings a running vCPU out of the guest for a moment, unless it happens to be outside.
    pub(crate) fn nudge(&self, cpu: usize) {
        let entries = self.lock();
        let entry = &entries.vcpus[cpu];
        if let Some(thread) = entry.thread.filter(|_| entry.phase == Phase::Running) {
            kick::interrupt(thread);
        }
    }

    /// Keeps the calling vCPU's thread waiting for `time`, or until somebody wants the vCPU to pause.
    pub(crate) fn hold(&self, cpu: usize, time: Duration) {
        let entries = self.lock();
        let undisturbed = |entries: &mut Entries| !entries.vcpus[cpu].page.requested();
        let _ = self.changed.wait_timeout_while(entries, time, undisturbed);
    }

    /// How the guest ended, if it did.
    pub(crate) fn exit(&self) -> Option<Exit> {
        self.lock().exit.clone()
    }

    /// Forgets how the guest ended: it is to start anew. All vCPUs stand still.
    pub(crate) fn renew(&self) {
        let mut entries = self.lock();
        entries.exit = None;
        for entry in entries.vcpus.iter_mut().filter(|entry| entry.phase == Phase::Ended) {
            entry.phase = Phase::Paused;
        }
    }

    /// Says that the guest is over because its owner wants so.
    pub(crate) fn stop(&self) {
        self.lock().exit.get_or_insert(Exit::Stopped);
        self.changed.notify_all();
    }

    /// Waits until the guest has ended, or for `timeout`.
    pub(crate) fn wait_exit(&self, timeout: Option<Duration>) -> Option<Exit> {
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
}

/// Kicks every vCPU that runs; see the module's documentation for why this cannot be missed. A thread that has not
/// arrived yet has nothing to be interrupted in, and finds the request when it calls `KVM_RUN`.
fn kick_running(entries: &Entries) {
    for entry in entries.vcpus.iter().filter(|e| e.phase == Phase::Running) {
        entry.page.request();
        if let Some(thread) = entry.thread {
            kick::interrupt(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A board for two vCPUs, without KVM: the pages are memory that nobody else has.
    fn board() -> (Board, Vec<Arc<KickPage>>) {
        let pages: Vec<_> = (0..2).map(|_| Arc::new(KickPage::detached().unwrap())).collect();
        (Board::new(pages.clone()), pages)
    }

    #[test]
    fn a_kick_is_spent_by_the_pause_that_it_asked_for() {
        let (board, pages) = board();
        board.run_all();
        assert!(board.may_run(0) && board.may_run(1));
        let late = board.pause_all(Duration::from_millis(5)).unwrap_err();
        assert!(matches!(late, Error::Unresponsive { cpu: 0, .. }), "{late}");
        assert!(pages.iter().all(|page| page.requested()));
        board.paused(0);
        board.paused(1);
        assert!(pages.iter().all(|page| !page.requested()));
        board.pause_all(Duration::ZERO).unwrap();
        assert!(pages.iter().all(|page| !page.requested()), "a vCPU that stands still is not kicked");
    }

    #[test]
    fn pause_ends_a_hold() {
        let (board, _pages) = board();
        board.run_all();
        assert!(board.may_run(0) && board.may_run(1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                board.hold(0, 2 * vmferry_testkit::PATIENCE);
                for cpu in [0, 1] {
                    board.paused(cpu);
                }
            });
            board.pause_all(vmferry_testkit::PATIENCE).unwrap();
        });
    }

    #[test]
    fn a_command_to_run_that_comes_late_is_not_obeyed() {
        let (board, pages) = board();
        board.run_all();
        board.pause_all(Duration::ZERO).unwrap_err();
        // Told to run again before it stopped, and then to pause: the second command is found after both.
        board.run_all();
        board.pause_all(Duration::ZERO).unwrap_err();
        board.paused(0);
        assert!(!board.may_run(0));
        assert!(!board.may_run(1), "nor does one that was paused before it began");
        board.pause_all(Duration::ZERO).unwrap();
        assert!(pages.iter().all(|page| !page.requested()));
        board.run_all();
        assert!(board.may_run(0) && board.may_run(1));
    }

    #[test]
    fn the_end_stops_the_others_and_the_first_reason_counts() {
        let (board, pages) = board();
        board.run_all();
        assert_eq!(board.wait_exit(Some(Duration::from_millis(1))), None);
        board.ended(0, Exit::Reset);
        assert!(pages[1].requested() && !pages[0].requested());
        board.ended(1, Exit::PoweredOff(1));
        assert_eq!(board.wait_exit(None), Some(Exit::Reset));
        board.stop();
        assert_eq!(board.exit(), Some(Exit::Reset));
        board.run_all();
        assert!(board.pause_all(Duration::ZERO).is_ok(), "vCPUs that ended are not made to run");
        board.renew();
        assert_eq!(board.exit(), None);
        board.run_all();
        assert!(board.may_run(0) && board.may_run(1), "a guest that starts anew has all its vCPUs");
    }
}
