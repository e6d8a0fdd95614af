//! Traces of a migration at a collector, sent by confined processes: `--features otel`.

mod collector;
mod real;
#[expect(dead_code, reason = "the command's tests use the rest")]
#[path = "../command/support.rs"]
mod support;
#[path = "../command/threads.rs"]
mod threads;

use collector::{Collector, Received};
use serde_json::Value;
use std::os::unix::fs::chown;
use std::process::{Command, Stdio};
use support::{Folder, Need, Run, VMFERRY, WORKLOAD, can_track, code, errors, finish, print_line, skip};

/// Name of the sending thread, as far as the kernel keeps it.
const THREAD: &str = "OpenTelemetry.T";
/// Status code "error" of a span in the protocol.
const ERROR: i32 = 2;

/// Starts a source whose guest runs, and which sends its traces to `endpoint`.
fn source(folder: &Folder, endpoint: &str, more: &[&str]) -> Run {
    let api = folder.path("source");
    let own = folder.path("");
    let child = Command::new(VMFERRY)
        .args(["run", "--guest", "process", "--memory", "96M", "--workload", WORKLOAD, "--sandbox", "kill"])
        .args(["--api", &api, "--migrate-dir", &own])
        .args(more)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        // Ended spans are sent at this interval, so that the test need not wait longer.
        .env("OTEL_BSP_SCHEDULE_DELAY", "50")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let run = Run::of(child, api);
    run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    run
}

/// Moves the guest. Returns the report.
fn migrate(source: &Run, target: &str, more: &[&str]) -> Value {
    let output = source.migrate(target, &[&["--json", "-"], more].concat());
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(code(&output), 0, "{report}");
    report
}

/// Begins a migration and lets `end` make it fail while it runs.
fn in_vain(source: &Run, folder: &Folder, name: &str, end: impl Fn(&mut Run)) {
    let (mut target, uri) = Run::target("process", folder, name, "tcp:127.0.0.1:0");
    let migration = support::spawn(&["migrate", "--api", &source.api, &uri, "--max-bandwidth", "1M/s"]);
    source.wait("a pass", |s| s["state"] == "precopy");
    end(&mut target);
    assert_eq!(code(&finish(migration)), 1);
}

fn end(source: &mut Run) -> String {
    let child = std::mem::replace(&mut source.child, Command::new("true").spawn().unwrap());
    let output = finish(child);
    assert_eq!(code(&output), 0, "{output:?}");
    errors(&output)
}

fn named<'a>(spans: &'a [Received], name: &str) -> Vec<&'a Received> {
    spans.iter().filter(|received| received.span.name == name).collect()
}

fn only<'a>(spans: &'a [Received], name: &str) -> &'a Received {
    let found = named(spans, name);
    assert_eq!(found.len(), 1, "{name}: {found:?}");
    found[0]
}

/// Checks that a child begins and ends within its parent, in the same trace.
fn below(child: &Received, parent: &Received) {
    let (child, parent) = (&child.span, &parent.span);
    assert_eq!((&child.parent_span_id, &child.trace_id), (&parent.span_id, &parent.trace_id), "{child:?}");
    assert!(parent.start_time_unix_nano <= child.start_time_unix_nano, "{child:?} {parent:?}");
    assert!(child.start_time_unix_nano <= child.end_time_unix_nano, "{child:?}");
    assert!(child.end_time_unix_nano <= parent.end_time_unix_nano, "{child:?} {parent:?}");
}

/// Checks that the spans follow each other.
fn in_turn(spans: &[&Received]) {
    for pair in spans.windows(2) {
        let (before, after) = (&pair[0].span, &pair[1].span);
        assert!(before.start_time_unix_nano <= after.start_time_unix_nano, "{before:?} {after:?}");
    }
}

