//! Snapshots that contain only the pages that differ from those of another snapshot.

use crate::background::Protects;
use crate::snapshots::{demand_paging, done, flip, map};
use crate::toy::Options;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use vmferry_core::PageIndex;
use vmferry_engine::{
    Merged, MigrateError, MigrationHandle, MigrationState, PauseHook, Report, SnapshotSettings, VmError,
    merge_snapshot, restore, restore_on_demand, restore_shared, snapshot_background, snapshot_bases,
};
use vmferry_testkit::Folder;

/// Pages that the save of the device state writes: the first one.
const BY_SAVE: u64 = 1;

/// Three tables in the first region, so that a chain has tables that are absent in one file.
fn guest() -> Protects {
    Protects::with(demand_paging(Options { pages: vec![1200, 700], used: 600, ..Options::default() }))
}

fn settings(since: Option<&Path>) -> SnapshotSettings {
    let mut settings = SnapshotSettings::default();
    (settings.verify, settings.since) = (true, since.map(Path::to_owned));
    settings
}

fn try_taken(vm: &mut Protects, path: &Path, since: Option<&Path>) -> Result<Report, MigrateError> {
    snapshot_background(vm, path, &settings(since), &MigrationHandle::new())
}

fn taken(vm: &mut Protects, path: &Path, since: Option<&Path>) -> Report {
    let report = try_taken(vm, path, since).unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    assert_eq!(report.verified_pages, report.bytes.raw_pages, "{report:?}");
    report
}

fn take(vm: &mut Protects, path: &Path, since: Option<&Path>) {
    let _ = taken(vm, path, since);
}

/// Restores the snapshot in both ways, and checks that it is the guest of `vm`.
fn is_the_guest(vm: &Protects, path: &Path) {
    vm.0.halt();
    let mut target = vm.0.target();
    let received = restore(&mut target, path).unwrap();
    assert_eq!(target.arrived_equal(), Some(true));
    target.halt();
    assert_eq!(target.lost(), []);
    let mut target = vm.0.target();
    let restored = restore_on_demand(&mut target, path).unwrap();
    done(&restored);
    assert_eq!(restored.progress().pages, received.pages);
    target.halt();
    assert_eq!(target.lost(), []);
    vm.0.go();
}

fn why(result: Result<impl std::fmt::Debug, impl std::fmt::Display>) -> String {
    result.unwrap_err().to_string()
}

fn merged(path: &Path, into: &Path) -> Merged {
    merge_snapshot(path, into, &AtomicBool::new(false)).unwrap().unwrap()
}

#[test]
fn each_file_of_a_chain_is_its_instant() {
    let (folder, mut vm) = (Folder::new(), guest());
    let paths = ["0", "1", "2", "3"].map(|name| folder.file(name));
    let complete = taken(&mut vm, &paths[0], None);
    let contents = complete.bytes.raw_pages;
    // New content, content where there was none, zeros where there was content, and a page that is
    // written in each round.
    let changes = [
        [((0, 5), false), ((0, 700), false), ((1, 9), true), ((1, 0), false)],
        [((0, 5), true), ((0, 1199), false), ((1, 9), false), ((1, 0), false)],
        [((0, 599), false), ((0, 700), true), ((1, 699), false), ((1, 0), false)],
    ];
    let mut expected = contents;
    for (round, changes) in changes.iter().enumerate() {
        changes.iter().for_each(|(page, zero)| vm.0.write(*page, *zero));
        let report = taken(&mut vm, &paths[round + 1], Some(&paths[round]));
        let new = changes.iter().filter(|(_, zero)| !zero).count() as u64 + BY_SAVE;
        assert_eq!(report.bytes.raw_pages, new, "round {round}");
        // Each round adds one page with content that was zero before, or two and one less.
        expected += [0, 1, 0][round];
        let figures = report.snapshot.unwrap();
        assert_eq!(figures.base_pages, expected - new, "round {round}");
        assert_eq!(figures.base.as_deref(), paths[round].file_name().unwrap().to_str());
        let room = std::fs::metadata(&paths[round + 1]).unwrap().blocks() * 512;
        assert!(room < 100 << 10, "{room} bytes for {new} pages");
        is_the_guest(&vm, &paths[round + 1]);
    }
    assert_eq!(snapshot_bases(&paths[3]), [2, 1, 0].map(|at: usize| paths[at].clone()));
    // Earlier files have the content of their own instant.
    vm.0.halt();
    let mut target = vm.0.target();
    let received = restore(&mut target, &paths[1]).unwrap();
    assert_eq!(target.arrived_equal(), Some(false), "an earlier instant differs");
    assert_eq!(received.pages, contents);
}

