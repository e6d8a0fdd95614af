//! Measurement of a running guest: the pages that the guest dirties within several windows, the
//! pages that must be sent, and the costs of stopping the guest.
//!
//! The measurement has a cost for the guest, which is reported with the result. Each page that the
//! guest writes while it is tracked causes one fault, as in the first pass of a migration. In
//! addition, the guest is paused twice for about a millisecond, unless the VMM declares the costs
//! of a pause ([`PauseCosts`]). A pause is longer if the guest's I/O takes longer to quiesce, up to
//! the downtime limit (at least 0.3 s, at most 1 s).

use super::content::{Content, Encoded, Versions, encode};
use super::curve::CurvePoint;
use super::inputs::{Costs, Inputs, Link, MemoryPart, Protection};
use crate::random;
use crate::source::{PageCodec, Settings, delta_cache_bytes};
use crate::vm;
use serde::Serialize;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_codec::{Level, SentPages};
use vmferry_core::{
    DirtyTracker, FreeReport, GuestMemory, PAGE_BYTES, PAGE_SIZE, PageRun, PageSet, PauseCosts, RegionId,
    SourceVm, TrackerKind, VmError,
};

/// Longest interval at which the measurement checks whether the caller has stopped it.
const TICK: Duration = Duration::from_millis(50);
/// Number of parts into which memory is divided.
const PARTS: usize = 64;
/// Approximate number of pages that are checked for zeros.
const SAMPLE: u64 = 2048;
/// Time that a guest may take to report its free pages.
const FREE_PATIENCE: Duration = Duration::from_millis(300);
/// Number of trial pauses. As in a migration, the shortest times are used.
const TRIAL_PAUSES: u32 = 2;
/// Bounds of the time that the guest's I/O may take to quiesce in a trial pause, whatever the
/// downtime limit is. The lower bound is the time that postcopy allows. The upper bound limits the
/// effect of a mere measurement on the guest.
const SHORTEST_TRIAL_PAUSE: Duration = Duration::from_millis(300);
const LONGEST_TRIAL_PAUSE: Duration = Duration::from_secs(1);
/// Typical time to save the state of a small guest, in seconds. Used for a guest whose state could
/// not be saved.
const USUAL_SAVE_S: f64 = 1e-3;
/// Time that a first write to a protected page costs the guest, in seconds, measured on two kinds
/// of hosts (docs/dirty-tracking.md).
const FAULT_S: [(TrackerKind, f64); 3] =
    [(TrackerKind::Log, 2.4e-6), (TrackerKind::Ring, 2.4e-6), (TrackerKind::Wp, 1.3e-6)];

/// Lengths of the windows for which a guest is watched. All windows begin at the same time.
#[derive(Debug, Clone, PartialEq)]
pub struct Windows(Vec<Duration>);

impl Windows {
    /// Maximum length of the shortest window.
    pub const SHORTEST: Duration = Duration::from_millis(20);
    /// Maximum length of the longest window.
    pub const LONGEST: Duration = Duration::from_secs(10);

    /// Returns windows up to `longest`, each 1.6 times as long as the previous one. `longest` is
    /// limited to the range from 160 ms to [`LONGEST`](Self::LONGEST).
    #[must_use]
    pub fn up_to(longest: Duration) -> Self {
        let longest = longest.clamp(Self::SHORTEST * 8, Self::LONGEST);
        let steps = (longest.as_secs_f64() / Self::SHORTEST.as_secs_f64()).ln() / 1.6f64.ln();
        #[expect(clippy::cast_possible_truncation, reason = "a dozen or so")]
        let steps = steps.ceil() as i32;
        let at = |step: i32| longest.mul_f64(1.6f64.powi(step - steps));
        Self((0..=steps).map(at).collect())
    }

    /// Returns windows up to the duration of a first pass over `pages` pages on `link`, so that the
    /// result of that pass need not be extrapolated. The longest window is limited to the range
    /// from 0.5 s to 3 s.
    #[must_use]
    pub fn for_link(link: &Link, pages: u64) -> Self {
        let pass = (pages * PAGE_SIZE) as f64 / link.bytes_per_s.max(1.0);
        Self::up_to(Duration::from_secs_f64((pass * 1.1).clamp(0.5, 3.0)))
    }

