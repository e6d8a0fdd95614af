//! Looks at a guest that runs: what it dirties within several times, what of its memory counts, what stopping it takes.
//!
//! What that costs the guest: a fault for each page that it writes while it is tracked, once, as in the first pass of a migration;
//! and two pauses of a millisecond or so, or of as long as its I/O takes to come to rest, up to the downtime limit each (0.3 s at least, a
//! second at most). It is told with the result.

use super::curve::CurvePoint;
use super::inputs::{Costs, Inputs, Link, Place, Protection};
use crate::random;
use crate::source::Settings;
use crate::vm;
use serde::Serialize;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    DirtyTracker, FreeReport, GuestMemory, PAGE_BYTES, PAGE_SIZE, PageRun, PageSet, PauseCosts, RegionId,
    SourceVm, TrackerKind, VmError,
};

/// How often somebody who wants it to end is noticed.
const TICK: Duration = Duration::from_millis(50);
/// Parts of memory that are told apart.
const PLACES: usize = 64;
/// Pages that are looked at for zeros.
const SAMPLE: u64 = 2048;
/// How long a guest may take to say what is free.
const FREE_PATIENCE: Duration = Duration::from_millis(300);
/// Rehearsals of the pause: the shortest counts, as in earnest.
const REHEARSALS: u32 = 2;
/// For how long its I/O may take to come to rest, whatever its downtime may be once it moves: no less than postcopy gives it, and not longer than
/// somebody bears who only asks.
const SHORTEST_REHEARSAL: Duration = Duration::from_millis(300);
const LONGEST_REHEARSAL: Duration = Duration::from_secs(1);
/// What saving a small guest takes, where it could not be tried.
const USUAL_SAVE_S: f64 = 1e-3;
/// What a first write to a protected page costs the guest, in seconds: measured on two kinds of hosts (docs/dirty-tracking.md).
const FAULT_S: [(TrackerKind, f64); 3] =
    [(TrackerKind::Log, 2.4e-6), (TrackerKind::Ring, 2.4e-6), (TrackerKind::Wp, 1.3e-6)];

/// For how long a guest is watched.
#[derive(Debug, Clone, PartialEq)]
pub struct Windows(Vec<Duration>);

impl Windows {
    /// The shortest time that is looked at, and the longest.
    pub const SHORTEST: Duration = Duration::from_millis(20);
    /// The longest time that a guest is watched.
    pub const LONGEST: Duration = Duration::from_secs(10);

    /// Windows up to `longest`, each about 1.6 times as long as the one before.
    #[must_use]
    pub fn up_to(longest: Duration) -> Self {
        let longest = longest.clamp(Self::SHORTEST * 8, Self::LONGEST);
        let steps = (longest.as_secs_f64() / Self::SHORTEST.as_secs_f64()).ln() / 1.6f64.ln();
        #[expect(clippy::cast_possible_truncation, reason = "a dozen or so")]
        let steps = steps.ceil() as i32;
        let at = |step: i32| longest.mul_f64(1.6f64.powi(step - steps));
        Self((0..=steps).map(at).collect())
    }

    /// As long as the first pass over `pages` takes on `link`, so that what it leaves need not be guessed; within reason.
    #[must_use]
    pub fn for_link(link: &Link, pages: u64) -> Self {
        let pass = (pages * PAGE_SIZE) as f64 / link.bytes_per_s.max(1.0);
        Self::up_to(Duration::from_secs_f64((pass * 1.1).clamp(0.5, 3.0)))
    }

    /// How long that takes.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.0.last().copied().unwrap_or_default()
    }
}

/// What looking cost the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct GuestCost {
    /// Its writes were tracked for so long, in ms.
    pub tracked_ms: f64,
    /// Faults that it paid for that.
    pub faults: u64,
    /// About how long these took, all together, in ms.
    pub faults_ms: f64,
    /// It was stopped so often.
    pub pauses: u32,
    /// For so long, all together, in ms.
    pub paused_ms: f64,
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Looked {
    /// For the plan.
    pub inputs: Inputs,
    /// What that cost the guest.
    pub cost: GuestCost,
    /// How writes were found.
    pub tracker: String,
    /// Why the guest's I/O did not come to rest in that time, if it never did: what stopping takes is then guessed, and the plan
    /// one for when it does.
    pub busy: Option<String>,
}