#[test]
fn merged_snapshot_takes_the_place_of_an_increment() {
    let (folder, mut vm) = (Folder::new(), guest());
    let [first, second, third, whole] = ["first", "second", "third", "whole"].map(|name| folder.file(name));
    take(&mut vm, &first, None);
    (0..40).for_each(|page| vm.0.write((0, page * 13), page % 5 == 0));
    let report = taken(&mut vm, &second, Some(&first));
    let merge = merged(&second, &whole);
    assert_eq!((merge.files, &merge.id), (2, &report.id));
    assert!(merge.bytes > merge.pages * 4096);
    is_the_guest(&vm, &whole);
    assert_eq!(map(&whole).0.base, None);
    vm.0.write((1, 1), false);
    take(&mut vm, &third, Some(&second));
    // The increment now finds all other pages in the merged file.
    std::fs::rename(&whole, &second).unwrap();
    std::fs::remove_file(&first).unwrap();
    is_the_guest(&vm, &third);
    assert_eq!(merged(&third, &whole).files, 2);
    is_the_guest(&vm, &whole);
    assert!(why(merge_snapshot(&third, &whole, &AtomicBool::new(false))).contains("exists already"));
    std::fs::remove_file(&whole).unwrap();
    assert_eq!(merge_snapshot(&third, &whole, &AtomicBool::new(true)).unwrap(), None);
    assert_eq!(folder.names(), ["second", "third"]);
}

#[test]
fn unchanged_guest_has_an_increment_without_pages() {
    let (folder, mut vm) = (Folder::new(), guest());
    let (first, second) = (folder.file("first"), folder.file("second"));
    let complete = taken(&mut vm, &first, None);
    let report = taken(&mut vm, &second, Some(&first));
    assert_eq!(report.bytes.raw_pages, BY_SAVE);
    assert_eq!(report.bytes.zero_pages, complete.bytes.zero_pages);
    assert_eq!(report.snapshot.unwrap().base_pages, complete.bytes.raw_pages - BY_SAVE);
    is_the_guest(&vm, &second);
}

#[test]
fn damaged_page_of_the_base_is_written_again() {
    let (folder, mut vm) = (Folder::new(), guest());
    let (first, second) = (folder.file("first"), folder.file("second"));
    let complete = taken(&mut vm, &first, None);
    let place = map(&first).1.regions[0];
    // The content of a page, and the table of other pages.
    flip(&first, place.content(PageIndex(10)) + 77);
    let report = taken(&mut vm, &second, Some(&first));
    assert_eq!(report.bytes.raw_pages, BY_SAVE + 1);
    is_the_guest(&vm, &second);
    flip(&first, place.table(1) + 9);
    let report = taken(&mut vm, &folder.file("third"), Some(&first));
    assert_eq!(report.bytes.raw_pages, BY_SAVE + 1 + (600 - 512), "{complete:?}");
    is_the_guest(&vm, &folder.file("third"));
    // Without the pages that were written again, the damage is found.
    let mut target = vm.0.target();
    let error = format!("{:?}", restore(&mut target, &first).unwrap_err());
    assert!(error.contains("damaged"), "{error}");
    let error = why(merge_snapshot(&first, &folder.file("merged"), &AtomicBool::new(false)));
    assert!(error.contains("damaged"), "{error}");
    assert_eq!(folder.names(), ["first", "second", "third"]);
}