    /// Returns the longest window.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.0.last().copied().unwrap_or_default()
    }
}

/// Cost of the measurement for the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct GuestCost {
    /// Time for which the guest's writes were tracked, in ms.
    pub tracked_ms: f64,
    /// Number of faults caused by the tracking.
    pub faults: u64,
    /// Approximate total time of these faults, in ms.
    pub faults_ms: f64,
    /// Number of pauses.
    pub pauses: u32,
    /// Total time for which the guest was paused, in ms.
    pub paused_ms: f64,
}

/// Result of the measurement of a guest.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestMeasurement {
    /// Inputs of a plan.
    pub inputs: Inputs,
    /// Cost of the measurement for the guest.
    pub cost: GuestCost,
    /// Kind of the dirty-page tracker.
    pub tracker: String,
    /// Reason why the guest's I/O did not quiesce in time in any trial pause. `None` if the I/O
    /// quiesced at least once. If this is `Some`, the costs of stopping are estimates, which hold
    /// for a time at which the I/O does quiesce.
    pub busy: Option<String>,
}

/// Pages that the guest dirtied, and their distribution.
#[derive(Debug, Default)]
struct Watched {
    curve: Vec<CurvePoint>,
    run_pages: f64,
    harvest_s: f64,
    written: Option<PageSet>,
}

/// Measures the running guest of `vm` for a migration with `settings`.
///
/// The guest is watched for the time `watch`. If `watch` is `None`, the time is chosen for `link`
/// ([`Windows::for_link`]). If `stop` returns true, the guest is no longer watched, and the result
/// contains the windows that have ended.
///
/// # Errors
/// If the guest cannot be tracked, paused or read, or if `stop` returned true before the first
/// window ended. The guest continues to run, unless it cannot be resumed after a pause.
pub fn measure(
    vm: &mut dyn SourceVm,
    tracker: Option<TrackerKind>,
    watch: Option<Duration>,
    link: Link,
    settings: &Settings,
    stop: impl Fn() -> bool,
) -> Result<GuestMeasurement, VmError> {
    let memory = vm.memory();
    let mut tracker = vm.tracker(tracker)?;
    let kind = tracker.kind();
    let chunk_pages = tracker.protector().chunk_pages();
    let began = Instant::now();
    let started = tracker.start();
    let start_s = began.elapsed().as_secs_f64();
    let watched = started.and_then(|()| observe(&mut *tracker, &*memory, (watch, &link), stop));
    let tracked = began.elapsed();
    let stopped = tracker.stop();
    let (watched, protect_page_s, touched) = watched?;
    stopped?;
    // The pages get time for further writes while the rest is measured.
    let none = PageSet::empty(memory.layout());
    let versions = Versions::take(&*memory, watched.written.as_ref().unwrap_or(&none))?;
    let Stopping { pause_s, quiesce_s, save_s, state_bytes, pauses, paused, busy } =
        measure_stopping(vm, settings.downtime_limit.clamp(SHORTEST_TRIAL_PAUSE, LONGEST_TRIAL_PAUSE))?;
    let free = if settings.free_pages { find_free_pages(vm, &touched) } else { none };
    let (looked, zero) = count_zeros(&*memory, &touched)?;
    let content = measure_content(&*memory, (&touched, &free), versions, settings)?;
    let pages = touched.count();
    let layout = memory.layout();
    let zero_pages = pages.saturating_mul(zero).checked_div(looked).unwrap_or(0);
    let fault_s = FAULT_S.iter().find(|(known, _)| *known == kind).map_or(2.4e-6, |(_, cost)| *cost);
    let faults = watched.written.as_ref().map_or(0, PageSet::count);
    let costs = Costs {
        pause_s,
        quiesce_s,
        save_s,
        state_bytes,
        harvest_s: watched.harvest_s,
        start_s,
        protect_page_s,
        fault_s,
    };
    let inputs = Inputs {
        memory_pages: layout.pages(),
        touched_pages: pages,
        zero_pages,
        free_pages: free.count(),
        content,
        vcpus: vm.config().vcpus,
        curve: watched.curve,
        run_pages: watched.run_pages,
        parts: parts(&touched, watched.written.as_ref()),
        protection: if kind == TrackerKind::Log { Protection::BeforeRead } else { Protection::AtHarvest },
        chunk_pages,
        link,
        costs,
    };
    let cost = GuestCost {
        tracked_ms: tracked.as_secs_f64() * 1e3,
        faults,
        faults_ms: faults as f64 * fault_s * 1e3,
        pauses,
        paused_ms: paused.as_secs_f64() * 1e3,
    };
    Ok(GuestMeasurement { inputs, cost, tracker: kind.to_string(), busy })
}

