//! What can go wrong with QEMU.

use std::io;
use std::time::Duration;

/// What stopped a run under QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QemuError {
    /// QEMU cannot run here at all: a case for `skipped`.
    #[error("{0}")]
    Unavailable(String),
    /// A system call failed.
    #[error("QEMU: cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// QEMU refused a command.
    #[error("QEMU ({side}) refused {command}: {description}")]
    Refused {
        /// Which of the two.
        side: &'static str,
        /// The QMP command.
        command: String,
        /// QEMU's own words.
        description: String,
    },
    /// QEMU's answer is not what its protocol says.
    #[error(
        "QEMU ({side}) answered {command} with {answer}, in which {missing} is missing; is its version supported?"
    )]
    Answer {
        /// Which of the two.
        side: &'static str,
        /// The QMP command.
        command: String,
        /// The answer.
        answer: String,
        /// The field that was looked for.
        missing: &'static str,
    },
    /// Something did not happen in time.
    #[error("QEMU ({side}): {what} did not come within {limit:?}; {detail}")]
    Timeout {
        /// Which of the two.
        side: &'static str,
        /// What was awaited.
        what: &'static str,
        /// How long.
        limit: Duration,
        /// What QEMU and the guest said last.
        detail: String,
    },
    /// The process ended.
    #[error("QEMU ({side}) ended early; {detail}")]
    Ended {
        /// Which of the two.
        side: &'static str,
        /// What QEMU and the guest said last.
        detail: String,
    },
    /// The migration did not complete.
    #[error("QEMU's migration ended as {status}: {detail}")]
    Migration {
        /// QEMU's name for the state.
        status: String,
        /// QEMU's own words.
        detail: String,
    },
    /// The guest found damage or gave up.
    #[error("the guest under QEMU reported: {0}")]
    Guest(String),
    /// The run was asked for something that cannot be.
    #[error("QEMU: {0}")]
    Usage(String),
}

impl QemuError {
    /// For `map_err`: a failed system call while doing `action`.
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| QemuError::Io { action, source }
    }
}
