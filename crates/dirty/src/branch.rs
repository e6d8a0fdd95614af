//! Memory that a guest shares with its branches: files that each process maps privately.
//!
//! A memfd that is mapped shared becomes such a file when its owner maps it privately at the same
//! addresses ([`adopt`]) and seals it. The functions of this module change mappings of this
//! process, and leave it to the caller to update [`MappedRegion::backing`].

use crate::region::map_of;
use crate::{Backing, MappedRegion, TrackerError};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{BranchMemory, PageSet, RegionFile, RetiredMemory};
use vmferry_sys::mapping::{Retired, Sharing, move_entries, replace, replace_unused, unmap_pages};
use vmferry_sys::pagemap::{IS_FILE, IS_PRESENT, IS_SWAPPED, Match, PageRegion, Pagemap};

/// Number of bytes whose entries one call removes. During a call, KVM's MMU notifier keeps vCPUs
/// from handling faults.
const PART: u64 = 64 << 20;
/// Maximum number of runs that one scan returns.
const RUNS: usize = 2048;

/// Returns the files that hold the memory of `regions`, for a branch. For memory that is mapped
/// privately, also returns the pages that were written through the mapping.
///
/// # Errors
/// Returns [`TrackerError::NotShareable`] if a region has memory of another kind, and
/// [`TrackerError::Host`] if the kernel cannot scan the page table.
pub fn branch_memory(regions: &[MappedRegion]) -> Result<BranchMemory, TrackerError> {
    let file = |region: &MappedRegion| match &region.backing {
        Backing::Memfd { file, offset } | Backing::PrivateFile { file, offset } => {
            Ok(RegionFile { region: region.id, file: Arc::clone(file), offset: *offset })
        }
        Backing::Anonymous | Backing::Other => Err(TrackerError::NotShareable(region.id)),
    };
    let files = regions.iter().map(file).collect::<Result<Vec<_>, _>>()?;
    if regions.iter().all(|region| matches!(region.backing, Backing::Memfd { .. })) {
        return Ok(BranchMemory::Files { files, retired: RetiredMemory::new() });
    }
    let mut written = PageSet::of(regions.iter().map(|region| (region.id, region.pages())));
    for region in regions {
        let pages = map_of(&mut written, region.id, region.pages())?;
        match &region.backing {
            Backing::PrivateFile { .. } => private_pages(region, pages)?,
            // The mapping is shared, so the file has all pages. It can still change.
            _ => pages.set_range(0..region.pages()),
        }
    }
    Ok(BranchMemory::Changed { files, written })
}

/// Removes the entries of `regions` from the page tables of this process and of KVM, while the
/// guest runs. The files keep their pages, and an access maps a page again. Returns the old entries
/// of this process, for which the same holds as for the old mapping that [`adopt`] returns.
///
/// [`adopt`] moves page tables of the process at once, but KVM removes each of its own entries at
/// that time, and the guest is paused meanwhile. After this call, only the pages that the guest has
/// used since have entries. Guests without KVM do not need this call.
///
/// # Errors
/// Returns an error if the kernel refuses, for example because memory is locked.
///
/// # Safety
/// Regions with the backing [`Backing::Memfd`] are mapped shared, and no Rust reference covers
/// them. Other regions are not changed.
pub unsafe fn release_entries(regions: &[MappedRegion]) -> Result<Vec<Retired>, TrackerError> {
    let mut all = Vec::new();
    for region in regions.iter().filter(|region| matches!(region.backing, Backing::Memfd { .. })) {
        // SAFETY: a shared mapping; the caller guarantees the rest.
        if let Some(old) = unsafe { move_entries(region.span(), PART) } {
            all.push(old);
            continue;
        }
        let mut at = region.host;
        while at < region.span().end {
            let end = region.span().end.min(at + PART);
            // SAFETY: a part of a shared mapping; the caller guarantees the rest.
            unsafe { unmap_pages(at..end) }.map_err(TrackerError::host(region.id))?;
            at = end;
        }
    }
    Ok(all)
}

/// Replaces the mapping of `region` by a private mapping of `from`. Returns the new backing and the
/// old mapping.
///
/// # Errors
/// Returns an error if the kernel refuses. The mapping is then unchanged.
///
/// # Safety
/// The owner of the mapping permits the replacement, and no Rust reference covers the region. The
/// file has at least as many bytes from its offset on as the region, and no process changes or
/// shortens it while it is mapped.
pub unsafe fn adopt(
    region: &MappedRegion,
    from: &RegionFile,
) -> Result<(Backing, Option<Retired>), TrackerError> {
    // SAFETY: the caller guarantees the contract of this function.
    let old = unsafe { replace(region.span(), from.file.as_fd(), from.offset, Sharing::Private) };
    let old = old.map_err(TrackerError::host(region.id))?;
    Ok((Backing::PrivateFile { file: Arc::clone(&from.file), offset: from.offset }, old))
}

/// Replaces the mapping of `region` by a shared mapping of the memfd `file`, which is empty, and
/// returns the new backing. Afterwards, all pages of the region are zeros.
///
/// # Errors
/// Returns an error if the kernel refuses. The mapping is then unchanged, or, if the kernel has too
/// little memory, gone.
///
/// # Safety
/// The owner of the mapping permits the replacement, and no Rust reference covers the region. The
/// file has the length of the region.
pub unsafe fn renew(region: &MappedRegion, file: Arc<OwnedFd>) -> Result<Backing, TrackerError> {
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { replace_unused(region.span(), file.as_fd(), 0, Sharing::Shared) }
        .map_err(TrackerError::host(region.id))?;
    Ok(Backing::Memfd { file, offset: 0 })
}

/// Adds the pages of `region`, which is mapped privately, that may differ from its file because
/// they were written through the mapping.
fn private_pages(region: &MappedRegion, pages: &mut Bitmap) -> Result<(), TrackerError> {
    let private = Match { inverted: IS_FILE, all: IS_FILE, any: IS_PRESENT | IS_SWAPPED, ..Match::default() };
    let mut runs = vec![PageRegion::default(); RUNS];
    Pagemap::own()
        .and_then(|map| {
            map.for_each(region.span(), private, &mut runs, |run| {
                pages.set_range(region.pages_at(run.start..run.end));
            })
        })
        .map_err(TrackerError::host(region.id))?;
    Ok(())
}
