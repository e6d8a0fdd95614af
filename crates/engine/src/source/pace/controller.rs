//! Rate controller: a state machine that derives the bulk rate from round trips and deliveries.

use super::meter::{Deliveries, Queue, RoundTrips, WINDOW};
use super::{Decision, Observation, Phase};
use std::time::Duration;

/// First rate in bytes per second: 400 Mb/s.
///
/// On a slower link a queue forms at once. With a much lower rate, bursts of 64 KiB on several
/// channels would be too far apart to tell whether deliveries follow the rate.
const INITIAL: f64 = 50e6;
/// Lowest rate in bytes per second: 10 Mb/s. With less, a migration would not end.
pub(super) const FLOOR: f64 = 1.25e6;
/// Highest rate in bytes per second: 400 Gb/s, more than pacing timers can do.
pub(super) const CEILING: f64 = 50e9;

/// Factor by which each step of the startup raises the rate. At the end of the startup, the queue
/// contains the excess of the last step during half a window, which is the time until the queue is
/// seen.
const STARTUP_GAIN: f64 = 2.0;
/// Duration of a startup step: a window of round trips, and time for deliveries to follow. The base
/// round trip is added.
const STARTUP_STEP: Duration = Duration::from_millis(20);
/// Number of steps without a queue in which deliveries did not follow the rate, after which the
/// startup ends. Something other than the link limits the deliveries.
const STARTUP_STUCK: u32 = 10;
/// Share of the rate that deliveries must reach to count as following it.
const FOLLOWS: f64 = 0.8;
/// Largest ratio of the rate to the recent deliveries. Capacity that was not used is not known to
/// exist.
const HEADROOM: f64 = 2.0;
/// Time over which the controller checks whether deliveries follow the rate.
const FOLLOW_TIME: Duration = Duration::from_millis(100);
/// Time without any delivery that counts as a pause: two ticks. While source or target has no
/// processor, nothing arrives, which does not show anything about the rate.
const PAUSE: Duration = Duration::from_millis(4);
/// Time in which pauses are looked for. If there was one, the delivery rate is that of the best
/// window of length [`PAUSE`] in this time.
const PAUSE_TIME: Duration = Duration::from_millis(300);

/// Share of the rate by which the rate climbs per second, at [`REFERENCE`].
///
/// The time from a cut to the next queue is about 1.5 s, of which the queue stands for about 20 ms.
/// This is so rare that the 99th percentile of the latency of urgent pages stays low.
const CLIMB: f64 = 0.05;
/// Rate in bytes per second at which [`CLIMB`] applies: 2 Gb/s.
///
/// The climb is proportional to the square root of the rate. The faster stream climbs faster, so
/// the time from queue to queue hardly depends on the link, but it gains less than a cut takes from
/// it. Therefore unequal streams on one link become equal (Chiu and Jain 1989). With a climb
/// proportional to the rate they would not.
const REFERENCE: f64 = 250e6;
/// Multiple of the level of the last queue from which on the link has more capacity than was known.
const BEYOND: f64 = 1.03;
/// Time without a queue after a cut, after which the link is also assumed to have more capacity
/// than was known.
const QUIET: Duration = Duration::from_millis(1500);
/// Number of cuts up to which a stream counts as new. A new stream knows only the capacity that
/// other streams left to it.
const YOUNG_CUTS: u64 = 4;
/// Multiple of the level of the last queue from which on a new stream looks for more capacity.
/// Older streams then yield four times per second.
const YOUNG_BEYOND: f64 = 0.95;
/// Time in which the climb doubles while the controller looks for more capacity.
const DOUBLING: Duration = Duration::from_millis(50);
/// Largest climb per second, as a share of the rate. A queue that is seen 12 ms late then has 6 %
/// of excess.
const MOST_CLIMB: f64 = 5.0;

