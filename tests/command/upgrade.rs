//! Handoffs inside one host: `upgrade`, and `migrate --local`. The guest keeps its memory, which is
//! not copied.

use crate::pool::Pool;
use crate::support::{
    Folder, Need, PATIENCE, Run, VMFERRY, WORKLOAD, beside, can_track, code, document, errors, finish,
    has_kvm, kinds, skip, spawn, vmferry, wait_for, wait_for_end,
};
use crate::watching::scrape;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Output, Stdio};
use vmferry_control::Client;

/// Options of a guest that can be handed over.
const MEMFD: [&str; 4] = ["--memory-backing", "memfd", "--workload", WORKLOAD];

/// Process that an upgrade has started. It is no child of the test. It is killed when this value is
/// dropped.
struct Successor {
    pid: Pid,
}

impl Successor {
    fn of(report: &Value) -> Self {
        let pid = report["upgrade"]["to_pid"].as_i64().unwrap();
        Self { pid: Pid::from_raw(i32::try_from(pid).unwrap()).unwrap() }
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

fn source(kind: &str, folder: &Folder) -> Run {
    let run = Run::start(kind, folder, "vm", &MEMFD);
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    run
}

/// Upgrades the guest of `run`. The new process has a log of its own: it would otherwise keep the
/// pipe open from which the test reads the messages of the command.
fn upgrade(run: &Run, folder: &Folder, more: &[&str]) -> Output {
    let log = folder.path("new.log");
    vmferry(&[&["upgrade", "--api", &run.api, "--log", &log, "--json", "-"], more].concat())
}

fn upgraded(run: &Run, folder: &Folder) -> (Value, Successor) {
    let output = upgrade(run, folder, &[]);
    let log = std::fs::read_to_string(folder.path("new.log")).unwrap_or_default();
    assert_eq!(code(&output), 0, "{output:?}; {log}");
    let report = document(&output);
    let successor = Successor::of(&report);
    assert_eq!((&report["outcome"], &report["mode"]), (&"completed".into(), &"local".into()), "{report}");
    assert_eq!((&report["tracker"], &report["bytes"]["wire"]), (&"none".into(), &0.into()), "{report}");
    (report, successor)
}

/// Returns the process that answers at the control socket of `run`.
fn pid(run: &Run) -> u64 {
    run.wait("an answer", |_| true)["vm"]["pid"].as_u64().unwrap()
}

/// Returns the inodes of the memfds that process `pid` has mapped.
fn memfds(pid: u64) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = maps.lines().filter(|line| line.contains("/memfd:vmferry-"));
    memory.map(|line| line.split_whitespace().nth(4).unwrap().to_owned()).collect()
}

fn open_files(pid: u64) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Checks that the guest is still in the process of `run`, unchanged.
fn stays(run: &Run) {
    assert_eq!(pid(run), u64::from(run.child.id()));
    run.goes_on();
    run.whole();
}

#[test]
fn guest_continues_in_a_new_process_on_the_same_memory() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let mut run = source(kind, &folder);
        let before = pid(&run);
        let memory = memfds(before);
        assert!(!memory.is_empty(), "{kind}: the memory is a memfd");
        let (report, _successor) = upgraded(&run, &folder);
        assert_eq!(report["upgrade"]["from_pid"], before);
        let after = pid(&run);
        assert_eq!(report["upgrade"]["to_pid"], after);
        assert_eq!(memfds(after), memory, "{kind}: the memory was copied");
        run.goes_on();
        run.whole();
        assert_eq!(wait_for_end(&mut run.child), Some(0), "the old process");
        assert!(std::path::Path::new(&run.api).exists(), "the old process has removed the new socket");
        assert!(!std::path::Path::new(&format!("{}.next", run.api)).exists());
    });
}

/// User of a process in a jail, and of a process that tells a false command line.
const ANOTHER: u32 = 64_002;

/// Root executes the command line of a process in a jail, because root itself has written it.
#[test]
fn root_upgrades_a_guest_in_a_jail() {
    if !rustix::process::geteuid().is_root() {
        return skip(Need::Root, "only root can make a jail");
    }
    beside(kinds(), |kind| {
        let (folder, jails) = (Folder::new(), Folder::new());
        std::os::unix::fs::chown(folder.path("."), Some(ANOTHER), Some(ANOTHER)).unwrap();
        let user = ANOTHER.to_string();
        let jail = ["--jail", &jails.path("jail"), "--uid", &user, "--gid", &user];
        let run = Run::start(kind, &folder, "vm", &[&MEMFD[..], &jail].concat());
        run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let (_, successor) = upgraded(&run, &folder);
        let owner = std::fs::metadata(format!("/proc/{}", successor.pid.as_raw_pid())).unwrap().uid();
        assert_eq!(owner, ANOTHER, "{kind}: the new process is in a jail, too");
        run.goes_on();
        run.whole();
    });
}

