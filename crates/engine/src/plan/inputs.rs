//! Inputs of a plan: the measured figures of guest and link.

use super::content::Content;
use super::curve::CurvePoint;
use serde::{Deserialize, Serialize};

/// Figures of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bandwidth of all channels together in bytes per second, measured with frames such as a pass
    /// sends.
    pub bytes_per_s: f64,
    /// Standard deviation of `bytes_per_s`, divided by `bytes_per_s`.
    pub spread: f64,
    /// Round trip in seconds on the idle link.
    pub round_trip_s: f64,
    /// Time by which the round trip is longer while a pass is sent, in seconds, because of the
    /// queue on the network path.
    #[serde(default)]
    pub queue_s: f64,
    /// CPU time in seconds that a sender needs per page. Zero if it was not measured.
    pub cpu_page_s: f64,
    /// Time from connecting a channel to its first byte, in seconds.
    pub connect_s: f64,
    /// True if the link was measured, false if the caller has given its rate.
    pub measured: bool,
}

impl Link {
    /// Returns the figures of a link with the given bandwidth in bytes per second, with typical
    /// values for all other figures.
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

/// Moment at which a pass write-protects a page again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// Immediately before the page is read. A page that the guest writes between the harvest and
    /// that moment is sent once.
    BeforeRead,
    /// At the harvest. A page that the guest writes between the harvest and the moment at which the
    /// page is read is sent twice.
    AtHarvest,
}

/// Costs that do not depend on the link. All times are in seconds.
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
    /// Duration of one harvest of dirty pages.
    pub harvest_s: f64,
    /// Time to start the tracker.
    pub start_s: f64,
    /// Time to write-protect a page.
    pub protect_page_s: f64,
    /// Time that the guest loses at its first write to a protected page.
    pub fault_s: f64,
}

impl Costs {
    /// Returns the time in seconds to stop the guest on the source and to load its state on the
    /// target.
    #[must_use]
    pub fn stopping_s(&self) -> f64 {
        self.pause_s + self.quiesce_s + 2.0 * self.save_s
    }
}

/// Part of the guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryPart {
    /// Number of pages that the guest has touched at least once.
    pub touched: f64,
    /// Number of pages that the guest wrote in the longest window.
    pub dirty: f64,
}

/// All measured figures of a guest and a link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// Number of pages of the guest's memory.
    pub memory_pages: u64,
    /// Number of pages that the guest has touched at least once, and that may therefore contain
    /// anything but zeros.
    pub touched_pages: u64,
    /// Number of touched pages that contain only zeros, estimated from a sample.
    pub zero_pages: u64,
    /// Number of touched pages that the guest reports as free.
    pub free_pages: u64,
    /// Content of the pages, for the prediction of encoded pages.
    #[serde(default)]
    pub content: Content,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Number of pages that the guest dirtied within each window.
    pub curve: Vec<CurvePoint>,
    /// Mean length, in pages, of the runs of adjacent pages that the guest dirtied in a short
    /// window.
    pub run_pages: f64,
    /// Distribution of the touched and the dirty pages over memory, in the order in which a pass
    /// sends the parts.
    #[serde(rename = "places")]
    pub parts: Vec<MemoryPart>,
    /// Moment at which a pass protects a page again.
    pub protection: Protection,
    /// Number of adjacent pages whose dirty pages are protected together
    /// ([`crate::Protect::chunk_pages`]).
    pub chunk_pages: u64,
    /// Figures of the link.
    pub link: Link,
    /// Costs that do not depend on the link.
    pub costs: Costs,
}

impl Inputs {
    /// Returns the number of touched pages in the parts of memory that the guest writes to, but at
    /// least 1.
    pub(crate) fn written_over(&self) -> f64 {
        let written = self.parts.iter().filter(|part| part.dirty > 0.0);
        written.map(|part| part.touched).sum::<f64>().max(1.0)
    }
}
