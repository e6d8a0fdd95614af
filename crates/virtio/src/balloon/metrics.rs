//! Counters of the balloon.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, BalloonFigures, "Activity of a balloon since it was created. A reset by the driver does not change the counters.";
    /// Pages put into the balloon.
    inflated_pages,
    /// Time spent in requests that put pages into the balloon, dropping included, in ns.
    inflate_ns,
    /// Pages taken out of the balloon.
    deflated_pages,
    /// Pages that the driver took out of a balloon that was not larger than requested, because the
    /// guest was short of memory. `deflated_pages` includes them.
    taken_back_pages,
    /// Buffers and hypercalls with reports.
    reports,
    /// Pages reported.
    reported_pages,
    /// Reported pages that were kept because the guest relies on their content (page poison).
    poisoned_pages,
    /// Reported pages that were kept because reporting was switched off.
    ignored_pages,
    /// Pages that were kept because the host could not drop them at that moment.
    held_pages,
    /// Pages that were dropped.
    dropped_pages,
    /// Time spent on dropping pages, in ns.
    drop_ns,
    /// Pages hinted.
    hinted_pages,
    /// Hints for a command that had ended.
    stale_hints,
    /// Statistics received.
    stats,
    /// Ranges and page numbers outside guest memory.
    outside,
    /// Ranges that are not whole pages.
    unaligned,
    /// Malformed buffers.
    malformed,
    /// Invalid rings.
    broken,
    /// Operations that the host refused.
    host_errors,
}
