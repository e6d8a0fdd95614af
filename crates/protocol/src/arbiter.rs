//! Requests of a session to an arbiter, and the arbiter's answers.
//!
//! An arbiter keeps one register for each migration, outside both hosts. The register decides who
//! owns the guest if neither the source nor the target can know. A session only states which
//! request to make; its host sends the request.

use std::fmt;
use std::time::Duration;

/// Source or target of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Source: the host, process or VM that the guest leaves.
    Source,
    /// Target: the host, process or VM that the guest moves to.
    Target,
}

/// Request to an arbiter about the register of one migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ArbiterRequest {
    /// Reads the register without changing it.
    Look,
    /// Makes the given side the owner of the guest, if the register is open. Otherwise changes
    /// nothing.
    Claim(Side),
    /// Records that the target runs the guest, if the target is the owner. Otherwise changes
    /// nothing.
    Runs,
    /// Makes the source the owner of the guest, whatever the register holds. Only a target that has
    /// not run the guest and never will makes this request.
    GiveBack,
}

/// Content of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Neither source nor target has claimed the guest.
    Open,
    /// The source owns the guest.
    Source,
    /// The target owns the guest.
    Target {
        /// True if the target has reported that it runs the guest.
        runs: bool,
    },
}

impl fmt::Display for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "has given it neither to the source nor to the target",
            Self::Source => "has given it to the source",
            Self::Target { runs: false } => "has given it to the target, which has not reported that it runs",
            Self::Target { runs: true } => "has given it to the target, where it runs",
        })
    }
}

/// Reason why a request to an arbiter has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArbiterError {
    /// The arbiter gave no answer, or one that cannot be decoded. The request may or may not have
    /// taken effect.
    #[error("the arbiter gave no answer: {0}")]
    Unreachable(String),
    /// The arbiter has no register for this migration, or the content of the register cannot be
    /// decoded.
    #[error("the arbiter cannot decide: {0}")]
    NoRegister(String),
}

/// Delay before a request that was not answered is repeated. The delay doubles with each
/// repetition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Backoff(Duration);

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(2);

    /// Returns the next delay.
    pub(crate) fn next(&mut self) -> Duration {
        self.0 = (self.0 * 2).clamp(Self::FIRST, Self::LONGEST);
        self.0
    }
}
