//! Answer to `alloc`: the guest's report on its allocator and its balloon, for measurements.

use crate::guest::Probe;
use anyhow::{Context, Result, anyhow};
use serde_json::{Map, Value, json};
use vmferry_guest_abi::StatsError;

/// Returns the guest's counters, those of each vCPU with histograms, and the figures of the
/// balloon.
pub(super) fn answer(probe: &Probe) -> Result<Value> {
    let vm = probe.kvm().context("a process guest has no allocator")?;
    let stats = match vm.alloc_stats() {
        Ok(stats) => stats,
        // The guest boots, or writes its statistics at this moment.
        Err(StatsError::NotYet | StatsError::Busy { .. }) => {
            return Ok(json!({ "done": false, "guest": null }));
        }
        Err(error) => return Err(anyhow!("{error}")),
    };
    let object = |fields: &mut dyn Iterator<Item = (&'static str, u64)>| -> Value {
        Value::Object(fields.map(|(name, value)| (name.to_owned(), value.into())).collect::<Map<_, _>>())
    };
    let vcpus = stats.cpus().iter().map(|cpu| {
        let mut vcpu = object(&mut cpu.fields());
        vcpu["alloc_hist"] = json!(cpu.alloc_hist);
        vcpu["free_hist"] = json!(cpu.free_hist);
        vcpu
    });
    Ok(json!({
        "done": stats.done(),
        "corrupt": vm.stats().map_or(0, |stats| stats.corrupt()),
        "guest": object(&mut stats.guest.fields()),
        "vcpus": vcpus.collect::<Vec<_>>(),
        "balloon": vm.balloon().map(|balloon| balloon.status().figures),
    }))
}
