//! A toy VM: memory of atomics in several regions, vCPUs that stamp its pages, and a fault in any method on demand.
//!
//! The vCPUs keep a ledger of what each page must hold, which is moved as device state: so the guest itself finds a page
//! that was lost, whatever the engine says.

use crate::faulting::Faulting;
use crate::freeing::{FreeKind, Freeing};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_engine::{
    DirtyTracker, FreePages, GuestMemory, LazyMemory, MachineConfig, NothingToProtect, Protect, Section,
    SourceVm, TargetVm, TrackerKind, VmError,
};
use vmferry_memory::{Gpa, Layout, PageIndex, PageRun, PageSet, Region, RegionId, Window};

/// Words of a page that are stamped: its ends, so that half a page shows, and its middle.
const STAMPED: [usize; 3] = [0, 255, 511];

#[repr(align(4096))]
struct Page([AtomicU64; 512]);

/// A method that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Tracker,
    TrackerStart,
    Harvest,
    Protect,
    Window,
    Touched,
    Pause,
    Save,
    Resume,
    TrackerStop,
    Load,
    Start,
}

/// How writes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Every write leaves a mark, a harvest takes the marks.
    Marks,
    /// A write leaves a mark only on a page that was protected since its last mark: forget to protect, and it is lost.
    ByHand,
}

#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Pages of each region; the second lies above 4 GiB.
    pub(crate) pages: Vec<u64>,
    /// Pages at the start of each region that the guest uses.
    pub(crate) used: u64,
    pub(crate) writers: u64,
    pub(crate) tracking: Tracking,
    /// Between two bursts of writes.
    pub(crate) rest: Duration,
    /// Marks of this page are lost, and it is written right before every pause.
    pub(crate) lose: Option<(usize, u64)>,
    /// One of this many writes makes its page zero.
    pub(crate) zero_one_in: u64,
    pub(crate) vcpus: u32,
    /// Bytes of a further section of device state.
    pub(crate) ballast: usize,
    /// As a target, it can take pages while its guest runs.
    pub(crate) lazy: bool,
    /// A page that loading the state touches.
    pub(crate) load_touches: Option<(usize, u64)>,
    /// Who says which pages are free.
    pub(crate) free: Option<FreeKind>,
    /// The guest has written this many further pages of each region and freed them, before it is moved.
    pub(crate) freed: u64,
    /// One of this many writes frees its page instead; 0: none.
    pub(crate) free_one_in: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            pages: vec![1200, 700],
            used: 600,
            writers: 2,
            tracking: Tracking::Marks,
            rest: Duration::from_micros(200),
            lose: None,
            zero_one_in: 16,
            vcpus: 2,
            ballast: 0,
            lazy: false,
            load_touches: None,
            free: None,
            freed: 0,
            free_one_in: 0,
        }
    }
}

pub(crate) struct Ram {
    pub(crate) region: Region,
    pages: Vec<Page>,
    marks: AtomicBitmap,
    protected: AtomicBitmap,
    /// What the guest knows of each page: its last stamp, 0 for a page of zeros.
    ledger: Vec<AtomicU64>,
    /// Pages that nobody reads before writing them.
    pub(crate) free: AtomicBitmap,
}

pub(crate) struct Board {
    options: Options,
    layout: Layout,
    pub(crate) rams: Vec<Ram>,
    writes: AtomicU64,
    /// Pages that a vCPU found otherwise than it had left them.
    surprises: AtomicU64,
    /// A vCPU works while it holds this for reading and finds it true.
    running: RwLock<bool>,
    power: AtomicBool,
    /// Whether it ever ran.
    ran: AtomicBool,
    fail: Mutex<Option<(Method, u32)>>,
    /// What it panics in.
    clumsy: OnceLock<Method>,
    /// Where pages are that have not come yet.
    lazy: OnceLock<Arc<Faulting>>,
    /// How often which method was called.
    calls: Mutex<Vec<Method>>,
}

