//! Scenarios with the bare-metal guest, which checks all its pages itself. They show whether memory
//! arrives.

use super::rig::{Rig, migrate};
use super::vm::{Guest, Vm};
use super::{Lab, Scenario, Verdict};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::Duration;

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

const fn demo(
    name: &'static str,
    about: &'static str,
    quick: bool,
    run: fn(&mut Lab) -> Result<Verdict>,
) -> Scenario {
    Scenario { name, about, quick, machines: 1, limit: seconds(120), run }
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "host",
        about: "this KVM is complete, and vmferry detects its features",
        quick: true,
        machines: 1,
        limit: seconds(60),
        run: host,
    },
    demo("bare-precopy-log", "bare-metal guest, precopy, dirty log", false, |lab| {
        moved(lab, "precopy", "log", 1)
    }),
    demo("bare-precopy-ring", "bare-metal guest, precopy, dirty rings", true, |lab| {
        moved(lab, "precopy", "ring", 1)
    }),
    demo("bare-precopy-wp", "bare-metal guest, precopy, write protection", false, |lab| {
        moved(lab, "precopy", "wp", 1)
    }),
    demo("bare-precopy-smp", "bare-metal guest of two vCPUs, precopy, dirty rings", false, |lab| {
        moved(lab, "precopy", "ring", 2)
    }),
    demo("bare-postcopy", "bare-metal guest, postcopy", false, postcopy),
    demo("bare-hybrid-log", "bare-metal guest, hybrid, dirty log", false, |lab| {
        moved(lab, "hybrid", "log", 1)
    }),
    demo("bare-hybrid-ring", "bare-metal guest, hybrid, dirty rings", false, |lab| {
        moved(lab, "hybrid", "ring", 2)
    }),
    Scenario {
        machines: 2,
        ..demo("bare-two-kernels", "bare-metal guest, from one machine to another", true, between_kernels)
    },
];

/// Returns the output of `vmferry check` on this host.
fn findings(lab: &Lab) -> Result<Value> {
    let output =
        Command::new(&lab.plan.vmferry).args(["check", "--json", "-"]).stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).context("`vmferry check --json -` wrote no JSON")
}

/// Returns whether a check passed, and its detail.
fn finding(findings: &Value, id: &str) -> Option<(bool, String)> {
    let found = findings["checks"].as_array()?.iter().find(|check| check["id"] == id)?;
    Some((found["ok"].as_bool()?, found["detail"].as_str().unwrap_or_default().to_owned()))
}

fn host(lab: &mut Lab) -> Result<Verdict> {
    let findings = findings(lab)?;
    let (works, kvm) = finding(&findings, "kvm").context("`vmferry check` has no check of KVM")?;
    ensure!(works, "KVM does not work: {kvm}");
    ensure!(kvm.contains("full"), "this KVM is not complete: {kvm}");
    lab.figure("kvm", kvm);
    for id in ["dirty_rings", "wp", "faults_kernel"] {
        let (works, detail) = finding(&findings, id).with_context(|| format!("no finding '{id}'"))?;
        lab.figure(id, if works { detail } else { format!("no: {detail}") });
    }
    let nested = std::fs::read_to_string("/sys/module/kvm_amd/parameters/npt").unwrap_or_default();
    if lab.plan.emulated {
        ensure!(nested.trim() == "Y" || nested.trim() == "1", "kvm_amd has no nested paging ('{nested}')");
    }
    Ok(Verdict::Passed)
}

/// Runs a demonstration: a loaded guest moves between two processes, all pages are compared, and
/// the guest checks its pages.
fn moved(lab: &mut Lab, mode: &str, tracker: &str, cpus: u32) -> Result<Verdict> {
    let need = match tracker {
        "ring" => Some("dirty_rings"),
        "wp" => Some("wp"),
        _ => None,
    };
    if let Some(id) = need {
        let (works, detail) = finding(&findings(lab)?, id).with_context(|| format!("no finding '{id}'"))?;
        if !works {
            return Ok(Verdict::Skipped(format!("this kernel has no tracker {tracker}: {detail}")));
        }
    }
    let report = lab.folder.join("report.json");
    // The guest writes as much as an emulated processor can, and more than the link carries without
    // delay.
    let (memory, workload) = if lab.plan.emulated {
        ("128M", "uniform,ws=16M,rate=2k,fill=random,data=64M")
    } else {
        ("1G", "uniform,ws=256M,rate=100k,fill=random,data=768M")
    };
    let status = Command::new(&lab.plan.vmferry)
        .args(["demo", "--guest", "kvm", "--verify", "--mode", mode, "--tracker", tracker])
        .args(["--memory", memory, "--workload", workload, "--cpus", &cpus.to_string()])
        .arg("--json")
        .arg(&report)
        .env("VMFERRY_LOG", "info")
        .stdin(Stdio::null())
        .status()?;
    let report: Value = serde_json::from_slice(
        &std::fs::read(&report).with_context(|| format!("`vmferry demo` ({status}) wrote no report"))?,
    )?;
    judge(lab, &report, status.success())?;
    let used = report["tracker"].as_str().unwrap_or_default();
    ensure!(tracker == "auto" || used == tracker, "the tracker was {used}, not {tracker}");
    Ok(Verdict::Passed)
}

