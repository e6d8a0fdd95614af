//! The decisions.

use super::meter::{Deliveries, Queue, RoundTrips, WINDOW};
use super::{Decision, Observation, Phase};
use std::time::Duration;

/// In bytes a second, the first pace: 400 Mb/s. A link that carries less shows a queue at once. Much less than this, and bursts of
/// 64 KiB on several channels are too far apart to tell whether deliveries follow.
const INITIAL: f64 = 50e6;
/// In bytes a second, never less: 10 Mb/s. What is slower never ends.
pub(super) const FLOOR: f64 = 1.25e6;
/// In bytes a second, never more: 400 Gb/s, beyond what pacing timers can do.
pub(super) const CEILING: f64 = 50e9;

/// At the start the pace is raised by this factor each step. The queue at its end is what the last step was too much in
/// the time it takes to see it: half a window's worth.
const STARTUP_GAIN: f64 = 2.0;
/// A step of the start: a window of round trips, and time for deliveries to follow. Round trips longer than that add.
const STARTUP_STEP: Duration = Duration::from_millis(20);
/// After so many steps in which deliveries did not follow, and no queue was seen, something other than the link limits.
const STARTUP_STUCK: u32 = 10;
/// Deliveries that reach less than this share of the pace do not follow it.
const FOLLOWS: f64 = 0.8;
/// The pace is at most this many times what was delivered in a second: what is not used is not known to be there.
const HEADROOM: f64 = 2.0;
/// Over so long it is seen whether deliveries follow.
const FOLLOW_TIME: Duration = Duration::from_millis(100);
/// While one side has no processor nothing arrives, and that says nothing of the pace: where nothing did for so long, two ticks,
const PAUSE: Duration = Duration::from_millis(4);
/// within so long, deliveries are those of the best part of it that is as long as a pause.
const PAUSE_TIME: Duration = Duration::from_millis(300);

/// At [`REFERENCE`], the pace climbs by this share of it a second. From the cut to the next queue takes about 1.5 s, of
/// which the queue stands for about 20 ms: rare enough for a 99th percentile.
const CLIMB: f64 = 0.05;
/// In bytes a second: 2 Gb/s. The climb goes with the square root of the pace: the faster stream climbs faster, so that
/// the time from queue to queue hardly depends on the link, but by less than the cut takes from it. So unequal streams on
/// one link become equal (Chiu and Jain 1989), as they do not if the climb is proportional to the pace.
const REFERENCE: f64 = 250e6;
/// Beyond this multiple of where a queue formed last, the link has more room than was known.
const BEYOND: f64 = 1.03;
/// So it has, if no queue formed for so long after a cut.
const QUIET: Duration = Duration::from_millis(1500);
/// A newcomer knows only what it found beside others: after its first cuts,
const YOUNG_CUTS: u64 = 4;
/// it looks for more room already from this multiple on. Those who were there give way four times in a second, then.
const YOUNG_BEYOND: f64 = 0.95;
/// Then the climb doubles in this time,
const DOUBLING: Duration = Duration::from_millis(50);
/// up to this share of the pace a second: seen 12 ms too late, that is 6 % too much.
const MOST_CLIMB: f64 = 5.0;

/// How long a short queue has to stay until it is cut: another window of round trips, and long enough that whoever shares
/// the link sees it and gives way, too. If only one of two gave way, it would always be the same.
const HOLD: Duration = Duration::from_millis(6);
/// What was delivered in this time before a cut is what the link carries.
const MEASURE: Duration = Duration::from_millis(20);
/// The pace after a queue, of what was delivered: the mean of the way back up is 0.96 of it.
const CUT: f64 = 0.93;
/// The pace after a queue that formed below where it used to: somebody came. He cannot know what the link carries, we do.
const CUT_FOREIGN: f64 = 0.75;
/// A queue below this share of where it last formed is somebody else's.
const FOREIGN: f64 = 0.96;
/// The share of the best that is never given up by that: with two on the link, it is everybody's half.
const HALF: f64 = 0.5;
/// After a cut, its effect is waited for: the queue runs off at least at this share of the link's rate.
const RUN_OFF: f64 = 0.05;
/// However long the queue, that wait is no longer.
const MOST_WAIT: Duration = Duration::from_millis(200);

