//! Predictions of migrations, and `--mode auto`, which follows them.

use crate::support::{Folder, Run, beside, can_track, code, document, errors, kinds, print_line, vmferry};
use serde_json::Value;

fn plan(source: &Run, more: &[&str]) -> Value {
    let output = vmferry(&[&["plan", "--api", &source.api, "--json", "-", "--watch", "2s"], more].concat());
    assert_eq!(code(&output), 0, "{more:?}: {output:?}");
    document(&output)
}

fn mode<'a>(plan: &'a Value, name: &str) -> &'a Value {
    plan["modes"].as_array().unwrap().iter().find(|mode| mode["mode"] == name).unwrap()
}

#[test]
fn plan_predicts_and_moves_nothing() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        // The guest dirties a twentieth of the link's rate, so that precopy converges also where a
        // starved host measures a slow link.
        let light = ["--workload", "uniform,ws=16M,data=48M,rate=1k,fill=random"];
        let source = Run::start(kind, &folder, "source", &light);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        let made = plan(&source, &[&uri, "--max-bandwidth", "100M/s"]);
        let precopy = mode(&made, "precopy");
        let total = &precopy["total_ms"];
        // 48 MiB at 100 MB/s, and the pages that are written meanwhile. A starved host measures a
        // far slower link.
        let expected = total["expected"].as_f64().unwrap();
        assert!((400.0..200_000.0).contains(&expected), "{kind}: {made}");
        assert!(total["low"].as_f64() <= total["expected"].as_f64(), "{made}");
        assert_eq!(made["inputs"]["link"]["measured"], true, "{made}");
        assert!(made["guest_cost"]["faults"].as_u64() > Some(0), "{made}");
        for name in ["auto-converge", "postcopy", "hybrid"] {
            assert_eq!(mode(&made, name)["converges"], "yes", "{kind} {name}: {made}");
        }
        // The link carries a thousandth of the dirty rate, so that the answer is the same on a busy
        // host.
        let slow = plan(&source, &["--bandwidth", "4k/s", "--downtime-limit", "50ms"]);
        assert_eq!(mode(&slow, "precopy")["converges"], "no", "{slow}");
        assert_ne!(slow["recommended"], "precopy", "{slow}");
        assert_eq!(slow["inputs"]["link"]["measured"], false, "{slow}");
        print_line(format!("{kind}: precopy in {expected:.0} ms, {}", made["reason"]));
        // Nothing has moved: source and target are unchanged, and the guest can still move.
        assert_eq!(target.status().unwrap()["vm"]["place"], "awaited");
        let moved = source.migrate(&uri, &["--plan", "--max-bandwidth", "100M/s", "--json", "-"]);
        assert_eq!(code(&moved), 0, "{moved:?}");
        let report = document(&moved);
        assert_eq!(report["plan"]["mode"], "precopy", "{report}");
        assert!(report["plan"]["error"]["total_pct"].is_number(), "{report}");
        // The guest writes 1000 times a second. Writes during the planning are not counted.
        let during = report["guest"]["during_writes_per_s"].as_f64().unwrap();
        assert!(during < 2000.0, "{kind}: {}", report["guest"]);
        target.goes_on();
        target.whole();
    });
}

#[test]
fn plan_predicts_the_bytes_and_the_processor_time_of_a_codec() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::start(
        "process",
        &folder,
        "source",
        &["--workload", "uniform,ws=16M,data=48M,rate=100,fill=text"],
    );
    source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(10));
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    // On this link, the codec is faster on every host.
    let slow = ["--max-bandwidth", "5M/s"];
    let made = plan(&source, &[&uri, slow[0], slow[1]]);
    assert_ne!(made["encoding"]["codec"], "raw", "{made}");
    let content = &made["inputs"]["content"];
    assert!(content["sampled_pages"].as_u64().is_some_and(|pages| (500..=2048).contains(&pages)), "{made}");
    let bytes = |codec: &str| {
        let found = made["codecs"].as_array().unwrap().iter();
        let mut found = found.filter(|plan| plan["codec"] == codec && plan["deltas"] == false);
        found.next().unwrap()["bytes"]["expected"].as_f64().unwrap()
    };
    assert!(bytes("zstd:1") < bytes("lz4") && bytes("lz4") < bytes("raw") * 0.6, "{made}");
    let args = [&slow[..], &["--codec", "zstd", "--plan", "--json", "-"]].concat();
    let moved = source.migrate(&uri, &args);
    assert_eq!(code(&moved), 0, "{moved:?}");
    let report = document(&moved);
    let (predicted, zstd) = (&report["plan"]["predicted"], &report["codecs"]["zstd"]);
    let off = |expected: &Value, real: f64| expected["expected"].as_f64().unwrap() / real - 1.0;
    let bytes = off(&predicted["bytes"], report["bytes"]["wire"].as_f64().unwrap());
    assert!(bytes.abs() < 0.2, "{bytes}: {report}");
    // The time of a busy processor varies.
    let cpu = off(&predicted["encoding_cpu_ms"], zstd["cpu_ms"].as_f64().unwrap());
    assert!((-0.7..2.0).contains(&cpu), "{cpu}: {report}");
    print_line(format!("bytes off by {:.1} %, processor time by {:.0} %", bytes * 100.0, cpu * 100.0));
    target.whole();
}

#[test]
fn plan_needs_a_target_or_a_rate() {
    let nothing = vmferry(&["plan", "--api", "nowhere"]);
    assert_eq!(code(&nothing), 2, "{nothing:?}");
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let absent = format!("unix:{}", folder.path("absent"));
    let failed = vmferry(&["plan", "--api", &source.api, &absent]);
    assert_eq!(code(&failed), 1, "{failed:?}");
    assert!(errors(&failed).contains("--bandwidth"), "{}", errors(&failed));
}

#[test]
fn auto_mode_moves_a_guest_that_dirties_faster_than_the_link_carries() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source =
            Run::start(kind, &folder, "source", &["--workload", "uniform,ws=16M,rate=20k,fill=random"]);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        // The guest writes 80 MB/s to 16 MiB, and the link carries 8 MB/s: sending 16 MiB takes two
        // seconds, and the downtime limit is 20 ms.
        let slow = ["--mode", "auto", "--max-bandwidth", "8M/s", "--downtime-limit", "20ms", "--json", "-"];
        let output = source.migrate(&uri, &slow);
        assert_eq!(code(&output), 0, "{kind}: {output:?}");
        let report = document(&output);
        assert_eq!(report["outcome"], "completed", "{report}");
        assert!(report["postcopy"]["pages"].as_u64() > Some(0), "{kind}: not by precopy alone: {report}");
        assert!(!report["plan"]["reason"].as_str().unwrap().is_empty(), "{report}");
        assert_eq!(report["plan"]["mode"], "hybrid", "{report}");
        target.wait("all of the guest", |s| s["state"] == "completed" && s["vm"]["place"] == "running");
        target.goes_on();
        target.whole();
        print_line(format!("{kind}: {}", report["plan"]["reason"]));
    });
}
