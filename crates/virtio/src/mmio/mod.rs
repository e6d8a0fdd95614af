//! The virtio-mmio transport, version 2 (virtio 1.2, section 4.2).

#[cfg(test)]
mod quiesce_tests;
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

/// Size of a device's window in bytes: the registers and a configuration of 256 bytes.
pub const WINDOW: u64 = 0x200;

/// Offset of the status register in the window. Writing 0 resets the device (4.2.2).
pub const STATUS: u64 = register::VIRTIO_MMIO_STATUS as u64;
/// Offset of the register in the window to which a driver writes the index of a queue to notify the
/// device (4.2.2).
pub const NOTIFY: u64 = register::VIRTIO_MMIO_QUEUE_NOTIFY as u64;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;

const NEEDS_RESET: u32 = VIRTIO_CONFIG_S_NEEDS_RESET;
const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
/// Bits of the status that a driver sets.
const DRIVERS: u32 =
    VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | DRIVER_OK | FEATURES_OK | VIRTIO_CONFIG_S_FAILED;

/// Features of rings and transport: indirect descriptors, notifications by index, and no legacy
/// interface.
const TRANSPORT_FEATURES: u128 =
    1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_F_VERSION_1;

/// Queue as its driver describes it, before it is checked.
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

    /// Returns the queue if the description is valid: an allowed size, and rings that are aligned
    /// and in memory.
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
    /// Queue while it is ready.
    queue: Option<VirtQueue>,
    /// True if the queue has to be served, again or for the first time.
    due: bool,
}

/// Registers that the driver has set, and the device.
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

/// Transport of the device `D`: the device and its registers. The threads of all vCPUs may call all
/// methods at the same time.
#[derive(Debug)]
pub struct MmioTransport<D> {
    signals: Arc<Signals>,
    core: Mutex<Core<D>>,
    /// Signalled when a queue was served, for a thread that waits until the device is quiesced.
    served: Condvar,
    /// True while a thread waits for `served`. Set with the lock of `core` held: a thread that
    /// later has the lock and finds this false has kept no other thread waiting.
    awaited: AtomicBool,
    /// True if some queue is due.
    more: AtomicBool,
    /// True if the guest runs again and the thread that held `core` at that moment has to tell the
    /// device.
    resumes: AtomicBool,
}

impl<D: Device> MmioTransport<D> {
    /// Creates the transport of `device`, in the state after a reset. `signals` must be those with
    /// which the device was created.
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

