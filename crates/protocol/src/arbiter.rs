//! Requests of a session to an arbiter, and the arbiter's answers.
//!
//! An arbiter keeps one register for each migration, outside both hosts. It decides who owns the
//! guest if neither the source nor the target can know. The engine makes the requests: a session
//! only says which request to make.

use std::fmt;
use std::time::Duration;

/// Source or target of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Host that the guest leaves.
    Source,
    /// Host that receives the guest.
    Target,
}

/// Request to an arbiter about a migration whose register was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ArbiterRequest {
    /// Reads the register.
    Look,
    /// Changes an open register to the source or to the target.
    Claim(Side),
    /// Notes in a register that holds the target that the target runs the guest.
    Runs,
    /// Changes the register to the source. Only a target that has not run the guest and never will
    /// makes this request.
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

/// Reason why an arbiter has not decided.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArbiterError {
    /// The arbiter gave no answer, or one that cannot be decoded. It may or may not have received
    /// the request.
    #[error("the arbiter gave no answer: {0}")]
    Unreachable(String),
    /// The arbiter has no register for this migration, or its content cannot be decoded.
    #[error("the arbiter cannot decide: {0}")]
    NoRegister(String),
}

/// Time until a request is repeated that was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Backoff(Duration);

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(2);

    /// Returns the next time.
    pub(crate) fn next(&mut self) -> Duration {
        self.0 = (self.0 * 2).clamp(Self::FIRST, Self::LONGEST);
        self.0
    }
}
