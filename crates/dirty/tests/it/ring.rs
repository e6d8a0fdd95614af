//! Tests of the dirty rings of a real VM.

use crate::memory::{Kind, Memory};
use crate::user_guest::{FIRST, fd, guest, running};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_baselines::Policy;
use vmferry_core::{DirtyTracker, PAGE_BYTES, PageSet, RegionId};
use vmferry_dirty::{Predict, ReaperPolicy, ReaperState, RingTracker};
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

fn nothing_is_lost(policy: Policy, entries: u32, set: u64) -> Option<u64> {
    let memory = Memory::new(Kind::Small, FIRST + 2 * set);
    let mut guest = guest(&memory, entries, 2, set)?;
    let layout = guest.layout.clone();
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(policy));
    let mut copy = vec![0; usize::try_from(memory.pages).unwrap() * PAGE_BYTES];
    let mut dirty = PageSet::full(&layout);
    tracker.start().unwrap();
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
        assert_eq!(
            lost(&memory, &copy),
            [],
            "{policy}, {entries} entries: pages lost before pause {episode}"
        );
        tracker.harvest(&mut dirty).unwrap();
        assert!(dirty.is_empty(), "the rings were drained");
    }
    let counted: u64 = (FIRST..memory.pages).map(|page| memory.word(page).load(Ordering::Relaxed)).sum();
    assert!(counted >= writes && writes > 0, "{counted} counted, {writes} reported");
    let report = tracker.report();
    let pages: u64 = report.vcpus.iter().map(|vcpu| vcpu.pages).sum();
    assert!(pages > 2 * set && report.vcpus.iter().all(|vcpu| vcpu.harvests > 0), "{report:?}");
    assert_eq!(report.reaper.policy, policy.name());
    Some(report.full_exits())
}

#[test]
fn no_write_is_lost_under_any_policy() {
    for policy in Policy::ALL {
        // A working set that fits, and one that does not.
        if nothing_is_lost(policy, 4096, 1024).is_none() {
            return;
        }
        nothing_is_lost(policy, 1024, 2048);
    }
}

#[test]
fn no_write_is_lost_with_any_ring_size() {
    for shift in 10..=16 {
        if nothing_is_lost(Policy::Predict, 1 << shift, 1024).is_none() {
            return;
        }
    }
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
