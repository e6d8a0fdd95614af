//! Conversion of a run into its figures.

use std::collections::BTreeMap;
use std::time::Duration;

use vmferry_report::Spread;

use super::series::{drop_s, to_f64, worst_ms_per_gb};
use super::{CaseSpec, Run, WINDOW};

/// Figures of a run by their names in the results.
pub(super) type Figures = BTreeMap<String, f64>;

/// Returns the speed before the migration in writes per second: the median of the windows in the
/// last `before` seconds before the command.
pub(super) fn speed_before(run: &Run, before: f64) -> f64 {
    Spread::of(run.timeline.windows(-before, 0.0)).map_or(0.0, |spread| spread.median)
}

/// Returns the figures of a run.
pub(super) fn figures(spec: &CaseSpec, run: &Run, before: f64) -> Figures {
    let mut figures = Figures::new();
    let mut put = |name: &str, value: f64| {
        if value.is_finite() {
            figures.insert(name.into(), value);
        }
    };
    let (total_ms, downtime) = (run.total.as_secs_f64() * 1e3, run.downtime.as_secs_f64());
    put("total_ms", total_ms);
    put("downtime_ms", downtime * 1e3);
    put("timed_out", f64::from(u8::from(run.total >= spec.timeout)));
    put("passes", to_f64(run.passes));
    put("wire_gbytes", to_f64(run.wire_bytes) / 1e9);
    let vcpu_ms = run.end * 1e3 * f64::from(spec.vcpus);
    let speed = speed_before(run, before);
    if speed > 0.0 {
        let watched = run.timeline.end().unwrap_or(run.end);
        let during = run.timeline.speed(0.0, run.end);
        put("writes_before_per_s", speed);
        put("writes_during_per_s", during);
        put("writes_after_per_s", run.timeline.speed(run.end, watched));
        put("guest_speed_kept", during / speed);
        put("drop_s", drop_s(speed, &run.timeline.windows(0.0, watched)));
        // While the guest is stopped for the switchover it writes nothing. That is the downtime,
        // which is a separate figure.
        let paused = (run.resumed - downtime - WINDOW, run.resumed + WINDOW);
        let mut running = run.timeline.windows(0.0, paused.0.max(WINDOW.min(run.resumed)));
        running.extend(run.timeline.windows(paused.1, watched));
        worst_ms_per_gb(&running).into_iter().for_each(|ms| put("worst_ms_per_gb", ms));
        put("lost_ms", (1.0 - during / speed) * vcpu_ms);
        put("lost_pct", (1.0 - during / speed) * 100.0);
        for vcpu in 0..run.timeline.vcpus().min(8) {
            let of = |from, to| run.timeline.speed_of(vcpu, from, to);
            put(&format!("vcpu{vcpu}_kept"), of(0.0, run.end) / of(-before, 0.0));
        }
    }
    put("downtime_pct", downtime * 1e3 * f64::from(spec.vcpus) / vcpu_ms * 100.0);
    if let Some(dirtied) = run.dirtied {
        put("faults", to_f64(dirtied));
    }
    if let Some(ring) = run.ring {
        let stall_ms = ring.full_stall.as_secs_f64() * 1e3;
        let cpu_ms = ring.reaper_cpu.as_secs_f64() * 1e3;
        put("full_exits", to_f64(ring.full_exits));
        put("full_stall_ms", stall_ms);
        put("full_stall_pct", stall_ms / vcpu_ms * 100.0);
        put("harvests", to_f64(ring.harvests));
        put("reaper_cpu_ms", cpu_ms);
        put("reaper_cpu_pct", cpu_ms / total_ms * 100.0);
    }
    if let Some(throttle) = &run.throttle {
        let held_ms = |held: &Duration| held.as_secs_f64() * 1e3;
        put("throttle_share", throttle.highest_share);
        put("throttle_pct", throttle.held.iter().map(held_ms).sum::<f64>() / vcpu_ms * 100.0);
        for (vcpu, held) in throttle.held.iter().take(8).enumerate() {
            put(&format!("vcpu{vcpu}_held_ms"), held_ms(held));
        }
    }
    figures
}

