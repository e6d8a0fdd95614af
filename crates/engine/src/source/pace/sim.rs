//! Simulated link in small steps of time: a token bucket, a queue, noise, and the streams that
//! share it. The seed determines the run.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "simulated bytes are few, and not below 0"
)]

use super::underway::ProbesInFlight;
use super::{Controller, Decision, Observation, Phase};
use std::collections::VecDeque;
use std::time::Duration;

/// Length of a step in seconds, short compared with every queue that matters.
const STEP: f64 = 50e-6;
const TICK_STEPS: u64 = 40;

/// Random number generator splitmix64.
struct Rng(u64);

impl Rng {
    /// Returns a number in `0.0..1.0`.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Parameters of a link, in seconds and bytes.
#[derive(Clone)]
pub(super) struct Link {
    /// Rates of the link, each with the time from which on it holds, in order.
    pub(super) rates: Vec<(f64, f64)>,
    pub(super) burst: f64,
    pub(super) buffer: f64,
    pub(super) base: f64,
    /// Mean delay that the scheduler adds to each round trip.
    pub(super) jitter: f64,
    /// Rate of stalls per thousand round trips, and the longest stall.
    pub(super) stalls: (f64, f64),
    /// Highest rate of a sender, whatever the link allows. It varies by a tenth.
    pub(super) sender: f64,
    /// Mean times for which a side has a processor, and has none. Without a processor only the
    /// side's kernel works.
    pub(super) busy: Option<(f64, f64)>,
    pub(super) seed: u64,
}

impl Link {
    /// Returns a link like the shaped link of the benchmark, without headers.
    pub(super) fn shaped(gbps: f64) -> Self {
        Link {
            rates: vec![(0.0, gbps * 1e9 / 8.0 * 0.956)],
            burst: (256.0 * 1024.0_f64).min(gbps * 125e3),
            buffer: gbps * 1e9 / 8.0 * 0.02,
            base: 20e-6,
            jitter: 15e-6,
            stalls: (5.0, 1e-3),
            sender: 4e9,
            busy: None,
            seed: 1,
        }
    }

    fn rate(&self, now: f64) -> f64 {
        self.rates.iter().rev().find(|(since, _)| *since <= now).map_or(0.0, |(_, rate)| *rate)
    }
}

pub(super) enum FlowKind {
    /// Stream under rate control, from one time until another.
    Paced(f64, f64),
    /// Competing stream whose window grows until the buffer is full (RFC 9438), from one time until
    /// another.
    Cubic(f64, f64),
}

struct Ours {
    controller: Controller,
    decision: Decision,
    probes: VecDeque<Sent>,
    number: u64,
    underway: ProbesInFlight,
    trips: Vec<Duration>,
}

/// Probe without an echo.
struct Sent {
    number: u64,
    at: f64,
    /// Round trip of the probe, in seconds.
    trip: f64,
    /// Time at which the receiver had a processor for the probe.
    read: Option<f64>,
}

/// Side of the link: whether it has a processor, and until when.
struct Side {
    runs: bool,
    until: f64,
}

impl Side {
    fn step(&mut self, now: f64, busy: Option<(f64, f64)>, rng: &mut Rng) {
        let Some((runs, waits)) = busy else { return };
        while self.until <= now {
            self.runs = !self.runs;
            self.until += (0.5 + rng.unit()) * if self.runs { runs } else { waits };
        }
    }
}

struct Cubic {
    window: f64,
    most: f64,
    lost: f64,
}

enum Sender {
    Ours(Box<Ours>),
    Cubic(Cubic),
}

struct Flow {
    sender: Sender,
    from: f64,
    until: f64,
    delivered: f64,
}

/// Trace of a stream. Deliveries are recorded every 10 ms.
pub(super) struct Trace {
    /// Times, and the bytes delivered so far.
    pub(super) delivered: Vec<(f64, f64)>,
    pub(super) rates: Vec<(f64, f64, Phase)>,
    /// Times at which probes were sent, and their round trips.
    pub(super) trips: Vec<(f64, f64)>,
    pub(super) cuts: u64,
}

impl Trace {
    /// Returns the bytes per second between two times.
    pub(super) fn rate(&self, from: f64, until: f64) -> f64 {
        let at = |time: f64| self.delivered.iter().rev().find(|(t, _)| *t <= time).map_or(0.0, |(_, b)| *b);
        (at(until) - at(from)) / (until - from)
    }