/// A guest that has broken into its process must not decide what root executes.
#[test]
fn command_line_of_another_user_is_not_executed() {
    if !rustix::process::geteuid().is_root() {
        return skip(Need::Root, "only root can become another user");
    }
    let folder = Folder::new();
    std::os::unix::fs::chown(folder.path("."), Some(ANOTHER), Some(ANOTHER)).unwrap();
    let (api, made) = (folder.path("api"), folder.path("made"));
    // Each command is answered with this command line, as if it had passed a sealed file.
    let script = r#"
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1] + ".new"); s.listen(9); os.rename(sys.argv[1] + ".new", sys.argv[1])
words = ["run", "--guest", "process", "--sandbox", "off", "--memory-backing", "memfd", "--record", sys.argv[2], "--api", sys.argv[1]]
for _ in range(4):
    c = s.accept()[0]; f = c.makefile("rw")
    print('{"QMP": {"version": {}, "capabilities": []}}', file=f, flush=True)
    for line in f:
        answer = {"folder": "/", "arguments": words, "sealed": True, "taps": 0, "metrics": False}
        print(json.dumps({"return": answer, "id": json.loads(line)["id"]}), file=f, flush=True)
"#;
    let mut other = std::process::Command::new("python3");
    other.args(["-c", script, &api, &made]).uid(ANOTHER).gid(ANOTHER).stderr(Stdio::piped());
    let Ok(mut child) = other.spawn() else { return skip(Need::Program, "there is no python3") };
    wait_for("a listener", || {
        let there = std::path::Path::new(&api).exists() || child.try_wait().unwrap().is_some();
        if there { Ok(()) } else { Err("it does not listen") }
    });
    let children = folder.path("children");
    for command in [&["upgrade", "--api", &api][..], &["branch", "--api", &api, "--api-dir", &children]] {
        let output = vmferry(command);
        let said = errors(&output);
        assert!(code(&output) == 1 && said.contains("runs as user 64002"), "{said}");
        assert!(said.contains("0 descriptors came instead of 1"), "{said}");
        assert!(!std::path::Path::new(&made).exists(), "{command:?} has started a process");
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// The pool has the pages of one guest. A new process that reserved pages of its own would not
/// start.
#[test]
fn huge_pages_of_the_pool_are_handed_over() {
    let guest_pages = (96 << 20) / (2 << 20);
    if !has_kvm() {
        return;
    }
    let _pool = match Pool::with(guest_pages) {
        Ok(pool) => pool,
        Err(why) => return skip(Need::HugePages, why),
    };
    let folder = Folder::new();
    let args = ["--memory-backing", "hugetlbfs", "--prealloc", "on", "--workload", WORKLOAD];
    let run = Run::start("kvm", &folder, "vm", &args);
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    let mut last = None;
    for _ in 0..2 {
        let (_, successor) = upgraded(&run, &folder);
        run.goes_on();
        run.whole();
        last = Some(successor);
    }
    drop(last);
}

#[test]
fn metrics_are_at_the_same_address_afterwards() {
    let folder = Folder::new();
    let mut run = Run::start("process", &folder, "vm", &[&MEMFD[..], &["--metrics", "127.0.0.1:0"]].concat());
    let (address, _said) = run.metrics();
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    let (_, _successor) = upgraded(&run, &folder);
    let text = scrape(&address);
    assert!(text.contains("vmferry_guest_place{place=\"running\"} 1.0"), "{text}");
    run.goes_on();
}

#[test]
fn upgraded_guest_with_metrics_is_branched() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let mut run = Run::start("process", &folder, "vm", &[&MEMFD[..], &["--metrics", "127.0.0.1:0"]].concat());
    let (_, _said) = run.metrics();
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    let (_, _successor) = upgraded(&run, &folder);
    let output = vmferry(&["branch", "--api", &run.api, "--api-dir", &folder.path("dir"), "--json", "-"]);
    assert_eq!(code(&output), 0, "{output:?}");
    let child = &document(&output)["children"][0];
    let pid = Pid::from_raw(i32::try_from(child["pid"].as_i64().unwrap()).unwrap()).unwrap();
    let _child = Successor { pid };
    // The child listens at its own socket as soon as the command has ended.
    assert_eq!(code(&vmferry(&["status", "--api", child["api"].as_str().unwrap()])), 0);
}

