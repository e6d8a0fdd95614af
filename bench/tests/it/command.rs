//! Tests of the executable `vmferry-bench`, with the command `vmferry` that Cargo puts beside it.

use crate::VMFERRY_BENCH;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use vmferry_testkit::{Need, skip};

fn run(program: impl AsRef<Path>, args: &[&str]) -> Output {
    Command::new(program.as_ref()).args(args).stdin(Stdio::null()).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the path of the command `vmferry`. `cargo test --workspace` builds it, `cargo test -p
/// vmferry-bench` does not.
fn vmferry() -> PathBuf {
    let path = Path::new(VMFERRY_BENCH).with_file_name("vmferry");
    assert!(path.is_file(), "no {}: build it with `cargo build -p vmferry-cli`", path.display());
    path
}

#[test]
fn help_names_every_bench() {
    let help = String::from_utf8(run(VMFERRY_BENCH, &["--help"]).stdout).unwrap();
    for name in [
        "migrate",
        "scan",
        "reaper",
        "free-page",
        "density",
        "postcopy",
        "stalls",
        "scale",
        "codec",
        "plan",
        "rtt",
        "faults",
        "soak",
        "limits",
        "fence",
        "all",
    ] {
        assert!(help.contains(&format!("- {name}:")), "{name}: {help}");
    }
    assert!(!help.contains("floor-receiver") && !help.contains("rtt-source"), "{help}");
}

#[test]
fn wrong_usage_is_refused_before_anything_runs() {
    assert_eq!(run(VMFERRY_BENCH, &["nonsense"]).status.code(), Some(2));
    let output = run(VMFERRY_BENCH, &["scan", "--html", "/nonexistent/page"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(errors(&output).contains("draw no page"), "{output:?}");
    let output = run(VMFERRY_BENCH, &["reaper", "--html", "/nonexistent/page"]);
    assert!(errors(&output).contains("cannot write /nonexistent/page"), "{output:?}");
}

#[test]
fn missing_vmferry_is_reported_by_name() {
    let only = ["limits", "--quick", "--only", "process/target-silent", "--vmferry", "/nonexistent/vmferry"];
    let output = run(VMFERRY_BENCH, &only);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(errors(&output).contains("--vmferry /nonexistent/vmferry: there is no such file"), "{output:?}");
}

#[test]
fn fault_in_real_processes_is_injected_and_reported() {
    let vmferry = vmferry();
    let checked: Value = serde_json::from_slice(&run(&vmferry, &["check", "--json", "-"]).stdout).unwrap();
    let checks = checked["checks"].as_array().unwrap();
    if let Some(check) = checks.iter().find(|check| check["id"] == "wp" && check["ok"] == false) {
        return skip(Need::Uffd, check);
    }
    let (name, folder) = ("process/precopy/setup/kill-target", tempfile::tempdir().unwrap());
    let file = folder.path().join("faults.json");
    let file = file.to_str().unwrap();
    let output = run(VMFERRY_BENCH, &["faults", "--only", name, "--json", file]);
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let case = &document["cases"][0];
    assert_eq!((&document["bench"], &case["name"]), (&"faults".into(), &name.into()), "{document}");
    assert_eq!(case["params"]["outcome"], "stayed", "{document}");
    // `vmferry report` displays the document that the bench wrote.
    let page = run(&vmferry, &["report", file, "-o", "-"]);
    assert!(String::from_utf8_lossy(&page.stdout).contains(name), "{page:?}");
}
