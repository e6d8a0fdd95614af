//! The virtio-mmio transport, version 2 (virtio 1.2, section 4.2).

#[cfg(test)]
mod rest_tests;
mod saved;
mod state;
#[cfg(test)]
mod tests;

pub use saved::{LoadError, QueueSaved, TransportSaved};

use crate::device::{Device, QueueSpec, Resume};
use crate::queue::{RingError, VirtQueue};
use crate::signals::Signals;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio as register;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory};
use vmferry_guest_abi::balloon::VENDOR;

/// Bytes of a device's window: the registers and a configuration of 256 bytes.
pub const WINDOW: u64 = 0x200;

/// Where in it a driver writes how far it is; 0 resets the device (4.2.2).
pub const STATUS: u64 = register::VIRTIO_MMIO_STATUS as u64;
/// Where in it a driver writes the index of a queue to notify the device (4.2.2).
pub const NOTIFY: u64 = register::VIRTIO_MMIO_QUEUE_NOTIFY as u64;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;

const NEEDS_RESET: u32 = VIRTIO_CONFIG_S_NEEDS_RESET;
const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
/// The bits of the status that a driver sets.
const DRIVERS: u32 =
    VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | DRIVER_OK | FEATURES_OK | VIRTIO_CONFIG_S_FAILED;

/// Features of rings and transport: descriptors in tables of their own, notifications by index, and no legacy.
const TRANSPORT_FEATURES: u128 =
    1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_F_VERSION_1;

/// A queue as its driver describes it, before it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setup {
    spec: QueueSpec,
    size: u32,
    descriptors: u64,
    driver: u64,
    device: u64,
}

impl Setup {
    fn new(spec: QueueSpec) -> Self {
        Self { spec, size: spec.max_size.into(), descriptors: 0, driver: 0, device: 0 }
    }

    /// The queue, if it can be one: a size that is allowed, rings that are aligned and in memory.
    fn queue<M: GuestMemory>(&self, memory: &M) -> Result<Queue, RingError> {
        let index = self.spec.index;
        let ring = |source| RingError::Ring { queue: index, source };
        let mut queue = Queue::new(self.spec.max_size).map_err(ring)?;
        queue.try_set_size(u16::try_from(self.size).unwrap_or(0)).map_err(ring)?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptors)).map_err(ring)?;
        queue.try_set_avail_ring_address(GuestAddress(self.driver)).map_err(ring)?;
        queue.try_set_used_ring_address(GuestAddress(self.device)).map_err(ring)?;
        queue.set_ready(true);
        if queue.is_valid(memory) { Ok(queue) } else { Err(RingError::Setup { queue: index }) }
    }
}

#[derive(Debug)]
struct Slot {
    setup: Setup,
    /// There while the queue is ready.
    queue: Option<VirtQueue>,
    /// It is to be served, again or for the first time.
    due: bool,
}

/// What the driver has set.
#[derive(Debug)]
struct Core<D> {
    device: D,
    status: u32,
    device_select: u32,
    driver_select: u32,
    driver_features: u128,
    queue_select: u32,
    slots: Vec<Slot>,
}

/// A device and its registers. All methods may be called from all vCPUs' threads at once.
#[derive(Debug)]
pub struct MmioTransport<D> {
    signals: Arc<Signals>,
    core: Mutex<Core<D>>,
    /// A queue was served: for whoever waits until the device has come to rest.
    served: Condvar,
    /// Somebody does; set with `core`'s lock held, so that a thread which then has it, and sees this not set, kept nobody waiting.
    awaited: AtomicBool,
    /// Some queue is due.
    more: AtomicBool,
    /// The guest runs again, and whoever held `core` at that moment has to tell the device.
    resumes: AtomicBool,
}

impl<D: Device> MmioTransport<D> {
    /// `device`, as after a reset. `signals` are those that it was made with.
    #[must_use]
    pub fn new(device: D, signals: Arc<Signals>) -> Self {
        let slot = |spec: &QueueSpec| Slot { setup: Setup::new(*spec), queue: None, due: false };
        let core = Core {
            device,
            status: 0,
            device_select: 0,
            driver_select: 0,
            driver_features: 0,
            queue_select: 0,
            slots: D::QUEUES.iter().map(slot).collect(),
        };
        let (more, resumes) = (AtomicBool::new(false), AtomicBool::new(false));
        let awaited = AtomicBool::new(false);
        Self { signals, core: Mutex::new(core), served: Condvar::new(), awaited, more, resumes }
    }

