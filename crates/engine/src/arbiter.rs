//! Arbiter: decides whether source or target owns a guest when neither can know.
//!
//! Between the commit and its answer, the source cannot know whether the target runs the guest. If
//! the link is lost in this time and there is no arbiter, the migration can end in the state
//! `unknown`, and the operator must decide. With an arbiter, each migration has a register, which
//! an [`Arbiter`] outside both hosts keeps and which both hosts can reach. The following rules
//! ensure that the guest never runs on both hosts, whatever crashes, stops or arrives late:
//!
//! 1. The source opens the register before it moves anything, and the register cannot be opened
//!    again. A host that finds no register, or a register that names the peer as the owner, does
//!    not own the guest. Therefore a register that was deleted, lost or never made decides for
//!    neither host.
//! 2. The register changes from open to `source` or to `target` in one atomic step. Therefore at
//!    most one of the two claims is granted, however often and however late each claim arrives.
//!    Every later claim is answered with the owner, so a host can repeat a claim whose answer was
//!    lost.
//! 3. The target claims the guest after it has read the commit and *before* it runs the guest. The
//!    target does so in every migration, because it cannot know what the source has observed. After
//!    the commit, the source claims the guest before it resumes the guest, unless the target itself
//!    has reported that it never ran the guest. Therefore the host that runs the guest after the
//!    commit owns it, and its peer does not.
//! 4. No rule depends on a clock. Any time may pass between a granted claim and the start of the
//!    guest, for example in a process that was stopped for an hour. A granted claim stays granted,
//!    because there is no lease that could expire. For the same reason, a refused host gets the
//!    same answer after an hour as after a second.
//! 5. The register goes from `target` to `source` only at the target's own request, in which it
//!    states that it has not run the guest and never will ([`ArbiterRequest::GiveBack`]). The
//!    target first renounces the guest in its own memory, permanently, and then sends the request.
//!    A claim of the target that arrives after that request changes nothing, because the register
//!    is not open.
//! 6. An arbiter that cannot be reached has decided nothing. A host that depends on its decision
//!    keeps the guest stopped and asks again.
//!
//! These rules rest on two assumptions: the arbiter does not lose a change that it has
//! acknowledged, and both hosts ask the same arbiter. The second assumption is tested before
//! anything moves: the target reads the register that the source has opened
//! ([`ArbiterRequest::Look`]). Even earlier, in the hello, the target refuses a source that is
//! configured with a different arbiter name.

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

/// First delay before the target repeats its report that the guest runs, if the arbiter did not
/// answer.
const FIRST_AGAIN: Duration = Duration::from_millis(100);
/// Longest delay between two attempts to report that the guest runs. The delay can be long, because
/// usually no source waits for the report.
const LONGEST_CONFIRM: Duration = Duration::from_secs(30);

/// Service outside both hosts that keeps one register for each migration.
///
/// An implementation must follow the rules in the documentation of the [module](self).
pub trait Arbiter: fmt::Debug + Send + Sync {
    /// Returns the name of the arbiter, which must be the same on source and target. The name must
    /// not contain the address, because source and target may reach the arbiter at different
    /// addresses.
    fn name(&self) -> String;

    /// Returns the location of the register of `migration`, for an operator who has to inspect it.
    fn register(&self, migration: MigrationId) -> String;

    /// Creates the register of `migration` in the state [`Ownership::Open`].
    ///
    /// # Errors
    /// If the register exists already, or the arbiter does not answer.
    fn open(&self, migration: MigrationId) -> Result<(), ArbiterError>;

    /// Performs `request` on the register of `migration` in one atomic step, and returns the
    /// content of the register after that step.
    ///
    /// The call must return after a few seconds at most. A request that is sent twice must have the
    /// same effect as one that is sent once.
    ///
    /// # Errors
    /// [`ArbiterError::NoRegister`] if there is no register. [`ArbiterError::Unreachable`] if the
    /// arbiter does not answer; the request may then have taken effect, or may still take effect.
    fn request(&self, migration: MigrationId, request: ArbiterRequest) -> Result<Ownership, ArbiterError>;

    /// Removes the register of `migration`. The engine calls this only when the register is not
    /// needed to decide who owns the guest.
    ///
    /// # Errors
    /// If the arbiter does not answer.
    fn close(&self, migration: MigrationId) -> Result<(), ArbiterError>;
}

/// Request of a session, and the arbiter's answer.
pub(crate) type ArbiterAnswer = (ArbiterRequest, Result<Ownership, ArbiterError>);

/// Sends a session's requests to the arbiter, each on its own thread, because a slow arbiter must
/// not block a session.
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

    /// Sends `request` after the delay `after`, and calls `wake` once the answer can be taken with
    /// [`answer`](Self::answer).
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
            // The caller asks again as soon as it has this answer. Without this delay, the caller
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

    /// Takes the oldest answer that was not taken yet.
    pub(crate) fn answer(&self) -> Option<ArbiterAnswer> {
        self.answers.1.try_recv().ok()
    }

    /// Reports to the arbiter that the guest runs, and repeats the report until the arbiter
    /// answers.
    ///
    /// A thread retries for as long as this process lives, because the source may be waiting for
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
                    // If the register is gone, the source has already learned from the target that
                    // the guest runs.
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

    /// Removes the register, which neither source nor target needs any more.
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
