//! Guest memory with missing pages.

use crate::discard::discard;
use crate::error::FaultError;
use crate::events::{Shards, Touch};
use crate::huge::{BLOCK_PAGES, Blocks, block_of};
use crate::placing::{Source, fill_part, map_huge_page};
use crate::region::{Backing, PagedRegion};
use crate::shards::{ShardMap, ShardedRegion};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use vmferry_core::{DemandPaging, Fault, PAGE_SIZE, PageIndex, PageRun, PageSet, Placed, RegionId, VmError};
use vmferry_sys::uffd::{
    FEATURE_MINOR_HUGETLBFS, FEATURE_MISSING_HUGETLBFS, FEATURE_MISSING_SHMEM, FEATURE_THREAD_ID,
};
use vmferry_sys::{PAGE_SIZE as SYS_PAGE, mapping, memfd, pagemap};
use vmferry_thread::VcpuThreads;

const _: () = assert!(SYS_PAGE == PAGE_SIZE);

/// Options of [`UffdMemory`] and of [`UffdProtection`](crate::UffdProtection).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UffdOptions {
    /// Number of shards, from 1 to 16. A number outside this range is replaced by the nearest
    /// limit. The faults of each shard are read separately.
    pub shards: usize,
    /// True if only user-mode code of this process accesses the memory. Use `false` for a KVM
    /// guest, because KVM accesses its memory, and for device models that pass guest memory to
    /// system calls such as `readv`. With `false`, faults of the kernel are received too, for which
    /// the process needs a permission: the sysctl `vm.unprivileged_userfaultfd`, access to
    /// `/dev/userfaultfd`, or `CAP_SYS_PTRACE`.
    pub user_mode_only: bool,
    /// True to enable transparent huge pages for the memory after demand paging has ended. They are
    /// disabled when demand paging begins.
    pub huge_pages: bool,
    /// Table of the vCPU threads, from which the vCPU of a fault is determined.
    pub threads: Arc<VcpuThreads>,
}

impl UffdOptions {
    /// Returns the default options for a guest with the vCPU threads `threads`: one shard for each
    /// available CPU but at most 4, faults of the kernel are received, and huge pages stay disabled
    /// after demand paging.
    #[must_use]
    pub fn new(threads: Arc<VcpuThreads>) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { shards: cpus.min(4), user_mode_only: false, huge_pages: false, threads }
    }
}

/// Guest memory that is mapped in this process and supports demand paging, so that its pages may be
/// missing.
#[derive(Debug)]
pub struct UffdMemory {
    /// Not dropped while a guest runs with missing pages. Closing a userfaultfd wakes the threads
    /// that wait for a page, and they would read zeros.
    shards: ManuallyDrop<Shards>,
    map: ShardMap,
    /// Regions in the order in which they were given.
    regions: Vec<PagedRegion>,
    /// Huge pages of each region in `regions`, or `None` if the region is not made of huge pages.
    blocks: Vec<Option<Blocks>>,
    /// For each region in `regions`, true if the kernel can place zeros in it.
    zeroable: Vec<AtomicBool>,
    huge_pages: bool,
    threads: Arc<VcpuThreads>,
    /// State of demand paging. The path of a fault does not use it: `begin`, `started` and `end`
    /// write it, and threads that read guest memory and must not sleep lock it for reading
    /// ([`UffdMemory::read_if_present`]).
    begun: RwLock<Faults>,
    /// Keeps the mappings alive. It is dropped after everything else, or, like `shards`, never.
    _owner: ManuallyDrop<Arc<dyn Any + Send + Sync>>,
}

/// State of demand paging, which decides if an access to a missing page waits for the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Faults {
    Off,
    /// An access waits. The guest has not been started.
    On,
    /// An access waits. The guest runs, and its vCPUs have short time slices.
    OfGuest,
}