impl Board {
    fn trip(&self, method: Method) -> Result<(), VmError> {
        self.calls.lock().unwrap().push(method);
        assert_ne!(self.clumsy.get(), Some(&method), "a clumsy VM");
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

    /// Sleeps until `page` is there; gives up when the power goes.
    fn touch(&self, ram: &Ram, page: u64) -> bool {
        let Some(lazy) = self.lazy.get() else { return true };
        while self.power.load(Relaxed) {
            if lazy.touch(ram.region.id, page, Duration::from_millis(50)) {
                return true;
            }
        }
        false
    }

    fn write(&self, ram: &Ram, page: u64, stamp: u64) {
        let index = usize::try_from(page).unwrap();
        if !self.touch(ram, page) {
            return;
        }
        let was_free = ram.free.test_and_clear(page);
        // It is in use before it is written: pairs with the fence of whoever looks which pages are free.
        fence(SeqCst);
        // What it finds there is what it wrote last.
        let (found, known) = (ram.pages[index].0[0].load(Relaxed), ram.ledger[index].load(Relaxed));
        if found != known && !was_free {
            self.surprises.fetch_add(1, Relaxed);
        }
        for word in STAMPED {
            ram.pages[index].0[word].store(stamp, Relaxed);
        }
        ram.ledger[index].store(stamp, Relaxed);
        // Write, and then look whether the write is to be marked: pairs with the fence in `protect`.
        fence(SeqCst);
        if self.options.tracking == Tracking::Marks || ram.protected.test_and_clear(page) {
            ram.marks.set(page);
        }
    }

    fn run_vcpu(&self, number: u64) {
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
                    // Were it written while it is being sent it would arrive damaged, and be sent again whatever its mark.
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
            std::thread::sleep(self.options.rest);
        }
    }

