//! Figures of a run.

use std::time::Duration;

use crate::cases::Figures;
use crate::reaper::to_f64;
use crate::result::MigrationResult;

/// Result of learning a guest's free pages.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Learned {
    /// Time from the start of the inflation, or from the question, until the host knew all free
    /// pages.
    pub total: Duration,
    /// Number of pages that the host learned.
    pub pages: u64,
    /// Number of these pages that lie above 4 GiB, beyond the MMIO hole. `None` if unknown.
    pub high_pages: Option<u64>,
    /// Number of free pages that the guest reports.
    pub free_pages: u64,
    /// Parts of an inflation.
    pub inflation: Option<Inflation>,
    /// Time of the guest's walk of its free lists, including the messages to the host. `None`
    /// without a walk.
    pub walk: Option<Duration>,
}

/// Parts of an inflation. `send` includes the two parts of the host.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Inflation {
    /// Number of requests.
    pub requests: u64,
    /// Time in which the guest allocated pages.
    pub alloc: Duration,
    /// Time in which the guest sent the pages and waited for the host.
    pub send: Duration,
    /// Time in which the host examined and dropped the pages. `None` if unknown.
    pub host: Option<Duration>,
    /// Time in which the host dropped the pages. `None` if unknown.
    pub madvise: Option<Duration>,
}

/// Touched memory that the guest gave back.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Given {
    /// Number of pages.
    pub pages: u64,
    /// Time in which the host dropped the pages.
    pub madvise: Duration,
    /// Memory that the host got back, in bytes.
    pub returned: u64,
}

/// Result of one migration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Moved {
    /// Figures of the migration.
    pub result: MigrationResult,
    /// Time from the command until the first page was sent. `None` if unknown.
    pub first_page: Option<Duration>,
    /// Pages that were skipped because they were free. `None` if unknown.
    pub skipped_pages: Option<u64>,
    /// Bytes that the guest had touched and freed before.
    pub freed: u64,
    /// Time for which the source waited for the guest's answer before the first page. `None` if
    /// unknown.
    pub waited: Option<Duration>,
    /// Time from the first question to the first answer. `None` without an answer.
    pub first_answer: Option<Duration>,
}

/// Rounds of a guest that was short of memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LowMemory {
    /// Time in which the guest allocated, touched, checked and freed memory.
    pub work: Duration,
    /// Allocations that waited for memory that was being reported.
    pub waits_reported: u64,
    /// Allocations that waited for memory that was kept back for a question of the host.
    pub waits_held: u64,
    /// Allocations that took memory out of the balloon.
    pub waits_balloon: u64,
    /// Time for which allocations waited.
    pub wait: Duration,
    /// Longest wait of an allocation.
    pub wait_max: Duration,
    /// Allocations that found no memory.
    pub failed: u64,
    /// Failed allocations while the host had hints to process.
    pub failed_held: u64,
    /// Rounds that got less memory than intended.
    pub short_rounds: u64,
    /// Times that an inflation stopped because the guest's memory was low.
    pub inflate_short: u64,
    /// Pages that the driver took out of the balloon although the host requested them, as the host
    /// counts them.
    pub taken_back_pages: u64,
    /// Times that hinted pages were taken back.
    pub hint_releases: u64,
    /// Freed blocks that did not fit the buffer of their vCPU.
    pub missed: u64,
    /// Walks that waited because the queue of hints was full.
    pub hint_full: u64,
    /// Reports that were deferred.
    pub deferred: u64,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Learned {
    pub(super) fn figures(&self) -> Figures {
        let mut figures = Figures::from([
            ("total_ms", ms(self.total)),
            ("pages", to_f64(self.pages)),
            ("of_free", to_f64(self.pages) / to_f64(self.free_pages)),
        ]);
        figures.extend(self.high_pages.map(|pages| ("pages_above_4g", to_f64(pages))));
        figures.extend(self.walk.map(|walk| ("walk_ms", ms(walk))));
        if let Some(parts) = &self.inflation {
            // A host that does not report its own part leaves it in the guest's send time.
            let host = parts.host.unwrap_or_default();
            figures.insert("requests", to_f64(parts.requests));
            figures.insert("alloc_ms", ms(parts.alloc));
            figures.insert("send_ms", ms(parts.send.saturating_sub(host)));
            if let (Some(host), Some(madvise)) = (parts.host, parts.madvise) {
                figures.insert("translate_ms", ms(host.saturating_sub(madvise)));
                figures.insert("madvise_ms", ms(madvise));
            }
        }
        figures
    }
}

