//! Snapshots of a running guest: the file has the state of one instant, and the guest runs on, also
//! after every failure.

use crate::support::{
    Folder, Need, Run, VMFERRY, beside, can_track, code, document, errors, finish, has_kvm, kinds,
    print_line, skip, spawn, vmferry, wait_for,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::Value;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Guest that writes as fast as it can.
const BUSY: &str = "uniform,ws=24M,data=56M,rate=0,fill=random";

pub(crate) fn busy(kind: &str, folder: &Folder, more: &[&str]) -> Run {
    let run = Run::start(kind, folder, "source", &[&["--workload", BUSY][..], more].concat());
    run.wait("the guest running", |s| s["vm"]["guest"]["state"] == "running");
    run.wait("the guest writing", |s| s["vm"]["guest"]["writes"].as_u64() > Some(1000));
    run
}

/// Starts a [`busy`] guest. Returns it with the URI of a file for its snapshot.
fn busy_with_file(kind: &str, folder: &Folder, more: &[&str]) -> (Run, String) {
    (busy(kind, folder, more), format!("file:{}", folder.path("guest")))
}

pub(crate) fn snapshot(run: &Run, uri: &str, more: &[&str]) -> Output {
    vmferry(&[&["snapshot", "--api", &run.api, uri][..], more].concat())
}

/// Restores the file, and checks that all pages of the guest are those of one instant: the guest
/// finds every page as its counters say.
pub(crate) fn restored(kind: &str, folder: &Folder, name: &str, file: &str, report: &Value) {
    restored_on("1", kind, folder, name, (file, report));
}

/// Restores the file of a guest with this number of vCPUs.
fn restored_on(cpus: &str, kind: &str, folder: &Folder, name: &str, (file, report): (&str, &Value)) {
    let copy = Run::start(kind, folder, name, &["--incoming", file, "--cpus", cpus]);
    let status = copy.wait("the copy running", |s| s["vm"]["place"] == "running");
    assert_eq!(status["vm"]["received"]["copy_of"], report["id"], "{status}");
    copy.goes_on();
    copy.whole();
    copy.wait("all of its pages", |s| {
        s["vm"]["restore"].is_null() || s["vm"]["restore"]["state"] == "completed"
    });
}

#[test]
fn file_is_the_instant_and_the_guest_runs_on() {
    if !can_track() {
        return;
    }
    let cases = kinds().into_iter().flat_map(|kind| [(kind, "anonymous"), (kind, "memfd")]);
    beside(cases, |(kind, backing)| {
        let folder = Folder::new();
        let run = busy(kind, &folder, &["--memory-backing", backing]);
        for round in ["first", "second"] {
            let file = format!("file:{}", folder.path(round));
            let output = snapshot(&run, &file, &["--verify", "--json", "-"]);
            assert_eq!(code(&output), 0, "{kind} {backing}: {output:?}");
            let report = document(&output);
            let field = |name: &str| report["snapshot"][name].as_u64().unwrap();
            assert_eq!((&report["outcome"], &report["mode"]), (&"completed".into(), &"file".into()));
            assert_eq!(report["verified_pages"], report["bytes"]["raw_pages"]);
            assert!(report["bytes"]["raw_pages"].as_u64() >= Some(56 << 8), "{report}");
            assert!(field("faults") > 0, "the guest wrote no protected page: {report}");
            assert!(field("copied_pages") <= 16 * field("faults"), "{report}");
            assert!(field("buffer_peak_bytes") <= field("buffer_bytes"), "{report}");
            print_line(format!(
                "{kind} {backing}: paused for {} ms of {} ms; {}",
                report["downtime_ms"], report["total_ms"], report["snapshot"]
            ));
            run.goes_on();
            restored(kind, &folder, &format!("{round}.copy"), &file, &report);
        }
        run.whole();
    });
}

#[test]
fn full_buffer_delays_the_guest_and_loses_nothing() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let (run, file) = busy_with_file(kind, &folder, &["--cpus", "2"]);
        let limits = ["--snapshot-buffer", "1M", "--max-bandwidth", "60M/s", "--json", "-"];
        let output = snapshot(&run, &file, &limits);
        assert_eq!(code(&output), 0, "{kind}: {output:?}");
        let report = document(&output);
        let figures = &report["snapshot"];
        assert!(figures["waits"].as_u64() > Some(0), "{report}");
        assert!(figures["wait_ms"].as_f64() >= figures["longest_wait_ms"].as_f64(), "{report}");
        assert_eq!(figures["buffer_peak_bytes"], 1 << 20, "{report}");
        run.goes_on();
        run.whole();
        restored_on("2", kind, &folder, "copy", (&file, &report));
    });
}