    /// Pages that do not hold what the guest wrote.
    fn lost(&self) -> Vec<(RegionId, u64)> {
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

    fn equals(&self, other: &Self) -> bool {
        let words = |board: &Self| -> Vec<u64> {
            // What is free on the side that it comes from is nobody's business.
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

struct Ram2Window(Arc<Board>);

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
        // SAFETY: the pages live as long as the board, which self keeps; everybody else uses them as atomics.
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

struct Tracker(Arc<Board>);

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

    fn protector(&self) -> Arc<dyn Protect> {
        match self.0.options.tracking {
            // The faulty method is reached by hand only.
            Tracking::Marks => Arc::new(NothingToProtect),
            Tracking::ByHand => Arc::new(Protector(Arc::clone(&self.0))),
        }
    }

    fn stop(&mut self) -> Result<(), VmError> {
        self.0.trip(Method::TrackerStop)
    }
}

struct Protector(Arc<Board>);

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

/// The VM of either side.
pub(crate) struct Toy {
    board: Arc<Board>,
    vcpus: Vec<JoinHandle<()>>,
    /// The machine that the guest comes from: at the start its memory must be this one's.
    twin: Option<Arc<Board>>,
    arrived_equal: Option<bool>,
    /// How often nobody wanted to know any more which pages are free.
    stopped: Arc<AtomicU64>,
}

impl Toy {
    pub(crate) fn new(options: Options, running: bool) -> Self {
        let gpas = [0, 5 << 30, 9 << 30];
        let rams: Vec<Ram> = (0u32..)
            .zip(options.pages.iter().zip(gpas))
            .map(|(id, (pages, gpa))| Ram {
                region: Region { id: RegionId(id * 3), gpa: Gpa(gpa), len: pages << 12 },
                pages: (0..*pages).map(|_| Page([const { AtomicU64::new(0) }; 512])).collect(),
                marks: AtomicBitmap::new(*pages),
                protected: AtomicBitmap::new(*pages),
                ledger: (0..*pages).map(|_| AtomicU64::new(0)).collect(),
                free: AtomicBitmap::new(*pages),
            })
            .collect();
        let layout = Layout::new(rams.iter().map(|ram| ram.region).collect()).unwrap();
        let writers = options.writers;
        let board = Arc::new(Board {
            layout,
            rams,
            writes: 0.into(),
            surprises: 0.into(),
            running: RwLock::new(running),
            power: true.into(),
            ran: running.into(),
            fail: Mutex::new(None),
            clumsy: OnceLock::new(),
            lazy: OnceLock::new(),
            calls: Mutex::default(),
            options,
        });
        if running {
            // Something in every used page from the start.
            for ram in &board.rams {
                for page in 0..board.options.used.min(ram.region.pages()) {
                    board.write(ram, page, board.writes.fetch_add(1, Relaxed) + 1);
                }
                let used = board.options.used.min(ram.region.pages());
                for page in used..(used + board.options.freed).min(ram.region.pages()) {
                    board.write(ram, page, board.writes.fetch_add(1, Relaxed) + 1);
                    ram.free.set(page);
                }
            }
        }
        let spawn = |number| {
            let board = Arc::clone(&board);
            std::thread::spawn(move || board.run_vcpu(number))
        };
        Self {
            vcpus: (0..writers).map(spawn).collect(),
            board,
            twin: None,
            arrived_equal: None,
            stopped: Arc::default(),
        }
    }

    /// A machine like this one, empty, for its guest.
    pub(crate) fn target(&self) -> Self {
        let options = Options { lose: None, ..self.board.options.clone() };
        let mut target = Self::new(options, false);
        target.twin = Some(Arc::clone(&self.board));
        target
    }

    /// From its `after`th call on (0 is the next), `method` fails once.
    pub(crate) fn fail(&self, method: Method, after: u32) {
        *self.board.fail.lock().unwrap() = Some((method, after));
    }

    /// `method` panics.
    pub(crate) fn panics(&self, method: Method) {
        self.board.clumsy.set(method).unwrap();
    }

    /// Whether the injected failure has not come up.
    pub(crate) fn failure_left(&self) -> bool {
        self.board.fail.lock().unwrap().is_some()
    }

    pub(crate) fn called(&self, method: Method) -> usize {
        self.board.calls.lock().unwrap().iter().filter(|called| **called == method).count()
    }

    pub(crate) fn running(&self) -> bool {
        *self.board.running.read().unwrap()
    }

    pub(crate) fn ran(&self) -> bool {
        self.board.ran.load(Relaxed)
    }

    pub(crate) fn arrived_equal(&self) -> Option<bool> {
        self.arrived_equal
    }

    pub(crate) fn writes(&self) -> u64 {
        self.board.writes.load(Relaxed)
    }

    /// How often a vCPU found a page otherwise than it had left it.
    pub(crate) fn surprises(&self) -> u64 {
        self.board.surprises.load(Relaxed)
    }

    /// How often nobody wanted to know any more which pages are free.
    pub(crate) fn told_to_stop(&self) -> u64 {
        self.stopped.load(Relaxed)
    }

    /// The memory whose pages come later, once the engine has asked for it.
    pub(crate) fn faulting(&self) -> Option<Arc<Faulting>> {
        self.board.lazy.get().cloned()
    }

    /// What the guest finds missing, stopped for as long as it looks.
    pub(crate) fn lost(&self) -> Vec<(RegionId, u64)> {
        let mut running = self.board.running.write().unwrap();
        let was = std::mem::replace(&mut *running, false);
        let lost = self.board.lost();
        *running = was;
        lost
    }

    pub(crate) fn halt(&self) {
        *self.board.running.write().unwrap() = false;
    }

    /// Whether the vCPUs get on.
    pub(crate) fn works(&self) -> bool {
        let before = self.writes();
        (0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            self.writes() > before
        })
    }

    fn config(&self) -> MachineConfig {
        MachineConfig {
            kind: "toy".into(),
            vcpus: self.board.options.vcpus,
            regions: self.board.layout.regions().to_vec(),
            extra: vec![],
            features: vec![],
        }
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::new(Ram2Window(Arc::clone(&self.board)))
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        self.board.power.store(false, Relaxed);
        for vcpu in self.vcpus.drain(..) {
            vcpu.join().unwrap();
        }
    }
}

impl SourceVm for Toy {
    fn config(&self) -> MachineConfig {
        self.config()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.memory()
    }

    fn tracker(&mut self, _: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        self.board.trip(Method::Tracker)?;
        Ok(Box::new(Tracker(Arc::clone(&self.board))))
    }

    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        let kind = self.board.options.free?;
        Some(Box::new(Freeing::new(kind, Arc::clone(&self.board), Arc::clone(&self.stopped))))
    }

    fn pause(&mut self) -> Result<(), VmError> {
        if let (true, Some((ram, page))) = (self.running(), self.board.options.lose) {
            // The guest's last deed: however fast the move was, it has written this page since it was sent.
            self.board.write(&self.board.rams[ram], page, self.board.writes.fetch_add(1, Relaxed) + 1);
        }
        *self.board.running.write().unwrap() = false;
        self.board.trip(Method::Pause)
    }

    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        self.board.trip(Method::Save)?;
        // Saving writes guest memory, as real devices may.
        self.board.write(&self.board.rams[0], 0, self.board.writes.fetch_add(1, Relaxed) + 1);
        let section = |name: &str, instance, words: &[AtomicU64]| Section {
            name: name.into(),
            instance,
            version: 1,
            payload: words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect(),
        };
        let mut sections = vec![section("writes", 0, std::slice::from_ref(&self.board.writes))];
        for ram in &self.board.rams {
            sections.push(section("ledger", ram.region.id.0, &ram.ledger));
            let free = |page| AtomicU64::from(u64::from(ram.free.test(page)));
            let free: Vec<_> = (0..ram.region.pages()).map(free).collect();
            sections.push(section("free", ram.region.id.0, &free));
        }
        let payload = vec![0x5a; self.board.options.ballast];
        sections.push(Section { name: "ballast".into(), instance: 0, version: 1, payload });
        Ok(sections)
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.board.trip(Method::Resume)?;
        *self.board.running.write().unwrap() = true;
        Ok(())
    }
}

