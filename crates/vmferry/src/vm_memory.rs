//! Guest memory that the crate `vm-memory` maps.
//!
//! [`VmMemory`] makes a `GuestMemoryMmap` available to the engine and to trackers. The VMM needs no
//! `unsafe` code for this, because `vm-memory` owns the mappings and reports their backing.
//!
//! ```
//! use vm_memory::bitmap::AtomicBitmap;
//! use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
//! use vmferry::vm_memory::VmMemory;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! let memory = VmMemory::new(memory)?;
//!
//! // A device writes through `vm-memory`, whose bitmap records the page. Trackers harvest that bitmap.
//! memory.memory().write_slice(b"packet", GuestAddress(0x3000))?;
//! let mut dirty = vmferry::bitmap::Bitmap::new(256);
//! memory.regions()[0].marks.as_ref().expect("marks").harvest(&mut dirty);
//! assert!(dirty.runs().eq([3..4]));
//! # Ok(()) }
//! ```

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use vm_memory::bitmap::{AtomicBitmap, Bitmap as DirtyBitmap};
use vm_memory::{FileOffset, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MmapRegion};
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    Gpa, GuestMemory, Layout, LayoutError, PAGE_SIZE, PageRun, Region, RegionId, VmError, Window,
};
use vmferry_dirty::{Backing, MappedRegion, Marks};

/// Reason why a `GuestMemoryMmap` cannot be used as guest memory in a migration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmMemoryError {
    /// The regions do not form a valid [`Layout`], for example because the length of a region is
    /// not a multiple of 4 KiB.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A region is not mapped readable and writable, or its mapping does not start at a page
    /// boundary.
    #[error("{region} is mapped with protection {prot:#x}; map it readable, writable and at a page boundary")]
    Mapping {
        /// Number of the region, counted from 0 in the order of guest-physical addresses.
        region: RegionId,
        /// Protection that `vm-memory` reports for the region (`PROT_*`).
        prot: i32,
    },
    /// The bitmap of a region does not have exactly one bit for each page of 4 KiB.
    #[error("{region} has {pages} pages and a bitmap of {bits}; make the bitmap with pages of 4 KiB")]
    Bitmap {
        /// Number of the region, counted from 0 in the order of guest-physical addresses.
        region: RegionId,
        /// Number of pages of the region.
        pages: u64,
        /// Number of bits of the bitmap.
        bits: u64,
    },
}

/// A `GuestMemoryMmap` that serves as guest memory in a migration.
///
/// Regions are numbered from 0 in the order of their guest-physical addresses. If you use a KVM
/// tracker, create one memory slot for each region, with the number of the region.
/// `vmferry::kvm::KvmVm` creates such slots.
///
/// The source neither reads nor sends a page that was never touched. [`GuestMemory::touched`]
/// detects such pages if `vm-memory` created the mapping, and if the memory is private anonymous
/// memory or a shared file on tmpfs, such as a memfd. In other memory, including explicit huge
/// pages (`MAP_HUGETLB`), every page counts as touched.
///
/// | bitmap `B` | constructor | writes of the VMM |
/// |---|---|---|
/// | `AtomicBitmap` | [`new`](VmMemory::new) | `vm-memory` records them, and trackers harvest its bitmap |
/// | `()` | [`without_marks`](VmMemory::without_marks) | not recorded. Use it for a VMM without devices, or with a tracker that detects all writes of the process (`WpTracker`) |
/// | another type | [`with_marks`](VmMemory::with_marks) | the [`Marks`] that the VMM provides record them |
///
/// A tracker clears the marks that it harvests. If the VMM also needs the marks itself, for example
/// for differential snapshots, set [`MappedRegion::returned_pages`] in the regions that you pass to
/// the tracker.
#[derive(Debug)]
pub struct VmMemory<B = ()> {
    memory: GuestMemoryMmap<B>,
    layout: Layout,
    /// Mapping of each region of `layout`, in its order.
    mappings: Vec<Arc<MmapRegion<B>>>,
    regions: Vec<MappedRegion>,
}

/// Bitmap of a mapping, as the marks of its region.
#[derive(Debug)]
struct BitmapMarks(Arc<MmapRegion<AtomicBitmap>>);

impl Marks for BitmapMarks {
    fn pages(&self) -> u64 {
        self.0.bitmap().len() as u64
    }

