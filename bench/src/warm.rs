//! Free memory that the host really has.
//!
//! On a host that is itself a virtual machine, free memory may have been given back to the machine below, and
//! then the first write to a page costs many times what clearing it costs. Which side of a comparison meets such
//! pages is chance. So before each migration as much memory as its destination needs is touched and freed again.

use crate::floor::Mapping;
use crate::host::available_memory;

/// Memory that must stay free beside it, in bytes.
const RESERVE: u64 = 1 << 30;

/// Touched memory, freed when dropped: right before the migration, which then finds it on the free lists.
#[derive(Debug)]
pub struct Warm {
    _held: Option<Mapping>,
}

impl Warm {
    /// Touches `bytes`, or less if less is available.
    #[must_use]
    pub fn hold(bytes: u64) -> Self {
        let available = available_memory().unwrap_or(0).saturating_sub(RESERVE);
        let held = usize::try_from(bytes.min(available)).ok().filter(|len| *len > 0);
        // Without it the figures are noisier, nothing else.
        let held = held.and_then(|len| Mapping::new(len).ok()).inspect(Mapping::touch);
        Self { _held: held }
    }
}
