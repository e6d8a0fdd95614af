//! Guest memory: mappings of this process.

use crate::{Error, ProcessOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use vmferry_bitmap::Bitmap;
use vmferry_core::{BranchMemory, Layout, PageRun, Region, RegionFile, RegionId, RetiredMemory, Window};
use vmferry_dirty::{
    Backing, MappedRegion, Prealloc, TrackerError, adopt, available_memory, branch_memory, map_pages,
    next_touched, populate, populate_all, renew, touched,
};
use vmferry_engine::{GuestMemory, MappedMemory, VmError};
use vmferry_fault::PagedRegion;

/// Mapping that is unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; the bytes are reached through raw addresses and atomics only
// (`Memory`).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a region. Returns the mapping and the memfd behind it, if there is one.
    fn new(region: &Region, options: &ProcessOptions) -> io::Result<(Self, Option<OwnedFd>)> {
        let len = usize::try_from(region.len).map_err(io::Error::other)?;
        let (prot, hint) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let (start, file) = if options.memfd {
            let file = memfd_create("vmferry-process", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, region.len)?;
            // A mapping of a shrunken file would fault on access.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
            // SAFETY: a new mapping at an address of the kernel's choice, of a file that only this
            // process has.
            (unsafe { mmap(hint, len, prot, MapFlags::SHARED, &file, 0) }?, Some(file))
        } else {
            // SAFETY: a new mapping at an address of the kernel's choice.
            (unsafe { mmap_anonymous(hint, len, prot, MapFlags::PRIVATE | MapFlags::NORESERVE) }?, None)
        };
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        let mapping = Self { start, len };
        if options.huge_pages {
            mapping.advise_huge();
        }
        Ok((mapping, file))
    }

    fn advise_huge(&self) {
        // SAFETY: advice on our own mapping; it changes no content.
        let advised = unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::warn!("no transparent huge pages for the guest: {error}");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; `Memory` owns the mapping and outlives all users of its address.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// All memory of the guest.
#[derive(Debug)]
pub(crate) struct Memory {
    mapped: MappedMemory,
    /// Regions as they are mapped. Their backing changes when the guest is branched.
    regions: RwLock<Vec<MappedRegion>>,
    huge_pages: bool,
    prealloc: Prealloc,
    // Last field: dropped after everything that points into the mappings.
    mappings: Vec<Mapping>,
}

impl Memory {
    pub(crate) fn new(options: &ProcessOptions) -> Result<Self, Error> {
        let layout = options.layout()?;
        vmferry_dirty::prepare();
        let failed = |source| Error::Map { bytes: options.memory, source };
        let map = |region: &Region| Mapping::new(region, options).map_err(failed);
        let mappings = layout.regions().iter().map(map).collect::<Result<Vec<_>, _>>()?;
        let (mappings, files): (Vec<_>, Vec<_>) = mappings.into_iter().unzip();
        let each = layout.regions().iter().zip(&mappings).zip(files);
        let regions = each.map(|((region, mapping), file)| MappedRegion {
            id: region.id,
            host: mapping.start.addr().get() as u64,
            len: region.len,
            backing: file
                .map_or(Backing::Anonymous, |file| Backing::Memfd { file: Arc::new(file), offset: 0 }),
            marks: None,
            returned_pages: None,
        });
        let regions: Vec<_> = regions.collect();
        let starts: Vec<_> = layout
            .regions()
            .iter()
            .zip(&mappings)
            .map(|(region, mapping)| (*region, mapping.start))
            .collect();
        // SAFETY: the mappings live in `mappings`, which is dropped last; all accesses are through
        // raw addresses (engine, tracker) or atomics (`Ram`, the statistics page).
        let mapped =
            unsafe { MappedMemory::new(&starts) }.map_err(|error| Error::Options(error.to_string()))?;
        if options.prealloc == Prealloc::On && !populate_all(&regions, available_memory())? {
            tracing::warn!(
                "guest memory is not allocated in advance, because that needs Linux 5.14 or newer"
            );
        }
        let (huge_pages, prealloc) = (options.huge_pages, options.prealloc);
        Ok(Self { mapped, regions: RwLock::new(regions), huge_pages, prealloc, mappings })
    }

    /// Returns the regions in the form that demand paging needs.
    ///
    /// # Errors
    /// Returns an error if the memory belongs to a branch, whose pages are never missing.
    pub(crate) fn paged_regions(&self) -> Result<Vec<PagedRegion>, VmError> {
        let shared = |region: &&MappedRegion| matches!(region.backing, Backing::PrivateFile { .. });
        if let Some(region) = self.regions().iter().find(shared) {
            let why = format!("the memory of {} is shared with a branch of the guest", region.id);
            return Err(VmError::new(why));
        }
        Ok(self.protected_regions())
    }

    /// Returns the regions in the form that write protection needs.
    pub(crate) fn protected_regions(&self) -> Vec<PagedRegion> {
        let protected = |region: &MappedRegion| {
            let backing = match &region.backing {
                Backing::Anonymous => vmferry_fault::Backing::Anonymous,
                // For the kernel, a private mapping of a memfd is a mapping of tmpfs, too.
                Backing::Memfd { file, offset } | Backing::PrivateFile { file, offset } => {
                    vmferry_fault::Backing::Memfd { file: Arc::clone(file), offset: *offset }
                }
                Backing::Other => unreachable!("a process guest has no such memory"),
            };
            PagedRegion { id: region.id, host: region.host, len: region.len, backing }
        };
        self.regions().iter().map(protected).collect()
    }

    /// Returns the regions in the form that dirty trackers need.
    pub(crate) fn regions(&self) -> RwLockReadGuard<'_, Vec<MappedRegion>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the files that hold the memory, for a branch of the guest.
    ///
    /// # Errors
    /// Returns an error if the memory is not a memfd.
    pub(crate) fn branch_memory(&self) -> Result<BranchMemory, VmError> {
        branch_memory(&self.regions()).map_err(|error| match error {
            TrackerError::NotShareable(_) => VmError::new(
                "anonymous guest memory cannot be shared with a branch; start the guest with a memfd as its memory",
            ),
            error => error.into(),
        })
    }

    /// Replaces the memory by private mappings of `from`.
    ///
    /// # Errors
    /// Returns an error if a region is missing in `from`, or if the host refuses a mapping. Each
    /// region then has its old or its new mapping.
    pub(crate) fn adopt(&self, from: &[RegionFile]) -> Result<RetiredMemory, VmError> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = regions.iter().find(|region| from.iter().all(|from| from.region != region.id)) {
            return Err(VmError::new(format!("the branch has no memory for {}", region.id)));
        }
        let mut retired = RetiredMemory::new();
        for region in regions.iter_mut() {
            let Some(from) = from.iter().find(|from| from.region == region.id) else { continue };
            // SAFETY: `mappings` owns the mapping; all accesses are through raw addresses or
            // atomics, which the new mapping also has. The engine has checked length and seals of
            // the file, or this process owns it.
            let (backing, old) = unsafe { adopt(region, from) }?;
            region.backing = backing;
            retired.push(old);
        }
        Ok(retired)
    }

    /// Returns the memory as memfds that another process can map.
    ///
    /// # Errors
    /// Returns an error if the memory is anonymous, or shared with a branch.
    pub(crate) fn shared(&self) -> Result<Vec<RegionFile>, Error> {
        let shared = |mapped: &MappedRegion| match &mapped.backing {
            Backing::Memfd { file, offset } => {
                let (file, offset) = (Arc::clone(file), *offset);
                Ok(RegionFile { region: mapped.id, file, offset })
            }
            Backing::PrivateFile { .. } => Err(Error::Branched),
            Backing::Anonymous | Backing::Other => Err(Error::NotShared),
        };
        self.regions().iter().map(shared).collect()
    }

    /// Replaces the memory by that of another process, at the same addresses. The guest of this
    /// process must not have been loaded.
    ///
    /// # Errors
    /// Returns an error if a file does not fit or cannot be mapped. Each region then has its old or
    /// its new mapping.
    pub(crate) fn take(&self, shared: &[RegionFile]) -> Result<(), Error> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        for own in regions.iter_mut() {
            let fits = |from: &&RegionFile| from.region == own.id && from.offset == 0;
            let from = shared.iter().find(fits).ok_or(Error::OtherMemory(own.id))?;
            // SAFETY: `mappings` owns the range, no thread of a guest exists that writes it, and
            // all accesses are through raw addresses or atomics. The engine has checked length and
            // seals of the file.
            own.backing = unsafe { renew(own, Arc::clone(&from.file)) }?;
        }
        if self.huge_pages {
            self.mappings.iter().for_each(Mapping::advise_huge);
        }
        Ok(())
    }

    /// Returns the address of the first byte of the region at `position` of the layout, and its
    /// length in bytes.
    pub(crate) fn span(&self, position: usize) -> (NonNull<u8>, usize) {
        (self.mappings[position].start, self.mappings[position].len)
    }
}

