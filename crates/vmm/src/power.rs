//! The power button: by it a host asks an operating system to shut down.
//!
//! A hardware-reduced machine has no button in fixed hardware, so it is one that ACPI tells of: an event of a generic event device
//! (ACPI 6.5, 5.6.9), whose method notifies a control method power button (4.8.2.2.1.2). The event is an edge of [`LINE`], and nothing
//! is kept of it: a press that comes while nobody listens is not heard, as on any machine without an operating system.

use crate::error::{Error, Result};
use crate::irq::IrqLine;
use crate::kvm::Machine;
use std::sync::Arc;
use vm_superio::Trigger;
use vmferry_kvm::state::IoapicState;

/// Its interrupt: a floppy controller's, which there is none of.
pub(crate) const LINE: u32 = 6;

/// In an entry of the I/O APIC's redirection table: the interrupt goes nowhere.
const MASKED: u64 = 1 << 16;

/// Presses it; `false` if the guest does not listen: it has no driver for it, or is not that far yet.
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
