//! Guests in files: restored at once, restored while they run, and restored from modified files.

use crate::toy::{Method, Options, Toy};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::RegionId;
use vmferry_engine::{
    DemandPaging, DirtyTracker, FillState, GuestMemory, MachineConfig, Migratable, MigrateError,
    MigrationHandle, MigrationState, OnDemandRestore, Report, RunState, Section, SourceVm, TargetVm,
    TrackerKind, VmError, restore, restore_on_demand, save, save_copy,
};
use vmferry_testkit::{Folder, Need, PATIENCE, print_line, skip, wait, wait_for};
use vmferry_wire::{SNAPSHOT_HEADER_BYTES, SnapshotHeader, SnapshotMap};

/// Path of the snapshot in `folder`.
pub(crate) fn guest(folder: &Folder) -> PathBuf {
    folder.file("guest")
}

fn saved(source: &mut Toy, path: &Path) -> Report {
    let report = save(source, path, &MigrationHandle::new()).unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    assert!(!source.running());
    report
}

/// Returns the header and the offsets of all parts of the file.
pub(crate) fn map(path: &Path) -> (SnapshotHeader, SnapshotMap) {
    let file = File::open(path).unwrap();
    let mut bytes = [0; SNAPSHOT_HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0).unwrap();
    SnapshotHeader::decode(&bytes, file.metadata().unwrap().len()).unwrap()
}

pub(crate) fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

/// Lets the guest run for a while, and checks all of its pages.
fn goes_on(target: &Toy) {
    assert!(target.works(), "the guest stands still");
    target.halt();
    assert_eq!(target.lost(), [], "the guest misses pages");
    assert_eq!(target.surprises(), 0);
}

pub(crate) fn demand_paging(options: Options) -> Options {
    Options { demand_paging: true, ..options }
}

pub(crate) fn done(restore: &OnDemandRestore) {
    let progress = restore.wait(PATIENCE);
    assert_eq!(progress.state, FillState::Completed, "{progress:?}");
    assert_eq!((progress.placed, progress.failed_pages), (progress.pages, 0), "{progress:?}");
}

#[test]
fn restored_guest_equals_the_saved_guest() {
    for pages in [vec![1200, 700], vec![600], vec![9000, 2], vec![513, 4096, 4097]] {
        let folder = Folder::new();
        let mut source = Toy::new(Options { pages: pages.clone(), ..Options::default() }, true);
        assert!(source.works());
        let report = saved(&mut source, &guest(&folder));
        assert_eq!(folder.names(), ["guest"]);
        let all: u64 = pages.iter().sum();
        assert_eq!(report.bytes.raw_pages + report.bytes.zero_pages, all);
        let mut target = source.target();
        let received = restore(&mut target, &guest(&folder)).unwrap();
        assert_eq!(target.arrived_equal(), Some(true));
        assert_eq!((received.pages, received.copy_of), (report.bytes.raw_pages, None));
        assert_eq!(received.id, report.id);
        goes_on(&target);
    }
}

#[test]
fn file_allocates_only_pages_with_content() {
    let folder = Folder::new();
    let options = Options { pages: vec![40_000, 9000], used: 600, ..Options::default() };
    let mut source = Toy::new(options, true);
    let report = saved(&mut source, &guest(&folder));
    let found = std::fs::metadata(guest(&folder)).unwrap();
    let contents = report.bytes.raw_pages * 4096;
    assert!(found.len() > 49_000 * 4096, "every page has its place");
    let room = found.blocks() * 512;
    assert!(room >= contents, "{room} bytes for {contents}");
    // Two tables, indexes, the header, a ledger of 8 bytes for each page, and rounding by the file
    // system.
    assert!(room < contents + (1 << 20), "{room} bytes for {contents}");
    assert_eq!(found.mode() & 0o777, 0o600, "the file has the memory of a guest");
    // The reported number of bytes is the number in the file.
    assert!(report.bytes.wire >= contents && report.bytes.wire < contents + (1 << 20), "{report:?}");
}

