//! Migrations that end early: refused, cancelled, or cut by the death of the source or target.

use crate::support::{
    Folder, Run, VMFERRY, beside, can_track, code, document, errors, finish, kinds, spawn, vmferry, wait_for,
    wait_for_end,
};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use vmferry_control::{
    self as control, Answer, Arguments, Events, Limits, Machine, QmpError, Server, Version,
};

#[test]
fn unsuitable_target_is_named_and_the_guest_stays() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let fails = |uri: &str, more: &[&str], words: &[&str]| {
        let output = source.migrate(uri, more);
        assert_eq!(code(&output), 1, "{uri}: {output:?}");
        let text = errors(&output);
        assert!(words.iter().all(|word| text.contains(word)), "{uri}: {words:?} in {text}");
        source.goes_on();
    };
    // No listener: a port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fails(&format!("tcp:{free}"), &[], &["cannot connect", "--incoming"]);
    fails("tcp:192.0.2.1:7000", &[], &["not on this host", "--insecure"]);
    fails("unix:/nonexistent/x", &[], &["cannot connect"]);
    fails("file:/nonexistent/x", &[], &["cannot use file:/nonexistent/x", "/nonexistent does not exist"]);
    let file = format!("file:{}", folder.path("none/x"));
    fails(&file, &[], &["cannot use", &file]);
    // Foreign listeners: one that sends data, and one that is silent.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("tcp:{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut talks, _) = listener.accept().unwrap();
        talks.write_all(&[b'x'; 4096]).unwrap();
        let (mut silent, _) = listener.accept().unwrap();
        let _ = silent.read_to_end(&mut Vec::new());
    });
    fails(&at, &[], &["does not speak the vmferry protocol"]);
    fails(&at, &["--peer-timeout", "500ms"], &["did not answer the greeting"]);
    // A target whose machine differs names the difference, and keeps waiting.
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let other = Run::start("process", &folder, "other", &["--workload", "idle,ws=4M", "--cpus", "2"]);
    other.wait("the guest running", |s| s["vm"]["guest"]["state"] == "running");
    let output = other.migrate(&uri, &[]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("vCPUs: the guest has 2, the target has 1"), "{output:?}");
    // A second target cannot use the same port; the first still accepts a matching guest.
    let output = vmferry(&["run", "--guest", "process", "--memory", "96M", "--incoming", &uri]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("cannot listen"), "{output:?}");
    assert_eq!(code(&source.migrate(&uri, &["--verify"])), 0);
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.whole();
}

/// Starts a migration that takes most of a minute, so that a starved host acts before its end.
/// Returns when the migration has sent some pages.
fn slow(source: &Run, uri: &str, more: &[&str]) -> Child {
    let mut args = vec!["migrate", "--api", &source.api, uri, "--max-bandwidth", "1M/s"];
    args.extend(more);
    let child = spawn(&args);
    source.wait("the first pages sent", |s| s["progress"]["wire_bytes"].as_u64() > Some(256 << 10));
    child
}

/// Waits until a thread of `child` is blocked while it writes to this descriptor.
fn blocked_writing(child: &Child, descriptor: u32) {
    // The line has the number and the first argument of the system call, or "running".
    let call = format!("{} {descriptor:#x} ", libc::SYS_write);
    wait_for(&format!("a thread that writes to {descriptor}"), || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let calls =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("syscall")).ok());
        let calls: Vec<_> = calls.collect();
        if calls.iter().any(|this| this.starts_with(&call)) { Ok(()) } else { Err(calls) }
    });
}

/// Sends SIGINT, as Ctrl-C does.
fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