/// Moves a guest to the other machine, with another kernel, another KVM and other clocks.
fn between_kernels(lab: &mut Lab) -> Result<Verdict> {
    if lab.plan.peer.is_none() {
        return Ok(Verdict::Skipped("there is only one machine; an emulated run has two".into()));
    }
    let mut rig = Rig::new(lab);
    let guest = measured();
    let target = rig.awaiting_on_remote(&guest)?;
    carried(&mut rig, &guest, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])
}

/// Moves a guest by postcopy with pacing. Both sides wait for processors all the time, but the
/// delay of echoes by this wait must not reduce the pace.
fn postcopy(lab: &mut Lab) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let guest = measured();
    let target = rig.awaiting(&guest)?;
    carried(&mut rig, &guest, &target, &["--mode", "postcopy"])
}

fn measured() -> Guest {
    Guest { memory: "128M", dirty_ring: true, ..Guest::usual() }
}

/// Moves the bare-metal guest, which checks its pages while it runs.
fn carried(rig: &mut Rig<'_>, guest: &Guest, target: &Vm, arguments: &[&str]) -> Result<Verdict> {
    const WORKLOAD: &str = "uniform,ws=16M,rate=2k,fill=random,data=64M";
    let source = Vm::measuring(&rig.local, &rig.boot, guest, &rig.lab.folder, "guest", WORKLOAD)?;
    let works = |vm: &Vm, more_than: u64| -> Result<u64> {
        vm.until("the guest's work", |status| {
            let guest = &status["vm"]["guest"];
            ensure!(guest["corrupt"].as_u64().unwrap_or(0) == 0, "the guest found damaged pages: {guest}");
            Ok(guest["writes"].as_u64().filter(|writes| *writes > more_than))
        })
    };
    let before = works(&source, 1000)?;
    let report = migrate(&source, &target.uri()?, arguments)?;
    let after = works(target, before + 1000)?;
    for name in ["total_ms", "downtime_ms", "tracker"] {
        rig.lab.figure(name, report[name].clone());
    }
    rig.lab.figure("writes", after);
    target.command(&["quit"])?;
    Ok(Verdict::Passed)
}

/// Checks that the report of a demonstration describes a successful move.
fn judge(lab: &mut Lab, report: &Value, ended_well: bool) -> Result<()> {
    if report["outcome"] != "completed" {
        bail!("the outcome is {}: {}", report["outcome"], report["error"]);
    }
    ensure!(ended_well, "the guest arrived, but `vmferry demo` failed");
    ensure!(report["mismatched_pages"] == 0, "{} pages differ", report["mismatched_pages"]);
    ensure!(report["guest"]["checked_itself"] == true, "the guest did not check its pages");
    if report["mode"] == "precopy" {
        ensure!(report["verified_pages"].as_u64() > Some(0), "no page was compared");
    }
    for name in ["total_ms", "downtime_ms", "mode", "tracker"] {
        lab.figure(name, report[name].clone());
    }
    let wire = report["bytes"]["wire"].as_u64().unwrap_or(0);
    lab.figure("wire_mib", wire >> 20);
    if let Some(faults) = report["postcopy"]["faults"].as_u64() {
        lab.figure("faults", faults);
    }
    if let Some(exits) = report["ring"]["full_exits"].as_u64() {
        lab.figure("ring_full_exits", exits);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lab() -> Lab {
        let plan = crate::plan::Plan {
            slow_disk: None,
            scenarios: Vec::new(),
            results: "/nowhere".into(),
            vmferry: "/nowhere".into(),
            kernel: "/nowhere".into(),
            vmlinux: "/nowhere".into(),
            initrd: "/nowhere".into(),
            kernel_lacks: Vec::new(),
            poisoning: crate::plan::Poisoning::None { why: "a test".into() },
            disk: None,
            fsck: None,
            peer: None,
            emulated: true,
        };
        Lab::new(plan, "/nowhere".into())
    }

    fn good() -> Value {
        json!({ "outcome": "completed", "mode": "precopy", "mismatched_pages": 0, "verified_pages": 9,
                "guest": { "checked_itself": true }, "bytes": { "wire": 3 << 20 }, "downtime_ms": 1.5 })
    }

    #[test]
    fn successful_move_passes() {
        let mut lab = lab();
        judge(&mut lab, &good(), true).unwrap();
        assert_eq!(lab.figures["wire_mib"], 3);
    }

    #[test]
    fn each_deviation_fails() {
        let spoilt = [
            ("outcome", json!("failed")),
            ("mismatched_pages", json!(1)),
            ("verified_pages", json!(0)),
            ("guest", json!({})),
        ];
        for (name, value) in spoilt {
            let mut report = good();
            report[name] = value;
            assert!(judge(&mut lab(), &report, true).is_err(), "{name}");
        }
        assert!(judge(&mut lab(), &good(), false).is_err());
    }
}
