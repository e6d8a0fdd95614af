//! Errors of a process guest.

use vmferry_core::RegionId;
use vmferry_guest_abi::{LayoutError, WorkloadError};

/// Error of a process guest. Where the operator can do something about it, the message says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options contradict each other or exceed a limit.
    #[error("{0}")]
    Options(String),
    /// The host cannot map the guest's memory.
    #[error(
        "cannot map {bytes} bytes of guest memory: {source}; give the guest less memory, or free memory on the host"
    )]
    Map {
        /// Size of the memory that was requested, in bytes.
        bytes: u64,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The guest's memory is anonymous.
    #[error("the guest's memory is anonymous, so that no other process can map it; run the guest on a memfd")]
    NotShared,
    /// The memory of another process does not contain this region.
    #[error("the memory of the other process does not fit: {0} is missing, or has another length")]
    OtherMemory(RegionId),
    /// The guest's memory is shared with a branch, so that no other process can take it.
    #[error("the guest's memory is shared with a branch; move the guest by precopy")]
    Branched,
    /// The memory of another process cannot be mapped.
    #[error(transparent)]
    Take(#[from] vmferry_dirty::TrackerError),
    /// The guest's memory cannot be allocated before it is used.
    #[error(transparent)]
    Populate(#[from] vmferry_dirty::PopulateError),
    /// The workload does not fit into the guest's memory or number of vCPUs.
    #[error("the workload does not fit: {0}")]
    Workload(LayoutError),
    /// The host cannot create a thread.
    #[error("cannot create a thread of the guest: {0}")]
    Thread(std::io::Error),
    /// A thread of the guest has not paused in time.
    #[error(
        "thread {cpu} of the guest did not pause within {} ms; it may be waiting for a missing page",
        .within.as_millis()
    )]
    Unresponsive {
        /// Index of the thread.
        cpu: usize,
        /// Time for which the caller waited.
        within: std::time::Duration,
    },
    /// The operation is not possible in the present state of the guest.
    #[error("cannot {what}: {why}")]
    WrongState {
        /// Operation that was requested.
        what: &'static str,
        /// Reason why the operation is not possible.
        why: &'static str,
    },
    /// The saved state does not belong to a process guest with these options.
    #[error("the saved state cannot be loaded: {0}")]
    State(String),
    /// The saved workload cannot be parsed.
    #[error("the saved workload cannot be run: {0}")]
    SavedWorkload(WorkloadError),
}
