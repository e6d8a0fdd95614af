//! Balloon target that follows the host: it takes memory from the guest while the host is short of
//! memory, and gives memory back when the host is not short or when the guest itself is.

use super::pressure::Pressure;
use crate::api::{GuestPlace, RunContext};
use anyhow::{Context, Result, bail};
use std::sync::Arc;
use std::time::Duration;
use vmferry_vmm::{BalloonHandle, MIN_MEMORY};

/// Interval of the decisions. The guest reports its statistics at the same interval.
const TICK: Duration = Duration::from_secs(1);

/// Share of time with a task waiting for memory from which the host counts as short of memory. At 5
/// % users begin to notice.
const SHORT: f64 = 0.05;
/// Share below which memory is given back. The gap to [`SHORT`] keeps the target from oscillating.
const EASY: f64 = 0.005;

/// Divisor of the guest's memory for the amount that one decision takes: a guest of 16 GiB gives 1
/// GiB per second.
const TAKE: u64 = 16;
/// Divisor for the amount that one decision gives back. It is smaller than what is taken, so that a
/// host at its limit is not short again at once.
const GIVE: u64 = 32;
/// Divisor of the guest's memory for the memory that must stay available in the guest. A guest with
/// less than half of that gets memory back.
const RESERVE: u64 = 16;

/// Targets are multiples of this number of bytes, so that the guest does not get a notification for
/// every page.
const GRAIN: u64 = 1 << 20;

/// Input of a decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PressureSample {
    /// Share of time in which the host is short of memory, from 0 to 1.
    pub(crate) pressure: f64,
    /// Memory of the guest in bytes.
    pub(crate) memory: u64,
    /// Current target in bytes.
    pub(crate) target: u64,
    /// Bytes that the guest can use without paging, if it reports them.
    pub(crate) available: Option<u64>,
}

/// Returns the next target in bytes: at least `least`, at most all of the guest's memory.
pub(crate) fn decide(least: u64, sample: &PressureSample) -> u64 {
    let PressureSample { pressure, memory, target, available } = *sample;
    let reserve = memory / RESERVE;
    let starves = available.is_some_and(|available| available < reserve / 2);
    let next = if starves || pressure < EASY {
        target.saturating_add(memory / GIVE)
    } else if pressure >= SHORT {
        // Memory that the guest needs is not taken: its own paging would be worse for guest and
        // host. The guest's report is up to one tick old, so only half of the spare memory is
        // counted on.
        let spare = available.map_or(u64::MAX, |available| available.saturating_sub(reserve) / 2);
        target.saturating_sub(spare.min(memory / TAKE))
    } else {
        target
    };
    let next = next / GRAIN * GRAIN;
    // Rounding must not keep the last part of the memory from the guest.
    let next = if next.saturating_add(GRAIN) > memory { memory } else { next };
    next.max(least.min(memory)).min(memory)
}

/// Starts a thread that follows the host, for a guest that keeps at least `least` bytes.
pub(crate) fn start(balloon: BalloonHandle, least: u64, shared: &Arc<RunContext>) -> Result<()> {
    let memory = balloon.status().memory;
    if !(MIN_MEMORY..=memory).contains(&least) {
        bail!("--balloon-auto {least}: at least {MIN_MEMORY} bytes, at most the guest's {memory}");
    }
    let mut pressure = Pressure::open().context("--balloon-auto")?;
    let shared = Arc::clone(shared);
    let follow = move || {
        loop {
            std::thread::sleep(TICK);
            let Ok(share) = pressure.share_since_last() else { continue };
            // During and after a migration, the target host decides.
            if shared.place() != GuestPlace::Running || shared.has_missing_pages() {
                continue;
            }
            let status = balloon.status();
            // A guest without a driver would get an old target when its driver starts.
            if status.driver {
                let available = status.stats.get("available").or(status.stats.get("free"));
                let sample = PressureSample {
                    pressure: share,
                    memory: status.memory,
                    target: status.target,
                    available,
                };
                let target = decide(least, &sample);
                if target != status.target {
                    tracing::info!(target, pressure = share, "the balloon follows the host");
                    balloon.set_target(target);
                }
            }
        }
    };
    vmferry_thread::spawn(vmferry_thread::Role::Watch, "balloon-auto", follow)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn sample(pressure: f64, target: u64, available: Option<u64>) -> PressureSample {
        PressureSample { pressure, memory: 4 * GIB, target, available }
    }

    #[test]
    fn target_falls_while_the_host_is_short_and_rises_otherwise() {
        let decide = |pressure, target, available| super::decide(GIB, &sample(pressure, target, available));
        assert_eq!(decide(0.2, 4 * GIB, None), 4 * GIB - GIB / 4);
        assert_eq!(decide(0.2, 4 * GIB, Some(3 * GIB)), 4 * GIB - GIB / 4);
        assert_eq!(decide(0.02, 2 * GIB, None), 2 * GIB, "between the limits the target stays");
        assert_eq!(decide(0.0, 2 * GIB, None), 2 * GIB + GIB / 8);
        assert_eq!(decide(0.0, 4 * GIB, None), 4 * GIB);
        assert_eq!(decide(0.9, GIB, None), GIB, "never below the least");
        assert_eq!(decide(0.9, GIB + GIB / 8, None), GIB);
    }

    #[test]
    fn memory_that_the_guest_needs_is_not_taken() {
        let decide = |available| super::decide(GIB, &sample(0.5, 3 * GIB, Some(available)));
        assert_eq!(decide(GIB / 4), 3 * GIB, "only its reserve is available");
        assert_eq!(decide(GIB / 2), 3 * GIB - GIB / 8, "half of the memory above the reserve");
        assert_eq!(
            decide(GIB / 16),
            3 * GIB + GIB / 8,
            "a guest that is short gets memory, however short the host is"
        );
    }

    #[test]
    fn target_reaches_either_end_and_stays() {
        for (pressure, end) in [(0.0, 4 * GIB), (1.0, GIB)] {
            let mut target = 2 * GIB + 12_345;
            for _ in 0..100 {
                target = decide(GIB, &sample(pressure, target, None));
                assert!((GIB..=4 * GIB).contains(&target));
            }
            assert_eq!(target, end);
        }
        let odd =
            PressureSample { pressure: 0.0, memory: 5 * GRAIN + 4096, target: 5 * GRAIN, available: None };
        assert_eq!(decide(MIN_MEMORY, &odd), odd.memory, "all memory, with the part below one grain");
    }
}
