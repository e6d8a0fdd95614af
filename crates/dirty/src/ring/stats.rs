//! Figures of rings and reaper.

use super::policy::RingView;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
pub use vmferry_core::ReaperState;
use vmferry_core::{ReaperFigures, RingFigures, VcpuRing};

/// Counters of one ring since tracking started. The thread that harvests the ring writes them, and
/// any thread reads them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    harvests: AtomicU64,
    pages: AtomicU64,
    full_exits: AtomicU64,
    stalled_ns: AtomicU64,
    stalled_max_ns: AtomicU64,
    emptied_ns: AtomicU64,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Counters {
    /// Counts `pages` whose entries were taken from the ring.
    pub(crate) fn taken(&self, pages: u64) {
        self.pages.fetch_add(pages, Relaxed);
    }

    /// Counts a harvest that was complete at the time `at`.
    pub(crate) fn harvested(&self, at: Duration) {
        self.harvests.fetch_add(1, Relaxed);
        self.emptied_ns.store(nanos(at), Relaxed);
    }

    pub(crate) fn full(&self) {
        self.full_exits.fetch_add(1, Relaxed);
    }

    pub(crate) fn stalled(&self, time: Duration) {
        self.stalled_ns.fetch_add(nanos(time), Relaxed);
        self.stalled_max_ns.fetch_max(nanos(time), Relaxed);
    }

    /// Resets all counters at time `now`.
    pub(crate) fn restart(&self, now: Duration) {
        let all = [&self.harvests, &self.pages, &self.full_exits, &self.stalled_ns, &self.stalled_max_ns];
        all.into_iter().for_each(|counter| counter.store(0, Relaxed));
        self.emptied_ns.store(nanos(now), Relaxed);
    }

    /// Returns the counters as a view of the ring, without the number of used entries.
    pub(crate) fn view(&self) -> RingView {
        RingView {
            used: 0,
            harvested: self.pages.load(Relaxed),
            full_exits: self.full_exits.load(Relaxed),
            stalled: Duration::from_nanos(self.stalled_ns.load(Relaxed)),
            emptied_at: Duration::from_nanos(self.emptied_ns.load(Relaxed)),
        }
    }

    pub(crate) fn report(&self) -> VcpuRingReport {
        VcpuRingReport {
            harvests: self.harvests.load(Relaxed),
            pages: self.pages.load(Relaxed),
            full_exits: self.full_exits.load(Relaxed),
            stalled: Duration::from_nanos(self.stalled_ns.load(Relaxed)),
            stalled_max: Duration::from_nanos(self.stalled_max_ns.load(Relaxed)),
        }
    }
}

/// Figures of one vCPU's ring since tracking started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VcpuRingReport {
    /// Number of harvests, by any thread, that found pages.
    pub harvests: u64,
    /// Number of harvested pages, which are the pages that the vCPU dirtied. A page counts again if
    /// it is written again after a harvest.
    pub pages: u64,
    /// Number of times that the vCPU stopped because its ring was full.
    pub full_exits: u64,
    /// Total time of the stops that `full_exits` counts. The vCPU did not run during this time.
    pub stalled: Duration,
    /// Longest of the stops that `full_exits` counts.
    pub stalled_max: Duration,
}

/// Figures of the reaper since tracking started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReaperReport {
    /// Name of the policy.
    pub policy: String,
    /// State of the thread.
    pub state: ReaperState,
    /// Number of times that the reaper woke up.
    pub iterations: u64,
    /// Number of wake-ups in which the reaper harvested.
    pub harvests: u64,
    /// Length of the current sleep, or zero if tracking is off or the reaper failed.
    pub sleep: Duration,
    /// Processor time that the reaper thread has used.
    pub cpu: Duration,
}

/// Figures of rings and reaper since tracking started. After tracking has stopped, the figures are
/// kept until the next start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingReport {
    /// Number of entries of each ring.
    pub entries: u32,
    /// Figures of the ring of each vCPU.
    pub vcpus: Vec<VcpuRingReport>,
    /// Figures of the reaper.
    pub reaper: ReaperReport,
}

impl RingReport {
    /// Converts the figures to the form in which the report of a migration contains them.
    #[must_use]
    pub fn figures(&self) -> RingFigures {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let vcpu = |vcpu: &VcpuRingReport| VcpuRing {
            full_exits: vcpu.full_exits,
            full_stall_us: micros(vcpu.stalled),
            full_stall_max_us: micros(vcpu.stalled_max),
            harvests: vcpu.harvests,
            pages: vcpu.pages,
        };
        RingFigures {
            entries: self.entries,
            policy: self.reaper.policy.clone(),
            full_exits: self.full_exits(),
            full_stall_us: micros(self.stalled()),
            harvests: self.vcpus.iter().map(|vcpu| vcpu.harvests).sum(),
            reaper_cpu_ms: self.reaper.cpu.as_secs_f64() * 1e3,
            reaper: ReaperFigures {
                state: self.reaper.state.clone(),
                iterations: self.reaper.iterations,
                harvests: self.reaper.harvests,
                sleep_us: micros(self.reaper.sleep),
            },
            vcpus: self.vcpus.iter().map(vcpu).collect(),
        }
    }

    /// Returns the number of full exits of all vCPUs.
    #[must_use]
    pub fn full_exits(&self) -> u64 {
        self.vcpus.iter().map(|vcpu| vcpu.full_exits).sum()
    }

    /// Returns the total time for which vCPUs were stopped by full rings.
    #[must_use]
    pub fn stalled(&self) -> Duration {
        self.vcpus.iter().map(|vcpu| vcpu.stalled).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(state: ReaperState, sleep: Duration) -> RingFigures {
        let (policy, cpu) = ("predict".to_owned(), Duration::ZERO);
        let reaper = ReaperReport { policy, state, iterations: 7, harvests: 3, sleep, cpu };
        RingReport { entries: 1024, vcpus: Vec::new(), reaper }.figures()
    }

    #[test]
    fn figures_have_state_sleep_and_iterations_of_the_reaper() {
        let sleeping = figures(ReaperState::Sleeping, Duration::from_micros(1500)).reaper;
        assert_eq!(
            sleeping,
            ReaperFigures { state: ReaperState::Sleeping, iterations: 7, harvests: 3, sleep_us: 1500 }
        );
        let failed = figures(ReaperState::Failed("planted".to_owned()), Duration::ZERO).reaper;
        assert_eq!((failed.state, failed.sleep_us), (ReaperState::Failed("planted".to_owned()), 0));
    }
}
