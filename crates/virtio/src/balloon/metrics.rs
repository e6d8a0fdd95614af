//! Counters of the balloon.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, BalloonFigures, "What a balloon did since it was made; a reset by the driver changes nothing in it.";
    /// Pages put into the balloon.
    inflated_pages,
    /// Nanoseconds in requests that put pages into it, dropping included.
    inflate_ns,
    /// Pages taken out of it.
    deflated_pages,
    /// Buffers and hypercalls with reports.
    reports,
    /// Pages reported.
    reported_pages,
    /// Pages that stayed because the guest relies on what is in them (page poison).
    poisoned_pages,
    /// Pages that stayed because the host could not lose them at that moment.
    held_pages,
    /// Pages that were dropped.
    dropped_pages,
    /// Nanoseconds in dropping.
    drop_ns,
    /// Pages hinted.
    hinted_pages,
    /// Hints for a command that was over.
    stale_hints,
    /// Statistics received.
    stats,
    /// Ranges and page numbers that are not in memory.
    outside,
    /// Ranges that are not whole pages.
    unaligned,
    /// Buffers that made no sense.
    malformed,
    /// Rings that could not be followed.
    broken,
    /// Refusals of the host.
    host_errors,
}