    fn harvest(&self, dirty: &mut Bitmap) {
        // `vm-memory` writes the bytes first and sets the mark afterwards. Both setting the mark
        // and this harvest are sequentially consistent.
        dirty.union_words(&self.0.bitmap().get_and_reset());
    }
}

impl VmMemory<AtomicBitmap> {
    /// Creates guest memory from `memory`, whose bitmaps record the pages that the VMM writes.
    ///
    /// # Errors
    /// Returns [`VmMemoryError`] if a region cannot be moved, or if its bitmap does not have
    /// exactly one bit for each page of 4 KiB.
    pub fn new(memory: GuestMemoryMmap<AtomicBitmap>) -> Result<Self, VmMemoryError> {
        Self::with_marks(memory, |mapping| Some(Arc::new(BitmapMarks(Arc::clone(mapping)))))
    }
}

impl<B: DirtyBitmap + Send + Sync + 'static> VmMemory<B> {
    /// Creates guest memory from `memory` without recording the writes of the VMM.
    ///
    /// # Errors
    /// Returns [`VmMemoryError`] if a region cannot be moved.
    pub fn without_marks(memory: GuestMemoryMmap<B>) -> Result<Self, VmMemoryError> {
        Self::with_marks(memory, |_| None)
    }

    /// Creates guest memory from `memory`, with [`Marks`] that the caller provides.
    ///
    /// `marks` is called with the mapping of each region. It returns the [`Marks`] that record the
    /// pages which the VMM writes in this region, or `None` if these writes are not recorded.
    ///
    /// # Errors
    /// Returns [`VmMemoryError`] if a region cannot be moved, or if its marks do not cover exactly
    /// the pages of the region.
    pub fn with_marks(
        memory: GuestMemoryMmap<B>,
        marks: impl Fn(&Arc<MmapRegion<B>>) -> Option<Arc<dyn Marks>>,
    ) -> Result<Self, VmMemoryError> {
        // Open the pagemap now, because confined threads cannot open it later.
        vmferry_dirty::prepare();
        let (mut layout, mut mappings, mut regions) = (Vec::new(), Vec::new(), Vec::new());
        for (number, region) in (0..).zip(memory.iter()) {
            let (id, mapping) = (RegionId(number), region.get_mmap());
            let len = region.len();
            layout.push(Region { id, gpa: Gpa(region.start_addr().0), len });
            let mapped = mapped(id, &mapping, marks(&mapping))?;
            mappings.push(mapping);
            regions.push(mapped);
        }
        Ok(Self { memory, layout: Layout::new(layout)?, mappings, regions })
    }

    /// Returns the underlying `GuestMemoryMmap`, for device models and loaders.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap<B> {
        &self.memory
    }

    /// Returns the regions in the order of their guest-physical addresses, for trackers such as
    /// `WpTracker`.
    #[must_use]
    pub fn regions(&self) -> &[MappedRegion] {
        &self.regions
    }

    /// Returns the marks of region `id`, for `vmferry::kvm::KvmVm`. Returns `None` if there is no
    /// such region, or if its writes are not recorded.
    #[must_use]
    pub fn marks(&self, id: RegionId) -> Option<Arc<dyn Marks>> {
        self.layout.position(id).and_then(|at| self.regions[at].marks.clone())
    }

    /// Creates demand paging for this memory, which postcopy and on-demand restores need. Return
    /// the result from [`TargetVm::demand_paging`].
    ///
    /// [`TargetVm::demand_paging`]: vmferry_core::TargetVm::demand_paging
    ///
    /// # Errors
    /// Returns an error if this host does not support demand paging for this memory, or if a region
    /// is neither private anonymous memory nor a shared file on tmpfs that `vm-memory` mapped.
    #[cfg(feature = "fault")]
    pub fn demand_paging(
        self: &Arc<Self>,
        options: &vmferry_fault::UffdOptions,
    ) -> Result<vmferry_fault::UffdMemory, VmError> {
        let regions: Result<Vec<_>, VmError> = self.regions.iter().map(paged).collect();
        // SAFETY: this value owns the mappings. Their backing is as declared: `mapped` trusts a
        // mapping only if `vm-memory` has created it. `vm-memory` and this module access the bytes
        // by volatile and atomic accesses only.
        let memory = unsafe { vmferry_fault::UffdMemory::new(regions?, Arc::clone(self) as _, options) };
        memory.map_err(VmError::new)
    }

    /// Returns the index of region `id` in the layout, or an error if the region does not contain
    /// all pages of `run`.
    fn position(&self, id: RegionId, run: PageRun) -> Result<usize, VmError> {
        let position = self.layout.position(id).filter(|at| run.end() <= self.layout.regions()[*at].pages());
        position.ok_or_else(|| VmError::new(format!("{id} has no {run}")))
    }
}