#[test]
fn ten_upgrades_in_a_row_leak_nothing() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let run = source(kind, &folder);
        let memory = memfds(pid(&run));
        let mut open = Vec::new();
        let mut last = None;
        for _ in 0..10 {
            last = Some(upgraded(&run, &folder).1);
            let pid = pid(&run);
            assert_eq!(memfds(pid), memory);
            open.push(open_files(pid));
        }
        // The connection of the client that counts is open in both cases.
        assert!(open.iter().all(|count| count.abs_diff(open[0]) <= 1), "{kind}: {open:?}");
        run.goes_on();
        run.whole();
        drop(last);
    });
}

#[test]
fn paused_guest_stays_paused_in_the_new_process() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let run = source(kind, &folder);
        assert_eq!(code(&vmferry(&["pause", "--api", &run.api])), 0);
        let still = run.wait("the pause", |s| s["vm"]["place"] == "paused");
        let (_, _successor) = upgraded(&run, &folder);
        let there = run.wait("the guest in the new process", |s| s["vm"]["place"] == "paused");
        assert_eq!(there["vm"]["guest"]["writes"], still["vm"]["guest"]["writes"]);
        assert_eq!(code(&vmferry(&["resume", "--api", &run.api])), 0);
        run.goes_on();
        run.whole();
    });
}

#[test]
fn anonymous_memory_is_refused_with_the_alternative() {
    let folder = Folder::new();
    let run = Run::source("process", &folder);
    let output = upgrade(&run, &folder, &[]);
    let said = errors(&output);
    assert_eq!(code(&output), 1, "{said}");
    assert!(said.contains("--memory-backing memfd") && said.contains("unix:PATH"), "{said}");
    let (target, uri) = target("process", &folder);
    let output = run.migrate(&uri, &["--local"]);
    let said = errors(&output);
    assert_eq!(code(&output), 1, "{said}");
    assert!(said.contains("anonymous") && said.contains("memfd"), "{said}");
    stays(&run);
    assert_eq!(target.status().unwrap()["vm"]["place"], "awaited");
}

