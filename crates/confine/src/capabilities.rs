//! Capabilities (capabilities(7)), of which the process gives up all except those that the plan
//! names.
//!
//! Capabilities belong to threads. The bounding, inheritable and ambient sets are reduced first,
//! while the process has only one thread, so that later threads inherit the reduced sets. Each
//! later thread reduces its permitted and effective sets at its start. The first thread reduces
//! them after it has opened everything that needs a capability. A process that enters a jail
//! reduces them when it changes its user.

use crate::report::Measure;
use caps::{CapSet, Capability, CapsHashSet};

/// Capability that the process keeps, and its purpose for the report.
pub type KeptCapability = (Capability, &'static str);

/// Removes the capabilities that are not in `kept` from the bounding set, and empties the ambient
/// and inheritable sets. The calling thread and the threads that it starts cannot regain them.
pub(crate) fn narrow(kept: &[KeptCapability]) -> Result<(), String> {
    let failed = |error: caps::errors::CapsError| error.to_string();
    let keep = set(kept);
    caps::clear(None, CapSet::Ambient).map_err(failed)?;
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).map_err(failed)? {
        for capability in caps::runtime::thread_all_supported() {
            if !keep.contains(&capability) {
                caps::drop(None, CapSet::Bounding, capability).map_err(failed)?;
            }
        }
    }
    caps::clear(None, CapSet::Inheritable).map_err(failed)
}

/// Gives up all capabilities of the calling thread except those in `kept`. Those that the thread
/// keeps are effective afterwards.
pub(crate) fn give_up(kept: &[KeptCapability]) -> Result<(), String> {
    let failed = |error: caps::errors::CapsError| error.to_string();
    let has = caps::read(None, CapSet::Permitted).map_err(failed)?;
    let stays: CapsHashSet = set(kept).intersection(&has).copied().collect();
    if has == stays && caps::read(None, CapSet::Effective).map_err(failed)? == stays {
        return Ok(());
    }
    caps::set(None, CapSet::Effective, &stays).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &stays).map_err(failed)
}

/// Returns true if the calling thread has a capability with which it can read every file, or if its
/// capabilities are unknown.
pub(crate) fn reach_all_files() -> bool {
    let any = [Capability::CAP_DAC_OVERRIDE, Capability::CAP_DAC_READ_SEARCH];
    let none = |has: CapsHashSet| any.iter().all(|one| !has.contains(one));
    !caps::read(None, CapSet::Effective).is_ok_and(none)
}

/// Returns a description of the capabilities that are left after the others were given up.
pub(crate) fn describe(kept: &[KeptCapability]) -> Measure {
    let has = caps::read(None, CapSet::Permitted).unwrap_or_default();
    let stays: Vec<_> = kept.iter().filter(|(capability, _)| has.contains(capability)).collect();
    if stays.is_empty() {
        return Measure::in_force("no capability is left");
    }
    let stays: Vec<_> = stays.iter().map(|(capability, why)| format!("{capability} {why}")).collect();
    Measure::in_force(format!("no capability is left except {}", stays.join(", ")))
}

fn set(kept: &[KeptCapability]) -> CapsHashSet {
    kept.iter().map(|(capability, _)| *capability).collect()
}
