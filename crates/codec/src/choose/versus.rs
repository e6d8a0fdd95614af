//! Comparison of encoded frames with raw ones, by what really happened.
//!
//! The calculation of [`Chooser`](super::Chooser) assumes that a link is as fast while the sender
//! encodes as while it waits. This is wrong if the target shares the processors of the sender, or
//! if the sender has fewer processors than it seems. Such an error would keep itself alive, because
//! the rate of the link for raw pages is not measured while pages are encoded.
//!
//! Therefore, bytes of memory per second are measured with and without encoding. If encoded frames
//! turn out to be slower, the sender returns to raw frames, each time for twice as long. While
//! frames are encoded, the sender sends raw ones for a short time every half second, and more
//! rarely while they are slower. It does not do so while the channel waits for the link for half of
//! the time, because then the encoding is not what limits it.

use std::time::Duration;

/// Shortest length of a window.
const WINDOW: Duration = Duration::from_millis(10);
/// Number of encoded windows before they are compared. The first ones contain probes, and empty the
/// buffer of the socket.
const SETTLED: u32 = 3;
/// Share of an encoded window from which the link is what limits the channel.
const WAITS: f64 = 0.5;
/// Shortest wait after which the buffer of the socket is full. Raw frames before that fill it, and
/// are not measured.
const FULL: Duration = Duration::from_micros(20);
/// Longest time for a check. If the channel did not wait until then, raw frames are not what limits
/// it.
const LONGEST_CHECK: Duration = Duration::from_millis(40);
/// Shortest and longest time between two checks, and for a return to raw frames.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));

/// Frames that are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Frames that the calculation chooses.
    Free,
    /// Raw frames until this time, because encoded frames were slower.
    Raw { until: Duration },
    /// Raw frames since this time, to measure them.
    Check { since: Duration },
}

/// Frames of one kind that were sent without another one in between.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    encoded: bool,
    /// True if the buffer of the socket was full at the beginning of the window.
    full: bool,
    bytes: f64,
    elapsed: Duration,
    waited: Duration,
}

/// Rates with and without encoding, in bytes of memory per second.
#[derive(Debug, Clone)]
pub(super) struct Versus {
    mode: Mode,
    window: Window,
    raw: Option<f64>,
    encoded: Option<f64>,
    /// Number of encoded windows since the last raw one.
    windows: u32,
    /// Time of the last raw window.
    raw_at: Duration,
    patience: Duration,
}

impl Versus {
    pub(super) fn new(now: Duration) -> Self {
        let window = Window::default();
        Self {
            mode: Mode::Free,
            window,
            raw: None,
            encoded: None,
            windows: 0,
            raw_at: now,
            patience: PATIENCE.0,
        }
    }

    /// Returns true if the next frame must be raw.
    pub(super) fn wants_raw(&self) -> bool {
        self.mode != Mode::Free
    }

    /// Records a frame that was sent at `now`, with `bytes` bytes of memory. It took `elapsed`. The
    /// channel waited for the link for `waited` of this time.
    pub(super) fn sent(
        &mut self,
        encoded: bool,
        bytes: f64,
        elapsed: Duration,
        waited: Duration,
        now: Duration,
    ) {
        if self.window.encoded != encoded {
            self.window = Window { encoded, ..Window::default() };
        }
        self.window.bytes += bytes;
        self.window.elapsed += elapsed;
        self.window.waited += waited;
        if !encoded && !self.window.full && waited >= FULL {
            self.window = Window { full: true, ..Window::default() };
        } else if self.window.elapsed >= WINDOW {
            let Window { full, bytes, elapsed, waited, .. } = self.window;
            self.window = Window { encoded, full, ..Window::default() };
            let rate = bytes / elapsed.as_secs_f64();
            let limits = waited.as_secs_f64() >= WAITS * elapsed.as_secs_f64();
            if encoded { self.encoded(rate, limits, now) } else { self.raw(rate, full, now) }
        }
        match self.mode {
            Mode::Raw { until } if now >= until => self.mode = Mode::Free,
            Mode::Free if encoded && now.saturating_sub(self.raw_at) >= self.patience => {
                self.mode = Mode::Check { since: now };
            }
            _ => {}
        }
    }