/// Starts a snapshot that takes a minute. Returns when the guest runs again.
fn slow(run: &Run, uri: &str, more: &[&str]) -> Child {
    let child = spawn(&[&["snapshot", "--api", &run.api, uri, "--max-bandwidth", "1M/s"][..], more].concat());
    run.wait("the pages being written", |s| s["state"] == "precopy");
    child
}

#[test]
fn cancelled_snapshot_leaves_no_file_and_only_one_is_written_at_a_time() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let (run, file) = busy_with_file(kind, &folder, &[]);
        let child = slow(&run, &file, &[]);
        let refused = snapshot(&run, &format!("file:{}", folder.path("other")), &[]);
        assert!(code(&refused) == 1 && errors(&refused).contains("being written"), "{refused:?}");
        for command in [&["migrate", "unix:/nonexistent/x"][..], &["pause"], &["quit"]] {
            let refused = vmferry(&[&command[..1], &["--api", &run.api], &command[1..]].concat());
            assert_eq!(code(&refused), 1, "{command:?}: {refused:?}");
        }
        run.wait("the guest running on", |s| s["vm"]["guest"]["state"] == "running");
        assert_eq!(code(&vmferry(&["cancel", "--api", &run.api])), 0);
        let output = finish(child);
        assert!(code(&output) == 1 && errors(&output).contains("the guest runs on"), "{output:?}");
        assert_eq!(folder.names(), ["source"], "no file is left");
        // Ctrl-C cancels as well.
        let child = slow(&run, &file, &[]);
        let pid = Pid::from_child(&child);
        rustix::process::kill_process(pid, Signal::INT).unwrap();
        assert_eq!(code(&finish(child)), 1);
        assert_eq!(folder.names(), ["source"], "no file is left");
        run.goes_on();
        run.whole();
        assert_eq!(code(&snapshot(&run, &file, &[])), 0);
    });
}

#[test]
fn killed_process_leaves_no_file_with_the_name() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let mut run = busy("process", &folder, &[]);
    let child = slow(&run, &format!("file:{}", folder.path("guest")), &[]);
    run.kill();
    let output = finish(child);
    assert!(code(&output) != 0 && errors(&output).contains("complete"), "{output:?}");
    assert!(!folder.file("guest").exists());
}

#[test]
fn requests_that_cannot_begin_say_why() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let (run, file) = busy_with_file("process", &folder, &[]);
    std::fs::write(folder.file("guest"), b"mine").unwrap();
    for (uri, more, status, words) in [
        (file.as_str(), &[][..], 1, "exists already"),
        ("file:/nonexistent/x", &[], 1, "does not exist"),
        ("tcp:127.0.0.1:1", &[], 2, "file:PATH"),
        (&file, &["--snapshot-buffer", "4K"], 1, "buffer"),
        (&file, &["--max-bandwidth", "0M/s"], 2, "out of range"),
    ] {
        let output = snapshot(&run, uri, more);
        assert!(code(&output) == status && errors(&output).contains(words), "{uri} {more:?}: {output:?}");
    }
    assert_eq!(std::fs::read(folder.file("guest")).unwrap(), b"mine");
    assert_eq!(code(&vmferry(&["pause", "--api", &run.api])), 0);
    let output = snapshot(&run, &format!("file:{}", folder.path("other")), &[]);
    assert!(code(&output) == 1 && errors(&output).contains("resume the guest first"), "{output:?}");
    assert_eq!(code(&vmferry(&["resume", "--api", &run.api])), 0);
    run.goes_on();
    let mut names = folder.names();
    names.sort();
    assert_eq!(names, ["guest", "source"]);
}