impl UffdMemory {
    /// Prepares demand paging for `regions`. The content and the mapping of the regions do not
    /// change before [`begin`](DemandPaging::begin).
    ///
    /// # Errors
    /// Returns [`FaultError::Unavailable`] if the kernel does not support demand paging for these
    /// regions, or if this user lacks the permission; the error then says how to grant it. Returns
    /// [`FaultError::Regions`] if the regions cannot be the memory of one guest, and
    /// [`FaultError::Alias`] if huge pages cannot be mapped a second time.
    ///
    /// # Safety
    /// As long as `owner` lives, the regions are mapped at the given addresses and have the given
    /// backing. No Rust reference covers their bytes, except references to atomics: the content may
    /// be dropped and replaced.
    pub unsafe fn new(
        regions: Vec<PagedRegion>,
        owner: Arc<dyn Any + Send + Sync>,
        options: &UffdOptions,
    ) -> Result<Self, FaultError> {
        let count = Shards::number(options.shards);
        let map = ShardMap::new(&regions, count)?;
        let features = regions.iter().fold(FEATURE_THREAD_ID, |features, region| {
            features
                | match region.backing {
                    Backing::Anonymous => 0,
                    Backing::Memfd { .. } => FEATURE_MISSING_SHMEM,
                    Backing::HugeMemfd { .. } => FEATURE_MISSING_HUGETLBFS | FEATURE_MINOR_HUGETLBFS,
                }
        });
        let shards = Shards::open(count, features, options.user_mode_only, FaultError::Unavailable)?;
        Ok(Self {
            shards: ManuallyDrop::new(shards),
            map,
            blocks: regions.iter().map(Blocks::new).collect::<Result<_, FaultError>>()?,
            zeroable: regions.iter().map(|_| AtomicBool::new(false)).collect(),
            regions,
            huge_pages: options.huge_pages,
            threads: Arc::clone(&options.threads),
            begun: RwLock::new(Faults::Off),
            _owner: ManuallyDrop::new(owner),
        })
    }

    /// Calls `read` if all pages of `run` are present, keeps them present until `read` returns, and
    /// returns its result. Returns `None` if a page is missing or the state of the pages is
    /// unknown.
    ///
    /// Use this function in a thread that reads guest memory and must not sleep (hazards.md 18). A
    /// present page stays present, because only `begin` drops pages, and `begin` waits for `read`.
    /// In a memfd of small pages, a page is present if the file has it. The first access through
    /// this mapping may then raise a fault, but the kernel resolves it without this crate.
    pub fn read_if_present<T>(&self, region: RegionId, run: PageRun, read: impl FnOnce() -> T) -> Option<T> {
        let begun = self.begun.read().unwrap_or_else(PoisonError::into_inner);
        let present = *begun == Faults::Off || self.present(region, run).unwrap_or(false);
        present.then(read)
    }

