//! What a session says to an arbiter, and what the arbiter answers.
//!
//! An arbiter keeps one register for each migration, outside both hosts. It decides who owns the guest
//! where neither side can know. The engine asks it; a session only says what to ask.

use std::fmt;
use std::time::Duration;

/// A side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The side that the guest leaves.
    Source,
    /// The side that the guest comes to.
    Target,
}

/// Request to an arbiter about a migration whose register was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Word {
    /// Reads the register.
    Look,
    /// Changes an open register to this side.
    Claim(Side),
    /// Notes in a register that holds the target that the target runs the guest.
    Runs,
    /// Changes the register to the source. Said by a target that has not run the guest and never will.
    GiveBack,
}

/// Content of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ruling {
    /// Neither side has claimed the guest.
    Open,
    /// The guest is the source's.
    Source,
    /// The guest is the target's.
    Target {
        /// The target has said that it runs it.
        runs: bool,
    },
}

impl fmt::Display for Ruling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "has given it to neither side",
            Self::Source => "has given it to the source",
            Self::Target { runs: false } => "has given it to the target, which has not said that it runs it",
            Self::Target { runs: true } => "has given it to the target, which runs it",
        })
    }
}

/// Reason for which an arbiter has not decided.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArbiterError {
    /// The arbiter gave no answer, or none that can be understood. It may or may not have heard.
    #[error("the fence gave no answer: {0}")]
    Unreachable(String),
    /// The arbiter has no register for this migration, or one that it does not understand.
    #[error("the fence cannot decide: {0}")]
    NoRegister(String),
}

/// The time until a word is said again that was not answered.
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