/// Time that a short queue must stay until the rate is cut.
///
/// This time is another window of round trips, which is long enough for all streams on the link to
/// see the queue and yield, too. Otherwise only one of two streams would yield, and always the same
/// one.
const HOLD: Duration = Duration::from_millis(6);
/// Time before a cut whose deliveries count as the capacity of the link.
const MEASURE: Duration = Duration::from_millis(20);
/// Rate after a queue, as a share of the deliveries. The mean rate until the next queue is then
/// 0.96 of the deliveries.
const CUT: f64 = 0.93;
/// Rate after a queue that formed below the usual level, as a share of the deliveries. Another
/// stream has begun. It cannot know the capacity of the link, but this controller does.
const CUT_FOREIGN: f64 = 0.75;
/// Share of the level of the last queue below which a queue is attributed to another stream.
const FOREIGN: f64 = 0.96;
/// Share of the best rate below which a queue of another stream does not lower the rate. With two
/// streams, this is an equal share.
const HALF: f64 = 0.5;
/// Minimum rate at which a queue drains after a cut, as a share of the link's rate. The controller
/// waits until the queue has drained at this rate before it reacts to a queue again.
const RUN_OFF: f64 = 0.05;
/// Longest wait for the effect of a cut, however long the queue.
const MOST_WAIT: Duration = Duration::from_millis(200);

/// Rate while a long queue drains, as a share of the deliveries. Draining takes as long as the
/// queue was.
const DRAIN: f64 = 0.5;
/// Multiple of the expected draining time after which a queue is attributed to another stream.
const DRAIN_PATIENCE: f64 = 2.5;
/// Time for windows and ticks on top of the draining time.
const DRAIN_EXTRA: Duration = Duration::from_millis(20);

/// Share of the best rate that the bulk keeps, however long the queue is. Otherwise a stream that
/// fills all buffers would take all capacity from a stream that yields.
pub(super) const LEAST_SHARE: f64 = 0.3;
/// Factor up to which a rate counts as equal to the minimum share, because the best rate decays in
/// the meantime.
const NEARLY: f64 = 1.05;
/// Time constant with which the best rate decays, because a link may become slower permanently.
const BEST_TIME: Duration = Duration::from_secs(60);
/// Time over which the controller checks whether the minimum share arrives, which is not the case
/// if the link has become slower than this share.
const INSIST_TIME: Duration = Duration::from_millis(200);
/// Time without a queue after which a contended link counts as free: the other stream has ended, or
/// yields.
const GONE: Duration = Duration::from_millis(20);

/// Maximum time between two calls that is taken into account. If the process was stopped for
/// longer, the controller knows nothing about the time in between.
const MOST_ELAPSED: Duration = Duration::from_millis(100);

/// Controller that finds the rate. It is a pure state machine: the same observations lead to the
/// same decisions.
#[derive(Debug)]
pub struct Controller {
    round_trips: RoundTrips,
    deliveries: Deliveries,
    /// Rate in bytes per second. `FLOOR <= rate <= CEILING`.
    rate: f64,
    /// Deliveries when a queue formed last, in bytes per second.
    level: f64,
    /// Highest deliveries beside a queue, in bytes per second, with slow decay.
    best: f64,
    state: State,
    before: Option<Duration>,
    cuts: u64,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Startup {
        raised: Option<Duration>,
        stuck: u32,
    },
    /// `passed` is the time since which the rate is beyond [`BEYOND`]. Until `deaf`, a queue is the
    /// one that was cut.
    Climb {
        passed: Option<Duration>,
        deaf: Duration,
    },
    Hold {
        until: Duration,
    },
    Drain {
        until: Duration,
        then: f64,
    },
    Contended {
        clear: Option<Duration>,
        judged: Duration,
    },
}

impl Default for Controller {
    fn default() -> Self {
        Self::new()
    }
}

impl Controller {
    /// Creates a controller that knows nothing about the link.
    #[must_use]
    pub fn new() -> Self {
        Controller {
            round_trips: RoundTrips::default(),
            deliveries: Deliveries::default(),
            rate: INITIAL,
            level: CEILING,
            best: 0.0,
            state: State::Startup { raised: None, stuck: 0 },
            before: None,
            cuts: 0,
        }
    }