#[test]
fn guest_runs_while_its_memory_is_restored() {
    for round in 0..10 {
        let folder = Folder::new();
        // The load touches a page, which makes a fault for certain. On a busy host the guest may
        // touch its pages only when all are present.
        let load_touches = Some((0, 2400));
        let options =
            Options { pages: vec![3000, 700], used: 2500, writers: 2, load_touches, ..Options::default() };
        let mut source = Toy::new(demand_paging(options), true);
        let report = saved(&mut source, &guest(&folder));
        let before = source.writes();
        let mut target = source.target();
        let restored = restore_on_demand(&mut target, &guest(&folder)).unwrap();
        assert!(target.running());
        assert_eq!(restored.received().id, report.id);
        done(&restored);
        let faulting = target.faulting().unwrap();
        assert!(faulting.ended() && !faulting.any_twice(), "round {round}");
        assert_eq!(restored.progress().pages, report.bytes.raw_pages);
        let progress = restored.watch()();
        assert!((1..=progress.faults).contains(&progress.hist_us.iter().sum()), "{progress:?}");
        goes_on(&target);
        assert!(target.writes() > before);
    }
}

#[test]
fn touched_page_is_restored_before_all_others() {
    let folder = Folder::new();
    let options = Options { pages: vec![20_000], used: 20_000, zero_one_in: u64::MAX, ..Options::default() };
    let mut source = Toy::new(demand_paging(options.clone()), true);
    let _ = saved(&mut source, &guest(&folder));
    let mut target = Toy::new(Options { load_touches: Some((0, 19_999)), ..demand_paging(options) }, false);
    let restored = restore_on_demand(&mut target, &guest(&folder)).unwrap();
    // Only the page and its neighbours, and none of the 19,984 pages before. The count may even be
    // 0, because it is updated after the page was placed and the waiting thread was woken.
    assert!(restored.received().pages <= 16, "{}", restored.received().pages);
    assert!(target.faulting().unwrap().is_placed(RegionId(0), 19_999));
    done(&restored);
    goes_on(&target);
}

#[test]
fn pages_of_zeros_are_placed_when_they_are_touched() {
    let folder = Folder::new();
    // The guest touches no page that it did not use.
    let options = Options { pages: vec![20_000], used: 4, writers: 1, ..Options::default() };
    let mut source = Toy::new(demand_paging(options.clone()), true);
    let _ = saved(&mut source, &guest(&folder));
    let mut target = Toy::new(Options { load_touches: Some((0, 19_999)), ..demand_paging(options) }, false);
    let restored = restore_on_demand(&mut target, &guest(&folder)).unwrap();
    done(&restored);
    let faulting = target.faulting().unwrap();
    // Pages of zeros that were not touched take no memory: the neighbour, and those of the block
    // that has other pages.
    assert!(faulting.is_placed(RegionId(0), 19_999));
    assert!([19_998, 10_000, 300].iter().all(|page| !faulting.is_placed(RegionId(0), *page)));
    assert!(restored.progress().zero_pages >= 1);
    goes_on(&target);
}

#[test]
fn vm_without_demand_paging_can_be_restored_eagerly() {
    let folder = Folder::new();
    let mut source = Toy::new(Options::default(), true);
    let _ = saved(&mut source, &guest(&folder));
    let mut target = source.target();
    let error = restore_on_demand(&mut target, &guest(&folder)).unwrap_err();
    assert!(matches!(&error, MigrateError::NoDemandPaging { why } if why.contains("no faults")), "{error}");
    let _ = restore(&mut target, &guest(&folder)).unwrap();
    goes_on(&target);
}

#[test]
fn copy_leaves_the_guest_and_has_an_id_of_its_own() {
    let folder = Folder::new();
    let mut source = Toy::new(Options::default(), true);
    let report = save_copy(&mut source, &guest(&folder), &MigrationHandle::new()).unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    assert!(source.works());
    let mut names = vec![report.id.clone()];
    for _ in 0..2 {
        let mut copy = Toy::new(Options::default(), false);
        let received = restore(&mut copy, &guest(&folder)).unwrap();
        assert_eq!(received.copy_of, Some(report.id.clone()));
        assert!(!names.contains(&received.id), "{names:?}");
        names.push(received.id);
        goes_on(&copy);
    }
    goes_on(&source);
}

