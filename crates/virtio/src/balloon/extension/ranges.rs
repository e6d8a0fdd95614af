//! Inflating and deflating by ranges.

use super::super::control::BalloonState;
use super::super::inflate::{Way, deflated, inflated};
use crate::queue::{Buffer, BufferError};
use crate::runs::Gather;
use std::time::Instant;
use vm_memory::GuestMemory;
use vmferry_guest_abi::balloon::{DEFLATE, INFLATE, MAX_RANGES};

/// Size of a buffer's header, in bytes.
const HEADER: usize = 8;
/// Size of a range, in bytes.
const RANGE: usize = 16;

/// Processes a buffer of the queue for ranges.
pub(crate) fn ranges<M: GuestMemory>(
    shared: &BalloonState,
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
            deflated(shared, pages);
            if let Err(error) = shared.host.make_zeros(runs) {
                shared.host_error(&error);
            }
        }
    }
}

/// Returns the direction and the ranges. The number of ranges must match the header.
fn header(bytes: &[u8]) -> Result<(Way, &[[u8; RANGE]]), BufferError> {
    let (header, ranges) = bytes.split_at_checked(HEADER).ok_or(BufferError::Content)?;
    let (ranges, []) = ranges.as_chunks() else { return Err(BufferError::Content) };
    let [what, count] = [word(&header[..4]), word(&header[4..])];
    let way = match what {
        _ if what == u64::from(INFLATE) => Way::In,
        _ if what == u64::from(DEFLATE) => Way::Out,
        _ => return Err(BufferError::Content),
    };
    // The buffer was read up to `MAX_RANGES` ranges, which bounds the count as well.
    if count == 0 || count != ranges.len() as u64 { Err(BufferError::Content) } else { Ok((way, ranges)) }
}

/// Returns the little-endian number in `bytes`, which has at most 8 bytes.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
