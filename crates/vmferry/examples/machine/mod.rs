//! Example VMM: its memory is an array, its one vCPU is a thread that counts in the array, and its
//! device state is one number. The file contains everything that a VMM must implement.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmferry::bitmap::AtomicBitmap;
use vmferry::{
    DirtyTracker, Gpa, GuestMemory, MachineConfig, MappedMemory, Migratable, NothingToProtect, PageSet,
    Protect, Region, RegionId, RunState, Section, SourceVm, TargetVm, TrackerKind, VmError,
};

const PAGES: u64 = 32 << 10;

#[repr(align(4096))]
struct Page([AtomicU64; 512]);

/// Memory, and the bitmap of its written pages.
///
/// A real VMM maps memory, and KVM or the kernel records the written pages (the feature `dirty` has
/// trackers for both).
struct Board {
    pages: &'static [Page],
    dirty: AtomicBitmap,
    writes: AtomicU64,
    /// Flag that allows the vCPU to run. The vCPU runs only while it holds this lock and the value
    /// is true. Therefore a thread that has set the value to false has paused the vCPU.
    running: Mutex<bool>,
    power: AtomicBool,
}

impl Board {
    fn run_vcpu(&self) {
        while self.power.load(Relaxed) {
            let running = self.running.lock().expect("no thread panics while it holds the lock");
            for _ in 0..if *running { 64 } else { 0 } {
                let page = self.writes.fetch_add(1, Relaxed) * 7919 % PAGES;
                // Write first, and then mark. In the opposite order, a harvest between the two
                // steps would lose the write.
                self.pages[page as usize].0[0].fetch_add(1, Relaxed);
                self.dirty.set(page);
            }
            drop(running);
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Tracker that harvests the marks of a board. A later write marks its page again, so `protect` has
/// nothing to do.
struct Marks(Arc<Board>);

impl DirtyTracker for Marks {
    fn start(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        dirty.iter_mut().for_each(|(_, map)| {
            self.0.dirty.harvest(map);
        });
        Ok(())
    }
    fn protector(&self) -> Arc<dyn Protect> {
        Arc::new(NothingToProtect)
    }
    fn stop(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

pub(crate) struct Machine {
    board: Arc<Board>,
    memory: Arc<MappedMemory>,
}

impl Machine {
    pub(crate) fn new(running: bool) -> Self {
        let pages: Vec<_> = (0..PAGES).map(|_| Page([const { AtomicU64::new(0) }; 512])).collect();
        let pages: &'static [Page] = pages.leak();
        let region = Region { id: RegionId(0), gpa: Gpa(0), len: PAGES << 12 };
        // SAFETY: the pages are never freed, and all other code accesses them as atomics.
        let mapped = unsafe { MappedMemory::new(&[(region, NonNull::from(&pages[0]).cast())]) };
        let (dirty, running) = (AtomicBitmap::new(PAGES), Mutex::new(running));
        let board = Arc::new(Board { pages, dirty, running, writes: 0.into(), power: true.into() });
        let vcpu = Arc::clone(&board);
        std::thread::spawn(move || vcpu.run_vcpu());
        Self { board, memory: Arc::new(mapped.expect("one whole region")) }
    }
    /// Returns the number of guest writes that the memory contains.
    pub(crate) fn counted(&self) -> u64 {
        self.board.pages.iter().map(|page| page.0[0].load(Relaxed)).sum()
    }
    fn set_running(&self, to: bool) -> Result<(), VmError> {
        *self.board.running.lock().map_err(|error| VmError::new(error.to_string()))? = to;
        Ok(())
    }
}

impl Migratable for Machine {
    fn config(&self) -> MachineConfig {
        MachineConfig::new("example", 1, self.memory.layout())
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }
}

impl SourceVm for Machine {
    fn tracker(&mut self, _: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        Ok(Box::new(Marks(Arc::clone(&self.board))))
    }
    fn pause(&mut self) -> Result<(), VmError> {
        self.set_running(false)
    }
    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        let payload = self.board.writes.load(Relaxed).to_le_bytes().to_vec();
        Ok(vec![Section { name: "vcpu".into(), instance: 0, version: 1, payload }])
    }
    fn release(&mut self) -> Result<(), VmError> {
        Ok(()) // This VM holds no disk or other resource that the target needs.
    }
    fn resume(&mut self) -> Result<(), VmError> {
        self.set_running(true)
    }
}

impl TargetVm for Machine {
    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        let [Section { payload, .. }] = sections else { return Err(VmError::new("one section is expected")) };
        let writes = payload.as_slice().try_into().map_err(VmError::new)?;
        self.board.writes.store(u64::from_le_bytes(writes), Relaxed);
        Ok(())
    }
    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        self.set_running(state == RunState::Running)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.board.power.store(false, Relaxed);
    }
}
