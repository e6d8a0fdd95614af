//! Tests of the dirty rings of a real VM.

use crate::memory::{Kind, Memory};
use crate::user_guest::{FIRST, Guest, fd, guest, running};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_baselines::Policy;
use vmferry_core::{DirtyTracker, PAGE_BYTES, PageRun, PageSet, RegionId};
use vmferry_dirty::{
    HarvestSchedule, Predict, ReaperPolicy, ReaperState, RingReport, RingTracker, Rings, TrackerError,
};
use vmferry_sys::kvm;
use vmferry_testkit::{print_line, wait, wait_for};

/// Waits until each vCPU has made `more` stretches. A starved host may run only one vCPU for a
/// while.
fn until_written(stretches: &[AtomicU64], more: u64) {
    let made = || stretches.iter().map(|made| made.load(Ordering::Acquire));
    let before: Vec<_> = made().collect();
    wait("writes of each vCPU", || made().zip(&before).all(|(now, before)| now >= before + more));
}

/// Copies the dirty pages and clears the set.
fn send(memory: &Memory, dirty: &mut PageSet, copy: &mut [u8]) {
    for page in dirty.region(RegionId(0)).unwrap().runs().flatten() {
        let at = usize::try_from(page).unwrap() * PAGE_BYTES;
        copy[at..at + PAGE_BYTES].copy_from_slice(&memory.page(page));
    }
    dirty.clear();
}

fn lost(memory: &Memory, copy: &[u8]) -> Vec<u64> {
    (0..memory.pages)
        .zip(copy.chunks(PAGE_BYTES))
        .filter(|(page, copied)| *copied != memory.page(*page))
        .map(|(page, _)| page)
        .collect()
}

/// Runs a guest of two vCPUs with working sets of `set` pages under `policy`, and checks that no
/// write is lost. Calls `before` when tracking has started and no vCPU runs yet.
fn nothing_is_lost(
    policy: impl ReaperPolicy + 'static,
    entries: u32,
    set: u64,
    before: impl FnOnce(&RingTracker),
) -> Option<RingReport> {
    let name = policy.name().to_owned();
    let memory = Memory::new(Kind::Small, FIRST + 2 * set);
    let mut guest = guest(&memory, entries, 2, set)?;
    let layout = guest.layout.clone();
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(policy));
    let mut copy = vec![0; usize::try_from(memory.pages).unwrap() * PAGE_BYTES];
    let mut dirty = PageSet::full(&layout);
    tracker.start().unwrap();
    before(&tracker);
    let mut writes = 0;
    for episode in 0..6 {
        let (_, more) = running(&mut guest, |stretches| {
            for _ in 0..4 {
                // The guest writes between harvest and copy.
                until_written(stretches, 1);
                send(&memory, &mut dirty, &mut copy);
                tracker.harvest(&mut dirty).unwrap();
            }
        });
        writes += more;
        // The vCPUs have stopped, so this is the last harvest.
        let began = Instant::now();
        tracker.harvest(&mut dirty).unwrap();
        let (took, in_kernel) = (began.elapsed(), tracker.harvest_kernel_time().unwrap());
        assert!(Duration::ZERO < in_kernel && in_kernel < took, "{in_kernel:?} of {took:?}");
        send(&memory, &mut dirty, &mut copy);
        assert_eq!(lost(&memory, &copy), [], "{name}, {entries} entries: pages lost before pause {episode}");
        tracker.harvest(&mut dirty).unwrap();
        assert!(dirty.is_empty(), "the rings were drained");
    }
    let counted: u64 = (FIRST..memory.pages).map(|page| memory.word(page).load(Ordering::Relaxed)).sum();
    assert!(counted >= writes && writes > 0, "{counted} counted, {writes} reported");
    let report = tracker.report();
    let pages: u64 = report.vcpus.iter().map(|vcpu| vcpu.pages).sum();
    assert!(pages > 2 * set && report.vcpus.iter().all(|vcpu| vcpu.harvests > 0), "{report:?}");
    assert_eq!(report.reaper.policy, name);
    Some(report)
}