    /// Returns the mean and the percentile of the round trips between two times, in microseconds.
    pub(super) fn trips(&self, from: f64, until: f64, percent: f64) -> (f64, f64) {
        let mut trips: Vec<f64> = self
            .trips
            .iter()
            .filter(|(at, _)| (from..until).contains(at))
            .map(|(_, trip)| trip * 1e6)
            .collect();
        trips.sort_by(f64::total_cmp);
        let mean = trips.iter().sum::<f64>() / trips.len() as f64;
        (mean, trips[((trips.len() as f64 * percent / 100.0) as usize).min(trips.len() - 1)])
    }
}

pub(super) struct World {
    link: Link,
    flows: Vec<Flow>,
    /// Bytes that each flow put into each step and that have not left.
    queue: VecDeque<Vec<f64>>,
    queued: f64,
    tokens: f64,
    now: f64,
    rng: Rng,
    speed: f64,
    /// The senders' side, and the receivers' side.
    sides: [Side; 2],
}

impl World {
    pub(super) fn new(link: Link, flows: &[FlowKind]) -> Self {
        let flow = |kind: &FlowKind| {
            let (sender, from, until) = match kind {
                FlowKind::Paced(from, until) => {
                    let decision = Decision { rate: 0, phase: Phase::Startup };
                    let ours = Ours {
                        controller: Controller::new(),
                        decision,
                        probes: VecDeque::new(),
                        number: 0,
                        underway: ProbesInFlight::default(),
                        trips: Vec::new(),
                    };
                    (Sender::Ours(Box::new(ours)), *from, *until)
                }
                FlowKind::Cubic(from, until) => {
                    (Sender::Cubic(Cubic { window: 15e3, most: 15e3, lost: *from }), *from, *until)
                }
            };
            Flow { sender, from, until, delivered: 0.0 }
        };
        World {
            tokens: link.burst,
            rng: Rng(link.seed),
            flows: flows.iter().map(flow).collect(),
            link,
            queue: VecDeque::new(),
            queued: 0.0,
            now: 0.0,
            speed: 1.0,
            sides: [0.0, 1e-3].map(|until| Side { runs: true, until }),
        }
    }

    pub(super) fn run(mut self, until: f64) -> Vec<Trace> {
        let empty = || Trace { delivered: vec![], rates: vec![], trips: vec![], cuts: 0 };
        let mut traces: Vec<Trace> = self.flows.iter().map(|_| empty()).collect();
        for step in 0..(until / STEP) as u64 {
            self.now = step as f64 * STEP;
            if step.is_multiple_of(2000) {
                self.speed = 0.9 + 0.1 * self.rng.unit();
            }
            self.sides.iter_mut().for_each(|side| side.step(self.now, self.link.busy, &mut self.rng));
            self.arrive();
            self.leave();
            self.read();
            for (index, trace) in traces.iter_mut().enumerate() {
                // Two controllers do not tick in the same step.
                if (step + 17 * index as u64).is_multiple_of(TICK_STEPS) && self.sides[0].runs {
                    self.tick(index, trace);
                }
                if step.is_multiple_of(200) {
                    trace.delivered.push((self.now, self.flows[index].delivered));
                }
            }
        }
        traces
    }

    fn waits(&self) -> f64 {
        self.queued / self.link.rate(self.now)
    }

    fn arrive(&mut self) {
        let trip = self.link.base + self.waits();
        // A side without a processor neither sends nor makes room for more.
        let works = self.sides.iter().all(|side| side.runs);
        let most = if works { self.link.sender * self.speed } else { 0.0 };
        let active = |flow: &Flow| (flow.from..flow.until).contains(&self.now);
        let wants = self.flows.iter().map(|flow| match &flow.sender {
            _ if !active(flow) => 0.0,
            Sender::Ours(ours) => (ours.decision.rate as f64).min(most) * STEP,
            Sender::Cubic(cubic) => (cubic.window / trip).min(most) * STEP,
        });
        let mut wants: Vec<f64> = wants.collect();
        let all: f64 = wants.iter().sum();
        let room = (self.link.buffer - self.queued).max(0.0);
        let kept = if all > room { room / all } else { 1.0 };
        for (want, flow) in wants.iter_mut().zip(&mut self.flows) {
            *want *= kept;
            if let Sender::Cubic(cubic) = &mut flow.sender
                && *want > 0.0
            {
                cubic.step(self.now, trip, kept < 1.0);
            }
        }
        self.queued += wants.iter().sum::<f64>();
        self.queue.push_back(wants);
    }

