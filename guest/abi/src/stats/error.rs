//! Errors of reading a statistics page.

use core::fmt;

/// Reason for which a statistics page could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatsError {
    /// There is no magic number yet: the guest has not started far enough.
    NotYet,
    /// The page has another layout, or is not a statistics page.
    Invalid {
        /// Index of the invalid word.
        word: usize,
        /// Value of the word.
        value: u64,
    },
    /// The vCPU was writing its block at every attempt, because it is paused there or gone. Try
    /// again when it runs.
    Busy {
        /// Index of the vCPU.
        cpu: usize,
    },
    /// The page is missing: the guest runs before all of its memory has arrived.
    Elsewhere,
}

impl fmt::Display for StatsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotYet => {
                f.write_str("the guest has not written its statistics page yet; wait for it to boot")
            }
            Self::Invalid { word, value } => {
                write!(f, "word {word} of the statistics page is {value:#x}: not a guest of this version")
            }
            Self::Elsewhere => f.write_str(
                "the guest's statistics page is missing: guest memory is still arriving; read it later",
            ),
            Self::Busy { cpu } => {
                write!(f, "vCPU {cpu} stopped while writing its statistics; read them when it runs again")
            }
        }
    }
}

impl core::error::Error for StatsError {}
