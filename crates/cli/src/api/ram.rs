//! Memory statistics of `query-migrate`. All members of QMP's type are present, because typed
//! clients demand them.

use serde::Serialize;
use serde_json::Value;
use vmferry_engine::{MigrationState, Progress};

/// Size of a page in bytes.
pub(super) const PAGE: u64 = 4096;

/// QMP's `MigrationRAMStats`. Bytes and pages count from the beginning of the migration, unless the
/// field says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Ram {
    pub(super) transferred: u64,
    /// Bytes that are still to be sent, as far as known.
    pub(super) remaining: u64,
    /// Bytes of guest memory.
    pub(super) total: u64,
    /// Zero pages.
    pub(super) duplicate: u64,
    /// Always 0: QMP has removed this member, and older clients demand it.
    pub(super) skipped: u64,
    /// Pages with content.
    pub(super) normal: u64,
    pub(super) normal_bytes: u64,
    /// Dirty pages per second, while the guest ran at the source.
    pub(super) dirty_pages_rate: u64,
    pub(super) mbps: f64,
    /// Number of passes.
    pub(super) dirty_sync_count: u64,
    pub(super) dirty_sync_missed_zero_copy: u64,
    /// Pages that the target requested.
    pub(super) postcopy_requests: u64,
    pub(super) page_size: u64,
    pub(super) pages_per_second: u64,
    /// Same bytes as in `transferred`, if there are several channels.
    pub(super) multifd_bytes: u64,
    /// Part of `transferred` that was sent while the guest ran at the source.
    pub(super) precopy_bytes: u64,
    /// Part of `transferred` that was sent while the guest was stopped, without postcopy.
    pub(super) downtime_bytes: u64,
    /// Part of `transferred` that was sent after the guest was stopped, in postcopy.
    pub(super) postcopy_bytes: u64,
}

impl Ram {
    /// Returns the statistics of a running migration of a guest with `total` bytes. `multifd` is
    /// the capability.
    pub(super) fn of_progress(progress: &Progress, total: u64, multifd: bool) -> Self {
        let left = progress.left_pages.unwrap_or(progress.remaining_pages);
        let wire = progress.wire_bytes;
        // The channel counters end when the guest is stopped. Later bytes belong to the downtime
        // until the guest runs at the target.
        let precopy = match progress.state {
            MigrationState::Setup | MigrationState::Precopy => wire,
            _ => progress.channel_bytes.iter().sum::<u64>().min(wire),
        };
        let postcopy = matches!(progress.state, MigrationState::Postcopy | MigrationState::PostcopyPaused)
            || progress.runs_on_target;
        let bandwidth = progress.bandwidth.unwrap_or(0.0);
        Self {
            remaining: left * PAGE,
            dirty_pages_rate: whole(progress.dirty_pages_per_s),
            dirty_sync_count: u64::from(progress.pass) + 1,
            mbps: bandwidth * 8e-6,
            pages_per_second: whole(bandwidth) / PAGE,
            precopy_bytes: precopy,
            downtime_bytes: if postcopy { 0 } else { wire - precopy },
            postcopy_bytes: if postcopy { wire - precopy } else { 0 },
            ..Self::of_sent(wire, progress.raw_pages, progress.zero_pages, total, multifd)
        }
    }

