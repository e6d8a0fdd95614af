//! Tests of KVM guests that allocate, touch and free memory, and whose free pages a migration
//! skips: by hints and by their own map, with every tracker, in precopy and postcopy.

use crate::confined::kvm;
use crate::rig::{boot_with, empty, patient};
use std::time::Duration;
use vmferry_engine::{
    MigrationHandle, MigrationMode, MigrationState, OnTimeout, Report, Settings, SourceVm, TargetVm,
    TrackerKind, Uri,
};
use vmferry_guest_abi::{HintMode, PAGE_SIZE, ReportMode, State};
use vmferry_testkit::{Need, print_line, skip, wait, wait_for};
use vmferry_testkit_peers::gated::Gated;
use vmferry_testkit_peers::pair;
use vmferry_vmm::{Vm, VmHandle, VmOptions, largest_dirty_ring};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 256 * MIB;
/// Memory that the guest touches and frees, in bytes.
const FREED: u64 = 128 * MIB;

fn options(tracker: TrackerKind) -> VmOptions {
    let mut options = VmOptions::new(MEMORY, 2);
    options.dirty_ring = (tracker == TrackerKind::Ring).then_some(4096);
    options
}

/// Returns a guest whose allocator has worked for `rounds` rounds, or works without end for 0.
/// Nothing is reported, so that free pages keep their content.
fn running(hints: HintMode, tracker: TrackerKind, rounds: u32) -> Vm {
    let rounds_text = if rounds > 0 { format!(",rounds={rounds}") } else { String::new() };
    let workload = format!("uniform,ws=8M,rate=2k,fill=random,alloc={FREED}{rounds_text}");
    let vm =
        boot_with(options(tracker), &workload, |args| (args.report, args.hints) = (ReportMode::Off, hints));
    let handle = vm.handle();
    wait("the allocator's first round", || {
        handle
            .alloc_stats()
            .is_ok_and(|now| if rounds > 0 { now.done() } else { now.sum(|cpu| cpu.rounds) > 2 })
    });
    vm
}

fn whole(handle: &VmHandle, what: &str) {
    wait("the guest's page of requests", || handle.request_verify(9));
    wait("the guest's check of its pages", || {
        handle.stats().is_ok_and(|stats| stats.verified(9) || stats.corrupt() > 0)
    });
    let stats = wait_for("a report", || handle.stats());
    assert_eq!((stats.state, stats.corrupt()), (State::Running, 0), "{what}: {:?}", stats.first_corrupt());
}

struct Case {
    hints: HintMode,
    tracker: TrackerKind,
    mode: MigrationMode,
    rounds: u32,
    free_pages: bool,
    /// True if the senders wait for the guest's first answer.
    waits: bool,
}

fn moved(case: &Case) -> Report {
    let Case { hints, tracker, mode, rounds, free_pages, waits } = *case;
    let what = format!("{mode}, {tracker}, hints {hints}, rounds {rounds}, free pages {free_pages}");
    let mut source = running(hints, tracker, rounds);
    let mut target = empty(options(tracker));
    // A guest that allocates without end outruns the link, and this timeout migrates it after a few
    // passes. Each pass asks the guest again.
    let timeout = if rounds == 0 { Duration::from_millis(1500) } else { Duration::from_secs(5) };
    // A link of 2 Gbit/s: a pass takes long enough to ask the guest.
    let settings = Settings {
        mode,
        free_pages,
        verify: true,
        max_bandwidth: Some(250_000_000),
        timeout: Some(timeout),
        on_timeout: OnTimeout::Switch,
        ..patient()
    };
    let tcp = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    let mut send = |vm: &mut dyn SourceVm| {
        pair::moved(&tcp, vm, &mut target, Some(tracker), &settings, &MigrationHandle::new())
    };
    let (report, came) = if waits { send(&mut Gated::new(&mut source)) } else { send(&mut source) };
    if let Some(postcopy) = came.expect("the guest") {
        assert_eq!((postcopy.state, postcopy.left), (MigrationState::Completed, 0), "{postcopy:?}");
    }
    assert_eq!(report.state, MigrationState::Completed, "{what}: {:?}", report.error);
    let handle = target.handle();
    if rounds == 0 {
        let before = handle.alloc_stats().map_or(0, |now| now.sum(|cpu| cpu.rounds));
        wait("the allocator's rounds on the target", || {
            handle.alloc_stats().is_ok_and(|now| now.sum(|cpu| cpu.rounds) > before + 2)
        });
    }
    whole(&handle, &what);
    print_line(format!(
        "{what}: {} KiB on the wire, {:.0} ms, downtime {:.1} ms, {} pages skipped, {:?}",
        report.bytes.wire >> 10,
        report.total_ms,
        report.downtime_ms,
        report.bytes.free_pages_skipped,
        report.free_pages
    ));
    assert_eq!(report.skipped_pages, report.bytes.free_pages_skipped, "{what}");
    assert_eq!(report.verified_pages + report.skipped_pages, MEMORY / PAGE_SIZE, "{what}");
    report
}

