//! Successful migrations: between processes and through files, of every kind of guest.

use crate::support::{
    Folder, Need, Run, WORKLOAD, beside, can, can_track, code, document, errors, finish, kinds, print_line,
    spawn, vmferry, wait_for,
};
use std::time::Duration;

#[test]
fn demo_moves_a_guest_of_each_kind_and_reports() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        // The migration takes three seconds, so that the command sees its progress also on a
        // starved host. The guest writes so little that precopy converges.
        let slow = ["--link", "16M/s", "--workload", "uniform,ws=16M,data=48M,rate=500,fill=random"];
        let demo = ["demo", "--guest", kind, "--memory", "96M", "--json", "-"];
        let output = vmferry(&[&demo[..], &slow].concat());
        assert_eq!(code(&output), 0, "{output:?}");
        let report = document(&output);
        assert_eq!((&report["outcome"], &report["state"]), (&"completed".into(), &"completed".into()));
        assert_eq!(report["mismatched_pages"], 0);
        // Pages that the guest reported as free are not compared.
        let pages = |field: &str| report[field].as_u64().unwrap();
        assert_eq!(
            pages("verified_pages") + pages("skipped_pages"),
            96 << 8,
            "every other page was compared"
        );
        assert!(pages("skipped_pages") <= (96 - 48) << 8, "more than the guest leaves free: {report}");
        for field in ["mode", "tracker", "total_ms", "downtime_ms", "setup_ms", "passes", "throughput_mbps"] {
            assert!(!report[field].is_null(), "{field} of {report}");
        }
        let parts = [
            "pause_ms",
            "send_state_ms",
            "last_harvest_ms",
            "list_pages_ms",
            "last_pages_ms",
            "target_prepare_ms",
            "device_state_ms",
            "commit_ms",
            "resume_ms",
        ];
        for field in parts {
            assert!(report["downtime"][field].is_number(), "downtime.{field} of {report}");
        }
        let sum: f64 = parts.iter().filter_map(|field| report["downtime"][field].as_f64()).sum();
        let downtime = report["downtime_ms"].as_f64().unwrap();
        assert!(sum >= 0.95 * downtime && sum <= downtime + 0.01, "{sum} of {downtime} ms are explained");
        assert!(report["bytes"]["raw_pages"].as_u64() >= Some(48 << 8), "the content was sent: {report}");
        assert!(report["guest"]["before_writes_per_s"].as_f64() > Some(0.0), "{report}");
        let shown = errors(&output);
        assert!(shown.contains("checked all its pages at the target"), "{shown}");
        assert!(shown.contains("pages;"), "progress lines: {shown}");
    });
}

#[test]
fn paused_guest_stays_paused_at_the_target() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 0);
        // The guest also stays paused at the source if the migration fails.
        assert_ne!(code(&source.migrate("tcp:127.0.0.1:1", &[])), 0);
        let still = source.wait("the failure", |s| s["vm"]["place"] == "paused");
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        let output = source.migrate(&uri, &["--verify", "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let there = target.wait("the guest at the target", |s| s["vm"]["place"] == "paused");
        assert_eq!(there["vm"]["received"]["paused"], true, "{there}");
        assert_eq!(there["vm"]["guest"]["writes"], still["vm"]["guest"]["writes"]);
        assert_eq!(code(&vmferry(&["resume", "--api", &target.api])), 0);
        target.goes_on();
        target.whole();
    });
}