#[test]
fn no_write_is_lost_under_any_policy() {
    for policy in Policy::ALL {
        // A working set that fits, and one that does not.
        if nothing_is_lost(policy, 4096, 1024, |_| {}).is_none() {
            return;
        }
        nothing_is_lost(policy, 1024, 2048, |_| {});
    }
}

#[test]
fn no_write_is_lost_with_any_ring_size() {
    for shift in 10..=16 {
        if nothing_is_lost(Policy::Predict, 1 << shift, 1024, |_| {}).is_none() {
            return;
        }
    }
}

/// Policy that looks at the rings every millisecond, and does the same at each look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    /// Harvests both rings, which it names twice and not in order.
    NamesTwice,
    /// Harvests a ring that does not exist.
    NamesMissingRing,
    /// Returns an error.
    Fails,
    Panics,
    /// Panics before its first look.
    PanicsAtStart,
}

impl ReaperPolicy for Planted {
    fn name(&self) -> &'static str {
        "planted"
    }

    fn begin(&self, _: &dyn Rings) -> Box<dyn HarvestSchedule> {
        assert_ne!(*self, Self::PanicsAtStart, "no schedule");
        Box::new(*self)
    }
}

impl HarvestSchedule for Planted {
    fn first_sleep(&self) -> Duration {
        Duration::from_millis(1)
    }

    fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError> {
        match self {
            Self::NamesTwice => rings.harvest(&[1, 0, 1, 0])?,
            Self::NamesMissingRing => rings.harvest(&[0, 2])?,
            Self::Fails => return Err(TrackerError::RingStuck { vcpu: 1 }),
            Self::Panics | Self::PanicsAtStart => panic!("planted at {:?}", rings.entries()),
        };
        Ok(Duration::from_millis(1))
    }

    fn watermark(&self, _: usize) -> Option<u32> {
        Some(8)
    }
}

#[test]
fn policy_may_name_a_ring_twice_and_in_any_order() {
    let Some(report) = nothing_is_lost(Planted::NamesTwice, 1024, 2048, |_| {}) else { return };
    let reaper = report.reaper;
    assert!(matches!(reaper.state, ReaperState::Sleeping | ReaperState::Working), "{reaper:?}");
    assert!(reaper.harvests > 0, "{reaper:?}");
}

/// The vCPUs run only after the reaper has failed, with rings that are too small for their sets.
#[test]
fn no_write_is_lost_and_no_vcpu_hangs_after_the_reaper_failed() {
    for (planted, why, iterations) in [
        (Planted::NamesMissingRing, "vCPU 2 has no dirty ring: the VM has 2 rings", 1),
        (Planted::Fails, "the dirty ring of vCPU 1 cannot be reset", 1),
        (Planted::Panics, "its policy panicked: planted at 1024", 1),
        (Planted::PanicsAtStart, "its policy panicked: ", 0),
    ] {
        let failed = |tracker: &RingTracker| {
            let state = || tracker.report().reaper.state;
            wait("the failure of the reaper", || matches!(state(), ReaperState::Failed(_)));
        };
        let Some(report) = nothing_is_lost(planted, 1024, 2048, failed) else { return };
        let reaper = &report.reaper;
        let ReaperState::Failed(error) = &reaper.state else { panic!("{reaper:?}") };
        assert!(error.contains(why), "{error}");
        assert_eq!((reaper.iterations, reaper.harvests, reaper.sleep), (iterations, 0, Duration::ZERO));
        // Each vCPU emptied its own full ring.
        assert!(report.vcpus.iter().all(|vcpu| vcpu.full_exits > 0), "{planted:?}: {report:?}");
    }
}

