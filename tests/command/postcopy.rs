//! Guests that run at the target before their memory is complete: all ways of the switch, and
//! failures of them.

use crate::support::{
    Folder, Need, Run, VMFERRY, beside, can_track, code, document, errors, finish, has_kvm, kinds,
    print_line, skip, spawn, vmferry, wait_for, wait_for_end,
};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use vmferry_engine::Uri;
use vmferry_testkit_peers::link::{Direction, Harm, Proxy, Rule};

/// Moves a loaded guest with these arguments, and checks the guest at the target.
fn moves(kind: &str, uri: impl Fn(&Folder) -> String, more: &[&str]) -> Value {
    let folder = Folder::new();
    let source = Run::source(kind, &folder);
    let (target, uri) = Run::target(kind, &folder, "target", &uri(&folder));
    let output = source.migrate(&uri, &[more, &["--json", "-"]].concat());
    assert_eq!(code(&output), 0, "{more:?}: {output:?}");
    let report = document(&output);
    assert_eq!(report["outcome"], "completed", "{report}");
    assert_eq!(report["postcopy"]["duplicates"], 0, "{more:?}: {report}");
    assert_eq!(report["interruptions"], 0, "{more:?}: {report}");
    assert!(report["postcopy"]["pages"].as_u64() > Some(0), "{more:?}: {report}");
    target.wait("all of the guest", |s| s["state"] == "completed" && s["vm"]["place"] == "running");
    target.goes_on();
    target.whole();
    report
}

fn tcp(_: &Folder) -> String {
    "tcp:127.0.0.1:0".into()
}

#[test]
fn postcopy_works_with_every_urgent_path_and_pace() {
    beside(kinds(), |kind| {
        let fast = ["--mode", "postcopy", "--max-bandwidth", "60M/s"];
        for (path, pace) in
            [("shared", "off"), ("interleaved", "auto"), ("dedicated", "50M/s"), ("dedicated", "auto")]
        {
            // A guest that a starved host does not run before its pages have arrived requests no
            // page. The migration is repeated until the guest has requested pages; all other checks
            // hold for each migration.
            let moves = || moves(kind, tcp, &[&fast[..], &["--urgent", path, "--pace", pace]].concat());
            let asked = |report: &Value| report["postcopy"]["faults"].as_u64() > Some(0);
            let report = (0..8).map(|_| moves()).find(asked);
            let report = report.unwrap_or_else(|| panic!("{path} {pace}: no page was asked for"));
            let postcopy = &report["postcopy"];
            assert_eq!(report["passes"].as_array().unwrap().len(), 1, "nothing was sent before: {report}");
            print_line(format!(
                "{kind}, {path}, pace {pace}: {} faults, mean {:.0} us, stopped for {:.1} ms",
                postcopy["faults"],
                postcopy["mean_us"].as_f64().unwrap(),
                report["downtime_ms"].as_f64().unwrap()
            ));
        }
        moves(kind, |folder| format!("unix:{}", folder.path("wire")), &fast);
    });
}

#[test]
fn guest_that_does_not_converge_switches_automatically_by_timeout_or_on_request() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        // The guest exceeds the link with a fifth of its rate, as on a busy host.
        let slowest = ["--max-bandwidth", "12M/s", "--downtime-limit", "1ms"];
        let report = moves(kind, tcp, &[&slowest[..], &["--mode", "hybrid"]].concat());
        assert!(report["passes"].as_array().unwrap().len() > 1, "{report}");
        let slow = ["--max-bandwidth", "40M/s", "--downtime-limit", "1ms"];
        let clock = ["--timeout", "200ms", "--on-timeout", "postcopy"];
        moves(kind, tcp, &[&slow[..], &clock].concat());
        // On request.
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let (target, proxy) = slowly(kind, &folder, "target");
        let by_hand = [&slow[..], &["--mode", "hybrid"]].concat();
        let child = begun(&source, &proxy.uri().to_string(), &by_hand, "precopy");
        assert_eq!(code(&vmferry(&["switch", "--api", &source.api])), 0);
        proxy.slow_pages(false);
        assert_eq!(code(&finish(child)), 0);
        target.wait("all of the guest", |s| s["state"] == "completed");
        target.whole();
    });
}

/// Starts a migration and waits until it is in `state` with some pages sent, and the command has
/// seen that state.
fn begun(source: &Run, uri: &str, more: &[&str], state: &str) -> Child {
    let events = format!("{}.events", source.api);
    // The counter may still be that of the previous migration.
    let _ = std::fs::remove_file(&events);
    let child = spawn(&[&["migrate", "--api", &source.api, uri, "--events", &events], more].concat());
    source.wait(state, |s| s["state"] == state && s["progress"]["wire_bytes"].as_u64() > Some(64 << 10));
    let seen = || std::fs::read_to_string(&events).unwrap_or_default();
    let is_in = |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|status| status["state"] == state);
    wait_for(&format!("a command that has seen {state}"), || {
        let seen = seen();
        if seen.lines().any(is_in) { Ok(()) } else { Err(seen) }
    });
    child
}