/// Runs the guest in a mount namespace in which `dir` is a small tmpfs.
fn on_a_small_disk(folder: &Folder, dir: &Path, bytes: u64) -> Option<Run> {
    let api = folder.path("source");
    let script = format!(
        "mount -t tmpfs -o size={bytes} none {dir} && exec {VMFERRY} run --guest process --memory 96M \
         --api {api} --migrate-dir {dir} --workload {BUSY} --sandbox kill",
        dir = dir.display(),
    );
    let child = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            skip(Need::Program, format!("unshare: {error}"));
            return None;
        }
    };
    let started = wait_for("the guest, or the end of its process", || {
        if child.try_wait().unwrap().is_some() {
            return Ok(false);
        }
        let there = Path::new(&api).exists();
        if there { Ok(true) } else { Err("neither") }
    });
    if !started {
        skip(Need::Root, errors(&child.wait_with_output().unwrap()));
        return None;
    }
    let run = Run::of(child, api);
    run.wait("the guest writing", |s| s["vm"]["guest"]["writes"].as_u64() > Some(1000));
    Some(run)
}

#[test]
fn full_disk_fails_the_snapshot_and_not_the_guest() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let dir = folder.file("disk");
    std::fs::create_dir(&dir).unwrap();
    let Some(run) = on_a_small_disk(&folder, &dir, 20 << 20) else { return };
    for _ in 0..2 {
        let output = snapshot(&run, &format!("file:{}", dir.join("guest").display()), &[]);
        assert_eq!(code(&output), 1, "{output:?}");
        let said = errors(&output);
        assert!(said.contains("No space left") && said.contains("the guest runs on"), "{said}");
        let own = format!("/proc/{}/root{}", run.child.id(), dir.display());
        assert_eq!(std::fs::read_dir(own).unwrap().count(), 0, "no part of a file is left");
        run.goes_on();
    }
    run.whole();
}

#[test]
fn limit_of_file_sizes_fails_the_snapshot_and_not_the_guest() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let run = busy("process", &folder, &[]);
    let limit = Rlimit { current: Some(20 << 20), maximum: getrlimit(Resource::Fsize).maximum };
    prlimit(Some(Pid::from_child(&run.child)), Resource::Fsize, limit).unwrap();
    let output = snapshot(&run, &format!("file:{}", folder.path("guest")), &[]);
    assert_eq!(code(&output), 1, "{output:?}");
    let said = errors(&output);
    assert!(said.contains("File too large") && said.contains("the guest runs on"), "{said}");
    assert_eq!(folder.names(), ["source"], "no part of a file is left");
    run.goes_on();
    run.whole();
}

#[test]
fn hooks_run_while_the_guest_is_paused() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let (run, file) = busy_with_file(kind, &folder, &[]);
        let status = |name: &str| format!("{VMFERRY} status --api {} > {}", run.api, folder.path(name));
        let (freeze, thaw) = (format!("{}; sleep 0.1", status("freeze")), status("thaw"));
        let hooks = ["--freeze-hook", &freeze, "--thaw-hook", &thaw, "--json", "-"];
        let output = snapshot(&run, &file, &hooks);
        assert_eq!(code(&output), 0, "{output:?}");
        let report = document(&output);
        let writes = |name: &str| -> Value {
            let text = std::fs::read(folder.file(name)).unwrap();
            serde_json::from_slice::<Value>(&text).unwrap()["vm"]["guest"]["writes"].clone()
        };
        assert_eq!(writes("freeze"), writes("thaw"), "the guest ran between the hooks");
        assert!(report["snapshot"]["hook_ms"].as_f64() > Some(100.0), "{report}");
        assert!(report["downtime_ms"].as_f64() > report["snapshot"]["hook_ms"].as_f64(), "{report}");
        run.goes_on();
        restored(kind, &folder, "copy", &file, &report);
    });
}

