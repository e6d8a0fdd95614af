//! What can fail.

use vmferry_guest_abi::{LayoutError, WorkloadError};

/// What failed, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options ask for something impossible.
    #[error("{0}")]
    Options(String),
    /// The host gave no memory.
    #[error("cannot map {bytes} bytes of guest memory: {source}; give the guest less, or free some")]
    Map {
        /// How much was asked for.
        bytes: u64,
        /// Why.
        source: std::io::Error,
    },
    /// The workload does not fit the guest.
    #[error("the workload does not fit: {0}")]
    Workload(LayoutError),
    /// The host refused a thread.
    #[error("the host refused a thread: {0}")]
    Thread(std::io::Error),
    /// A thread of the guest that does not stop.
    #[error(
        "thread {cpu} of the guest did not pause within {} ms; does it wait for a page that does not come?",
        .within.as_millis()
    )]
    Unresponsive {
        /// Which.
        cpu: usize,
        /// How long it was waited for.
        within: std::time::Duration,
    },
    /// A step that does not fit the guest's state.
    #[error("cannot {what}: {why}")]
    WrongState {
        /// What was asked.
        what: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// Saved state that is not one of ours.
    #[error("the saved state cannot be loaded: {0}")]
    State(String),
    /// The saved workload.
    #[error("the saved workload cannot be run: {0}")]
    SavedWorkload(WorkloadError),
}
