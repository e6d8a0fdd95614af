//! Random numbers for the guest (virtio 1.2, section 5.4), from the host's kernel. A guest gets at
//! most [`BYTES_PER_SECOND`], so that it cannot occupy the host's generator.
//!
//! The device fills a buffer as far as the budget permits, but with at least one byte (5.4.6.1). A
//! driver that has used up its budget waits until a thread of the device rings the doorbell.

mod device;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod metrics;
#[cfg(test)]
mod tests;
mod timer;

pub use device::{Rng, RngSaved};
pub use metrics::RngFigures;

/// Number of bytes that a guest gets per second. A kernel needs only some hundred bytes to seed its
/// own generator.
pub const BYTES_PER_SECOND: u64 = 1 << 20;
/// Number of bytes that a guest gets at most at once, when its budget is full.
pub const BURST: u64 = 64 << 10;
