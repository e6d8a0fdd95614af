//! Tests of process guests that run, pause, move by hand and by the engine, and detect lost pages.

use crate::rig::verified;
use std::sync::Arc;
use std::time::Duration;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, PageSet, RegionId, RunState};
use vmferry_engine::{
    FillState, GuestMemory, Migratable, MigrateError, MigrationHandle, MigrationState, Settings, SourceVm,
    TargetVm, restore, restore_on_demand, save,
};
use vmferry_guest_abi::{STATS_BYTES, STATS_GPA, State, StatsSnapshot};
use vmferry_process::{ProcessGuest, ProcessHandle, ProcessOptions};
use vmferry_testkit::{Need, PATIENCE, skip, temp_path, wait};
use vmferry_testkit_peers::{pair, unix_uri};

const MEMORY: u64 = 32 << 20;

fn options(memfd: bool) -> ProcessOptions {
    let mut options = ProcessOptions::new(MEMORY, 2);
    options.memfd = memfd;
    options
}

fn guest(workload: &str, memfd: bool) -> ProcessGuest {
    ProcessGuest::new(options(memfd), workload.parse().unwrap()).unwrap()
}

fn running(workload: &str, memfd: bool) -> ProcessGuest {
    let mut guest = guest(workload, memfd);
    guest.start().unwrap();
    wait("the guest to fill its memory", || {
        stats(&guest.handle()).is_some_and(|stats| stats.state >= State::Running)
    });
    guest
}

/// Returns the guest's report, or `None` while the guest writes it.
fn stats(handle: &ProcessHandle) -> Option<StatsSnapshot> {
    handle.stats().ok()
}

fn page(memory: &Arc<dyn GuestMemory>, page: u64) -> [u8; PAGE_BYTES] {
    let window = memory.window(RegionId(0), PageRun::new(PageIndex(page), 1)).unwrap();
    let mut copy = [0; PAGE_BYTES];
    window.copy_page(0, &mut copy);
    copy
}

fn copy(from: &Arc<dyn GuestMemory>, to: &Arc<dyn GuestMemory>, pages: &Bitmap) {
    for index in pages.runs().flatten() {
        let target = to.window(RegionId(0), PageRun::new(PageIndex(index), 1)).unwrap();
        target.write_page(0, &page(from, index));
    }
}

fn all_touched(memory: &Arc<dyn GuestMemory>) -> Bitmap {
    let pages = MEMORY / 4096;
    let mut touched = Bitmap::new(pages);
    memory.touched(RegionId(0), PageRun::from(0..pages), &mut touched).unwrap();
    touched
}

/// Moves the paused guest `from` by hand, without the pages in `without`.
fn moved(from: &mut ProcessGuest, without: &[u64]) -> ProcessGuest {
    let sections = from.save().unwrap();
    let mut to = ProcessGuest::new_incoming(options(false)).unwrap();
    let (source, target) = (from.memory(), to.memory());
    let mut pages = all_touched(&source);
    for page in without {
        assert!(pages.test_and_clear(*page), "page {page} was touched");
    }
    copy(&source, &target, &pages);
    to.load(&sections).unwrap();
    to
}

/// Number of a content page: after the statistics page and 8 pages of counters.
const CONTENT: u64 = (STATS_GPA + STATS_BYTES) / 4096 + 100;

#[test]
fn allocating_workload_is_refused_with_advice() {
    let error = ProcessGuest::new(options(false), "idle,alloc=8M".parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("remove alloc= from the workload, or use a KVM guest"), "{error}");
}