    /// Reads `data.len()` bytes at `offset` of the window for the driver.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(within) = offset.checked_sub(register::VIRTIO_MMIO_CONFIG.into()) {
            // Fields have up to 64 bits. A string instruction could ask for more.
            let len = data.len().min(8);
            self.core().device.read_config(within, &mut data[..len]);
        } else if let Some(register) = aligned(offset, data.len()) {
            data.copy_from_slice(&self.read_register(register).to_le_bytes());
        }
    }

    /// Writes `data` at `offset` of the window for the driver. A notification is served before this
    /// method returns. If a portion of work is left, the queue is [due](Self::due).
    pub fn write<M: GuestMemory>(&self, memory: &M, offset: u64, data: &[u8]) {
        if let Some(within) = offset.checked_sub(register::VIRTIO_MMIO_CONFIG.into()) {
            if data.len() <= 8 {
                self.core().device.write_config(within, data);
            }
        } else if let (Some(register), Ok(bytes)) = (aligned(offset, data.len()), data.try_into()) {
            self.write_register(memory, register, u32::from_le_bytes(bytes));
        }
    }

    /// Returns true if a queue still has work. [`work`](Self::work) continues with it.
    #[must_use]
    pub fn due(&self) -> bool {
        self.more.load(Ordering::Acquire) || self.resumes.load(Ordering::Acquire)
    }

    /// Serves a portion of each queue that is [due](Self::due), and returns true if it did. Does
    /// nothing while another thread is serving the device, because that thread continues by itself.
    pub fn work<M: GuestMemory>(&self, memory: &M) -> bool {
        let Some(core) = self.try_core() else { return false };
        self.serve(memory, core);
        true
    }

    /// Serves queue `index` as if the driver had notified. Threads that have something for the
    /// driver call this method.
    pub fn notify<M: GuestMemory>(&self, memory: &M, index: u16) {
        let mut core = self.core();
        if let Some(slot) = core.slots.iter_mut().find(|slot| slot.setup.spec.index == index) {
            slot.due = true;
        }
        self.serve(memory, core);
        self.tell_served();
    }

    /// Wakes a thread that waits for the device to be quiesced. Without such a thread, no system
    /// call is made.
    fn tell_served(&self) {
        if self.awaited.load(Ordering::Acquire) {
            self.served.notify_all();
        }
    }

    /// Calls `act` with queue `index`, so that a thread of the device can take buffers or give some
    /// back. Returns `None` if no driver is ready, if the driver has not set up the queue, or if
    /// the ring is invalid, which stops the device.
    ///
    /// While `act` runs, vCPUs that access most registers wait for it. Therefore long work must be
    /// done between two calls.
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
            core.require_reset(error, &self.signals);
            self.more.store(false, Ordering::Release);
        }
        drop(core);
        // A resume that was requested while this thread had the lock is done by this thread, as in
        // `serve`.
        if self.resumes.load(Ordering::Acquire)
            && let Some(core) = self.try_core()
        {
            self.more.store(core.running(), Ordering::Release);
        }
        result?.ok()
    }

    /// Reports that a thread of the device has been quiesced, if this happened without a
    /// [notification](Self::notify). A thread that waits in [`quiesce`](Self::quiesce) then checks
    /// again.
    pub fn notify_quiesced(&self) {
        // Takes the lock so that this does not come between the check and the wait.
        drop(self.core());
        self.tell_served();
    }

    /// Serves a portion of each queue that is due.
    fn serve<'a, M: GuestMemory>(&'a self, memory: &M, mut core: MutexGuard<'a, Core<D>>) {
        loop {
            let more = core.serve_due(memory, &self.signals);
            self.more.store(more, Ordering::Release);
            drop(core);
            // A resume that was requested while this thread had the lock is done by this thread. If
            // another thread has the lock now, that thread does it.
            if !self.resumes.load(Ordering::Acquire) {
                return;
            }
            let Some(next) = self.try_core() else { return };
            core = next;
        }
    }

    /// Quiesces the device of a guest whose vCPUs are paused. The device completes the requests
    /// under way, and begins nothing new until [`resumed`](Self::resumed) is called. The state that
    /// is saved afterwards is consistent.
    ///
    /// Returns false if the device is not quiesced by `deadline`. Even then, the device begins
    /// nothing new, unless its lock was not available until `deadline`.
    #[must_use]
    pub fn quiesce(&self, deadline: Instant) -> bool {
        /// Interval of attempts to take the lock. Seldom needed, because the lock is held only
        /// while a ring is processed.
        const BETWEEN: Duration = Duration::from_millis(1);
        let left = || deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        // Does not wait for the lock: a thread of the device may hold it and sleep on a missing
        // page (hazards.md 18).
        let mut core = loop {
            match (self.try_core(), left()) {
                (Some(core), _) => break core,
                (None, None) => return false,
                (None, Some(_)) => std::thread::sleep(BETWEEN),
            }
        };
        self.awaited.store(true, Ordering::Release);
        let mut quiesced = core.device.quiesce();
        while let (false, Some(left)) = (quiesced, left()) {
            core = self.served.wait_timeout(core, left).unwrap_or_else(PoisonError::into_inner).0;
            quiesced = core.device.quiesce();
        }
        self.awaited.store(false, Ordering::Release);
        quiesced
    }

    /// Tells the device that the guest is about to run: for the first time, again, or after it was
    /// loaded. Pending interrupts are sent again, and all queues become due. The method never waits
    /// for a thread that sleeps on a missing page. If such a thread holds the device's lock, it
    /// tells the device itself when it wakes.
    ///
    /// # Errors
    /// Returns an error if the device cannot run on this host. See [`Device::resumed`].
    pub fn resumed(&self, how: Resume) -> Result<(), String> {
        let mut core = self.try_core();
        if core.is_none() {
            self.resumes.store(true, Ordering::Release);
            // The lock may have been released before its holder could see the flag.
            core = self.try_core();
        }
        if let Some(mut core) = core {
            core.resumed(how)?;
            self.more.store(core.running(), Ordering::Release);
        }
        self.signals.again();
        Ok(())
    }

    /// Returns the lock, unless another thread has it.
    fn try_core(&self) -> Option<MutexGuard<'_, Core<D>>> {
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if self.resumes.swap(false, Ordering::AcqRel)
            && let Err(why) = core.resumed(Resume::Again)
        {
            tracing::warn!(device = D::ID, why, "a virtio device cannot resume");
        }
        Some(core)
    }

    fn core(&self) -> MutexGuard<'_, Core<D>> {
        // A panic while the lock was held would be a defect of a device, which the driver can
        // reset.
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

/// Returns the register at `offset` if the access is valid for registers: 32 bits, aligned
/// (4.2.2.2).
fn aligned(offset: u64, len: usize) -> Option<u32> {
    u32::try_from(offset).ok().filter(|at| len == 4 && at.is_multiple_of(4))
}

/// Returns bank `select` of the four banks of 32 feature bits.
fn bank(features: u128, select: u32) -> u32 {
    let bytes = features.to_le_bytes();
    let at = usize::try_from(select).unwrap_or(usize::MAX).saturating_mul(4);
    bytes.get(at..at.saturating_add(4)).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}
