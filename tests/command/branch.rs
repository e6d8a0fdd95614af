//! Branches: guests that continue from one instant of a running guest, in processes of their own.

use crate::support::{
    Folder, Guest, Run, WORKLOAD, beside, can_track, code, document, errors, has_kvm, kinds, vmferry,
    wait_for,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;
use vmferry_testkit::Reflinks;

/// A child of a branch. Its process is killed when this value is dropped.
struct Child {
    guest: Guest,
    pid: Pid,
}

impl Deref for Child {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

impl Child {
    fn kill(&self) {
        kill_process(self.pid, Signal::KILL).unwrap();
        wait_for("the end of a child", || if self.status().is_none() { Ok(()) } else { Err("it answers") });
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

/// Starts a guest whose memory can be shared.
fn parent(kind: &str, folder: &Folder) -> Run {
    let run = Run::start(kind, folder, "parent", &["--memory-backing", "memfd", "--workload", WORKLOAD]);
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    run
}

fn branch(guest: &Guest, count: u32, folder: &Folder, name: &str) -> Output {
    let (count, dir) = (count.to_string(), folder.path(name));
    vmferry(&["branch", "--api", &guest.api, "--count", &count, "--api-dir", &dir, "--json", "-"])
}

fn children(output: &Output) -> (Vec<Child>, Value) {
    assert_eq!(code(output), 0, "{output:?}");
    let document = document(output);
    let child = |child: &Value| Child {
        guest: Guest { api: child["api"].as_str().unwrap().to_owned() },
        pid: Pid::from_raw(i32::try_from(child["pid"].as_i64().unwrap()).unwrap()).unwrap(),
    };
    (document["children"].as_array().unwrap().iter().map(child).collect(), document)
}

#[test]
fn unusable_output_fails_before_any_child_runs() {
    let folder = Folder::new();
    let parent = parent("process", &folder);
    let (dir, json) = (folder.path("children"), folder.path("absent/result.json"));
    let output = vmferry(&["branch", "--api", &parent.api, "--api-dir", &dir, "--json", &json]);
    assert!(code(&output) == 1 && errors(&output).contains("cannot write"), "{output:?}");
    assert!(!Path::new(&dir).exists(), "a child was started");
    parent.goes_on();
}

#[test]
fn children_and_parent_go_on_whichever_of_them_dies() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let mut parent = parent(kind, &folder);
        let (mut all, document) = children(&branch(&parent, 3, &folder, "children"));
        assert_eq!(all.len(), 3);
        assert_eq!(document["copied_pages"], 0, "{document}");
        for child in &all {
            let status = child.wait("a child", |s| s["vm"]["place"] == "running");
            assert_eq!(status["vm"]["received"]["source"], "branch", "{status}");
            child.goes_on();
            child.whole();
        }
        parent.goes_on();
        parent.whole();
        all.pop().unwrap().kill();
        all[0].whole();
        parent.whole();
        parent.kill();
        for child in &all {
            child.goes_on();
            child.whole();
        }
    });
}

#[test]
fn child_is_branched_and_moved_like_any_other_guest() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let parent = parent(kind, &folder);
        let (first, _) = children(&branch(&parent, 1, &folder, "first"));
        first[0].whole();
        let (second, document) = children(&branch(&first[0], 2, &folder, "second"));
        assert!(document["copied_pages"].as_u64() > Some(0), "{document}");
        second.iter().for_each(|child| child.whole());
        let (again, document) = children(&branch(&parent, 1, &folder, "again"));
        assert!(document["copied_pages"].as_u64() > Some(0), "{document}");
        again[0].whole();
        for (index, guest) in [&*first[0], &*second[0], &*parent].into_iter().enumerate() {
            let (target, uri) = Run::target(kind, &folder, &format!("target{index}"), "tcp:127.0.0.1:0");
            let output = guest.migrate(&uri, &["--verify", "--json", "-"]);
            assert_eq!(code(&output), 0, "{output:?}");
            target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
            target.goes_on();
            target.whole();
        }
        second[1].whole();
    });
}

#[test]
fn guest_that_cannot_be_branched_is_refused_and_goes_on() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let anonymous = Run::source(kind, &folder);
        let output = branch(&anonymous, 2, &folder, "children");
        assert_eq!(code(&output), 1, "{output:?}");
        assert!(errors(&output).contains("anonymous guest memory"), "{}", errors(&output));
        anonymous.goes_on();
        anonymous.whole();
    });
}

#[test]
fn parent_goes_on_if_a_child_cannot_start() {
    let folder = Folder::new();
    let parent = parent("process", &folder);
    // The second child finds a process at its control socket.
    std::fs::create_dir(folder.path("children")).unwrap();
    let _taken = std::os::unix::net::UnixListener::bind(folder.path("children/1.sock")).unwrap();
    let output = branch(&parent, 2, &folder, "children");
    assert_eq!(code(&output), 1, "{output:?}");
    let said = errors(&output);
    assert!(said.contains("cannot start child 1") && said.contains("a process listens"), "{said}");
    assert!(!std::path::Path::new(&folder.path("children/0.sock")).exists(), "child 0 has ended");
    parent.goes_on();
    parent.whole();
    // Nothing of the failed branch is left in the parent.
    let (all, document) = children(&branch(&parent, 1, &folder, "others"));
    assert_eq!(document["copied_pages"], 0, "{document}");
    all[0].whole();
}

