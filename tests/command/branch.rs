//! Branches: guests that continue from one instant of a running guest, in processes of their own.

use crate::support::{
    Folder, Guest, Run, WORKLOAD, beside, can_track, code, document, errors, kinds, vmferry, wait_for,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ops::Deref;
use std::process::Output;

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
