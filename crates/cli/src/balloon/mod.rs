//! `vmferry balloon`: shows and sets the memory that a guest may use.

pub(crate) mod auto;
mod pressure;
pub(crate) mod squeeze;

use crate::Status;
use crate::api::{Client, GuestPlace, RunContext};
use crate::args::BalloonArgs;
use crate::output;
use anyhow::{Context, Result, bail};
use bytesize::ByteSize;
use serde_json::{Map, Value, json};
use vmferry_vmm::{BalloonHandle, BalloonStatus, MIN_MEMORY};

pub(crate) fn balloon(args: &BalloonArgs) -> Result<Status> {
    let out = args.json.as_deref().map(output::open).transpose()?;
    let arguments = args.target.map_or_else(|| json!({}), |target| json!({ "target": target }));
    let answer = Client::connect(&args.api)?.call("balloon", arguments)?;
    match out {
        Some(mut out) => writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?,
        None => print!("{}", text(&answer)),
    }
    Ok(Status::Done)
}

/// Executes the command in the process of the guest: sets the target, if the arguments have one,
/// and returns the state of the balloon.
pub(crate) fn answer(shared: &RunContext, arguments: &Value) -> Result<Value> {
    let balloon =
        shared.probe.balloon().context("this guest has no balloon; a KVM guest has one with --balloon on")?;
    if let Some(target) = arguments.get("target") {
        let target = target.as_u64().context("`target` is a number of bytes")?;
        check(target, &balloon.status())?;
        if !matches!(shared.place(), GuestPlace::Running | GuestPlace::Paused) {
            // The balloon's state may have been saved already, so a new target could be lost.
            bail!("the guest is being migrated; set the balloon's target after the migration");
        }
        balloon.set_target(target);
    }
    Ok(describe(&balloon))
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

/// Returns the state of a balloon as JSON.
pub(crate) fn describe(balloon: &BalloonHandle) -> Value {
    let status = balloon.status();
    let stats: Map<String, Value> =
        status.stats.iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    json!({
        "memory": status.memory,
        "target": status.target,
        "actual": status.actual,
        "driver": status.driver,
        "features": status.features,
        "stats": stats,
        "figures": status.figures,
        "late_hints": status.late_hints,
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
    if answer["driver"] == false {
        lines.push("the guest has no driver for its balloon (yet), so its memory does not change".to_owned());
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
    for (name, value) in answer["figures"].as_object().into_iter().flatten() {
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
            "features": ["stats", "reporting"], "stats": {"free": 3 << 20, "oom_kills": 2},
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
        let none = json!({ "memory": 1, "target": 1, "actual": 1, "driver": false });
        assert!(super::text(&none).contains("no driver"));
    }
}
