//! Toy VM: vCPUs that stamp pages of a [`board`], and an optional fault in any method.
//!
//! The vCPUs keep a ledger of the expected content of each page, which is moved as device state.
//! The guest itself therefore finds a lost page, whatever the engine reports.

mod board;

pub(crate) use board::Board;

use crate::faulting::Faulting;
use crate::freeing::{FreeKind, Freeing};
use board::{Page, Ram, Ram2Window, Tracker};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_bitmap::AtomicBitmap;
use vmferry_core::{Gpa, Layout, PageIndex, PauseCosts, Region, RegionId};
use vmferry_engine::{
    DemandPaging, DirtyTracker, FreePages, GuestMemory, MachineConfig, Migratable, RunState, Section,
    SourceVm, StateReader, StateWriter, StreamName, TargetVm, TrackerKind, VmError,
};
use vmferry_testkit::wait;

/// Method that can fail.
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
    Stream,
    Prepare,
    Load,
    Start,
    /// Method of memory whose pages arrive later.
    Place,
    NextFault,
}

/// Way in which writes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Every write leaves a mark, and a harvest takes the marks.
    Marks,
    /// A write leaves a mark only on a page that was protected since its last mark. Without the
    /// protection, the write is lost.
    ByHand,
}

#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Number of pages of each region. The second region lies above 4 GiB.
    pub(crate) pages: Vec<u64>,
    /// Number of pages at the start of each region that the guest uses.
    pub(crate) used: u64,
    pub(crate) writers: u64,
    pub(crate) tracking: Tracking,
    /// Pause between two bursts of writes.
    pub(crate) write_pause: Duration,
    /// Page whose marks are lost, and which is written right before every pause.
    pub(crate) lose: Option<(usize, u64)>,
    /// One of this many writes makes its page zero.
    pub(crate) zero_one_in: u64,
    pub(crate) vcpus: u32,
    /// Bytes of a further section of device state.
    pub(crate) ballast: usize,
    /// True if it has demand paging as a target.
    pub(crate) demand_paging: bool,
    /// Page that loading the state touches.
    pub(crate) load_touches: Option<(usize, u64)>,
    /// Source of free pages.
    pub(crate) free: Option<FreeKind>,
    /// Number of further pages of each region that the guest has written and freed before it is
    /// moved.
    pub(crate) freed: u64,
    /// One of this many writes frees its page instead. 0: none.
    pub(crate) free_one_in: u64,
    /// Time that the target announces for load and start.
    pub(crate) expected_load: Option<Duration>,
    /// Description of the guest by the source's VMM.
    pub(crate) description: &'static str,
    /// Cost of a pause, as the source declares it.
    pub(crate) pause_costs: PauseCosts,
    /// Share of the time for which each vCPU waits for a processor, as the source tells. `None` if
    /// it does not tell.
    pub(crate) waits: Option<f64>,
    /// True if the operator has paused the guest.
    pub(crate) paused: bool,
    /// True if the target prepares itself with the state of a trial pause.
    pub(crate) wants_trial: bool,
    /// Bytes of device state that are sent as a stream, and bytes that are added with each read
    /// while the guest runs.
    pub(crate) stream: Option<(u64, u64)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            pages: vec![1200, 700],
            used: 600,
            writers: 2,
            tracking: Tracking::Marks,
            write_pause: Duration::from_micros(200),
            lose: None,
            zero_one_in: 16,
            vcpus: 2,
            ballast: 0,
            demand_paging: false,
            load_touches: None,
            free: None,
            freed: 0,
            free_one_in: 0,
            expected_load: None,
            description: "",
            pause_costs: PauseCosts::Measured,
            waits: None,
            paused: false,
            wants_trial: false,
            stream: None,
        }
    }
}

