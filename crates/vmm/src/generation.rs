//! VM generation ID: 128 random bits whose change tells a guest that it is a copy.
//!
//! The ID is in guest memory, and an ACPI device gives its address ("Virtual Machine Generation
//! ID", Microsoft 2012; Linux: drivers/virt/vmgenid.c). The VMM writes the ID when a kernel boots.
//! The ID moves with the memory, and a reset keeps it, so a guest that is migrated or restarted
//! keeps its ID. A guest that is restored as a copy gets a new ID before it runs, and an event of
//! the generic event device tells the guest. Linux then reseeds its random number generator.
//! Without this, copies would draw the same keys.
//!
//! The ID is not part of the saved state, so a version without support for it can receive the
//! guest. A page that begins with [`SIGNATURE`] has the guest's ID. A guest that was started by a
//! version without the device has no such page, and copies of it are left unchanged.

use crate::boot::{BootError, GENERATION};
use crate::error::{Error, Result};
use crate::irq::IrqLine;
use crate::kvm::Machine;
use crate::memory::GuestRam;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};
use vm_superio::Trigger;

/// Interrupt of the device: that of a PC's printer port, which this machine does not have.
pub(crate) const LINE: u32 = 7;

/// First bytes of the ID's page. The ID follows them.
const SIGNATURE: [u8; 16] = *b"vmferry VMGenID\0";

/// Address of the ID, a multiple of 8.
const ADDRESS: u64 = GENERATION + SIGNATURE.len() as u64;

/// Returns the address of the ID in the form that ACPI uses: the low and the high 32 bits.
pub(crate) const fn halves() -> [u32; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "one half, and then the other")]
    [ADDRESS as u32, (ADDRESS >> 32) as u32]
}

/// VM generation ID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GenerationId([u8; 16]);

impl GenerationId {
    /// Returns an ID that no other VM has.
    ///
    /// # Errors
    /// Returns an error if the host provides no random numbers.
    pub(crate) fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
            .map_err(|error| Error::RandomId(error.into()))?;
        Ok(Self(bytes))
    }
}

/// Writes the page of `id`, for a kernel that is about to boot.
///
/// # Errors
/// Returns an error if the guest has no memory at the address.
pub(crate) fn install(ram: &GuestRam, id: &GenerationId) -> std::result::Result<(), BootError> {
    let page = [SIGNATURE, id.0].concat();
    let written = ram.map().write_slice(&page, GuestAddress(GENERATION));
    written.map_err(|error| BootError::Invalid(error.to_string()))
}

/// Gives the guest of `machine` a new ID and tells it. The state must be loaded and the vCPUs
/// paused. Returns false for a guest that was started without an ID.
///
/// # Errors
/// Returns an error if guest memory cannot be accessed, or if KVM refuses the interrupt.
pub(crate) fn renew(machine: &Arc<Machine>) -> Result<bool> {
    let (what, memory) = ("give the guest a new VM generation ID", machine.ram().map());
    let failed = |error: vm_memory::GuestMemoryError| Error::WrongState { what, why: error.to_string() };
    let mut signature = [0; SIGNATURE.len()];
    memory.read_slice(&mut signature, GuestAddress(GENERATION)).map_err(failed)?;
    if signature != SIGNATURE {
        return Ok(false);
    }
    let id = GenerationId::random()?;
    // This also marks the page as written by the VMM.
    memory.write_slice(&id.0, GuestAddress(ADDRESS)).map_err(failed)?;
    // The interrupt comes after the ID, because the guest reads the ID when the interrupt arrives.
    // The interrupt controllers are already loaded.
    let line = IrqLine { machine: Arc::clone(machine), gsi: LINE };
    let told = line.trigger();
    told.map_err(|source| Error::Kvm { what: "the interrupt of the VM generation ID".to_owned(), source })?;
    Ok(true)
}

#[cfg(test)]
#[path = "generation_tests.rs"]
mod tests;
