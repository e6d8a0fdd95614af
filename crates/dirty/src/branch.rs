//! Memory that a guest shares with its branches: files that each process maps privately.
//!
//! A memfd that is mapped shared becomes such a file when its owner maps it privately at the same
//! addresses ([`adopt`]) and seals it. The functions of this module change mappings of this
//! process, and leave it to the caller to update [`MappedRegion::backing`].

use crate::{Backing, MappedRegion, TrackerError};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmferry_core::BranchRegion;
use vmferry_sys::mapping::{Sharing, replace, unmap_pages};
use vmferry_sys::pagemap::{IS_FILE, IS_PRESENT, IS_SWAPPED, Match, Pagemap};

/// Number of bytes whose entries one call removes. During a call, other threads of the process wait
/// for page faults, and KVM's MMU notifier keeps vCPUs from handling faults.
const PART: u64 = 64 << 20;
/// Time of a pass after which another pass would remove hardly fewer entries.
const SHORT: Duration = Duration::from_millis(1);
/// Maximum number of passes of [`release_entries`].
const MOST_PASSES: u32 = 4;

/// Returns the file of a region that is mapped shared, for a branch. Returns `None` for memory of
/// other kinds.
#[must_use]
pub fn branch_region(region: &MappedRegion) -> Option<BranchRegion> {
    match &region.backing {
        Backing::Memfd { file, offset } => {
            Some(BranchRegion { id: region.id, file: Arc::clone(file), offset: *offset })
        }
        Backing::Anonymous | Backing::PrivateFile { .. } | Backing::Other => None,
    }
}

/// Removes the page-table entries of `regions`, which are mapped shared, while the guest runs. The
/// files keep their pages, and an access maps a page again.
///
/// Replacing a mapping takes time for each of its entries, and the guest is paused meanwhile.
/// After this call, only the pages that the guest has used since have entries. The function makes
/// several passes, because the guest uses pages during a pass, and a later pass is shorter.
///
/// # Errors
/// Returns an error if the kernel refuses, for example because memory is locked.
///
/// # Safety
/// Each region is a shared mapping of a file, as its backing says, and no Rust reference covers it.
pub unsafe fn release_entries(regions: &[MappedRegion]) -> Result<(), TrackerError> {
    for _ in 0..MOST_PASSES {
        let began = Instant::now();
        for region in regions.iter().filter(|region| matches!(region.backing, Backing::Memfd { .. })) {
            let mut at = region.host;
            while at < region.span().end {
                let end = region.span().end.min(at + PART);
                // SAFETY: a part of a shared mapping; the caller guarantees the rest.
                unsafe { unmap_pages(at..end) }.map_err(TrackerError::host(region.id))?;
                at = end;
            }
        }
        if began.elapsed() < SHORT {
            break;
        }
    }
    Ok(())
}

/// Replaces the mapping of `region` by a private mapping of `from`, and returns the new backing.
///
/// # Errors
/// Returns an error if the kernel refuses. The mapping is then unchanged.
///
/// # Safety
/// The owner of the mapping permits the replacement, and no Rust reference covers the region. The
/// file has at least as many bytes from its offset on as the region, and no process changes or
/// shortens it while it is mapped.
pub unsafe fn adopt(region: &MappedRegion, from: &BranchRegion) -> Result<Backing, TrackerError> {
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { replace(region.span(), from.file.as_fd(), from.offset, Sharing::Private) }
        .map_err(TrackerError::host(region.id))?;
    Ok(Backing::PrivateFile { file: Arc::clone(&from.file), offset: from.offset })
}

/// Replaces the mapping of `region` by a shared mapping of the memfd `file`, which is empty, and
/// returns the new backing. Afterwards, all pages of the region are zeros.
///
/// # Errors
/// Returns an error if the kernel refuses. The mapping is then unchanged.
///
/// # Safety
/// The owner of the mapping permits the replacement, and no Rust reference covers the region. The
/// file has the length of the region.
pub unsafe fn renew(region: &MappedRegion, file: Arc<OwnedFd>) -> Result<Backing, TrackerError> {
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { replace(region.span(), file.as_fd(), 0, Sharing::Shared) }
        .map_err(TrackerError::host(region.id))?;
    Ok(Backing::Memfd { file, offset: 0 })
}

/// Returns true if `region`, which is mapped privately, has pages that differ from its file because
/// they were written through the mapping.
///
/// # Errors
/// Returns an error if the kernel cannot scan the page table.
pub fn has_private_pages(region: &MappedRegion) -> Result<bool, TrackerError> {
    let private =
        Match { inverted: IS_FILE, all: IS_FILE, any: IS_PRESENT | IS_SWAPPED, report: 0, protect: false };
    let first = Pagemap::own().and_then(|map| map.first(&region.span(), private));
    Ok(first.map_err(TrackerError::host(region.id))?.is_some())
}
