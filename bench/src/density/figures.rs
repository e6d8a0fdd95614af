//! Figures that guests report, and figures that the bench derives from them.

use std::time::Duration;

use vmferry_guest_abi::{ALLOC_HIST_BUCKETS, AllocCpu, AllocSnapshot};

use crate::cases::Figures;
use crate::reaper::to_f64;

/// Pages in a block of 4 MiB.
const BLOCK_PAGES: f64 = 1024.0;

/// Allocator statistics of a guest, over all vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Told {
    /// Set when all rounds are done.
    pub done: bool,
    /// Free pages that have not been reported since their last use.
    pub unreported_pages: u64,
    /// Pages that are in use or reserved for the guest's own allocator.
    pub used_pages: u64,
    /// Bytes freed.
    pub freed_bytes: u64,
    /// Nanoseconds spent allocating, touching, checking and freeing, including synchronous reports.
    pub work_ns: u64,
    /// Number of allocations, and nanoseconds spent in them, without touching the memory.
    pub allocs: (u64, u64),
    /// Number of frees, and nanoseconds spent in them, including synchronous reports.
    pub frees: (u64, u64),
    /// Frees by duration, see [`vmferry_guest_abi::AllocCpu::bucket`].
    pub free_hist: [u64; ALLOC_HIST_BUCKETS],
    /// Duration of the longest free in nanoseconds.
    pub free_max_ns: u64,
    /// Bytes reported to the host.
    pub report_bytes: u64,
    /// Nanoseconds spent reporting.
    pub report_ns: u64,
    /// Duration of the longest report in nanoseconds.
    pub report_max_ns: u64,
    /// The guest's clock at the last free, in microseconds.
    pub last_free_us: u64,
    /// The guest's clock at the end of the last report, in microseconds.
    pub last_report_us: u64,
    /// Allocations that waited, for memory that was being reported, was hinted, or was in the
    /// balloon.
    pub waits: u64,
    /// Nanoseconds for which allocations waited.
    pub wait_ns: u64,
    /// Allocations that found no memory.
    pub failed: u64,
    /// Freed blocks that did not fit the buffer of their vCPU.
    pub missed: u64,
    /// Reports that were deferred, because another vCPU was reporting or memory was low.
    pub deferred: u64,
    /// Pages that the host dropped.
    pub dropped_pages: u64,
    /// Nanoseconds that the host spent dropping pages.
    pub drop_ns: u64,
    /// Pages that the guest found damaged.
    pub corrupt: u64,
}

impl Told {
    /// Returns the statistics of a guest that found `corrupt` damaged pages. The pages that the
    /// host dropped are not among a guest's statistics.
    pub(crate) fn of(alloc: &AllocSnapshot, corrupt: u64) -> Self {
        let sum = |of: fn(&AllocCpu) -> u64| alloc.sum(of);
        let most = |of: fn(&AllocCpu) -> u64| alloc.cpus().iter().map(of).max().unwrap_or(0);
        let mut free_hist = [0; ALLOC_HIST_BUCKETS];
        for cpu in alloc.cpus() {
            free_hist.iter_mut().zip(cpu.free_hist).for_each(|(sum, count)| *sum += count);
        }
        Self {
            done: alloc.done(),
            unreported_pages: alloc.guest.unreported_pages,
            used_pages: alloc.guest.pages.saturating_sub(alloc.guest.free_pages),
            freed_bytes: sum(|cpu| cpu.freed_bytes),
            work_ns: sum(|cpu| cpu.alloc_ns + cpu.touch_ns + cpu.check_ns + cpu.free_ns),
            allocs: (sum(|cpu| cpu.allocs), sum(|cpu| cpu.alloc_ns)),
            frees: (sum(|cpu| cpu.frees), sum(|cpu| cpu.free_ns)),
            free_hist,
            free_max_ns: most(|cpu| cpu.free_max_ns),
            report_bytes: sum(|cpu| cpu.report_bytes),
            report_ns: sum(|cpu| cpu.report_ns),
            report_max_ns: most(|cpu| cpu.report_max_ns),
            last_free_us: most(|cpu| cpu.last_free_us),
            last_report_us: most(|cpu| cpu.last_report_us),
            waits: sum(|cpu| cpu.waits),
            wait_ns: sum(|cpu| cpu.wait_ns),
            failed: sum(|cpu| cpu.failed),
            missed: sum(|cpu| cpu.missed),
            deferred: sum(|cpu| cpu.deferred),
            dropped_pages: 0,
            drop_ns: 0,
            corrupt,
        }
    }
}

/// Figures of one guest that has finished its rounds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Single {
    pub(super) told: Told,
    /// Resident memory of the guest's process in bytes.
    pub(super) resident: u64,
    /// Resident bytes and used pages of a guest that allocated nothing.
    pub(super) base: (u64, u64),
}

/// Figures of a fleet that ended.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Filled {
    /// Guests that had finished their rounds before one was killed.
    pub(super) guests: usize,
    /// Set if the kernel killed a guest.
    pub(super) killed: bool,
    /// Bytes that all guests used when the last one had finished.
    pub(super) used: u64,
    pub(super) took: Duration,
}

impl Single {
    /// Returns the bytes that the guest freed but the host still holds. Memory in use is no
    /// residue.
    pub(super) fn residue(&self) -> u64 {
        let (base, base_pages) = self.base;
        let more = self.told.used_pages.saturating_sub(base_pages) * 4096;
        self.resident.saturating_sub(base + more)
    }