#[test]
fn paused_guest_writes_nothing_after_pause_returns() {
    let mut guest = running("uniform,ws=2M", false);
    let memory = guest.memory();
    // Every page that the guest writes (statistics, counters, content), and some more.
    let snapshot = || (0..1000).map(|index| page(&memory, index)).collect::<Vec<_>>();
    for round in 0..40 {
        // Right after a resume, a thread may be anywhere between its wake-up and its first step.
        // Any moment is as good as another.
        SourceVm::resume(&mut guest).unwrap();
        std::thread::sleep(Duration::from_micros(round % 4 * 300));
        SourceVm::pause(&mut guest).unwrap();
        let first = snapshot();
        // Gives a thread that has not stopped the time to write. A thread that gets no processor in
        // this time only makes the test miss a defect.
        std::thread::sleep(Duration::from_millis(2));
        assert!(snapshot() == first, "round {round}: a page changed while the guest was paused");
    }
    let before = stats(&guest.handle()).expect("whole reports from a paused guest").writes();
    SourceVm::resume(&mut guest).unwrap();
    wait("writes after the pauses", || stats(&guest.handle()).is_some_and(|stats| stats.writes() > before));
    assert_eq!(verified(&guest.handle(), 1).corrupt(), 0);
}

#[test]
fn pause_right_after_resume_stops_all_writes() {
    let mut guest = running("uniform,ws=1M", false);
    let memory = guest.memory();
    // Every page that the guest writes: statistics, counters, content.
    let pages = STATS_GPA / 4096..STATS_GPA / 4096 + 300;
    let snapshot = || pages.clone().map(|index| page(&memory, index)).collect::<Vec<_>>();
    for round in 0..500 {
        SourceVm::resume(&mut guest).unwrap();
        SourceVm::pause(&mut guest).unwrap();
        let first = snapshot();
        // See the test above.
        std::thread::sleep(Duration::from_micros(200));
        assert!(snapshot() == first, "round {round}: a page changed while the guest was paused");
    }
}

#[test]
fn every_workload_continues_on_the_target_without_a_corrupt_page() {
    for workload in [
        "idle",
        "uniform,ws=8M",
        "sequential,ws=4M,data=8M,rate=100k",
        "zipf:0.99,ws=8M,fill=mix:30",
        "uniform,ws=8M,write=whole,fill=text",
        "sequential,ws=4M,data=8M,write=append,fill=pointers",
    ] {
        for memfd in [false, true] {
            let mut source = running(workload, memfd);
            if workload != "idle" {
                wait("writes", || stats(&source.handle()).is_some_and(|stats| stats.writes() > 1000));
            }
            SourceVm::pause(&mut source).unwrap();
            let before = stats(&source.handle()).expect("whole reports from a paused guest");
            let mut target = moved(&mut source, &[]);
            assert_eq!(stats(&target.handle()).unwrap(), before, "{workload}");
            // Least duration of the move, which the guest has to notice.
            std::thread::sleep(Duration::from_millis(30));
            target.start().unwrap();
            let after = verified(&target.handle(), 7);
            assert_eq!(after.corrupt(), 0, "{workload}: {:?}", after.first_corrupt());
            assert_eq!(after.state, State::Running, "{workload}");
            assert_eq!(after.ready_us, before.ready_us, "{workload}: the guest became ready twice");
            for (old, new) in before.cpus().iter().zip(after.cpus()) {
                assert!(new.t_us >= old.t_us + 30_000, "{workload}: the clock must continue across the move");
                assert!(new.stall_max_us >= 30_000, "{workload}: the stall must include the move: {new:?}");
                assert!(new.writes >= old.writes, "{workload}");
            }
            if workload != "idle" {
                wait("writes", || {
                    stats(&target.handle()).is_some_and(|stats| stats.writes() > before.writes())
                });
            }
            // If the move fails, the source may continue as well.
            SourceVm::resume(&mut source).unwrap();
            assert_eq!(verified(&source.handle(), 8).corrupt(), 0, "{workload}");
            target.stop();
        }
    }
}

#[test]
fn guest_that_still_fills_its_memory_can_be_moved() {
    let mut source = guest("uniform,ws=24M", false);
    source.start().unwrap();
    let memory = source.memory();
    wait("the fill to begin", || page(&memory, CONTENT) != [0; PAGE_BYTES]);
    SourceVm::pause(&mut source).unwrap();
    let half = stats(&source.handle()).is_some_and(|stats| stats.state == State::Filling);
    let mut target = moved(&mut source, &[]);
    target.start().unwrap();
    wait("the fill", || stats(&target.handle()).is_some_and(|stats| stats.state >= State::Running));
    assert_eq!(verified(&target.handle(), 1).corrupt(), 0);
    println!("moved {} the fill", if half { "in the middle of" } else { "after" });
}

