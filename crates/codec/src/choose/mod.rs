//! Choice of a codec by measurement, while a migration runs.
//!
//! A [`Chooser`] belongs to one channel. The sender asks it before each batch of pages
//! ([`Chooser::next`]), and reports what the batch has cost ([`Chooser::sent`]). The chooser
//! compares seconds for each byte of memory:
//!
//! - The *link* needs `ratio / rate` seconds, where `ratio` is the size of the frame divided by the
//!   size of the pages.
//! - The *sender* needs the processor time of the encoding, times the factor by which other threads
//!   delay it, and the time to give the frame to the socket.
//!
//! The socket's buffer lets both overlap, so a codec takes the longer one of both times. The codec
//! with the shortest time wins. Processor time that the sender takes away from vCPUs has a price: a
//! fiftieth of itself always, and up to a fifth more if no processor is idle.
//!
//! # Rate of the link
//!
//! The rate is known only while the channel waits for the socket. In a window of 10 ms in which it
//! waited for a tenth of the time, the rate is what the socket accepted. A thread of the target
//! that does not run for some milliseconds looks like a slow link, so the rate is the highest one
//! of three such windows. A frame that takes longer counts as several windows. If the channel never
//! waits, the link is at least as fast, and the estimate grows by half in each window. A wrong
//! growth ends when a faster codec makes the channel wait again. The estimate then does not grow
//! for 150 ms.
//!
//! # Probes
//!
//! The ratio and the speed of a codec are known only after it was used. A probe is one batch with
//! another codec. The chooser requests a probe only if the codec would be at least a tenth faster
//! in the best case that is plausible. After an initial allowance of 2 ms, probes take at most one
//! percent of the time, and a tenth of the time in which the channel waits. The probe of a codec is
//! repeated after 100 to 200 ms. On a link that is faster than the fastest encoder, no probe is
//! plausible, and every batch is raw.
//!
//! # Stability
//!
//! A codec that needs more processor time must be 7 % faster than the current one. A codec that
//! needs less must not be slower. Four batches and 5 ms lie between two changes.
//!
//! The calculation can be wrong, so the chooser also compares what it predicts with what happens
//! ([`versus`]).
//!
//! The chooser reads no clock. The time is an argument.

mod versus;

use crate::{Class, Codec, Level};
use std::time::Duration;
use versus::Versus;

/// Codec of the next batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The pages as they are.
    Raw,
    /// The codec that is the fastest one by all that is known.
    Use(Codec),
    /// A codec whose speed or ratio is not known, for this batch only.
    Probe(Codec),
}

impl Choice {
    /// Returns the codec, or `None` for raw pages.
    #[must_use]
    pub fn codec(self) -> Option<Codec> {
        match self {
            Choice::Raw => None,
            Choice::Use(codec) | Choice::Probe(codec) => Some(codec),
        }
    }
}

/// Cost of a batch that was sent.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// Class of the pages.
    pub class: Class,
    /// Codec that was tried. `None` if the pages were sent raw without a try.
    pub codec: Option<Codec>,
    /// Bytes of the pages.
    pub bytes_in: u64,
    /// Bytes that were sent for the pages. If a codec was tried in vain, these are the bytes of the
    /// raw pages.
    pub bytes_out: u64,
    /// Elapsed time of the encoding, including the copies that were made for it.
    pub encode: Duration,
    /// Processor time of the encoding.
    pub encode_cpu: Duration,
    /// Elapsed time from the beginning of the batch until the socket accepted its last byte.
    pub elapsed: Duration,
    /// Part of `elapsed` in which the channel waited for the socket.
    pub waited: Duration,
    /// Number of processors that are idle at present, including those on which this channel waits.
    pub idle_cores: f64,
}

/// Codec that the chooser can choose, with the best case that is plausible.
struct Arm {
    codec: Codec,
    /// Processor time for each byte of memory, in seconds.
    cpu: f64,
    /// Size of a frame, divided by the size with the arm before.
    ratio: f64,
}

const fn level(level: u8) -> Codec {
    match Level::new(level) {
        Some(level) => Codec::Zstd(level),
        None => panic!("not a level"),
    }
}

/// Codecs by their processor time. The arms of a class have these numbers plus one, and arm 0 is
/// raw.
const CODECS: [Arm; 4] = [
    Arm { codec: Codec::Lz4, cpu: 0.4e-9, ratio: 0.4 },
    Arm { codec: level(1), cpu: 1.2e-9, ratio: 0.75 },
    Arm { codec: level(3), cpu: 2.5e-9, ratio: 0.9 },
    Arm { codec: level(6), cpu: 8e-9, ratio: 0.93 },
];
const ARMS: usize = CODECS.len() + 1;
const RAW: usize = 0;