    pub(super) fn figures(&self) -> Figures {
        let told = &self.told;
        let us = |ns: u64| to_f64(ns) / 1e3;
        let mut figures = Figures::from([
            ("work_ms", to_f64(told.work_ns) / 1e6),
            ("freed_mb", to_f64(told.freed_bytes) / 1e6),
            ("resident_mb", to_f64(self.resident) / 1e6),
            ("residue_pct", to_f64(self.residue()) / to_f64(told.freed_bytes) * 100.0),
            ("free_max_us", us(told.free_max_ns)),
            ("alloc_waits", to_f64(told.waits)),
            ("alloc_wait_ms", us(told.wait_ns) / 1e3),
            ("alloc_failed", to_f64(told.failed)),
            ("frees_missed", to_f64(told.missed)),
            ("reports_deferred", to_f64(told.deferred)),
        ]);
        for (name, (calls, ns)) in [("alloc_mean_ns", told.allocs), ("free_mean_ns", told.frees)] {
            if calls > 0 {
                figures.insert(name, to_f64(ns) / to_f64(calls));
            }
        }
        figures
            .extend(quantile_ns(&told.free_hist, told.free_max_ns, 0.99).map(|ns| ("free_p99_us", ns / 1e3)));
        if told.report_bytes > 0 {
            let blocks = to_f64(told.report_bytes) / 4096.0 / BLOCK_PAGES;
            figures.insert("report_us_per_4m", us(told.report_ns) / blocks);
            figures.insert("report_max_ms", us(told.report_max_ns) / 1e3);
            figures
                .insert("returned_ms", to_f64(told.last_report_us.saturating_sub(told.last_free_us)) / 1e3);
        }
        if told.report_bytes > 0 && told.dropped_pages > 0 {
            let madvise = us(told.drop_ns) / (to_f64(told.dropped_pages) / BLOCK_PAGES);
            figures.insert("madvise_us_per_4m", madvise);
            figures.insert("report_to_madvise", figures["report_us_per_4m"] / madvise);
        }
        figures
    }
}

impl Filled {
    pub(super) fn figures(&self) -> Figures {
        let guests = to_f64(self.guests as u64);
        Figures::from([
            ("guests", guests),
            ("killed", f64::from(u8::from(self.killed))),
            ("used_mb", to_f64(self.used) / 1e6),
            ("mb_per_guest", to_f64(self.used) / 1e6 / guests),
            ("took_s", self.took.as_secs_f64()),
        ])
    }
}

/// Returns the duration in nanoseconds that `share` of the calls do not exceed, or `None` without
/// calls.
///
/// The result lies in the right bucket, which is a factor of two wide. Its place in the bucket
/// assumes that the calls are spread evenly on a logarithmic scale.
fn quantile_ns(hist: &[u64; ALLOC_HIST_BUCKETS], max_ns: u64, share: f64) -> Option<f64> {
    let mut left = to_f64(hist.iter().sum()) * share;
    for (bucket, count) in hist.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = to_f64(*count);
        if left <= count {
            let low = to_f64(64 << bucket);
            return Some((low * 2f64.powf(left / count)).min(to_f64(max_ns)));
        }
        left -= count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_use_is_no_residue() {
        let told = Told { used_pages: 100 + 256, freed_bytes: 100 << 20, ..Told::default() };
        let single = Single { told, resident: (10 + 1 + 5) << 20, base: (10 << 20, 100) };
        assert_eq!(single.residue(), 5 << 20);
        assert!((single.figures()["residue_pct"] - 5.0).abs() < 1e-9);
        // A guest that reported nothing has no report cost.
        assert!(!single.figures().contains_key("report_to_madvise"));
    }

    #[test]
    fn mean_times_are_those_of_one_call() {
        let told = Told { allocs: (4, 1000), frees: (0, 0), freed_bytes: 1, ..Told::default() };
        let figures = Single { told, ..Single::default() }.figures();
        assert_eq!(figures["alloc_mean_ns"], 250.0);
        assert!(!figures.contains_key("free_mean_ns"));
    }

    #[test]
    fn report_cost_is_compared_per_block() {
        let told = Told {
            report_bytes: 8 << 20,
            report_ns: 240_000,
            dropped_pages: 2048,
            drop_ns: 200_000,
            last_free_us: 1000,
            last_report_us: 21_000,
            freed_bytes: 1,
            ..Told::default()
        };
        let figures = Single { told, ..Single::default() }.figures();
        let of = |name: &str| (figures[name] * 1e6).round() / 1e6;
        assert_eq!(
            (of("report_us_per_4m"), of("madvise_us_per_4m"), of("report_to_madvise")),
            (120.0, 100.0, 1.2)
        );
        assert_eq!(of("returned_ms"), 20.0);
    }

    #[test]
    fn quantiles_lie_in_their_bucket() {
        let mut hist = [0; ALLOC_HIST_BUCKETS];
        assert_eq!(quantile_ns(&hist, 0, 0.99), None);
        (hist[0], hist[10]) = (990, 10);
        let p99 = quantile_ns(&hist, 100_000, 0.99).unwrap();
        assert!((64.0..=128.0).contains(&p99), "{p99}");
        (hist[0], hist[10]) = (980, 20);
        let p99 = quantile_ns(&hist, 70_000, 0.99).unwrap();
        assert!((65_536.0..=70_000.0).contains(&p99), "{p99}");
    }
}
