//! Plans of guests whose migrations can be calculated by hand.

use super::*;
use crate::plan::{Costs, CurvePoint, Link, MemoryPart, Protection};
use std::time::Duration;

const WINDOWS: [f64; 8] = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5];

/// Returns a guest of 1 GiB with 512 MiB of content, of which 128 MiB are written at random.
fn guest(rate: f64) -> Inputs {
    let ws = 32_768.0;
    let written = |t: f64| ws * -(-rate * t / ws).exp_m1();
    let point = |window_s: &f64| CurvePoint { window_s: *window_s, pages: written(*window_s) };
    Inputs {
        memory_pages: 262_144,
        touched_pages: 131_072,
        zero_pages: 0,
        free_pages: 0,
        vcpus: 1,
        curve: WINDOWS.iter().map(point).collect(),
        run_pages: 1.5,
        parts: (0..8)
            .map(|at| MemoryPart { touched: 16_384.0, dirty: if at < 2 { 16_384.0 } else { 0.0 } })
            .collect(),
        protection: Protection::BeforeRead,
        chunk_pages: 2048,
        link: Link {
            bytes_per_s: 200e6,
            spread: 0.02,
            round_trip_s: 1e-4,
            queue_s: 0.0,
            cpu_page_s: 1e-6,
            connect_s: 2e-4,
            measured: true,
        },
        costs: Costs {
            pause_s: 2e-4,
            quiesce_s: 0.0,
            save_s: 1e-3,
            state_bytes: 1e4,
            harvest_s: 1e-4,
            start_s: 1e-3,
            protect_page_s: 1e-7,
            fault_s: 2.4e-6,
        },
    }
}

fn plan(inputs: Inputs) -> Plan {
    Plan::make(inputs, &Settings { timeout: Some(Duration::from_secs(60)), ..Settings::default() })
}

fn near(got: f64, want: f64, share: f64) {
    assert!((got - want).abs() <= want * share, "{got} and not {want}");
}

#[test]
fn idle_guest_takes_as_long_as_its_memory_takes_on_the_link() {
    let inputs =
        Inputs { curve: WINDOWS.map(|window_s| CurvePoint { window_s, pages: 0.0 }).into(), ..guest(0.0) };
    let plan = plan(inputs);
    let precopy = plan.of(Strategy::Precopy).unwrap();
    assert_eq!((precopy.converges, plan.recommended), (Likelihood::Yes, Strategy::Precopy));
    let total = precopy.total_ms.unwrap();
    near(total.expected, 131_072.0 * 4112.0 / 200e6 * 1e3, 0.05);
    assert!(total.low < total.expected && total.expected < total.high);
    assert!(precopy.downtime_ms.unwrap().expected < 10.0, "{precopy:?}");
    near(precopy.bytes.unwrap().expected, 131_072.0 * 4112.0, 0.02);
}

#[test]
fn free_and_zero_pages_are_not_sent() {
    let inputs = Inputs { zero_pages: 32_768, free_pages: 32_768, ..guest(100.0) };
    near(plan(inputs).of(Strategy::Precopy).unwrap().bytes.unwrap().expected, 65_536.0 * 4112.0, 0.05);
}

#[test]
fn a_modest_guest_converges_and_a_fast_one_does_not() {
    // The link carries 48,600 pages per second.
    for (rate, converges) in [(10_000.0, Likelihood::Yes), (2_000_000.0, Likelihood::No)] {
        let plan = plan(guest(rate));
        let precopy = plan.of(Strategy::Precopy).unwrap();
        assert_eq!(precopy.converges, converges, "{rate}: {precopy:?}");
        assert_eq!(precopy.total_ms.is_some(), converges == Likelihood::Yes);
        for strategy in [Strategy::Postcopy, Strategy::Hybrid] {
            let mode = plan.of(strategy).unwrap();
            assert_eq!(mode.converges, Likelihood::Yes, "{strategy}");
            assert!(mode.total_ms.unwrap().expected < 10_000.0, "{mode:?}");
        }
    }
    let fast = plan(guest(2_000_000.0));
    assert_ne!(fast.recommended, Strategy::Precopy);
    assert!(fast.reason.contains("dirties too much"), "{}", fast.reason);
}

#[test]
fn throttle_makes_a_fast_guest_converge_and_slows_it() {
    // All 128 MiB are written again within each pass of 690 ms.
    let slowed = plan(guest(200_000.0));
    let mode = slowed.of(Strategy::AutoConverge).unwrap();
    assert_eq!(mode.converges, Likelihood::Yes, "{mode:?}");
    assert!(mode.slowdown.unwrap().expected > 0.15, "{mode:?}");
}

#[test]
fn probability_falls_gradually_with_the_dirty_rate() {
    let chances = |rate: f64| plan(guest(rate)).of(Strategy::Precopy).unwrap().probability;
    let all: Vec<f64> = (0..30).map(|step| chances(20_000.0 * 1.1f64.powi(step))).collect();
    assert!(all[0] > 0.99 && all[29] < 0.01, "{all:?}");
    assert!(all.windows(2).all(|pair| pair[1] <= pair[0] + 0.15), "not falling: {all:?}");
}

#[test]
fn equal_inputs_make_equal_plans() {
    assert_eq!(plan(guest(30_000.0)), plan(guest(30_000.0)));
}

#[test]
fn bandwidth_limit_acts_as_the_link_rate() {
    let settings = Settings { max_bandwidth: Some(50_000_000), ..Settings::default() };
    let plan = Plan::make(guest(100.0), &settings);
    near(
        plan.of(Strategy::Precopy).unwrap().total_ms.unwrap().expected,
        131_072.0 * 4112.0 / 50e6 * 1e3,
        0.05,
    );
}

#[test]
fn certainty_names_what_was_not_measured() {
    let said = plan(Inputs { link: Link::given(1e7), ..guest(100.0) }).certainty;
    assert!(said.contains("not measured") && said.contains("extrapolated"), "{said}");
}