/// Target that records the order of its calls, and can refuse a new identity.
struct Noting {
    toy: Toy,
    calls: Vec<&'static str>,
    refuses: bool,
}

impl Noting {
    fn new(options: Options) -> Self {
        Self { toy: Toy::new(options, false), calls: Vec::new(), refuses: false }
    }
}

impl Migratable for Noting {
    fn config(&self) -> MachineConfig {
        self.toy.config()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.toy.memory()
    }
}

impl TargetVm for Noting {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        self.toy.demand_paging()
    }
    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.calls.push("load");
        self.toy.load(sections)
    }
    fn renew_identity(&mut self) -> Result<(), VmError> {
        self.calls.push("renew");
        if self.refuses { Err(VmError::new("no random numbers")) } else { Ok(()) }
    }
    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        self.calls.push("start");
        self.toy.start(state)
    }
}

#[test]
fn only_a_copy_gets_a_new_identity_after_load_and_before_start() {
    let folder = Folder::new();
    let mut source = Toy::new(Options::default(), true);
    let copy = guest(&folder);
    let _ = save_copy(&mut source, &copy, &MigrationHandle::new()).unwrap();
    let mut target = Noting::new(Options::default());
    let _ = restore(&mut target, &copy).unwrap();
    assert_eq!(target.calls, ["load", "renew", "start"]);
    let mut target = Noting::new(demand_paging(Options::default()));
    let comes = restore_on_demand(&mut target, &copy).unwrap();
    done(&comes);
    assert_eq!(target.calls, ["load", "renew", "start"]);

    let moved = copy.with_extension("moved");
    let _ = saved(&mut source, &moved);
    let mut target = Noting::new(Options::default());
    let _ = restore(&mut target, &moved).unwrap();
    assert_eq!(target.calls, ["load", "start"]);
    let mut target = Noting::new(demand_paging(Options::default()));
    let comes = restore_on_demand(&mut target, &moved).unwrap();
    done(&comes);
    assert_eq!(target.calls, ["load", "start"]);
}

#[test]
fn copy_without_new_identity_does_not_run() {
    let folder = Folder::new();
    let mut source = Toy::new(Options::default(), true);
    let _ = save_copy(&mut source, &guest(&folder), &MigrationHandle::new()).unwrap();
    let mut target = Noting { refuses: true, ..Noting::new(Options::default()) };
    let error = restore(&mut target, &guest(&folder)).unwrap_err().to_string();
    assert!(error.contains("no random numbers"), "{error}");
    let mut on_demand = Noting { refuses: true, ..Noting::new(demand_paging(Options::default())) };
    let error = restore_on_demand(&mut on_demand, &guest(&folder)).unwrap_err().to_string();
    assert!(error.contains("no random numbers"), "{error}");
    assert_eq!((target.calls, on_demand.calls), (vec!["load", "renew"], vec!["load", "renew"]));
}

/// VM that writes memory while it is paused, like a device that was forgotten.
struct WritesWhilePaused(Toy);

impl Migratable for WritesWhilePaused {
    fn config(&self) -> MachineConfig {
        self.0.config()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.0.memory()
    }
}

impl SourceVm for WritesWhilePaused {
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        self.0.tracker(kind)
    }
    fn pause(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        SourceVm::save(&mut self.0)
    }
    fn release(&mut self) -> Result<(), VmError> {
        SourceVm::release(&mut self.0)
    }
    fn resume(&mut self) -> Result<(), VmError> {
        SourceVm::resume(&mut self.0)
    }
}

