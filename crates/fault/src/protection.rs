//! Guest memory with write-protected pages.

use crate::error::FaultError;
use crate::events::Shards;
use crate::memory::UffdOptions;
use crate::region::{Backing, PagedRegion};
use crate::shards::ShardMap;
use std::any::Any;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use vmferry_core::{Fault, PageIndex, PageRun, RegionId, VmError, WriteProtection};
use vmferry_sys::mapping;
use vmferry_sys::uffd::{
    FEATURE_THREAD_ID, FEATURE_WP, FEATURE_WP_SHMEM, FEATURE_WP_UNPOPULATED, Userfaultfd,
};
use vmferry_thread::VcpuThreads;

/// Maximum number of attempts to change the protection of pages while their mapping is being
/// changed: with [`PAUSE`] between them, a tenth of a second.
const ATTEMPTS: u32 = 1000;
const PAUSE: Duration = Duration::from_micros(100);

/// Guest memory that is mapped in this process and whose pages can be write-protected, with
/// userfaultfd in synchronous mode.
///
/// The kernel delays every write through the mappings that are given to this type: writes of
/// threads, of system calls and of KVM guests. It does not delay writes through another mapping of
/// the same memfd, nor those of devices to pages that were pinned before they were protected. A
/// page that is given back to the host loses its content without a fault. Therefore code that gives
/// pages back must run in [`PagingSlot::if_droppable`](crate::PagingSlot::if_droppable), which
/// refuses meanwhile.
///
/// A transparent huge page is protected as a whole, at little cost. The kernel splits it as soon as
/// the protection of only some of its pages is lifted. Memory of huge pages (hugetlbfs) cannot be
/// split, and is refused.
#[derive(Debug)]
pub struct UffdProtection {
    /// Closing the userfaultfds lifts all protection and wakes all threads.
    shards: Shards,
    map: ShardMap,
    threads: Arc<VcpuThreads>,
    /// Regions whose pages are read before they are protected: private anonymous memory, if the
    /// kernel is older than 6.4. It does not protect a page that does not exist. A read maps a page
    /// of zeros, which it does protect.
    read_first: Vec<RegionId>,
    /// True while the memory is registered. The path of a fault does not use it.
    begun: RwLock<bool>,
    /// Keeps the mappings alive. Last field, so that it is dropped after everything else.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl UffdProtection {
    /// Prepares write protection of `regions`, which `owner` keeps mapped. No page is protected,
    /// and nothing is registered before [`begin`](WriteProtection::begin).
    ///
    /// # Errors
    /// Returns [`FaultError::NoProtection`] if the kernel does not support write protection, or if
    /// this user lacks the permission; the error then says how to grant it. Returns
    /// [`FaultError::HugePages`] for memory of huge pages, and [`FaultError::Regions`] if the
    /// regions cannot be the memory of one guest.
    pub fn new(
        regions: &[PagedRegion],
        owner: Arc<dyn Any + Send + Sync>,
        options: &UffdOptions,
    ) -> Result<Self, FaultError> {
        // If the kernel does not tell, opening the userfaultfds returns the reason.
        let offered = Userfaultfd::offered().unwrap_or(u64::MAX);
        Self::with_features(offered, regions, owner, options)
    }

    /// Does the same as [`new`](Self::new) for a kernel that offers the features `offered`.
    fn with_features(
        offered: u64,
        regions: &[PagedRegion],
        owner: Arc<dyn Any + Send + Sync>,
        options: &UffdOptions,
    ) -> Result<Self, FaultError> {
        if let Some(region) = regions.iter().find(|r| matches!(r.backing, Backing::HugeMemfd { .. })) {
            return Err(FaultError::HugePages(region.id));
        }
        let count = Shards::number(options.shards);
        let map = ShardMap::new(regions, count)?;
        let features = regions.iter().fold(FEATURE_THREAD_ID | FEATURE_WP, |features, region| {
            features
                | match region.backing {
                    Backing::Anonymous => FEATURE_WP_UNPOPULATED & offered,
                    Backing::Memfd { .. } | Backing::HugeMemfd { .. } => FEATURE_WP_SHMEM,
                }
        });
        let shards = Shards::open(count, features, options.user_mode_only, FaultError::NoProtection)?;
        let threads = Arc::clone(&options.threads);
        let reads = |region: &&PagedRegion| {
            matches!(region.backing, Backing::Anonymous) && offered & FEATURE_WP_UNPOPULATED == 0
        };
        let read_first = regions.iter().filter(reads).map(|region| region.id).collect();
        Ok(Self { shards, map, threads, read_first, begun: RwLock::new(false), _owner: owner })
    }