impl Given {
    pub(super) fn figures(&self) -> Figures {
        let gib = to_f64(self.pages) / 262_144.0;
        Figures::from([
            ("madvise_ms_per_gib", ms(self.madvise) / gib),
            ("returned_of_given", to_f64(self.returned >> 12) / to_f64(self.pages)),
        ])
    }
}

impl Moved {
    pub(super) fn figures(&self) -> Figures {
        let result = &self.result;
        let mut figures = Figures::from([
            ("total_ms", ms(result.total)),
            ("downtime_ms", ms(result.downtime)),
            ("data_mb", to_f64(result.data_bytes) / 1e6),
            ("freed_mb", to_f64(self.freed) / 1e6),
        ]);
        figures.extend(result.wire_bytes.map(|bytes| ("wire_mb", to_f64(bytes) / 1e6)));
        figures.extend(result.passes.map(|passes| ("passes", to_f64(passes))));
        figures.extend(self.first_page.map(|time| ("first_page_ms", ms(time))));
        figures.extend(self.skipped_pages.map(|pages| ("skipped_pages", to_f64(pages))));
        figures.extend(self.waited.map(|time| ("waited_ms", ms(time))));
        figures.extend(self.first_answer.map(|time| ("first_answer_ms", ms(time))));
        figures
    }
}

impl LowMemory {
    pub(super) fn figures(&self) -> Figures {
        Figures::from([
            ("work_ms", ms(self.work)),
            ("waits_reported", to_f64(self.waits_reported)),
            ("waits_held", to_f64(self.waits_held)),
            ("waits_balloon", to_f64(self.waits_balloon)),
            ("wait_ms", ms(self.wait)),
            ("wait_max_ms", ms(self.wait_max)),
            ("alloc_failed", to_f64(self.failed)),
            ("failed_held", to_f64(self.failed_held)),
            ("short_rounds", to_f64(self.short_rounds)),
            ("inflate_short", to_f64(self.inflate_short)),
            ("taken_back_mb", to_f64(self.taken_back_pages * 4096) / 1e6),
            ("hint_releases", to_f64(self.hint_releases)),
            ("frees_missed", to_f64(self.missed)),
            ("hint_full", to_f64(self.hint_full)),
            ("reports_deferred", to_f64(self.deferred)),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inflation_time_is_split_into_parts() {
        let us = Duration::from_micros;
        let parts = Inflation {
            requests: 7,
            alloc: us(100),
            send: us(700),
            host: Some(us(300)),
            madvise: Some(us(200)),
        };
        let learned = Learned {
            total: us(900),
            pages: 10,
            free_pages: 20,
            inflation: Some(parts),
            ..Learned::default()
        };
        let figures = learned.figures();
        let of = |name: &str| (figures[name] * 1e3).round();
        assert_eq!(
            (of("alloc_ms"), of("send_ms"), of("translate_ms"), of("madvise_ms")),
            (100.0, 400.0, 100.0, 200.0)
        );
        assert_eq!((of("total_ms"), figures["of_free"]), (900.0, 0.5));
        // QEMU does not report its own part.
        let qemu = Learned { inflation: Some(Inflation { host: None, madvise: None, ..parts }), ..learned };
        assert_eq!((qemu.figures()["send_ms"] * 1e3).round(), 700.0);
        assert!(!qemu.figures().contains_key("madvise_ms"));
    }

    #[test]
    fn returned_memory_is_related_to_its_size() {
        let given = Given { pages: 131_072, madvise: Duration::from_millis(10), returned: 256 << 20 };
        let figures = given.figures();
        assert_eq!((figures["madvise_ms_per_gib"], figures["returned_of_given"]), (20.0, 0.5));
    }
}
