//! Observation of guests and their migrations: on a terminal, with Prometheus, and as a page of
//! results.

use crate::postcopy::slowly;
use crate::support::{
    Folder, PATIENCE, Run, beside, can_track, code, errors, finish, spawn, vmferry, wait_for,
};
use crate::terminal::Terminal;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;

#[test]
fn results_become_a_page_and_other_files_are_refused() {
    let folder = Folder::new();
    let (json, events, page) = (folder.path("a.json"), folder.path("events.json"), folder.path("page.html"));
    if can_track() {
        let source = Run::source("process", &folder);
        let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
        let moved = source.migrate(
            &uri,
            // The migration takes four seconds, so that the command sees more than three changes
            // also on a starved host.
            &["--json", &json, "--events", &events, "--max-bandwidth", "12M/s", "--downtime-limit", "2s"],
        );
        assert_eq!(code(&moved), 0, "{moved:?}");
        target.wait("the guest being here", |status| status["vm"]["place"] == "running");
        target.goes_on();
        let lines = std::fs::read_to_string(&events).unwrap();
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.len() > 3 && lines.last().unwrap()["outcome"] == "completed", "{lines:?}");
        assert!(
            lines
                .iter()
                .any(|line| line["progress"]["channel_bytes"].as_array().is_some_and(|all| !all.is_empty()))
        );
        let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        let phases: Vec<&str> =
            report["phases"].as_array().unwrap().iter().map(|p| p["phase"].as_str().unwrap()).collect();
        assert_eq!(phases, ["setup", "precopy", "switchover"]);
        assert!(report["guest"]["speed"]["points"].as_array().unwrap().len() > 3, "{report}");
    } else {
        std::fs::write(&json, r#"{"state": "completed", "outcome": "completed", "total_ms": 5.5}"#).unwrap();
        std::fs::copy(&json, &events).unwrap();
    }
    let made = vmferry(&["report", &json, &events, "-o", &page]);
    assert_eq!(code(&made), 0, "{made:?}");
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.starts_with("<!DOCTYPE html>") && text.contains("completed"), "{text}");

    let other = folder.path("other.json");
    for (content, want) in [
        ("", "is empty"),
        ("no", "is not JSON"),
        ("{\"state\": ", "ends in the middle"),
        ("{}", "neither a migration's nor"),
    ] {
        std::fs::write(&other, content).unwrap();
        let refused = vmferry(&["report", &json, &other, "-o", &page]);
        assert_eq!(code(&refused), 1);
        assert!(errors(&refused).contains(&other) && errors(&refused).contains(want), "{refused:?}");
    }
    assert_eq!(std::fs::read_to_string(&page).unwrap(), text, "a page that was there is kept");
    let many: Vec<&str> =
        ["report", "-o", "-"].into_iter().chain(std::iter::repeat_n(json.as_str(), 10_000)).collect();
    let refused = vmferry(&many);
    assert!(errors(&refused).contains("10000 files are more than"), "{refused:?}");
}

/// Members of a migration's document on which scripts may rely.
const CONTRACT: [&str; 22] = [
    "state",
    "outcome",
    "mode",
    "tracker",
    "total_ms",
    "downtime_ms",
    "setup_ms",
    "downtime",
    "bytes",
    "passes",
    "throughput_mbps",
    "ring",
    "postcopy",
    "guest",
    "cpu_ms",
    "verified_pages",
    "mismatched_pages",
    "skipped_pages",
    "suspect_pages_resent",
    "verify_ms",
    "phases",
    "progress",
];

/// Members of these members.
const PARTS: [(&str, &[&str]); 4] = [
    (
        "downtime",
        &["pause_ms", "last_harvest_ms", "last_pages_ms", "device_state_ms", "commit_ms", "resume_ms"],
    ),
    ("bytes", &["wire", "raw_pages", "zero_pages", "free_pages_skipped", "delta", "compressed"]),
    ("guest", &["before_writes_per_s", "during_writes_per_s", "stall_max_us"]),
    ("cpu_ms", &["source", "destination"]),
];

