//! Who owns a guest of which neither side can know: asked of somebody outside both hosts.
//!
//! Between the commit and its answer the source cannot know whether the target runs the guest. Without a fence that ends in a named
//! state, and a person decides. With one there is a register for each migration, kept by an [`Arbiter`] that both sides reach, and
//! this is why there is never a second runner, whatever crashes, stops or arrives late:
//!
//! 1. The source opens the register before anything is moved, and nobody can open it again. Whoever does not find it open, or
//!    decided in its own favour, wins nothing: a register that was deleted, lost or never made decides for nobody.
//! 2. It changes from open to `source` or to `target` in one atomic step. So at most one of the two claims is granted, however often and
//!    however late each arrives, and every later claim is told who won. A claim whose answer was lost is made again.
//! 3. The target claims after it has read the commit and *before* it runs the guest, in every migration and not only when something seems
//!    to be wrong: it cannot know what its source has seen. The source claims before it resumes a guest that it has committed, unless the
//!    target itself has said that it never ran it. So a side that runs the guest after the commit has won, and the other one has not.
//! 4. No clock is read. Between winning and running any time may pass (a process that was stopped for an hour): what was won stays won,
//!    there is no lease to run out, and the loser is told the same after an hour as after a second.
//! 5. From `target` the register goes to `source` only by the target's own word that it has not run the guest and never will
//!    ([`Word::GiveBack`]): it renounces the guest first, in its own memory and for good, and then says so. A claim of its own that
//!    arrives after that word changes nothing, because the register is not open.
//! 6. An arbiter that cannot be reached has decided nothing: whoever depends on it stays where it is, stopped, and asks again.
//!
//! What this rests on: that the arbiter does not forget what it has acknowledged, and that both sides ask the same one. The second is
//! tested before anything moves: the target looks for the register that the source has opened ([`Word::Look`]). Sides that were given
//! different names of arbiters are told apart by the hello already.

// What a peer or the host says must not panic a thread of the engine. Tests may.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::indexing_slicing
    )
)]

#[cfg(any(test, feature = "sim"))]
#[cfg_attr(not(test), expect(clippy::unreachable, reason = "nothing that ships has it"))]
pub(crate) mod simulated;

use crate::vm::caught;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use vmferry_core::VmError;
pub use vmferry_protocol::arbiter::{ArbiterError, Ruling, Side, Word};
pub use vmferry_wire::MigrationId;

/// Time after which the guest's start is said again if it was not heard.
const FIRST_AGAIN: Duration = Duration::from_millis(100);
/// The longest time between two attempts to say that the guest runs, which nobody may be waiting for.
const LONGEST_CONFIRM: Duration = Duration::from_secs(30);

/// Keeps one register for each migration, outside both hosts: see the module's rules, which are its part of the bargain.
pub trait Arbiter: fmt::Debug + Send + Sync {
    /// What both sides must call it alike: not where it is reached, which may differ.
    fn name(&self) -> String;

    /// Where a register of `migration` is, for people who have to look at it.
    fn register(&self, migration: MigrationId) -> String;

    /// Makes the register of `migration`, which must not have one, and opens it.
    ///
    /// # Errors
    /// If there is one, or nobody answers.
    fn open(&self, migration: MigrationId) -> Result<(), ArbiterError>;

    /// Says `word`, in one atomic step, and what the register holds then. Takes a few seconds at most. Saying a word twice is
    /// as good as once.
    ///
    /// # Errors
    /// If there is no register, or nobody answers: then the word may have been heard all the same, or may be later.
    fn say(&self, migration: MigrationId, word: Word) -> Result<Ruling, ArbiterError>;

    /// Removes the register of `migration`, whose guest is known to be where it is. From then on it decides nothing.
    ///
    /// # Errors
    /// If nobody answers.
    fn close(&self, migration: MigrationId) -> Result<(), ArbiterError>;
}

/// An answer to a word that a session has asked for.
pub(crate) type Ruled = (Word, Result<Ruling, ArbiterError>);

