//! Tests of the controller on simulated links. Times are in seconds, rates in bytes per second.

use super::controller::{CEILING, FLOOR, LEAST_SHARE};
use super::sim::{FlowKind, Link, Trace, World};
use super::{Controller, Observation, Phase};
use proptest::prelude::*;
use std::time::Duration;

const EVER: f64 = 1e9;

fn alone(link: &Link, until: f64) -> Trace {
    World::new(link.clone(), &[FlowKind::Paced(0.0, EVER)]).run(until).remove(0)
}

/// Returns the mean and the 99th percentile of the round trips of the idle link, in microseconds.
fn idle(link: &Link) -> (f64, f64) {
    let fast = Link { rates: vec![(0.0, 1e12)], burst: 1e12, ..link.clone() };
    alone(&fast, 5.0).trips(0.0, 5.0, 99.0)
}

fn jain(rates: &[f64]) -> f64 {
    let (sum, squares) = (rates.iter().sum::<f64>(), rates.iter().map(|r| r * r).sum::<f64>());
    sum * sum / (rates.len() as f64 * squares)
}

#[test]
fn link_is_used_without_a_standing_queue() {
    for gbps in [0.2, 1.0, 2.0, 10.0, 25.0] {
        for seed in 0..4 {
            let link = Link { seed, ..Link::shaped(gbps) };
            let trace = alone(&link, 20.0);
            let share = trace.rate(2.0, 20.0) / link.rates[0].1;
            let (mean, p99) = trace.trips(2.0, 20.0, 99.0);
            let (idle_mean, idle_p99) = idle(&link);
            let what = format!(
                "{gbps} Gb/s, seed {seed}: share {share:.3}, mean {mean:.0} ({idle_mean:.0}), p99 {p99:.0} ({idle_p99:.0}), {} cuts",
                trace.cuts
            );
            println!("{what}");
            assert!((0.94..1.0).contains(&share), "{what}");
            assert!(mean <= 1.5 * idle_mean && p99 <= 4.0 * idle_p99, "{what}");
        }
    }
}

#[test]
fn rate_is_found_within_a_second() {
    for gbps in [0.2, 2.0, 10.0] {
        let link = Link::shaped(gbps);
        let share = alone(&link, 2.0).rate(0.5, 1.0) / link.rates[0].1;
        assert!(share > 0.7, "{gbps} Gb/s: {share}");
    }
}

#[test]
fn steady_rate_does_not_oscillate() {
    let link = Link::shaped(2.0);
    let trace = alone(&link, 20.0);
    let steady = trace.rates.iter().filter(|(at, ..)| *at > 6.0).map(|(_, rate, _)| rate / link.rates[0].1);
    let (least, most) = steady.fold((f64::MAX, 0.0_f64), |(a, b), rate| (a.min(rate), b.max(rate)));
    println!("from {least:.2} to {most:.2}");
    assert!(least > 0.9 && most < 1.05, "from {least} to {most}");
}

#[test]
fn rate_follows_a_link_that_changes() {
    let gbps = |gbps: f64| gbps * 1e9 / 8.0 * 0.956;
    for seed in 0..4 {
        let link = Link {
            rates: vec![(0.0, gbps(2.0)), (10.0, gbps(1.0)), (20.0, gbps(4.0)), (30.0, gbps(0.3))],
            seed,
            ..Link::shaped(2.0)
        };
        let trace = alone(&link, 40.0);
        for (since, rate) in &link.rates {
            let share = trace.rate(since + 3.0, since + 10.0) / rate;
            let (_, p99) = trace.trips(since + 3.0, since + 10.0, 98.0);
            println!("seed {seed}, from {since}: share {share:.3}, p98 {p99:.0} us");
            assert!(share > 0.9, "seed {seed}, from {since}: {share}");
            assert!(p99 < 400.0, "seed {seed}, from {since}: {p99} us");
        }
    }
}

#[test]
fn two_streams_become_equal() {
    for (gbps, seed) in [(2.0, 0), (2.0, 1), (2.0, 2), (10.0, 3), (10.0, 4), (0.5, 5)] {
        let link = Link { seed, ..Link::shaped(gbps) };
        let flows = [FlowKind::Paced(0.0, EVER), FlowKind::Paced(5.0, EVER)];
        let traces = World::new(link.clone(), &flows).run(40.0);
        let rates = |from, until| [0, 1].map(|flow: usize| traces[flow].rate(from, until) / link.rates[0].1);
        for second in 0..8 {
            let from = 5.0 + f64::from(second);
            print!("{:.2?} ", rates(from, from + 1.0));
        }
        let (early, late) = (rates(9.0, 12.0), rates(15.0, 40.0));
        println!("{gbps} Gb/s, seed {seed}: {early:.2?} {:.3}, {late:.2?} {:.3}", jain(&early), jain(&late));
        let (mean, p99) = traces[0].trips(10.0, 40.0, 99.0);
        println!("  mean {mean:.0}, p99 {p99:.0}");
        assert!(jain(&early) >= 0.9, "{gbps} Gb/s, seed {seed}: {early:?}");
        assert!(jain(&late) >= 0.95 && late.iter().sum::<f64>() > 0.9, "{gbps} Gb/s, seed {seed}: {late:?}");
    }
}

