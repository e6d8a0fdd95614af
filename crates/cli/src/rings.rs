//! State of a guest's dirty rings while the guest runs.

use serde_json::{Value, json};
use vmferry_engine::RingFigures;
use vmferry_vmm::VmHandle;

/// Returns the figures of the migration report, and the entries in use of each vCPU's ring; `None`
/// without rings.
pub(crate) fn describe(vm: &VmHandle) -> Option<Value> {
    let rings = vm.rings()?;
    Some(figures(&rings.report().figures(), &rings.used()))
}

fn figures(figures: &RingFigures, used: &[u32]) -> Value {
    let mut value = serde_json::to_value(figures).unwrap_or_else(|_| json!({}));
    value["used"] = json!(used);
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_engine::{ReaperFigures, ReaperState};

    #[test]
    fn reaper_is_an_object_with_its_state_and_error() {
        let of = |state: ReaperState| {
            let reaper = ReaperFigures { state, iterations: 5, harvests: 2, sleep_us: 1500 };
            figures(&RingFigures { reaper, ..RingFigures::default() }, &[7])
        };
        let sleeping = of(ReaperState::Sleeping);
        assert_eq!(
            sleeping["reaper"],
            json!({ "state": "sleeping", "iterations": 5, "harvests": 2, "sleep_us": 1500 })
        );
        assert_eq!(sleeping["used"], json!([7]));
        let failed = of(ReaperState::Failed("planted".to_owned()));
        assert_eq!(
            (&failed["reaper"]["state"], &failed["reaper"]["error"]),
            (&json!("failed"), &json!("planted"))
        );
    }
}
