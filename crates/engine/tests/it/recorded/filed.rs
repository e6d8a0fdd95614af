//! Guest in a file of version 1, and guest in an increment with its base, which the present code
//! restores.

use super::{file, options, read, write};
use crate::background::Protects;
use crate::snapshots::guest;
use crate::toy::Toy;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vmferry_engine::{
    MigrationHandle, MigrationState, SnapshotSettings, restore, restore_on_demand, save, snapshot_background,
};
use vmferry_testkit::Folder;
use vmferry_wire::{SNAPSHOT_HEADER_BYTES, SnapshotHeader};

const NAME: &str = "file";
/// Recordings of an increment and of its base, which have these names in their folder.
const BASE: (&str, &str) = ("increment-base", "base");
const INCREMENT: (&str, &str) = ("increment", "guest");

/// Writes the recording `name` as the file at `path`.
fn put(name: &str, path: &Path) {
    let text = std::fs::read_to_string(file(name)).unwrap();
    let words: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    std::fs::write(path, read(&words.join(" "))).unwrap();
}

fn recorded() -> Folder {
    let folder = Folder::new();
    put(NAME, &guest(&folder));
    folder
}

/// Records the file at `path`, if it was not recorded before.
fn record_as(name: &str, path: &Path) {
    let text = format!(
        "# A guest in a file. zN are N zeros. Recorded by crates/engine/tests/it/recorded/filed.rs.\n{}\n",
        write(&std::fs::read(path).unwrap())
    );
    assert!(text.len() < 20_000 && !file(name).exists(), "{} bytes", text.len());
    std::fs::write(file(name), text).unwrap();
}

#[test]
#[ignore = "writes tests/streams/file.txt if it is not there: cargo test -p vmferry-engine --test it recorded::filed::record -- --ignored"]
fn record() {
    let folder = Folder::new();
    let path = guest(&folder);
    let mut source = Toy::new(options(), true);
    assert!(source.works());
    assert_eq!(save(&mut source, &path, &MigrationHandle::new()).unwrap().state, MigrationState::Completed);
    record_as(NAME, &path);
}

#[test]
#[ignore = "writes tests/streams/increment*.txt if they are not there: cargo test -p vmferry-engine --test it recorded::filed::record_increment -- --ignored"]
fn record_increment() {
    let (folder, mut vm) = (Folder::new(), Protects::with(options()));
    for (since, (name, path)) in [(None, BASE), (Some(folder.file(BASE.1)), INCREMENT)] {
        (0..3).for_each(|page| vm.0.write((0, page), page == 1));
        let mut settings = SnapshotSettings::default();
        settings.since = since;
        let path = folder.file(path);
        let report = snapshot_background(&mut vm, &path, &settings, &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        record_as(name, &path);
    }
}

#[test]
fn recorded_file_is_restored() {
    let folder = recorded();
    let header = is_restored(&guest(&folder));
    assert_eq!(header.base, None);
}

#[test]
fn recorded_increment_is_restored() {
    let folder = Folder::new();
    for (name, path) in [BASE, INCREMENT] {
        put(name, &folder.file(path));
        let header = is_restored(&folder.file(path));
        assert_eq!(header.base.is_some(), name == INCREMENT.0);
    }
}

/// Restores the guest in both ways.
fn is_restored(path: &Path) -> SnapshotHeader {
    let (file, mut head) = (File::open(path).unwrap(), [0; SNAPSHOT_HEADER_BYTES]);
    file.read_exact_at(&mut head, 0).unwrap();
    let (header, _) = SnapshotHeader::decode(&head, file.metadata().unwrap().len()).unwrap();
    println!("{header:?}");
    for on_demand in [false, true] {
        let mut target = Toy::new(options(), false).target();
        let _restore = if on_demand {
            Some(restore_on_demand(&mut target, path).unwrap())
        } else {
            let _ = restore(&mut target, path).unwrap();
            None
        };
        assert!(target.works(), "the guest stands still (on demand: {on_demand})");
        assert_eq!(target.lost(), [], "the guest misses pages (on demand: {on_demand})");
    }
    header
}
