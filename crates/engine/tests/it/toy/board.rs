//! Memory of the toy VM, made of atomics in several regions, and its use by the vCPUs.

use super::{Method, Options, Tracking};
use crate::faulting::Faulting;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{Layout, PageRun, PageSet, Region, RegionId, Window};
use vmferry_engine::{DirtyTracker, GuestMemory, NothingToProtect, Protect, RunState, Section, VmError};

/// Words of a page that are stamped: both ends, so that half a page is found, and the middle.
const STAMPED: [usize; 3] = [0, 255, 511];

#[repr(align(4096))]
pub(super) struct Page(pub(super) [AtomicU64; 512]);

pub(crate) struct Ram {
    pub(crate) region: Region,
    pub(super) pages: Vec<Page>,
    pub(super) marks: AtomicBitmap,
    pub(super) protected: AtomicBitmap,
    /// Last stamp of each page that the guest knows. 0 for a page of zeros.
    pub(super) ledger: Vec<AtomicU64>,
    /// Pages that are not read before they are written.
    pub(crate) free: AtomicBitmap,
}

pub(crate) struct Board {
    pub(super) options: Options,
    pub(super) layout: Layout,
    pub(crate) rams: Vec<Ram>,
    pub(super) writes: AtomicU64,
    /// Number of pages that a vCPU found with other content than it had written.
    pub(super) surprises: AtomicU64,
    /// Run state. A vCPU works while it holds this lock for reading and the value is true.
    pub(super) running: RwLock<bool>,
    pub(super) power: AtomicBool,
    /// True if the guest ever ran.
    pub(super) ran: AtomicBool,
    pub(super) fail: Mutex<Option<(Method, u32)>>,
    /// Method that panics.
    pub(super) clumsy: OnceLock<Method>,
    /// Method that is slow, and its duration.
    pub(super) slow: OnceLock<(Method, Duration)>,
    /// For each attempt, whether the I/O is busy, and below, the time limits that were given.
    pub(super) busy: Mutex<VecDeque<bool>>,
    pub(super) quiesces: Mutex<Vec<Duration>>,
    /// Memory with pages that have not arrived.
    pub(super) paging: OnceLock<Arc<Faulting>>,
    /// Methods that were called.
    pub(super) calls: Mutex<Vec<Method>>,
    /// Bytes of the stream of device state that the target has received, and whether all have
    /// arrived.
    pub(super) device: Arc<Mutex<(Vec<u8>, bool)>>,
    /// State with which the VM prepared itself.
    pub(super) trial: OnceLock<Vec<Section>>,
    /// State in which the received guest was started.
    pub(super) started: OnceLock<RunState>,
    pub(super) began: Instant,
}