    /// Returns the statistics of a migration that has ended.
    pub(super) fn of_report(report: &Value, total: u64, multifd: bool) -> Self {
        let bytes = &report["bytes"];
        let wire = number(&bytes["wire"]);
        let passes = report["passes"].as_array().map_or(&[][..], Vec::as_slice);
        let stopped = report["phases"].as_array().into_iter().flatten();
        let stopped = stopped.filter(|phase| phase["phase"] == "switchover");
        let stopped =
            stopped.filter_map(|phase| phase["start_ms"].as_f64()).next_back().unwrap_or(f64::INFINITY);
        let sum = |still: bool| -> u64 {
            let of = passes.iter().filter(|pass| (pass["start_ms"].as_f64() >= Some(stopped)) == still);
            of.map(|pass| number(&pass["wire_bytes"])).sum()
        };
        let (precopy, stopped) = (sum(false), sum(true));
        // Bytes outside of all passes belong to a pass that was broken off. The last pass of a
        // postcopy migration begins when the guest is stopped and ends with the migration.
        let rest = wire.saturating_sub(precopy + stopped);
        let (precopy, downtime, postcopy) = if report["postcopy"].is_object() {
            (precopy, 0, stopped + rest)
        } else {
            (precopy + rest, stopped, 0)
        };
        let mbps = report["throughput_mbps"].as_f64().unwrap_or(0.0);
        Self {
            mbps,
            pages_per_second: whole(mbps * 1e6 / 8.0) / PAGE,
            dirty_sync_count: passes.len() as u64,
            postcopy_requests: number(&report["postcopy"]["requests"]),
            precopy_bytes: precopy,
            downtime_bytes: downtime,
            postcopy_bytes: postcopy,
            ..Self::of_sent(wire, number(&bytes["raw_pages"]), number(&bytes["zero_pages"]), total, multifd)
        }
    }

    /// Returns the statistics of the target of a postcopy migration, with `left` missing pages.
    pub(super) fn of_postcopy(left: u64, requests: u64, total: u64) -> Self {
        Self {
            remaining: left * PAGE,
            total,
            page_size: PAGE,
            postcopy_requests: requests,
            ..Self::default()
        }
    }

    fn of_sent(wire: u64, raw: u64, zero: u64, total: u64, multifd: bool) -> Self {
        Self {
            transferred: wire,
            total,
            duplicate: zero,
            normal: raw,
            normal_bytes: raw * PAGE,
            page_size: PAGE,
            multifd_bytes: if multifd { wire } else { 0 },
            ..Self::default()
        }
    }
}

/// Returns a number of the report as an integer.
pub(super) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| whole(value.as_f64().unwrap_or(0.0)))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
fn whole(number: f64) -> u64 {
    number.clamp(0.0, 1e18) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The members of the protocol's `MigrationRAMStats` that are not optional.
    const MEMBERS: [&str; 17] = [
        "transferred",
        "remaining",
        "total",
        "duplicate",
        "normal",
        "normal-bytes",
        "dirty-pages-rate",
        "mbps",
        "dirty-sync-count",
        "postcopy-requests",
        "page-size",
        "multifd-bytes",
        "pages-per-second",
        "precopy-bytes",
        "downtime-bytes",
        "postcopy-bytes",
        "dirty-sync-missed-zero-copy",
    ];

    #[test]
    fn every_member_is_present_and_the_bytes_add_up() {
        let under_way = |state, runs_on_target| {
            let mut progress = Progress::default();
            (progress.state, progress.runs_on_target) = (state, runs_on_target);
            (progress.wire_bytes, progress.channel_bytes) = (900, vec![400, 300]);
            Ram::of_progress(&progress, 1 << 30, true)
        };
        let passes = json!([{"start_ms": 1.0, "wire_bytes": 600}, {"start_ms": 8.0, "wire_bytes": 200}]);
        let phases = json!([{"phase": "precopy", "start_ms": 1.0}, {"phase": "switchover", "start_ms": 7.0}]);
        let report = json!({"bytes": {"wire": 900, "raw_pages": 2.0}, "passes": passes, "phases": phases});
        let mut postcopy = report.clone();
        postcopy["postcopy"] = json!({"requests": 3});
        for (ram, split) in [
            (under_way(MigrationState::Precopy, false), [900, 0, 0]),
            (under_way(MigrationState::Switchover, false), [700, 200, 0]),
            (under_way(MigrationState::Postcopy, true), [700, 0, 200]),
            (Ram::of_report(&report, 1 << 30, false), [700, 200, 0]),
            (Ram::of_report(&postcopy, 1 << 30, false), [600, 0, 300]),
            (Ram::of_postcopy(5, 1, 1 << 30), [0, 0, 0]),
        ] {
            assert_eq!([ram.precopy_bytes, ram.downtime_bytes, ram.postcopy_bytes], split, "{ram:?}");
            assert_eq!(ram.transferred, split.iter().sum::<u64>());
            let value = serde_json::to_value(&ram).unwrap();
            for member in MEMBERS {
                assert!(value[member].is_number(), "{member} of {value}");
            }
        }
    }
}
