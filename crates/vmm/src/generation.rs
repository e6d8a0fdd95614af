//! The VM generation ID: 128 random bits by which a guest learns that it is a copy.
//!
//! The ID lies in guest memory, and an ACPI device says where ("Virtual Machine Generation ID", Microsoft 2012; Linux:
//! drivers/virt/vmgenid.c). The VMM writes it when a kernel boots. It moves with the memory, and a reset keeps it, so a guest that is moved
//! or restarted has the ID that it had. A guest that is taken out of a copy gets a new one before it runs, and an event of the generic event
//! device tells it so. Linux then seeds its random number generator anew: without that, copies would draw the same keys.
//!
//! The ID is no part of the saved state, so a version that does not know it can take the guest. A page begins with [`SIGNATURE`] if its ID is
//! the guest's. A guest that was started by a version without the device has no such page, and its copies are left as they are.

use crate::boot::{BootError, GENERATION};
use crate::error::{Error, Result};
use crate::irq::IrqLine;
use crate::kvm::Machine;
use crate::memory::GuestRam;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};
use vm_superio::Trigger;

/// Its interrupt: a printer port's, which there is none of.
pub(crate) const LINE: u32 = 7;

/// First bytes of the ID's page. The ID follows them.
const SIGNATURE: [u8; 16] = *b"vmferry VMGenID\0";

/// Address of the ID, a multiple of 8.
const ADDRESS: u64 = GENERATION + SIGNATURE.len() as u64;

/// The address of the ID as ACPI gives it: the low and the high 32 bits.
pub(crate) const fn halves() -> [u32; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "one half, and then the other")]
    [ADDRESS as u32, (ADDRESS >> 32) as u32]
}

/// A VM generation ID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GenerationId([u8; 16]);

impl GenerationId {
    /// Returns an ID that no other VM has.
    ///
    /// # Errors
    /// If the host gives no random numbers.
    pub(crate) fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
            .map_err(|error| Error::Options(format!("no random VM generation ID: {error}")))?;
        Ok(Self(bytes))
    }
}

/// Writes the page of `id`, for a kernel that is about to boot.
///
/// # Errors
/// If the guest has no memory there.
pub(crate) fn install(ram: &GuestRam, id: &GenerationId) -> std::result::Result<(), BootError> {
    let page = [SIGNATURE, id.0].concat();
    let written = ram.map().write_slice(&page, GuestAddress(GENERATION));
    written.map_err(|error| BootError::Invalid(error.to_string()))
}

/// Gives the guest of `machine`, whose state is loaded and whose vCPUs stand still, a new ID, and tells it. Returns false for a guest that
/// was started without one.
///
/// # Errors
/// If guest memory cannot be reached, or KVM refuses the interrupt.
pub(crate) fn renew(machine: &Arc<Machine>) -> Result<bool> {
    let (what, memory) = ("give the guest a new VM generation ID", machine.ram().map());
    let failed = |error: vm_memory::GuestMemoryError| Error::WrongState { what, why: error.to_string() };
    let mut signature = [0; SIGNATURE.len()];
    memory.read_slice(&mut signature, GuestAddress(GENERATION)).map_err(failed)?;
    if signature != SIGNATURE {
        return Ok(false);
    }
    let id = GenerationId::random()?;
    // Marks the page as written by the VMM.
    memory.write_slice(&id.0, GuestAddress(ADDRESS)).map_err(failed)?;
    // After the ID: the guest looks at it when the interrupt comes. The interrupt controllers are loaded.
    let line = IrqLine { machine: Arc::clone(machine), gsi: LINE };
    let told = line.trigger();
    told.map_err(|source| Error::Kvm { what: "the interrupt of the VM generation ID".to_owned(), source })?;
    Ok(true)
}

#[cfg(test)]
#[path = "generation_tests.rs"]
mod tests;