    fn leave(&mut self) {
        self.tokens = (self.tokens + self.link.rate(self.now) * STEP).min(self.link.burst);
        while let Some(front) = self.queue.front_mut() {
            let bytes: f64 = front.iter().sum();
            let part = if bytes <= self.tokens { 1.0 } else { self.tokens / bytes };
            for (flow, bytes) in self.flows.iter_mut().zip(front.iter_mut()) {
                flow.delivered += *bytes * part;
                *bytes -= *bytes * part;
            }
            self.queued = (self.queued - bytes * part).max(0.0);
            self.tokens -= bytes * part;
            if part < 1.0 {
                return;
            }
            self.queue.pop_front();
        }
        self.queued = 0.0;
    }

    /// Lets the receiver read the probes that have arrived, so that it can send them back.
    fn read(&mut self) {
        let now = self.now;
        let senders = self.flows.iter_mut().map(|flow| &mut flow.sender);
        for sender in senders.filter(|_| self.sides[1].runs) {
            let Sender::Ours(ours) = sender else { continue };
            for probe in ours.probes.iter_mut().filter(|probe| probe.at + probe.trip / 2.0 <= now) {
                probe.read.get_or_insert(now.min((probe.at + probe.trip / 2.0).max(now - STEP)));
            }
        }
    }

    fn tick(&mut self, index: usize, trace: &mut Trace) {
        let stalled = self.rng.unit() * 1000.0 < self.link.stalls.0;
        let stall = if stalled { self.rng.unit() * self.link.stalls.1 } else { 0.0 };
        let noise = -self.link.jitter * (1.0 - self.rng.unit()).ln() + stall;
        let (trip, now) = (self.link.base + self.waits() + noise, self.now);
        let flow = &mut self.flows[index];
        let Sender::Ours(ours) = &mut flow.sender else { return };
        if !(flow.from..flow.until).contains(&now) {
            return;
        }
        ours.trips.clear();
        let back = |probe: &Sent| probe.read.is_some_and(|read| read + probe.trip / 2.0 <= now);
        while ours.probes.front().is_some_and(back) {
            let probe = ours.probes.pop_front().unwrap();
            assert!(ours.underway.echoed(probe.number).is_some());
            // The time that the probe waited at the receiver is known, so it is subtracted.
            ours.trips.push(Duration::from_secs_f64(probe.trip));
            trace.trips.push((probe.at, probe.trip));
        }
        if ours.probes.iter().all(|probe| probe.at + probe.trip <= now) {
            ours.underway.all_reached();
        }
        // Probes arrive in order, as on a stream.
        let last = ours.probes.back().map_or(0.0, |probe| probe.at + probe.trip);
        ours.number += 1;
        ours.underway.sent(ours.number, Duration::from_secs_f64(now));
        ours.probes.push_back(Sent { number: ours.number, at: now, trip: trip.max(last - now), read: None });
        ours.decision = ours.controller.observe(&Observation {
            now: Duration::from_secs_f64(now),
            round_trips: &ours.trips,
            waiting: ours.underway.waiting(Duration::from_secs_f64(now)),
            acknowledged: flow.delivered as u64,
            wanting: true,
        });
        trace.rates.push((now, ours.decision.rate as f64, ours.decision.phase));
        trace.cuts = ours.controller.cuts();
    }
}

impl Cubic {
    fn step(&mut self, now: f64, trip: f64, loss: bool) {
        const SEGMENT: f64 = 1448.0;
        if loss && now - self.lost > trip {
            self.most = self.window;
            self.window *= 0.7;
            self.lost = now;
            return;
        }
        // The cubic curve, or the Reno line where the curve is slower.
        let curve = (self.most / SEGMENT * 0.3 / 0.4).cbrt();
        let wanted = SEGMENT * (0.4 * (now - self.lost - curve).powi(3)) + self.most;
        let reno = self.window + SEGMENT * 0.53 * STEP / trip;
        self.window = reno.max(wanted.min(self.window * (1.0 + STEP / trip)));
    }
}