/// What was dirtied, and where.
#[derive(Debug, Default)]
struct Watched {
    curve: Vec<CurvePoint>,
    run_pages: f64,
    harvest_s: f64,
    written: Option<PageSet>,
}

/// Looks at the guest of `vm`, which runs and is to be moved by `settings`, for as long as `watch` says, or as long as is worth while for
/// `link`. `stop` ends it earlier, with what was seen by then.
///
/// # Errors
/// If the guest cannot be tracked, paused or read. It runs in any case, unless it cannot be resumed.
pub fn measure(
    vm: &mut dyn SourceVm,
    tracker: Option<TrackerKind>,
    watch: Option<Duration>,
    link: Link,
    settings: &Settings,
    stop: impl Fn() -> bool,
) -> Result<Looked, VmError> {
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
    let Stopping { pause_s, settle_s, save_s, state_bytes, stood, busy } =
        rehearse(vm, settings.downtime_limit.clamp(SHORTEST_REHEARSAL, LONGEST_REHEARSAL))?;
    let free_pages = if settings.free_pages { ask_what_is_free(vm, &touched) } else { 0 };
    let (looked, zero) = count_zeros(&*memory, &touched)?;
    let pages = touched.count();
    let layout = memory.layout();
    let zero_pages = pages.saturating_mul(zero).checked_div(looked).unwrap_or(0);
    let fault_s = FAULT_S.iter().find(|(known, _)| *known == kind).map_or(2.4e-6, |(_, cost)| *cost);
    let faults = watched.written.as_ref().map_or(0, PageSet::count);
    let costs = Costs {
        pause_s,
        settle_s,
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
        free_pages,
        vcpus: vm.config().vcpus,
        curve: watched.curve,
        run_pages: watched.run_pages,
        places: places(&touched, watched.written.as_ref()),
        protection: if kind == TrackerKind::Log { Protection::BeforeRead } else { Protection::AtHarvest },
        chunk_pages,
        link,
        costs,
    };
    let cost = GuestCost {
        tracked_ms: tracked.as_secs_f64() * 1e3,
        faults,
        faults_ms: faults as f64 * fault_s * 1e3,
        pauses: REHEARSALS,
        paused_ms: stood.as_secs_f64() * 1e3,
    };
    Ok(Looked { inputs, cost, tracker: kind.to_string(), busy })
}

/// Protects everything, and counts what is written by the end of each window.
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
    // What was written, or was never protected, until here is not ours to count.
    tracker.harvest(&mut PageSet::empty(layout))?;
    let mut watched = Watched { harvest_s: f64::INFINITY, ..Watched::default() };
    // A log keeps the marks that it has harvested until their pages are protected again: its windows begin there, half of memory before.
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
        // Of the first window that tells: later, pages written at random lie side by side as well.
        if watched.run_pages == 0.0 && pages >= 64 {
            let runs: usize = written.iter().map(|(_, map)| map.runs().count()).sum();
            watched.run_pages = pages as f64 / (runs as f64).max(1.0);
        }
    }
    if watched.curve.is_empty() {
        return Err(VmError::new("it was stopped before anything was measured"));
    }
    watched.written = Some(written);
    Ok((watched, protect_page_s, touched))
}

/// All pages, chunk by chunk as a pass does it; returns those that were ever touched.
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

/// What stopping the guest takes.
struct Stopping {
    pause_s: f64,
    settle_s: f64,
    save_s: f64,
    state_bytes: f64,
    /// For how long it stood still, all together.
    stood: Duration,
    busy: Option<String>,
}