fn trackers() -> Vec<TrackerKind> {
    let ring = largest_dirty_ring().is_ok_and(|largest| largest.is_some_and(|entries| entries >= 4096));
    if !ring {
        skip(Need::Kvm, "KVM on this host has no dirty rings of 4096 entries");
    }
    [TrackerKind::Log, TrackerKind::Wp].into_iter().chain(ring.then_some(TrackerKind::Ring)).collect()
}

#[test]
fn touched_and_freed_pages_are_skipped() {
    if !kvm() {
        return;
    }
    for tracker in trackers() {
        let mode = MigrationMode::Precopy;
        let case = |hints, free_pages| Case { hints, tracker, mode, rounds: 1, free_pages, waits: true };
        let all = moved(&case(HintMode::Demand, false));
        assert_eq!((all.bytes.free_pages_skipped, all.free_pages.is_none()), (0, true));
        // One vCPU may have used what the other had freed.
        assert!(all.bytes.wire > FREED / 2, "the freed memory was not sent: {}", all.bytes.wire);
        for hints in [HintMode::Demand, HintMode::Incremental] {
            let report = moved(&case(hints, true));
            // A chunk of 8 MiB that a channel has taken is sent, whatever the guest then answers.
            assert!(report.bytes.free_pages_skipped * PAGE_SIZE > FREED / 2, "{report:?}");
            assert!(report.bytes.wire < all.bytes.wire, "{} {}", report.bytes.wire, all.bytes.wire);
        }
    }
}

#[test]
fn pages_freed_and_used_again_arrive() {
    if !kvm() {
        return;
    }
    for tracker in trackers() {
        for hints in [HintMode::Demand, HintMode::Incremental] {
            let mode = MigrationMode::Precopy;
            let _report = moved(&Case { hints, tracker, mode, rounds: 0, free_pages: true, waits: false });
        }
    }
}

#[test]
fn postcopy_guest_does_not_wait_for_free_pages() {
    if !kvm() {
        return;
    }
    if let Err(error) = Vm::new(VmOptions::new(MEMORY, 1)).unwrap().demand_paging() {
        return skip(Need::Uffd, error);
    }
    for (mode, hints, rounds) in [
        (MigrationMode::Postcopy, HintMode::Incremental, 1),
        (MigrationMode::Postcopy, HintMode::Incremental, 0),
        (MigrationMode::Hybrid, HintMode::Incremental, 0),
        (MigrationMode::Hybrid, HintMode::Demand, 1),
    ] {
        let tracker = TrackerKind::Log;
        let report = moved(&Case { hints, tracker, mode, rounds, free_pages: true, waits: true });
        let least = if rounds == 1 { FREED / 2 } else { 0 };
        assert!(report.bytes.free_pages_skipped * PAGE_SIZE > least, "{report:?}");
    }
}