/// Tolerated silence in a test: longer than the pauses of a thread on a starved host.
const SILENCE: &str = "6s";

/// Starts a target behind a proxy, over which a pass takes minutes until the test speeds the proxy
/// up. Therefore a starved host looks before the end of the pass.
pub(crate) fn slowly(kind: &str, folder: &Folder, name: &str) -> (Run, Proxy) {
    let at = folder.path(&format!("{name}.wire"));
    let (target, _) = Run::target(kind, folder, name, &format!("unix:{at}"));
    let proxy = Proxy::new(&Uri::Unix(at.into()), None);
    proxy.slow_pages(true);
    (target, proxy)
}

#[test]
fn death_of_the_source_in_postcopy_is_reported_as_unknown_ownership() {
    for kind in kinds() {
        let folder = Folder::new();
        let mut source = Run::source(kind, &folder);
        let (mut target, proxy) = slowly(kind, &folder, "target");
        let child = begun(&source, &proxy.uri().to_string(), &["--mode", "postcopy"], "postcopy");
        source.kill();
        let output = finish(child);
        assert_eq!(code(&output), 3, "{output:?}");
        for words in ["the process that had the guest is gone", "the missing pages are lost"] {
            assert!(errors(&output).contains(words), "{words}: {output:?}");
        }
        let status = target.wait("the loss", |s| s["state"] == "postcopy-paused");
        assert!(status["left"].as_u64() > Some(0) && status["why"].is_string(), "{status}");
        assert_eq!(code(&vmferry(&["status", "--api", &target.api])), 3);
        // The vCPUs sleep on missing pages, and `quit` still ends the process.
        assert_eq!(code(&vmferry(&["quit", "--api", &target.api])), 0);
        wait_for_end(&mut target.child);
    }
}

/// The target is silent for a while: its process is stopped, as by a host that swaps or a network
/// that is down.
#[test]
fn lost_link_is_taken_up_automatically_or_by_recover() {
    beside([true, false], |by_hand| {
        let folder = Folder::new();
        let source = Run::source("process", &folder);
        let (target, proxy) = slowly("process", &folder, "target");
        let reconnect = if by_hand { "0s" } else { "60s" };
        let more = ["--mode", "postcopy", "--peer-timeout", SILENCE, "--reconnect-for", reconnect];
        let child = begun(&source, &proxy.uri().to_string(), &more, "postcopy");
        let refused = |command: &str, words: &str| {
            let output = vmferry(&[command, "--api", &source.api]);
            assert_eq!(code(&output), 1, "{command}: {output:?}");
            assert!(errors(&output).contains(words), "{command}: {output:?}");
        };
        refused("cancel", "too late to cancel");
        refused("quit", "still needs pages that only this process has");
        refused("powerdown", "the guest runs at the target");
        refused("recover", "is not lost");
        // Ctrl-C takes effect when the target has all pages.
        source.signal(Signal::INT);
        target.signal(Signal::STOP);
        proxy.slow_pages(false);
        source.wait("the loss", |s| s["state"] == "postcopy-paused");
        if by_hand {
            let output = finish(child);
            assert_eq!(code(&output), 3, "{output:?}");
            assert!(errors(&output).contains("vmferry recover"), "{output:?}");
            assert_eq!(code(&vmferry(&["status", "--api", &source.api])), 3);
            let output = vmferry(&["recover", "--api", &source.api, "--take"]);
            assert!(
                code(&output) == 1 && errors(&output).contains("the guest has run on the target since"),
                "{output:?}"
            );
            target.signal(Signal::CONT);
            target.wait("the loss there", |s| s["state"] == "postcopy-paused");
            assert_eq!(code(&vmferry(&["recover", "--api", &source.api])), 0);
        } else {
            target.signal(Signal::CONT);
            let output = finish(child);
            assert_eq!(code(&output), 0, "{output:?}");
        }
        target.wait("all of the guest", |s| s["state"] == "completed");
        target.goes_on();
        target.whole();
        let mut source = source;
        assert_eq!(wait_for_end(&mut source.child), Some(0), "nothing needs it any more");
    });
}