#[test]
fn guest_moves_twice_and_through_a_file() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let (second, uri) = Run::target(kind, &folder, "second", "tcp:127.0.0.1:0");
        let output = source.migrate(&uri, &["--verify", "--channels", "1", "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        assert_eq!(document(&output)["mismatched_pages"], 0);
        second.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        second.goes_on();
        let (third, uri) = Run::target(kind, &folder, "third", &format!("unix:{}", folder.path("wire")));
        let output = second.migrate(&uri, &["--tracker", "wp", "--channels", "4"]);
        assert_eq!(code(&output), 0, "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("outcome      completed"));
        third.wait("the guest at the third", |s| s["vm"]["place"] == "running");
        third.goes_on();
        let file = format!("file:{}", folder.path("saved"));
        assert_eq!(code(&third.migrate(&file, &[])), 0);
        let fourth = Run::start(kind, &folder, "fourth", &["--incoming", &file]);
        fourth.wait("the guest out of the file", |s| s["vm"]["place"] == "running");
        fourth.goes_on();
        fourth.whole();
        fourth.wait("all of its pages", |s| {
            s["vm"]["restore"].is_null() || s["vm"]["restore"]["state"] == "completed"
        });
        // A copy: the guest continues at the source, and the copy runs as well.
        let file = format!("file:{}", folder.path("copy"));
        let output = fourth.migrate(&file, &["--keep-running", "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let id = document(&output)["id"].clone();
        fourth.goes_on();
        // Existing files are not overwritten, and options without effect are refused.
        for (more, status, words) in
            [(&["--keep-running"][..], 1, "exists already"), (&["--verify"], 2, "--verify has no effect")]
        {
            let output = fourth.migrate(&file, more);
            assert!(code(&output) == status && errors(&output).contains(words), "{output:?}");
        }
        fourth.goes_on();
        let fifth = Run::start(kind, &folder, "fifth", &["--incoming", &file]);
        let status = fifth.wait("the copy out of the file", |s| s["vm"]["place"] == "running");
        let received = &status["vm"]["received"];
        assert!(received["copy_of"] == id && received["id"] != id, "{status}");
        fifth.goes_on();
        fifth.whole();
        let output = fifth.migrate("unix:/nonexistent/x", &["--keep-running"]);
        assert!(code(&output) == 2 && errors(&output).contains("--keep-running"), "{output:?}");
    });
}

/// Returns the peak resident memory of the process in KiB; `None` if the process has ended.
fn peak_kib(run: &Run) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.child.id())).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().trim_end_matches(" kB").parse().ok()
}

/// Returns the number of heaps that glibc made for threads. Each is 64 MiB of address space at an
/// aligned address, mostly without access.
fn heaps_of_threads(run: &Run) -> usize {
    const HEAP: u64 = 64 << 20;
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", run.child.id())).unwrap();
    let rest = |line: &&str| {
        let (span, more) = line.split_once(' ').unwrap();
        let (start, end) = span.split_once('-').unwrap();
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap());
        more.starts_with("---p") && end.is_multiple_of(HEAP) && (HEAP / 2..HEAP).contains(&(end - start))
    };
    maps.lines().filter(rest).count()
}

#[test]
fn migration_memory_does_not_depend_on_the_size_of_the_guest() {
    const MOST_ADDED_KIB: u64 = 64 << 10;
    if !can_track() {
        return;
    }
    for (kind, (memory, data)) in
        kinds().into_iter().flat_map(|kind| [("192M", 128), ("1G", 832)].map(|size| (kind, size)))
    {
        let folder = Folder::new();
        let workload = format!("uniform,ws=16M,data={data}M,rate=20k,fill=random");
        let source = Run::sized(kind, memory, &folder, "source", &["--workload", &workload]);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let args = ["--incoming", "tcp:127.0.0.1:0"];
        let target = Run::sized(kind, memory, &folder, "target", &args);
        let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let before = peak_kib(&source).unwrap();
        let uri = status["vm"]["incoming"].as_str().unwrap();
        let mut child = spawn(&["migrate", "--api", &source.api, uri, "--channels", "4"]);
        let mut during = before;
        // The source ends soon after its report was read, so its memory is sampled continuously.
        wait_for("the end of the migration", || {
            during = during.max(peak_kib(&source).unwrap_or(0));
            child.try_wait().unwrap().ok_or("it goes on")
        });
        let output = finish(child);
        assert_eq!(code(&output), 0, "{output:?}");
        target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        let source_added = during - before;
        let target_added = peak_kib(&target).unwrap().saturating_sub(before);
        print_line(format!(
            "{kind} guest of {memory}: source adds {source_added} KiB, target {target_added} KiB"
        ));
        assert!(before > data << 10, "the guest's content is there: {before} KiB");
        assert!(source_added <= MOST_ADDED_KIB, "{source_added} KiB at the source");
        assert!(target_added <= MOST_ADDED_KIB, "{target_added} KiB at the target");
        assert_eq!(heaps_of_threads(&target), 0, "all of its threads share one heap");
        target.goes_on();
    }
}

