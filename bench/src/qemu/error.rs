//! Errors of runs under QEMU.

use std::io;
use std::time::Duration;

/// Error of a run under QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QemuError {
    /// QEMU cannot run on this host. The case is skipped.
    #[error("{0}")]
    Unavailable(String),
    /// A system call failed.
    #[error("QEMU: cannot {action}: {source}")]
    Io {
        /// Action that failed, for the message.
        action: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// QEMU refused a command.
    #[error("QEMU ({side}) refused {command}: {description}")]
    Refused {
        /// Side: `source` or `destination`.
        side: &'static str,
        /// The QMP command.
        command: String,
        /// QEMU's description of the error.
        description: String,
    },
    /// QEMU's answer violates its protocol.
    #[error(
        "QEMU ({side}) answered {command} with {answer}, in which {missing} is missing; is its version supported?"
    )]
    Answer {
        /// Side: `source` or `destination`.
        side: &'static str,
        /// The QMP command.
        command: String,
        /// The answer.
        answer: String,
        /// Field that is missing in the answer.
        missing: &'static str,
    },
    /// An expected event did not happen in time.
    #[error("QEMU ({side}): timed out after {limit:?} while waiting for {what}; {detail}")]
    Timeout {
        /// Side: `source` or `destination`.
        side: &'static str,
        /// Event that was awaited.
        what: &'static str,
        /// Time limit.
        limit: Duration,
        /// Last output of QEMU and the guest.
        detail: String,
    },
    /// The process ended early.
    #[error("QEMU ({side}) ended early; {detail}")]
    Ended {
        /// Side: `source` or `destination`.
        side: &'static str,
        /// Last output of QEMU and the guest.
        detail: String,
    },
    /// The migration did not complete.
    #[error("QEMU's migration ended as {status}: {detail}")]
    Migration {
        /// QEMU's name for the state.
        status: String,
        /// QEMU's description of the error.
        detail: String,
    },
    /// The guest reported damage or gave up.
    #[error("the guest under QEMU reported: {0}")]
    Guest(String),
    /// The caller asked for an impossible run.
    #[error("QEMU: {0}")]
    Usage(String),
}

impl QemuError {
    /// Returns a closure for `map_err` that names the `action` that failed.
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| QemuError::Io { action, source }
    }
}