fn follows_the_contract(status: &Value) {
    let missing: Vec<_> = CONTRACT.into_iter().filter(|name| status.get(*name).is_none()).collect();
    assert!(missing.is_empty(), "{missing:?} are missing in {status}");
    for (whole, parts) in PARTS {
        let missing: Vec<_> = parts.iter().filter(|part| status[whole].get(**part).is_none()).collect();
        assert!(missing.is_empty(), "{whole}: {missing:?} are missing in {status}");
    }
}

#[test]
fn status_and_events_have_every_member_of_the_contract_while_a_migration_runs() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let events = folder.path("events.json");
    let source = Run::source("process", &folder);
    source.wait("its speed", |s| s["vm"]["guest"]["writes_per_s"].as_f64() > Some(0.0));
    let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    // At this rate, 48 MiB take longer than any wait of the test.
    let slow = ["--max-bandwidth", "500k/s", "--events", &events];
    let args = ["migrate", "--api", &source.api, &uri];
    let migration = spawn(&[&args[..], &slow].concat());
    // The report lags behind the progress by up to 20 ms.
    let moving =
        |s: &Value| s["state"] == "precopy" && s["passes"].as_array().is_some_and(|all| !all.is_empty());
    let status = source.wait("the first pages sent", moving);
    follows_the_contract(&status);
    assert!(status["outcome"].is_null() && status["mode"] == "precopy", "{status}");
    assert!(status["tracker"] == "wp" && status["id"].as_str().is_some_and(|id| id.len() == 32), "{status}");
    assert!(status["total_ms"].as_f64() > Some(0.0) && status["setup_ms"].as_f64() > Some(0.0), "{status}");
    assert!(status["downtime_ms"].is_null() && status["downtime"]["pause_ms"].is_null(), "{status}");
    assert_eq!(status["passes"][0]["pass"], 0, "{status}");
    assert!(status["guest"]["before_writes_per_s"].is_number(), "{status}");
    let progress = &status["progress"];
    assert!(progress["elapsed_ms"].as_f64() > Some(0.0), "{status}");
    assert!(progress.get("predicted_downtime_ms").is_some(), "{status}");
    assert!(!status.to_string().contains("\"nanos\""), "durations are numbers: {status}");
    let later = source.wait("time passing", |s| s["total_ms"].as_f64() > status["total_ms"].as_f64());
    assert!(later["bytes"]["wire"].as_u64() >= status["bytes"]["wire"].as_u64(), "{later}");
    let under_way =
        |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|line| line["outcome"].is_null());
    wait_for("an event of a migration under way", || {
        let seen = std::fs::read_to_string(&events).unwrap_or_default();
        if seen.lines().any(under_way) { Ok(()) } else { Err(seen) }
    });
    assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 0);
    assert_eq!(code(&finish(migration)), 1);
    let text = std::fs::read_to_string(&events).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let running: Vec<_> = lines.iter().filter(|line| line["outcome"].is_null()).collect();
    assert!(!running.is_empty(), "{text}");
    running.into_iter().for_each(follows_the_contract);
    source.goes_on();
}