#[test]
fn cancelled_migration_leaves_the_guest_at_the_source() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    // With `cancel`.
    let (mut target, uri) = Run::target("process", &folder, "t1", "tcp:127.0.0.1:0");
    let child = slow(&source, &uri, &[]);
    assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 1, "not while it is being moved");
    let refused = vmferry(&["switch", "--api", &source.api]);
    assert!(code(&refused) == 1 && errors(&refused).contains("--mode hybrid"), "{refused:?}");
    assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 0);
    let output = finish(child);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("cancelled"), "{output:?}");
    source.goes_on();
    let ended = wait_for_end(&mut target.child);
    assert_eq!(ended, Some(1), "the target ends without having run the guest");
    // With Ctrl-C.
    let (_t2, uri) = Run::target("process", &folder, "t2", "tcp:127.0.0.1:0");
    let child = slow(&source, &uri, &[]);
    interrupt(&child);
    assert_eq!(code(&finish(child)), 1);
    source.goes_on();
    // With Ctrl-C while the target is silent, which the source permits for longer than this test
    // takes.
    let (mut silent, uri) = Run::target("process", &folder, "silent", "tcp:127.0.0.1:0");
    silent.signal(rustix::process::Signal::STOP);
    for way in ["precopy", "auto"] {
        let child = spawn(&["migrate", "--api", &source.api, &uri, "--mode", way, "--peer-timeout", "10m"]);
        source.wait("the migration", |s| s["vm"]["place"] == "moving");
        interrupt(&child);
        let output = finish(child);
        assert_eq!(code(&output), 1);
        assert!(errors(&output).contains("cancelled"), "{output:?}");
        source.wait("the guest to stay", |s| s["outcome"] == "cancelled" && s["vm"]["place"] == "running");
    }
    silent.kill();
    source.goes_on();
    // By the time limit, with each of two actions.
    let (_t3, uri) = Run::target("process", &folder, "t3", "tcp:127.0.0.1:0");
    let output = source.migrate(&uri, &["--max-bandwidth", "8M/s", "--timeout", "500ms"]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("not done within"), "{output:?}");
    source.goes_on();
    let (t4, uri) = Run::target("process", &folder, "t4", "tcp:127.0.0.1:0");
    let output =
        source.migrate(&uri, &["--max-bandwidth", "60M/s", "--timeout", "200ms", "--on-timeout", "switch"]);
    assert_eq!(code(&output), 0, "{output:?}");
    t4.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    t4.whole();
}

/// A second Ctrl-C ends the command although the reader of `--events` never reads.
#[test]
fn ctrl_c_works_while_the_reader_of_events_is_blocked() {
    if !can_track() {
        return;
    }
    // Standard error is separate, or the same pipe as standard output.
    beside(["", "2>&1"], |to| {
        let folder = Folder::new();
        let source = Run::source("process", &folder);
        let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
        let mut child = Command::new("sh")
            .args(["-c", &format!("exec \"$@\" {to}"), "sh", VMFERRY, "migrate", "--api", &source.api, &uri])
            // The migration takes most of a minute, so that a starved host acts before its end.
            .args(["--max-bandwidth", "1M/s", "--events", "-"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The pipe holds some statuses, but not the last one, which is the whole report.
        let pipe = child.stdout.as_ref().unwrap();
        rustix::pipe::fcntl_setpipe_size(pipe, 4096).unwrap();
        let held = || rustix::io::ioctl_fionread(pipe).unwrap();
        source.wait("a look", |s| held() > 1000 && s["progress"]["wire_bytes"].as_u64() > Some(256 << 10));
        blocked_writing(&child, 1);
        if !to.is_empty() {
            blocked_writing(&child, 2);
        }
        interrupt(&child);
        source.wait("the guest to stay", |s| s["outcome"] == "cancelled" && s["vm"]["place"] == "running");
        assert_eq!(child.try_wait().unwrap(), None, "its reader is waited for");
        interrupt(&child);
        assert_eq!(wait_for_end(&mut child), Some(1));
        let output = finish(child);
        assert!(!to.is_empty() || errors(&output).contains("the guest stays at the source"), "{output:?}");
        source.goes_on();
    });
}

#[test]
fn source_and_target_survive_the_death_of_the_peer_before_the_handover() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let mut source = Run::source(kind, &folder);
        let (mut target, uri) = Run::target(kind, &folder, "t1", "tcp:127.0.0.1:0");
        let child = slow(&source, &uri, &[]);
        target.kill();
        let output = finish(child);
        assert_eq!(code(&output), 1, "{output:?}");
        assert!(errors(&output).contains("stays at the source"), "{output:?}");
        source.goes_on();
        source.whole();
        let (mut target, uri) = Run::target(kind, &folder, "t2", "tcp:127.0.0.1:0");
        let child = slow(&source, &uri, &[]);
        source.kill();
        let output = finish(child);
        assert_eq!(code(&output), 3, "the guest ended with its source: {output:?}");
        assert!(errors(&output).contains("the process that had the guest is gone"), "{output:?}");
        assert_eq!(wait_for_end(&mut target.child), Some(1), "a guest that did not come was not run");
        assert!(!Path::new(&target.api).exists(), "no socket is left behind");
    });
}