#[test]
fn guests_share_a_snapshot() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let file = folder.path("snapshot");
        let output = source.migrate(&format!("file:{file}"), &["--keep-running"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let run = |name: &str| Run::start(kind, &folder, name, &["--from", &file, "--shared"]);
        let guests = [run("one"), run("two")];
        for guest in &guests {
            guest.wait("the guest running", |s| s["vm"]["place"] == "running");
            guest.goes_on();
            guest.whole();
        }
        source.whole();
        let late = run("late");
        late.wait("the guest running", |s| s["vm"]["place"] == "running");
        late.whole();
    });
}

/// Starts a KVM guest whose memory can be shared, with `disk` and a read-only disk.
fn parent_with_disk(folder: &Folder, disk: &str) -> Run {
    let other = folder.path("other.img");
    std::fs::write(&other, [3; 1 << 16]).unwrap();
    let other = format!("{other},readonly");
    let args = ["--memory-backing", "memfd", "--workload", WORKLOAD, "--disk", &other, "--disk", disk];
    let run = Run::start("kvm", folder, "parent", &args);
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    run
}

fn branch_with_disks(guest: &Guest, count: u32, folder: &Folder, name: &str, overlay: &str) -> Output {
    let (count, dir) = (count.to_string(), folder.path(name));
    let args = ["--count", &count, "--api-dir", &dir, "--disk-overlay", overlay, "--json", "-"];
    vmferry(&[&["branch", "--api", &guest.api], &args[..]].concat())
}

/// Overwrites one byte of the file at `path`.
fn change(path: &Path, at: u64, byte: u8) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(&[byte], at).unwrap();
}

#[test]
fn each_child_has_its_own_copy_of_the_disk() {
    if !has_kvm() {
        return;
    }
    let Some(storage) = Reflinks::new() else { return };
    let folder = Folder::new();
    let disk = storage.file("disk.img");
    std::fs::write(&disk, [7; 1 << 20]).unwrap();
    let parent = parent_with_disk(&folder, &storage.path("disk.img"));
    change(&disk, 5000, 1);
    let overlay = storage.path("copies");
    let (all, figures) = children(&branch_with_disks(&parent, 3, &folder, "children", &overlay));
    assert!(figures["disks_ms"].as_f64() > Some(0.0), "{figures}");
    change(&disk, 5000, 2);
    let copy = |child: usize| storage.file(&format!("copies/{child}.disk1"));
    change(&copy(0), 9000, 4);
    let read = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        (bytes[5000], bytes[9000])
    };
    assert_eq!(read(&disk), (2, 7), "no child writes to the disk of the parent");
    assert_eq!([0, 1, 2].map(|child| read(&copy(child))), [(1, 4), (1, 7), (1, 7)]);
    for (index, child) in all.iter().enumerate() {
        let status = child.wait("a child", |s| s["vm"]["place"] == "running");
        let disks = &status["vm"]["disks"];
        assert_eq!(disks[1]["file"], copy(index).canonicalize().unwrap().to_str().unwrap(), "{status}");
        assert!(disks[0]["read_only"] == true && disks[1]["read_only"] == false, "{status}");
        child.goes_on();
        child.whole();
    }
    parent.goes_on();
    // The files of a child are not replaced, and a child is branched like its parent.
    let again = branch_with_disks(&parent, 1, &folder, "again", &overlay);
    assert!(code(&again) == 1 && errors(&again).contains("0.disk1 exists"), "{again:?}");
    if can_track() {
        let deeper = storage.path("deeper");
        let (second, _) = children(&branch_with_disks(&all[0], 1, &folder, "second", &deeper));
        assert_eq!(read(&storage.file("deeper/0.disk1")), (1, 4));
        second[0].whole();
    }
    all[0].goes_on();
}

#[test]
fn disk_that_children_would_share_is_refused_and_the_guest_goes_on() {
    if !has_kvm() {
        return;
    }
    // tmpfs has no reflinks.
    let storage = Path::new("/dev/shm").join(format!("vmferry-branch-{}", std::process::id()));
    std::fs::create_dir(&storage).unwrap();
    let disk = storage.join("disk.img");
    std::fs::write(&disk, [7; 1 << 20]).unwrap();
    let folder = Folder::new();
    let parent = parent_with_disk(&folder, disk.to_str().unwrap());
    let output = branch(&parent, 1, &folder, "children");
    let said = errors(&output);
    assert!(code(&output) == 1 && said.contains("branch --disk-overlay DIR"), "{said}");
    let overlay = storage.join("copies");
    let output = branch_with_disks(&parent, 2, &folder, "children", overlay.to_str().unwrap());
    let said = errors(&output);
    assert!(code(&output) == 1 && said.contains("place the disk on btrfs"), "{said}");
    assert_eq!(std::fs::read_dir(&overlay).unwrap().count(), 0, "no copy is left");
    assert!(!Path::new(&folder.path("children/0.sock")).exists(), "the children have ended");
    parent.goes_on();
    parent.whole();
    drop(parent);
    std::fs::remove_dir_all(&storage).unwrap();
}