#[test]
fn lost_page_is_detected() {
    for workload in ["uniform,ws=8M", "idle,data=8M", "uniform,ws=4M,data=8M,rate=1k"] {
        let mut source = running(workload, false);
        SourceVm::pause(&mut source).unwrap();
        let mut target = moved(&mut source, &[CONTENT]);
        target.start().unwrap();
        let after = verified(&target.handle(), 1);
        assert!(after.corrupt() > 0, "{workload}: the missing page was not noticed");
        assert_eq!(after.state, State::Corrupt, "{workload}");
    }
}

#[test]
fn page_of_an_older_version_is_detected() {
    let mut source = running("sequential,ws=4M", false);
    let old = page(&source.memory(), CONTENT);
    let moves = |guest: &ProcessGuest| page(&guest.memory(), CONTENT) != old;
    wait("the page to be written again", || moves(&source));
    SourceVm::pause(&mut source).unwrap();
    let mut target = moved(&mut source, &[]);
    let window_of = target.memory();
    window_of.window(RegionId(0), PageRun::new(PageIndex(CONTENT), 1)).unwrap().write_page(0, &old);
    target.start().unwrap();
    assert!(verified(&target.handle(), 1).corrupt() > 0);
}

/// Moves a running guest by hand: passes while the guest writes, then a pause and the last pass.
/// `lose` removes pages from the last harvest.
fn live(memfd: bool, lose: impl Fn(&mut Bitmap)) -> u64 {
    let mut source = running("uniform,ws=8M,rate=200k", memfd);
    let mut target = ProcessGuest::new_incoming(options(memfd)).unwrap();
    let (from, to) = (source.memory(), target.memory());
    let mut tracker = source.tracker(None).unwrap();
    tracker.start().unwrap();
    copy(&from, &to, &all_touched(&from));
    let mut dirty = PageSet::empty(from.layout());
    for _ in 0..5 {
        dirty.clear();
        tracker.harvest(&mut dirty).unwrap();
        copy(&from, &to, dirty.region(RegionId(0)).unwrap());
    }
    // So many writes that some pages are certainly dirty.
    let writes = || stats(&source.handle()).map_or(0, |stats| stats.writes());
    let before = writes();
    wait("writes", || writes() > before + 4000);
    SourceVm::pause(&mut source).unwrap();
    let sections = source.save().unwrap();
    dirty.clear();
    tracker.harvest(&mut dirty).unwrap();
    let last = dirty.region_mut(RegionId(0)).unwrap();
    assert!(last.count() > 10, "the guest wrote meanwhile");
    lose(last);
    copy(&from, &to, last);
    target.load(&sections).unwrap();
    target.start().unwrap();
    verified(&target.handle(), 1).corrupt()
}

/// Returns true if this host can track writes without KVM. If not, the calling test is skipped.
pub(crate) fn can_track() -> bool {
    let available = vmferry_dirty::WpTracker::available();
    available.map_err(|error| skip(Need::Uffd, error)).is_ok()
}

#[test]
fn live_move_loses_no_page_and_detects_a_withheld_page() {
    if !can_track() {
        return;
    }
    for memfd in [false, true] {
        assert_eq!(live(memfd, |_| ()), 0, "memfd: {memfd}");
        let lost = live(memfd, |last| {
            let content = last.runs().flatten().find(|page| *page >= CONTENT).unwrap();
            last.test_and_clear(content);
        });
        assert!(lost > 0, "memfd: {memfd}: the withheld page was not noticed");
    }
}

