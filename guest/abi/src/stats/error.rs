//! Why a statistics page could not be read.

use core::fmt;

/// Why a statistics page could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatsError {
    /// There is no magic yet: the guest has not come so far.
    NotYet,
    /// Another layout, or no statistics page at all.
    Invalid {
        /// The word that cannot be.
        word: usize,
        /// Its value.
        value: u64,
    },
    /// The vCPU was writing its block at every attempt: it is paused there, or gone. Try again when it runs.
    Busy {
        /// Index of the vCPU.
        cpu: usize,
    },
    /// The page has not come yet: the guest runs before all of its memory is here.
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
                "the guest's statistics page has not come yet: its memory is still being moved; read it later",
            ),
            Self::Busy { cpu } => {
                write!(f, "vCPU {cpu} stopped while writing its statistics; read them when it runs again")
            }
        }
    }
}

impl core::error::Error for StatsError {}