    /// The driver reads `data.len()` bytes at `offset` of the window.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(within) = offset.checked_sub(register::VIRTIO_MMIO_CONFIG.into()) {
            // Fields are up to 64 bits; a string instruction could ask for more.
            let len = data.len().min(8);
            self.core().device.read_config(within, &mut data[..len]);
        } else if let Some(register) = aligned(offset, data.len()) {
            data.copy_from_slice(&self.read_register(register).to_le_bytes());
        }
    }

    /// The driver writes `data` at `offset` of the window. A notification is served before this returns; what is left of it is
    /// [due](Self::due).
    pub fn write<M: GuestMemory>(&self, memory: &M, offset: u64, data: &[u8]) {
        if let Some(within) = offset.checked_sub(register::VIRTIO_MMIO_CONFIG.into()) {
            if data.len() <= 8 {
                self.core().device.write_config(within, data);
            }
        } else if let (Some(register), Ok(bytes)) = (aligned(offset, data.len()), data.try_into()) {
            self.write_register(memory, register, u32::from_le_bytes(bytes));
        }
    }

    /// Whether a queue has not been served to its end; [`work`](Self::work) goes on.
    #[must_use]
    pub fn due(&self) -> bool {
        self.more.load(Ordering::Acquire) || self.resumes.load(Ordering::Acquire)
    }

    /// Goes on with queues that are [due](Self::due), a portion of each; says whether it did. Does nothing while another thread is
    /// serving the device: that thread goes on itself.
    pub fn work<M: GuestMemory>(&self, memory: &M) -> bool {
        let Some(core) = self.try_core() else { return false };
        self.serve(memory, core);
        true
    }

    /// Serves queue `index`, as if the driver had notified: for threads that have something for the driver.
    pub fn notify<M: GuestMemory>(&self, memory: &M, index: u16) {
        let mut core = self.core();
        if let Some(slot) = core.slots.iter_mut().find(|slot| slot.setup.spec.index == index) {
            slot.due = true;
        }
        self.serve(memory, core);
        self.tell_served();
    }

    /// Wakes whoever waits for rest; a system call is spent only if somebody does.
    fn tell_served(&self) {
        if self.awaited.load(Ordering::Acquire) {
            self.served.notify_all();
        }
    }

    /// Lets a thread of the device's own work on queue `index`: take buffers out, or give some back. `None` if there is no driver or it
    /// has not set up this queue, or if the ring cannot be followed: the device then rests.
    ///
    /// Vcpus wait for `act` when they access most registers, so what takes long is done between two calls of this.
    pub fn with_queue<T>(
        &self,
        index: u16,
        act: impl FnOnce(&mut VirtQueue) -> Result<T, RingError>,
    ) -> Option<T> {
        let mut core = self.core();
        let running = core.running();
        let slot = core.slots.iter_mut().find(|slot| running && slot.setup.spec.index == index);
        let result = slot.and_then(|slot| slot.queue.as_mut()).map(act);
        if let Some(Err(error)) = &result {
            core.rest(error, &self.signals);
            self.more.store(false, Ordering::Release);
        }
        drop(core);
        // Set while this thread had the lock, it is this thread's to do, as in `serve`.
        if self.resumes.load(Ordering::Acquire)
            && let Some(core) = self.try_core()
        {
            self.more.store(core.running(), Ordering::Release);
        }
        result?.ok()
    }

    /// A thread of the device's own has come to rest without a [notification](Self::notify): whoever waits for that looks again.
    pub fn rested(&self) {
        // Not between the look and the wait.
        drop(self.core());
        self.tell_served();
    }

    /// Serves a portion of each queue that is due.
    fn serve<'a, M: GuestMemory>(&'a self, memory: &M, mut core: MutexGuard<'a, Core<D>>) {
        loop {
            let more = core.serve_due(memory, &self.signals);
            self.more.store(more, Ordering::Release);
            drop(core);
            // Set while this thread had the lock, it is this thread's to do; while another one has it now, that one's.
            if !self.resumes.load(Ordering::Acquire) {
                return;
            }
            let Some(next) = self.try_core() else { return };
            core = next;
        }
    }

    /// Lets the device finish what is under way and begin nothing new until [`resumed`](Self::resumed), for a guest whose vCPUs stand
    /// still: what is saved after this is the state. `false` if it has not come to rest by `deadline`; it still begins nothing new if
    /// it could be told.
    #[must_use]
    pub fn quiesce(&self, deadline: Instant) -> bool {
        /// Between two looks whether the lock is free: seldom needed, as it is held for the length of a ring.
        const BETWEEN: Duration = Duration::from_millis(1);
        let left = || deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        // Not by waiting for the lock: a thread of the device's may hold it and sleep on a page that does not come (hazards.md 18).
        let mut core = loop {
            match (self.try_core(), left()) {
                (Some(core), _) => break core,
                (None, None) => return false,
                (None, Some(_)) => std::thread::sleep(BETWEEN),
            }
        };
        self.awaited.store(true, Ordering::Release);
        let mut rests = core.device.quiesce();
        while let (false, Some(left)) = (rests, left()) {
            core = self.served.wait_timeout(core, left).unwrap_or_else(PoisonError::into_inner).0;
            rests = core.device.quiesce();
        }
        self.awaited.store(false, Ordering::Release);
        rests
    }

    /// The guest is about to run, here for the first time, again, or after it was loaded: what it was told is told again, and all
    /// queues are due. Never waits for a thread that sleeps on a missing page: such a one, of a guest that did not come to rest, tells
    /// the device itself when it wakes.
    ///
    /// # Errors
    /// If the device says that it cannot run here; see [`Device::resumed`].
    pub fn resumed(&self, how: Resume) -> Result<(), String> {
        let mut core = self.try_core();
        if core.is_none() {
            self.resumes.store(true, Ordering::Release);
            // It may have been let go before that could be seen.
            core = self.try_core();
        }
        if let Some(mut core) = core {
            core.resumed(how)?;
            self.more.store(core.running(), Ordering::Release);
        }
        self.signals.again();
        Ok(())
    }

    /// The lock, unless another thread has it.
    fn try_core(&self) -> Option<MutexGuard<'_, Core<D>>> {
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if self.resumes.swap(false, Ordering::AcqRel)
            && let Err(why) = core.resumed(Resume::Again)
        {
            tracing::warn!(device = D::ID, why, "a virtio device cannot go on");
        }
        Some(core)
    }

    fn core(&self) -> MutexGuard<'_, Core<D>> {
        // A panic while it was held would be a defect of a device, which the driver can reset.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_register(&self, at: u32) -> u32 {
        match at {
            register::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            register::VIRTIO_MMIO_VERSION => VERSION,
            register::VIRTIO_MMIO_DEVICE_ID => D::ID,
            register::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            register::VIRTIO_MMIO_INTERRUPT_STATUS => self.signals.status(),
            register::VIRTIO_MMIO_CONFIG_GENERATION => self.signals.generation(),
            // A shared memory region that does not exist has this length and address (4.2.2).
            register::VIRTIO_MMIO_SHM_LEN_LOW
            | register::VIRTIO_MMIO_SHM_LEN_HIGH
            | register::VIRTIO_MMIO_SHM_BASE_LOW
            | register::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            register::VIRTIO_MMIO_DEVICE_FEATURES => {
                let core = self.core();
                bank(core.offered(), core.device_select)
            }
            register::VIRTIO_MMIO_QUEUE_NUM_MAX => {
                self.core().selected().map_or(0, |slot| slot.setup.spec.max_size.into())
            }
            register::VIRTIO_MMIO_QUEUE_READY => {
                self.core().selected().is_some_and(|slot| slot.queue.is_some()).into()
            }
            register::VIRTIO_MMIO_STATUS => self.core().status,
            _ => 0,
        }
    }

    fn write_register<M: GuestMemory>(&self, memory: &M, at: u32, value: u32) {
        match at {
            register::VIRTIO_MMIO_INTERRUPT_ACK => self.signals.acknowledge(value),
            register::VIRTIO_MMIO_QUEUE_NOTIFY => {
                if let Ok(index) = u16::try_from(value) {
                    self.notify(memory, index);
                }
            }
            register::VIRTIO_MMIO_STATUS => {
                let mut core = self.core();
                core.set_status(value, &self.signals);
                self.more.store(core.running(), Ordering::Release);
            }
            register::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.core().device_select = value,
            register::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.core().driver_select = value,
            register::VIRTIO_MMIO_DRIVER_FEATURES => self.core().accept(value),
            register::VIRTIO_MMIO_QUEUE_SEL => self.core().queue_select = value,
            register::VIRTIO_MMIO_QUEUE_READY => self.core().set_ready(value, memory, &self.signals),
            _ => self.core().set_up(at, value),
        }
    }
}

/// The register at `offset`, if it is accessed as registers are: 32 bits, aligned (4.2.2.2).
fn aligned(offset: u64, len: usize) -> Option<u32> {
    u32::try_from(offset).ok().filter(|at| len == 4 && at.is_multiple_of(4))
}

/// Bank `select` of 32 of the bits; there are four.
fn bank(features: u128, select: u32) -> u32 {
    let bytes = features.to_le_bytes();
    let at = usize::try_from(select).unwrap_or(usize::MAX).saturating_mul(4);
    bytes.get(at..at.saturating_add(4)).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}