/// A file with pages that differ from their digests would lose the guest. The save must notice this
/// while the guest is still on the source.
#[test]
fn memory_that_changes_during_a_save_is_noticed() {
    let mut noticed = 0;
    for _ in 0..8 {
        let folder = Folder::new();
        let options = Options { writers: 1, write_pause: Duration::ZERO, ..Options::default() };
        let mut source = WritesWhilePaused(Toy::new(options, true));
        let report = save(&mut source, &guest(&folder), &MigrationHandle::new()).unwrap();
        if report.state == MigrationState::Completed {
            let _ =
                restore(&mut Toy::new(Options { writers: 1, ..Options::default() }, false), &guest(&folder))
                    .unwrap();
            continue;
        }
        noticed += 1;
        assert!(report.error.unwrap().contains("change although the guest is paused"));
        assert_eq!(folder.names(), [""; 0]);
    }
    print_line(format!("changes while paused: noticed in {noticed} of 8 saves"));
}

/// A save that fails or is cancelled in any step leaves no file, and the guest stays.
#[test]
fn interrupted_save_leaves_no_file() {
    let folder = Folder::new();
    let mut source = Toy::new(Options::default(), true);
    for (method, after) in [
        (Method::Pause, 0),
        (Method::Save, 0),
        (Method::Window, 0),
        (Method::Window, 1),
        (Method::Touched, 1),
    ] {
        source.fail(method, after);
        let report = save(&mut source, &guest(&folder), &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Failed);
        assert!(report.error.unwrap().contains("injected"), "{method:?}");
        assert_eq!(folder.names(), [""; 0], "{method:?}");
        assert!(source.works());
    }
    let handle = MigrationHandle::new();
    handle.cancel();
    let report = save(&mut source, &guest(&folder), &handle).unwrap();
    assert_eq!(report.state, MigrationState::Cancelled);
    assert_eq!(folder.names(), [""; 0]);
    goes_on(&source);
}

/// An existing file may be a guest's only copy. The file stays, and so does the guest, also if the
/// file appears in the last moment.
#[test]
fn existing_files_are_never_replaced() {
    let folder = Folder::new();
    let mut source = Toy::new(Options::default(), true);
    let late = guest(&folder);
    let quicker = MigrationHandle::watched(move |_| std::fs::write(&late, b"another's").unwrap());
    let report = save(&mut source, &guest(&folder), &quicker).unwrap();
    assert_eq!(report.state, MigrationState::Failed);
    assert!(report.error.as_ref().unwrap().contains("exists already"), "{report:?}");
    assert!(source.works());
    let error = save(&mut source, &guest(&folder), &MigrationHandle::new()).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    assert_eq!((folder.names().len(), std::fs::read(guest(&folder)).unwrap()), (1, b"another's".to_vec()));
    goes_on(&source);
}

#[test]
fn guest_stays_if_the_disk_is_full() {
    let folder = Folder::new();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "none"])
        .arg(folder.root())
        .output();
    if !mounted.as_ref().is_ok_and(|output| output.status.success()) {
        return skip(Need::Root, format!("a small file system cannot be mounted here: {mounted:?}"));
    }
    let mut source = Toy::new(Options::default(), true);
    let report = save(&mut source, &guest(&folder), &MigrationHandle::new()).unwrap();
    let names = folder.names();
    std::process::Command::new("umount").arg(folder.root()).status().unwrap();
    assert_eq!(report.state, MigrationState::Failed);
    assert!(report.error.as_ref().is_some_and(|why| why.contains("could not be written")), "{report:?}");
    assert_eq!(names, [""; 0]);
    goes_on(&source);
}

/// Checks that a modified file is refused with these words in the error.
fn refused(path: &Path, source: &Toy, what: &str, words: &[&str]) {
    let mut target = source.target();
    let eager = restore(&mut target, path).unwrap_err().to_string();
    assert!(!target.ran(), "{what}: it ran");
    let restore = restore_on_demand(&mut source.target(), path).unwrap_err().to_string();
    for (way, text) in [("eager", eager), ("lazy", restore)] {
        assert!(words.iter().all(|word| text.contains(word)), "{what}, {way}: {words:?} in: {text}");
    }
}

