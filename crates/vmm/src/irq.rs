//! Interrupt lines of the kernel's interrupt controllers.
//!
//! Devices pulse their lines by `KVM_IRQ_LINE`, not by an eventfd (`KVM_IRQFD`). When
//! [`IrqLine::trigger`] returns, the interrupt is in the controller, and a later save includes it.
//! An eventfd is passed on by a kernel thread, which a save would have to wait for (see
//! [`kicks`](crate::kicks) for measurements).

use crate::kvm::Machine;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmferry_virtio::signals::Interrupt;

/// Number of inputs of KVM's I/O APIC.
const INPUTS: usize = 24;

/// Locks of a VM's interrupt lines.
#[derive(Debug, Default)]
pub(crate) struct LineLocks([Mutex<()>; INPUTS]);

impl LineLocks {
    /// Returns the lock of line `gsi`.
    fn of(&self, gsi: u32) -> &Mutex<()> {
        &self.0[gsi as usize % INPUTS]
    }
}

/// Edge-triggered interrupt line. Several values may stand for one line of a VM.
#[derive(Debug)]
pub(crate) struct IrqLine {
    pub(crate) machine: Arc<Machine>,
    pub(crate) gsi: u32,
}

impl IrqLine {
    fn lock(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data, so a panic cannot leave anything half changed.
        self.machine.lines().of(self.gsi).lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, high: bool) -> io::Result<()> {
        let set = self.machine.fd().set_irq_line(self.gsi, high);
        set.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    fn pulse(&self) -> io::Result<()> {
        pulse(|| self.lock(), |high| self.set(high))
    }
}

/// Raises a line and lowers it again, while holding the line's lock.
///
/// KVM keeps the level of each line, and only a change from low to high is an edge
/// (arch/x86/kvm/ioapic.c and i8259.c). A thread that raised the line between the two calls of
/// another thread would cause no edge. If the guest had already served the first interrupt, it
/// would never learn of the second event.
fn pulse<G>(lock: impl FnOnce() -> G, set: impl Fn(bool) -> io::Result<()>) -> io::Result<()> {
    let _held = lock();
    set(true)?;
    set(false)
}

impl vm_superio::Trigger for IrqLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.pulse()
    }
}

impl Interrupt for IrqLine {
    fn trigger(&self) -> io::Result<()> {
        self.pulse()
    }
}

#[cfg(test)]
#[path = "irq_tests.rs"]
mod tests;
