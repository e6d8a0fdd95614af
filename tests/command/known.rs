//! Migrations to a target that has files with pages of the guest (`--have`).

use crate::support::{
    Folder, Run, VMFERRY, beside, can_track, code, document, errors, kinds, vmferry, wait_for,
};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Guest whose memory mostly stays as it was at the start.
const CALM: &str = "uniform,ws=1M,data=48M,rate=1k,fill=random";

/// Returns a guest, and writes a copy of it to the file `copy` of `folder`.
fn copied(kind: &str, folder: &Folder) -> Run {
    let source = Run::start(kind, folder, "source", &["--workload", CALM]);
    source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    let output = source.migrate(&format!("file:{}", folder.path("copy")), &["--keep-running"]);
    assert_eq!(code(&output), 0, "{output:?}");
    source
}

/// Moves the guest of `source` to a target with these options, and checks it. Returns the report,
/// and the figures of the arrival.
fn moved(kind: &str, folder: &Folder, source: &Run, have: &[&str], mode: &str) -> (Value, Value) {
    let uri = format!("unix:{}", folder.path("wire"));
    let target =
        Run::start(kind, folder, "target", &[&["--incoming", &uri, "--peer-timeout", "120s"], have].concat());
    target.wait("its address", |s| !s["vm"]["incoming"].is_null());
    let output = source.migrate(&uri, &["--verify", "--mode", mode, "--json", "-"]);
    assert_eq!(code(&output), 0, "{output:?}");
    let report = document(&output);
    assert_eq!((&report["mismatched_pages"], &report["suspect_pages_resent"]), (&0.into(), &0.into()));
    let status = target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.goes_on();
    target.whole();
    wait_for("the end of all use of the known files", || {
        let used: Vec<_> = open_files(&target).into_iter().filter(|path| path.ends_with("copy")).collect();
        if used.is_empty() { Ok(()) } else { Err(used) }
    });
    (report, status["vm"]["received"].clone())
}

fn open_files(run: &Run) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(format!("/proc/{}/fd", run.child.id())).unwrap();
    entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect()
}

#[test]
fn more_files_are_known_than_a_process_may_usually_open() {
    let folder = Folder::new();
    for number in 0..80 {
        std::fs::write(folder.file(&format!("old{number}")), [1; 4096]).unwrap();
    }
    let (api, uri) = (folder.path("api"), format!("unix:{}", folder.path("wire")));
    let command = format!(
        "ulimit -S -n 64; exec {VMFERRY} run --guest process --memory 96M --api {api} --incoming {uri} --have {}",
        folder.path("")
    );
    let child = Command::new("/bin/sh").args(["-c", &command]).stderr(Stdio::null()).spawn().unwrap();
    let target = Run::of(child, api);
    target.wait("its address", |s| !s["vm"]["incoming"].is_null());
    let used = open_files(&target).into_iter().filter(|path| path.display().to_string().contains("/old"));
    assert_eq!(used.count(), 80);
}

#[test]
fn guest_returns_to_a_host_with_an_old_copy_of_it() {
    if !can_track() {
        return;
    }
    let cases = kinds().into_iter().flat_map(|kind| ["precopy", "hybrid"].map(|mode| (kind, mode)));
    beside(cases, |(kind, mode)| {
        let folder = Folder::new();
        let source = copied(kind, &folder);
        let copies = Folder::new();
        std::fs::copy(folder.file("copy"), copies.file("copy")).unwrap();
        let (report, received) = moved(kind, &folder, &source, &["--have", &copies.path("")], mode);
        let known = &report["known_pages"];
        let figure = |name: &str| known[name].as_u64().unwrap();
        // 48 MiB of random data, of which the guest writes 1 MiB. On a busy host, the source does
        // not wait for the first answers.
        assert!(figure("hashes") > 6000, "{kind}, {mode}: {known}");
        assert!(figure("known") * 20 > figure("hashes") * 19, "{kind}, {mode}: {known}");
        assert_eq!(received["known_pages"], known["known"], "{received}");
        let first = report["passes"][0]["wire_bytes"].as_u64().unwrap();
        let others = 12_800 - figure("known");
        assert!(first < others * 4200 + figure("hashes") * 50, "{kind}, {mode}: {first}, {known}");
    });
}

#[test]
fn wrong_and_damaged_files_change_nothing() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = copied("process", &folder);
    let wrong = folder.path("wrong");
    std::fs::copy(crate::support::VMFERRY, &wrong).unwrap();
    // A part of the copy is missing, and one page of the rest is damaged.
    let short = std::fs::OpenOptions::new().write(true).open(folder.file("copy")).unwrap();
    short.set_len(30 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&short, b"damage", 20 << 20).unwrap();
    let have = ["--have", &wrong, "--have", &folder.path("copy")];
    let (report, _) = moved("process", &folder, &source, &have, "precopy");
    let known = &report["known_pages"];
    assert!(known["known"].as_u64() > Some(1000) && known["unknown"].as_u64() > Some(0), "{known}");
}

#[test]
fn files_that_cannot_be_used_are_refused_at_the_start() {
    let folder = Folder::new();
    let (uri, missing) = (format!("unix:{}", folder.path("wire")), folder.path("missing"));
    let run = |more: &[&str]| vmferry(&[&["run", "--guest", "process", "--memory", "16M"], more].concat());
    let output = run(&["--incoming", &uri, "--have", &missing]);
    assert!(code(&output) == 1 && errors(&output).contains("--have"), "{output:?}");
    assert!(errors(&output).contains("No such file"), "{output:?}");
    let output = run(&["--incoming", &uri, "--have", "/dev/zero"]);
    assert!(errors(&output).contains("neither a regular file nor a folder"), "{output:?}");
    let output = run(&["--have", &missing]);
    assert_eq!(code(&output), 2, "{output:?}");
    let output = run(&["--incoming", &format!("file:{missing}"), "--have", &missing]);
    assert!(code(&output) == 2 && errors(&output).contains("--have has no effect"), "{output:?}");
    assert!(!Path::new(&folder.path("wire")).exists());
}