#[test]
fn engine_migrates_the_guest_and_every_page_matches() {
    if !can_track() {
        return;
    }
    let mut source = running("uniform,ws=8M,data=16M,rate=50k,fill=mix:50", false);
    let mut target = ProcessGuest::new_incoming(options(false)).unwrap();
    let settings = Settings { verify: true, peer_timeout: PATIENCE, ..Settings::default() };
    let (report, came) =
        pair::moved(&unix_uri(), &mut source, &mut target, None, &settings, &MigrationHandle::new());
    let _ = came.unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{report:?}");
    assert_eq!(report.mismatched_pages, 0);
    assert!(report.verified_pages > 4096, "{}", report.verified_pages);
    let after = verified(&target.handle(), 3);
    assert_eq!(after.corrupt(), 0, "{:?}", after.first_corrupt());
    let writes = after.writes();
    wait("writes on the target", || stats(&target.handle()).is_some_and(|stats| stats.writes() > writes));
}

#[test]
fn guest_is_saved_to_a_file_and_restored() {
    let mut why_not = None;
    for memfd in [false, true] {
        let mut source = running("uniform,ws=8M,data=16M,rate=50k,fill=mix:50", memfd);
        let path = temp_path("process-file");
        let report = save(&mut source, &path, &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        let mut target = ProcessGuest::new_incoming(options(memfd)).unwrap();
        let mut paging = ProcessGuest::new_incoming(options(memfd)).unwrap();
        let restored = restore(&mut target, &path);
        let comes = restore_on_demand(&mut paging, &path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(restored.unwrap().pages, report.bytes.raw_pages);
        let after = verified(&target.handle(), 3);
        assert_eq!(after.corrupt(), 0, "{:?}", after.first_corrupt());
        match comes {
            Ok(comes) => {
                let progress = comes.wait(PATIENCE);
                assert_eq!(progress.state, FillState::Completed, "{progress:?}");
                assert_eq!(
                    (progress.pages, progress.placed),
                    (report.bytes.raw_pages, report.bytes.raw_pages)
                );
                assert_eq!(verified(&paging.handle(), 4).corrupt(), 0);
                println!("by demand paging, memfd {memfd}: {progress:?}");
            }
            Err(MigrateError::NoDemandPaging { why }) => why_not = Some(why),
            Err(error) => panic!("{error}"),
        }
    }
    if let Some(why) = why_not {
        skip(Need::Uffd, format!("while it runs: {why}"));
    }
}

#[test]
fn invalid_steps_and_options_are_refused() {
    let mut empty = ProcessGuest::new_incoming(options(false)).unwrap();
    assert!(TargetVm::start(&mut empty, RunState::Running).is_err(), "nothing to start");
    assert!(SourceVm::save(&mut empty).is_err(), "nothing to save");
    assert!(empty.handle().stats().is_err(), "no statistics");
    assert!(empty.load(&[]).is_err(), "no state");
    let mut source = running("uniform,ws=4M", false);
    SourceVm::pause(&mut source).unwrap();
    let sections = source.save().unwrap();
    assert!(source.load(&sections).is_err(), "there is a guest already");
    let mut other = ProcessGuest::new_incoming(ProcessOptions::new(MEMORY, 3)).unwrap();
    assert!(other.load(&sections).is_err(), "another number of vCPUs");
    let mut small = ProcessGuest::new_incoming(ProcessOptions::new(4 << 20, 2)).unwrap();
    assert!(small.load(&sections).is_err(), "the workload does not fit");
    let Err(error) = source.tracker(Some(vmferry_engine::TrackerKind::Log)) else {
        panic!("KVM's log without KVM")
    };
    assert!(error.to_string().contains("use `wp`"), "{error}");
    for (memory, cpus) in
        [(0, 1), ((4 << 20) + 1, 1), (1 << 20, 1), (8 << 20, 0), (8 << 20, 65), (1 << 60, 1)]
    {
        assert!(ProcessGuest::new_incoming(ProcessOptions::new(memory, cpus)).is_err(), "{memory} {cpus}");
    }
    assert!(
        ProcessGuest::new(options(false), "uniform,ws=64M".parse().unwrap()).is_err(),
        "more memory than the guest has"
    );
    source.stop();
    source.stop();
}