/// The pace while a long queue runs off, of what was delivered. It takes as long as the queue was.
const DRAIN: f64 = 0.5;
/// A queue that is still there after so many times as long as it should take is not ours.
const DRAIN_PATIENCE: f64 = 2.5;
/// Windows and ticks on top of that.
const DRAIN_EXTRA: Duration = Duration::from_millis(20);

/// The share of the best rate seen that we insist on, whatever the queue: a stream that fills all buffers would take
/// everything from one that gives way.
pub(super) const LEAST_SHARE: f64 = 0.3;
/// What is this close to it is at it: the best is forgotten a little meanwhile.
const NEARLY: f64 = 1.05;
/// The best rate seen is forgotten with this time constant: a link may become slower for good.
const BEST_TIME: Duration = Duration::from_secs(60);
/// Insisting, it is seen over so long whether the share arrives at all: it does not where the link is now slower than it.
const INSIST_TIME: Duration = Duration::from_millis(200);
/// A queue gone for so long is gone: the other has left, or is the kind that gives way.
const GONE: Duration = Duration::from_millis(20);

/// The longest time between two calls that counts: a process that was stopped knows nothing of the time meanwhile.
const MOST_ELAPSED: Duration = Duration::from_millis(100);

/// Finds the pace. A pure state machine: the same observations lead to the same decisions.
#[derive(Debug)]
pub struct Controller {
    round_trips: RoundTrips,
    deliveries: Deliveries,
    /// Bytes a second. `FLOOR <= rate <= CEILING`.
    rate: f64,
    /// What was delivered when a queue formed last.
    level: f64,
    /// The most that was delivered beside a queue, slowly forgotten.
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
    /// `passed`: since when the pace is beyond [`BEYOND`]. Until `deaf`, the queue is the one that was cut.
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
    /// Knows nothing of the link.
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

    /// The pace of now, in bytes a second.
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

    /// Decides. To be called every few milliseconds.
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
        // While it is insisted on, it cannot be seen anew.
        if !matches!(self.state, State::Contended { .. }) {
            self.best *= (-elapsed.as_secs_f64() / BEST_TIME.as_secs_f64()).exp();
        }
        match self.state {
            // Without bulk of ours, nothing that is seen is about our pace.
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

    /// The smallest round trip of the last seconds: the way without queues.
    #[must_use]
    pub fn base_round_trip(&self) -> Option<Duration> {
        self.round_trips.base()
    }

    /// How often the pace was lowered because of a queue.
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
            // Not the link limits. It may be that there is no more than this, and that the pace is in its own way.
            // Never less than any link carries: a pace that whoever sends cannot keep up with leaves no queue, and one that waits
            // for deliveries that wait for it would never get anywhere.
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
            // Gone by itself: it was noise.
            Queue::Clear | Queue::Unknown => self.state = State::Climb { passed: None, deaf: now },
        }
    }

    /// A queue stands, and it is not noise.
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
            // What was delivered tells more now than when the queue was found.
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
            // The link is slower than our share of what it was: the queue is our own.
            self.best = self.best.min(delivered);
        }
        self.rate = LEAST_SHARE * self.best;
        self.state = State::Contended { clear: None, judged: now };
    }

    /// What arrives, in bytes a second, while both sides run.
    fn delivered(&self) -> Option<f64> {
        let mean = self.deliveries.rate(FOLLOW_TIME)?;
        let (least, best) = self.deliveries.extremes(PAUSE, PAUSE_TIME);
        Some(if least > 0.0 { mean } else { best.max(mean) })
    }

    /// Whether what was sent over the last `time` arrived.
    fn follows(&self, time: Duration) -> bool {
        self.deliveries.rate(time).is_some_and(|delivered| delivered >= FOLLOWS * self.rate)
    }
}
