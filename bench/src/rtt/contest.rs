//! The pace controller with a competing stream, and on a link that changes its rate.

use std::time::{Duration, Instant};

use super::exchange::{Bulk, Source, gbps};
use super::samples::Samples;
use super::{GAP, RttError, SourceCommand};
use crate::link::{Link, Shaped};

/// Length of a slice. Requests go to the streams in turn, in slices, because a source without a
/// request for ten seconds takes the target for dead.
const SLICE: Duration = Duration::from_millis(50);

/// Competition for the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contest {
    /// A second stream with its own pace controller, which starts later.
    Two,
    /// An unpaced stream with CUBIC, which starts later.
    BesideCubic,
    /// No other stream. The link has half of its rate for a while.
    Change,
}

impl Contest {
    pub(super) const ALL: [Contest; 3] = [Contest::Two, Contest::BesideCubic, Contest::Change];

    pub(super) fn name(self) -> &'static str {
        match self {
            Contest::Two => "found-twice",
            Contest::BesideCubic => "found-beside-cubic",
            Contest::Change => "found-changing",
        }
    }
}

/// Durations of the parts of a contest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// Time of the first stream alone.
    pub(super) alone: Duration,
    /// Time from the start of the other stream, or from the change, until the measurement.
    pub(super) warm_up: Duration,
    pub(super) measure: Duration,
}

impl Times {
    pub(super) const FULL: Times = Times {
        alone: Duration::from_secs(2),
        warm_up: Duration::from_secs(4),
        measure: Duration::from_secs(4),
    };
}

/// Result of a contest.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) rtt: Samples,
    /// Rate of the first stream in 10^9 bits per second.
    pub(super) bulk_gbps: f64,
    /// Rate of the other stream, or of the first one while the link had half of its rate, in 10^9
    /// bits per second.
    pub(super) other_gbps: f64,
}

/// Runs a contest once.
pub(super) fn measure(
    link: &mut Link,
    contest: Contest,
    congestion: Option<&str>,
    times: Times,
    command: &SourceCommand,
) -> Result<Outcome, RttError> {
    let mut first = Source::start(link, congestion, Bulk::Found, command)?;
    first.measure(times.alone, GAP, None)?;
    let (bulk, congestion) = match contest {
        Contest::Two => (Bulk::Found, congestion),
        Contest::BesideCubic => (Bulk::Unpaced, Some("cubic")),
        Contest::Change => return change(link, first, times),
    };
    let mut sources = [first, Source::start(link, congestion, bulk, command)?];
    pass(&mut sources, times.warm_up, None)?;
    let mut rtt = Samples::default();
    let (begin, before) = (Instant::now(), sources.each_ref().map(Source::received));
    pass(&mut sources, times.measure, Some(&mut rtt))?;
    let took = begin.elapsed();
    let [bulk_gbps, other_gbps] = [0, 1].map(|n: usize| gbps(sources[n].received() - before[n], took));
    Ok(Outcome { rtt, bulk_gbps, other_gbps })
}

/// Requests pages of both sources for `time`, and records the times of the first one.
fn pass(sources: &mut [Source; 2], time: Duration, mut rtt: Option<&mut Samples>) -> Result<(), RttError> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        sources[0].measure(SLICE, GAP, rtt.as_deref_mut())?;
        sources[1].measure(Duration::ZERO, GAP, None)?;
    }
    Ok(())
}

fn change(link: &mut Link, mut source: Source, times: Times) -> Result<Outcome, RttError> {
    let (Some(whole), Link::Shaped(shaped)) = (link.bits_per_s(), link) else {
        return Err(RttError::Usage("loopback has no rate to change".into()));
    };
    let changed = halve_and_restore(shaped, whole, &mut source, times);
    // The rate is restored after a failure too, because other sides use the same link.
    shaped.change(whole).map_err(RttError::Usage)?;
    changed
}

fn halve_and_restore(
    shaped: &mut Shaped,
    whole: u64,
    source: &mut Source,
    times: Times,
) -> Result<Outcome, RttError> {
    let mut rtt = Samples::default();
    let mut rates = [0.0; 2];
    for (rate, bits_per_s) in rates.iter_mut().zip([whole / 2, whole]) {
        shaped.change(bits_per_s).map_err(RttError::Usage)?;
        source.measure(times.warm_up, GAP, None)?;
        let (begin, before) = (Instant::now(), source.received());
        source.measure(times.measure, GAP, Some(&mut rtt))?;
        *rate = gbps(source.received() - before, begin.elapsed());
    }
    Ok(Outcome { rtt, bulk_gbps: rates[1], other_gbps: rates[0] })
}
