//! Counters of the random number device.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, RngFigures, "Activity of a random number device since it was created.";
    /// Buffers that were filled, at least in part.
    buffers,
    /// Bytes given to the guest.
    bytes,
    /// Number of times that a driver had to wait.
    waits,
    /// Buffers that were not in memory or not writable by the device.
    malformed,
    /// Invalid rings.
    broken,
    /// Errors of the host.
    host_errors,
}
