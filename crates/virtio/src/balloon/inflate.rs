//! Inflating and deflating by page numbers (5.5.6).

use super::Why;
use super::control::BalloonState;
use super::metrics::add;
use crate::queue::Buffer;
use crate::runs::{Gather, GuestRun};
use std::sync::atomic::Ordering;
use std::time::Instant;
use vm_memory::GuestMemory;
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE};

/// Maximum number of page numbers in one buffer. Linux sends 256. Benchmarks also use a buffer of
/// 16384.
const MAX_NUMBERS: usize = 65_536;

/// Direction in which pages move: into the balloon or out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    In,
    Out,
}

/// Processes a buffer of 32-bit page numbers.
pub(super) fn numbers<M: GuestMemory>(
    shared: &BalloonState,
    way: Way,
    (gather, bytes): (&mut Gather, &mut Vec<u8>),
    buffer: &Buffer,
    memory: &M,
) {
    let began = Instant::now();
    gather.clear();
    if buffer.read(memory, MAX_NUMBERS * 4, bytes).is_err() || !bytes.len().is_multiple_of(4) {
        shared.malformed("page numbers");
        return;
    }
    for number in bytes.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)) {
        if let Err(why) = gather.add(&shared.layout, u64::from(number) << PAGE_SHIFT, PAGE_SIZE) {
            shared.bad_range("page number", why);
        }
    }
    let pages = gather.merged().iter().map(|run| run.run.count).sum();
    match way {
        Way::In => inflated(shared, pages, gather.merged(), began),
        // The content of the pages is undefined (5.5.6), and a page is allocated when it is
        // touched. Nothing has to be done.
        Way::Out => deflated(shared, pages),
    }
}

/// Drops the pages of a request to inflate that arrived at `began`.
pub(super) fn inflated(shared: &BalloonState, pages: u64, runs: &[GuestRun], began: Instant) {
    add(&shared.metrics.inflated_pages, pages);
    shared.note_progress();
    shared.drop_pages(Why::Inflated, runs);
    add(&shared.metrics.inflate_ns, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
}

/// Counts pages of a request to deflate.
///
/// A driver that makes the balloon smaller on request writes the new size after it has taken the
/// pages out. Therefore the balloon is still larger than requested when such a request arrives.
pub(super) fn deflated(shared: &BalloonState, pages: u64) {
    add(&shared.metrics.deflated_pages, pages);
    if shared.actual.load(Ordering::Acquire) <= shared.target.load(Ordering::Acquire) {
        add(&shared.metrics.taken_back_pages, pages);
    }
}