/// Protects all pages, and counts the pages that are written by the end of each window.
fn observe(
    tracker: &mut dyn DirtyTracker,
    memory: &dyn GuestMemory,
    (watch, link): (Option<Duration>, &Link),
    stop: impl Fn() -> bool,
) -> Result<(Watched, f64, PageSet), VmError> {
    let layout = memory.layout();
    let began = Instant::now();
    let touched = protect_all(tracker, memory)?;
    let protect_page_s = began.elapsed().as_secs_f64() / (layout.pages() as f64).max(1.0);
    let windows = watch.map_or_else(|| Windows::for_link(link, touched.count()), Windows::up_to);
    // Writes before this point, and pages that were never protected, do not count.
    tracker.harvest(&mut PageSet::empty(layout))?;
    let mut watched = Watched { harvest_s: f64::INFINITY, ..Watched::default() };
    // A dirty log keeps the marks that it has harvested until their pages are protected again.
    // Therefore its windows begin when a page was protected, which is on average halfway through
    // the time that protecting memory took.
    let kept = if tracker.kind() == TrackerKind::Log { began.elapsed() / 2 } else { Duration::ZERO };
    let (began, mut written) = (Instant::now().checked_sub(kept).unwrap_or(began), PageSet::empty(layout));
    for &window in &windows.0 {
        while let Some(left) = window.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            if stop() {
                break;
            }
            std::thread::sleep(left.min(TICK));
        }
        if stop() {
            break;
        }
        let at = began.elapsed();
        tracker.harvest(&mut written)?;
        watched.harvest_s = watched.harvest_s.min((began.elapsed() - at).as_secs_f64());
        let pages = written.count();
        watched.curve.push(CurvePoint { window_s: at.as_secs_f64(), pages: pages as f64 });
        // The first window with enough pages is used. In later windows, pages that were written at
        // random are adjacent, too.
        if watched.run_pages == 0.0 && pages >= 64 {
            let runs: usize = written.iter().map(|(_, map)| map.runs().count()).sum();
            watched.run_pages = pages as f64 / (runs as f64).max(1.0);
        }
    }
    if watched.curve.is_empty() {
        return Err(VmError::new("the measurement was stopped before the first window ended"));
    }
    watched.written = Some(written);
    Ok((watched, protect_page_s, touched))
}

/// Protects all pages chunk by chunk, as a pass does. Returns the pages that were touched at least
/// once.
fn protect_all(tracker: &dyn DirtyTracker, memory: &dyn GuestMemory) -> Result<PageSet, VmError> {
    let protector = tracker.protector();
    let chunk = protector.chunk_pages().max(1);
    let mut touched = PageSet::empty(memory.layout());
    for region in memory.layout().regions() {
        let all = Bitmap::full(region.pages());
        let Some(map) = touched.region_mut(region.id) else { continue };
        let mut first = 0;
        while first < region.pages() {
            let end = (first + chunk).min(region.pages());
            protector.protect(region.id, PageRun::from(first..end), &all)?;
            memory.touched(region.id, PageRun::from(first..end), map)?;
            first = end;
        }
    }
    Ok(touched)
}

