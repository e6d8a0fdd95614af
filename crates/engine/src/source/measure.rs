//! Source's part of measuring a link.
//!
//! The source sends pages of scratch memory, with the code that sends guests, over as many bulk
//! channels as would send at first in a migration, but at most 8. No byte of the guest leaves the
//! source.

use super::parallel::sending_channels;
use super::sender::{Sender, SenderContext, SenderError};
use super::settings::Settings;
use crate::channel::{Connect, Dialer, Pacer, Stream, tcp};
use crate::handle::{Counters, MigrationHandle};
use crate::plan::Link;
use crate::scratch::{SCRATCH, SCRATCH_PAGES, Scratch};
use crate::{MigrateError, random};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{GuestMemory, NothingToProtect, PAGE_BYTES, PageRun};
use vmferry_wire::{FrameKind, MigrationId, REQUEST_BYTES, Request, Role, Token, WireError};

/// Number of pages that each channel sends before the measurement begins, because TCP connections
/// start slowly.
const WARM_UP: u64 = 256;
/// Target duration of one round of pages.
const ROUND: Duration = Duration::from_millis(60);
const LONGEST: Duration = Duration::from_millis(800);
/// Longest round trip before the measurement fails.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of round trips that are measured. The median is the result.
const TRIPS: usize = 9;
/// Smallest relative spread that is reported, because the link may change until the migration
/// begins.
const LEAST_SPREAD: f64 = 0.01;
/// Share of the bandwidth limit. If the measured rate reaches this share, the limit and not the
/// link determines the rate.
const CAP_REACHED: f64 = 0.9;
/// Largest number of channels that a target measures at once.
const MOST_CHANNELS: u16 = 8;

/// Bytes and duration of one round.
#[derive(Debug, Clone, Copy)]
struct Round {
    bytes: f64,
    elapsed: Duration,
}

/// Measures the bandwidth and the round trip of the link to the target of `connector`, with the
/// number of bulk channels that would send at first (at most 8), and the bandwidth limit of
/// `settings`.
///
/// The target must be waiting for a guest. The source sends generated pages only. For each channel,
/// the target receives them into at most 32 MiB of memory, which it drops afterwards. The
/// measurement takes at most about a second, but longer on a link of less than a few MB/s. A
/// [cancel](MigrationHandle::cancel) through `handle` ends the wait for the target's answer to the
/// hello.
///
/// # Errors
/// If no target waits at the address, the target does not measure, or the operator cancels.
pub fn probe(
    connector: &dyn Connect,
    settings: &Settings,
    handle: &MigrationHandle,
) -> Result<Link, MigrateError> {
    let scratch = Scratch::new()?;
    fill(&scratch)?;
    let migration = MigrationId(random()?);
    let channels = sending_channels(settings).clamp(1, MOST_CHANNELS);
    let dialer = Dialer::new(connector, settings);
    let began = Instant::now();
    let open = |index| {
        let channel = (migration, Role::Measure, index, Token::NONE);
        let stream = dialer.open(channel, Some(handle))?;
        let timeouts = stream.set_timeouts(Some(PATIENCE), Some(PATIENCE));
        timeouts.map_err(|source| MigrateError::Connect { uri: dialer.name(), source })?;
        Ok(Arc::new(stream))
    };
    let streams: Vec<Arc<Stream>> = (0..channels).map(open).collect::<Result<_, MigrateError>>()?;
    let connect_s = began.elapsed().as_secs_f64() / f64::from(channels);
    let measurement = Measurement {
        scratch: &scratch,
        pacer: Pacer::new(settings.max_bandwidth),
        counters: Counters::default(),
        stop: AtomicBool::new(false),
        channels,
        cap: settings.max_bandwidth,
    };
    let failed = |why: String| MigrateError::Peer { uri: dialer.name(), source: WireError::Message(why) };
    let measured = measurement.measure(&streams).map_err(failed)?;
    streams.iter().for_each(|stream| stream.shutdown());
    Ok(Link { connect_s, ..measured })
}

/// Fills the scratch memory so that no page is zero and no two pages are equal.
fn fill(scratch: &Scratch) -> Result<(), MigrateError> {
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut page = [0; PAGE_BYTES];
    let all = PageRun::from(0..SCRATCH_PAGES);
    let window = scratch.memory().window(SCRATCH, all).map_err(MigrateError::Vm)?;
    for at in 0..window.pages() {
        for word in page.chunks_exact_mut(8) {
            // Xorshift (Marsaglia, 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        window.write_page(at, &page);
    }
    Ok(())
}

struct Measurement<'a> {
    scratch: &'a Scratch,
    pacer: Pacer,
    counters: Counters,
    stop: AtomicBool,
    channels: u16,
    cap: Option<u64>,
}

