//! Interrupts and configuration changes that a device signals to its driver.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

/// Interrupt line of a device. The line is edge-triggered, so each call of
/// [`trigger`](Self::trigger) is an interrupt.
pub trait Interrupt: Send + Sync + Debug {
    /// Sends the interrupt. When this method returns, the interrupt controller has received it.
    ///
    /// # Errors
    /// Returns an error if the host refuses.
    fn trigger(&self) -> io::Result<()>;
}

/// Interrupt status, configuration generation and interrupt line of one device. The type has no
/// lock, because a vCPU reads and acknowledges interrupts while a request of another vCPU is being
/// processed, and because a control thread must never wait for such a request.
#[derive(Debug)]
pub struct Signals {
    status: AtomicU32,
    generation: AtomicU32,
    /// True if the driver is ready for interrupts (DRIVER_OK).
    live: AtomicBool,
    line: Box<dyn Interrupt>,
}

impl Signals {
    /// Creates the signals for the interrupt line `line`, with nothing pending.
    #[must_use]
    pub fn new(line: Box<dyn Interrupt>) -> Arc<Self> {
        let (status, generation) = (AtomicU32::new(0), AtomicU32::new(0));
        Arc::new(Self { status, generation, live: AtomicBool::new(false), line })
    }

    /// Signals that the device has used a buffer.
    pub fn used_buffer(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// Signals that the configuration has changed. The change must already be readable.
    pub fn config_changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// Sends the interrupt again if something has not been acknowledged, for a guest that has just
    /// been loaded or resumed. An interrupt too many is harmless, but a lost interrupt is not.
    pub fn again(&self) {
        if self.status.load(Ordering::Acquire) != 0 {
            self.trigger();
        }
    }

    pub(crate) fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    pub(crate) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::AcqRel);
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn set_live(&self, live: bool) {
        self.live.store(live, Ordering::Release);
        if !live {
            self.status.store(0, Ordering::Release);
        }
    }

    pub(crate) fn load(&self, status: u32, generation: u32, live: bool) {
        self.generation.store(generation, Ordering::Release);
        self.status.store(status & (VIRTIO_MMIO_INT_VRING | VIRTIO_MMIO_INT_CONFIG), Ordering::Release);
        self.live.store(live, Ordering::Release);
    }

    fn raise(&self, bit: u32) {
        // Before DRIVER_OK a driver must not get interrupts (3.1.1). It reads earlier changes
        // anyway.
        if self.live.load(Ordering::Acquire) {
            // The status is set first, because the driver reads it when the interrupt arrives.
            self.status.fetch_or(bit, Ordering::AcqRel);
            self.trigger();
        }
    }

    fn trigger(&self) {
        if let Err(error) = self.line.trigger() {
            tracing::warn!(%error, "cannot send an interrupt of a virtio device");
        }
    }
}
