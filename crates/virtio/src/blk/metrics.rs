//! Counters of a disk.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, BlkFigures, "Activity of a disk since it was created. A reset by the driver does not change the counters.";
    /// Reads.
    reads,
    /// Bytes read.
    read_bytes,
    /// Writes.
    writes,
    /// Bytes written.
    written_bytes,
    /// Flushes that the driver asked for.
    flushes,
    /// Ranges that the driver discarded.
    discards,
    /// Ranges that the driver filled with zeros.
    zeroes,
    /// Correct requests that the host could not do.
    host_errors,
    /// Requests that were answered with an error: those that the host could not do, and those that
    /// no driver should send (beyond the end, a fraction of a sector, a write to a read-only disk).
    io_errors,
    /// Requests of an unknown type.
    unsupported,
    /// Chains that are not requests and can only be given back.
    malformed,
    /// Invalid rings.
    broken,
    /// Requests done without waiting, by the thread that received the notification.
    at_once,
    /// Time from the start of requests to their end, in ns.
    busy_ns,
}
