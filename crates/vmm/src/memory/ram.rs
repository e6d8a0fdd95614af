//! RAM of a guest.

use super::mapping::{Behind, HUGETLBFS_MAGIC, Mapping, MemoryError, memfd};
use super::marks::WriteMarks;
use crate::options::VmOptions;
use rustix::fs::MemfdFlags;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    BranchMemory, Gpa, Layout, PAGE_BYTES, PageRun, Region, RegionFile, RegionId, RetiredMemory, Window,
};
use vmferry_dirty::{Backing, MappedRegion, Prealloc, TrackerError};
use vmferry_engine::{GuestMemory, VmError};
use vmferry_fault::PagedRegion;

/// Region of RAM and its mapping.
#[derive(Debug)]
pub struct RamRegion {
    region: Region,
    mapping: Mapping,
    marks: WriteMarks,
}

impl RamRegion {
    /// Returns the region in the form that trackers need.
    #[must_use]
    pub fn mapped(&self) -> MappedRegion {
        let backing = match (self.mapping.backing(), self.mapping.behind()) {
            (_, Behind::Anonymous) => Backing::Anonymous,
            (crate::Backing::HugePages, _) => Backing::Other,
            (_, Behind::Shared(file)) => Backing::Memfd { file, offset: 0 },
            (_, Behind::Private { file, offset }) => Backing::PrivateFile { file, offset },
        };
        MappedRegion {
            id: self.region.id,
            host: self.host_address(),
            len: self.region.len,
            backing,
            marks: Some(self.marks.bitmap()),
            returned_pages: None,
        }
    }

    /// Returns the region in the form that demand paging needs.
    ///
    /// # Errors
    /// Returns an error if the memory belongs to a branch, whose pages are never missing.
    pub(crate) fn paged(&self) -> Result<PagedRegion, VmError> {
        if matches!(self.mapping.behind(), Behind::Private { .. }) {
            let why = format!("the memory of {} is shared with a branch of the guest", self.region.id);
            return Err(VmError::new(why));
        }
        Ok(self.protected())
    }

    /// Returns the region in the form that write protection needs.
    pub(crate) fn protected(&self) -> PagedRegion {
        use vmferry_fault::Backing;
        let backing = match (self.mapping.backing(), self.mapping.behind()) {
            (_, Behind::Anonymous) => Backing::Anonymous,
            (crate::Backing::HugePages, Behind::Shared(file)) => Backing::HugeMemfd { file, offset: 0 },
            (_, Behind::Shared(file)) => Backing::Memfd { file, offset: 0 },
            // For the kernel, a private mapping of a memfd is a mapping of tmpfs, too.
            (_, Behind::Private { file, offset }) => Backing::Memfd { file, offset },
        };
        PagedRegion { id: self.region.id, host: self.host_address(), len: self.region.len, backing }
    }

    /// Returns the memory behind the mapping.
    pub(crate) fn behind(&self) -> Behind {
        self.mapping.behind()
    }

    /// Replaces the mapping by a private mapping of `from`.
    fn adopt(&self, from: &RegionFile, retired: &mut RetiredMemory) -> Result<(), MemoryError> {
        let (mapped, backing) = (self.mapped(), self.mapping.backing());
        self.mapping.change(|| {
            // SAFETY: this region owns the mapping; this crate makes no references to guest bytes
            // other than to atomics, which the new mapping also has. The engine has checked length
            // and seals of the file, or the caller owns it.
            let (_, old) = unsafe { vmferry_dirty::adopt(&mapped, from) }.map_err(MemoryError::Branch)?;
            retired.push(old);
            Ok((backing, Behind::Private { file: Arc::clone(&from.file), offset: from.offset }))
        })
    }

    /// Replaces a private mapping by new memory, which is zeros.
    pub(super) fn renew(&self) -> Result<(), MemoryError> {
        let (mapped, len, backing) = (self.mapped(), self.region.len, self.mapping.backing());
        self.mapping.change(|| {
            let file = memfd(len, MemfdFlags::empty());
            let file = Arc::new(file.map_err(|source| MemoryError::Map { len, backing, source })?);
            // SAFETY: as in `adopt`; the file is new and has the length of the region.
            unsafe { vmferry_dirty::renew(&mapped, Arc::clone(&file)) }.map_err(MemoryError::Branch)?;
            Ok((backing, Behind::Shared(file)))
        })
    }

