//! Free page reporting (5.5.6.6): free pages that are given back to the host.

use super::Why;
use super::control::BalloonState;
use super::metrics::add;
use crate::queue::Buffer;
use crate::runs::Gather;
use std::sync::atomic::Ordering;

/// Processes a buffer of the reporting queue, whose parts are the free pages themselves.
///
/// The driver must not use the pages before it gets the buffer back. If it does, a page may read as
/// zeros, which harms only the guest itself.
pub(super) fn buffer(shared: &BalloonState, gather: &mut Gather, buffer: &Buffer) {
    gather.clear();
    for part in buffer.parts() {
        if !part.writable {
            shared.malformed("reports");
            return;
        }
        if let Err(why) = gather.add(&shared.layout, part.gpa, part.len.into()) {
            shared.bad_range("report", why);
        }
    }
    give_back(shared, gather);
}

/// Gives the pages of one report back to the host, if the operator has not switched this off.
pub(super) fn give_back(shared: &BalloonState, gather: &mut Gather) {
    let runs = gather.merged();
    let pages = runs.iter().map(|run| run.run.count).sum();
    add(&shared.metrics.reports, 1);
    add(&shared.metrics.reported_pages, pages);
    if !shared.reporting.load(Ordering::Acquire) {
        add(&shared.metrics.ignored_pages, pages);
    } else if shared.poisoned() {
        // The guest will check that its poison is still in the page. A dropped page would read as
        // zeros, although the content must not become anything other than the poison (5.5.6.6.2).
        add(&shared.metrics.poisoned_pages, pages);
    } else {
        shared.drop_pages(Why::Reported, runs);
    }
}
