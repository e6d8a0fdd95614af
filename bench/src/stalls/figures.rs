//! Conversion of a run into its figures.

use super::Run;
use crate::cases::Figures;
use crate::postcopy::{Observation, Waits, Window};
use crate::reaper::to_f64;

/// First bucket of the stalls that are counted: stalls of 256 us and more.
const STALL_BUCKET: usize = 5;
/// First bucket of the stalls that count as long: stalls of 1024 us and more.
const LONG_BUCKET: usize = 7;

/// Shortest stall that is counted, in microseconds.
pub(super) const STALL_MIN_US: u64 = 8 << STALL_BUCKET;
/// Shortest stall that counts as long, in microseconds.
pub(super) const LONG_STALL_MIN_US: u64 = 8 << LONG_BUCKET;

/// Stalls of all vCPUs of a guest.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Stalled {
    /// Stalls from the command until the guest's first reports from the target, without the
    /// blackout.
    pub(super) during: Waits,
    /// Stalls before the migration.
    before: Waits,
    /// Observed time before the migration, in seconds.
    before_s: f64,
    /// Stalls after the first reports from the target. `None` if the guest was not moved.
    after: Option<Waits>,
    /// Longest stall that a vCPU had as the blackout, in microseconds. 0 if the guest's clock did
    /// not show the blackout.
    blackout_us: u64,
}

/// Returns the stalls of a guest, or `None` if the window of the blackout is not known for each
/// vCPU.
pub(super) fn stalled(run: &Run) -> Option<Stalled> {
    if run.result.total.is_zero() {
        return stayed(run);
    }
    let [first, calm, command] = before(run)?;
    // An earlier report can have fewer windows than the vCPUs had closed when they were stopped.
    let stopped = run.source.last().filter(|observed| observed.at >= run.end)?;
    let (arrived, last) = (run.target.first()?, run.target.last()?);
    let mut all = Stalled { before_s: calm.at - first.at, ..Stalled::default() };
    for vcpu in 0..arrived.vcpus.len() {
        let open = stopped.vcpus.get(vcpu)?.reports;
        let blackout_us = run.windows(vcpu, open..open + 1).first()?.stall_us;
        let between = |from, to| between(run, vcpu, (from, to), open);
        let mut during = between(command, arrived)?;
        if blackout_us > 0 {
            during.remove(blackout_us);
        }
        all.during.add(&during);
        all.before.add(&between(first, calm)?);
        all.after.get_or_insert_default().add(&between(arrived, last)?);
        all.blackout_us = all.blackout_us.max(blackout_us);
    }
    Some(all)
}

/// Returns the stalls of a guest that was not moved.
fn stayed(run: &Run) -> Option<Stalled> {
    /// No window is that of a blackout.
    const NONE: u64 = u64::MAX;
    let ([first, calm, start], last) = (before(run)?, run.source.last()?);
    let mut all = Stalled { before_s: calm.at - first.at, ..Stalled::default() };
    for vcpu in 0..start.vcpus.len() {
        all.during.add(&between(run, vcpu, (start, last), NONE)?);
        all.before.add(&between(run, vcpu, (first, calm), NONE)?);
    }
    Some(all)
}

/// Returns the first and the last two observations before the command.
///
/// Directly before the last one, the bench frees the memory that it has touched for the target
/// ([`crate::warm::Warm`]). This takes processor time from the guest. Therefore the one before ends
/// the time before the migration.
fn before(run: &Run) -> Option<[&Observation; 3]> {
    let before: Vec<&Observation> = run.source.iter().filter(|observed| observed.at <= 0.0).collect();
    let [first, .., calm, command] = before[..] else { return None };
    Some([first, calm, command])
}

/// Returns the stalls of a vCPU between two observations. The longest one is that of the windows
/// except the one that report `open` closed.
fn between(run: &Run, vcpu: usize, (from, to): (&Observation, &Observation), open: u64) -> Option<Waits> {
    let (from, to) = (from.vcpus.get(vcpu)?, to.vcpus.get(vcpu)?);
    let windows = run.windows(vcpu, from.reports..to.reports);
    let stall_us = |window: &Window| (window.report != open).then_some(window.stall_us);
    let max_us = windows.iter().filter_map(stall_us).max().unwrap_or(0);
    Some(Waits { max_us, ..Waits::between(from, to) })
}

/// Returns the figures of a run. A figure that was not measured is absent.
pub(super) fn of(run: &Run) -> Figures {
    let result = &run.result;
    let mut figures = Figures::new();
    if !result.total.is_zero() {
        figures.extend(result.times());
        figures.extend([("data_gbytes", result.gbytes()), ("gbytes_per_s", result.gbytes_per_s())]);
    }
    figures.extend(result.passes.map(|passes| ("passes", to_f64(passes))));
    figures.extend(speeds(run));
    if let Some(stalled) = stalled(run) {
        figures.extend(of_stalls(&stalled));
    }
    figures.retain(|_, value| value.is_finite());
    figures
}

fn of_stalls(stalled: &Stalled) -> impl Iterator<Item = (&'static str, f64)> {
    let Stalled { during, before, before_s, after, blackout_us } = stalled;
    let ms = |us: f64| us / 1e3;
    let long = |waits: &Waits| to_f64(waits.count_from(LONG_BUCKET));
    [
        ("stall_max_ms", during.longest_us().map(ms)),
        ("stall_p999_ms", during.quantile_us(0.999).map(ms)),
        ("stalls", Some(to_f64(during.count_from(STALL_BUCKET)))),
        ("long_stalls", Some(long(during))),
        ("long_stall_sum_ms", Some(ms(to_f64(during.sum_us_from(LONG_BUCKET))))),
        ("guest_downtime_ms", (*blackout_us > 0).then(|| ms(to_f64(*blackout_us)))),
        ("before_stall_max_ms", before.longest_us().map(ms)),
        ("before_long_stalls_per_s", Some(long(before) / before_s)),
        ("after_stall_max_ms", after.as_ref().and_then(Waits::longest_us).map(ms)),
        ("after_long_stalls", after.as_ref().map(long)),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
}

/// Returns the speed of the guest before the migration, and from the command until the end. For a
/// guest that was not moved, the second speed is that of the whole time that it was observed.
pub(crate) fn speeds(run: &Run) -> Vec<(&'static str, f64)> {
    let Some([first, calm, _]) = before(run) else { return Vec::new() };
    let timeline = run.timeline();
    let before = timeline.speed(first.at, calm.at);
    let end = match run.result.total.is_zero() {
        true => run.end,
        false => run.result.total.as_secs_f64(),
    };
    let during = timeline.speed(0.0, end);
    vec![
        ("writes_before_per_s", before),
        ("writes_during_per_s", during),
        ("guest_speed_kept", during / before),
    ]
}