/// VM for source and target.
pub(crate) struct Toy {
    board: Arc<Board>,
    vcpus: Vec<JoinHandle<()>>,
    /// Machine that the guest comes from. At the start, the memory must equal the memory of this
    /// machine.
    twin: Option<Arc<Board>>,
    arrived_equal: Option<bool>,
    /// Number of times that the engine stopped the reporting of free pages.
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
            slow: OnceLock::new(),
            busy: Mutex::default(),
            quiesces: Mutex::default(),
            paging: OnceLock::new(),
            calls: Mutex::default(),
            trial: OnceLock::new(),
            device: Arc::default(),
            started: OnceLock::new(),
            began: Instant::now(),
            options,
        });
        if running {
            // Every used page has content from the start.
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

    /// Returns an empty machine like this one, for its guest.
    pub(crate) fn target(&self) -> Self {
        let options = Options { lose: None, ..self.board.options.clone() };
        let mut target = Self::new(options, false);
        target.twin = Some(Arc::clone(&self.board));
        target
    }

    /// Makes `method` fail once, at its `after`th call from now (0 is the next).
    pub(crate) fn fail(&self, method: Method, after: u32) {
        *self.board.fail.lock().unwrap() = Some((method, after));
    }

    /// Makes `method` panic.
    pub(crate) fn panics(&self, method: Method) {
        self.board.clumsy.set(method).unwrap();
    }

    /// Makes `method` take `time`.
    pub(crate) fn takes(&self, method: Method, time: Duration) {
        self.board.slow.set((method, time)).unwrap();
    }

    /// Sets for each further attempt whether the I/O is busy.
    pub(crate) fn busy(&self, times: &[bool]) {
        self.board.busy.lock().unwrap().extend(times);
    }

    /// Returns the time limit for quiescing the I/O at each attempt.
    pub(crate) fn quiesces(&self) -> Vec<Duration> {
        self.board.quiesces.lock().unwrap().clone()
    }

    /// Returns true if the injected failure has not occurred yet.
    pub(crate) fn failure_left(&self) -> bool {
        self.board.fail.lock().unwrap().is_some()
    }

    pub(crate) fn called(&self, method: Method) -> usize {
        self.counter()(method)
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

    /// Returns the number of times that a vCPU found a page with other content than it had written.
    pub(crate) fn surprises(&self) -> u64 {
        self.board.surprises.load(Relaxed)
    }

    /// Returns the number of times that the engine stopped the reporting of free pages.
    pub(crate) fn told_to_stop(&self) -> u64 {
        self.stopped.load(Relaxed)
    }

    /// Writes a page on behalf of the guest: new content, or zeros.
    pub(crate) fn write(&self, (region, page): (usize, u64), zero: bool) {
        let count = self.board.writes.fetch_add(1, Relaxed) + 1;
        self.board.write(&self.board.rams[region], page, if zero { 0 } else { count });
    }

    /// Returns true if the guest knows that a page is zero.
    pub(crate) fn is_zero(&self, region: RegionId, page: u64) -> bool {
        let ram = self.board.rams.iter().find(|ram| ram.region.id == region).unwrap();
        ram.ledger[usize::try_from(page).unwrap()].load(Relaxed) == 0
    }

    /// Returns the memory whose pages arrive later, once the engine has requested it.
    pub(crate) fn faulting(&self) -> Option<Arc<Faulting>> {
        self.board.paging.get().cloned()
    }

    /// Returns the pages with wrong content. The guest is stopped during the check.
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

    /// Lets the guest run, on behalf of the operator.
    pub(crate) fn go(&self) {
        *self.board.running.write().unwrap() = true;
    }

    /// Returns the methods that were called, in their order.
    pub(crate) fn calls(&self) -> Vec<Method> {
        self.board.calls.lock().unwrap().clone()
    }

    /// Returns the stream of device state, if all of it has arrived.
    pub(crate) fn device(&self) -> Option<Vec<u8>> {
        let device = self.board.device.lock().unwrap();
        device.1.then(|| device.0.clone())
    }

    /// Returns the state with which the VM prepared itself.
    pub(crate) fn trial(&self) -> Option<&[Section]> {
        self.board.trial.get().map(Vec::as_slice)
    }

    /// Returns the state in which the received guest was started.
    pub(crate) fn started(&self) -> Option<RunState> {
        self.board.started.get().copied()
    }

    /// Returns true if the vCPUs run. In that case, waits until they make progress.
    pub(crate) fn works(&self) -> bool {
        let before = self.writes();
        if self.running() {
            wait("the vCPUs", || self.writes() > before);
        }
        self.running()
    }

    /// Returns a function that counts the calls of a method. It works also while the engine uses
    /// this VM.
    pub(crate) fn counter(&self) -> impl Fn(Method) -> usize + use<> {
        let board = Arc::clone(&self.board);
        move |method| board.calls.lock().unwrap().iter().filter(|called| **called == method).count()
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

impl Migratable for Toy {
    fn config(&self) -> MachineConfig {
        MachineConfig::new("toy", self.board.options.vcpus, &self.board.layout)
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::new(Ram2Window(Arc::clone(&self.board)))
    }
}

impl SourceVm for Toy {
    fn tracker(&mut self, _: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        self.board.trip(Method::Tracker)?;
        Ok(Box::new(Tracker(Arc::clone(&self.board))))
    }

    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        let kind = self.board.options.free?;
        Some(Box::new(Freeing::new(kind, Arc::clone(&self.board), Arc::clone(&self.stopped))))
    }

    fn description(&self) -> Vec<u8> {
        self.board.options.description.into()
    }

    fn pause_costs(&self) -> PauseCosts {
        self.board.options.pause_costs
    }

    fn run_delays(&self) -> Vec<Duration> {
        let of = |share: f64| vec![self.board.began.elapsed().mul_f64(share); self.vcpus.len()];
        self.board.options.waits.map(of).unwrap_or_default()
    }

    fn pause(&mut self) -> Result<(), VmError> {
        if let (true, Some((ram, page))) = (self.running(), self.board.options.lose) {
            // Last write of the guest: however fast the migration was, this page was written since
            // it was sent.
            self.board.write(&self.board.rams[ram], page, self.board.writes.fetch_add(1, Relaxed) + 1);
        }
        *self.board.running.write().unwrap() = false;
        self.board.trip(Method::Pause)
    }

    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        self.board.quiesces.lock().unwrap().push(within);
        if self.board.busy.lock().unwrap().pop_front() != Some(true) {
            return Ok(());
        }
        // Some of the requests in progress complete meanwhile.
        self.board.write(&self.board.rams[0], 1, self.board.writes.fetch_add(1, Relaxed) + 1);
        Err(VmError::busy("requests are under way"))
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

    fn streams(&mut self) -> Result<Vec<Box<dyn StateReader>>, VmError> {
        let device = self.board.options.stream.map(|(left, grows)| {
            let board = Arc::clone(&self.board);
            Box::new(Device { board, sent: 0, left, grows }) as Box<dyn StateReader>
        });
        Ok(device.into_iter().collect())
    }

    fn release(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn run_state(&self) -> RunState {
        if self.board.options.paused { RunState::Paused } else { RunState::Running }
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.board.trip(Method::Resume)?;
        *self.board.running.write().unwrap() = !self.board.options.paused;
        Ok(())
    }
}

fn device() -> StreamName {
    StreamName { name: "device".into(), instance: 3, version: 1 }
}

/// Returns the byte at this offset of the stream.
pub(crate) fn device_byte(at: u64) -> u8 {
    (at % 251).to_le_bytes()[0]
}

/// Device whose state changes while the guest runs.
struct Device {
    board: Arc<Board>,
    sent: u64,
    left: u64,
    grows: u64,
}

impl StateReader for Device {
    fn name(&self) -> StreamName {
        device()
    }

    fn left(&mut self) -> Result<u64, VmError> {
        Ok(self.left)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError> {
        let count = buffer.len().min(usize::try_from(self.left).unwrap());
        buffer.iter_mut().zip(self.sent..).take(count).for_each(|(byte, at)| *byte = device_byte(at));
        let running = *self.board.running.read().unwrap();
        self.sent += count as u64;
        self.left = self.left - count as u64 + if running { self.grows } else { 0 };
        Ok(count)
    }
}

struct DeviceEnd(Arc<Mutex<(Vec<u8>, bool)>>);

impl StateWriter for DeviceEnd {
    fn write(&mut self, bytes: &[u8]) -> Result<(), VmError> {
        self.0.lock().unwrap().0.extend(bytes);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), VmError> {
        self.0.lock().unwrap().1 = true;
        Ok(())
    }
}

impl TargetVm for Toy {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        if !self.board.options.demand_paging {
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
        let clumsy = self.board.clumsy.get().copied();
        Ok(self.board.paging.get_or_init(|| Arc::new(Faulting::new(Box::new(write), clumsy))).clone())
    }

    fn expected_load(&self) -> Option<Duration> {
        self.board.options.expected_load
    }

    fn stream(&mut self, name: &StreamName) -> Result<Box<dyn StateWriter>, VmError> {
        self.board.trip(Method::Stream)?;
        assert_eq!(*name, device());
        Ok(Box::new(DeviceEnd(Arc::clone(&self.board.device))))
    }

    fn wants_trial(&self) -> bool {
        self.board.options.wants_trial
    }

    fn prepare(&mut self, trial: &[Section]) -> Result<(), VmError> {
        self.board.trip(Method::Prepare)?;
        self.board.trial.set(trial.to_vec()).map_err(|_| VmError::new("prepared twice"))
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

    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        self.board.trip(Method::Start)?;
        self.board.started.set(state).expect("started once");
        if let Some(twin) = &self.twin {
            let stopped = !*twin.running.read().unwrap();
            assert!(stopped, "the guest runs on both sides");
            // Pages that have not arrived differ.
            self.arrived_equal = self.board.paging.get().is_none().then(|| self.board.equals(twin));
        }
        let runs = state == RunState::Running;
        self.board.ran.store(runs, Relaxed);
        *self.board.running.write().unwrap() = runs;
        Ok(())
    }
}

/// Returns the text that names the first page of a run in messages.
pub(crate) fn page_text(region: RegionId, page: u64) -> String {
    format!("{region} {}", PageIndex(page))
}