#[test]
fn failed_reaper_stays_visible_until_tracking_starts_again() {
    let memory = Memory::new(Kind::Small, FIRST + 64);
    let Some(guest) = guest(&memory, 1024, 1, 64) else { return };
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(Planted::Panics));
    let state = |tracker: &RingTracker| tracker.report().reaper.state;
    tracker.start().unwrap();
    wait("the failure of the reaper", || matches!(state(&tracker), ReaperState::Failed(_)));
    tracker.stop().unwrap();
    assert!(matches!(state(&tracker), ReaperState::Failed(_)), "{:?}", tracker.report());
    drop(tracker);
    let mut tracker = RingTracker::new(&guest.rings);
    tracker.start().unwrap();
    wait("looks of the reaper", || tracker.report().reaper.iterations > 1);
    assert!(!matches!(state(&tracker), ReaperState::Failed(_)), "{:?}", tracker.report());
}

#[test]
fn full_ring_stops_only_its_vcpu_and_is_counted() {
    let memory = Memory::new(Kind::Small, FIRST + 2 * 8192);
    let Some(mut guest) = guest(&memory, 1024, 2, 8192) else { return };
    // The second vCPU writes to a set that fits.
    let mut regs = guest.vcpus[1].get_regs().unwrap();
    regs.r8 = 255;
    guest.vcpus[1].set_regs(&regs).unwrap();
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(Policy::Fixed));
    let began = Instant::now();
    tracker.start().unwrap();
    let (_, writes) = running(&mut guest, |_| {
        wait_for("full rings", || {
            let report = tracker.report();
            let enough = report.vcpus[0].full_exits > 3 && report.vcpus[1].pages >= 255;
            if enough { Ok(()) } else { Err(Box::new(report)) }
        });
    });
    let (report, took) = (tracker.report(), began.elapsed());
    print_line(format!("fixed, 1024 entries: {writes} writes, {report:?}"));
    assert!(report.vcpus[0].full_exits > 3 && report.vcpus[1].full_exits == 0, "{report:?}");
    assert!(
        report.vcpus[0].stalled > Duration::ZERO && report.vcpus[0].stalled >= report.vcpus[0].stalled_max
    );
    assert_eq!(report.entries, 1024);
    assert!(
        report.reaper.iterations <= took.as_secs(),
        "the reaper sleeps for a second: {report:?} in {took:?}"
    );
    assert!(report.vcpus[1].pages >= 255, "the baseline harvests every ring: {report:?}");
    tracker.stop().unwrap();
    let mut tracker = RingTracker::new(&guest.rings);
    tracker.start().unwrap();
    assert_eq!(tracker.report().full_exits(), 0, "a start resets the counts");
    running(&mut guest, |_| wait("many pages", || tracker.report().vcpus[0].pages > 8192));
    let report = tracker.report();
    print_line(format!("predict, 1024 entries: {report:?}"));
    assert_eq!(report.vcpus[1].pages, 0, "a ring with room is left alone: {report:?}");
    assert!(report.vcpus[0].pages > 1024, "{report:?}");
}

/// A guest whose working set fits into its ring must not fault on all of it for each chunk.
#[test]
fn senders_harvest_the_rings_only_after_they_have_sent_twice_as_many_pages() {
    const SET: u64 = 256;
    let memory = Memory::new(Kind::Small, FIRST + SET);
    let Some(mut guest) = guest(&memory, 4096, 1, SET) else { return };
    // A reaper that has failed harvests nothing.
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(Planted::Fails));
    tracker.start().unwrap();
    let rings = guest.rings.clone();
    let used = || rings.used()[0];
    // Some hosts add a page of the guest's tables.
    let write_all = |guest: &mut Guest| {
        running(guest, |stretches| until_written(stretches, 8));
        let entries = used();
        assert!((SET..SET + 64).contains(&entries.into()), "{entries} entries");
        entries
    };
    let entries = write_all(&mut guest);
    let (protector, mut dirty) = (tracker.protector(), PageSet::full(&guest.layout));
    let all = dirty.region(RegionId(0)).unwrap().clone();
    let protect = |pages| protector.protect(RegionId(0), PageRun::from(pages), &all).unwrap();
    protect(FIRST..FIRST + 64);
    assert_eq!(used(), entries, "the allowance for 64 pages is 32 entries");
    protect(0..FIRST + SET);
    assert_eq!(used(), 0);
    dirty.clear();
    tracker.harvest(&mut dirty).unwrap();
    assert!(dirty.is_empty(), "the writes were discarded, because the pages are read after them");
    // The harvest has begun a new pass.
    let entries = write_all(&mut guest);
    protect(FIRST..FIRST + SET);
    assert_eq!(used(), entries);
    tracker.harvest(&mut dirty).unwrap();
    assert_eq!(dirty.count(), u64::from(entries));
}

