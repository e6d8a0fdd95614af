//! The balloon over the command line and the control socket.

use crate::support::{Folder, Run, code, document, errors, finish, has_kvm, spawn, vmferry};
use serde_json::Value;

#[test]
fn target_is_set_and_shown() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("kvm", &folder);
    let output = vmferry(&["balloon", "--api", &source.api, "--target", "64M", "--json", "-"]);
    assert_eq!(code(&output), 0, "{output:?}");
    let answer = document(&output);
    assert_eq!(
        (answer["memory"].as_u64(), answer["target"].as_u64()),
        (Some(96 << 20), Some(64 << 20)),
        "{answer}"
    );
    let status = source.status().unwrap();
    assert_eq!(status["vm"]["balloon"]["target"], 64 << 20, "{status}");
    let output = vmferry(&["balloon", "--api", &source.api]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("of 96.0 MiB, target 64.0 MiB"), "{text}");
    for target in ["1M", "97M"] {
        let output = vmferry(&["balloon", "--api", &source.api, "--target", target]);
        assert_eq!(code(&output), 1);
        assert!(errors(&output).contains("the guest can have"), "{output:?}");
    }
    source.goes_on();
}

#[test]
fn target_moves_with_its_guest() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("kvm", &folder);
    assert_eq!(code(&vmferry(&["balloon", "--api", &source.api, "--target", "80M"])), 0);
    for (option, name) in [("--balloon", "off"), ("--balloon-extension", "without-extension")] {
        let without = Run::start("kvm", &folder, name, &["--incoming", "tcp:127.0.0.1:0", option, "off"]);
        let status = without.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        assert_eq!(status["vm"]["balloon"].is_null(), option == "--balloon", "{status}");
        let output = source.migrate(status["vm"]["incoming"].as_str().unwrap(), &[]);
        let why = format!("balloon: the guest has on, the target has {name}");
        assert!(errors(&output).contains(&why), "{output:?}");
        source.goes_on();
    }
    let (target, uri) = Run::target("kvm", &folder, "target", "tcp:127.0.0.1:0");
    let output = source.migrate(&uri, &["--verify"]);
    assert_eq!(code(&output), 0, "{output:?}");
    target.wait("the guest on the target", |s| s["vm"]["place"] == "running");
    target.goes_on();
    assert_eq!(target.status().unwrap()["vm"]["balloon"]["target"], 80 << 20);
}

#[test]
fn guest_whose_balloon_has_no_extension_moves() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let extension = ["--balloon-extension", "off"];
    // Only a guest with an allocator has a driver for its balloon.
    let workload = ["--workload", "uniform,ws=4M,rate=1k,alloc=16M"];
    let source = Run::start("kvm", &folder, "source", &[extension, workload].concat());
    let features = |run: &Run| run.status().unwrap()["vm"]["balloon"]["features"].to_string();
    source.wait("the guest's driver", |s| s["vm"]["balloon"]["driver"] == true);
    let accepted = features(&source);
    assert!(accepted.contains("reporting") && !accepted.contains("ranges"), "{accepted}");
    let incoming = ["--incoming", "tcp:127.0.0.1:0"];
    let target = Run::start("kvm", &folder, "target", &[extension, incoming].concat());
    let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let output = source.migrate(status["vm"]["incoming"].as_str().unwrap(), &["--verify"]);
    assert_eq!(code(&output), 0, "{output:?}");
    target.goes_on();
    assert_eq!(features(&target), accepted);
}