impl Board {
    pub(super) fn trip(&self, method: Method) -> Result<(), VmError> {
        self.calls.lock().unwrap().push(method);
        assert_ne!(self.clumsy.get(), Some(&method), "a clumsy VM");
        if let Some((_, time)) = self.slow.get().filter(|(slow, _)| *slow == method) {
            std::thread::sleep(*time);
        }
        let mut fail = self.fail.lock().unwrap();
        match fail.as_mut() {
            Some((which, 0)) if *which == method => {
                *fail = None;
                Err(VmError::new(format!("injected failure of {method:?}")))
            }
            Some((which, left)) if *which == method => {
                *left -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Sleeps until `page` is present. Returns false if the power goes off.
    pub(super) fn touch(&self, ram: &Ram, page: u64) -> bool {
        let Some(paging) = self.paging.get() else { return true };
        while self.power.load(Relaxed) {
            if paging.touch(ram.region.id, page, Duration::from_millis(50)) {
                return true;
            }
        }
        false
    }

    pub(super) fn write(&self, ram: &Ram, page: u64, stamp: u64) {
        let index = usize::try_from(page).unwrap();
        if !self.touch(ram, page) {
            return;
        }
        let was_free = ram.free.test_and_clear(page);
        // The page is marked as used before it is written. The fence pairs with the one of the
        // thread that looks for free pages.
        fence(SeqCst);
        // The content must be what the vCPU wrote last.
        let (found, known) = (ram.pages[index].0[0].load(Relaxed), ram.ledger[index].load(Relaxed));
        if found != known && !was_free {
            self.surprises.fetch_add(1, Relaxed);
        }
        for word in STAMPED {
            ram.pages[index].0[word].store(stamp, Relaxed);
        }
        ram.ledger[index].store(stamp, Relaxed);
        // Write, and then check whether the write must be marked. The fence pairs with the one in
        // `protect`.
        fence(SeqCst);
        if self.options.tracking == Tracking::Marks || ram.protected.test_and_clear(page) {
            ram.marks.set(page);
        }
    }

    pub(super) fn run_vcpu(&self, number: u64) {
        let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        while self.power.load(Relaxed) {
            let running = self.running.read().unwrap();
            for _ in 0..if *running { 16 } else { 0 } {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let choice = random >> 33;
                let which = usize::try_from(choice).unwrap() % self.rams.len();
                let ram = &self.rams[which];
                let used = self.options.used.min(ram.region.pages()) / self.options.writers;
                // Each vCPU has pages of its own, so that the ledger needs no lock.
                let page = (choice / 7 % used) * self.options.writers + number;
                if self.options.lose == Some((which, page)) {
                    // A write during the send would cause a digest mismatch, and the page would be
                    // sent again whatever its mark.
                    continue;
                }
                let count = self.writes.fetch_add(1, Relaxed) + 1;
                if self.options.free_one_in > 0 && (choice >> 7).is_multiple_of(self.options.free_one_in) {
                    ram.free.set(page);
                    continue;
                }
                self.write(
                    ram,
                    page,
                    if choice.is_multiple_of(self.options.zero_one_in) { 0 } else { count },
                );
            }
            drop(running);
            std::thread::sleep(self.options.write_pause * slower());
        }
    }

    /// Returns the pages that do not hold what the guest wrote.
    pub(super) fn lost(&self) -> Vec<(RegionId, u64)> {
        let mut lost = Vec::new();
        for ram in &self.rams {
            for (page, (content, want)) in ram.pages.iter().zip(&ram.ledger).enumerate() {
                let want = want.load(Relaxed);
                if !ram.free.test(page as u64)
                    && STAMPED.iter().any(|word| content.0[*word].load(Relaxed) != want)
                {
                    lost.push((ram.region.id, page as u64));
                }
            }
        }
        lost
    }

    pub(super) fn equals(&self, other: &Self) -> bool {
        let words = |board: &Self| -> Vec<u64> {
            // Pages that are free on the source need not be equal.
            let counts = |(ram, page): (&Ram, usize)| {
                other.rams.iter().any(|own| own.region.id == ram.region.id && !own.free.test(page as u64))
            };
            let pages = board.rams.iter().flat_map(|ram| (0..ram.pages.len()).map(move |page| (ram, page)));
            let pages = pages.filter(|page| counts(*page)).map(|(ram, page)| &ram.pages[page]);
            pages.flat_map(|page| page.0.iter().map(|word| word.load(Relaxed))).collect()
        };
        words(self) == words(other)
    }
}

pub(super) struct Ram2Window(pub(super) Arc<Board>);

impl GuestMemory for Ram2Window {
    fn layout(&self) -> &Layout {
        &self.0.layout
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        self.0.trip(Method::Window)?;
        let ram = self.0.rams.iter().find(|ram| ram.region.id == region);
        let ram = ram.ok_or_else(|| VmError::new("no such region"))?;
        let first = usize::try_from(run.first.0).unwrap();
        let count = usize::try_from(run.count).unwrap();
        let pages = ram.pages.get(first..first + count).ok_or_else(|| VmError::new("no such pages"))?;
        // SAFETY: the pages live as long as the board, which `self` keeps. All other accesses are
        // atomic.
        Ok(unsafe { Window::new(NonNull::from(pages).cast(), count * 4096) })
    }

    fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
        self.0.trip(Method::Touched)?;
        let ram = self.0.rams.iter().find(|ram| ram.region.id == region);
        let ram = ram.ok_or_else(|| VmError::new("no such region"))?;
        fence(SeqCst);
        for page in run.range() {
            if ram.pages[usize::try_from(page).unwrap()].0.iter().any(|word| word.load(Relaxed) != 0) {
                touched.set(page);
            }
        }
        Ok(())
    }
}

pub(super) struct Tracker(pub(super) Arc<Board>);

impl DirtyTracker for Tracker {
    fn start(&mut self) -> Result<(), VmError> {
        self.0.trip(Method::TrackerStart)
    }

    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        for ram in &self.0.rams {
            let map = dirty.region_mut(ram.region.id).unwrap();
            ram.marks.harvest(map);
        }
        if let Some((ram, page)) = self.0.options.lose {
            dirty.region_mut(self.0.rams[ram].region.id).unwrap().test_and_clear(page);
        }
        self.0.trip(Method::Harvest)
    }

    fn harvest_kernel_time(&self) -> Option<Duration> {
        // Far more than the first harvests take, and far less than a slow one.
        Some(Duration::from_millis(1))
    }

    fn protector(&self) -> Arc<dyn Protect> {
        match self.0.options.tracking {
            // A failure of this method is injected with `ByHand` only.
            Tracking::Marks => Arc::new(NothingToProtect),
            Tracking::ByHand => Arc::new(Protector(Arc::clone(&self.0))),
        }
    }

    fn stop(&mut self) -> Result<(), VmError> {
        self.0.trip(Method::TrackerStop)
    }
}

pub(super) struct Protector(pub(super) Arc<Board>);

impl Protect for Protector {
    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        self.0.trip(Method::Protect)?;
        let ram = self.0.rams.iter().find(|ram| ram.region.id == region).unwrap();
        for page in pages.runs_in(chunk.range()).flatten() {
            ram.protected.set(page);
        }
        fence(SeqCst);
        Ok(())
    }
}

/// Returns the factor by which a guest rests longer than its test says. Under a sanitizer the
/// engine is slow, and the guest must not dirty faster than the engine sends.
fn slower() -> u32 {
    static TIMES: OnceLock<u32> = OnceLock::new();
    *TIMES.get_or_init(|| {
        std::env::var("VMFERRY_TEST_SLOWER").map_or(1, |times| times.parse().expect("a number"))
    })
}