/// Says a session's words on threads of their own: an arbiter that takes its time must not hold a session.
#[derive(Debug)]
pub(crate) struct Asker {
    arbiter: Arc<dyn Arbiter>,
    migration: MigrationId,
    answers: (Sender<Ruled>, Receiver<Ruled>),
}

impl Asker {
    pub(crate) fn new(arbiter: Arc<dyn Arbiter>, migration: MigrationId) -> Self {
        Self { arbiter, migration, answers: channel() }
    }

    /// Says `word` after a while, then calls `wake`: its answer can be taken.
    pub(crate) fn ask(&self, word: Word, after: Duration, wake: impl FnOnce() + Send + 'static) {
        let (arbiter, migration, answers) =
            (Arc::clone(&self.arbiter), self.migration, self.answers.0.clone());
        let ask = move || {
            std::thread::sleep(after);
            // Whoever asked may have ended.
            let said = caught(|| Ok::<_, VmError>(arbiter.say(migration, word)));
            let said = said.unwrap_or_else(|panic| Err(ArbiterError::Unreachable(panic.to_string())));
            let _ = answers.send((word, said));
            wake();
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Fence, "fence", ask) {
            // The caller asks again as soon as it has this answer. Without the pause it would spin.
            std::thread::sleep(after);
            let why = ArbiterError::Unreachable(format!("no thread to ask it: {error}"));
            let _ = self.answers.0.send((word, Err(why)));
        }
    }

    /// Where the register is.
    pub(crate) fn register(&self) -> String {
        self.arbiter.register(self.migration)
    }

    /// The oldest answer.
    pub(crate) fn answer(&self) -> Option<Ruled> {
        self.answers.1.try_recv().ok()
    }

    /// Says that the guest runs until that was heard: for as long as this process lives, because its source may be waiting for it.
    pub(crate) fn confirm(&self) {
        let (arbiter, migration) = (Arc::clone(&self.arbiter), self.migration);
        let confirm = move || {
            let mut wait = FIRST_AGAIN;
            loop {
                match arbiter.say(migration, Word::Runs) {
                    Err(ArbiterError::Unreachable(_)) => {}
                    Ok(Ruling::Source) => {
                        tracing::error!(
                            "the guest runs here, and somebody has written into {} that it is the source's: look at the source at \
                             once",
                            arbiter.register(migration)
                        );
                        return;
                    }
                    // Without a register its source has heard it from us.
                    Ok(_) | Err(ArbiterError::NoRegister(_)) => return,
                }
                std::thread::sleep(wait);
                wait = (wait * 2).min(LONGEST_CONFIRM);
            }
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Fence, "fence", confirm) {
            tracing::warn!("the fence is not told that the guest runs here: no thread: {error}");
        }
    }

    /// Removes the register, which nobody needs any more.
    pub(crate) fn close(&self) {
        if let Err(error) = self.arbiter.close(self.migration) {
            tracing::warn!("{} stays, and can be deleted: {error}", self.arbiter.register(self.migration));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[derive(Debug)]
    struct Clumsy;

    impl Arbiter for Clumsy {
        fn name(&self) -> String {
            "clumsy".into()
        }

        fn register(&self, _: MigrationId) -> String {
            "nowhere".into()
        }

        fn open(&self, _: MigrationId) -> Result<(), ArbiterError> {
            Ok(())
        }

        fn say(&self, _: MigrationId, _: Word) -> Result<Ruling, ArbiterError> {
            panic!("a clumsy arbiter")
        }

        fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
            Ok(())
        }
    }

    #[test]
    fn arbiter_that_panics_has_given_no_answer() {
        let asker = Asker::new(Arc::new(Clumsy), MigrationId([7; 16]));
        let (woken, wake) = mpsc::channel();
        asker.ask(Word::Look, Duration::ZERO, move || woken.send(()).unwrap());
        wake.recv_timeout(vmferry_testkit::PATIENCE).expect("nothing wakes the session");
        let Some((Word::Look, Err(ArbiterError::Unreachable(why)))) = asker.answer() else {
            panic!("no answer")
        };
        assert!(why.contains("a clumsy arbiter"), "{why}");
    }
}
