//! Progress of reading a guest's memory from a file.

use serde::Serialize;

/// State of reading a guest's memory from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FillState {
    /// Pages are being read.
    #[default]
    Filling,
    /// All pages are present.
    Completed,
    /// Some pages cannot be read. The guest runs for as long as it does not need these pages. A
    /// vCPU that needs one of them sleeps for ever.
    Failed,
    /// The reading was stopped before all pages were present.
    Stopped,
}

/// Progress of reading a guest's memory from a file while the guest runs.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct RestoreProgress {
    /// State of the reading.
    pub state: FillState,
    /// Number of pages with content in the file.
    pub pages: u64,
    /// Number of these pages that have been placed in memory.
    pub placed: u64,
    /// Number of faults on pages of zeros, or on pages that were placed while the fault was being
    /// read.
    pub zero_pages: u64,
    /// Number of times that a thread waited for a page, including the faults that `zero_pages`
    /// counts.
    pub faults: u64,
    /// Number of pages that cannot be read.
    pub failed_pages: u64,
    /// The first of these failures: the page, and the reason why it cannot be read.
    pub error: Option<String>,
    /// Histogram of the time from reading a fault until its page is in memory: number of faults
    /// below 1 us, from 1 us to below 2 us, from 2 us to below 4 us, and so on. Faults that
    /// `zero_pages` counts are not included.
    pub hist_us: Vec<u64>,
}
