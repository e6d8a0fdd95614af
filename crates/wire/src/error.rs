//! Errors of encoded bytes, and the reasons for which a peer refuses a migration.

use serde::{Deserialize, Serialize};

/// Error of bytes that do not follow the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The stream does not start with the bytes of this protocol.
    #[error("the peer does not speak the vmferry protocol (its first bytes are {0:02x?})")]
    NotVmferry([u8; 8]),
    /// The checksum of a header, a table or a control message is wrong, so the rest of the stream
    /// cannot be decoded.
    #[error("the {what} is damaged (its checksum is wrong): the link or the peer corrupts data")]
    Damaged {
        /// Name of the damaged part.
        what: &'static str,
    },
    /// A field has a value that the protocol does not allow.
    #[error("the peer sent {what} = {value}, allowed is {allowed}")]
    Field {
        /// Name of the field.
        what: &'static str,
        /// Value of the field.
        value: u64,
        /// Allowed values.
        allowed: &'static str,
    },
    /// A control message cannot be decoded, or a migration id cannot be parsed.
    #[error("the peer sent a control message that cannot be read: {0}")]
    Message(String),
    /// A message to send is larger than the protocol allows.
    #[error("{what} of {bytes} bytes is too large to send (at most {limit})")]
    TooLarge {
        /// Kind of message.
        what: &'static str,
        /// Size in bytes.
        bytes: usize,
        /// Maximum size in bytes.
        limit: usize,
    },
}

/// Reason for a refusal, which messages encode as a byte.
///
/// A code that only a newer peer knows is decoded as [`Other`](Self::Other). Otherwise an unknown
/// code would make a message unreadable that decides the owner of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u8", from = "u8")]
#[non_exhaustive]
pub enum RefusalCode {
    /// A reason without a code of its own.
    Other,
    /// Source and target have no protocol version in common.
    Version,
    /// The peer requires a feature that this build does not know.
    Feature,
    /// The target is already receiving a guest.
    Busy,
    /// The machines of source and target differ.
    Machine,
    /// The target did not give out the token of a channel, or does not know the migration id.
    Token,
    /// A message is not allowed at this point of the migration.
    Protocol,
    /// The device state cannot be loaded.
    State,
    /// Pages arrived with a digest mismatch.
    Memory,
    /// The operator or a policy cancelled the migration.
    Cancelled,
    /// The peer was silent for too long.
    Timeout,
    /// The connection is not encrypted, and the peer requires encryption.
    Encryption,
    /// Source and target do not use the same arbiter.
    Fence,
}

impl RefusalCode {
    /// Returns the byte that encodes this code. The byte is never 0, because 0 in a
    /// [`HelloReply`](crate::HelloReply) means that the channel is accepted.
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

    /// Returns the code that `byte` encodes, or [`RefusalCode::Other`] if this version does not
    /// know it.
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
            Self::Busy => "the target is already receiving a guest",
            Self::Machine => "the machines differ",
            Self::Token => "the channel does not belong to this migration",
            Self::Protocol => "a message is not allowed at this point of the migration",
            Self::State => "the device state cannot be loaded",
            Self::Memory => "pages arrived with a digest mismatch",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timed out",
            Self::Encryption => "the peer takes encrypted connections only: configure a certificate",
            Self::Fence => "source and target do not use the same arbiter: configure the same arbiter on both, or on neither",
        })
    }
}

impl RefusalCode {
    /// Returns the text of the code followed by `detail`. The text of [`Other`](Self::Other) is
    /// omitted if there is a detail, because the detail says more.
    fn with_detail(self, detail: &str) -> String {
        if self == Self::Other && !detail.is_empty() {
            detail.to_owned()
        } else {
            format!("{self}: {detail}")
        }
    }
}

/// Reason for which a peer does not continue a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}", .code.with_detail(.detail))]
pub struct Refusal {
    /// Code, for programs.
    pub code: RefusalCode,
    /// Text for the operator that describes the cause and the remedy. When a text from a peer is
    /// decoded, it is cut to [`MAX_DETAIL_CHARS`] characters. Control characters, which could move
    /// the cursor of a terminal, are replaced.
    #[serde(deserialize_with = "printable")]
    pub detail: String,
}

/// Maximum number of characters that are kept of [`Refusal::detail`] when it comes from a peer.
pub const MAX_DETAIL_CHARS: usize = 1000;

/// Decodes a text from a peer, of which only the UTF-8 encoding has been checked before.
fn printable<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    let printed = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    Ok(text.chars().take(MAX_DETAIL_CHARS).map(printed).collect())
}

impl Refusal {
    /// Creates a refusal with the given code and text.
    pub fn new(code: RefusalCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into() }
    }
}
