//! Free memory that the host really has.
//!
//! A host that is itself a virtual machine may have given free memory back to the machine below it.
//! The first write to such a page costs many times as much as clearing the page. Chance decides
//! which side of a comparison meets such pages. Therefore, before each migration, as much memory as
//! its target needs is touched and freed again.

use crate::floor::Mapping;
use crate::host::available_memory;

/// Memory in bytes that must stay free besides the touched memory.
const RESERVE: u64 = 1 << 30;

/// Touched memory. It is freed on drop, directly before the migration, which then finds it on the
/// free lists.
#[derive(Debug)]
pub struct Warm {
    _held: Option<Mapping>,
}

impl Warm {
    /// Touches `bytes` bytes, or less if less is available.
    #[must_use]
    pub fn hold(bytes: u64) -> Self {
        let available = available_memory().unwrap_or(0).saturating_sub(RESERVE);
        let held = usize::try_from(bytes.min(available)).ok().filter(|len| *len > 0);
        // A failure only makes the figures noisier, so it is ignored.
        let held = held.and_then(|len| Mapping::new(len).ok()).inspect(Mapping::touch);
        Self { _held: held }
    }
}
