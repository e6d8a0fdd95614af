//! A target that follows the host: it takes memory from the guest while the host is short of it, and gives it back when it is not, or
//! when the guest itself runs short.

use super::pressure::Pressure;
use crate::api::{Place, Shared};
use anyhow::{Context, Result, bail};
use std::sync::Arc;
use std::time::Duration;
use vmferry_vmm::{BalloonHandle, MIN_MEMORY};

/// How often it looks: as often as the guest says how it is doing.
const TICK: Duration = Duration::from_secs(1);

/// The host is short of memory: some task waits for it for this share of the time. At 5 % people begin to notice.
const SHORT: f64 = 0.05;
/// It is not: below this, and only then, memory is given back. The gap keeps the target from swinging.
const EASY: f64 = 0.005;

/// What is taken at once, as a part of the guest's memory: a guest of 16 GiB gives a gibibyte a second.
const TAKE: u64 = 16;
/// What is given back at once: slower, so that a host at its limit is not pushed over it again.
const GIVE: u64 = 32;
/// What the guest must have left, as a part of its memory, before anything is taken; with less than half of it, it is given some.
const RESERVE: u64 = 16;

/// Targets are multiples of this: no notice for every page.
const GRAIN: u64 = 1 << 20;

/// What a decision is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Look {
    /// The share of time in which the host is short of memory.
    pub(crate) pressure: f64,
    /// All of the guest's memory, in bytes.
    pub(crate) memory: u64,
    /// What it is to have now.
    pub(crate) target: u64,
    /// What it can use without paging, if it says so.
    pub(crate) available: Option<u64>,
}

/// What the guest is to have next, in bytes: at least `least`, at most all.
pub(crate) fn decide(least: u64, look: &Look) -> u64 {
    let Look { pressure, memory, target, available } = *look;
    let reserve = memory / RESERVE;
    let starves = available.is_some_and(|available| available < reserve / 2);
    let next = if starves || pressure < EASY {
        target.saturating_add(memory / GIVE)
    } else if pressure >= SHORT {
        // Not what the guest needs: its own paging would be worse for both. What it says is as old as a tick, so only half of it is
        // counted on.
        let spare = available.map_or(u64::MAX, |available| available.saturating_sub(reserve) / 2);
        target.saturating_sub(spare.min(memory / TAKE))
    } else {
        target
    };
    let next = next / GRAIN * GRAIN;
    // What rounding takes, `next` gets back when all is to be given.
    let next = if next.saturating_add(GRAIN) > memory { memory } else { next };
    next.max(least.min(memory)).min(memory)
}

/// Starts following the host, for a guest that is to keep at least `least` bytes.
pub(crate) fn start(balloon: BalloonHandle, least: u64, shared: &Arc<Shared>) -> Result<()> {
    let memory = balloon.status().memory;
    if !(MIN_MEMORY..=memory).contains(&least) {
        bail!("--balloon-auto {least}: at least {MIN_MEMORY} bytes, at most the guest's {memory}");
    }
    let mut pressure = Pressure::open().context("--balloon-auto")?;
    let shared = Arc::clone(shared);
    let follow = move || {
        loop {
            std::thread::sleep(TICK);
            let Ok(share) = pressure.look() else { continue };
            // Elsewhere, or on its way: the next host decides.
            if shared.place() != Place::Running || shared.lacks_pages() {
                continue;
            }
            let status = balloon.status();
            // A guest without a driver would only find a target that it never asked for when it gets one.
            if status.driver {
                let available = status.stats.get("available").or(status.stats.get("free"));
                let look = Look { pressure: share, memory: status.memory, target: status.target, available };
                let target = decide(least, &look);
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

    fn look(pressure: f64, target: u64, available: Option<u64>) -> Look {
        Look { pressure, memory: 4 * GIB, target, available }
    }

    #[test]
    fn a_host_that_is_short_takes_and_one_that_is_not_gives() {
        let decide = |pressure, target, available| super::decide(GIB, &look(pressure, target, available));
        assert_eq!(decide(0.2, 4 * GIB, None), 4 * GIB - GIB / 4);
        assert_eq!(decide(0.2, 4 * GIB, Some(3 * GIB)), 4 * GIB - GIB / 4);
        assert_eq!(decide(0.02, 2 * GIB, None), 2 * GIB, "between: as it is");
        assert_eq!(decide(0.0, 2 * GIB, None), 2 * GIB + GIB / 8);
        assert_eq!(decide(0.0, 4 * GIB, None), 4 * GIB);
        assert_eq!(decide(0.9, GIB, None), GIB, "never below the least");
        assert_eq!(decide(0.9, GIB + GIB / 8, None), GIB);
    }

    #[test]
    fn what_the_guest_needs_is_left_to_it() {
        let decide = |available| super::decide(GIB, &look(0.5, 3 * GIB, Some(available)));
        assert_eq!(decide(GIB / 4), 3 * GIB, "only its reserve");
        assert_eq!(decide(GIB / 2), 3 * GIB - GIB / 8, "half of what is above it");
        assert_eq!(
            decide(GIB / 16),
            3 * GIB + GIB / 8,
            "it starves: it gets some, however short the host is"
        );
    }

    #[test]
    fn it_settles_at_either_end() {
        for (pressure, end) in [(0.0, 4 * GIB), (1.0, GIB)] {
            let mut target = 2 * GIB + 12_345;
            for _ in 0..100 {
                target = decide(GIB, &look(pressure, target, None));
                assert!((GIB..=4 * GIB).contains(&target));
            }
            assert_eq!(target, end);
        }
        let odd = Look { pressure: 0.0, memory: 5 * GRAIN + 4096, target: 5 * GRAIN, available: None };
        assert_eq!(decide(MIN_MEMORY, &odd), odd.memory, "all of it, also what is less than a grain");
    }
}