#[test]
fn first_stream_gets_whole_link_again_when_second_ends() {
    let link = Link::shaped(2.0);
    let flows = [FlowKind::Paced(0.0, EVER), FlowKind::Paced(2.0, 8.0)];
    let traces = World::new(link.clone(), &flows).run(20.0);
    let share = traces[0].rate(11.0, 20.0) / link.rates[0].1;
    assert!(share > 0.93, "{share}");
}

#[test]
fn keeps_minimum_share_beside_a_stream_that_fills_the_buffer() {
    for seed in 0..4 {
        let link = Link { seed, ..Link::shaped(2.0) };
        let flows = [FlowKind::Paced(0.0, EVER), FlowKind::Cubic(3.0, 20.0)];
        let traces = World::new(link.clone(), &flows).run(30.0);
        for second in 0..8 {
            let from = 3.0 + 2.0 * f64::from(second);
            print!("{:.2} ", traces[0].rate(from, from + 2.0) / link.rates[0].1);
        }
        let share = traces[0].rate(5.0, 20.0) / link.rates[0].1;
        let after = traces[0].rate(23.0, 30.0) / link.rates[0].1;
        println!("seed {seed}: {share:.3} beside CUBIC, {after:.3} after");
        assert!(share > 0.25, "seed {seed}: {share}");
        assert!(after > 0.9, "seed {seed}: {after}");
    }
}

#[test]
fn rate_fits_the_sender_if_the_processor_is_the_bottleneck() {
    for seed in 0..4 {
        // The only queue is that of the scheduler: 20 us, with a long tail and stalls of up to 3
        // ms.
        let link = Link {
            rates: vec![(0.0, 1e12)],
            jitter: 40e-6,
            stalls: (100.0, 3e-3),
            sender: if seed % 2 == 0 { 1e9 } else { 3e9 },
            seed,
            ..Link::shaped(2.0)
        };
        let trace = alone(&link, 20.0);
        let share = trace.rate(2.0, 20.0) / link.sender;
        let most = trace.rates.iter().map(|(_, rate, _)| rate / link.sender).fold(0.0, f64::max);
        println!("seed {seed}: share {share:.2}, pace up to {most:.2}, {} cuts", trace.cuts);
        assert!(share > 0.7, "seed {seed}: {share}");
        assert!(most < 2.5, "seed {seed}: {most}");
    }
}

/// Echoes are late on such hosts because no thread runs that could send them. That is no queue.
#[test]
fn rate_fits_both_sides_if_they_wait_for_a_processor() {
    for (runs, waits) in [(0.010, 0.010), (0.030, 0.015)] {
        for seed in 0..4 {
            let link = Link {
                rates: vec![(0.0, 1e12)],
                sender: 1e9,
                busy: Some((runs, waits)),
                seed,
                ..Link::shaped(2.0)
            };
            let trace = alone(&link, 20.0);
            // Both sides have to run at the same time.
            let possible = link.sender * 0.95 * (runs / (runs + waits)).powi(2);
            let share = trace.rate(2.0, 20.0) / possible;
            println!("{runs} of {waits}, seed {seed}: share {share:.2}, {} cuts", trace.cuts);
            assert!(share > 0.7, "{runs} of {waits}, seed {seed}: {share}");
        }
    }
}

#[test]
fn permanent_queue_leads_to_the_minimum_share() {
    let mut controller = Controller::new();
    let (mut acknowledged, mut last) = (0, None);
    for tick in 0..2000_u64 {
        let trip = if tick < 400 { 40 } else { 9000 };
        let decision = controller.observe(&Observation {
            now: Duration::from_millis(2 * tick),
            round_trips: &[Duration::from_micros(trip)],
            waiting: Duration::ZERO,
            acknowledged,
            wanting: true,
        });
        acknowledged += decision.rate.min(200_000_000) / 500;
        last = Some(decision);
    }
    let last = last.unwrap();
    assert_eq!(last.phase, Phase::Contended);
    let least = LEAST_SHARE * 200e6;
    assert!((0.9 * least..1.01 * least).contains(&(last.rate as f64)), "{last:?}");
}

#[test]
fn rate_is_kept_while_there_is_no_bulk() {
    let mut controller = Controller::new();
    let observe = |controller: &mut Controller, tick: u64, wanting, trip| {
        controller.observe(&Observation {
            now: Duration::from_millis(2 * tick),
            round_trips: &[Duration::from_micros(trip)],
            waiting: Duration::ZERO,
            acknowledged: 0,
            wanting,
        })
    };
    let first = observe(&mut controller, 0, true, 40);
    for tick in 1..1000 {
        assert_eq!(observe(&mut controller, tick, false, 40 + tick), first);
    }
}

proptest! {
    #[test]
    fn no_observation_leads_outside_the_bounds(
        seen in proptest::collection::vec(
            (0..3_000_000_000_u64, proptest::collection::vec(0..u64::MAX, 0..4), any::<u64>(), any::<u64>(), any::<bool>()),
            1..60,
        )
    ) {
        let mut controller = Controller::new();
        let mut now = Duration::ZERO;
        for (elapsed, trips, waiting, acknowledged, wanting) in seen {
            now += Duration::from_nanos(elapsed);
            let trips: Vec<Duration> = trips.into_iter().map(Duration::from_nanos).collect();
            let decision = controller.observe(&Observation {
                now,
                round_trips: &trips,
                waiting: Duration::from_nanos(waiting),
                acknowledged,
                wanting,
            });
            prop_assert!((FLOOR..=CEILING).contains(&(decision.rate as f64)), "{decision:?}");
        }
    }
}
