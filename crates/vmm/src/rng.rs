//! Random number device on the bus.

use crate::error::{Error, Result};
use crate::kvm::Machine;
use crate::state::Saved;
use crate::virtio::{VirtioMmio, wire};
use std::sync::Arc;
use vmferry_virtio::mmio::TransportSaved;
use vmferry_virtio::rng::{Rng, RngSaved};
use vmferry_virtio::signals::Interrupt;

/// Saved state of the device, registers and queue included.
type RngSection = TransportSaved<RngSaved>;

impl Saved for RngSection {
    const NAME: &'static str = "virtio-rng";
    const VERSION: u32 = 1;
}

/// Returns a device with its interrupt at `line`.
pub(crate) fn make(machine: &Machine, line: Box<dyn Interrupt>) -> Result<Arc<VirtioMmio<Rng>>> {
    let (wiring, socket) = wire(line);
    let device = Rng::new(wiring);
    let device = device.map_err(|source| Error::DeviceThread { name: RngSection::NAME, source })?;
    Ok(socket.plug(device, machine.ram(), 0))
}
