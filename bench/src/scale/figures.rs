//! Results of one run, and the figures that the bench derives from them.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::reaper::to_f64;

/// Memory and processor time of one end of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct End {
    /// Processor time of the process without its vCPU threads, from the command to the end.
    pub cpu: Duration,
    /// Resident bytes of the process before the migration, without guest memory.
    pub base: u64,
    /// Resident bytes that the migration added at its peak, without guest memory.
    pub added: u64,
    /// Bytes that the page tables of the process grew by at their peak.
    pub page_tables: u64,
}

/// Memory that each of several guests adds to the host, and its start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Neighbours {
    /// Mean time from the start of the process until its guest ran its workload.
    pub start: Duration,
    /// Mean of the proportional set sizes without guest memory, in bytes.
    pub proportional: f64,
    /// Largest of these sizes, in bytes.
    pub largest: f64,
    /// Mean memory that only the process of the guest maps, without guest memory, in bytes.
    pub private: f64,
    /// Mean size of the page tables of the process, in bytes.
    pub page_tables: f64,
    /// Available memory that the host lost for each guest, without guest memory, in bytes. It
    /// includes the memory of the kernel, and can be negative because other processes change it.
    pub host: f64,
}

/// Result of one run of one point.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    /// Total time in ms.
    pub total_ms: f64,
    /// Downtime in ms.
    pub downtime_ms: f64,
    /// Parts of the downtime in ms, by their names in the report. Each name ends with `_ms`.
    pub parts: BTreeMap<String, f64>,
    /// Time from the start of the migration to the first page, in ms.
    pub setup_ms: f64,
    /// Time that the tracker needed to start, in ms. `None` if the report does not have it.
    pub enable_tracking_ms: Option<f64>,
    /// Duration of each harvest in ms, in order.
    pub harvests_ms: Vec<f64>,
    /// Passes over the dirty pages.
    pub passes: u64,
    /// Pages that were sent with their content.
    pub pages: u64,
    /// Source of the migration.
    pub source: End,
    /// Target of the migration.
    pub target: End,
    /// Guests beside the guest that moved. `None` if there were none.
    pub neighbours: Option<Neighbours>,
}

/// Prefix of the figures that are parts of the downtime.
pub(super) const PART: &str = "part_";

impl Run {
    /// Returns the share of the downtime that its parts explain. It is not finite without a
    /// downtime.
    pub(super) fn explained(&self) -> f64 {
        self.parts.values().sum::<f64>() / self.downtime_ms
    }

    /// Returns the figures by name. Each name ends with its unit.
    pub(super) fn figures(&self) -> BTreeMap<String, f64> {
        let mib = |bytes: u64| to_mib(to_f64(bytes));
        let mut figures = vec![
            ("total_ms", self.total_ms),
            ("downtime_ms", self.downtime_ms),
            ("explained_share", self.explained()),
            ("setup_ms", self.setup_ms),
            ("passes", to_f64(self.passes)),
            ("data_mib", mib(self.pages * 4096)),
            // Each end has a limit of its own, so the larger one counts.
            ("bookkeeping_mib", mib(self.source.added.max(self.target.added))),
            ("source_cpu_ms", millis(self.source.cpu)),
            ("source_base_mib", mib(self.source.base)),
            ("source_added_mib", mib(self.source.added)),
            ("source_page_tables_mib", mib(self.source.page_tables)),
            ("target_cpu_ms", millis(self.target.cpu)),
            ("target_base_mib", mib(self.target.base)),
            ("target_added_mib", mib(self.target.added)),
            ("target_page_tables_mib", mib(self.target.page_tables)),
        ];
        figures.extend(self.enable_tracking_ms.map(|ms| ("enable_tracking_ms", ms)));
        if let Some(last) = self.harvests_ms.last() {
            let count = to_f64(self.harvests_ms.len() as u64);
            figures.push(("harvest_mean_ms", self.harvests_ms.iter().sum::<f64>() / count));
            figures.push(("harvest_max_ms", self.harvests_ms.iter().copied().fold(0.0, f64::max)));
            figures.push(("harvest_last_ms", *last));
        }
        if let Some(neighbours) = &self.neighbours {
            figures.extend([
                ("start_ms", millis(neighbours.start)),
                ("overhead_mib", to_mib(neighbours.proportional)),
                ("overhead_max_mib", to_mib(neighbours.largest)),
                ("private_mib", to_mib(neighbours.private)),
                ("page_tables_mib", to_mib(neighbours.page_tables)),
                ("host_mib", to_mib(neighbours.host)),
            ]);
        }
        let parts = self.parts.iter().map(|(name, ms)| (format!("{PART}{name}"), *ms));
        figures.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(parts).collect()
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn to_mib(bytes: f64) -> f64 {
    bytes / to_f64(1 << 20)
}