/// Returns the metrics at an address.
pub(crate) fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn metrics_describe_the_guest_and_its_migration() {
    let folder = Folder::new();
    let more = ["--workload", crate::support::WORKLOAD, "--metrics", "127.0.0.1:0"];
    let mut source = Run::start("process", &folder, "source", &more);
    let (address, _said) = source.metrics();
    source.wait("the guest running", |status| status["vm"]["guest"]["writes"].as_u64() > Some(100));
    let text = scrape(&address);
    for part in [
        "HTTP/1.1 200 OK",
        "vmferry_guest_place{place=\"running\"} 1.0",
        "\nvmferry_guest_writes_total ",
        "# EOF",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(!text.contains("vmferry_migration_state"), "{text}");
    // No process listens at this address.
    let failed = source.migrate("tcp:127.0.0.1:1", &[]);
    assert_eq!(code(&failed), 1);
    // The cause is printed once.
    let said = String::from_utf8_lossy(&failed.stdout).into_owned() + &errors(&failed);
    assert_eq!(said.matches("refused").count(), 1, "{said}");
    let text = scrape(&address);
    assert!(text.contains("vmferry_migration_state{state=\"failed\"} 1.0"), "{text}");
    source.goes_on();

    let public = vmferry(&["run", "--guest", "process", "--memory", "64M", "--metrics", "0.0.0.0:0"]);
    assert!(code(&public) == 2 && errors(&public).contains("--metrics-public"), "{public:?}");
}

#[test]
fn migration_is_shown_on_a_terminal() {
    if !can_track() {
        return;
    }
    beside([(120, true), (60, false)], |(columns, colour)| {
        let folder = Folder::new();
        let source = Run::source("process", &folder);
        let (target, proxy) = slowly("process", &folder, "target");
        let uri = proxy.uri().to_string();
        let args =
            ["migrate", "--api", &source.api, &uri, "--max-bandwidth", "25M/s", "--downtime-limit", "2s"];
        let environment: &[(&str, &str)] = if colour { &[] } else { &[("NO_COLOR", "1")] };
        let mut terminal = Terminal::start(columns, &args, environment);
        terminal.wait_for("pass 0");
        terminal.wait_for(" left, dirty ");
        terminal.wait_for("ETA");
        proxy.slow_pages(false);
        assert_eq!(terminal.end().code(), Some(0), "{}", terminal.text());
        terminal.wait_for("outcome      completed");
        let text = terminal.text();
        assert_eq!(text.contains("\u{1b}[1m"), colour, "{text:?}");
        target.wait("the guest being here", |status| status["vm"]["place"] == "running");
        target.goes_on();
    });
}

#[test]
fn top_shows_guests_survives_their_end_and_restores_the_terminal() {
    let folder = Folder::new();
    let mut source = Run::source("process", &folder);
    let hangs = folder.path("hangs");
    // This listener accepts connections and never answers.
    let _listener = UnixListener::bind(&hangs).unwrap();
    let nowhere = folder.path("nowhere");
    let api = source.api.clone();
    let args = ["top", "--api", &api, &hangs, &nowhere];
    let mut terminal = Terminal::start(120, &args, &[]);
    terminal.wait_for("\u{1b}[?1049h");
    // Single words: unchanged cells of the screen, blanks in particular, are not written again.
    // "cannot reach" replaces "connecting", with which it shares an `n`.
    for part in ["vmferry", "running", "migration", "reach"] {
        terminal.wait_for(part);
    }
    source.kill();
    terminal.wait_for("gone");
    terminal.press("?");
    terminal.wait_for("leave");
    terminal.press("\t");
    terminal.press("q");
    assert_eq!(terminal.end().code(), Some(0), "{}", terminal.text());
    terminal.wait_for("\u{1b}[?1049l");

    let mut other = Terminal::start(40, &args, &[]);
    other.wait_for("vmferry");
    rustix::process::kill_process(other.pid(), rustix::process::Signal::TERM).unwrap();
    other.end();
    other.wait_for("\u{1b}[?1049l");
    // A terminal that is gone: one that sends SIGHUP, because the command is the leader of its
    // session, and one that does not.
    for started in [Terminal::foreground(&args), Terminal::start(80, &args, &[])] {
        let mut closed = started;
        closed.wait_for("vmferry");
        closed.hang_up();
        closed.end();
    }
    let nowhere = vmferry(&["top", "--api", &nowhere]);
    assert!(code(&nowhere) == 1 && errors(&nowhere).contains("needs a terminal"), "{nowhere:?}");
}
