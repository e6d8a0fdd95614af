//! Progress of filling a guest's memory.

use serde::Serialize;

/// State of filling a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FillState {
    /// Pages are being read.
    #[default]
    Filling,
    /// All pages are present.
    Completed,
    /// Some pages cannot be read. The guest runs as long as it does not need them. A vCPU that
    /// needs one sleeps for ever.
    Failed,
    /// The filling was stopped before all pages were present.
    Stopped,
}

/// Progress of a memory that is filled while its guest runs.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct RestoreProgress {
    /// State of the filling.
    pub state: FillState,
    /// Number of pages with content in the snapshot.
    pub pages: u64,
    /// Number of these pages that are in memory.
    pub placed: u64,
    /// Number of faults on pages of zeros, or on pages that were placed at the same moment.
    pub zero_pages: u64,
    /// Number of times that a thread waited for a page.
    pub faults: u64,
    /// Number of pages that cannot be read.
    pub failed_pages: u64,
    /// The first of these pages, and why it cannot be read.
    pub error: Option<String>,
    /// Histogram of the time from the notice of a fault until its page is in memory: number of
    /// faults below 1 us, 2 us, 4 us, and so on. Faults on pages that were known to be zeros are
    /// not counted.
    pub hist_us: Vec<u64>,
}