/// Returns the path of an executable with this content.
fn script(folder: &Folder, text: &str) -> String {
    let path = folder.path("new-binary");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn guest_stays_if_the_new_binary_does_not_take_it() {
    let folder = Folder::new();
    let run = source("process", &folder);
    for (text, more, says) in [
        ("exit 7", &[][..], "ended before it was ready"),
        ("exec sleep 100", &["--start-timeout", "300ms"], "was not ready for the guest within 300ms"),
        // It reaches its machine, and does not fit the guest.
        (&format!("exec {VMFERRY} \"$@\" --cpus 3"), &[], "stays at the source"),
    ] {
        let binary = script(&folder, text);
        let output = upgrade(&run, &folder, &[&["--binary", &binary], more].concat());
        let said = errors(&output);
        assert_eq!(code(&output), 1, "{text}: {said}");
        assert!(said.contains(says), "{text}: {said}");
        stays(&run);
    }
    let output = upgrade(&run, &folder, &["--binary", &folder.path("missing")]);
    assert!(errors(&output).contains("cannot find the executable"), "{output:?}");
    // Nothing of the failures prevents an upgrade.
    let (_, _successor) = upgraded(&run, &folder);
    run.goes_on();
    run.whole();
}

#[test]
fn two_upgrades_at_the_same_time_are_refused() {
    let folder = Folder::new();
    let run = source("process", &folder);
    let _other = UnixListener::bind(format!("{}.next", run.api)).unwrap();
    let output = upgrade(&run, &folder, &["--start-timeout", "5s"]);
    assert_eq!(code(&output), 1, "{output:?}");
    stays(&run);
}

fn target(kind: &str, folder: &Folder) -> (Run, String) {
    Run::target(kind, folder, "target", &format!("unix:{}", folder.path("move")))
}

#[test]
fn local_migration_hands_the_memory_to_a_process_that_waits() {
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = source(kind, &folder);
        let memory = memfds(pid(&source));
        let (target, uri) = target(kind, &folder);
        let output = source.migrate(&uri, &["--local", "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let report = document(&output);
        assert_eq!((&report["mode"], &report["passes"]), (&"local".into(), &serde_json::json!([])));
        target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        assert_eq!(memfds(pid(&target)), memory);
        target.goes_on();
        target.whole();
    });
}

#[test]
fn options_that_local_contradicts_are_refused() {
    let folder = Folder::new();
    let run = source("process", &folder);
    for (uri, more, says) in [
        ("tcp:127.0.0.1:1", &["--local"][..], "use unix:PATH"),
        ("file:x", &["--local"], "use unix:PATH"),
        ("unix:x", &["--local", "--verify"], "omit --verify"),
        ("unix:x", &["--local", "--mode", "postcopy"], "omit --mode"),
        ("unix:x", &["--local", "--codec", "lz4"], "omit --codec"),
    ] {
        let output = run.migrate(uri, more);
        assert_eq!(code(&output), 2, "{output:?}");
        assert!(errors(&output).contains(says), "{output:?}");
    }
    stays(&run);
}

/// Begins `migrate --local` to a target that is stopped, so that the handoff waits for it.
fn begun_to_a_stopped_target(source: &Run, folder: &Folder) -> (Run, Child) {
    let (target, uri) = target("process", folder);
    target.signal(Signal::STOP);
    let migrate = spawn(&["migrate", "--api", &source.api, &uri, "--local"]);
    source.wait("the handoff", |s| s["vm"]["place"] == "moving");
    (target, migrate)
}

#[test]
fn guest_stays_if_the_target_is_killed_before_the_commit() {
    let folder = Folder::new();
    let source = source("process", &folder);
    let (mut target, migrate) = begun_to_a_stopped_target(&source, &folder);
    target.kill();
    let output = finish(migrate);
    assert_eq!(code(&output), 1, "{output:?}");
    stays(&source);
}

#[test]
fn target_ends_if_the_source_is_killed_before_the_commit() {
    let folder = Folder::new();
    let mut source = source("process", &folder);
    let (mut target, migrate) = begun_to_a_stopped_target(&source, &folder);
    source.kill();
    target.signal(Signal::CONT);
    assert_eq!(code(&finish(migrate)), 3, "the command cannot know where the guest is");
    let status = target.status().unwrap();
    assert_ne!(status["vm"]["place"], "running", "{status}");
    target.kill();
}

#[test]
fn new_process_ends_if_the_command_is_killed_before_the_handoff() {
    let folder = Folder::new();
    let run = source("process", &folder);
    // The new process is ready only after a second.
    let binary = script(&folder, &format!("echo started >&2; sleep 1; exec {VMFERRY} \"$@\""));
    let (api, log) = (run.api.clone(), folder.path("new.log"));
    let mut command = std::process::Command::new(VMFERRY);
    command.args(["upgrade", "--api", &api, "--binary", &binary, "--log", &log]);
    let mut command = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for("the start of the new process", || match std::fs::read_to_string(&log) {
        Ok(said) if said.contains("started") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    command.kill().unwrap();
    command.wait().unwrap();
    wait_for("the end of the new process", || {
        let log = std::fs::read_to_string(&log).unwrap();
        if log.contains("every connection has ended") { Ok(()) } else { Err(log) }
    });
    stays(&run);
    let (_, _successor) = upgraded(&run, &folder);
    run.goes_on();
}

#[test]
fn source_does_not_touch_the_memory_that_it_has_handed_over() {
    let folder = Folder::new();
    let source = source("process", &folder);
    let mut client = Client::connect(source.api.as_ref(), PATIENCE).unwrap();
    // The process stays, as with QEMU, if the guest was moved with `migrate` of QMP.
    let (target, uri) = target("process", &folder);
    let moved = source.migrate(&uri, &["--local"]);
    assert_eq!(code(&moved), 0, "{moved:?}");
    let arguments = serde_json::json!({ "request": 5 });
    if let Err(error) = client.execute("x-vmferry-verify-guest", arguments) {
        let said = error.to_string();
        assert!(said.contains("does not run in this process") || said.contains("ended"), "{said}");
    } else {
        panic!("the source has written the statistics page of a guest that runs in another process");
    }
    target.goes_on();
    target.whole();
}

#[test]
fn control_socket_of_the_new_process_has_the_same_path_and_mode() {
    let folder = Folder::new();
    let run = source("process", &folder);
    let before = std::fs::metadata(&run.api).unwrap();
    let (_, _successor) = upgraded(&run, &folder);
    let after = std::fs::metadata(&run.api).unwrap();
    assert_ne!(before.ino(), after.ino(), "the socket of the new process");
    assert_eq!(before.mode(), after.mode());
}