/// Costs of stopping the guest.
struct Stopping {
    pause_s: f64,
    quiesce_s: f64,
    save_s: f64,
    state_bytes: f64,
    /// Number of trial pauses.
    pauses: u32,
    /// Total time for which the guest was stopped.
    paused: Duration,
    busy: Option<String>,
}

/// Measures the costs of stopping the guest by trial pauses, unless the VMM declares the costs. In
/// each trial pause, the guest's I/O has the time `within` to quiesce.
fn measure_stopping(vm: &mut dyn SourceVm, within: Duration) -> Result<Stopping, VmError> {
    if let PauseCosts::Declared { stop, save, state_bytes } = vm.pause_costs() {
        return Ok(Stopping {
            pause_s: stop.saturating_sub(save).as_secs_f64(),
            quiesce_s: 0.0,
            save_s: save.as_secs_f64(),
            state_bytes: state_bytes as f64,
            pauses: 0,
            paused: Duration::ZERO,
            busy: None,
        });
    }
    let (mut best, mut busy): (Option<Stopping>, _) = (None, None);
    let (mut pause_s, mut paused) = (f64::INFINITY, Duration::ZERO);
    for _ in 0..TRIAL_PAUSES {
        let once = vm::trial_pause(vm, within)?;
        paused += once.total;
        pause_s = pause_s.min(once.pause.as_secs_f64());
        let sections = match once.sections {
            Ok(sections) => sections,
            Err(why) => {
                busy = Some(why.to_string());
                continue;
            }
        };
        let (quiesce_s, save_s) = (once.quiesce.as_secs_f64(), once.save.as_secs_f64());
        let before =
            best.as_ref().map_or((f64::INFINITY, f64::INFINITY), |best| (best.quiesce_s, best.save_s));
        best = Some(Stopping {
            pause_s,
            quiesce_s: quiesce_s.min(before.0),
            save_s: save_s.min(before.1),
            state_bytes: sections.iter().map(|section| section.payload.len() as f64).sum(),
            pauses: TRIAL_PAUSES,
            paused,
            busy: None,
        });
    }
    // For a guest that could not be saved, the save time is an estimate.
    let guess = Stopping {
        pause_s,
        quiesce_s: 0.0,
        save_s: USUAL_SAVE_S,
        state_bytes: 0.0,
        pauses: TRIAL_PAUSES,
        paused,
        busy,
    };
    Ok(best.map_or(guess, |best| Stopping { pause_s, paused, ..best }))
}

/// Returns the pages of `touched` that the guest reports as free. Returns no pages if the guest
/// cannot be asked, or does not answer in time.
fn find_free_pages(vm: &mut dyn SourceVm, touched: &PageSet) -> PageSet {
    let memory = vm.memory();
    let Some(mut source) = vm.free_pages() else { return PageSet::empty(memory.layout()) };
    let mut report = FreeReport::new(memory.layout());
    let question = random::<8>().map_or(1, u64::from_le_bytes);
    let deadline = Instant::now() + FREE_PATIENCE;
    let mut requested = source.request(question);
    while requested.is_ok() && Instant::now() < deadline {
        match source.poll(&mut report) {
            Ok(Some(answer)) if answer.question == question && answer.complete => break,
            Ok(Some(_)) => {}
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => requested = Err(error),
        }
    }
    source.stop();
    let mut free = report.pages().clone();
    free.retain(touched);
    free
}

/// Samples the content of the pages that are touched and not free, and compares the `versions` of
/// written pages.
fn measure_content(
    memory: &dyn GuestMemory,
    (touched, free): (&PageSet, &PageSet),
    versions: Versions,
    settings: &Settings,
) -> Result<Content, VmError> {
    let level = if let PageCodec::Zstd(level) = settings.codec { level } else { Level::MIN };
    let mut pages = touched.clone();
    pages.subtract(free);
    let Encoded { pages: sampled_pages, lz4, zstd, delay } = encode(memory, &pages, level)?;
    let cache = usize::try_from(delta_cache_bytes(settings, memory.layout())).unwrap_or(usize::MAX);
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    Ok(Content {
        sampled_pages,
        lz4,
        zstd,
        zstd_level: level.get(),
        delta: versions.compare(memory)?,
        delta_cache_pages: SentPages::capacity_of(cache) as u64,
        processors: u32::try_from(processors).unwrap_or(u32::MAX),
        delay,
    })
}

