//! The dirty rings of a real VM.

use crate::memory::{Kind, Memory, say};
use crate::user_guest::{FIRST, fd, guest, running};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_dirty::{Policy, ReaperState, RingTracker};
use vmferry_engine::DirtyTracker;
use vmferry_memory::{PAGE_BYTES, PageSet, RegionId};
use vmferry_sys::kvm;

/// Copies what is dirty, with time for the guest between harvest and copy.
fn send(memory: &Memory, dirty: &mut PageSet, copy: &mut [u8]) {
    std::thread::sleep(Duration::from_micros(300));
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
    let mut tracker = RingTracker::new(&guest.rings, policy);
    let mut copy = vec![0; usize::try_from(memory.pages).unwrap() * PAGE_BYTES];
    let mut dirty = PageSet::full(&layout);
    tracker.start().unwrap();
    let mut writes = 0;
    for episode in 0..6 {
        let (_, more) = running(&mut guest, |stretches| {
            let begin = Instant::now();
            for _ in 0..4 {
                let before = stretches.load(Ordering::Acquire);
                while stretches.load(Ordering::Acquire) < before + 4 {
                    assert!(begin.elapsed().as_secs() < 60, "the guest does not run: {:?}", tracker.report());
                    std::thread::sleep(Duration::from_millis(1));
                }
                send(&memory, &mut dirty, &mut copy);
                tracker.harvest(&mut dirty).unwrap();
            }
        });
        writes += more;
        // The vCPUs have stopped: the last harvest.
        tracker.harvest(&mut dirty).unwrap();
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
    assert_eq!(report.reaper.policy, policy);
    Some(report.full_exits())
}

#[test]
fn no_write_is_lost_under_any_policy() {
    for policy in Policy::ALL {
        // A set that fits, and one that does not.
        if nothing_is_lost(policy, 4096, 2048).is_none() {
            return;
        }
        nothing_is_lost(policy, 1024, 4096);
    }
}

#[test]
fn every_size_works_that_the_host_allows() {
    for shift in 10..=16 {
        nothing_is_lost(Policy::Predict, 1 << shift, 1024);
    }
}

#[test]
fn a_full_ring_stops_its_vcpu_and_is_counted_and_the_other_runs_on() {
    let memory = Memory::new(Kind::Small, FIRST + 2 * 8192);
    let Some(mut guest) = guest(&memory, 1024, 2, 8192) else { return };
    // The second vCPU writes to a set that fits.
    let mut regs = guest.vcpus[1].get_regs().unwrap();
    regs.r8 = 255;
    guest.vcpus[1].set_regs(&regs).unwrap();
    let mut tracker = RingTracker::new(&guest.rings, Policy::Fixed);
    tracker.start().unwrap();
    let (_, writes) = running(&mut guest, |_| std::thread::sleep(Duration::from_millis(300)));
    let report = tracker.report();
    say(&format!("fixed, 1024 entries: {writes} writes, {report:?}"));
    assert!(report.vcpus[0].full_exits > 3 && report.vcpus[1].full_exits == 0, "{report:?}");
    assert!(
        report.vcpus[0].stalled > Duration::ZERO && report.vcpus[0].stalled >= report.vcpus[0].stalled_max
    );
    assert_eq!((report.entries, report.reaper.iterations), (1024, 0), "it sleeps for a second");
    assert!(report.vcpus[1].pages >= 255, "the published way harvests every ring: {report:?}");
    tracker.stop().unwrap();
    let mut tracker = RingTracker::new(&guest.rings, Policy::Predict);
    tracker.start().unwrap();
    assert_eq!(tracker.report().full_exits(), 0, "counts begin anew");
    running(&mut guest, |_| std::thread::sleep(Duration::from_millis(300)));
    let report = tracker.report();
    say(&format!("predict, 1024 entries: {report:?}"));
    assert_eq!(report.vcpus[1].pages, 0, "a ring with room is left alone: {report:?}");
    assert!(report.vcpus[0].pages > 1024, "{report:?}");
}

#[test]
fn trackers_take_turns_and_say_so() {
    let memory = Memory::new(Kind::Small, FIRST + 1024);
    let Some(mut guest) = guest(&memory, 4096, 1, 1024) else { return };
    // Somebody had tried the log on this VM, which leaves a way of protecting behind that the rings cannot use.
    let offered = kvm::manual_protect_offered(fd(&guest.vm)).unwrap();
    kvm::enable_manual_protect(fd(&guest.vm), offered).unwrap();
    running(&mut guest, |_| std::thread::sleep(Duration::from_millis(30)));
    let mut dirty = PageSet::empty(&guest.layout);
    let mut first = RingTracker::new(&guest.rings, Policy::Predict);
    let mut second = RingTracker::new(&guest.rings, Policy::Gears);
    assert!(first.harvest(&mut dirty).unwrap_err().to_string().contains("not started"));
    assert_eq!(first.report().reaper.state, ReaperState::Off);
    for _ in 0..3 {
        first.start().unwrap();
        assert!(second.start().unwrap_err().to_string().contains("another tracker"));
        running(&mut guest, |_| std::thread::sleep(Duration::from_millis(50)));
        first.harvest(&mut dirty).unwrap();
        assert!(dirty.count() > 900, "{} pages", dirty.count());
        first.put_back(&dirty).unwrap();
        let mut again = PageSet::empty(&guest.layout);
        first.harvest(&mut again).unwrap();
        assert!(again == dirty, "what was put back comes again");
        dirty.clear();
        assert_eq!(first.report().reaper.state, ReaperState::Sleeping);
        running(&mut guest, |_| std::thread::sleep(Duration::from_millis(20)));
        first.stop().unwrap();
        // Not tracked: the guest runs, no ring fills.
        running(&mut guest, |_| std::thread::sleep(Duration::from_millis(20)));
        second.start().unwrap();
        second.harvest(&mut dirty).unwrap();
        assert!(dirty.is_empty(), "started anew: {} pages", dirty.count());
        second.stop().unwrap();
        assert_eq!(second.report().reaper.state, ReaperState::Off);
    }
}

#[test]
fn an_idle_guest_costs_the_reaper_next_to_nothing() {
    let memory = Memory::new(Kind::Small, FIRST + 16 * 64);
    let Some(guest) = guest(&memory, 4096, 16, 64) else { return };
    let mut tracker = RingTracker::new(&guest.rings, Policy::Predict);
    tracker.start().unwrap();
    let begin = Instant::now();
    std::thread::sleep(Duration::from_secs(3));
    let (report, time) = (tracker.report(), begin.elapsed());
    let share = report.reaper.cpu.as_secs_f64() / time.as_secs_f64();
    say(&format!(
        "idle, 16 vCPUs: {} looks, {:.4} % of a processor",
        report.reaper.iterations,
        share * 100.0
    ));
    assert!(report.reaper.iterations > 20 && report.reaper.harvests == 0, "{report:?}");
    // The goal is a tenth of a percent. Other tests run beside this one, and on a busy processor each look costs more.
    assert!(share < 0.004, "{share}");
    let begin = Instant::now();
    tracker.stop().unwrap();
    assert!(begin.elapsed() < Duration::from_millis(500), "a sleeping reaper stops at once");
}
