//! Driver for virtio devices with memory-mapped registers (virtio 1.2, section 4.2), which works by
//! polling.

mod mmio;
mod queue;

pub(crate) use mmio::{Mmio, VERSION_1, find};
pub(crate) use queue::{Part, VirtQueue};
