//! Guest memory: mappings of this process.

use crate::{Error, ProcessOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use vmferry_bitmap::Bitmap;
use vmferry_core::{Layout, PageRun, Region, RegionId, SharedRegion, Window};
use vmferry_dirty::{
    Backing, MappedRegion, Prealloc, available_memory, next_touched, populate, populate_all, touched,
};
use vmferry_engine::{GuestMemory, MappedMemory, VmError};
use vmferry_fault::PagedRegion;

/// Mapping that is unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    file: Option<Arc<OwnedFd>>,
}

// SAFETY: an address and a length; the bytes are reached through raw addresses and atomics only
// (`Memory`).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(region: &Region, options: &ProcessOptions) -> io::Result<Self> {
        let len = usize::try_from(region.len).map_err(io::Error::other)?;
        let (prot, hint) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let (start, file) = if options.memfd {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("vmferry-process", flags)?;
            ftruncate(&file, region.len)?;
            // A mapping of a file that another process has shortened would fault on access.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
            // SAFETY: a new mapping at an address of the kernel's choice, of a file that only this
            // process has.
            (unsafe { mmap(hint, len, prot, MapFlags::SHARED, &file, 0) }?, Some(Arc::new(file)))
        } else {
            // SAFETY: a new mapping at an address of the kernel's choice.
            (unsafe { mmap_anonymous(hint, len, prot, MapFlags::PRIVATE | MapFlags::NORESERVE) }?, None)
        };
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        let mapping = Self { start, len, file };
        if options.huge_pages {
            mapping.advise_huge();
        }
        Ok(mapping)
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
    regions: Vec<MappedRegion>,
    /// Regions after the memory was replaced by that of another process.
    taken: OnceLock<Vec<MappedRegion>>,
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
        let regions = layout.regions().iter().zip(&mappings).map(|(region, mapping)| MappedRegion {
            id: region.id,
            host: mapping.start.addr().get() as u64,
            len: region.len,
            backing: mapping
                .file
                .as_ref()
                .map_or(Backing::Anonymous, |file| Backing::Memfd { file: Arc::clone(file), offset: 0 }),
            marks: None,
            returned_pages: None,
        });
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
        let regions: Vec<_> = regions.collect();
        if options.prealloc == Prealloc::On && !populate_all(&regions, available_memory())? {
            tracing::warn!(
                "guest memory is not allocated in advance, because that needs Linux 5.14 or newer"
            );
        }
        let (taken, huge_pages, prealloc) = (OnceLock::new(), options.huge_pages, options.prealloc);
        Ok(Self { mapped, regions, taken, huge_pages, prealloc, mappings })
    }

    /// Returns the memory as memfds that another process can map.
    ///
    /// # Errors
    /// Returns an error if the memory is anonymous.
    pub(crate) fn shared(&self) -> Result<Vec<SharedRegion>, Error> {
        let shared = |mapped: &MappedRegion| match &mapped.backing {
            Backing::Memfd { file, offset } => {
                let (file, offset) = (Arc::clone(file), *offset);
                Ok(SharedRegion { region: mapped.id, len: mapped.len, file, offset })
            }
            _ => Err(Error::NotShared),
        };
        self.regions().iter().map(shared).collect()
    }

    /// Replaces the memory by that of another process, at the same addresses. The guest of this
    /// process must not have been loaded.
    ///
    /// # Errors
    /// Returns an error if the memory was replaced before, or if a file cannot be mapped.
    pub(crate) fn take(&self, shared: Vec<SharedRegion>) -> Result<(), Error> {
        if self.taken.get().is_some() {
            return Err(Error::WrongState { what: "take a guest's memory", why: "it was taken before" });
        }
        let replaced = |own: &MappedRegion| {
            let of = shared.iter().find(|shared| shared.region == own.id && shared.len == own.len);
            let SharedRegion { file, offset, .. } = of.ok_or(Error::OtherMemory(own.id))?;
            // SAFETY: `mappings` owns the range, no thread of a guest exists that writes it, and
            // all accesses are through raw addresses or atomics.
            unsafe {
                vmferry_sys::mapping::replace(own.host..own.host + own.len, file.as_fd(), *offset)?;
            }
            let backing = Backing::Memfd { file: Arc::clone(file), offset: *offset };
            Ok(MappedRegion { backing, ..own.clone() })
        };
        let regions = self.regions.iter().map(replaced).collect::<Result<_, Error>>()?;
        if self.huge_pages {
            self.mappings.iter().for_each(Mapping::advise_huge);
        }
        // Set once: this is checked above, and only the owner of the guest calls this.
        let _ = self.taken.set(regions);
        Ok(())
    }

    /// Returns the regions in the form that demand paging needs.
    pub(crate) fn paged_regions(&self) -> Vec<PagedRegion> {
        let backing = |backing: &Backing| match backing {
            Backing::Memfd { file, offset } => {
                vmferry_fault::Backing::Memfd { file: Arc::clone(file), offset: *offset }
            }
            _ => vmferry_fault::Backing::Anonymous,
        };
        let paged = |region: &MappedRegion| PagedRegion {
            id: region.id,
            host: region.host,
            len: region.len,
            backing: backing(&region.backing),
        };
        self.regions().iter().map(paged).collect()
    }

    /// Returns the regions in the form that dirty trackers need.
    pub(crate) fn regions(&self) -> &[MappedRegion] {
        self.taken.get().unwrap_or(&self.regions)
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
        let mapped = self.regions().iter().find(|own| own.id == region);
        let mapped = mapped.ok_or_else(|| VmError::new(format!("there is no {region}")))?;
        touched(mapped, run, into).map_err(VmError::new)
    }

    fn next_touched(&self, region: RegionId, run: PageRun) -> Result<Option<u64>, VmError> {
        let mapped = self.regions().iter().find(|own| own.id == region);
        let mapped = mapped.ok_or_else(|| VmError::new(format!("there is no {region}")))?;
        next_touched(mapped, run).map_err(VmError::new)
    }

    fn populate(&self, region: RegionId, run: PageRun) -> bool {
        let mapped = self.regions().iter().find(|own| own.id == region && self.prealloc == Prealloc::Auto);
        mapped.is_some_and(|mapped| populate(mapped, run).is_ok())
    }
}