    /// Calls `change` if no page can be protected, prevents the begin of write protection until
    /// `change` returns, and returns its result. Returns `None` between `begin` and `end`.
    pub fn if_unprotected<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let begun = self.begun.read().unwrap_or_else(PoisonError::into_inner);
        (!*begun).then(change)
    }

    fn register(&self) -> Result<(), FaultError> {
        for place in self.map.regions() {
            for (shard, part) in self.map.parts(place, place.all()) {
                let registered = self.shards.uffd(shard).register_wp(place.span(part));
                registered.map_err(FaultError::host(place.id))?;
            }
        }
        Ok(())
    }

    /// Unregisters all memory, as far as the host permits, and returns the first error.
    fn release(&self) -> Result<(), FaultError> {
        let mut result = Ok(());
        for place in self.map.regions() {
            for (shard, part) in self.map.parts(place, place.all()) {
                let done = self.shards.uffd(shard).unregister(place.span(part));
                result = result.and(done.map_err(FaultError::host(place.id)));
            }
        }
        result
    }

    fn change(&self, region: RegionId, run: PageRun, protect: bool) -> Result<(), FaultError> {
        let place = self.map.with_pages(region, run)?;
        if protect && self.read_first.contains(&region) {
            mapping::populate_for_reading(place.span(run)).map_err(FaultError::host(region))?;
        }
        for (shard, part) in self.map.parts(place, run) {
            let uffd = self.shards.uffd(shard);
            let mut attempts = 0;
            while let Err(error) = uffd.write_protect(place.span(part), protect) {
                // The kernel may have changed some of the pages. Changing them again does no harm.
                attempts += 1;
                match error.errno() {
                    Some(libc::EAGAIN | libc::EINTR) if attempts < ATTEMPTS => std::thread::sleep(PAUSE),
                    _ => return Err(FaultError::Host { region, source: error }),
                }
            }
        }
        Ok(())
    }
}

impl WriteProtection for UffdProtection {
    fn shards(&self) -> usize {
        self.map.count()
    }

    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize {
        self.map.region(region).map_or(0, |place| self.map.shard(place, page.0))
    }

    fn begin(&self) -> Result<(), VmError> {
        let mut begun = self.begun.write().unwrap_or_else(PoisonError::into_inner);
        if *begun {
            return Err(FaultError::Begun.into());
        }
        if let Err(error) = self.register() {
            // Unregister the memory that was registered. The first error is returned.
            let _ = self.release();
            return Err(error.into());
        }
        *begun = true;
        Ok(())
    }

    fn protect(&self, region: RegionId, run: PageRun) -> Result<(), VmError> {
        Ok(self.change(region, run, true)?)
    }

    fn unprotect(&self, region: RegionId, run: PageRun) -> Result<(), VmError> {
        Ok(self.change(region, run, false)?)
    }

    fn next_write(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError> {
        let Some(touch) = self.shards.next(shard, within)? else { return Ok(None) };
        let (place, page) = self.map.locate(touch.address).ok_or(FaultError::Stray(touch.address))?;
        debug_assert_eq!(self.map.shard(place, page.0), shard);
        let vcpu = self.threads.vcpu(touch.thread);
        Ok(Some(Fault { region: place.id, page, write: touch.write, vcpu }))
    }

    fn interrupt(&self) {
        self.shards.interrupt();
    }

    fn end(&self) -> Result<(), VmError> {
        let mut begun = self.begun.write().unwrap_or_else(PoisonError::into_inner);
        if *begun {
            // After an error, `end` can be called again: unregistering memory twice does no harm.
            self.release()?;
            *begun = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use vmferry_testkit::{Need, skip};

    const PAGE: usize = 4096;

    /// Four pages of private anonymous memory that were never touched.
    struct Untouched(*mut AtomicU64);

    // SAFETY: an address; the bytes are accessed as atomics only.
    unsafe impl Send for Untouched {}
    // SAFETY: as above.
    unsafe impl Sync for Untouched {}

    impl Untouched {
        fn new() -> Self {
            use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice. It is never unmapped.
            let start = unsafe { mmap_anonymous(std::ptr::null_mut(), 4 * PAGE, access, MapFlags::PRIVATE) };
            Self(start.unwrap().cast())
        }

        fn word(&self, page: usize) -> &AtomicU64 {
            // SAFETY: the mapping has four pages and stays mapped.
            unsafe { &*self.0.byte_add(page * PAGE) }
        }
    }

    #[test]
    fn untouched_pages_are_protected_by_kernels_without_the_feature_for_them() {
        let memory = Arc::new(Untouched::new());
        let region = PagedRegion {
            id: RegionId(0),
            host: memory.0.addr() as u64,
            len: 4 * PAGE as u64,
            backing: Backing::Anonymous,
        };
        let mut options = UffdOptions::new(Arc::new(VcpuThreads::new(1)));
        (options.shards, options.user_mode_only) = (1, true);
        let offered = match Userfaultfd::offered() {
            Ok(offered) if offered & FEATURE_WP != 0 => offered & !FEATURE_WP_UNPOPULATED,
            offered => return skip(Need::Uffd, format!("no write protection: {offered:x?}")),
        };
        let owner = Arc::clone(&memory) as _;
        let protection = UffdProtection::with_features(offered, &[region], owner, &options).unwrap();
        protection.begin().unwrap();
        protection.protect(RegionId(0), PageRun::new(PageIndex(1), 2)).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| memory.word(2).store(7, Ordering::SeqCst));
            let fault = protection.next_write(0, Duration::from_secs(10)).unwrap().unwrap();
            assert_eq!((fault.page, fault.write), (PageIndex(2), true));
            assert_eq!(memory.word(2).load(Ordering::SeqCst), 0, "the writer waits");
            // Pages that are not protected are not delayed.
            memory.word(0).store(1, Ordering::SeqCst);
            protection.unprotect(RegionId(0), PageRun::new(PageIndex(2), 1)).unwrap();
            writer.join().unwrap();
        });
        assert_eq!(memory.word(2).load(Ordering::SeqCst), 7);
        protection.end().unwrap();
    }
}
