//! `vmferry balloon`: shows and sets the memory that a guest may use, and switches free page
//! reporting.

pub(crate) mod auto;
mod pressure;
pub(crate) mod squeeze;

use crate::Status;
use crate::api::{Client, GuestPlace, RunContext};
use crate::args::BalloonArgs;
use crate::guest::Probe;
use crate::output;
use anyhow::{Context, Result, bail};
use bytesize::ByteSize;
use serde_json::{Map, Value, json};
use vmferry_guest_abi::AllocSnapshot;
use vmferry_vmm::{BalloonStatus, MIN_MEMORY};

const NO_BALLOON: &str = "this guest has no balloon; a KVM guest has one with --balloon on";
/// Time in milliseconds after which the text mentions that the guest gives up no memory. A driver
/// that is short of memory tries again several times a second.
const LONG_MS: f64 = 2000.0;

pub(crate) fn balloon(args: &BalloonArgs) -> Result<Status> {
    let out = args.json.as_deref().map(output::open).transpose()?;
    let mut arguments = json!({});
    if let Some(target) = args.target {
        arguments["target"] = target.into();
    }
    if let Some(reporting) = args.reporting {
        arguments["reporting"] = bool::from(reporting).into();
    }
    let answer = Client::connect(&args.api)?.call("balloon", arguments)?;
    match out {
        Some(mut out) => writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?,
        None => print!("{}", text(&answer)),
    }
    Ok(Status::Done)
}

/// Executes the command in the process of the guest: sets the target and switches reporting, if the
/// arguments contain them, and returns the state of the balloon.
pub(crate) fn answer(shared: &RunContext, arguments: &Value) -> Result<Value> {
    let balloon = shared.probe.balloon().context(NO_BALLOON)?;
    let target =
        arguments.get("target").map(|target| target.as_u64().context("`target` is a number of bytes"));
    let reporting = arguments
        .get("reporting")
        .map(|reporting| reporting.as_bool().context("`reporting` is true or false"));
    let (target, reporting) = (target.transpose()?, reporting.transpose()?);
    if let Some(target) = target {
        check(target, &balloon.status())?;
    }
    let changes = target.is_some() || reporting.is_some();
    if changes && !matches!(shared.place(), GuestPlace::Running | GuestPlace::Paused) {
        // The balloon's state may have been saved already, so a new setting could be lost.
        bail!("the guest is being migrated; change the settings of the balloon after the migration");
    }
    if let Some(target) = target {
        balloon.set_target(target);
    }
    if let Some(reporting) = reporting {
        balloon.set_reporting(reporting);
    }
    describe(&shared.probe).context(NO_BALLOON)
}

fn check(target: u64, status: &BalloonStatus) -> Result<()> {
    if !(MIN_MEMORY..=status.memory).contains(&target) {
        bail!(
            "a target of {target} bytes is out of range: the guest can have {MIN_MEMORY} to {}",
            status.memory
        );
    }
    Ok(())
}

/// Returns the state of the guest's balloon as JSON, or `None` if the guest has none.
pub(crate) fn describe(probe: &Probe) -> Option<Value> {
    let status = probe.balloon()?.status();
    let allocator = probe.kvm().and_then(|vm| vm.alloc_stats().ok());
    let stats: Map<String, Value> =
        status.stats.iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    Some(json!({
        "memory": status.memory,
        "target": status.target,
        "actual": status.actual,
        "unmet_ms": status.unmet.map(|unmet| unmet.as_secs_f64() * 1e3),
        "poison": status.poison,
        "driver": status.driver,
        "reporting": status.reporting,
        "features": status.features,
        "stats": stats,
        "figures": status.figures,
        "late_hints": status.late_hints,
        "allocator": allocator.as_ref().map(shortages),
    }))
}