/// Length of a window over which the link is measured.
const WINDOW: Duration = Duration::from_millis(10);
/// Number of windows with waiting that must agree on a low rate.
const WINDOWS: usize = 3;
/// Share of a window from which the channel's waiting shows the rate of the link.
const WAITS: f64 = 0.1;
/// Share of a window up to which the link is not what limits the channel.
const HARDLY_WAITS: f64 = 0.02;
/// Factor by which the estimate of a rate grows in a window without waiting.
const GROWTH: f64 = 1.5;
/// Time without growth after the change to a codec with more processor time.
const HOLD: Duration = Duration::from_millis(200);
/// Rate in bytes per second that stands for a link of unknown rate. No encoder is as fast.
const UNKNOWN_RATE: f64 = 1e11;

/// Share of the time that probes may take.
const PROBE_SHARE: f64 = 0.01;
/// Share of the time in which the channel waits that probes may take in addition. The link is busy
/// meanwhile, so such a probe does not delay it.
const PROBE_WAIT_SHARE: f64 = 0.1;
/// Time for probes before anything was measured, in seconds.
const PROBE_ALLOWANCE: f64 = 2e-3;
/// Most time for probes that is saved up, in seconds.
const MOST_ALLOWANCE: f64 = 8e-3;
/// Factor by which a codec must be faster in the best case so that a probe is worth its time.
const WORTH_A_PROBE: f64 = 0.9;
/// Shortest and longest time between two probes of a codec.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(200));

/// Ratio of the times at which the chooser changes to a codec with more processor time.
const HEAVIER: f64 = 0.93;
/// Ratio of the times at which the chooser changes to a codec with less processor time.
const LIGHTER: f64 = 1.0;
/// Number of batches and time between two changes.
const DWELL: (u32, Duration) = (4, Duration::from_millis(5));

/// Price of a second of processor time, in seconds.
const PRICE: f64 = 0.02;
/// Additional price if no processor is idle.
const BUSY_PRICE: f64 = 0.2;
/// Time for which a measured delay of the sender is valid.
const DELAY_VALID: Duration = Duration::from_millis(200);

/// Measured properties of a codec for a class of pages.
#[derive(Debug, Clone, Copy)]
struct Known {
    ratio: f64,
    /// Processor time for each byte of memory, in seconds.
    cpu: f64,
    samples: u32,
    /// Time of the last probe, or of the last batch.
    tried: Option<Duration>,
    /// Time after `tried` until the next probe.
    patience: Duration,
}

impl Known {
    const NOTHING: Self = Self { ratio: 1.0, cpu: 0.0, samples: 0, tried: None, patience: PATIENCE.0 };

    fn is_fresh(&self, now: Duration) -> bool {
        self.tried.is_some_and(|tried| now.saturating_sub(tried) < self.patience)
    }

    fn add(&mut self, ratio: f64, cpu: f64, recent: bool) {
        let weight = match (self.samples, recent) {
            (0, _) => 1.0,
            (_, false) => 0.5,
            (_, true) => 0.2,
        };
        self.ratio += weight * (ratio - self.ratio);
        self.cpu += weight * (cpu - self.cpu);
        self.samples = self.samples.saturating_add(1);
    }
}

/// State of a class of pages.
#[derive(Debug, Clone, Copy)]
struct ByClass {
    arms: [Known; ARMS],
    current: usize,
    /// Time of the last change, and batches since then.
    since: Duration,
    batches: u32,
}

/// Estimate of the link's rate.
#[derive(Debug, Clone, Copy)]
struct Link {
    /// Bytes per second.
    rate: f64,
    /// Rates of the last windows with waiting. The oldest one is overwritten.
    last: [f64; WINDOWS],
    oldest: usize,
    out: f64,
    elapsed: Duration,
    waited: Duration,
    hold_until: Duration,
}

impl Link {
    fn add(&mut self, facts: &Facts, now: Duration) {
        self.out += facts.bytes_out as f64;
        self.elapsed += facts.elapsed;
        self.waited += facts.waited;
        if self.elapsed < WINDOW {
            return;
        }
        let seconds = self.elapsed.as_secs_f64();
        let (share, rate) = (self.waited.as_secs_f64() / seconds, self.out / seconds);
        if share >= WAITS {
            // On a slow link, a single frame takes as long as several windows.
            for _ in 0..windows_in(self.elapsed) {
                (self.last[self.oldest], self.oldest) = (rate, (self.oldest + 1) % WINDOWS);
            }
            let rate = self.last.iter().copied().fold(0.0, f64::max);
            // A change of the link counts at once, and noise only in part.
            let near = (0.77..1.3).contains(&(rate / self.rate));
            self.rate = if near { self.rate.midpoint(rate) } else { rate };
        } else {
            self.last = [self.rate.max(rate); WINDOWS];
            self.rate = self.rate.max(rate);
            if share <= HARDLY_WAITS && now >= self.hold_until {
                self.rate = (self.rate * GROWTH).min(UNKNOWN_RATE);
            }
        }
        (self.out, self.elapsed, self.waited) = (0.0, Duration::ZERO, Duration::ZERO);
    }
}

