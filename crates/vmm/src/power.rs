//! Power button, by which a host asks an operating system to shut down.
//!
//! A hardware-reduced machine has no button in fixed hardware. ACPI describes the button instead:
//! an event of a generic event device (ACPI 6.5, 5.6.9), whose method notifies a control method
//! power button (4.8.2.2.1.2). The event is an edge of [`LINE`] and is not stored: a press is lost
//! while the guest has no driver that listens, as on any machine without an operating system.

use crate::error::{Error, Result};
use crate::irq::IrqLine;
use crate::kvm::Machine;
use std::sync::Arc;
use vm_superio::Trigger;
use vmferry_kvm::state::IoapicState;

/// Interrupt of the button: that of a PC's floppy controller, which this machine does not have.
pub(crate) const LINE: u32 = 6;

/// Bit of an entry of the I/O APIC's redirection table that masks the interrupt.
const MASKED: u64 = 1 << 16;

/// Presses the button. Returns false if the guest does not listen, because it has no driver for the
/// button or has not loaded it yet.
pub(crate) fn press(machine: &Arc<Machine>) -> Result<bool> {
    let entry = IoapicState::read(machine.fd())?.redirection[LINE as usize];
    if entry & MASKED != 0 {
        return Ok(false);
    }
    let line = IrqLine { machine: Arc::clone(machine), gsi: LINE };
    line.trigger()
        .map_err(|source| Error::Kvm { what: "the power button's interrupt".to_owned(), source })?;
    Ok(true)
}