#[test]
fn damage_before_the_tables_is_found_before_the_guest_runs() {
    let folder = Folder::new();
    let mut source = Toy::new(demand_paging(Options::default()), true);
    let _ = saved(&mut source, &guest(&folder));
    let (header, map) = map(&guest(&folder));
    let parts = [
        ("header", 8, SNAPSHOT_HEADER_BYTES as u64, "header"),
        ("machine", map.machine, map.machine + u64::from(header.machine.bytes), "description of the machine"),
        ("state", map.state, map.state + u64::from(header.state.bytes), "device state"),
        (
            "index",
            map.regions[1].index,
            map.regions[1].index + map.regions[1].index_bytes(),
            "index of region 3",
        ),
    ];
    for (part, start, end, words) in parts {
        let step = usize::try_from((end - start) / 40).unwrap().max(1) | 1;
        for at in (start..end).step_by(step) {
            flip(&guest(&folder), at);
            refused(&guest(&folder), &source, &format!("{part} at {at}"), &["guest: ", words, "damaged"]);
            flip(&guest(&folder), at);
        }
    }
    flip(&guest(&folder), 3);
    refused(&guest(&folder), &source, "magic", &["not a snapshot"]);
    flip(&guest(&folder), 3);
    let _ = restore(&mut source.target(), &guest(&folder)).unwrap();
}

#[test]
fn truncated_and_unfinished_files_are_refused() {
    let folder = Folder::new();
    let mut source = Toy::new(demand_paging(Options::default()), true);
    let _ = saved(&mut source, &guest(&folder));
    let (_, map) = map(&guest(&folder));
    let copy = folder.file("copy");
    let lengths = (0..map.len).step_by(usize::try_from(map.len / 50).unwrap() | 1);
    for len in lengths.chain([1, 4095, 4096, 4097, map.len - 1, map.len + 1]) {
        std::fs::copy(guest(&folder), &copy).unwrap();
        OpenOptions::new().write(true).open(&copy).unwrap().set_len(len).unwrap();
        refused(&copy, &source, &format!("{len} bytes"), &[&format!("the file has {len} bytes"), "cut off"]);
    }
    std::fs::copy(guest(&folder), &copy).unwrap();
    let file = OpenOptions::new().write(true).open(&copy).unwrap();
    file.write_all_at(&[0; SNAPSHOT_HEADER_BYTES], 0).unwrap();
    refused(&copy, &source, "no header", &["never finished"]);
    for len in [8, 9000] {
        std::fs::write(&copy, vec![b'x'; len]).unwrap();
        refused(&copy, &source, "a file of another program", &["not a snapshot of a guest"]);
    }
    let other = Toy::new(demand_paging(Options { vcpus: 7, ..Options::default() }), false);
    let differ = "the machines differ: vCPUs: the guest has 2, the target has 7";
    refused(&guest(&folder), &other, "another machine", &[differ]);
    let missing = restore(&mut source.target(), &folder.file("nothing")).unwrap_err().to_string();
    assert!(missing.contains("cannot use file:"), "{missing}");
}

/// Restores from a file that is damaged. The words must be in the error.
fn not_eagerly(folder: &Folder, source: &Toy, words: &[&str]) {
    let mut target = source.target();
    let text = restore(&mut target, &guest(folder)).unwrap_err().to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{words:?} in: {text}");
    assert!(!target.ran());
}

#[test]
fn damaged_table_is_found() {
    let folder = Folder::new();
    let options = Options { pages: vec![1200, 700], used: 600, ..Options::default() };
    let mut source = Toy::new(demand_paging(options), true);
    let _ = saved(&mut source, &guest(&folder));
    let (_, map) = map(&guest(&folder));
    // Pages 512 to 599 of the first region are in its second table.
    for at in (0..4096).step_by(173) {
        let at = map.regions[0].table(1) + at;
        flip(&guest(&folder), at);
        not_eagerly(&folder, &source, &["table for region 0 pages 0x200..0x400", "damaged"]);
        flip(&guest(&folder), at);
    }
    flip(&guest(&folder), map.regions[0].table(1) + 5);
    let mut target = source.target();
    let restored = restore_on_demand(&mut target, &guest(&folder)).unwrap();
    let progress = restored.wait(PATIENCE);
    assert_eq!(progress.state, FillState::Failed);
    assert!(progress.error.is_some_and(|why| why.contains("table for region 0 pages 0x200..0x400")));
    let faulting = target.faulting().unwrap();
    // All pages with content except those of the table.
    let others = [(RegionId(0), 0..512), (RegionId(3), 0..700)];
    wait("all other pages", || {
        let mut all = others.iter().flat_map(|(region, pages)| pages.clone().map(|page| (*region, page)));
        all.all(|(region, page)| source.is_zero(region, page) || faulting.is_placed(region, page))
    });
    assert!((512..1024).all(|page| !faulting.is_placed(RegionId(0), page)));
    assert!((0..512).all(|page| faulting.is_placed(RegionId(0), page) || source.lost().is_empty()));
    assert!(!faulting.ended());
}

