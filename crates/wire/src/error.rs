//! What can be wrong with bytes, and how a side says no.

use serde::{Deserialize, Serialize};

/// Bytes that are no message of this protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The stream does not start as ours do.
    #[error("the peer does not speak the vmferry protocol (its first bytes are {0:02x?})")]
    NotVmferry([u8; 8]),
    /// A checksum over a header, a table or a control message is wrong: the stream is broken.
    #[error("the {what} is damaged (its checksum is wrong): the link or the peer corrupts data")]
    Damaged {
        /// Which part.
        what: &'static str,
    },
    /// A field has a value that the protocol does not allow.
    #[error("the peer sent {what} = {value}, allowed is {allowed}")]
    Field {
        /// Which field.
        what: &'static str,
        /// What it had.
        value: u64,
        /// What it may have.
        allowed: &'static str,
    },
    /// A control message does not decode.
    #[error("the peer sent a control message that cannot be read: {0}")]
    Message(String),
    /// One of ours is larger than the protocol allows.
    #[error("{what} of {bytes} bytes is too large to send (at most {limit})")]
    TooLarge {
        /// What it is.
        what: &'static str,
        /// Its size in bytes.
        bytes: usize,
        /// The most that may be sent.
        limit: usize,
    },
}

/// Why a side refuses, as a small code that another version can still understand: in a message it is its byte too, and a code that
/// only the peer knows must not make a message that says who owns the guest unreadable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u8", from = "u8")]
#[non_exhaustive]
pub enum RefusalCode {
    /// Anything that has no code of its own.
    Other,
    /// No common protocol version.
    Version,
    /// A feature that the peer insists on is unknown here.
    Feature,
    /// The target is already taking a guest.
    Busy,
    /// The machines differ.
    Machine,
    /// A channel's token or migration id is not one that was given out.
    Token,
    /// A message that does not fit this moment.
    Protocol,
    /// The device state cannot be loaded.
    State,
    /// Pages did not arrive as they were sent.
    Memory,
    /// A person or a policy said stop.
    Cancelled,
    /// Nothing was heard for too long.
    Timeout,
    /// The connection is plain, and must be encrypted.
    Encryption,
    /// The two sides would not ask the same fence who owns a guest of which nobody knows.
    Fence,
}

impl RefusalCode {
    /// The code's byte in a [`crate::HelloReply`]; 0 there means yes.
    #[must_use]
    pub fn byte(self) -> u8 {
        match self {
            Self::Other => 1,
            Self::Version => 2,
            Self::Feature => 3,
            Self::Busy => 4,
            Self::Machine => 5,
            Self::Token => 6,
            Self::Protocol => 7,
            Self::State => 8,
            Self::Memory => 9,
            Self::Cancelled => 10,
            Self::Timeout => 11,
            Self::Encryption => 12,
            Self::Fence => 13,
        }
    }

    /// The code of byte `byte`; codes of a later version read as [`RefusalCode::Other`].
    #[must_use]
    pub fn from_byte(byte: u8) -> Self {
        match byte {
            2 => Self::Version,
            3 => Self::Feature,
            4 => Self::Busy,
            5 => Self::Machine,
            6 => Self::Token,
            7 => Self::Protocol,
            8 => Self::State,
            9 => Self::Memory,
            10 => Self::Cancelled,
            11 => Self::Timeout,
            12 => Self::Encryption,
            13 => Self::Fence,
            _ => Self::Other,
        }
    }
}

impl From<RefusalCode> for u8 {
    fn from(code: RefusalCode) -> Self {
        code.byte()
    }
}

impl From<u8> for RefusalCode {
    fn from(byte: u8) -> Self {
        Self::from_byte(byte)
    }
}

impl std::fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Other => "refused",
            Self::Version => "no common protocol version",
            Self::Feature => "a required feature is missing",
            Self::Busy => "it is already taking a guest",
            Self::Machine => "the machines differ",
            Self::Token => "the channel does not belong to this migration",
            Self::Protocol => "a message came at the wrong moment",
            Self::State => "the device state cannot be loaded",
            Self::Memory => "pages did not arrive as they were sent",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timed out",
            Self::Encryption => "it takes encrypted connections only: give this side a certificate",
            Self::Fence => "the two sides do not have the same fence: give both the same fence, or neither",
        })
    }
}

impl RefusalCode {
    /// Returns `detail`, behind what the code says. [`Other`](Self::Other) says nothing that the detail does not.
    fn with_detail(self, detail: &str) -> String {
        if self == Self::Other && !detail.is_empty() {
            detail.to_owned()
        } else {
            format!("{self}: {detail}")
        }
    }
}

/// The reason why a side does not go on: it refuses, or something failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}", .code.with_detail(.detail))]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people: what failed, and what to do. From a peer at most [`MAX_DETAIL_CHARS`] characters of it are taken,
    /// and none that could move a terminal's cursor.
    #[serde(deserialize_with = "printable")]
    pub detail: String,
}

/// Most characters that are taken of a peer's reason.
pub const MAX_DETAIL_CHARS: usize = 1000;

/// Reads a text of a peer's, of which nothing is known but that it is UTF-8.
fn printable<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    let printed = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    Ok(text.chars().take(MAX_DETAIL_CHARS).map(printed).collect())
}

impl Refusal {
    /// A refusal for `detail`.
    pub fn new(code: RefusalCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into() }
    }
}