#[test]
fn failed_hook_fails_the_snapshot_and_the_guest_runs_on() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let (run, file) = busy_with_file("process", &folder, &[]);
    let thawed = folder.path("thawed");
    let thaw = format!("sleep 0.1; touch {thawed}");
    for (freeze, limit, words) in [("exit 3", "10s", "freeze hook `exit 3`"), ("sleep 600", "200ms", "took")]
    {
        let hooks = ["--freeze-hook", freeze, "--thaw-hook", &thaw, "--hook-timeout", limit];
        let output = snapshot(&run, &file, &hooks);
        assert!(code(&output) == 1 && errors(&output).contains(words), "{freeze}: {output:?}");
        run.goes_on();
        // The thaw hook runs also after a failed freeze hook, and to its end.
        std::fs::remove_file(&thawed).expect("the thaw hook has run");
    }
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(folder.names()), ["source"]);
    // The thaw hook runs also if the operator presses Ctrl-C again and again.
    let freeze = format!("touch {thawed}.first; sleep 3; rm {thawed}.first");
    let hooks = ["--freeze-hook", &freeze, "--thaw-hook", &thaw];
    let child = spawn(&[&["snapshot", "--api", &run.api, &file][..], &hooks].concat());
    let first = format!("{thawed}.first");
    wait_for("the freeze hook", || if Path::new(&first).exists() { Ok(()) } else { Err("it does not run") });
    for _ in 0..3 {
        rustix::process::kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        run.wait("the cancel", |s| s["outcome"] == "cancelled");
    }
    assert_eq!(code(&finish(child)), 1);
    std::fs::remove_file(&thawed).expect("the thaw hook has run");
    // A command that is killed while its hook runs does not keep the guest paused for longer than
    // the limit.
    let hooks = ["--freeze-hook", "sleep 8", "--hook-timeout", "2s"];
    let mut child = spawn(&[&["snapshot", "--api", &run.api, &file][..], &hooks].concat());
    run.wait("the pause", |s| s["state"] == "switchover");
    child.kill().unwrap();
    child.wait().unwrap();
    run.wait("the failure", |s| s["outcome"] == "failed");
    run.goes_on();
    run.whole();
}

/// Runs a KVM guest as another user, who may not handle faults of KVM.
#[test]
fn missing_permission_is_named_and_the_guest_runs_on() {
    let forbidden = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if !rustix::process::geteuid().is_root() || forbidden.trim() != "0" {
        return skip(Need::Root, "needs root and vm.unprivileged_userfaultfd=0");
    }
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let theirs = folder.path("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o777)).unwrap();
    let api = format!("{theirs}/api");
    let child = Command::new(VMFERRY)
        .args(["run", "--guest", "kvm", "--memory", "96M", "--workload", BUSY, "--sandbox", "kill"])
        .args(["--api", &api, "--migrate-dir", &theirs])
        .uid(65534)
        .gid(std::fs::metadata("/dev/kvm").unwrap().gid())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(child) = child else { return skip(Need::Root, "another user cannot execute this command") };
    let mut run = Run::of(child, api);
    let runs = wait_for("the guest running, or its end", || {
        let running = run.status().is_some_and(|s| s["vm"]["guest"]["state"] == "running");
        let ended = run.child.try_wait().unwrap().is_some();
        if ended || running { Ok(running) } else { Err("neither") }
    });
    if !runs {
        return skip(Need::Root, "another user cannot run a KVM guest here");
    }
    let output = snapshot(&run, &format!("file:{theirs}/guest"), &[]);
    assert_eq!(code(&output), 1, "{output:?}");
    assert!(errors(&output).contains("vm.unprivileged_userfaultfd"), "{output:?}");
    run.goes_on();
    assert!(!Path::new(&format!("{theirs}/guest")).exists());
}
