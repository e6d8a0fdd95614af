//! A driver's buffers as pieces of memory.

use crate::queue::Part;
use vm_memory::bitmap::{BS, BitmapSlice};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// A piece of the memory `M`.
pub(super) type Slice<'a, M> = VolatileSlice<'a, BS<'a, <M as GuestMemory>::Bitmap>>;

/// Bytes of `parts`, as their descriptors say.
pub(super) fn total(parts: &[Part]) -> u64 {
    parts.iter().map(|part| u64::from(part.len)).sum()
}

/// Whether all of `parts` are in memory, and all are for the device to write if `writable`, or none is.
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
        // None is left out: all of the part was found to be in memory, which does not change.
        slices.extend(pieces.map_while(Result::ok));
    }
}

/// Calls `each` with what `slices` have of the bytes `from..from + len`: a slice, where in it, and which of the bytes.
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

/// Marks the first `bytes` as written: by a system call, which marks nothing. After it (hazards.md 4).
pub(super) fn mark<B: BitmapSlice>(slices: &[VolatileSlice<'_, B>], bytes: usize) {
    within(slices, 0, bytes, |slice, at, range| slice.bitmap().mark_dirty(at, range.len()));
}

/// Writes `bytes` at `from`, as far as there is room.
pub(super) fn write<B: BitmapSlice>(slices: &[VolatileSlice<'_, B>], from: usize, bytes: &[u8]) {
    within(slices, from, bytes.len(), |slice, at, range| {
        // It lies within the slice.
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