impl GuestMemory for Memory {
    fn layout(&self) -> &Layout {
        self.mapped.layout()
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        self.mapped.window(region, run)
    }

    fn touched(&self, region: RegionId, run: PageRun, into: &mut Bitmap) -> Result<(), VmError> {
        let regions = self.regions();
        let mapped = regions.iter().find(|own| own.id == region);
        let mapped = mapped.ok_or_else(|| VmError::new(format!("there is no {region}")))?;
        touched(mapped, run, into).map_err(VmError::new)
    }

    fn next_touched(&self, region: RegionId, run: PageRun) -> Result<Option<u64>, VmError> {
        let regions = self.regions();
        let mapped = regions.iter().find(|own| own.id == region);
        let mapped = mapped.ok_or_else(|| VmError::new(format!("there is no {region}")))?;
        next_touched(mapped, run).map_err(VmError::new)
    }

    fn populate(&self, region: RegionId, run: PageRun) -> bool {
        let regions = self.regions();
        let mapped = regions.iter().find(|own| own.id == region && self.prealloc == Prealloc::Auto);
        mapped.is_some_and(|mapped| populate(mapped, run).is_ok())
    }

    fn map_pages(&self, region: RegionId, run: PageRun) -> bool {
        // A branch in its pause waits for the lock of the regions, so the lock is not held while
        // pages are read.
        let mapped = self.regions().iter().find(|own| own.id == region).cloned();
        mapped.is_some_and(|mapped| map_pages(&mapped, run).is_ok())
    }
}
