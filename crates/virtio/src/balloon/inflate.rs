//! Pages into the balloon and out of it: by page numbers (5.5.6), and by ranges.

use super::Why;
use super::control::Shared;
use super::metrics::add;
use crate::queue::{Buffer, BufferError};
use crate::runs::{Gather, GuestRun};
use std::time::Instant;
use vm_memory::GuestMemory;
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE};
use vmferry_guest_abi::balloon::{DEFLATE, INFLATE, MAX_RANGES};

/// Most page numbers in one buffer. Linux sends 256; a buffer of 16384 is among those that are compared.
const MAX_NUMBERS: usize = 65_536;

/// First bytes of a buffer of ranges.
const HEADER: usize = 8;
/// Bytes of a range.
const RANGE: usize = 16;

/// Which way pages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    In,
    Out,
}

/// A buffer of page numbers, of 32 bits each.
pub(super) fn numbers<M: GuestMemory>(
    shared: &Shared,
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
        // What they hold is not defined (5.5.6): there is nothing to do, a page comes when it is touched.
        Way::Out => add(&shared.metrics.deflated_pages, pages),
    }
}

/// A buffer of ranges ([`vmferry_guest_abi::balloon::RANGES_QUEUE`]).
pub(super) fn ranges<M: GuestMemory>(
    shared: &Shared,
    (gather, bytes): (&mut Gather, &mut Vec<u8>),
    buffer: &Buffer,
    memory: &M,
) {
    let began = Instant::now();
    gather.clear();
    let most = HEADER + RANGE * usize::try_from(MAX_RANGES).unwrap_or(0);
    let read = buffer.read(memory, most, bytes).and_then(|()| header(bytes));
    let Ok((way, ranges)) = read else {
        shared.malformed("ranges");
        return;
    };
    for range in ranges {
        let (gpa, len) = range.split_at(RANGE / 2);
        if let Err(why) = gather.add(&shared.layout, word(gpa), word(len)) {
            shared.bad_range("range", why);
        }
    }
    let runs = gather.merged();
    let pages = runs.iter().map(|run| run.run.count).sum();
    match way {
        Way::In => inflated(shared, pages, runs, began),
        Way::Out => {
            add(&shared.metrics.deflated_pages, pages);
            if let Err(error) = shared.host.make_zeros(runs) {
                shared.host_error(&error);
            }
        }
    }
}

/// Drops what was put into the balloon by a request that came at `began`.
fn inflated(shared: &Shared, pages: u64, runs: &[GuestRun], began: Instant) {
    add(&shared.metrics.inflated_pages, pages);
    shared.drop_pages(Why::Inflated, runs);
    add(&shared.metrics.inflate_ns, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
}

/// The way and the ranges; there must be as many as the header says.
fn header(bytes: &[u8]) -> Result<(Way, &[[u8; RANGE]]), BufferError> {
    let (header, ranges) = bytes.split_at_checked(HEADER).ok_or(BufferError::Content)?;
    let (ranges, []) = ranges.as_chunks() else { return Err(BufferError::Content) };
    let [what, count] = [word(&header[..4]), word(&header[4..])];
    let way = match what {
        _ if what == u64::from(INFLATE) => Way::In,
        _ if what == u64::from(DEFLATE) => Way::Out,
        _ => return Err(BufferError::Content),
    };
    // The buffer was read up to `MAX_RANGES` of them, so this bounds the count, too.
    if count == 0 || count != ranges.len() as u64 { Err(BufferError::Content) } else { Ok((way, ranges)) }
}

/// A little-endian number of at most 8 bytes.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
