//! Arbiter: a register outside both hosts that decides who owns the guest when neither side can
//! know.
//!
//! Between the commit and its answer the source cannot know whether the target runs the guest.
//! Without an arbiter, the migration ends in the state `unknown` and the operator decides. With an
//! arbiter, each migration has a register, kept by an [`Arbiter`] that both sides can reach. The
//! following rules ensure that the guest never runs on both sides, whatever crashes, stops or
//! arrives late:
//!
//! 1. The source opens the register before it moves anything, and the register cannot be opened
//!    again. A side that finds no register, or one that is neither open nor decided in its favour,
//!    does not own the guest. A register that was deleted, lost or never made decides for neither
//!    side.
//! 2. The register changes from open to `source` or to `target` in one atomic step. At most one of
//!    the two claims is granted, however often and however late each claim arrives. Every later
//!    claim is answered with the owner. A side repeats a claim whose answer was lost.
//! 3. The target claims the guest after it has read the commit and *before* it runs the guest. It
//!    does so in every migration, because the target cannot know what the source has observed. The
//!    source claims the guest before it resumes a guest that it has committed, unless the target
//!    itself has said that it never ran the guest. Therefore the host that runs the guest after the
//!    commit owns it, and its peer does not.
//! 4. No clock is read. Any time may pass between a granted claim and the start of the guest, for
//!    example in a process that was stopped for an hour. A granted claim stays granted: there is no
//!    lease that could expire. A refused host gets the same answer after an hour as after a second.
//! 5. The register goes from `target` to `source` only at the target's own request, in which it
//!    states that it has not run the guest and never will ([`ArbiterRequest::GiveBack`]). The
//!    target first renounces the guest in its own memory, permanently, and then sends the request.
//!    A claim of the target that arrives after that request changes nothing, because the register
//!    is not open.
//! 6. An arbiter that cannot be reached has decided nothing. A side that depends on its decision
//!    keeps the guest stopped and asks again.
//!
//! These rules rest on two assumptions: the arbiter does not lose what it has acknowledged, and
//! both sides ask the same arbiter. The second is tested before anything moves: the target reads
//! the register that the source has opened ([`ArbiterRequest::Look`]). The hello already rejects
//! two sides that are configured with different arbiter names.

// Input from a peer or the host must not panic a thread of the engine. Tests may panic.
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
pub use vmferry_protocol::arbiter::{ArbiterError, ArbiterRequest, Ownership, Side};
pub use vmferry_wire::MigrationId;

/// First delay before a report that the guest runs is repeated, if the arbiter did not answer.
const FIRST_AGAIN: Duration = Duration::from_millis(100);
/// Longest delay between two attempts to report that the guest runs. No side may be waiting for the
/// report.
const LONGEST_CONFIRM: Duration = Duration::from_secs(30);

/// Arbiter that keeps one register for each migration, outside both hosts.
///
/// An implementation must follow the rules of this module.
pub trait Arbiter: fmt::Debug + Send + Sync {
    /// Returns the name of the arbiter, which must be the same on both sides. The name does not
    /// contain the address, which may differ.
    fn name(&self) -> String;

    /// Returns the location of the register of `migration`, for an operator who has to inspect it.
    fn register(&self, migration: MigrationId) -> String;

    /// Creates the register of `migration`, in the state open.
    ///
    /// # Errors
    /// If the register exists already, or the arbiter does not answer.
    fn open(&self, migration: MigrationId) -> Result<(), ArbiterError>;

    /// Sends the request `request`, which takes effect in one atomic step. Returns the content of
    /// the register after that step.
    ///
    /// The call takes a few seconds at most. A request that is sent twice has the same effect as
    /// one that is sent once.
    ///
    /// # Errors
    /// If there is no register, or the arbiter does not answer. In the latter case the request may
    /// have taken effect, or may still take effect.
    fn request(&self, migration: MigrationId, request: ArbiterRequest) -> Result<Ownership, ArbiterError>;

    /// Removes the register of `migration`. The owner of the guest must be known. Afterwards the
    /// register decides nothing.
    ///
    /// # Errors
    /// If the arbiter does not answer.
    fn close(&self, migration: MigrationId) -> Result<(), ArbiterError>;
}

/// Request of a session, with the answer of the arbiter.
pub(crate) type ArbiterAnswer = (ArbiterRequest, Result<Ownership, ArbiterError>);