    /// Calls `change` if no page can be missing, prevents the begin of demand paging until `change`
    /// returns, and returns its result. Returns `None` between `begin` and `end`.
    pub fn if_complete<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let begun = self.begun.read().unwrap_or_else(PoisonError::into_inner);
        (*begun == Faults::Off).then(change)
    }

    /// Returns true if demand paging is active and no thread is waiting for its faults. A thread
    /// that has read a fault and is placing the page does not count as waiting, so a single result
    /// proves little.
    pub(crate) fn is_unserved(&self) -> bool {
        let begun = *self.begun.read().unwrap_or_else(PoisonError::into_inner);
        begun != Faults::Off && self.shards.is_unserved()
    }

    fn present(&self, id: RegionId, run: PageRun) -> Result<bool, FaultError> {
        let place = self.map.with_pages(id, run)?;
        let mut found = 0;
        match &self.regions[place.position].backing {
            // The mapping may lack a page that the file of huge pages has. An access to that page
            // would be a fault that this crate handles.
            Backing::Anonymous | Backing::HugeMemfd { .. } => {
                let map = pagemap::Pagemap::own().map_err(FaultError::host(id))?;
                map.for_each_populated_entry(place.span(run), |pages| found += pages.end - pages.start)
                    .map_err(FaultError::host(id))?;
            }
            Backing::Memfd { file, offset } => {
                let start = offset + run.first.offset();
                memfd::data_ranges(file.as_fd(), start..start + run.bytes(), |data| {
                    found += data.end - data.start;
                })
                .map_err(FaultError::host(id))?;
            }
        }
        Ok(found >= run.bytes())
    }

    fn check(&self, missing: &PageSet) -> Result<(), FaultError> {
        for (id, bits) in missing.iter() {
            let place = self.map.region(id)?;
            if bits.len() != place.pages {
                return Err(FaultError::Length { region: id, have: place.pages, bits: bits.len() });
            }
        }
        Ok(())
    }

    /// Prepares the memory so that the pages of `missing` are missing.
    ///
    /// The order matters (hazards.md 17). First forbid huge pages, because a huge page that the
    /// kernel makes of a few placed pages would fill the missing pages between them with zeros.
    /// Then register the memory, so that every later access to a missing page waits. Only then drop
    /// the pages, because a page that is accessed after it was dropped and before it is registered
    /// would be present as zeros.
    fn prepare(&self, missing: &PageSet) -> Result<(), FaultError> {
        for place in self.map.regions() {
            let host = FaultError::host(place.id);
            mapping::allow_huge_pages(place.span(place.all()), false).or_else(no_such_thing).map_err(host)?;
        }
        for place in self.map.regions() {
            let mut zeroable = true;
            for (shard, part) in self.map.parts(place, place.all()) {
                let uffd = self.shards.uffd(shard);
                let registered = match self.blocks[place.position] {
                    Some(_) => uffd.register_unmapped(place.span(part)),
                    None => uffd.register_missing(place.span(part)),
                };
                zeroable &= registered.map_err(FaultError::host(place.id))?.zero;
            }
            self.zeroable[place.position].store(zeroable, Ordering::Relaxed);
        }
        for (id, bits) in missing.iter() {
            let place = self.map.region(id)?;
            // SAFETY: the caller of `new` keeps the mappings and guarantees their backing and that
            // no reference covers them. The caller of `begin` wants the pages to be missing.
            unsafe {
                match &self.blocks[place.position] {
                    Some(blocks) => blocks.begin(place, bits)?,
                    None => discard(&self.regions[place.position], place, bits)?,
                }
            }
        }
        Ok(())
    }

    /// Unregisters all memory, as far as the host permits, and returns the first error. Sleeping
    /// threads wake.
    fn release(&self) -> Result<(), FaultError> {
        let mut result = Ok(());
        for place in self.map.regions() {
            if let Some(blocks) = &self.blocks[place.position] {
                result = result.and(blocks.end());
            }
            for (shard, part) in self.map.parts(place, place.all()) {
                let done = self.shards.uffd(shard).unregister(place.span(part));
                result = result.and(done.map_err(FaultError::host(place.id)));
            }
            if self.huge_pages {
                let allowed = mapping::allow_huge_pages(place.span(place.all()), true).or_else(no_such_thing);
                result = result.and(allowed.map_err(FaultError::host(place.id)));
            }
        }
        result
    }

    fn fault(&self, shard: usize, touch: Touch) -> Result<Fault, FaultError> {
        let (place, page) = self.map.locate(touch.address).ok_or(FaultError::Stray(touch.address))?;
        debug_assert_eq!(self.map.shard(place, page.0), shard);
        Ok(Fault { region: place.id, page, write: touch.write, vcpu: self.threads.vcpu(touch.thread) })
    }

    /// Places `run`, which lies in `place`, page by page from `source`.
    fn fill(&self, place: &ShardedRegion, run: PageRun, source: Source<'_>) -> Result<Placed, FaultError> {
        if let Some(blocks) = &self.blocks[place.position] {
            let bytes = if let Source::Bytes(bytes) = source { Some(bytes) } else { None };
            return blocks.place(run, bytes, |block| {
                map_huge_page(self.shards.uffd(self.map.shard(place, block.first.0)), place, block)
            });
        }
        let mut placed = Placed::default();
        for (shard, part) in self.map.parts(place, run) {
            let uffd = self.shards.uffd(shard);
            let source = source.part(run, part);
            fill_part(uffd, place, part, source, &mut placed)?;
        }
        Ok(placed)
    }
}