    /// Replaces the memory by `file`, the memory of another process. The file must have the length
    /// of the region, and must be sealed against shrinking.
    ///
    /// # Safety
    /// No thread writes the memory during the call.
    unsafe fn take(&self, file: Arc<OwnedFd>) -> Result<(), MemoryError> {
        let failed = |why: String| MemoryError::Take { region: self.region.id, why };
        let fs = rustix::fs::fstatfs(&file).map_err(|error| failed(error.to_string()))?;
        let huge = fs.f_type == rustix::fs::FsWord::from(HUGETLBFS_MAGIC);
        let backing = if huge { crate::Backing::HugePages } else { crate::Backing::Memfd };
        let mapped = self.mapped();
        self.mapping.change(|| {
            // SAFETY: as in `adopt`; the caller guarantees the length of the file, and that no
            // thread writes the memory.
            unsafe { vmferry_dirty::renew(&mapped, Arc::clone(&file)) }
                .map_err(|error| failed(error.to_string()))?;
            Ok((backing, Behind::Shared(file)))
        })
    }

    /// Returns the address of the mapping in this process, as a number.
    #[must_use]
    pub fn host_address(&self) -> u64 {
        self.mapping.start().addr().get() as u64
    }

    /// Returns the region's ID, guest-physical address and length.
    #[must_use]
    pub fn region(&self) -> Region {
        self.region
    }

    /// Returns the address of the mapping in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// Returns the file that is mapped, if there is one.
    #[must_use]
    pub fn file(&self) -> Option<Arc<OwnedFd>> {
        match self.mapping.behind() {
            Behind::Anonymous => None,
            Behind::Shared(file) | Behind::Private { file, .. } => Some(file),
        }
    }

    /// Returns the backing of the memory.
    #[must_use]
    pub fn backing(&self) -> crate::Backing {
        self.mapping.backing()
    }

    /// Returns the marks of pages that the VMM itself wrote.
    #[must_use]
    pub fn marks(&self) -> &WriteMarks {
        &self.marks
    }
}

/// RAM of a guest, mapped in this process.
#[derive(Debug)]
pub struct GuestRam {
    layout: Layout,
    // Views of the mappings below. They own nothing, so the order in which the fields are dropped
    // does not matter.
    map: GuestMemoryMmap<WriteMarks>,
    regions: Vec<RamRegion>,
    huge_pages: bool,
    prealloc: Prealloc,
    notes: Vec<String>,
}

impl GuestRam {
    /// Maps the RAM that `options` describe.
    ///
    /// # Errors
    /// Returns a [`MemoryError`] if the host refuses.
    pub fn new(options: &VmOptions) -> Result<Self, MemoryError> {
        let layout = super::layout_for(options.memory)?;
        vmferry_dirty::prepare();
        let (mut regions, mut notes) = (Vec::new(), Vec::new());
        for region in layout.regions() {
            let mapping = Mapping::new(region.len, options.backing)?;
            if options.huge_pages
                && options.backing != crate::Backing::HugePages
                && let Err(error) = mapping.advise_huge()
            {
                notes.push(format!("{}: no huge pages ({error}); the guest runs on 4 KiB pages", region.id));
            }
            regions.push(RamRegion { region: *region, mapping, marks: WriteMarks::new(region.pages()) });
        }
        if options.prealloc == Prealloc::On {
            notes.extend(allocate(&regions)?);
        }
        let map = view(&regions)?;
        let (huge_pages, prealloc) = (options.huge_pages, options.prealloc);
        Ok(Self { layout, map, regions, huge_pages, prealloc, notes })
    }

    /// Returns the RAM as memfds that another process can map.
    ///
    /// # Errors
    /// Returns [`MemoryError::NotShared`] if the memory is anonymous, and [`MemoryError::Branched`]
    /// if the guest has branches or is one.
    pub(crate) fn shared(&self) -> Result<Vec<RegionFile>, MemoryError> {
        let shared = |ram: &RamRegion| match ram.behind() {
            Behind::Shared(file) => Ok(RegionFile { region: ram.region.id, file, offset: 0 }),
            Behind::Anonymous => Err(MemoryError::NotShared),
            Behind::Private { .. } => Err(MemoryError::Branched),
        };
        self.regions.iter().map(shared).collect()
    }

