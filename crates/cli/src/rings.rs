//! State of a guest's dirty rings while the guest runs.

use serde_json::{Value, json};
use vmferry_vmm::VmHandle;

/// Returns the figures of the migration report, and the entries in use of each vCPU's ring; `None`
/// without rings.
pub(crate) fn describe(vm: &VmHandle) -> Option<Value> {
    let rings = vm.rings()?;
    let mut value = serde_json::to_value(rings.report().figures()).unwrap_or_else(|_| json!({}));
    value["used"] = json!(rings.used());
    Some(value)
}
