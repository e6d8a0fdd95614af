//! What is said of a migration before it begins, and what `--mode auto` makes of it.

use crate::support::{Folder, Run, beside, can_track, code, document, errors, kinds, say, vmferry};
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
fn a_plan_says_what_to_expect_and_moves_nothing() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        // A twentieth of the link: it converges also where a starved host measures a slow link.
        let light = ["--workload", "uniform,ws=16M,data=48M,rate=1k,fill=random"];
        let source = Run::start(kind, &folder, "source", &light);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        let made = plan(&source, &[&uri, "--max-bandwidth", "100M/s"]);
        let precopy = mode(&made, "precopy");
        let total = &precopy["total_ms"];
        // 48 MiB at 100 MB/s, and what is written meanwhile. On a starved host the link is measured
        // far slower.
        let expected = total["expected"].as_f64().unwrap();
        assert!((400.0..200_000.0).contains(&expected), "{kind}: {made}");
        assert!(total["low"].as_f64() <= total["expected"].as_f64(), "{made}");
        assert_eq!(made["inputs"]["link"]["measured"], true, "{made}");
        assert!(made["guest_cost"]["faults"].as_u64() > Some(0), "{made}");
        for name in ["auto-converge", "postcopy", "hybrid"] {
            assert_eq!(mode(&made, name)["converges"], "yes", "{kind} {name}: {made}");
        }
        // A link of a thousandth of what it dirties, so that the answer is the same on a host that is busy.
        let slow = plan(&source, &["--bandwidth", "4k/s", "--downtime-limit", "50ms"]);
        assert_eq!(mode(&slow, "precopy")["converges"], "no", "{slow}");
        assert_ne!(slow["recommended"], "precopy", "{slow}");
        assert_eq!(slow["inputs"]["link"]["measured"], false, "{slow}");
        say(format!("{kind}: precopy in {expected:.0} ms, {}", made["reason"]));
        // Nothing has moved: both are as they were, and the guest can go.
        assert_eq!(target.status().unwrap()["vm"]["place"], "awaited");
        let moved = source.migrate(&uri, &["--plan", "--json", "-"]);
        assert_eq!(code(&moved), 0, "{moved:?}");
        let report = document(&moved);
        assert_eq!(report["plan"]["mode"], "precopy", "{report}");
        assert!(report["plan"]["error"]["total_pct"].is_number(), "{report}");
        target.goes_on();
        target.whole();
    });
}

#[test]
fn a_plan_needs_a_target_or_a_rate() {
    let nothing = vmferry(&["plan", "--api", "nowhere"]);
    assert_eq!(code(&nothing), 2, "{nothing:?}");
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let nobody = format!("unix:{}", folder.path("nobody"));
    let failed = vmferry(&["plan", "--api", &source.api, &nobody]);
    assert_eq!(code(&failed), 1, "{failed:?}");
    assert!(errors(&failed).contains("--bandwidth"), "{}", errors(&failed));
}

#[test]
fn auto_moves_a_guest_that_outruns_the_link() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source =
            Run::start(kind, &folder, "source", &["--workload", "uniform,ws=16M,rate=20k,fill=random"]);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        // 80 MB/s are written to 16 MiB, and 8 MB/s go over: they take two seconds, and 20 ms are allowed.
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
        say(format!("{kind}: {}", report["plan"]["reason"]));
    });
}
