//! Buffers of a driver as slices of memory.

use crate::queue::Part;
use vm_memory::bitmap::{BS, BitmapSlice};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// Slice of the memory `M`.
pub(super) type Slice<'a, M> = VolatileSlice<'a, BS<'a, <M as GuestMemory>::Bitmap>>;

/// Returns the total length of `parts` in bytes.
pub(super) fn total(parts: &[Part]) -> u64 {
    parts.iter().map(|part| u64::from(part.len)).sum()
}

/// Returns true if all of `parts` are in memory and have the direction `writable`.
pub(super) fn sound<M: GuestMemory>(memory: &M, parts: &[Part], writable: bool) -> bool {
    let access = if writable { Permissions::Write } else { Permissions::Read };
    parts.iter().all(|part| {
        let len = usize::try_from(part.len).unwrap_or(usize::MAX);
        part.writable == writable && memory.check_range(GuestAddress(part.gpa), len, access)
    })
}

/// Adds the memory of `part`, which is sound, to `slices`.
pub(super) fn push<'a, M: GuestMemory>(memory: &'a M, part: &Part, slices: &mut Vec<Slice<'a, M>>) {
    let len = usize::try_from(part.len).unwrap_or(usize::MAX);
    if let Ok(pieces) = memory.get_slices(GuestAddress(part.gpa), len, Permissions::ReadWrite) {
        // No piece is left out: the part was found to be completely in memory, and memory does not
        // change.
        slices.extend(pieces.map_while(Result::ok));
    }
}

/// Calls `each` for every piece of the bytes `from..from + len`, with a slice, the offset in it,
/// and the range of the bytes.
fn within<B: BitmapSlice>(
    slices: &[VolatileSlice<'_, B>],
    from: usize,
    len: usize,
    mut each: impl FnMut(&VolatileSlice<'_, B>, usize, std::ops::Range<usize>),
) {
    let (mut skip, mut done) = (from, 0);
    for slice in slices {
        if done == len {
            break;
        }
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let here = (slice.len() - skip).min(len - done);
        each(slice, skip, done..done + here);
        (skip, done) = (0, done + here);
    }
}

/// Marks the first `bytes` as dirty, after a system call wrote them without marking (hazards.md 4).
pub(super) fn mark<B: BitmapSlice>(slices: &[VolatileSlice<'_, B>], bytes: usize) {
    within(slices, 0, bytes, |slice, at, range| slice.bitmap().mark_dirty(at, range.len()));
}

/// Writes `bytes` at `from`, as far as there is room.
pub(super) fn write<B: BitmapSlice>(slices: &[VolatileSlice<'_, B>], from: usize, bytes: &[u8]) {
    within(slices, from, bytes.len(), |slice, at, range| {
        // The range is within the slice.
        let _ = slice.write_slice(&bytes[range], at);
    });
}

/// Reads `bytes.len()` bytes at `from`, as far as there are any.
pub(super) fn read<B: BitmapSlice>(slices: &[VolatileSlice<'_, B>], from: usize, bytes: &mut [u8]) {
    within(slices, from, bytes.len(), |slice, at, range| {
        // As above.
        let _ = slice.read_slice(&mut bytes[range], at);
    });
}
