//! Capabilities (capabilities(7)): given up, but for what is named.
//!
//! They belong to threads. The bounding, inheritable and ambient sets go first, while there is one thread, and all later ones have what is
//! left; the rest goes from each thread as it begins, and from the first one when everything is opened that needs them.

use crate::report::Measure;
use caps::{CapSet, Capability, CapsHashSet};

/// A capability that stays, and what for.
pub type Kept = (Capability, &'static str);

/// Leaves nothing that could come back: what is not in `kept` is out of reach of this thread and of those that it starts.
pub(crate) fn narrow(kept: &[Kept]) -> Result<(), String> {
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

/// Gives up all but `kept` on the calling thread.
pub(crate) fn give_up(kept: &[Kept]) -> Result<(), String> {
    let failed = |error: caps::errors::CapsError| error.to_string();
    let has = caps::read(None, CapSet::Permitted).map_err(failed)?;
    let stays: CapsHashSet = set(kept).intersection(&has).copied().collect();
    if has == stays {
        return Ok(());
    }
    caps::set(None, CapSet::Effective, &stays).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &stays).map_err(failed)
}

/// In words, once they are given up.
pub(crate) fn describe(kept: &[Kept]) -> Measure {
    let has = caps::read(None, CapSet::Permitted).unwrap_or_default();
    let stays: Vec<_> = kept.iter().filter(|(capability, _)| has.contains(capability)).collect();
    if stays.is_empty() {
        return Measure::there("none is left");
    }
    let stays: Vec<_> = stays.iter().map(|(capability, why)| format!("{capability} {why}")).collect();
    Measure::there(format!("all are given up but {}", stays.join(", ")))
}

fn set(kept: &[Kept]) -> CapsHashSet {
    kept.iter().map(|(capability, _)| *capability).collect()
}
