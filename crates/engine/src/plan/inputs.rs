//! Inputs of a plan: all measured figures.

use super::curve::CurvePoint;
use serde::{Deserialize, Serialize};

/// Figures of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes per second on all channels together, in frames as a pass sends them.
    pub bytes_per_s: f64,
    /// Standard deviation of `bytes_per_s`, as a share of it.
    pub spread: f64,
    /// Round trip in seconds, with nothing else on the network path.
    pub round_trip_s: f64,
    /// Increase of the round trip while a pass is sent, in seconds: the queue on the network path.
    #[serde(default)]
    pub queue_s: f64,
    /// CPU time of a sender per page, in seconds. Zero if it was not measured.
    pub cpu_page_s: f64,
    /// Time from connecting a channel to its first byte, in seconds.
    pub connect_s: f64,
    /// True if the link was measured. False if its rate was given by the caller.
    pub measured: bool,
}

impl Link {
    /// Returns the figures of a link whose rate the caller knows, with typical values for the rest.
    #[must_use]
    pub fn given(bytes_per_s: f64) -> Self {
        Self {
            bytes_per_s,
            spread: 0.05,
            round_trip_s: 0.5e-3,
            queue_s: 0.0,
            cpu_page_s: 0.0,
            connect_s: 1e-3,
            measured: false,
        }
    }
}

/// Time at which a pass write-protects a page again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// Right before the page is read. Writes between the harvest and the page's turn are sent once.
    BeforeRead,
    /// At the harvest. Writes between the harvest and the page's turn are sent twice.
    AtHarvest,
}

/// Costs that do not depend on the link, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Time to stop all vCPUs.
    pub pause_s: f64,
    /// Time for I/O to quiesce.
    #[serde(default)]
    #[serde(rename = "settle_s")]
    pub quiesce_s: f64,
    /// Time to save the device state. Loading is assumed to take the same time.
    pub save_s: f64,
    /// Size of the device state in bytes.
    pub state_bytes: f64,
    /// Time of one harvest of dirty pages.
    pub harvest_s: f64,
    /// Time to start the tracker.
    pub start_s: f64,
    /// Time to write-protect a page.
    pub protect_page_s: f64,
    /// Time that the guest loses at its first write to a protected page.
    pub fault_s: f64,
}

impl Costs {
    /// Returns the time to stop the guest on the source and to load its state on the target.
    #[must_use]
    pub fn stopping_s(&self) -> f64 {
        self.pause_s + self.quiesce_s + 2.0 * self.save_s
    }
}

/// Part of memory, in the order in which a pass sends the parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryPart {
    /// Pages that were ever touched.
    pub touched: f64,
    /// Pages that were written in the longest window.
    pub dirty: f64,
}

/// All measured figures of a guest and a link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// Pages of the guest's memory.
    pub memory_pages: u64,
    /// Pages that were ever touched and may contain something else than zeros.
    pub touched_pages: u64,
    /// Touched pages that are zero, estimated from a sample.
    pub zero_pages: u64,
    /// Touched pages that the guest reports as free.
    pub free_pages: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Pages that the guest dirtied within each window.
    pub curve: Vec<CurvePoint>,
    /// Mean length of the runs of adjacent pages among the pages of a short window.
    pub run_pages: f64,
    /// Distribution of the touched and the dirty pages over memory.
    #[serde(rename = "places")]
    pub parts: Vec<MemoryPart>,
    /// Time at which a pass protects pages.
    pub protection: Protection,
    /// Number of adjacent pages that are protected together, if they are to be sent:
    /// [`crate::Protect::chunk_pages`].
    pub chunk_pages: u64,
    /// Figures of the link.
    pub link: Link,
    /// Costs that do not depend on the link.
    pub costs: Costs,
}

impl Inputs {
    /// Returns the number of touched pages in those parts of memory that the guest writes to.
    pub(crate) fn written_over(&self) -> f64 {
        let written = self.parts.iter().filter(|part| part.dirty > 0.0);
        written.map(|part| part.touched).sum::<f64>().max(1.0)
    }
}