/// Returns the number of windows that `elapsed` stands for, rounded, from 1 to [`WINDOWS`].
fn windows_in(elapsed: Duration) -> usize {
    let windows = (elapsed + WINDOW / 2).as_nanos() / WINDOW.as_nanos();
    usize::try_from(windows).unwrap_or(WINDOWS).clamp(1, WINDOWS)
}

/// Returns the share of a processor that other threads need, if `idle_cores` processors are idle.
fn busy(idle_cores: f64) -> f64 {
    1.0 - idle_cores.min(1.0)
}

/// Elapsed time of encoding, divided by its processor time.
#[derive(Debug, Clone, Copy)]
struct Delay {
    value: f64,
    measured: Option<Duration>,
    /// Number of idle processors at the measurement.
    idle_cores: f64,
}

impl Delay {
    fn add(&mut self, value: f64, idle_cores: f64, now: Duration) {
        let old = self.at(idle_cores, now);
        let weight = if self.measured.is_some_and(|at| now.saturating_sub(at) < WINDOW) { 0.2 } else { 0.7 };
        *self = Self { value: old + weight * (value - old), measured: Some(now), idle_cores };
    }

    /// Returns the delay with so many idle processors.
    fn at(&self, idle_cores: f64, now: Duration) -> f64 {
        let is_recent = self.measured.is_some_and(|at| now.saturating_sub(at) < DELAY_VALID);
        if is_recent && (busy(idle_cores) - busy(self.idle_cores)).abs() < 0.5 {
            return self.value;
        }
        // Without an idle processor, the sender shares one with another thread.
        1.0 + busy(idle_cores)
    }
}

/// Controller that chooses the codec of each batch of a channel.
#[derive(Debug, Clone)]
pub struct Chooser {
    classes: [ByClass; Class::ALL.len()],
    link: Link,
    /// Time to give a byte to the socket, in seconds.
    send: f64,
    delay: Delay,
    idle_cores: f64,
    /// Time for probes, in seconds.
    allowance: f64,
    versus: Versus,
}