#[test]
fn guest_that_cannot_be_paused_continues() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (target, proxy) = slowly("process", &folder, "target");
    let more = ["--mode", "postcopy", "--peer-timeout", "120s"];
    let child = begun(&source, &proxy.uri().to_string(), &more, "postcopy");
    // The guest's thread soon waits for a page that does not arrive, and cannot be interrupted.
    source.signal(Signal::STOP);
    let output = vmferry(&["pause", "--api", &target.api]);
    assert_eq!(code(&output), 1, "{output:?}");
    assert!(errors(&output).contains("the guest was not paused, and continues"), "{output:?}");
    assert_eq!(target.status().unwrap()["vm"]["place"], "running");
    source.signal(Signal::CONT);
    proxy.slow_pages(false);
    assert_eq!(code(&finish(child)), 0);
    target.wait("all of the guest", |s| s["state"] == "completed");
    target.goes_on();
    target.whole();
}

#[test]
fn source_keeps_the_guest_if_the_target_is_gone_before_the_start() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let hybrid = ["--mode", "hybrid", "--peer-timeout", SILENCE];
    let (mut target, proxy) = slowly("process", &folder, "t1");
    let child = begun(&source, &proxy.uri().to_string(), &hybrid, "precopy");
    target.kill();
    let output = finish(child);
    assert!(code(&output) == 1 && errors(&output).contains("stays at the source"), "{output:?}");
    source.goes_on();
    // The target is silent, not gone; when it continues it is too late.
    let (mut target, proxy) = slowly("process", &folder, "t2");
    let child = begun(&source, &proxy.uri().to_string(), &hybrid, "precopy");
    target.signal(Signal::STOP);
    let output = finish(child);
    assert!(code(&output) == 1 && errors(&output).contains("nothing was heard"), "{output:?}");
    source.goes_on();
    target.signal(Signal::CONT);
    assert_eq!(wait_for_end(&mut target.child), Some(1));
    source.whole();
}

/// The target's channel threads unregister the guest memory, under their confinement. Then the
/// source asks the target.
#[test]
fn lost_commit_leaves_the_guest_at_the_source() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        for harm in [Harm::CutAtCommit, Harm::CutAllAtCommit] {
            let what = format!("{kind}, {harm:?}");
            let folder = Folder::new();
            let source = Run::source(kind, &folder);
            let at = folder.path("wire");
            let (mut target, _) = Run::target(kind, &folder, "target", &format!("unix:{at}"));
            let way = Direction { connection: 0, to_target: true };
            let proxy = Proxy::new(&Uri::Unix(at.into()), Some(Rule::on(way, 0, harm)));
            let output = source.migrate(&proxy.uri().to_string(), &["--mode", "postcopy"]);
            assert!(proxy.harmed() > 0, "{what}: no commit was cut: {output:?}");
            assert!(
                code(&output) == 1 && errors(&output).contains("stays at the source"),
                "{what}: {output:?}"
            );
            assert_eq!(wait_for_end(&mut target.child), Some(1), "{what}");
            source.goes_on();
            source.whole();
        }
    });
}

/// The kernel accesses the memory of a KVM guest, and handling these faults needs a permission.
#[test]
fn target_without_permission_for_faults_says_how_to_get_it() {
    let forbidden = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let root = rustix::process::geteuid().is_root();
    if !root || forbidden.trim() != "0" {
        return skip(Need::Root, "needs root and vm.unprivileged_userfaultfd=0");
    }
    if !has_kvm() || !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("kvm", &folder);
    let theirs = folder.path("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o777)).unwrap();
    let api = format!("{theirs}/api");
    let kvm = std::fs::metadata("/dev/kvm").unwrap().gid();
    let child = Command::new(VMFERRY)
        .args(["run", "--guest", "kvm", "--memory", "96M", "--api", &api, "--incoming", "tcp:127.0.0.1:0"])
        .uid(65534)
        .gid(kvm)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(child) = child else { return skip(Need::Root, "another user cannot execute this command") };
    let mut target = Run::of(child, api);
    let listens = wait_for("the target listening, or its end", || {
        let status = target.status().filter(|s| s["vm"]["incoming"].is_string());
        let ended = target.child.try_wait().unwrap().is_some();
        if ended || status.is_some() { Ok(status) } else { Err("neither") }
    });
    let Some(status) = listens else { return skip(Need::Root, "another user cannot run a KVM guest here") };
    let uri = status["vm"]["incoming"].as_str().unwrap();
    let output = source.migrate(uri, &["--mode", "postcopy"]);
    assert_eq!(code(&output), 1, "{output:?}");
    assert!(errors(&output).contains("vm.unprivileged_userfaultfd"), "{output:?}");
    source.goes_on();
    // The target keeps waiting: a guest that arrives with all of its memory needs no permission.
    let output = source.migrate(uri, &["--mode", "precopy"]);
    assert_eq!(code(&output), 0, "{output:?}");
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.whole();
}
