//! What a plan is made of: everything that was measured.

use super::curve::CurvePoint;
use serde::{Deserialize, Serialize};

/// What a link carries.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes a second on all channels together, in frames as a pass sends them.
    pub bytes_per_s: f64,
    /// How sure that is: one standard deviation, as a share of it.
    pub spread: f64,
    /// There and back, with nothing else on the way, in seconds.
    pub round_trip_s: f64,
    /// How much longer while a pass is sent: what waits on the way, in seconds.
    #[serde(default)]
    pub queue_s: f64,
    /// CPU time of a sender for a page, in seconds; 0 if it was not measured.
    pub cpu_page_s: f64,
    /// From connecting a channel to its first byte, in seconds.
    pub connect_s: f64,
    /// Whether it was measured, or somebody said so.
    pub measured: bool,
}

impl Link {
    /// A link that somebody knows.
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

/// When a page is protected anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// Right before it is read: what was written between the harvest and its turn is sent once.
    BeforeRead,
    /// At the harvest: that is sent twice.
    AtHarvest,
}

/// What does not depend on the link, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Stopping all vCPUs.
    pub pause_s: f64,
    /// Bringing I/O to rest.
    #[serde(default)]
    pub settle_s: f64,
    /// Saving the device state; loading it is taken to be as long.
    pub save_s: f64,
    /// How large that state is, in bytes.
    pub state_bytes: f64,
    /// Collecting the dirty pages once.
    pub harvest_s: f64,
    /// Starting to track.
    pub start_s: f64,
    /// Protecting a page.
    pub protect_page_s: f64,
    /// What the guest pays for its first write to a protected page.
    pub fault_s: f64,
}

impl Costs {
    /// Stopping the guest here and loading its state there.
    #[must_use]
    pub fn stopping_s(&self) -> f64 {
        self.pause_s + self.settle_s + 2.0 * self.save_s
    }
}

/// A part of memory, in the order in which a pass sends it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Pages that were ever touched.
    pub touched: f64,
    /// Pages that were written in the longest window.
    pub dirty: f64,
}

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// Pages of the guest.
    pub memory_pages: u64,
    /// Those that may hold anything but zeros.
    pub touched_pages: u64,
    /// Of these, how many are zero all the same, by a sample.
    pub zero_pages: u64,
    /// Of these, how many the guest says are free.
    pub free_pages: u64,
    /// vCPUs.
    pub vcpus: u32,
    /// What the guest dirtied.
    pub curve: Vec<CurvePoint>,
    /// The mean length of the runs in which the pages of a short window lay.
    pub run_pages: f64,
    /// Where.
    pub places: Vec<Place>,
    /// When pages are protected.
    pub protection: Protection,
    /// Pages that lie side by side and are protected together, if they are to be sent: [`crate::Protect::chunk_pages`].
    pub chunk_pages: u64,
    /// What the link carries.
    pub link: Link,
    /// What else it takes.
    pub costs: Costs,
}

impl Inputs {
    /// Over how many pages of memory those that are written are spread.
    pub(crate) fn written_over(&self) -> f64 {
        let written = self.places.iter().filter(|place| place.dirty > 0.0);
        written.map(|place| place.touched).sum::<f64>().max(1.0)
    }
}
