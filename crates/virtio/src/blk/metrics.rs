//! What happened.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, BlkFigures, "What a disk did since it was made; a reset by the driver changes nothing in it.";
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
    /// Ranges that the driver does not need any more.
    discards,
    /// Ranges that were to be zeros.
    zeroes,
    /// Refusals of the host: requests that were right, and that the file could not do.
    host_errors,
    /// Requests that were answered with an error: those, and what no driver should ask for (beyond the end, in fractions of a sector, to
    /// write to what is read-only).
    io_errors,
    /// Requests of a kind that the device does not know.
    unsupported,
    /// Chains that are no request at all, and that can only be given back.
    malformed,
    /// Rings that could not be followed.
    broken,
    /// Requests that took no waiting, done by the thread that was notified of them.
    at_once,
    /// Nanoseconds that requests took, from being taken to their end.
    busy_ns,
}