#[test]
fn second_tracker_is_refused_until_the_first_stops() {
    let memory = Memory::new(Kind::Small, FIRST + 1024);
    let Some(mut guest) = guest(&memory, 4096, 1, 1024) else { return };
    // The dirty log was used on this VM before, which leaves a protection mode that the rings
    // cannot use.
    let offered = kvm::manual_protect_offered(fd(&guest.vm)).unwrap();
    kvm::enable_manual_protect(fd(&guest.vm), offered).unwrap();
    running(&mut guest, |stretches| until_written(stretches, 4));
    let mut dirty = PageSet::empty(&guest.layout);
    let mut first = RingTracker::new(&guest.rings);
    let mut second = RingTracker::with_policy(&guest.rings, Arc::new(Policy::Gears));
    assert!(first.harvest(&mut dirty).unwrap_err().to_string().contains("not started"));
    assert_eq!(first.report().reaper.state, ReaperState::Off);
    assert_eq!(first.report().reaper.policy, Predict.name());
    for _ in 0..3 {
        first.start().unwrap();
        assert!(second.start().unwrap_err().to_string().contains("another tracker"));
        // 16 writes to each page on average.
        running(&mut guest, |stretches| until_written(stretches, 4));
        first.harvest(&mut dirty).unwrap();
        assert!(dirty.count() > 900, "{} pages", dirty.count());
        first.put_back(&dirty).unwrap();
        let mut again = PageSet::empty(&guest.layout);
        first.harvest(&mut again).unwrap();
        assert!(again == dirty, "pages that were put back are reported again");
        dirty.clear();
        wait("the reaper's sleep", || first.report().reaper.state == ReaperState::Sleeping);
        running(&mut guest, |stretches| until_written(stretches, 4));
        first.stop().unwrap();
        // Without tracking, the guest runs and no ring fills.
        running(&mut guest, |stretches| until_written(stretches, 4));
        second.start().unwrap();
        second.harvest(&mut dirty).unwrap();
        assert!(dirty.is_empty(), "a start discards earlier pages: {} pages", dirty.count());
        second.stop().unwrap();
        assert_eq!(second.report().reaper.state, ReaperState::Off);
    }
}

#[test]
fn reaper_uses_almost_no_processor_time_for_an_idle_guest() {
    let memory = Memory::new(Kind::Small, FIRST + 16 * 64);
    let Some(guest) = guest(&memory, 4096, 16, 64) else { return };
    let mut tracker = RingTracker::new(&guest.rings);
    // The reaper may look before this thread runs again.
    let begin = Instant::now();
    tracker.start().unwrap();
    wait("looks of the reaper", || tracker.report().reaper.iterations > 20);
    let (report, time) = (tracker.report(), begin.elapsed());
    let (looks, share) = (report.reaper.iterations, report.reaper.cpu.as_secs_f64() / time.as_secs_f64());
    print_line(format!("idle, 16 vCPUs: {looks} looks, {:.4} % of a processor", share * 100.0));
    assert_eq!(report.reaper.harvests, 0, "{report:?}");
    // Looks must be rare: on a busy host the reaper looks less often, never more. Each look must be
    // short: the goal is a tenth of a percent, and on a busy processor a look costs more.
    let least = Duration::from_millis(50) * u32::try_from(looks).unwrap();
    assert!(time > least, "{looks} looks in {time:?}");
    assert!(report.reaper.cpu < least / 125, "{report:?}");
    tracker.stop().unwrap();
}