impl Chooser {
    /// Creates a chooser that begins with raw pages. `now` is the time since any fixed moment.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        let class = ByClass { arms: [Known::NOTHING; ARMS], current: RAW, since: now, batches: 0 };
        Self {
            classes: [class; Class::ALL.len()],
            link: Link {
                rate: UNKNOWN_RATE,
                last: [UNKNOWN_RATE; WINDOWS],
                oldest: 0,
                out: 0.0,
                elapsed: Duration::ZERO,
                waited: Duration::ZERO,
                hold_until: Duration::ZERO,
            },
            send: 0.3e-9,
            delay: Delay { value: 1.0, measured: None, idle_cores: 1.0 },
            idle_cores: 1.0,
            allowance: PROBE_ALLOWANCE,
            versus: Versus::new(now),
        }
    }

    /// Returns the codec for the next batch of `bytes` bytes of pages of one class.
    ///
    /// Dense pages are always raw.
    pub fn next(&mut self, class: Class, bytes: usize, now: Duration) -> Choice {
        if class == Class::Dense || self.versus.wants_raw() {
            return Choice::Raw;
        }
        self.change(class, now);
        if let Some(arm) = self.probe(class, bytes, now) {
            return Choice::Probe(CODECS[arm - 1].codec);
        }
        match self.classes[class as usize].current {
            RAW => Choice::Raw,
            arm => Choice::Use(CODECS[arm - 1].codec),
        }
    }

    /// Records the cost of a batch that was sent at `now`.
    pub fn sent(&mut self, facts: &Facts, now: Duration) {
        if facts.bytes_in == 0 {
            return;
        }
        self.idle_cores = facts.idle_cores.max(0.0);
        self.link.add(facts, now);
        let gained =
            facts.elapsed.as_secs_f64() * PROBE_SHARE + facts.waited.as_secs_f64() * PROBE_WAIT_SHARE;
        self.allowance = (self.allowance + gained).min(MOST_ALLOWANCE);
        let class = &mut self.classes[facts.class as usize];
        class.batches = class.batches.saturating_add(1);
        let Some(codec) = facts.codec else {
            let busy = facts.elapsed.saturating_sub(facts.waited).as_secs_f64();
            self.send += 0.1 * (busy / facts.bytes_out.max(1) as f64 - self.send);
            return;
        };
        let Some(arm) = CODECS.iter().position(|arm| arm.codec == codec).map(|at| at + 1) else {
            return;
        };
        let bytes_in = facts.bytes_in as f64;
        let known = &mut class.arms[arm];
        let is_probe = arm != class.current;
        let recent = !is_probe && known.is_fresh(now);
        known.add(facts.bytes_out as f64 / bytes_in, facts.encode_cpu.as_secs_f64() / bytes_in, recent);
        known.tried = Some(now);
        if facts.encode_cpu > Duration::ZERO {
            let value = (facts.encode.as_secs_f64() / facts.encode_cpu.as_secs_f64()).clamp(1.0, 8.0);
            self.delay.add(value, self.idle_cores, now);
        }
        if is_probe {
            let gains =
                self.time(facts.class, arm, now) < self.time(facts.class, self.current(facts.class), now);
            let known = &mut self.classes[facts.class as usize].arms[arm];
            known.patience = if gains { PATIENCE.0 } else { PATIENCE.1 };
        }
    }

    /// Records a whole frame that was sent at `now`. `encoded` is true if its pages were copied to
    /// be encoded. The frame has `bytes` bytes of memory, and took `elapsed`. The channel waited
    /// for the socket for `waited` of this time.
    ///
    /// A sender calls this method only if it sends raw frames while [`next`](Self::next) chooses
    /// them and [`is_faster`](Self::is_faster) returns false.
    pub fn frame_sent(
        &mut self,
        encoded: bool,
        bytes: u64,
        elapsed: Duration,
        waited: Duration,
        now: Duration,
    ) {
        self.versus.sent(encoded, bytes as f64, elapsed, waited, now);
    }

    /// Returns true if encoded pages are sent faster than pages as they are, by the margin for a
    /// change. Their size is `ratio` times the size of the pages, and the encoding takes `cpu`
    /// seconds of processor time for each byte of memory. Returns false while the rate of the link
    /// is unknown.
    #[must_use]
    pub fn is_faster(&self, ratio: f64, cpu: f64, now: Duration) -> bool {
        !self.versus.wants_raw()
            && self.link.rate < UNKNOWN_RATE
            && self.time_of(ratio, cpu, now) < HEAVIER * self.time_of(1.0, 0.0, now)
    }

    fn current(&self, class: Class) -> usize {
        self.classes[class as usize].current
    }

    /// Returns the time for a byte of memory with this ratio and processor time, in seconds.
    fn time_of(&self, ratio: f64, cpu: f64, now: Duration) -> f64 {
        let (busy, delay) = (busy(self.idle_cores), self.delay.at(self.idle_cores, now));
        let own = cpu * delay + self.send * ratio;
        own.max(ratio / self.link.rate) + cpu * (PRICE + BUSY_PRICE * busy)
    }

    /// Returns the time for a byte of memory with an arm that was tried, or with raw pages.
    fn time(&self, class: Class, arm: usize, now: Duration) -> f64 {
        let known = &self.classes[class as usize].arms[arm];
        self.time_of(known.ratio, known.cpu, now)
    }

    /// Changes to the fastest arm, if it is faster by enough.
    fn change(&mut self, class: Class, now: Duration) {
        let ByClass { arms, current, since, batches } = self.classes[class as usize];
        if batches < DWELL.0 || now.saturating_sub(since) < DWELL.1 {
            return;
        }
        let tried = (0..ARMS).filter(|&arm| arm == RAW || arms[arm].samples > 0);
        let best = tried.min_by(|&a, &b| self.time(class, a, now).total_cmp(&self.time(class, b, now)));
        let best = best.expect("raw is always possible");
        let margin = if best > current { HEAVIER } else { LIGHTER };
        if best == current || self.time(class, best, now) > margin * self.time(class, current, now) {
            return;
        }
        let state = &mut self.classes[class as usize];
        (state.current, state.since, state.batches) = (best, now, 0);
        if best > current {
            self.link.hold_until = now + HOLD;
        }
    }

    /// Returns the arm to probe, if the allowance covers the probe.
    fn probe(&mut self, class: Class, bytes: usize, now: Duration) -> Option<usize> {
        let current = self.current(class);
        let now_time = self.time(class, current, now);
        let mut ratio = 1.0;
        for arm in 1..ARMS {
            let known = self.classes[class as usize].arms[arm];
            if arm == current || known.is_fresh(now) {
                ratio = known.ratio;
                continue;
            }
            let best = &CODECS[arm - 1];
            ratio *= best.ratio;
            let plausible = self.time_of(ratio, best.cpu, now);
            // The best case is not the usual one.
            let cost = f64::max(known.cpu, best.cpu * 1.5) * bytes as f64;
            if plausible < WORTH_A_PROBE * now_time && cost <= self.allowance {
                self.allowance -= cost;
                self.classes[class as usize].arms[arm].tried = Some(now);
                return Some(arm);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