#[test]
fn report_follows_the_events_in_the_same_file() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let file = folder.path("all");
    let output = source.migrate(&uri, &["--events", &file, "--json", &file]);
    assert_eq!(code(&output), 0, "{output:?}");
    let text = std::fs::read_to_string(&file).unwrap();
    let documents = serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>();
    let documents = documents.collect::<Result<Vec<_>, _>>().unwrap();
    assert!(documents.len() > 1 && documents[0]["outcome"].is_null(), "{text}");
    assert_eq!(documents.last().unwrap()["outcome"], "completed", "{text}");
}

#[test]
fn orders_that_wait_behind_a_migration_do_not_run_the_old_copy() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        // The owner of the guest measures, so that all further orders wait, and are executed in the
        // order in which they came.
        let mut waiting = vec![spawn(&["dirty-rate", "--api", &source.api, "--windows", "4s"])];
        let api = ["--api", &source.api];
        let file = format!("file:{}", folder.path("old"));
        for order in [&["migrate", &uri][..], &["resume"], &["snapshot", &file], &["pause"]] {
            std::thread::sleep(Duration::from_millis(700));
            waiting.push(spawn(&[&order[..1], &api, &order[1..]].concat()));
        }
        let outputs: Vec<_> = waiting.into_iter().map(finish).collect();
        assert_eq!(outputs.iter().map(code).collect::<Vec<_>>(), [0, 0, 1, 1, 1], "{outputs:?}");
        for refused in &outputs[2..] {
            assert!(errors(refused).contains("the guest has moved to its target"), "{refused:?}");
        }
        assert!(!std::path::Path::new(&folder.path("old")).exists(), "the old copy was written");
        target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        target.goes_on();
        target.whole();
    });
}

#[test]
fn guest_with_dirty_rings_moves_and_is_measured_for_each_vcpu() {
    if !can(Need::Kvm, "dirty_rings") {
        return;
    }
    let folder = Folder::new();
    let with = ["--dirty-ring", "1024", "--cpus", "2"];
    let source = Run::start("kvm", &folder, "source", &[&with[..], &["--workload", WORKLOAD]].concat());
    source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    // A starved host may not run each vCPU within a window, so the measurement is repeated until it
    // does.
    wait_for("a rate of each vCPU", || {
        let rate = ["dirty-rate", "--api", &source.api, "--windows", "100ms,500ms", "--json", "-"];
        let result = document(&vmferry(&rate));
        assert_eq!(result["tracker"], "ring", "{result}");
        let each = result["windows"][1]["vcpu_pages_per_s"].as_array().unwrap();
        assert_eq!(each.len(), 2, "{result}");
        if each.iter().all(|rate| rate.as_f64() > Some(0.0)) { Ok(()) } else { Err(result) }
    });
    let target =
        Run::start("kvm", &folder, "target", &[&with[..], &["--incoming", "tcp:127.0.0.1:0"]].concat());
    let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let uri = status["vm"]["incoming"].as_str().unwrap();
    let refused = source.migrate(uri, &["--tracker", "log"]);
    assert_eq!(code(&refused), 1);
    assert!(errors(&refused).contains("no dirty log"), "{refused:?}");
    let more = ["--reaper", "predict", "--verify", "--max-bandwidth", "100M/s", "--json", "-"];
    let output = source.migrate(uri, &more);
    assert_eq!(code(&output), 0, "{output:?}");
    let report = document(&output);
    assert_eq!((&report["tracker"], &report["ring"]["policy"]), (&"ring".into(), &"predict".into()));
    for field in ["full_exits", "full_stall_us", "harvests", "reaper_cpu_ms"] {
        assert!(report["ring"][field].is_number(), "{field} of {report}");
    }
    assert_eq!(report["mismatched_pages"], 0);
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.whole();
}