    fn raw(&mut self, rate: f64, full: bool, now: Duration) {
        (self.raw_at, self.windows) = (now, 0);
        if full {
            self.raw = Some(self.raw.map_or(rate, |raw| raw.midpoint(rate)));
        }
        if matches!(self.mode, Mode::Raw { .. }) && full && self.encoded.is_some_and(|encoded| rate < encoded)
        {
            // The link has become slower since the comparison.
            self.mode = Mode::Free;
        }
        let Mode::Check { since } = self.mode else { return };
        if !full && now.saturating_sub(since) < LONGEST_CHECK {
            return;
        }
        // If the buffer was never full, the rate is at least this.
        self.raw = Some(rate);
        self.mode = Mode::Free;
        self.compare(now);
    }

    fn encoded(&mut self, rate: f64, link_limits: bool, now: Duration) {
        self.windows = self.windows.saturating_add(1);
        let recent = self.encoded.filter(|_| self.windows > 1);
        self.encoded = Some(recent.map_or(rate, |encoded| encoded + 0.3 * (rate - encoded)));
        if link_limits {
            self.raw_at = now;
        } else if self.windows == SETTLED {
            self.compare(now);
        }
    }

    /// Returns to raw frames if they are faster.
    fn compare(&mut self, now: Duration) {
        let Some((raw, encoded)) = self.raw.zip(self.encoded) else { return };
        if encoded < raw {
            self.mode = Mode::Raw { until: now + self.patience };
        }
        self.patience = (self.patience * 2).min(PATIENCE.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Channel that sends frames of 1 ms.
    struct Channel {
        versus: Versus,
        now: Duration,
        /// Frames that were raw because [`Versus`] wanted it.
        forced: u32,
    }

    impl Channel {
        fn new() -> Self {
            Self { versus: Versus::new(Duration::ZERO), now: Duration::ZERO, forced: 0 }
        }

        /// Sends frames for `time`, raw ones if the comparison wants it. Raw and encoded frames
        /// have these rates, and encoded frames wait for the link for the share `waits`.
        fn send(&mut self, encoded: bool, time: Duration, (raw, rate): (f64, f64), waits: f64) {
            let end = self.now + time;
            while self.now < end {
                self.now += MS;
                let forced = encoded && self.versus.wants_raw();
                self.forced += u32::from(forced);
                let encoded = encoded && !forced;
                let (rate, waits) = if encoded { (rate, waits) } else { (raw, 0.9) };
                self.versus.sent(encoded, rate * 1e-3, MS, MS.mul_f64(waits), self.now);
            }
        }
    }

    #[test]
    fn encoded_frames_that_are_slower_end_each_time_for_longer() {
        let mut channel = Channel::new();
        channel.send(false, 50 * MS, (3e8, 1e8), 0.0);
        assert!(!channel.versus.wants_raw());
        channel.send(true, 10_000 * MS, (3e8, 1e8), 0.2);
        // Attempts of three windows: after 0.5, 1, 2 and 4 seconds.
        assert!((9_700..9_900).contains(&channel.forced), "{} ms raw", channel.forced);
    }

    #[test]
    fn encoded_frames_that_are_faster_are_checked_and_go_on() {
        let mut channel = Channel::new();
        channel.send(false, 50 * MS, (1e8, 3e8), 0.0);
        channel.send(true, 10_000 * MS, (1e8, 3e8), 0.2);
        // Checks of a frame that fills the buffer and a window: after 0.5, 1, 2 and 4 seconds.
        assert!((30..80).contains(&channel.forced), "{} ms raw", channel.forced);
        // Without a change of the calculation, raw frames become faster.
        channel.forced = 0;
        channel.send(true, 10_000 * MS, (4e8, 3e8), 0.2);
        assert!(channel.forced > 4_000, "{} ms raw", channel.forced);
    }

    #[test]
    fn frames_that_the_link_limits_are_not_checked() {
        let mut channel = Channel::new();
        channel.send(false, 50 * MS, (1e8, 3e8), 0.0);
        channel.send(true, 10_000 * MS, (1e8, 3e8), 0.6);
        assert_eq!(channel.forced, 0);
    }

    #[test]
    fn slower_link_ends_a_return_to_raw_frames() {
        let mut channel = Channel::new();
        channel.send(false, 50 * MS, (3e8, 2e8), 0.0);
        channel.send(true, 100 * MS, (3e8, 2e8), 0.2);
        assert!(channel.versus.wants_raw());
        channel.send(true, 50 * MS, (1e8, 2e8), 0.2);
        assert!(!channel.versus.wants_raw());
    }
}
