//! Synthetic and recorded behaviour of guests.

use super::Phase;

/// Behaviour of each vCPU, repeated forever.
#[derive(Debug, Clone)]
pub struct Trace {
    /// Name of the trace.
    pub name: &'static str,
    /// Phases of each vCPU, at least one.
    pub vcpus: Vec<Vec<Phase>>,
}

const AS_FAST_AS_IT_CAN: f64 = f64::INFINITY;
/// Number of pages in 3 GB.
const STRESS: f64 = 786_432.0;
const LONG: f64 = 1e9;

/// First writes of each of two vCPUs in every 20 ms of a real guest, harvested at the same
/// interval; see the file.
const RECORDED: &str = include_str!("recorded.txt");

impl Trace {
    /// Returns traces whose load does not change.
    #[must_use]
    pub fn steady() -> Vec<Self> {
        let two = |name, rate, pages| {
            let phases = vec![Phase::uniform(LONG, rate, pages)];
            Self { name, vcpus: vec![phases.clone(), phases] }
        };
        let sequential = Phase { order: super::Order::Sequential, ..Phase::uniform(LONG, 50_000.0, STRESS) };
        vec![
            two("idle", 0.0, 1.0),
            two("fits", AS_FAST_AS_IT_CAN, 2048.0),
            two("fits just so", AS_FAST_AS_IT_CAN, 4000.0),
            two("almost fits", AS_FAST_AS_IT_CAN, 4500.0),
            two("almost fits, 20 k/s", 20_000.0, 4500.0),
            two("twice the ring", AS_FAST_AS_IT_CAN, 8192.0),
            two("stress", AS_FAST_AS_IT_CAN, STRESS),
            two("2 k/s", 2_000.0, STRESS),
            two("20 k/s", 20_000.0, STRESS),
            two("100 k/s in 64 MiB", 100_000.0, 16_384.0),
            Self {
                name: "one of four",
                vcpus: vec![
                    vec![Phase::uniform(LONG, AS_FAST_AS_IT_CAN, STRESS)],
                    vec![Phase::uniform(LONG, AS_FAST_AS_IT_CAN, 1024.0)],
                    vec![Phase::uniform(LONG, 1_000.0, 512.0)],
                    vec![Phase::idle(LONG)],
                ],
            },
            Self { name: "sequential", vcpus: vec![vec![sequential], vec![sequential]] },
        ]
    }

    /// Returns traces whose load changes all the time.
    #[must_use]
    pub fn changing() -> Vec<Self> {
        let burst = Phase::uniform(5.0, AS_FAST_AS_IT_CAN, STRESS);
        vec![
            Self {
                name: "bursts",
                vcpus: vec![vec![Phase::idle(20.0), burst], vec![Phase::idle(27.0), burst, Phase::idle(3.0)]],
            },
            Self {
                name: "flapping",
                vcpus: vec![vec![Phase::uniform(0.3, AS_FAST_AS_IT_CAN, STRESS), Phase::idle(0.3)]; 2],
            },
            Self {
                name: "sets that move",
                vcpus: vec![vec![Phase::uniform(2.0, AS_FAST_AS_IT_CAN, 1500.0); 3]; 2],
            },
            Self::recorded(),
        ]
    }

    /// Returns the trace that was recorded from a real guest.
    ///
    /// # Panics
    /// Panics if the recording in the source tree is damaged.
    #[must_use]
    pub fn recorded() -> Self {
        let mut vcpus = vec![Vec::new(); 2];
        for line in RECORDED.lines().filter(|line| !line.starts_with('#')) {
            let pages = line.split_whitespace().map(|word| word.parse::<f64>().expect("a number"));
            for (phases, pages) in vcpus.iter_mut().zip(pages) {
                phases.push(Phase::fills(0.02, pages / 0.02));
            }
        }
        Self { name: "recorded", vcpus }
    }

    /// Returns a trace of a day, on which the guest is idle most of the time and has each kind of
    /// load now and then.
    #[must_use]
    pub fn day() -> Self {
        let hour = |offset: f64| {
            vec![
                Phase::idle(600.0 + offset),
                Phase::uniform(300.0, 2_000.0, STRESS),
                Phase::uniform(120.0, AS_FAST_AS_IT_CAN, 2048.0),
                Phase::idle(900.0),
                Phase::uniform(30.0, AS_FAST_AS_IT_CAN, STRESS),
                Phase::idle(600.0 - offset),
                Phase::uniform(60.0, 20_000.0, 16_384.0),
                Phase::uniform(990.0, 200.0, 4500.0),
            ]
        };
        Self { name: "day", vcpus: vec![hour(0.0), hour(100.0)] }
    }
}