/// Stops the guest for an instant, to learn what that takes; its I/O has so long to come to rest.
fn rehearse(vm: &mut dyn SourceVm, within: Duration) -> Result<Stopping, VmError> {
    if let PauseCosts::Declared { stop, save, state_bytes } = vm.pause_costs() {
        return Ok(Stopping {
            pause_s: stop.saturating_sub(save).as_secs_f64(),
            settle_s: 0.0,
            save_s: save.as_secs_f64(),
            state_bytes: state_bytes as f64,
            stood: Duration::ZERO,
            busy: None,
        });
    }
    let (mut best, mut busy): (Option<Stopping>, _) = (None, None);
    let (mut pause_s, mut stood) = (f64::INFINITY, Duration::ZERO);
    for _ in 0..REHEARSALS {
        let once = vm::rehearse(vm, within)?;
        stood += once.stood;
        pause_s = pause_s.min(once.pause.as_secs_f64());
        let sections = match once.sections {
            Ok(sections) => sections,
            Err(why) => {
                busy = Some(why.to_string());
                continue;
            }
        };
        let (settle_s, save_s) = (once.settle.as_secs_f64(), once.save.as_secs_f64());
        let before =
            best.as_ref().map_or((f64::INFINITY, f64::INFINITY), |best| (best.settle_s, best.save_s));
        best = Some(Stopping {
            pause_s,
            settle_s: settle_s.min(before.0),
            save_s: save_s.min(before.1),
            state_bytes: sections.iter().map(|section| section.payload.len() as f64).sum(),
            stood,
            busy: None,
        });
    }
    // Of a guest that could not be saved, what saving usually takes.
    let guess = Stopping { pause_s, settle_s: 0.0, save_s: USUAL_SAVE_S, state_bytes: 0.0, stood, busy };
    Ok(best.map_or(guess, |best| Stopping { pause_s, stood, ..best }))
}

/// How many of `touched` the guest says are free. A guest that cannot be asked, or does not answer in time, has none.
fn ask_what_is_free(vm: &mut dyn SourceVm, touched: &PageSet) -> u64 {
    let memory = vm.memory();
    let Some(mut source) = vm.free_pages() else { return 0 };
    let mut report = FreeReport::new(memory.layout());
    let question = random::<8>().map_or(1, u64::from_le_bytes);
    let deadline = Instant::now() + FREE_PATIENCE;
    let mut asked = source.ask(question);
    while asked.is_ok() && Instant::now() < deadline {
        match source.poll(&mut report) {
            Ok(Some(answer)) if answer.question == question && answer.complete => break,
            Ok(Some(_)) => {}
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => asked = Err(error),
        }
    }
    source.stop();
    let mut free = report.pages().clone();
    free.retain(touched);
    free.count()
}

/// Looks at some of the pages; returns how many, and how many of them are zero.
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

/// Where what is touched, and what was written, lies in the order in which a pass sends it.
fn places(touched: &PageSet, written: Option<&PageSet>) -> Vec<Place> {
    let pages: u64 = touched.iter().map(|(_, map)| map.len()).sum();
    let part = pages.div_ceil(PLACES as u64).max(1);
    let mut places = vec![Place::default(); PLACES];
    let mut base = 0;
    for (region, map) in touched.iter() {
        let dirty = written.and_then(|set| set.region(region));
        let mut first = 0;
        while first < map.len() {
            let end = ((base + first) / part * part + part - base).min(map.len());
            if let Some(place) = usize::try_from((base + first) / part).ok().and_then(|at| places.get_mut(at))
            {
                place.touched += map.count_range(first..end) as f64;
                place.dirty += dirty.map_or(0, |dirty| dirty.count_range(first..end)) as f64;
            }
            first = end;
        }
        base += map.len();
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_core::{Gpa, Layout, Region};

    #[test]
    fn windows_end_where_they_are_to() {
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
    fn places_are_in_the_order_of_sending() {
        let region = |id, gpa: u64, pages: u64| Region { id: RegionId(id), gpa: Gpa(gpa), len: pages << 12 };
        let layout = Layout::new(vec![region(0, 0, 1000), region(1, 4 << 30, 600)]).unwrap();
        let (mut touched, mut written) = (PageSet::full(&layout), PageSet::empty(&layout));
        touched.region_mut(RegionId(0)).unwrap().clear_range(0..25);
        written.region_mut(RegionId(1)).unwrap().set_range(575..600);
        let places = places(&touched, Some(&written));
        assert_eq!((places.len(), places[0].touched, places[1].touched), (64, 0.0, 25.0));
        assert_eq!((places[63].dirty, places[62].dirty), (25.0, 0.0));
        let sum = |value: fn(&Place) -> f64| places.iter().map(value).sum::<f64>();
        assert_eq!((sum(|place| place.touched), sum(|place| place.dirty)), (1575.0, 25.0));
    }
}