/// Returns the cost of a write fault in this run, in microseconds: the time that the guest lost,
/// without the downtime and full rings, divided by the number of faults.
///
/// The result is an upper bound, because it includes the time lost to busy processors and cold
/// caches.
pub(super) fn fault_us(figures: &Figures) -> Option<f64> {
    let of = |name: &str| figures.get(name).copied();
    let unexplained = of("lost_ms")? - of("downtime_ms")? - of("full_stall_ms").unwrap_or(0.0);
    of("faults").filter(|faults| *faults > 0.0).map(|faults| unexplained * 1e3 / faults)
}

#[cfg(test)]
mod tests {
    use super::super::{Options, Point, RingRun, ThrottleRun, Timeline};
    use super::*;

    /// Returns a run with a second at 1000 writes/s, two at 500 with a stop of 100 ms before their
    /// end, and a second at 1000.
    fn run() -> Run {
        let mut timeline = Timeline::default();
        for (at, writes) in
            [(-1.0, 0.0), (0.0, 1000.0), (1.9, 1950.0), (2.0, 1950.0), (3.0, 2950.0), (3.01, 2960.0)]
        {
            timeline.add(0, Point { at, writes });
        }
        Run {
            timeline,
            end: 2.0,
            resumed: 2.0,
            total: Duration::from_secs(2),
            downtime: Duration::from_millis(100),
            dirtied: Some(80_000),
            ring: Some(RingRun {
                full_exits: 3,
                full_stall: Duration::from_millis(10),
                harvests: 20,
                reaper_cpu: Duration::from_millis(4),
            }),
            ..Run::default()
        }
    }

    #[test]
    fn figures_follow_from_the_timeline() {
        let spec = Options::quick().cases.remove(2);
        let figures = figures(&spec, &run(), 1.0);
        let close = |name: &str, want: f64| {
            let got = figures[name];
            assert!((got - want).abs() < want.abs() * 1e-6 + 1e-9, "{name}: {got}, want {want}");
        };
        close("writes_before_per_s", 1000.0);
        close("guest_speed_kept", 0.475);
        close("drop_s", 2.0);
        // 500 writes/s count, not the stop during the downtime.
        close("worst_ms_per_gb", 524_288.0);
        close("lost_ms", 1050.0);
        close("full_stall_pct", 0.5);
        close("reaper_cpu_pct", 0.2);
        close("vcpu0_kept", 0.475);
        // (1050 - 100 - 10) ms divided by 80 000 faults.
        assert!((fault_us(&figures).unwrap() - 11.75).abs() < 1e-6);
    }

    #[test]
    fn throttle_and_timeout_are_figures() {
        let spec = Options::quick().cases.remove(2);
        let throttle = ThrottleRun { held: vec![Duration::from_millis(500)], highest_share: 0.75 };
        let throttled = figures(&spec, &Run { throttle: Some(throttle), ..run() }, 1.0);
        let of = |name: &str| throttled.get(name).copied();
        assert_eq!((of("throttle_pct"), of("throttle_share")), (Some(25.0), Some(0.75)));
        assert_eq!((of("vcpu0_held_ms"), of("timed_out")), (Some(500.0), Some(1.0)));
        let early = figures(&spec, &Run { total: Duration::from_millis(1999), ..run() }, 1.0);
        assert_eq!((early["timed_out"], early.contains_key("throttle_pct")), (0.0, false));
    }

    #[test]
    fn windows_after_the_handover_of_a_hybrid_count() {
        let spec = Options::quick().cases.remove(2);
        // The guest ran on the target at 1.0 s, and stopped writing there from 1.9 s on.
        let hybrid = Run { resumed: 1.0, ..run() };
        let [moved, precopy] = [hybrid, run()].map(|run| figures(&spec, &run, 1.0)["worst_ms_per_gb"]);
        assert!(moved > 10.0 * precopy, "{moved} and {precopy}");
    }

    #[test]
    fn idle_guest_has_no_speed_figures() {
        let spec = Options::quick().cases.remove(1);
        let figures = figures(&spec, &Run { timeline: Timeline::default(), ..run() }, 1.0);
        assert!(!figures.contains_key("drop_s") && figures.contains_key("reaper_cpu_pct"), "{figures:?}");
        assert_eq!(fault_us(&figures), None);
    }
}
