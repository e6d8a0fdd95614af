//! Migrations of a process guest that skip its free pages. The guest takes and gives up heap pages
//! all the time, is migrated in every mode, and finds each page in use unchanged.

use crate::rig::verified;
use vmferry_engine::{
    Migratable, MigrationHandle, MigrationMode, MigrationState, Report, Settings, SourceVm, TargetVm, Uri,
};
use vmferry_guest_abi::State;
use vmferry_process::{ProcessGuest, ProcessOptions};
use vmferry_testkit::{Need, PATIENCE, print_line, skip, wait};
use vmferry_testkit_peers::gated::Gated;
use vmferry_testkit_peers::pair;

const MEMORY: u64 = 40 << 20;
const HEAP: u64 = 16 << 20;
const LOAD: &str = "uniform,ws=6M,data=8M,rate=20k,fill=random";

fn options(memfd: bool) -> ProcessOptions {
    let mut options = ProcessOptions::new(MEMORY, 2);
    (options.memfd, options.heap) = (memfd, HEAP);
    options
}

/// Returns a guest that has written all of its heap and uses a part of it.
fn running(memfd: bool) -> ProcessGuest {
    let mut guest = ProcessGuest::new(options(memfd), LOAD.parse().unwrap()).unwrap();
    guest.start().unwrap();
    let handle = guest.handle();
    wait("the guest to fill its memory", || handle.stats().is_ok_and(|s| s.state >= State::Running));
    wait("the heap's first content", || handle.heap().taken > HEAP / 4096);
    guest
}

fn moved(mode: MigrationMode, memfd: bool, free_pages: bool) -> Report {
    let mut source = running(memfd);
    let mut target = ProcessGuest::new_incoming(options(memfd)).unwrap();
    let tcp = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    let settings = Settings { mode, free_pages, verify: true, peer_timeout: PATIENCE, ..Settings::default() };
    let (report, came) = pair::moved(
        &tcp,
        &mut Gated::new(&mut source),
        &mut target,
        None,
        &settings,
        &MigrationHandle::new(),
    );
    if let Some(postcopy) = came.expect("the guest") {
        assert_eq!((postcopy.state, postcopy.left), (MigrationState::Completed, 0), "{postcopy:?}");
    }
    let what = format!("{mode} memfd {memfd} free pages {free_pages}");
    assert_eq!(report.state, MigrationState::Completed, "{what}: {:?}", report.error);
    let handle = target.handle();
    wait("the heap at work", || handle.heap().checked > 1000);
    let stats = verified(&handle, 7);
    assert_eq!((stats.corrupt(), stats.state), (0, State::Running), "{what}: {:?}", stats.first_corrupt());
    SourceVm::pause(&mut target).unwrap();
    assert_eq!((target.check_heap().unwrap(), handle.heap().corrupt), (0, 0), "{what}");
    report
}

fn compare(mode: MigrationMode, memfd: bool) {
    let (with, without) = (moved(mode, memfd, true), moved(mode, memfd, false));
    print_line(format!(
        "{mode}, memfd {memfd}: {} bytes and {:.1} ms with free pages skipped, {} and {:.1} ms without; {} pages, {:?}",
        with.bytes.wire,
        with.total_ms,
        without.bytes.wire,
        without.total_ms,
        with.bytes.free_pages_skipped,
        with.free_pages
    ));
    // About three quarters of the heap are free.
    let least = HEAP / 4096 / 2;
    assert!(with.bytes.free_pages_skipped > least, "{with:?}");
    assert_eq!(with.skipped_pages, with.bytes.free_pages_skipped);
    assert_eq!(with.verified_pages + with.skipped_pages, MEMORY / 4096, "{with:?}");
    // Only the first pass is compared in precopy: a longer migration on a busy host has more pages
    // to send again. A postcopy sends no page twice.
    let sent = |report: &Report| match (mode, &report.passes[..]) {
        (MigrationMode::Postcopy, _) => report.bytes.wire,
        (_, passes) => passes[0].wire_bytes,
    };
    assert!(sent(&with) + least * 4096 < sent(&without), "{} {}", sent(&with), sent(&without));
    assert_eq!((without.bytes.free_pages_skipped, without.verified_pages), (0, MEMORY / 4096));
}

#[test]
fn precopy_skips_free_pages() {
    for memfd in [false, true] {
        compare(MigrationMode::Precopy, memfd);
    }
}

#[test]
fn postcopy_skips_free_pages() {
    if let Err(error) = ProcessGuest::new_incoming(options(false)).unwrap().demand_paging() {
        return skip(Need::Uffd, error);
    }
    for mode in [MigrationMode::Postcopy, MigrationMode::Hybrid] {
        compare(mode, false);
    }
}

#[test]
fn heap_that_does_not_fit_is_refused() {
    let refused = |heap| {
        let mut options = options(false);
        options.heap = heap;
        ProcessGuest::new(options, LOAD.parse().unwrap()).unwrap_err().to_string()
    };
    assert!(refused(4097).contains("whole number of pages"), "{}", refused(4097));
    assert!(refused(MEMORY).contains("too large"), "{}", refused(MEMORY));
    assert!(refused(MEMORY - (8 << 20)).contains("workload"), "{}", refused(MEMORY - (8 << 20)));
}

/// The checks above can detect a lost page.
#[test]
fn lost_page_of_the_heap_is_detected() {
    let mut guest = running(false);
    SourceVm::pause(&mut guest).unwrap();
    assert_eq!(guest.check_heap().unwrap(), 0);
    let memory = guest.memory();
    let region = memory.layout().regions()[0];
    let last = region.pages() - HEAP / 4096 / 2;
    let run = vmferry_core::PageRun::from(last..last + 64);
    memory.window(region.id, run).unwrap().zero();
    let lost = guest.check_heap().unwrap();
    assert!(lost > 0 && lost <= 64, "{lost}");
}