/// Sends a session's requests to the arbiter, each on its own thread. A slow arbiter must not block
/// a session.
#[derive(Debug)]
pub(crate) struct ArbiterClient {
    arbiter: Arc<dyn Arbiter>,
    migration: MigrationId,
    answers: (Sender<ArbiterAnswer>, Receiver<ArbiterAnswer>),
}

impl ArbiterClient {
    pub(crate) fn new(arbiter: Arc<dyn Arbiter>, migration: MigrationId) -> Self {
        Self { arbiter, migration, answers: channel() }
    }

    /// Sends the request `request` after the delay `after`, then calls `wake` to signal that the
    /// answer can be taken.
    pub(crate) fn send(
        &self,
        request: ArbiterRequest,
        after: Duration,
        wake: impl FnOnce() + Send + 'static,
    ) {
        let (arbiter, migration, answers) =
            (Arc::clone(&self.arbiter), self.migration, self.answers.0.clone());
        let send = move || {
            std::thread::sleep(after);
            // The session may have ended: a failure to send the answer is ignored.
            let said = caught(|| Ok::<_, VmError>(arbiter.request(migration, request)));
            let said = said.unwrap_or_else(|panic| Err(ArbiterError::Unreachable(panic.to_string())));
            let _ = answers.send((request, said));
            wake();
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Arbiter, "fence", send) {
            // The caller asks again as soon as it has this answer. Without the pause the caller
            // would spin.
            std::thread::sleep(after);
            let why =
                ArbiterError::Unreachable(format!("cannot start a thread that asks the arbiter: {error}"));
            let _ = self.answers.0.send((request, Err(why)));
        }
    }

    /// Returns the location of the register.
    pub(crate) fn register(&self) -> String {
        self.arbiter.register(self.migration)
    }

    /// Takes the oldest answer that was not taken.
    pub(crate) fn answer(&self) -> Option<ArbiterAnswer> {
        self.answers.1.try_recv().ok()
    }

    /// Reports to the arbiter that the guest runs, and repeats the report until the arbiter
    /// answers.
    ///
    /// The thread retries for as long as this process lives, because the source may be waiting for
    /// the report.
    pub(crate) fn confirm(&self) {
        let (arbiter, migration) = (Arc::clone(&self.arbiter), self.migration);
        let confirm = move || {
            let mut wait = FIRST_AGAIN;
            loop {
                match arbiter.request(migration, ArbiterRequest::Runs) {
                    Err(ArbiterError::Unreachable(_)) => {}
                    Ok(Ownership::Source) => {
                        tracing::error!(
                            "the guest runs on this host, but the register {} names the source as its owner: check the source at \
                             once",
                            arbiter.register(migration)
                        );
                        return;
                    }
                    // Without a register, the source has had the report from the target itself.
                    Ok(_) | Err(ArbiterError::NoRegister(_)) => return,
                }
                std::thread::sleep(wait);
                wait = (wait * 2).min(LONGEST_CONFIRM);
            }
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Arbiter, "fence", confirm) {
            tracing::warn!(
                "cannot report to the arbiter that the guest runs on this host: cannot start a thread: {error}"
            );
        }
    }

    /// Removes the register, which neither side needs any more.
    pub(crate) fn close(&self) {
        if let Err(error) = self.arbiter.close(self.migration) {
            tracing::warn!(
                "cannot delete the register {}; delete it by hand: {error}",
                self.arbiter.register(self.migration)
            );
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

        fn request(&self, _: MigrationId, _: ArbiterRequest) -> Result<Ownership, ArbiterError> {
            panic!("a clumsy arbiter")
        }

        fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
            Ok(())
        }
    }

    #[test]
    fn arbiter_that_panics_has_given_no_answer() {
        let client = ArbiterClient::new(Arc::new(Clumsy), MigrationId([7; 16]));
        let (woken, wake) = mpsc::channel();
        client.send(ArbiterRequest::Look, Duration::ZERO, move || woken.send(()).unwrap());
        wake.recv_timeout(vmferry_testkit::PATIENCE).expect("the session is not woken");
        let Some((ArbiterRequest::Look, Err(ArbiterError::Unreachable(why)))) = client.answer() else {
            panic!("no answer")
        };
        assert!(why.contains("a clumsy arbiter"), "{why}");
    }
}
