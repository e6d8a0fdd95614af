//! Random numbers for the guest (virtio 1.2, section 5.4): bits of the host's kernel, and no more of them in a second than
//! [`BYTES_PER_SECOND`], so that a guest cannot keep the host's generator for itself.
//!
//! A buffer is given back with as much of it filled as the budget has, at least one byte (5.4.6.1). A driver that has used it up waits: a
//! thread of the device's rings when there is something again.

mod device;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod metrics;
#[cfg(test)]
mod tests;
mod timer;

pub use device::{Rng, RngSaved};
pub use metrics::RngFigures;

/// How much a guest gets in a second, in bytes. A kernel that seeds its own generator takes some hundred.
pub const BYTES_PER_SECOND: u64 = 1 << 20;
/// How much of it at once, in bytes.
pub const BURST: u64 = 64 << 10;
