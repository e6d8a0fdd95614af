//! Hooks in the pause of a snapshot.
//!
//! A confined process cannot execute programs. Therefore the command `snapshot` executes the hooks:
//! the process with the guest announces the pause, and keeps the guest paused until the command
//! answers or a time limit expires.

use anyhow::{Result, bail};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_core::VmError;

/// Interval at which a waiting thread checks for a cancel.
const LOOK: Duration = Duration::from_millis(20);

/// State of the pause.
#[derive(Debug, Default, PartialEq, Eq)]
enum Gate {
    /// No snapshot with hooks is under way.
    #[default]
    Closed,
    /// The guest will be paused.
    Awaited,
    /// The guest is paused until the command answers.
    Paused,
    /// The command has answered: `None`, or the reason why a hook failed.
    Answered(Option<String>),
}

/// Meeting point of the machine's owner, who keeps the guest paused, and the command.
#[derive(Debug, Default)]
pub(crate) struct PauseGate {
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl PauseGate {
    /// Announces that a snapshot with hooks begins.
    pub(crate) fn expect(&self) {
        self.set(Gate::Awaited);
    }

    /// Records that no hook can be executed any more, because the snapshot has ended.
    pub(crate) fn close(&self) {
        self.set(Gate::Closed);
    }

    /// Announces that the guest is paused, and waits for the answer of the command, at most for the
    /// time `within`. Called by the machine's owner.
    pub(crate) fn hold(&self, within: Duration, cancelled: impl Fn() -> bool) -> Result<(), VmError> {
        self.set(Gate::Paused);
        let began = Instant::now();
        let mut gate = self.lock();
        loop {
            if let Gate::Answered(failed) = &mut *gate {
                return failed.take().map_or(Ok(()), |why| Err(VmError::new(why)));
            }
            if began.elapsed() >= within {
                *gate = Gate::Awaited;
                return Err(VmError::new(format!("the hooks took longer than {within:?}")));
            }
            if cancelled() {
                *gate = Gate::Awaited;
                return Err(VmError::new("cancelled while the hooks ran"));
            }
            gate = self.changed.wait_timeout(gate, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the guest is paused, at most for the time `within`. Returns `None` if no
    /// snapshot with hooks is under way.
    pub(crate) fn wait_for_pause(&self, within: Duration) -> Option<bool> {
        let waits = |gate: &mut Gate| *gate == Gate::Awaited;
        let waited = self.changed.wait_timeout_while(self.lock(), within, waits);
        let gate = waited.unwrap_or_else(PoisonError::into_inner).0;
        match *gate {
            Gate::Closed => None,
            Gate::Awaited | Gate::Answered(_) => Some(false),
            Gate::Paused => Some(true),
        }
    }

    /// Ends the pause, after the hooks have succeeded or one has `failed`.
    pub(crate) fn answer(&self, failed: Option<String>) -> Result<()> {
        let mut gate = self.lock();
        if *gate != Gate::Paused {
            bail!("the guest is not paused for hooks; the time limit may have expired");
        }
        *gate = Gate::Answered(failed);
        drop(gate);
        self.changed.notify_all();
        Ok(())
    }

    fn set(&self, gate: Gate) {
        *self.lock() = gate;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_ends_with_the_answer_of_the_command() {
        let gate = PauseGate::default();
        assert_eq!(gate.wait_for_pause(Duration::ZERO), None);
        gate.expect();
        assert_eq!(gate.wait_for_pause(Duration::ZERO), Some(false));
        for failed in [None, Some("no space")] {
            std::thread::scope(|scope| {
                let holds = scope.spawn(|| gate.hold(Duration::from_secs(60), || false));
                assert_eq!(gate.wait_for_pause(Duration::from_secs(60)), Some(true));
                gate.answer(failed.map(str::to_owned)).unwrap();
                let held = holds.join().unwrap().map_err(|error| error.to_string());
                assert_eq!(held, failed.map_or(Ok(()), |why| Err(why.to_owned())));
            });
            gate.expect();
        }
        assert!(gate.answer(None).is_err());
        gate.close();
        assert_eq!(gate.wait_for_pause(Duration::from_secs(60)), None);
    }

    #[test]
    fn pause_ends_at_the_limit_and_with_a_cancel() {
        let gate = PauseGate::default();
        gate.expect();
        let error = gate.hold(Duration::from_millis(1), || false).unwrap_err();
        assert!(error.to_string().contains("took longer"), "{error}");
        let error = gate.hold(Duration::from_secs(60), || true).unwrap_err();
        assert!(error.to_string().contains("cancelled"), "{error}");
        assert!(gate.answer(None).is_err());
    }
}