#[test]
fn phases_arrive_with_their_parents_times_and_attributes() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let collector = Collector::start(Some("200 OK"));
    let mut source = source(&folder, &collector.endpoint(), &[]);
    let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let report = migrate(&source, &uri, &["--verify"]);
    let told = end(&mut source);
    assert!(!told.contains("traces"), "{told}");
    let spans = collector.wait("the migration", |spans| !named(spans, "migration").is_empty());
    print_line(format!("{} spans of {}", spans.len(), report["total_ms"]));

    let migration = only(&spans, "migration");
    assert!(migration.span.parent_span_id.is_empty() && migration.span.trace_id.len() == 16);
    assert_eq!(migration.attribute("mode").as_deref(), Some("precopy"));
    assert_eq!(migration.attribute("outcome").as_deref(), Some("completed"));
    assert_eq!(migration.attribute("id").map(|id| id.len()), Some(32));
    let phases = ["setup", "precopy", "switchover"].map(|phase| only(&spans, phase));
    phases.iter().for_each(|phase| below(phase, migration));
    in_turn(&phases);
    below(only(&spans, "verify"), phases[2]);
    let passes = named(&spans, "pass");
    in_turn(&passes);
    for (number, pass) in passes.iter().enumerate() {
        assert_eq!(pass.number("number"), i64::try_from(number).ok(), "{pass:?}");
        // The last span is sent while the guest is stopped.
        let parent = phases[1..].iter().find(|phase| phase.span.span_id == pass.span.parent_span_id);
        below(pass, parent.expect("a pass below its phase"));
    }
    let pages: Vec<_> = passes.iter().map(|pass| pass.number("pages").unwrap()).collect();
    let reported = report["passes"].as_array().unwrap().iter().map(|pass| pass["pages"].as_i64().unwrap());
    assert_eq!(pages, reported.collect::<Vec<_>>());
    for received in &spans {
        let mut names = received.span.attributes.iter().map(|pair| &*pair.key);
        let known = ["id", "mode", "outcome", "number", "pages"];
        assert!(names.all(|name| known.contains(&name)), "{received:?}");
        assert_eq!(received.scope, "vmferry");
        assert_eq!(received.resource["service.name"], "vmferry");
        assert_eq!(received.resource["service.version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(received.resource["deployment.environment"], "test");
        assert_ne!(received.span.status.clone().unwrap_or_default().code, ERROR, "{received:?}");
    }
    // The report and the spans use different clocks, so the times may differ slightly.
    let ms = |received: &Received| {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
        let nanos = (received.span.end_time_unix_nano - received.span.start_time_unix_nano) as f64;
        nanos / 1e6
    };
    for phase in phases {
        let told = report["phases"].as_array().unwrap().iter().find(|told| told["phase"] == *phase.span.name);
        print_line(format!("{}: {:.1} ms, in the report {:?}", phase.span.name, ms(phase), told));
    }
}

#[test]
fn a_real_collector_understands_every_span() {
    let folder = Folder::new();
    if !can_track() {
        return;
    }
    let Some(collector) = real::Otelcol::start(&folder) else { return };
    let mut source = source(&folder, &format!("http://127.0.0.1:{}", collector.port), &[]);
    let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let report = migrate(&source, &uri, &["--verify"]);
    let told = end(&mut source);
    assert!(!told.contains("traces"), "{told}");
    let (resource, spans) = collector.spans("migration");
    print_line(format!("a real collector: {} spans", spans.len()));
    assert_eq!(resource["service.name"], "Str(vmferry)");
    assert_eq!(resource["deployment.environment"], "Str(test)");
    let migration = spans.iter().find(|span| span.is("Name") == "migration").unwrap();
    assert_eq!(migration.attributes["id"], format!("Str({})", report["id"].as_str().unwrap()));
    assert_eq!(migration.attributes["outcome"], "Str(completed)");
    for span in &spans {
        assert_eq!(span.is("Trace ID"), migration.is("Trace ID"), "{span:?}");
        assert_eq!((span.is("Kind"), span.is("Status code")), ("Internal", "Unset"), "{span:?}");
        let parent = spans.iter().find(|other| other.is("ID") == span.is("Parent ID"));
        assert_eq!(parent.is_none(), span.is("Name") == "migration", "{span:?}");
    }
    for name in ["setup", "precopy", "pass", "switchover", "verify"] {
        assert!(spans.iter().any(|span| span.is("Name") == name), "no {name}: {spans:?}");
    }
}

#[test]
fn postcopy_has_its_own_phase_and_a_failed_migration_is_an_error() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let collector = Collector::start(Some("200 OK"));
    let mut source = source(&folder, &collector.endpoint(), &[]);
    in_vain(&source, &folder, "one", |_| {
        assert_eq!(code(&support::vmferry(&["cancel", "--api", &source.api])), 0);
    });
    in_vain(&source, &folder, "another", Run::kill);
    let spans = collector.wait("both", |spans| named(spans, "migration").len() == 2);
    let outcomes = |spans: &[Received]| -> Vec<_> {
        let migrations = named(spans, "migration");
        let told = |received: &&Received| {
            (received.attribute("outcome").unwrap(), received.span.status.clone().unwrap_or_default().code)
        };
        migrations.iter().map(told).collect()
    };
    assert_eq!(outcomes(&spans), [("cancelled".to_owned(), 0), ("failed".to_owned(), ERROR)], "{spans:?}");

    let (_target, uri) = Run::target("process", &folder, "third", "tcp:127.0.0.1:0");
    let output = source.migrate(&uri, &["--mode", "postcopy"]);
    if errors(&output).contains("userfaultfd") {
        return skip(Need::Uffd, errors(&output));
    }
    assert_eq!(code(&output), 0, "{output:?}");
    end(&mut source);
    let spans = collector.wait("the postcopy", |spans| named(spans, "migration").len() == 3);
    let migration = named(&spans, "migration")[2];
    assert_eq!(migration.attribute("mode").as_deref(), Some("postcopy"));
    below(only(&spans, "postcopy"), migration);
}