#[test]
fn working_set_is_recorded_and_brought_in() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let (file, set) = (folder.path("snapshot"), folder.path("set"));
        let output = source.migrate(&format!("file:{file}"), &["--keep-running"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let run = |name: &str, more: &[&str]| {
            Run::start(kind, &folder, name, &[&["--from", &file, "--shared"], more].concat())
        };
        let length = std::fs::metadata(&file).unwrap().len();
        let refused = ["--from", &file, "--shared", "--record", &file];
        let refused = vmferry(&[&["run", "--guest", kind, "--memory", "96M"][..], &refused].concat());
        assert!(code(&refused) == 1 && errors(&refused).contains("is not a working set"), "{refused:?}");
        assert_eq!(std::fs::metadata(&file).unwrap().len(), length, "the snapshot is as before");
        let recorded = run("recorded", &["--record", &set]);
        recorded.wait("the guest running", |s| s["vm"]["place"] == "running");
        recorded.goes_on();
        assert_eq!(std::fs::read(&set).unwrap(), b"", "nothing is written before the end");
        let record = || vmferry(&["record", "--api", &recorded.api]);
        let output = record();
        assert_eq!(code(&output), 0, "{output:?}");
        assert!(std::fs::read(&set).unwrap().starts_with(b"VMFWSET\n"));
        let output = record();
        assert!(code(&output) == 1 && errors(&output).contains("has been written"), "{output:?}");
        recorded.whole();

        let second = run("second", &["--prefetch", &set]);
        let status = second.wait("the prefetch", |s| s["vm"]["prefetch"]["ended"] == true);
        let (pages, brought) = (&status["vm"]["prefetch"]["pages"], &status["vm"]["prefetch"]["brought"]);
        assert!(pages.as_u64() > Some(100) && pages.as_u64() < Some(96 << 8), "{status}");
        assert_eq!(pages, brought, "{status}");
        second.goes_on();
        second.whole();
        // A guest that is not recorded.
        let output = vmferry(&["record", "--api", &second.api]);
        assert!(code(&output) == 1 && errors(&output).contains("no working set"), "{output:?}");
        let output = vmferry(&["record", "--api", &source.api]);
        assert!(code(&output) == 1 && errors(&output).contains("shared snapshot"), "{output:?}");
    });
}

#[test]
fn recording_ends_with_its_time_and_with_the_guest() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let file = folder.path("snapshot");
    assert_eq!(code(&source.migrate(&format!("file:{file}"), &["--keep-running"])), 0);
    let run = |name: &str, more: &[&str]| {
        Run::start("process", &folder, name, &[&["--from", &file, "--shared"], more].concat())
    };
    let is_complete = |name: &str| std::fs::read(folder.path(name)).unwrap().starts_with(b"VMFWSET\n");
    let timed = run("timed", &["--record", &folder.path("short"), "--record-for", "50ms"]);
    wait_for("the end of the recording", || if is_complete("short") { Ok(()) } else { Err("it runs") });
    timed.goes_on();
    let ended = run("ended", &["--record", &folder.path("all")]);
    ended.goes_on();
    ended.quit();
    assert!(is_complete("all"));
    if can_track() {
        // The tracker of a branch protects the memory, which the recording uses, too.
        let branched = run("branched", &["--record", &folder.path("before")]);
        branched.goes_on();
        let (all, _) = children(&branch(&branched, 1, &folder, "children"));
        assert!(is_complete("before"));
        all[0].whole();
        branched.whole();
    }
}

#[test]
fn wrong_working_sets_are_refused_before_the_guest_runs() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (file, other) = (folder.path("snapshot"), folder.path("other"));
    for file in [&file, &other] {
        assert_eq!(code(&source.migrate(&format!("file:{file}"), &["--keep-running"])), 0);
    }
    let set = folder.path("set");
    let recorded =
        Run::start("process", &folder, "recorded", &["--from", &file, "--shared", "--record", &set]);
    recorded.goes_on();
    recorded.quit();
    let refused = |file: &str, set: &str| {
        let args = ["--guest", "process", "--memory", "96M", "--from", file, "--shared", "--prefetch", set];
        let output = vmferry(&[&["run"], &args[..]].concat());
        assert_eq!(code(&output), 1, "{output:?}");
        errors(&output)
    };
    let said = refused(&other, &set);
    assert!(said.contains("belongs to the snapshot"), "{said}");
    assert!(refused(&file, &folder.path("none")).contains("No such file"));
    let damaged = folder.path("damaged");
    let mut bytes = std::fs::read(&set).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, &bytes).unwrap();
    assert!(refused(&file, &damaged).contains("is damaged"));
    assert!(refused(&file, &file).contains("is not a working set"));
}
