//! Measures local faults: faults per second by threads and shards, the time of one fault, and the
//! time to begin and to end.
//!
//! Run it with `cargo run --release -p vmferry-fault --example faults`. It takes about a minute and
//! prints tables.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{
    DemandPaging, Gpa, Layout, PAGE_BYTES, PageIndex, PageRun, PageSet, Region, RegionId, VmError,
};
use vmferry_fault::{Backing, PagedRegion, UffdMemory, UffdOptions, VcpuThreads};

/// Number of pages that each thread touches in its share, in a scattered order.
const FAULTS: u64 = 6000;
const FAULT_PAGES: u64 = 65536;
/// Pages of the memory in the begin table: 1 GiB.
const BEGIN_PAGES: u64 = 1 << 18;
const ROUNDS: usize = 3;

/// Mapping that is unmapped when dropped.
struct Mapped {
    start: NonNull<u8>,
    len: usize,
    pages: u64,
    file: Option<Arc<OwnedFd>>,
}

// SAFETY: the value holds an address, and the bytes are accessed by atomics only.
unsafe impl Send for Mapped {}
// SAFETY: the value holds an address, and the bytes are accessed by atomics only.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(pages: u64, memfd: bool, huge: bool) -> Result<Self, VmError> {
        let len = usize::try_from(pages << 12).map_err(VmError::new)?;
        let (access, hint) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let file = if memfd {
            let file =
                rustix::fs::memfd_create("faults", rustix::fs::MemfdFlags::CLOEXEC).map_err(VmError::new)?;
            rustix::fs::ftruncate(&file, pages << 12).map_err(VmError::new)?;
            Some(Arc::new(file))
        } else {
            None
        };
        // SAFETY: new mappings at addresses that the kernel chooses. The advice changes no content.
        let start = unsafe {
            let start = match &file {
                Some(file) => mmap(hint, len, access, MapFlags::SHARED, file, 0),
                None => mmap_anonymous(hint, len, access, MapFlags::PRIVATE | MapFlags::NORESERVE),
            }
            .map_err(VmError::new)?;
            let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
            let _ = madvise(start, len, advice);
            start
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| VmError::new("mapped at 0"))?;
        Ok(Self { start, len, pages, file })
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        assert!(page < self.pages);
        let at = usize::try_from(page << 12).unwrap_or(usize::MAX);
        // SAFETY: the address is inside the mapping and aligned. All accesses are atomic or made by
        // the kernel when it places pages.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    fn paging(self: &Arc<Self>, shards: usize) -> Result<UffdMemory, VmError> {
        let backing = match &self.file {
            Some(file) => Backing::Memfd { file: Arc::clone(file), offset: 0 },
            None => Backing::Anonymous,
        };
        let host = self.start.addr().get() as u64;
        let region = PagedRegion { id: RegionId(0), host, len: self.pages << 12, backing };
        let mut options = UffdOptions::new(Arc::new(VcpuThreads::new(8)));
        (options.shards, options.user_mode_only) = (shards, true);
        // SAFETY: the owner keeps the mapping, whose bytes are accessed by atomics only.
        Ok(unsafe { UffdMemory::new(vec![region], Arc::clone(self) as _, &options) }?)
    }

    fn layout(&self) -> Result<Layout, VmError> {
        let region = Region { id: RegionId(0), gpa: Gpa(0), len: self.pages << 12 };
        Layout::new(vec![region]).map_err(VmError::new)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns the faults per second and the sorted times of all faults, in ns.
fn faults(threads: u64, shards: usize, memfd: bool) -> Result<(f64, Vec<u64>), VmError> {
    let mapped = Arc::new(Mapped::new(FAULT_PAGES, memfd, false)?);
    let paging = mapped.paging(shards)?;
    paging.begin(&PageSet::full(&mapped.layout()?))?;
    let done = AtomicBool::new(false);
    let (took, mut times) = std::thread::scope(|scope| {
        for shard in 0..shards {
            let (paging, done) = (&paging, &done);
            scope.spawn(move || {
                let page = [7; PAGE_BYTES];
                while !done.load(Ordering::Acquire) {
                    match paging.next_fault(shard, Duration::from_secs(1)) {
                        Ok(Some(fault)) => {
                            let run = PageRun::new(fault.page, 1);
                            if let Err(error) = paging.place(fault.region, run, &page) {
                                eprintln!("{error}");
                            }
                        }
                        Ok(None) => {}
                        Err(error) => return eprintln!("{error}"),
                    }
                }
            });
        }
        let began = Instant::now();
        let touch = |thread: u64| {
            let mapped = &mapped;
            move || {
                // An odd step visits every page of the (even) number once before it repeats. Each
                // thread has its own residue.
                let pages = FAULT_PAGES / threads;
                let touch = |index: u64| {
                    let page = index * 26_357 % pages * threads + thread;
                    let begin = Instant::now();
                    assert_ne!(mapped.word(page).load(Ordering::Relaxed), 0);
                    u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
                };
                (0..FAULTS).map(touch).collect::<Vec<_>>()
            }
        };
        let touching: Vec<_> = (0..threads).map(|thread| scope.spawn(touch(thread))).collect();
        let times: Vec<u64> =
            touching.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect();
        let took = began.elapsed();
        done.store(true, Ordering::Release);
        paging.interrupt();
        (took, times)
    });
    paging.end()?;
    times.sort_unstable();
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    Ok((times.len() as f64 / took.as_secs_f64(), times))
}

fn fault_table(memfd: bool) -> Result<(), VmError> {
    println!(
        "\n{}: threads x shards, faults/s (median of {ROUNDS}), p50, p99 in us",
        if memfd { "memfd" } else { "anonymous" }
    );
    for threads in [1, 2, 4] {
        for shards in [1, 2, 4] {
            let mut rounds =
                (0..ROUNDS).map(|_| faults(threads, shards, memfd)).collect::<Result<Vec<_>, _>>()?;
            rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (rate, times) = &rounds[ROUNDS / 2];
            #[expect(clippy::cast_precision_loss, reason = "for people")]
            let us = |of: usize| times[times.len() * of / 100] as f64 / 1000.0;
            println!("{threads} x {shards}: {rate:9.0}  {:7.1}  {:7.1}", us(50), us(99));
        }
    }
    Ok(())
}

/// Returns the times to begin and to end, in ms.
fn begin(
    shards: usize,
    memfd: bool,
    huge: bool,
    filled: bool,
    missing: &PageSet,
) -> Result<(f64, f64), VmError> {
    let mapped = Arc::new(Mapped::new(BEGIN_PAGES, memfd, huge)?);
    if filled {
        (0..BEGIN_PAGES).for_each(|page| mapped.word(page).store(1, Ordering::Relaxed));
    }
    let paging = mapped.paging(shards)?;
    let start = Instant::now();
    paging.begin(missing)?;
    let began = start.elapsed();
    let start = Instant::now();
    paging.end()?;
    Ok((began.as_secs_f64() * 1e3, start.elapsed().as_secs_f64() * 1e3))
}

fn begin_table() -> Result<(), VmError> {
    println!("\n1 GiB: begin and end, ms (median of {ROUNDS})");
    let layout = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: BEGIN_PAGES << 12 }]);
    let layout = layout.map_err(VmError::new)?;
    let (nothing, everything) = (PageSet::empty(&layout), PageSet::full(&layout));
    let mut scattered = PageSet::empty(&layout);
    if let Some(map) = scattered.region_mut(RegionId(0)) {
        (0..10_000).for_each(|page| _ = map.set(PageIndex(page * 26).0));
    }
    for (kind, memfd, huge) in
        [("anonymous", false, false), ("huge pages", false, true), ("memfd", true, false)]
    {
        for (what, missing) in
            [("nothing", &nothing), ("everything", &everything), ("10,000 scattered pages", &scattered)]
        {
            for shards in [1, 4] {
                let round = |_| begin(shards, memfd, huge, true, missing);
                let mut rounds = (0..ROUNDS).map(round).collect::<Result<Vec<_>, _>>()?;
                rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
                let (began, ended) = rounds[ROUNDS / 2];
                println!("{kind}, {what} to drop, {shards} shards: begin {began:.2}, end {ended:.2}");
            }
        }
    }
    let (began, ended) = begin(4, false, false, false, &everything)?;
    println!("anonymous, never touched, everything to drop, 4 shards: begin {began:.2}, end {ended:.2}");
    Ok(())
}

fn main() {
    let done = fault_table(false).and_then(|()| fault_table(true)).and_then(|()| begin_table());
    if let Err(error) = done {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