#[test]
fn failing_collector_neither_delays_nor_fails_a_migration() {
    if !can_track() {
        return;
    }
    for (kind, status) in [("absent", None), ("mute", None), ("refusing", Some("503 Service Unavailable"))] {
        let folder = Folder::new();
        let collector = Collector::start(status);
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let endpoint =
            if kind == "absent" { format!("http://127.0.0.1:{gone}") } else { collector.endpoint() };
        let mut source = source(&folder, &endpoint, &[]);
        in_vain(&source, &folder, "first", |_| {
            assert_eq!(code(&support::vmferry(&["cancel", "--api", &source.api])), 0);
        });
        let told_to = |port| format!("vmferry: traces do not reach http://localhost:{port}/v1/traces: ");
        if kind != "absent" {
            // The exporter waits for an answer or for its next attempt. The following migration
            // must not wait.
            collector.wait_for_a_request();
        }
        let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
        let report = migrate(&source, &uri, &[]);
        assert_eq!(report["outcome"], "completed");
        if kind == "mute" {
            assert_eq!(collector.answered(), 0);
        }
        // The process ends normally, and reports the lost traces once.
        let told = end(&mut source);
        print_line(format!("{kind}: {told}"));
        match kind {
            "absent" => {
                assert!(told.contains("traces do not reach") && told.contains(&gone.to_string()), "{told}")
            }
            "mute" => assert!(told.contains("the last traces were not sent"), "{told}"),
            _ => assert!(told.contains(&(told_to(collector.port) + "the collector answers 503")), "{told}"),
        }
        assert!(told.matches("traces do not reach").count() <= 1, "{told}");
    }
}

#[test]
fn sending_thread_is_confined_in_a_jail() {
    if !can_track() || !threads::can_confine() {
        return;
    }
    let folder = Folder::new();
    let collector = Collector::start(Some("200 OK"));
    let run = source(&folder, &collector.endpoint(), &[]);
    let names = threads::confined(&run, "with traces");
    assert!(names.iter().any(|name| name == THREAD), "{names:?}");
    drop(run);
    if !rustix::process::geteuid().is_root() {
        return skip(Need::Root, "only root can make a jail");
    }
    let (folder, root) = (Folder::new(), Folder::new());
    chown(folder.path(""), Some(64_001), Some(64_001)).unwrap();
    let jail = ["--jail", &root.path("jail"), "--uid", "64001", "--gid", "64001"];
    let run = source(&folder, &collector.endpoint(), &jail);
    let names = threads::confined(&run, "in a jail");
    assert!(names.iter().any(|name| name == THREAD), "{names:?}");
    let (_target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    migrate(&run, &uri, &[]);
    collector.wait("the jailed one's", |spans| !named(spans, "migration").is_empty());
}
