//! Guest in a file of version 1, which the present code restores.

use super::{file, options, read, write};
use crate::snapshots::guest;
use crate::toy::Toy;
use std::fs::File;
use std::os::unix::fs::FileExt;
use vmferry_engine::{MigrationHandle, MigrationState, restore, restore_on_demand, save};
use vmferry_testkit::Folder;
use vmferry_wire::{SNAPSHOT_HEADER_BYTES, SnapshotHeader};

const NAME: &str = "file";

fn recorded() -> Folder {
    let folder = Folder::new();
    let text = std::fs::read_to_string(file(NAME)).unwrap();
    let words: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    std::fs::write(guest(&folder), read(&words.join(" "))).unwrap();
    folder
}

#[test]
#[ignore = "writes tests/streams/file.txt if it is not there: cargo test -p vmferry-engine --test it recorded::filed::record -- --ignored"]
fn record() {
    let folder = Folder::new();
    let path = guest(&folder);
    let mut source = Toy::new(options(), true);
    assert!(source.works());
    assert_eq!(save(&mut source, &path, &MigrationHandle::new()).unwrap().state, MigrationState::Completed);
    let text = format!(
        "# A guest in a file. zN are N zeros. Recorded by crates/engine/tests/it/recorded/filed.rs.\n{}\n",
        write(&std::fs::read(&path).unwrap())
    );
    assert!(text.len() < 20_000 && !file(NAME).exists(), "{} bytes", text.len());
    std::fs::write(file(NAME), text).unwrap();
}

#[test]
fn recorded_file_is_restored() {
    let folder = recorded();
    let path = guest(&folder);
    let (file, mut head) = (File::open(&path).unwrap(), [0; SNAPSHOT_HEADER_BYTES]);
    file.read_exact_at(&mut head, 0).unwrap();
    let (header, _) = SnapshotHeader::decode(&head, file.metadata().unwrap().len()).unwrap();
    println!("{header:?}");
    for on_demand in [false, true] {
        let mut target = Toy::new(options(), false).target();
        let _restore = if on_demand {
            Some(restore_on_demand(&mut target, &path).unwrap())
        } else {
            let _ = restore(&mut target, &path).unwrap();
            None
        };
        assert!(target.works(), "the guest stands still (on demand: {on_demand})");
        assert_eq!(target.lost(), [], "the guest misses pages (on demand: {on_demand})");
    }
}
