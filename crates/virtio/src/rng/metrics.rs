//! What happened.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, RngFigures, "What a source of random numbers did since it was made.";
    /// Buffers filled, as far as they were.
    buffers,
    /// Bytes given.
    bytes,
    /// How often a driver had to wait.
    waits,
    /// Buffers that were not in memory, or not for the device to write.
    malformed,
    /// Rings that could not be followed.
    broken,
    /// Refusals of the host.
    host_errors,
}