impl TargetVm for Toy {
    fn config(&self) -> MachineConfig {
        self.config()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.memory()
    }

    fn lazy_memory(&mut self) -> Result<Arc<dyn LazyMemory>, VmError> {
        if !self.board.options.lazy {
            return Err(VmError::new("this toy has no faults"));
        }
        let board = Arc::downgrade(&self.board);
        let write = move |region: RegionId, page: u64, bytes: &[u8]| {
            let Some(board) = board.upgrade() else { return };
            let ram = board.rams.iter().find(|ram| ram.region.id == region).unwrap();
            let words = &ram.pages[usize::try_from(page).unwrap()].0;
            for (word, bytes) in words.iter().zip(bytes.chunks_exact(8)) {
                word.store(u64::from_le_bytes(bytes.try_into().unwrap()), Relaxed);
            }
        };
        Ok(self.board.lazy.get_or_init(|| Arc::new(Faulting::new(Box::new(write)))).clone())
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.board.trip(Method::Load)?;
        if let Some((ram, page)) = self.board.options.load_touches {
            assert!(self.board.touch(&self.board.rams[ram], page));
        }
        for Section { name, instance, payload, .. } in sections {
            let ram = self.board.rams.iter().find(|ram| ram.region.id.0 == *instance);
            let ledger = ram.map(|ram| &ram.ledger);
            if let ("free", Some(ram)) = (name.as_str(), ram) {
                let free = (0..).zip(payload.chunks_exact(8)).filter(|(_, word)| word[0] != 0);
                free.for_each(|(page, _)| {
                    ram.free.set(page);
                });
                continue;
            }
            let words = match (name.as_str(), ledger) {
                ("writes", _) => std::slice::from_ref(&self.board.writes),
                ("ledger", Some(ledger)) => ledger,
                ("ballast", _) => continue,
                _ => return Err(VmError::new(format!("unknown section {name} {instance}"))),
            };
            if payload.len() != words.len() * 8 {
                return Err(VmError::new(format!("section {name} has {} bytes", payload.len())));
            }
            for (word, bytes) in words.iter().zip(payload.chunks_exact(8)) {
                word.store(u64::from_le_bytes(bytes.try_into().unwrap()), Relaxed);
            }
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), VmError> {
        self.board.trip(Method::Start)?;
        if let Some(twin) = &self.twin {
            let stopped = !*twin.running.read().unwrap();
            assert!(stopped, "the guest runs on both sides");
            // Pages that have yet to come differ.
            self.arrived_equal = self.board.lazy.get().is_none().then(|| self.board.equals(twin));
        }
        self.board.ran.store(true, Relaxed);
        *self.board.running.write().unwrap() = true;
        Ok(())
    }
}

/// The first page of a run that names it: for messages.
pub(crate) fn page_text(region: RegionId, page: u64) -> String {
    format!("{region} {}", PageIndex(page))
}