    /// Replaces the RAM by memory that another process shares, at the same addresses.
    ///
    /// # Errors
    /// Returns [`MemoryError::Take`] if a file cannot be mapped. Some regions may have been
    /// replaced.
    ///
    /// # Safety
    /// No thread writes the RAM during the call, and no guest runs on it.
    pub(crate) unsafe fn take(&self, regions: Vec<RegionFile>) -> Result<(), MemoryError> {
        for RegionFile { region, file, offset } in regions {
            let failed = |why: String| MemoryError::Take { region, why };
            let ram = self.region(region).filter(|_| offset == 0);
            let ram = ram.ok_or_else(|| failed("it must begin at the start of a file of its own".into()))?;
            // SAFETY: guaranteed by the caller.
            unsafe { ram.take(file) }?;
            if self.huge_pages && ram.backing() != crate::Backing::HugePages {
                // Without the advice, the guest only runs on smaller pages.
                let _ = ram.mapping.advise_huge();
            }
        }
        Ok(())
    }

    /// Returns the layout of the RAM.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the regions with their mappings, by guest-physical address.
    #[must_use]
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    /// Returns the memory in the form that device models and loaders use. Writes through it mark
    /// the written pages.
    #[must_use]
    pub fn map(&self) -> &GuestMemoryMmap<WriteMarks> {
        &self.map
    }

    /// Returns true if huge pages were requested.
    #[must_use]
    pub fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// Returns a sentence for each property that the host refused and that the RAM does without.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the region with ID `id`.
    #[must_use]
    pub fn region(&self, id: RegionId) -> Option<&RamRegion> {
        self.regions.iter().find(|r| r.region.id == id)
    }

    /// Returns a window on the bytes of `run`, which the guest may change at any time.
    ///
    /// # Errors
    /// Returns [`MemoryError::NotRam`] if region `id` has no such pages.
    pub fn window(&self, id: RegionId, run: PageRun) -> Result<Window<'_>, MemoryError> {
        let not_ram = || MemoryError::NotRam { what: format!("{id}, {run}") };
        let ram = self.region(id).ok_or_else(not_ram)?;
        if run.end() > ram.region.pages() {
            return Err(not_ram());
        }
        let (Ok(offset), Ok(len)) = (usize::try_from(run.first.offset()), usize::try_from(run.bytes()))
        else {
            return Err(not_ram());
        };
        // SAFETY: `run` lies within the mapping (checked above), so the sum does not leave it.
        let start = unsafe { ram.mapping.start().add(offset) };
        // SAFETY: the mapping is readable and writable and lives as long as `self`, which the
        // window borrows; this crate makes no reference to guest bytes other than to atomics.
        Ok(unsafe { Window::new(start, len) })
    }

    /// Returns the address in this process of the `len` bytes at the guest-physical address `gpa`.
    ///
    /// # Errors
    /// Returns [`MemoryError::NotRam`] if the bytes are not all in one region.
    pub fn host_range(&self, gpa: Gpa, len: usize) -> Result<NonNull<u8>, MemoryError> {
        let end = gpa.0.checked_add(len as u64);
        let ram = self
            .regions
            .iter()
            .find(|r| gpa.0 >= r.region.gpa.0 && end.is_some_and(|end| end <= r.region.gpa.0 + r.region.len));
        let ram = ram.ok_or_else(|| MemoryError::NotRam { what: format!("{len} bytes at {gpa}") })?;
        let offset = usize::try_from(gpa.0 - ram.region.gpa.0).unwrap_or(usize::MAX);
        // SAFETY: `gpa..gpa + len` lies within the region (found above), so the offset lies within
        // its mapping.
        Ok(unsafe { ram.mapping.start().add(offset) })
    }
}

impl GuestRam {
    /// Returns the regions in the form that trackers need.
    pub(crate) fn mapped(&self) -> Vec<MappedRegion> {
        self.regions.iter().map(RamRegion::mapped).collect()
    }