/// Ignores the error of a kernel without transparent huge pages, because there is nothing to
/// forbid.
fn no_such_thing(error: vmferry_sys::SysError) -> Result<(), vmferry_sys::SysError> {
    if error.errno() == Some(libc::EINVAL) { Ok(()) } else { Err(error) }
}

impl DemandPaging for UffdMemory {
    fn shards(&self) -> usize {
        self.map.count()
    }

    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize {
        self.map.region(region).map_or(0, |place| self.map.shard(place, page.0))
    }

    fn unit_pages(&self, region: RegionId) -> u64 {
        match self.map.region(region) {
            Ok(place) if self.blocks[place.position].is_some() => BLOCK_PAGES,
            _ => 1,
        }
    }

    fn begin(&self, missing: &PageSet) -> Result<(), VmError> {
        let mut begun = self.begun.write().unwrap_or_else(PoisonError::into_inner);
        if *begun != Faults::Off {
            return Err(FaultError::Begun.into());
        }
        self.check(missing)?;
        if let Err(error) = self.prepare(missing) {
            // Unregister the memory that was registered. The first error is returned.
            let _ = self.release();
            return Err(error.into());
        }
        *begun = Faults::On;
        Ok(())
    }

    fn started(&self) {
        let mut begun = self.begun.write().unwrap_or_else(PoisonError::into_inner);
        // The last page may have arrived before this call.
        if *begun == Faults::On {
            self.threads.prefer_latency(true);
            *begun = Faults::OfGuest;
        }
    }

    fn next_fault(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError> {
        match self.shards.next(shard, within)? {
            Some(touch) => Ok(Some(self.fault(shard, touch)?)),
            None => Ok(None),
        }
    }

    fn interrupt(&self) {
        self.shards.interrupt();
    }

    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError> {
        let place = self.map.with_pages(region, run)?;
        if bytes.len() as u64 != run.bytes() {
            return Err(FaultError::Content { region, run, bytes: bytes.len() }.into());
        }
        Ok(self.fill(place, run, Source::Bytes(bytes))?)
    }

    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError> {
        let place = self.map.with_pages(region, run)?;
        let zeroable = self.zeroable[place.position].load(Ordering::Relaxed);
        Ok(self.fill(place, run, if zeroable { Source::Zeros } else { Source::CopiedZeros })?)
    }

    fn wake(&self, region: RegionId, page: PageIndex) -> Result<(), VmError> {
        let run = PageRun::new(page, 1);
        let place = self.map.with_pages(region, run)?;
        let run = if self.blocks[place.position].is_some() { block_of(page.0) } else { run };
        let shard = self.map.shard(place, page.0);
        Ok(self.shards.uffd(shard).wake(place.span(run)).map_err(FaultError::host(region))?)
    }

    fn end(&self) -> Result<(), VmError> {
        let mut begun = self.begun.write().unwrap_or_else(PoisonError::into_inner);
        if *begun == Faults::Off {
            return Ok(());
        }
        // After an error, `end` can be called again: unregistering memory twice does no harm.
        self.release()?;
        if *begun == Faults::OfGuest {
            self.threads.prefer_latency(false);
        }
        *begun = Faults::Off;
        Ok(())
    }
}

impl Drop for UffdMemory {
    /// Ends demand paging, unless the guest was started and may have missing pages. In that case,
    /// the userfaultfds stay open and the memory stays mapped for the life of the process, so that
    /// a thread that waits for a page continues to wait and does not read zeros.
    fn drop(&mut self) {
        let begun = *self.begun.get_mut().unwrap_or_else(PoisonError::into_inner);
        if begun == Faults::OfGuest {
            tracing::error!(
                "the memory of a guest that lacks pages was dropped before the guest was ended; it stays mapped, and a thread that \
                 waits for a page waits for ever"
            );
            return;
        }
        // An error needs no handling: closing the descriptors unregisters the rest.
        let _ = self.end();
        // SAFETY: this is the only place that drops them, and nothing uses them afterwards.
        unsafe {
            ManuallyDrop::drop(&mut self.shards);
            ManuallyDrop::drop(&mut self._owner);
        }
    }
}
