//! Free pages that are given back: free page reporting (5.5.6.6).

use super::Why;
use super::control::Shared;
use super::metrics::add;
use crate::queue::Buffer;
use crate::runs::Gather;

/// A buffer of the reporting queue: its parts are the free pages themselves.
///
/// The driver does not use them until it has the buffer back. A page that it does use is its own loss: it reads as zeros.
pub(super) fn buffer(shared: &Shared, gather: &mut Gather, buffer: &Buffer) {
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

/// Gives the pages of one report back to the host.
pub(super) fn give_back(shared: &Shared, gather: &mut Gather) {
    let runs = gather.merged();
    let pages = runs.iter().map(|run| run.run.count).sum();
    add(&shared.metrics.reports, 1);
    add(&shared.metrics.reported_pages, pages);
    if shared.poisoned() {
        // The guest will look whether its poison is still there, and a dropped page reads as zeros (5.5.6.6.2: content must not
        // become anything but the poison).
        add(&shared.metrics.poisoned_pages, pages);
    } else {
        shared.drop_pages(Why::Reported, runs);
    }
}
