//! Further functions of the command: wrong usage, pausing, measuring.

use crate::support::{
    Folder, Run, beside, can_track, code, document, errors, has_kvm, kinds, vmferry, wait_for,
};
use serde_json::Value;

#[test]
fn wrong_usage_is_refused_before_the_start() {
    for args in [
        &["migrate"][..],
        &["run", "--memory", "lots"],
        &["run", "--workload", "jogging"],
        &["run", "--kernel", "x", "--workload", "idle"],
        &["run", "--initrd", "x", "--incoming", "unix:x"],
        &["run", "--initrd", "x", "--guest", "process"],
        &["run", "--cpu", "386"],
        &["migrate", "--api", "x", "tcp:h:1", "--max-bandwidth", "fast"],
        &["migrate", "--api", "x", "tcp:h:1", "--switchover-bandwidth", "some"],
        &["recover", "--api", "x", "--take", "--abandon"],
        &["migrate", "--api", "x", "nonsense"],
        &["run", "--new-mac"],
        &["run", "--incoming", "defer"],
        &["run", "--memory", "4K", "--guest", "process"],
        &["run", "--balloon", "off", "--balloon-auto", "64M"],
        &["run", "--guest", "process", "--disk", "x"],
        &["run", "--metrics", "0.0.0.0:0"],
        &["run", "--pass-fd", "1"],
        &["migrate", "--api", "x", "tcp:127.0.0.1:1", "--keep-running"],
        &["migrate", "--api", "x", "file:x", "--mode", "postcopy"],
        &["migrate", "--api", "x", "tcp:127.0.0.1:1", "--peer-timeout", "0s"],
        &["dirty-rate", "--api", "x", "--windows", "2s,1s"],
        &["dirty-rate", "--api", "x", "--windows", "1500us"],
        &["nonsense"],
    ] {
        let output = vmferry(args);
        assert_eq!(code(&output), 2, "{args:?}: {output:?}");
    }
    let output = vmferry(&["run", "--kernel", "/nonexistent/kernel"]);
    assert_eq!(code(&output), 1);
    let output = vmferry(&["run", "--incoming", "tcp:127.0.0.1:0", "--new-mac"]);
    assert_eq!(code(&output), 2);
    assert!(errors(&output).contains("--new-mac is for a copy in a file"), "{output:?}");
    let output = vmferry(&["run", "--guest", "process", "--incoming", "file:/nonexistent/copy", "--new-mac"]);
    assert_eq!(code(&output), 2);
    assert!(errors(&output).contains("omit --new-mac"), "{output:?}");
    let output = vmferry(&["status", "--api", "/nonexistent/api"]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("--api /nonexistent/api"), "{output:?}");
}

#[test]
fn guest_is_paused_and_resumed() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 0);
    let still = source.wait("the pause", |s| s["vm"]["place"] == "paused");
    // A guest that runs would have written during the start of two processes.
    let later = document(&vmferry(&["status", "--api", &source.api]));
    assert_eq!(later["vm"]["guest"]["writes"], still["vm"]["guest"]["writes"]);
    for (uri, option) in [("file:/tmp/of-no-use", "--mode=precopy"), ("tcp:127.0.0.1:1", "--mode=auto")] {
        let output = source.migrate(uri, &[option]);
        assert!(errors(&output).contains("resume the guest first"), "{output:?}");
    }
    assert_eq!(code(&vmferry(&["resume", "--api", &source.api])), 0);
    source.goes_on();
    assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 1, "there is nothing to cancel");
    let output = vmferry(&["recover", "--api", &source.api, "--take"]);
    assert!(errors(&output).contains("nothing to recover"), "{output:?}");
    let output = source.migrate("tcp:127.0.0.1:1", &["--json", "/nonexistent/report"]);
    assert!(errors(&output).contains("cannot write /nonexistent/report"), "{output:?}");
}

#[test]
fn dirty_rate_falls_with_the_window_and_the_guest_continues() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        // The working set is so small that a second is enough to write all of it, also on a host
        // that runs the guest for a tenth of the time.
        let workload = "uniform,ws=1M,data=48M,rate=20k,fill=random";
        let source = Run::start(kind, &folder, "source", &["--workload", workload]);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        // If a starved host runs the guest only after the first window, the rate rises. The
        // measurement is repeated until the guest has run in that window.
        let result = wait_for("a guest that runs when its rate is measured", || {
            let rate = ["dirty-rate", "--api", &source.api, "--windows", "50ms,200ms,1s", "--json", "-"];
            let output = vmferry(&rate);
            assert_eq!(code(&output), 0, "{output:?}");
            let result = document(&output);
            if result["windows"][0]["pages"].as_u64() >= Some(128) { Ok(result) } else { Err(result) }
        });
        let windows = result["windows"].as_array().unwrap();
        assert_eq!(windows.len(), 3, "{result}");
        for (shorter, longer) in windows.iter().zip(&windows[1..]) {
            assert!(shorter["pages"].as_u64() <= longer["pages"].as_u64(), "{result}");
        }
        // Only the first and last windows are compared: a busy host may hardly run the guest within
        // one short window.
        let rate = |window: &Value| window["bytes_per_s"].as_f64().unwrap();
        assert!(rate(&windows[2]) < rate(&windows[0]).max(rate(&windows[1])), "{result}");
        // Within a second, 20,000 writes reach all of the 256 pages, besides some pages with reads
        // and counters.
        let pages = windows[2]["pages"].as_u64().unwrap();
        assert!((128..=48 << 8).contains(&pages), "{result}");
        source.goes_on();
        assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 0);
        let output = vmferry(&["dirty-rate", "--api", &source.api]);
        assert_eq!(code(&output), 1);
        assert!(errors(&output).contains("does not run"), "{output:?}");
        let output = vmferry(&["dirty-rate", "--api", &source.api, "--windows", "2s,1s"]);
        assert!(errors(&output).contains("must ascend"), "{output:?}");
        assert_eq!(code(&vmferry(&["resume", "--api", &source.api])), 0);
        source.goes_on();
    });
}

#[test]
fn more_memory_than_kvm_supports_is_refused_with_advice() {
    if !has_kvm() {
        return;
    }
    let output = vmferry(&["run", "--memory", "10T", "--workload", "idle"]);
    let said = errors(&output);
    assert!(
        code(&output) == 1 && said.contains("MiB of guest memory") && said.contains("less memory"),
        "{said}"
    );
}

#[test]
fn help_does_not_explain_on_and_off_values() {
    for command in ["run", "migrate", "demo"] {
        let help = String::from_utf8_lossy(&vmferry(&[command, "--help"]).stdout).into_owned();
        for line in help.lines() {
            assert!(
                !line.trim_end().ends_with("It is") && !line.trim_end().ends_with("It is not"),
                "{command}: {line}"
            );
        }
        assert!(help.contains(" <on|off"), "{help}");
    }
}