#[test]
fn damaged_page_is_named_and_never_placed() {
    let folder = Folder::new();
    let options = Options { pages: vec![1200, 700], used: 600, zero_one_in: u64::MAX, ..Options::default() };
    let mut source = Toy::new(demand_paging(options), true);
    let _ = saved(&mut source, &guest(&folder));
    let (_, map) = map(&guest(&folder));
    let page = 0x123;
    flip(&guest(&folder), map.regions[1].data + page * 4096 + 77);
    not_eagerly(&folder, &source, &["content of region 3 page 0x123", "damaged"]);
    let mut target = source.target();
    let restored = restore_on_demand(&mut target, &guest(&folder)).unwrap();
    let progress = restored.wait(PATIENCE);
    assert_eq!(progress.state, FillState::Failed);
    assert!(progress.error.as_ref().is_some_and(|why| why.contains("region 3 page 0x123")), "{progress:?}");
    wait_for("all other pages", || {
        let progress = restored.progress();
        if progress.placed == progress.pages - 1 { Ok(()) } else { Err(progress) }
    });
    let progress = restored.progress();
    // All other pages arrived, the neighbours too. A thread that touches this page sleeps.
    assert_eq!((progress.placed, progress.failed_pages), (progress.pages - 1, 1), "{progress:?}");
    let faulting = target.faulting().unwrap();
    assert!(!faulting.is_placed(RegionId(3), page) && faulting.is_placed(RegionId(3), page + 1));
    // If the page were placed later than this time on a busy host, the test would miss it here and
    // count it below.
    assert!(!faulting.touch(RegionId(3), page, Duration::from_millis(100)));
    assert!(faulting.touch(RegionId(3), 650, PATIENCE), "others are still answered");
    assert_eq!(restored.progress().placed, progress.placed);
    assert!(!faulting.ended() && target.surprises() == 0);
    restored.stop();
    drop(restored);
    assert!(!faulting.ended(), "it would read as zeros");
}

/// The state cannot be loaded because the load touches a page that cannot be read. The load ends,
/// and the guest does not run.
#[test]
fn unreadable_page_that_the_state_needs_fails_the_restore() {
    let folder = Folder::new();
    let options = Options { zero_one_in: u64::MAX, ..demand_paging(Options::default()) };
    let mut source = Toy::new(options.clone(), true);
    let _ = saved(&mut source, &guest(&folder));
    let (_, map) = map(&guest(&folder));
    flip(&guest(&folder), map.regions[0].data + 5 * 4096);
    let mut target = Toy::new(Options { load_touches: Some((0, 5)), ..options.clone() }, false);
    let error = restore_on_demand(&mut target, &guest(&folder)).unwrap_err().to_string();
    assert!(error.contains("content of region 0 page 0x5 at byte"), "{error}");
    assert!(!target.ran() && target.faulting().unwrap().ended());
    for method in [Method::Load, Method::Start] {
        let mut target = Toy::new(options.clone(), false);
        target.fail(method, 0);
        let error = restore_on_demand(&mut target, &guest(&folder)).unwrap_err().to_string();
        assert!(error.contains("injected"), "{error}");
        assert!(!target.ran() && target.faulting().unwrap().ended());
    }
}