    /// Returns the files that hold the memory, for a branch of the guest, and lets KVM forget which
    /// of their pages the guest has used.
    ///
    /// # Errors
    /// Returns [`MemoryError::NotShareable`] for memory that is not a memfd.
    pub(crate) fn branch_memory(&self) -> Result<BranchMemory, MemoryError> {
        let mapped = self.mapped();
        let mut memory = vmferry_dirty::branch_memory(&mapped).map_err(|error| match error {
            TrackerError::NotShareable(id) => {
                let backing = self.region(id).map(RamRegion::backing).unwrap_or_default();
                MemoryError::NotShareable { backing }
            }
            error => MemoryError::Branch(error),
        })?;
        // SAFETY: the backing is as stated; this crate makes no references to guest bytes other
        // than to atomics.
        let old = unsafe { vmferry_dirty::release_entries(&mapped) }.map_err(MemoryError::Branch)?;
        if let BranchMemory::Files { retired, .. } = &mut memory {
            retired.push(old);
        }
        Ok(memory)
    }

    /// Replaces the memory by private mappings of `regions`.
    ///
    /// # Errors
    /// Returns an error if a region is missing in `regions`, or if the host refuses a mapping. Each
    /// region then has its old or its new mapping.
    pub(crate) fn adopt(&self, regions: &[RegionFile]) -> Result<RetiredMemory, MemoryError> {
        if let Some(ram) = self.regions.iter().find(|ram| ram.backing() == crate::Backing::HugePages) {
            return Err(MemoryError::NotShareable { backing: ram.backing() });
        }
        let pairs: Vec<_> = self
            .regions
            .iter()
            .map(|ram| {
                let id = ram.region.id;
                let from = regions.iter().find(|from| from.region == id).ok_or(MemoryError::NoBranch(id))?;
                Ok::<_, MemoryError>((ram, from))
            })
            .collect::<Result<_, _>>()?;
        let mut retired = RetiredMemory::new();
        pairs.into_iter().try_for_each(|(ram, from)| ram.adopt(from, &mut retired))?;
        Ok(retired)
    }
}

impl GuestMemory for GuestRam {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        Self::window(self, region, run).map_err(VmError::new)
    }

    fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
        let not_ram = || VmError::new(MemoryError::NotRam { what: region.to_string() });
        let ram = self.region(region).ok_or_else(not_ram)?;
        Ok(vmferry_dirty::touched(&ram.mapped(), run, touched)?)
    }

    fn next_touched(&self, region: RegionId, run: PageRun) -> Result<Option<u64>, VmError> {
        let not_ram = || VmError::new(MemoryError::NotRam { what: region.to_string() });
        let ram = self.region(region).ok_or_else(not_ram)?;
        Ok(vmferry_dirty::next_touched(&ram.mapped(), run)?)
    }

    fn populate(&self, region: RegionId, run: PageRun) -> bool {
        let ram = self.region(region).filter(|_| self.prealloc == Prealloc::Auto);
        ram.is_some_and(|ram| vmferry_dirty::populate(&ram.mapped(), run).is_ok())
    }

    fn map_pages(&self, region: RegionId, run: PageRun) -> bool {
        self.region(region).is_some_and(|ram| vmferry_dirty::map_pages(&ram.mapped(), run).is_ok())
    }
}

/// Allocates all memory of `regions`. Returns a note if the kernel cannot.
fn allocate(regions: &[RamRegion]) -> Result<Option<String>, MemoryError> {
    let mapped: Vec<_> = regions.iter().map(RamRegion::mapped).collect();
    // Huge pages of the host's pool are reserved when they are mapped. They do not count as
    // available memory.
    let pool = regions.iter().any(|ram| ram.backing() == crate::Backing::HugePages);
    let available = if pool { None } else { vmferry_dirty::available_memory() };
    let allocated = vmferry_dirty::populate_all(&mapped, available)?;
    let why = "guest memory is not allocated in advance, because that needs Linux 5.14 or newer";
    Ok((!allocated).then(|| why.to_owned()))
}

