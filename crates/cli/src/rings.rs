//! What is told of a guest's dirty rings while it runs.

use serde_json::{Value, json};
use vmferry_vmm::VmHandle;

/// As in the document of a migration, and how full each vCPU's ring is now; `None` without rings.
pub(crate) fn describe(vm: &VmHandle) -> Option<Value> {
    let rings = vm.rings()?;
    let mut value = serde_json::to_value(rings.report().figures()).unwrap_or_else(|_| json!({}));
    value["used"] = json!(rings.used());
    Some(value)
}