    /// Returns the current rate in bytes per second.
    #[must_use]
    pub fn pace(&self) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between FLOOR and CEILING"
        )]
        let rate = self.rate as u64;
        rate
    }

    /// Returns the rate for the time until the next call. Call this every few milliseconds.
    pub fn observe(&mut self, seen: &Observation<'_>) -> Decision {
        let now = seen.now;
        let elapsed = now.saturating_sub(self.before.unwrap_or(now)).min(MOST_ELAPSED);
        self.before = Some(now);
        let queue = self.round_trips.observe(now, seen.round_trips, seen.waiting);
        if seen.wanting {
            self.deliveries.observe(now, seen.acknowledged);
        } else {
            self.deliveries.restart();
        }
        // While the bulk has its minimum share, the best rate cannot be measured, so it does not
        // decay.
        if !matches!(self.state, State::Contended { .. }) {
            self.best *= (-elapsed.as_secs_f64() / BEST_TIME.as_secs_f64()).exp();
        }
        match self.state {
            // Without bulk to send, the observations say nothing about the rate.
            _ if !seen.wanting => {}
            State::Startup { raised, stuck } => self.start(now, queue, raised, stuck),
            State::Climb { passed, deaf } => self.climb(now, elapsed, queue, passed, deaf),
            State::Hold { until } => self.hold(now, queue, until),
            State::Drain { until, then } => self.drain(now, queue, until, then),
            State::Contended { clear, judged } => self.insist(now, queue, clear, judged),
        }
        self.rate = self.rate.clamp(FLOOR, CEILING);
        let rate = self.pace();
        Decision { rate, phase: self.phase() }
    }

    /// Returns the smallest round trip of about the last ten seconds, which is the round trip of
    /// the path without queues.
    #[must_use]
    pub fn base_round_trip(&self) -> Option<Duration> {
        self.round_trips.base()
    }

    /// Returns the number of times the rate was lowered because of a queue.
    #[must_use]
    pub fn cuts(&self) -> u64 {
        self.cuts
    }

    fn phase(&self) -> Phase {
        match self.state {
            State::Startup { .. } => Phase::Startup,
            State::Climb { .. } => Phase::Climb,
            State::Hold { .. } => Phase::Hold,
            State::Drain { .. } => Phase::Drain,
            State::Contended { .. } => Phase::Contended,
        }
    }

    fn start(&mut self, now: Duration, queue: Queue, raised: Option<Duration>, stuck: u32) {
        match queue {
            Queue::Unknown => return,
            Queue::Short | Queue::Deep => return self.cut(now, queue),
            Queue::Clear => {}
        }
        let Some(since) = raised else {
            self.state = State::Startup { raised: Some(now), stuck };
            return;
        };
        let step = STARTUP_STEP + self.round_trips.base().unwrap_or_default();
        if now.saturating_sub(since) < step {
            return;
        }
        let stuck = if self.follows(step / 2) { 0 } else { stuck + 1 };
        if stuck == 0 {
            self.rate *= STARTUP_GAIN;
        }
        self.state = State::Startup { raised: Some(now), stuck };
        if stuck >= STARTUP_STUCK {
            self.level = self.delivered().unwrap_or(self.rate);
            self.best = self.best.max(self.level);
            self.state = State::Climb { passed: None, deaf: now };
        }
    }

    fn climb(
        &mut self,
        now: Duration,
        elapsed: Duration,
        queue: Queue,
        passed: Option<Duration>,
        deaf: Duration,
    ) {
        match queue {
            Queue::Short | Queue::Deep if now >= deaf => {
                self.state = State::Hold { until: now + HOLD };
                return self.hold(now, queue, now + HOLD);
            }
            Queue::Clear => {}
            _ => return,
        }
        let delivered = self.delivered();
        if delivered.is_none_or(|rate| rate < FOLLOWS * self.rate) {
            // Something other than the link limits the deliveries. There may be no more to deliver,
            // or the rate itself is the limit. The rate is never lowered below a minimum that any
            // link carries. A rate that the sender cannot keep up with forms no queue. A rate that
            // waits for deliveries, which in turn wait for the rate, would never rise.
            let least = INITIAL.max(LEAST_SHARE * self.best);
            let most = delivered.map_or(self.rate, |rate| (rate * HEADROOM).max(least));
            self.rate = self.rate.min(most);
            self.state = State::Climb { passed: None, deaf };
            return;
        }
        let mut slope = CLIMB * (REFERENCE * self.rate).sqrt();
        let beyond = if self.cuts <= YOUNG_CUTS { YOUNG_BEYOND } else { BEYOND };
        let more = self.rate > beyond * self.level || now.saturating_sub(deaf) > QUIET;
        let passed = more.then(|| passed.unwrap_or(now));
        if let Some(since) = passed {
            let doublings = now.saturating_sub(since).as_secs_f64() / DOUBLING.as_secs_f64();
            slope = (slope * doublings.exp2()).min(MOST_CLIMB * self.rate);
        }
        self.rate += slope * elapsed.as_secs_f64();
        self.state = State::Climb { passed, deaf };
    }

    fn hold(&mut self, now: Duration, queue: Queue, until: Duration) {
        match queue {
            Queue::Deep => self.cut(now, queue),
            Queue::Short if now >= until => self.cut(now, queue),
            Queue::Short => {}
            // The queue disappeared by itself, so it was noise.
            Queue::Clear | Queue::Unknown => self.state = State::Climb { passed: None, deaf: now },
        }
    }

    /// Lowers the rate because of a queue that is not noise.
    fn cut(&mut self, now: Duration, queue: Queue) {
        self.cuts += 1;
        let measured = self.deliveries.rate(MEASURE).unwrap_or(self.rate).min(self.rate);
        let known = self.best > 0.0;
        let foreign = known && measured < FOREIGN * self.level && measured > HALF * self.best;
        let lowered =
            if foreign { (CUT_FOREIGN * measured).max(CUT * HALF * self.best) } else { CUT * measured };
        self.level = measured;
        self.best = self.best.max(measured);
        let lowered = lowered.max(LEAST_SHARE * self.best);
        let standing = self.round_trips.standing;
        if queue == Queue::Deep {
            self.rate = (DRAIN * measured).max(LEAST_SHARE * self.best);
            let patience =
                standing.mul_f64(DRAIN_PATIENCE) + DRAIN_EXTRA + self.round_trips.base().unwrap_or_default();
            self.state = State::Drain { until: now + patience, then: lowered };
            return;
        }
        self.rate = lowered;
        let effect = (standing.div_f64(RUN_OFF) + WINDOW).min(MOST_WAIT);
        let deaf = now + effect + self.round_trips.base().unwrap_or_default();
        self.state = State::Climb { passed: None, deaf };
    }

    fn drain(&mut self, now: Duration, queue: Queue, until: Duration, then: f64) {
        if matches!(queue, Queue::Clear | Queue::Unknown) {
            self.rate = then;
            self.state = State::Climb { passed: None, deaf: now + WINDOW };
            return;
        }
        if now < until {
            return;
        }
        let least = LEAST_SHARE * self.best;
        if self.rate > NEARLY * least {
            // The measured deliveries are more accurate now than when the queue was found.
            return self.cut(now, Queue::Deep);
        }
        self.rate = least;
        self.state = State::Contended { clear: None, judged: now };
    }

    fn insist(&mut self, now: Duration, queue: Queue, clear: Option<Duration>, judged: Duration) {
        if matches!(queue, Queue::Clear | Queue::Unknown) {
            let since = clear.unwrap_or(now);
            self.state = State::Contended { clear: Some(since), judged };
            if now.saturating_sub(since) >= GONE {
                self.level = self.rate;
                self.state = State::Climb { passed: None, deaf: now };
            }
            return;
        }
        self.state = State::Contended { clear: None, judged };
        if now.saturating_sub(judged) < INSIST_TIME {
            return;
        }
        if let Some(delivered) = self.deliveries.rate(INSIST_TIME).filter(|rate| *rate < FOLLOWS * self.rate)
        {
            // The link is slower than the minimum share of its earlier rate, so the queue is caused
            // by this stream.
            self.best = self.best.min(delivered);
        }
        self.rate = LEAST_SHARE * self.best;
        self.state = State::Contended { clear: None, judged: now };
    }

    /// Returns the deliveries in bytes per second, without pauses in which one side did not run.
    fn delivered(&self) -> Option<f64> {
        let mean = self.deliveries.rate(FOLLOW_TIME)?;
        let (least, best) = self.deliveries.extremes(PAUSE, PAUSE_TIME);
        Some(if least > 0.0 { mean } else { best.max(mean) })
    }

    /// Returns true if the deliveries over the last `time` followed the rate.
    fn follows(&self, time: Duration) -> bool {
        self.deliveries.rate(time).is_some_and(|delivered| delivered >= FOLLOWS * self.rate)
    }
}