/// Returns the mappings as `vm-memory` sees them, without owning them.
fn view(regions: &[RamRegion]) -> Result<GuestMemoryMmap<WriteMarks>, MemoryError> {
    let not_mapped = |ram: &RamRegion, why: MmapRegionError| MemoryError::NotRam {
        what: format!("{} ({why})", ram.region.id),
    };
    let mut views = Vec::new();
    for ram in regions {
        let len = usize::try_from(ram.region.len).unwrap_or(usize::MAX);
        debug_assert!(len.is_multiple_of(PAGE_BYTES));
        let builder = MmapRegionBuilder::new_with_bitmap(len, ram.marks.clone())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_NORESERVE);
        // SAFETY: the mapping has `len` bytes, and lives in the same `GuestRam` as this view of it.
        let mapped = unsafe { builder.with_raw_mmap_pointer(ram.mapping.start().as_ptr()) }.build();
        let mapped = mapped.map_err(|error| not_mapped(ram, error))?;
        let view = GuestRegionMmap::new(mapped, GuestAddress(ram.region.gpa.0));
        views.push(view.ok_or_else(|| not_mapped(ram, MmapRegionError::InvalidOffsetLength))?);
    }
    GuestMemoryMmap::from_regions(views).map_err(|error| MemoryError::NotRam { what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;
    use vmferry_core::PageIndex;

    fn ram(memory: u64) -> GuestRam {
        GuestRam::new(&VmOptions::new(memory, 1)).unwrap()
    }

    #[test]
    fn writes_of_the_vmm_are_visible_through_windows_and_marked() {
        let ram = ram(8 << 20);
        ram.map().write_slice(&[1, 2, 3], GuestAddress(0x2fff)).unwrap();
        let window = ram.window(RegionId(0), PageRun::new(PageIndex(2), 2)).unwrap();
        let mut page = [0; PAGE_BYTES];
        assert!(!window.copy_page(0, &mut page));
        assert_eq!(page[PAGE_BYTES - 1], 1);
        window.copy_page(1, &mut page);
        assert_eq!(page[..2], [2, 3]);
        let mut marked = vmferry_bitmap::Bitmap::new(2048);
        ram.regions()[0].marks().bitmap().harvest(&mut marked);
        assert!(marked.runs().eq(std::iter::once(2..4)));
    }

    #[test]
    fn memory_is_taken_at_the_same_address() {
        let options = |backing| {
            let mut options = VmOptions::new((3 << 30) + (8 << 20), 1);
            options.backing = backing;
            options
        };
        let source = GuestRam::new(&options(crate::Backing::Memfd)).unwrap();
        let target = GuestRam::new(&options(crate::Backing::Anonymous)).unwrap();
        assert!(matches!(target.shared(), Err(MemoryError::NotShared)));
        let high = GuestAddress(4 << 30);
        source.map().write_slice(&[5], high).unwrap();
        let before: Vec<_> = target.regions().iter().map(RamRegion::host).collect();
        // SAFETY: only this thread knows the memory.
        unsafe { target.take(source.shared().unwrap()) }.unwrap();
        assert!(target.regions().iter().map(RamRegion::host).eq(before));
        assert_eq!(target.map().read_obj::<u8>(high).unwrap(), 5);
        target.map().write_slice(&[6], high).unwrap();
        assert_eq!(source.map().read_obj::<u8>(high).unwrap(), 6);
        assert!(target.regions().iter().all(|ram| ram.backing() == crate::Backing::Memfd));
        drop(source);
        assert_eq!(target.map().read_obj::<u8>(high).unwrap(), 6);
        assert_eq!(target.shared().unwrap().len(), 2);
    }

    #[test]
    fn range_outside_ram_is_an_error() {
        let ram = ram(4 << 20);
        assert!(ram.window(RegionId(0), PageRun::new(PageIndex(1023), 1)).is_ok());
        for run in [
            PageRun::new(PageIndex(1023), 2),
            PageRun::new(PageIndex(u64::MAX), 1),
            PageRun::new(PageIndex(0), u64::MAX),
        ] {
            assert!(ram.window(RegionId(0), run).is_err(), "{run}");
        }
        assert!(ram.window(RegionId(1), PageRun::new(PageIndex(0), 1)).is_err());
        assert!(ram.host_range(Gpa((4 << 20) - 1), 1).is_ok());
        assert!(ram.host_range(Gpa((4 << 20) - 1), 2).is_err());
        assert!(ram.host_range(Gpa(u64::MAX), 1).is_err());
    }

    #[test]
    fn guest_beyond_the_hole_has_two_regions() {
        let ram = ram((3 << 30) + (4 << 20));
        assert_eq!(ram.regions().len(), 2);
        ram.map().write_slice(&[9], GuestAddress(4 << 30)).unwrap();
        let mut page = [0; PAGE_BYTES];
        ram.window(RegionId(1), PageRun::new(PageIndex(0), 1)).unwrap().copy_page(0, &mut page);
        assert_eq!(page[0], 9);
        assert!(ram.map().write_slice(&[9], GuestAddress(3 << 30)).is_err());
    }
}