/// Checks a sample of the `touched` pages for zeros. Returns the size of the sample, and the number
/// of its pages that contain only zeros.
fn count_zeros(memory: &dyn GuestMemory, touched: &PageSet) -> Result<(u64, u64), VmError> {
    let every = (touched.count() / SAMPLE).max(1);
    let mut scratch = Box::new([0; PAGE_BYTES]);
    let (mut at, mut looked, mut zero) = (0, 0, 0);
    for (region, map) in touched.iter() {
        for page in map.runs().flatten() {
            at += 1;
            if at % every == 0 {
                looked += 1;
                zero += u64::from(is_zero(memory, region, page, &mut scratch)?);
            }
        }
    }
    Ok((looked, zero))
}

fn is_zero(
    memory: &dyn GuestMemory,
    region: RegionId,
    page: u64,
    scratch: &mut [u8; PAGE_BYTES],
) -> Result<bool, VmError> {
    Ok(memory.window(region, PageRun::from(page..page + 1))?.copy_page(0, scratch))
}

/// Returns the distribution of the touched and the written pages over [`PARTS`] parts of memory, in
/// the order in which a pass sends the parts.
fn parts(touched: &PageSet, written: Option<&PageSet>) -> Vec<MemoryPart> {
    let pages: u64 = touched.iter().map(|(_, map)| map.len()).sum();
    let part = pages.div_ceil(PARTS as u64).max(1);
    let mut parts = vec![MemoryPart::default(); PARTS];
    let mut base = 0;
    for (region, map) in touched.iter() {
        let dirty = written.and_then(|set| set.region(region));
        let mut first = 0;
        while first < map.len() {
            let end = ((base + first) / part * part + part - base).min(map.len());
            if let Some(part) = usize::try_from((base + first) / part).ok().and_then(|at| parts.get_mut(at)) {
                part.touched += map.count_range(first..end) as f64;
                part.dirty += dirty.map_or(0, |dirty| dirty.count_range(first..end)) as f64;
            }
            first = end;
        }
        base += map.len();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_core::{Gpa, Layout, Region};

    #[test]
    fn windows_end_at_the_requested_time() {
        for longest in [0.1, 0.16, 0.5, 2.0, 100.0] {
            let windows = Windows::up_to(Duration::from_secs_f64(longest));
            let want = Duration::from_secs_f64(longest).clamp(Windows::SHORTEST * 8, Windows::LONGEST);
            assert_eq!(windows.longest(), want);
            assert!(windows.0.windows(2).all(|pair| pair[0] < pair[1]) && windows.0.len() < 24);
            assert!(windows.0[0] >= Windows::SHORTEST / 2, "{windows:?}");
        }
        let link = Link::given(100e6);
        assert_eq!(Windows::for_link(&link, 25_000).longest().as_millis(), 1126);
    }

    #[test]
    fn places_are_in_sending_order() {
        let region = |id, gpa: u64, pages: u64| Region { id: RegionId(id), gpa: Gpa(gpa), len: pages << 12 };
        let layout = Layout::new(vec![region(0, 0, 1000), region(1, 4 << 30, 600)]).unwrap();
        let (mut touched, mut written) = (PageSet::full(&layout), PageSet::empty(&layout));
        touched.region_mut(RegionId(0)).unwrap().clear_range(0..25);
        written.region_mut(RegionId(1)).unwrap().set_range(575..600);
        let parts = parts(&touched, Some(&written));
        assert_eq!((parts.len(), parts[0].touched, parts[1].touched), (64, 0.0, 25.0));
        assert_eq!((parts[63].dirty, parts[62].dirty), (25.0, 0.0));
        let sum = |value: fn(&MemoryPart) -> f64| parts.iter().map(value).sum::<f64>();
        assert_eq!((sum(|part| part.touched), sum(|part| part.dirty)), (1575.0, 25.0));
    }
}