/// A lost line of output does not end a guest's process, and a lost report does not change the exit
/// status.
#[test]
fn guest_and_exit_status_do_not_depend_on_readers_of_the_output() {
    if !can_track() {
        return;
    }
    for kind in kinds() {
        let folder = Folder::new();
        let mut source = Run::source(kind, &folder);
        let (mut target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        for run in [&mut source, &mut target] {
            drop(run.child.stderr.take());
        }
        let mut unread = spawn(&["status", "--api", &source.api]);
        drop(unread.stdout.take());
        assert_eq!(code(&finish(unread)), 0);
        let mut unread = spawn(&["migrate", "--api", &source.api, &uri]);
        drop((unread.stdout.take(), unread.stderr.take()));
        assert_eq!(code(&finish(unread)), 0);
        target.goes_on();
        target.whole();
        assert_eq!(wait_for_end(&mut source.child), Some(0));
    }
}

/// A control socket whose last migration has this document.
struct Ended(Value);

impl Machine for Ended {
    fn version(&self) -> Version {
        Version { numbers: [0; 3], package: "test".to_owned() }
    }

    fn commands(&self) -> &[control::Command] {
        const ALL: [control::Command; 2] = [
            control::Command { name: "x-vmferry-migrate", oob: false },
            control::Command { name: "x-vmferry-status", oob: false },
        ];
        &ALL
    }

    fn execute(&self, name: &str, _: Arguments) -> Result<Answer, QmpError> {
        Ok(if name == "x-vmferry-status" { self.0.clone().into() } else { Answer::done() })
    }
}

/// No real guest refuses to be resumed, so the document replaces the source. The engine tests the
/// document itself in `failures_after_the_end_are_reported_and_change_nothing`.
#[test]
fn migrate_and_status_end_with_6_if_the_resume_failed() {
    for (outcome, words) in [("failed", "was not moved"), ("completed", "holds a copy of the guest")] {
        let folder = Folder::new();
        let api = folder.path("api");
        let report =
            json!({ "state": outcome, "outcome": outcome, "error": "no vCPU", "stands_still": true });
        let events = Events::new().unwrap();
        let _server =
            Server::start(Path::new(&api), Arc::new(Ended(report)), &events, Limits::default()).unwrap();
        let moved = vmferry(&["migrate", "--api", &api, "tcp:127.0.0.1:7000"]);
        assert_eq!(code(&moved), 6, "{moved:?}");
        let text = errors(&moved);
        for word in
            [words, "is stopped at the source because it could not be resumed: no vCPU", "`vmferry resume`"]
        {
            assert!(text.contains(word), "{word}: {text}");
        }
        let status = vmferry(&["status", "--api", &api]);
        assert_eq!(code(&status), 6, "{status:?}");
        assert_eq!(document(&status)["stands_still"], true);
    }
}