impl<B: DirtyBitmap + Send + Sync + 'static> GuestMemory for VmMemory<B> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        let position = self.position(region, run)?;
        let (Ok(offset), Ok(len)) = (usize::try_from(run.first.offset()), usize::try_from(run.bytes()))
        else {
            return Err(VmError::new(format!("{run} is too long for this host")));
        };
        let start = NonNull::new(self.mappings[position].as_ptr());
        let start = start.ok_or_else(|| VmError::new(format!("{region} is mapped at address 0")))?;
        // SAFETY: `run` lies within the mapping, which is mapped for the whole length of the
        // region.
        let start = unsafe { start.add(offset) };
        // SAFETY: the mapping is readable and writable (`mapped` checked it) and lives as long as
        // `self`. `vm-memory` creates no references to guest bytes, except references to atomics.
        Ok(unsafe { Window::new(start, len) })
    }

    fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
        let position = self.position(region, run)?;
        Ok(vmferry_dirty::touched(&self.regions[position], run, touched)?)
    }

    fn next_touched(&self, region: RegionId, run: PageRun) -> Result<Option<u64>, VmError> {
        let position = self.position(region, run)?;
        Ok(vmferry_dirty::next_touched(&self.regions[position], run)?)
    }

    /// Populates private anonymous memory and files on tmpfs. Other memory may have pages that the
    /// host allocates at a high price, such as blocks of a file on a disk.
    fn populate(&self, region: RegionId, run: PageRun) -> bool {
        let known = |position: &usize| !matches!(self.regions[*position].backing, Backing::Other);
        let position = self.position(region, run).ok().filter(known);
        position.is_some_and(|position| vmferry_dirty::populate(&self.regions[position], run).is_ok())
    }
}

/// Returns the mapping of region `id` in the form that trackers use.
fn mapped<B: DirtyBitmap>(
    id: RegionId,
    mapping: &MmapRegion<B>,
    marks: Option<Arc<dyn Marks>>,
) -> Result<MappedRegion, VmMemoryError> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let (host, len) = (mapping.as_ptr().expose_provenance() as u64, mapping.size() as u64);
    if mapping.prot() & access != access || !host.is_multiple_of(PAGE_SIZE) {
        return Err(VmMemoryError::Mapping { region: id, prot: mapping.prot() });
    }
    let pages = len / PAGE_SIZE;
    if let Some(bits) = marks.as_deref().map(Marks::pages).filter(|bits| *bits != pages) {
        return Err(VmMemoryError::Bitmap { region: id, pages, bits });
    }
    Ok(MappedRegion { id, host, len, backing: backing(mapping), marks, returned_pages: None })
}

/// Returns the backing of a mapping, or [`Backing::Other`] if it is not known for certain.
fn backing<B: DirtyBitmap>(mapping: &MmapRegion<B>) -> Backing {
    let (flags, kind) = (mapping.flags(), mapping.flags() & libc::MAP_TYPE);
    if !mapping.owned() || flags & libc::MAP_HUGETLB != 0 {
        return Backing::Other;
    }
    match mapping.file_offset() {
        None if kind == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0 => Backing::Anonymous,
        Some(file) if kind == libc::MAP_SHARED => tmpfs(file).unwrap_or(Backing::Other),
        _ => Backing::Other,
    }
}

/// Returns the backing of `file` if the file is on tmpfs, which reports its written pages.
fn tmpfs(file: &FileOffset) -> Option<Backing> {
    let found = rustix::fs::fstatfs(file.file()).ok()?;
    if found.f_type != libc::TMPFS_MAGIC {
        return None;
    }
    let own = OwnedFd::from(file.file().try_clone().ok()?);
    Some(Backing::Memfd { file: Arc::new(own), offset: file.start() })
}

