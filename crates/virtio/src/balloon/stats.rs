//! Statistics of the guest's memory (5.5.6.3).

use super::control::BalloonState;
use super::metrics::add;
use crate::device::Progress;
use crate::queue::{Buffer, PORTION, RingError, VirtQueue};
use crate::signals::Signals;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use vm_memory::GuestMemory;

/// Names of the tags, in order: the specification's, then those that Linux 6.12 added to its
/// header.
const NAMES: [&str; 16] = [
    "swap_in",
    "swap_out",
    "major_faults",
    "minor_faults",
    "free",
    "total",
    "available",
    "caches",
    "hugetlb_allocations",
    "hugetlb_failures",
    "oom_kills",
    "allocation_stalls",
    "async_scans",
    "direct_scans",
    "async_reclaims",
    "direct_reclaims",
];

/// Size of a statistic, in bytes: a 16-bit tag and a 64-bit value.
const ENTRY: usize = 10;
/// Maximum size of statistics that is read, in bytes: each tag several times.
const MOST: usize = 64 * ENTRY;

/// Latest statistics that the guest reported. Sizes are in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    values: [Option<u64>; NAMES.len()],
}

impl GuestStats {
    /// Returns the statistics that the guest reported, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        NAMES.iter().zip(&self.values).filter_map(|(name, value)| Some((*name, (*value)?)))
    }

    /// Returns the statistic `name`, if the guest reported it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u64> {
        self.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }

    /// Parses entries in any order. Unknown tags are ignored. The last entry of a tag counts.
    fn parse(bytes: &[u8]) -> Self {
        let mut stats = Self::default();
        for entry in bytes.as_chunks::<ENTRY>().0 {
            let [tag_low, tag_high, value @ ..] = *entry;
            let tag = usize::from(u16::from_le_bytes([tag_low, tag_high]));
            if let Some(slot) = stats.values.get_mut(tag) {
                *slot = Some(u64::from_le_bytes(value));
            }
        }
        stats
    }
}

/// Serves the statistics queue. The device keeps the driver's buffer until it wants new statistics.
///
/// The function takes a buffer, reads it and keeps it. It gives the kept buffer back if new
/// statistics are wanted, or if the driver breaks the rules and adds a second buffer.
pub(super) fn serve<M: GuestMemory>(
    shared: &BalloonState,
    signals: &Signals,
    (held, buffer, bytes): (&mut Option<u16>, &mut Buffer, &mut Vec<u8>),
    queue: &mut VirtQueue,
    memory: &M,
) -> Result<Progress, RingError> {
    let mut given = false;
    let mut progress = Progress::More;
    for _ in 0..PORTION {
        if !queue.pop(memory, buffer)? {
            progress = queue.empty(memory)?;
            if progress == Progress::Done {
                break;
            }
            continue;
        }
        let read = buffer.read(memory, MOST, bytes);
        match read {
            Ok(()) if bytes.len().is_multiple_of(ENTRY) => {
                add(&shared.metrics.stats, 1);
                shared.set_stats(GuestStats::parse(bytes));
            }
            _ => shared.malformed("statistics"),
        }
        if let Some(second) = held.replace(buffer.head()) {
            queue.give_back(memory, second, 0)?;
            given = true;
        }
    }
    if let Some(head) = *held
        && shared.stats_wanted.swap(false, Ordering::AcqRel)
    {
        queue.give_back(memory, head, 0)?;
        *held = None;
        given = true;
    }
    if given && queue.wants_interrupt(memory)? {
        signals.used_buffer();
    }
    Ok(progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_any_order_and_unknown_ones_are_ignored() {
        let mut bytes = Vec::new();
        for (tag, value) in [(4u16, 7u64), (999, 1), (0, u64::MAX), (4, 8), (15, 3)] {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        let stats = GuestStats::parse(&bytes);
        assert_eq!(
            stats.iter().collect::<Vec<_>>(),
            [("swap_in", u64::MAX), ("free", 8), ("direct_reclaims", 3)]
        );
        assert_eq!((stats.get("free"), stats.get("total")), (Some(8), None));
    }
}