/// Returns the counter `name` of the guest's balloon.
fn figure(status: &Value, name: &str) -> u64 {
    status["vm"]["balloon"]["figures"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {status}"))
}

/// Waits until the counter `name` of the guest's balloon is above its present value.
fn wait_for_more(run: &Run, name: &str) {
    let before = figure(&run.status().unwrap(), name);
    run.wait(name, |status| figure(status, name) > before);
}

#[test]
fn reporting_is_switched_while_the_guest_runs_and_moves_with_it() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    // The guest allocates, frees and reports all the time.
    let workload = ["--workload", "uniform,ws=4M,rate=1k,alloc=16M"];
    let source = Run::start("kvm", &folder, "source", &workload);
    let switch = |run: &Run, value: &str| {
        let output = vmferry(&["balloon", "--api", &run.api, "--reporting", value, "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        assert_eq!(document(&output)["reporting"], value == "on");
    };
    source.wait("the guest's driver", |s| s["vm"]["balloon"]["driver"] == true);
    assert_eq!(source.status().unwrap()["vm"]["balloon"]["reporting"], true);
    wait_for_more(&source, "dropped_pages");
    assert_eq!(figure(&source.status().unwrap(), "ignored_pages"), 0);

    switch(&source, "off");
    // A report that was being processed has ended once the device has ignored a later one.
    wait_for_more(&source, "ignored_pages");
    let dropped = figure(&source.status().unwrap(), "dropped_pages");
    wait_for_more(&source, "ignored_pages");
    assert_eq!(figure(&source.status().unwrap(), "dropped_pages"), dropped);
    let output = vmferry(&["balloon", "--api", &source.api]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("reporting is off"), "{output:?}");

    let (target, uri) = Run::target("kvm", &folder, "target", "tcp:127.0.0.1:0");
    let output = source.migrate(&uri, &["--verify"]);
    assert_eq!(code(&output), 0, "{output:?}");
    target.wait("the guest on the target", |s| s["vm"]["place"] == "running");
    assert_eq!(target.status().unwrap()["vm"]["balloon"]["reporting"], false);
    wait_for_more(&target, "ignored_pages");
    assert_eq!(figure(&target.status().unwrap(), "dropped_pages"), 0);

    switch(&target, "on");
    wait_for_more(&target, "dropped_pages");
    target.whole();
}

#[test]
fn squeezed_guest_has_its_memory_again_after_the_move() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let workload = ["--workload", "uniform,ws=4M,rate=1k,alloc=16M"];
    let source = Run::start("kvm", &folder, "source", &workload);
    source.wait("the guest's statistics", |s| s["vm"]["balloon"]["stats"]["available"].is_number());
    let memory = source.status().unwrap()["vm"]["balloon"]["memory"].as_u64().unwrap();
    let (target, uri) = Run::target("kvm", &folder, "target", "tcp:127.0.0.1:0");
    let output = source.migrate(&uri, &["--squeeze-cache", "24M", "--verify", "--json", "-"]);
    assert_eq!(code(&output), 0, "{output:?}");
    let squeeze = &document(&output)["squeeze"];
    let taken = squeeze["taken_bytes"].as_u64().unwrap();
    assert!((1 << 20..=24 << 20).contains(&taken), "{squeeze}");
    target.wait("the guest on the target", |s| s["vm"]["place"] == "running");
    target.goes_on();
    let balloon = |status: &serde_json::Value, name: &str| status["vm"]["balloon"][name].as_u64();
    assert_eq!(balloon(&target.status().unwrap(), "target"), Some(memory));
    target.wait("an empty balloon", |s| balloon(s, "actual") == Some(memory));
}

/// Planning pauses the guest, which ends a squeeze.
#[test]
fn guest_is_squeezed_after_the_planning() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let workload = ["--workload", "uniform,ws=4M,data=32M,rate=100,alloc=16M,fill=random"];
    let source = Run::start("kvm", &folder, "source", &workload);
    source.wait("the guest's statistics", |s| s["vm"]["balloon"]["stats"]["available"].is_number());
    let (_target, uri) = Run::target("kvm", &folder, "target", "tcp:127.0.0.1:0");
    // The pass takes longer than the test looks.
    let more = ["--plan", "--squeeze-cache", "24M", "--max-bandwidth", "1M/s"];
    let child = spawn(&[&["migrate", "--api", &source.api, &uri], &more[..]].concat());
    source.wait("memory in the balloon while memory is sent", |s| {
        let balloon = |name: &str| s["vm"]["balloon"][name].as_u64();
        s["state"] == "precopy"
            && s["progress"]["wire_bytes"].as_u64() > Some(1 << 20)
            && balloon("actual") < balloon("memory")
    });
    assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 0);
    assert_eq!(code(&finish(child)), 1);
    source.goes_on();
}

#[test]
fn guest_that_stays_has_its_memory_again_after_a_squeeze() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let workload = ["--workload", "uniform,ws=4M,rate=1k,alloc=16M"];
    let source = Run::start("kvm", &folder, "source", &workload);
    source.wait("the guest's statistics", |s| s["vm"]["balloon"]["stats"]["available"].is_number());
    let balloon = |name: &str| source.status().unwrap()["vm"]["balloon"][name].as_u64();
    let memory = balloon("memory");
    // Nothing listens at this address.
    let output = source.migrate("tcp:127.0.0.1:1", &["--squeeze-cache", "auto", "--json", "-"]);
    assert_eq!(code(&output), 1, "{output:?}");
    assert!(document(&output)["squeeze"]["taken_bytes"].as_u64() > Some(0), "{output:?}");
    assert_eq!(balloon("target"), memory);
    source.wait("an empty balloon", |s| s["vm"]["balloon"]["actual"].as_u64() == memory);
    source.goes_on();
}

#[test]
fn guest_without_balloon_is_refused() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let output = vmferry(&["balloon", "--api", &source.api]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("this guest has no balloon"), "{output:?}");
    let output = vmferry(&["run", "--guest", "process", "--balloon-auto", "64M"]);
    assert!(errors(&output).contains("a process guest has no balloon"), "{output:?}");
}