impl Measurement<'_> {
    fn measure(&self, streams: &[Arc<Stream>]) -> Result<Link, String> {
        let mut lines: Vec<Line<'_>> =
            streams.iter().zip(0..).map(|(stream, index)| Line::new(self, stream, index)).collect();
        let mut trips = (0..TRIPS).map(|_| lines[0].exchange(0)).collect::<Result<Vec<_>, _>>()?;
        trips.sort_unstable();
        let round_trip = trips[TRIPS / 2];
        let began = Instant::now();
        let warm = self.round(&mut lines, WARM_UP)?;
        let (mut rounds, mut at, mut last) = (Vec::new(), WARM_UP, warm);
        let cpu_before = self.counters.cpu_us.load(Ordering::Relaxed);
        while at < SCRATCH_PAGES && (rounds.len() < 2 || began.elapsed() + ROUND < LONGEST) {
            let each = self.pages_for(last, round_trip).min(SCRATCH_PAGES - at);
            last = self.round(&mut lines, each)?;
            at += each;
            rounds.push(last);
        }
        let cpu_us = self.counters.cpu_us.load(Ordering::Relaxed) - cpu_before;
        // The round trips that the kernels measure show the delay of the network path, without the
        // time until a process is woken.
        let busy = streams.iter().filter(|stream| stream.is_tcp());
        let busy =
            busy.filter_map(|stream| tcp::smoothed_round_trip(stream.as_fd()).ok()).max().unwrap_or_default();
        let pages = (at - WARM_UP) as f64 * f64::from(self.channels);
        let (bytes_per_s, spread) = capped(rate(&rounds, round_trip), self.cap);
        tracing::debug!("measured the link: round trip {round_trip:?}, {rounds:?}");
        Ok(Link {
            bytes_per_s,
            spread,
            round_trip_s: round_trip.as_secs_f64(),
            queue_s: busy.saturating_sub(round_trip).as_secs_f64(),
            cpu_page_s: cpu_us as f64 / 1e6 / pages.max(1.0),
            connect_s: 0.0,
            measured: true,
        })
    }

    /// Returns the number of pages per channel for the next round, computed from the rate of the
    /// last round.
    fn pages_for(&self, last: Round, round_trip: Duration) -> u64 {
        let rate = last.bytes / last.elapsed.saturating_sub(round_trip).as_secs_f64().max(1e-6);
        let pages = rate * ROUND.as_secs_f64() / f64::from(self.channels) / PAGE_BYTES as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to what there is"
        )]
        let pages = pages.clamp(32.0, SCRATCH_PAGES as f64) as u64;
        pages
    }

    /// Sends `pages` pages on each channel at the same time.
    fn round(&self, lines: &mut [Line<'_>], pages: u64) -> Result<Round, String> {
        let before = self.counters.wire_bytes.load(Ordering::Relaxed);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let send = |line| {
                let work = move || {
                    let sent = Line::exchange(line, pages);
                    self.counters.add_thread_cpu();
                    sent
                };
                vmferry_thread::spawn_scoped(vmferry_thread::Role::Sender, "measure", scope, work)
                    .map_err(|error| error.to_string())
            };
            let threads: Vec<_> = lines.iter_mut().map(send).collect::<Result<_, _>>()?;
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(sent) => sent.map(drop),
                Err(_) => Err("a thread panicked".into()),
            })
        })?;
        let bytes = (self.counters.wire_bytes.load(Ordering::Relaxed) - before) as f64;
        Ok(Round { bytes, elapsed: began.elapsed() })
    }
}

/// Returns the rate of the median round in bytes per second, and the relative spread of the rounds.
///
/// The median is used, because a disturbance, such as a busy host, makes a round slower and never
/// faster.
fn rate(rounds: &[Round], round_trip: Duration) -> (f64, f64) {
    let seconds = |round: &Round| round.elapsed.saturating_sub(round_trip).as_secs_f64().max(1e-6);
    let mut rates: Vec<f64> = rounds.iter().map(|round| round.bytes / seconds(round)).collect();
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(1.0)
    };
    let middle = median(&mut rates).max(1.0);
    let mut off = rates.iter().map(|rate| (rate / middle - 1.0).abs()).collect();
    // The median of n rounds has a standard error of about 1.25 / sqrt(n) standard deviations. A
    // standard deviation is 1.48 times the median absolute deviation.
    let spread = if rates.len() < 2 { 0.1 } else { median(&mut off) * 1.85 / (rates.len() as f64).sqrt() };
    (middle, spread.clamp(LEAST_SPREAD, 0.3))
}