#[test]
fn missing_and_wrong_bases_are_named() {
    let (folder, mut vm) = (Folder::new(), guest());
    let [first, second, third] = ["first", "second", "third"].map(|name| folder.file(name));
    take(&mut vm, &first, None);
    vm.0.write((0, 0), false);
    take(&mut vm, &second, Some(&first));
    take(&mut vm, &third, Some(&second));
    let refused = |words: &str| {
        for path in [&second, &third] {
            let mut target = vm.0.target();
            let error = format!("{:?}", restore(&mut target, path).unwrap_err());
            assert!(error.contains("its base first") && error.contains(words), "{error}");
            let mut target = vm.0.target();
            let error = why(restore_on_demand(&mut target, path));
            assert!(error.contains("its base first") && error.contains(words), "{error}");
            assert!(!target.ran());
        }
    };
    let away = folder.file("away");
    std::fs::rename(&first, &away).unwrap();
    refused("cannot be opened");
    std::fs::copy(&second, &first).unwrap();
    refused("another snapshot");
    // A file that is based on itself has no end.
    std::fs::write(&first, b"too short").unwrap();
    refused("not a snapshot");
    let mut other = Protects::with(Options { pages: vec![600], ..Options::default() });
    std::fs::remove_file(&first).unwrap();
    take(&mut other, &first, None);
    refused("machines differ");
    std::fs::rename(&away, &first).unwrap();
    is_the_guest(&vm, &third);
    let mut target = vm.0.target();
    assert!(why(restore_shared(&mut target, &third)).contains("merge it"));
}

#[test]
fn bases_that_cannot_be_used_are_refused_before_the_snapshot() {
    let (folder, other, mut vm) = (Folder::new(), Folder::new(), guest());
    let (first, second) = (folder.file("first"), folder.file("second"));
    take(&mut vm, &first, None);
    let error = why(try_taken(&mut vm, &other.file("second"), Some(&first)));
    assert!(error.contains("must be in the folder of its base"), "{error}");
    let error = why(try_taken(&mut vm, &second, Some(&folder.file("none"))));
    assert!(error.contains("No such file"), "{error}");
    let mut small = Protects::with(Options { pages: vec![600], ..Options::default() });
    let error = why(try_taken(&mut small, &second, Some(&first)));
    assert!(error.contains("machines differ"), "{error}");
    std::fs::write(folder.file("text"), vec![b'x'; 9000]).unwrap();
    let error = why(try_taken(&mut vm, &second, Some(&folder.file("text"))));
    assert!(error.contains("not a snapshot"), "{error}");
    assert_eq!((folder.names(), other.names()), (vec!["first".into(), "text".into()], vec![]));
    assert!(vm.0.running());
}

#[test]
fn base_that_goes_away_meanwhile_fails_the_snapshot() {
    let (folder, mut vm) = (Folder::new(), guest());
    let (first, second) = (folder.file("first"), folder.file("second"));
    take(&mut vm, &first, None);
    let mut settings = settings(Some(&first));
    let moved = (first.clone(), folder.file("moved"));
    settings.in_pause =
        Some(PauseHook::new(move || std::fs::rename(&moved.0, &moved.1).map_err(VmError::from)));
    let report = snapshot_background(&mut vm, &second, &settings, &MigrationHandle::new()).unwrap();
    assert_eq!(report.state, MigrationState::Failed);
    assert!(report.error.as_ref().unwrap().contains("its base"), "{:?}", report.error);
    assert_eq!(folder.names(), ["moved"]);
    assert!(vm.0.running());
}

#[test]
fn chain_has_a_limit_and_merging_makes_room() {
    let (folder, mut vm) = (Folder::new(), guest());
    let path = |number: usize| folder.file(&format!("{number:02}"));
    take(&mut vm, &path(0), None);
    for number in 1..64usize {
        vm.0.write((0, number as u64), number.is_multiple_of(3));
        take(&mut vm, &path(number), Some(&path(number - 1)));
    }
    is_the_guest(&vm, &path(63));
    let error = why(try_taken(&mut vm, &path(64), Some(&path(63))));
    assert!(error.contains("merge them"), "{error}");
    let whole = folder.file("whole");
    assert_eq!(merged(&path(63), &whole).files, 64);
    take(&mut vm, &path(64), Some(&whole));
    is_the_guest(&vm, &path(64));
}