#[cfg(feature = "fault")]
fn paged(region: &MappedRegion) -> Result<vmferry_fault::PagedRegion, VmError> {
    let backing = match &region.backing {
        Backing::Anonymous => vmferry_fault::Backing::Anonymous,
        Backing::Memfd { file, offset } => {
            vmferry_fault::Backing::Memfd { file: Arc::clone(file), offset: *offset }
        }
        Backing::PrivateFile { .. } | Backing::Other => {
            let why =
                format!("{} is neither anonymous memory nor a file on tmpfs; move it by precopy", region.id);
            return Err(VmError::new(why));
        }
    };
    Ok(vmferry_fault::PagedRegion { id: region.id, host: region.host, len: region.len, backing })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{Bytes, GuestAddress, GuestRegionMmap};
    use vmferry_core::{PAGE_BYTES, PageIndex};

    const HIGH: u64 = 4 << 30;

    fn memfd(len: u64) -> File {
        let file = File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len).unwrap();
        file
    }

    fn touched<B: DirtyBitmap + Send + Sync + 'static>(memory: &VmMemory<B>, id: u32) -> Vec<u64> {
        let region = *memory.layout().region(RegionId(id)).unwrap();
        let mut pages = Bitmap::new(region.pages());
        memory.touched(region.id, region.run(), &mut pages).unwrap();
        pages.runs().flatten().collect()
    }

    #[test]
    fn only_pages_that_were_written_are_touched() {
        let ranges = [
            (GuestAddress(0), 16 * PAGE_BYTES, None),
            (GuestAddress(HIGH), 8 * PAGE_BYTES, Some(FileOffset::new(memfd(64 << 12), 4 << 12))),
        ];
        let memory = GuestMemoryMmap::<()>::from_ranges_with_files(ranges).unwrap();
        let memory = VmMemory::without_marks(memory).unwrap();
        assert!(matches!(memory.regions()[0].backing, Backing::Anonymous));
        assert!(matches!(memory.regions()[1].backing, Backing::Memfd { offset: 0x4000, .. }));
        assert!(touched(&memory, 0).is_empty() && touched(&memory, 1).is_empty());
        memory.memory().write_slice(&[1; 2], GuestAddress(0x2fff)).unwrap();
        memory.memory().write_slice(&[1; 2], GuestAddress(HIGH + 0x7000)).unwrap();
        assert_eq!((touched(&memory, 0), touched(&memory, 1)), (vec![2, 3], vec![7]));
        assert!(memory.marks(RegionId(0)).is_none());
    }

    #[test]
    fn memory_of_unknown_backing_counts_as_touched() {
        let file = memfd(1 << 20);
        let private = MmapRegionBuilder::<()>::new(4 * PAGE_BYTES)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE)
            .with_file_offset(FileOffset::new(file, 0))
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(private, GuestAddress(0)).unwrap();
        let memory = VmMemory::without_marks(GuestMemoryMmap::from_regions(vec![region]).unwrap()).unwrap();
        assert_eq!(touched(&memory, 0), [0, 1, 2, 3]);
    }

    // The crate for skipped tests is a dependency only on this architecture.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn only_memory_of_known_backing_is_populated() {
        if vmferry_testkit::skip_if_emulated("MADV_POPULATE_WRITE") {
            return;
        }
        let ranges = [
            (GuestAddress(0), 16 * PAGE_BYTES, None),
            (GuestAddress(HIGH), 8 * PAGE_BYTES, Some(FileOffset::new(memfd(64 << 12), 4 << 12))),
        ];
        let memory = GuestMemoryMmap::<()>::from_ranges_with_files(ranges).unwrap();
        let memory = VmMemory::without_marks(memory).unwrap();
        let run = |first, count| PageRun { first: PageIndex(first), count };
        assert!(memory.populate(RegionId(0), run(3, 4)) && memory.populate(RegionId(1), run(7, 1)));
        assert_eq!((touched(&memory, 0), touched(&memory, 1)), (vec![3, 4, 5, 6], vec![7]));
        for (id, run) in [(0, run(15, 2)), (1, run(u64::MAX, 1)), (2, run(0, 1))] {
            assert!(!memory.populate(RegionId(id), run), "{id} has no {run}");
        }
        let region = MmapRegionBuilder::<()>::new(4 * PAGE_BYTES)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE)
            .with_file_offset(FileOffset::new(memfd(1 << 20), 0))
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
        let memory = VmMemory::without_marks(GuestMemoryMmap::from_regions(vec![region]).unwrap()).unwrap();
        assert!(!memory.populate(RegionId(0), run(0, 4)), "the backing is unknown");
    }

    #[test]
    fn writes_through_vm_memory_are_marked_once() {
        let ranges = [(GuestAddress(0), 100 * PAGE_BYTES), (GuestAddress(HIGH), 70 * PAGE_BYTES)];
        let memory = VmMemory::new(GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap()).unwrap();
        memory.memory().write_slice(&[1; PAGE_BYTES + 1], GuestAddress(0x5000)).unwrap();
        memory
            .memory()
            .store(7u64, GuestAddress(HIGH + (69 << 12)), std::sync::atomic::Ordering::Release)
            .unwrap();
        let harvest = |id: u32| {
            let marks = memory.marks(RegionId(id)).unwrap();
            let mut pages = Bitmap::new(marks.pages());
            marks.harvest(&mut pages);
            pages.runs().flatten().collect::<Vec<_>>()
        };
        assert_eq!((harvest(0), harvest(1)), (vec![5, 6], vec![69]));
        assert!(harvest(0).is_empty() && harvest(1).is_empty());
        assert!(memory.marks(RegionId(2)).is_none());
    }

    #[test]
    fn windows_show_the_writes_of_vm_memory_within_their_region() {
        let ranges = [(GuestAddress(0), 4 * PAGE_BYTES), (GuestAddress(HIGH), 2 * PAGE_BYTES)];
        let memory = VmMemory::without_marks(GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap()).unwrap();
        memory.memory().write_slice(&[9], GuestAddress(HIGH + 0x1000)).unwrap();
        let run = |first, count| PageRun { first: PageIndex(first), count };
        let mut page = [0; PAGE_BYTES];
        assert!(!memory.window(RegionId(1), run(1, 1)).unwrap().copy_page(0, &mut page));
        assert_eq!(page[0], 9);
        memory.window(RegionId(0), run(3, 1)).unwrap().write_page(0, &page);
        assert_eq!(memory.memory().read_obj::<u8>(GuestAddress(0x3000)).unwrap(), 9);
        for (id, run) in [(0, run(3, 2)), (1, run(u64::MAX, 1)), (2, run(0, 1))] {
            assert!(memory.window(RegionId(id), run).is_err());
            assert!(memory.touched(RegionId(id), run, &mut Bitmap::new(4)).is_err());
        }
    }

    #[test]
    fn memory_that_cannot_be_moved_is_refused() {
        let read_only = MmapRegionBuilder::<()>::new(PAGE_BYTES)
            .with_mmap_prot(libc::PROT_READ)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(read_only, GuestAddress(0)).unwrap();
        let error =
            VmMemory::without_marks(GuestMemoryMmap::from_regions(vec![region]).unwrap()).unwrap_err();
        assert!(matches!(error, VmMemoryError::Mapping { prot: libc::PROT_READ, .. }), "{error}");

        let part = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), PAGE_BYTES + 512)]).unwrap();
        assert!(matches!(VmMemory::without_marks(part), Err(VmMemoryError::Layout(_))));

        let coarse = AtomicBitmap::new(4 * PAGE_BYTES, std::num::NonZeroUsize::new(2 * PAGE_BYTES).unwrap());
        let coarse = MmapRegionBuilder::new_with_bitmap(4 * PAGE_BYTES, coarse)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(coarse, GuestAddress(0)).unwrap();
        let error = VmMemory::new(GuestMemoryMmap::from_regions(vec![region]).unwrap()).unwrap_err();
        assert!(matches!(error, VmMemoryError::Bitmap { pages: 4, bits: 2, .. }), "{error}");
    }

    #[cfg(feature = "fault")]
    #[test]
    fn demand_paging_needs_memory_whose_backing_is_known() {
        use vmferry_fault::{UffdOptions, VcpuThreads};
        let file = memfd(1 << 20);
        let private = MmapRegionBuilder::<()>::new(PAGE_BYTES)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE)
            .with_file_offset(FileOffset::new(file, 0))
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(private, GuestAddress(0)).unwrap();
        let memory = VmMemory::without_marks(GuestMemoryMmap::from_regions(vec![region]).unwrap()).unwrap();
        let error =
            Arc::new(memory).demand_paging(&UffdOptions::new(Arc::new(VcpuThreads::new(1)))).unwrap_err();
        assert!(error.to_string().contains("move it by precopy"), "{error}");
    }
}