/// Returns the counters of a guest's allocator for low memory, full buffers and waits, over all of
/// its vCPUs.
fn shortages(stats: &AllocSnapshot) -> Value {
    json!({
        "failed": stats.sum(|cpu| cpu.failed),
        "failed_held": stats.sum(|cpu| cpu.failed_held),
        "waits": stats.sum(|cpu| cpu.waits),
        "waits_reported": stats.sum(|cpu| cpu.waits_reported),
        "waits_held": stats.sum(|cpu| cpu.waits_held),
        "waits_balloon": stats.sum(|cpu| cpu.waits_balloon),
        "wait_ns": stats.sum(|cpu| cpu.wait_ns),
        "wait_max_ns": stats.cpus().iter().map(|cpu| cpu.wait_max_ns).max(),
        "full": stats.sum(|cpu| cpu.full),
        "missed": stats.sum(|cpu| cpu.missed),
        "deferred": stats.sum(|cpu| cpu.deferred),
        "low": stats.sum(|cpu| cpu.low),
        "hint_full": stats.guest.hint_full,
        "hint_releases": stats.guest.hint_releases,
        "inflate_short": stats.guest.inflate_short,
        "taken_back_pages": stats.guest.taken_back_pages,
    })
}

fn text(answer: &Value) -> String {
    let size = |value: &Value| ByteSize::b(value.as_u64().unwrap_or(0)).display().iec().to_string();
    let mut lines = vec![format!(
        "{} of {}, target {}",
        size(&answer["actual"]),
        size(&answer["memory"]),
        size(&answer["target"])
    )];
    if let Some(unmet) = answer["unmet_ms"].as_f64().filter(|unmet| *unmet >= LONG_MS) {
        lines.push(format!(
            "the guest has given up no memory for {:.0} s: it may have none to spare",
            unmet / 1e3
        ));
    }
    if answer["driver"] == false {
        lines.push("the guest has no driver for its balloon (yet), so its memory does not change".to_owned());
    }
    if answer["reporting"] == false {
        lines.push("free page reporting is off: pages that the guest reports stay with the guest".to_owned());
    }
    let features: Vec<_> =
        answer["features"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !features.is_empty() {
        lines.push(format!("driver: {}", features.join(", ")));
    }
    for (name, value) in answer["stats"].as_object().into_iter().flatten() {
        let bytes = matches!(&**name, "free" | "total" | "available" | "caches" | "swap_in" | "swap_out");
        let value = if bytes { size(value) } else { value.to_string() };
        lines.push(format!("  {name:<22}{value:>14}"));
    }
    let allocator = answer["allocator"].as_object().into_iter().flatten();
    for (name, value) in answer["figures"].as_object().into_iter().flatten().chain(allocator) {
        if value != 0 {
            lines.push(format!("  {name:<22}{value:>14}"));
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_contains_the_reported_values() {
        let answer = json!({
            "memory": 1u64 << 30, "target": 512 << 20, "actual": 1u64 << 30, "driver": true,
            "reporting": true, "features": ["stats", "reporting"], "stats": {"free": 3 << 20, "oom_kills": 2},
            "figures": {"dropped_pages": 9, "broken": 0},
        });
        let text = text(&answer);
        assert!(
            text.starts_with("1.0 GiB of 1.0 GiB, target 512.0 MiB\ndriver: stats, reporting\n"),
            "{text}"
        );
        assert!(
            text.contains("3.0 MiB") && text.contains("dropped_pages") && !text.contains("broken"),
            "{text}"
        );
        let stuck = json!({
            "memory": 4, "target": 1, "actual": 2, "driver": true, "unmet_ms": 12_000.0,
            "allocator": {"waits": 3, "full": 0},
        });
        let text = super::text(&stuck);
        assert!(
            text.contains("no memory for 12 s") && text.contains("waits") && !text.contains("full"),
            "{text}"
        );
        assert!(!text.contains("reporting is off"), "{text}");
        let none = json!({ "memory": 1, "target": 1, "actual": 1, "driver": false, "reporting": false });
        let none = super::text(&none);
        assert!(none.contains("no driver") && none.contains("reporting is off"), "{none}");
    }
}
