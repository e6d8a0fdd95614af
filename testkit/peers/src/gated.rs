//! Source whose senders wait until the guest has named its free pages.
//!
//! On a starved host, the guest, or the thread that asks it, may not run before a short pass is
//! sent. The senders then send the pages that the guest would have named.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::Duration;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageRun, PageSet, PauseCosts, RegionId};
use vmferry_engine::{
    Answer, AnswerMode, DirtyTracker, FreePages, FreeReport, GuestMemory, MachineConfig, Migratable, Protect,
    RegionFile, RingFigures, Section, SourceVm, TrackerKind, VmError,
};
use vmferry_testkit::wait;

/// Gate for senders. It is closed from the moment at which the engine learns that the guest can be
/// asked, until the engine has acted on a complete answer.
#[derive(Debug)]
struct Gate {
    open: AtomicBool,
    /// Thread of the migration. It never waits at the gate, because it acts on the answers.
    driver: ThreadId,
}

impl Gate {
    fn pass(&self) {
        if std::thread::current().id() != self.driver {
            wait("a complete answer of the guest", || self.open.load(Ordering::Acquire));
        }
    }
}

/// Source whose senders wait for the guest's first complete answer.
#[expect(missing_debug_implementations, reason = "a source VM need not have one")]
pub struct Gated<'a> {
    vm: &'a mut dyn SourceVm,
    gate: Arc<Gate>,
}

impl<'a> Gated<'a> {
    /// Wraps `vm`, which the calling thread migrates.
    pub fn new(vm: &'a mut dyn SourceVm) -> Self {
        let gate = Gate { open: AtomicBool::new(true), driver: std::thread::current().id() };
        Self { vm, gate: Arc::new(gate) }
    }
}

impl Migratable for Gated<'_> {
    fn config(&self) -> MachineConfig {
        self.vm.config()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.vm.memory()
    }
}

impl SourceVm for Gated<'_> {
    fn description(&self) -> Vec<u8> {
        self.vm.description()
    }
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        let (tracker, gate) = (self.vm.tracker(kind)?, Arc::clone(&self.gate));
        Ok(Box::new(Tracker { tracker, gate }))
    }
    fn share_memory(&mut self) -> Result<Vec<RegionFile>, VmError> {
        self.vm.share_memory()
    }
    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        let (free, gate) = (self.vm.free_pages()?, Arc::clone(&self.gate));
        gate.open.store(false, Ordering::Release);
        Some(Box::new(Free { free, gate, answered: false }))
    }
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        self.vm.throttle(shares)
    }
    fn throttled(&self) -> Vec<Duration> {
        self.vm.throttled()
    }
    fn run_delays(&self) -> Vec<Duration> {
        self.vm.run_delays()
    }
    fn pause_costs(&self) -> PauseCosts {
        self.vm.pause_costs()
    }
    fn pause(&mut self) -> Result<(), VmError> {
        self.vm.pause()
    }
    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        self.vm.quiesce(within)
    }
    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        self.vm.save()
    }
    fn release(&mut self) -> Result<(), VmError> {
        self.vm.release()
    }
    fn resume(&mut self) -> Result<(), VmError> {
        self.vm.resume()
    }
}

struct Tracker {
    tracker: Box<dyn DirtyTracker>,
    gate: Arc<Gate>,
}

impl DirtyTracker for Tracker {
    fn kind(&self) -> TrackerKind {
        self.tracker.kind()
    }
    fn start(&mut self) -> Result<(), VmError> {
        self.tracker.start()
    }
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        self.tracker.harvest(dirty)
    }
    fn protector(&self) -> Arc<dyn Protect> {
        Arc::new(Protector { protect: self.tracker.protector(), gate: Arc::clone(&self.gate) })
    }
    fn ring(&self) -> Option<RingFigures> {
        self.tracker.ring()
    }
    fn harvest_kernel_time(&self) -> Option<Duration> {
        self.tracker.harvest_kernel_time()
    }
    fn stop(&mut self) -> Result<(), VmError> {
        self.tracker.stop()
    }
}

struct Protector {
    protect: Arc<dyn Protect>,
    gate: Arc<Gate>,
}

impl Protect for Protector {
    fn chunk_pages(&self) -> u64 {
        self.protect.chunk_pages()
    }
    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        self.gate.pass();
        self.protect.protect(region, chunk, pages)
    }
}

#[derive(Debug)]
struct Free {
    free: Box<dyn FreePages>,
    gate: Arc<Gate>,
    /// True if the engine has received a complete answer, or will receive none.
    answered: bool,
}

impl FreePages for Free {
    fn answer_mode(&self) -> AnswerMode {
        self.free.answer_mode()
    }
    fn request(&mut self, question: u64) -> Result<(), VmError> {
        self.free.request(question)
    }
    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        let answer = self.free.poll(report);
        self.answered |= answer.as_ref().map_or(true, |answer| answer.is_some_and(|answer| answer.complete));
        answer
    }
    /// Called by the engine when it has acted on the last answer of a pass.
    fn stop(&mut self) {
        self.free.stop();
        if self.answered {
            self.gate.open.store(true, Ordering::Release);
        }
    }
}