/// Returns `cap` as the rate if the link carried about as much as `cap` allows. Otherwise returns
/// the rate and the spread unchanged.
///
/// The rate of a single round differs from `cap` by the burst that the pacer allows.
fn capped((rate, spread): (f64, f64), cap: Option<u64>) -> (f64, f64) {
    match cap.map(|cap| cap as f64) {
        Some(cap) if rate >= cap * CAP_REACHED => (cap, LEAST_SPREAD),
        _ => (rate, spread),
    }
}

/// One channel of the measurement.
struct Line<'a> {
    sender: Sender<'a, Arc<Stream>>,
    stream: Arc<Stream>,
    pass: u32,
    at: u64,
}

impl<'a> Line<'a> {
    fn new(measurement: &'a Measurement<'_>, stream: &Arc<Stream>, index: u16) -> Self {
        let shared = SenderContext {
            memory: measurement.scratch.memory(),
            protect: &NothingToProtect,
            pacer: &measurement.pacer,
            counters: &measurement.counters,
            stop: &measurement.stop,
            channels: measurement.channels,
            turns: None,
        };
        Self {
            sender: Sender::new(shared, Arc::clone(stream), index),
            stream: Arc::clone(stream),
            pass: 0,
            at: 0,
        }
    }

    /// Sends `pages` pages and a barrier, and waits until the target has received them. Returns the
    /// time that this took.
    fn exchange(&mut self, pages: u64) -> Result<Duration, String> {
        let began = Instant::now();
        self.send(pages).map_err(|error| format!("measuring the link failed: {}", said(&error)))?;
        let mut bytes = [0; REQUEST_BYTES];
        self.stream
            .receive_bytes_within(&mut bytes, PATIENCE)
            .map_err(|error| format!("measuring the link failed: {error}"))?;
        match Request::decode(&bytes) {
            Ok(Request::Echo { number, .. }) if number == u64::from(self.pass) => {
                self.pass += 1;
                Ok(began.elapsed())
            }
            other => Err(format!("the target answered a measurement with {other:?}")),
        }
    }

    fn send(&mut self, pages: u64) -> Result<(), SenderError> {
        let first = self.at.min(SCRATCH_PAGES);
        let end = (first + pages).min(SCRATCH_PAGES);
        self.at = end;
        if first < end {
            self.sender.send_run(self.pass, SCRATCH, PageRun::from(first..end))?;
            self.sender.flush(FrameKind::Pages, SCRATCH, self.pass)?;
        }
        self.sender.barrier(self.pass)
    }
}

fn said(error: &SenderError) -> String {
    match error {
        SenderError::Stopped => "the channel was stopped".into(),
        SenderError::Link(failed, _) => failed.error.to_string(),
        SenderError::Vm(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_that_was_reached_is_the_rate() {
        assert_eq!(capped((108e6, 0.14), Some(100_000_000)), (100e6, LEAST_SPREAD));
        assert_eq!(capped((91e6, 0.14), Some(100_000_000)), (100e6, LEAST_SPREAD));
        assert_eq!(capped((70e6, 0.14), Some(100_000_000)), (70e6, 0.14));
        assert_eq!(capped((70e6, 0.14), None), (70e6, 0.14));
    }

    #[test]
    fn a_rate_is_that_of_the_median_round_without_its_round_trip() {
        let round = |bytes: f64, ms| Round { bytes, elapsed: Duration::from_millis(ms) };
        let (all, spread) = rate(&[round(10e6, 101), round(10e6, 101)], Duration::from_millis(1));
        assert!((all - 100e6).abs() < 1.0 && (spread - LEAST_SPREAD).abs() < 1e-9);
        let disturbed =
            [round(10e6, 100), round(10e6, 300), round(10e6, 101), round(10e6, 99), round(10e6, 100)];
        let (all, spread) = rate(&disturbed, Duration::ZERO);
        assert!((all - 100e6).abs() < 1.0 && spread < 0.05, "{all} {spread}");
        assert!(rate(&[], Duration::ZERO).0 >= 1.0);
    }
}
