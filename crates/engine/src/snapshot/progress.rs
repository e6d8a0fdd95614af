//! How the filling of a guest's memory is getting on.

use serde::Serialize;

/// Where the filling of a guest's memory stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FillState {
    /// Pages are on their way.
    #[default]
    Filling,
    /// All are there.
    Completed,
    /// Some cannot be had. The guest runs, as long as it does not need them; a vCPU that does sleeps.
    Failed,
    /// Somebody ended it before all were there.
    Stopped,
}

/// A look at memory that is filled while its guest runs.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct LazyProgress {
    /// Where it stands.
    pub state: FillState,
    /// Pages with content that there are.
    pub pages: u64,
    /// Those of them that are in memory.
    pub placed: u64,
    /// Faults on pages of zeros, or on pages that came in the same moment.
    pub zero_pages: u64,
    /// Times that somebody waited for a page.
    pub faults: u64,
    /// Pages that cannot be had.
    pub failed_pages: u64,
    /// Why the first of them cannot, and which it is.
    pub error: Option<String>,
    /// From hearing of a fault to its page being in memory: how many took less than 1 us, 2 us, 4 us, and so on. Without
    /// those on pages of zeros that were known to be such.
    pub hist_us: Vec<u64>,
}
