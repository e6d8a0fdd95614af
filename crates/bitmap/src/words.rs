//! Zeroed words that take memory only where they are accessed.

use std::alloc::{Layout, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Minimum size in bytes of words that have a mapping of their own: those of a guest of 4 GiB.
///
/// The kernel allocates the memory of a mapping at the first access. An allocator would reuse and
/// clear memory of its own, even for tens of megabytes, which takes milliseconds.
#[cfg(all(unix, not(miri)))]
const MAPPED_BYTES: usize = 128 << 10;

/// Fixed number of words with one owner.
///
/// Invariant: `start` points to `len` words that this value owns. If they have at least
/// [`MAPPED_BYTES`], they are a mapping, otherwise a boxed slice.
pub(crate) struct Words {
    start: NonNull<u64>,
    len: usize,
}

// SAFETY: a `Words` owns its words like a `Box<[u64]>`.
unsafe impl Send for Words {}
// SAFETY: as above. Shared references give shared access only.
unsafe impl Sync for Words {}

impl Words {
    /// Returns `len` words that are zero.
    pub(crate) fn zeroed(len: usize) -> Self {
        let layout = Layout::array::<u64>(len).expect("a bitmap of the address space fits in memory");
        if is_mapped(layout.size()) {
            let start = map(layout.size()).unwrap_or_else(|| handle_alloc_error(layout));
            return Self { start, len };
        }
        let boxed = Box::into_raw(vec![0u64; len].into_boxed_slice());
        Self { start: NonNull::new(boxed.cast()).expect("the address of a box is not 0"), len }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if is_mapped(size_of_val::<[u64]>(self)) {
            unmap(self.start, size_of_val::<[u64]>(self));
        } else {
            let words = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len);
            // SAFETY: `zeroed` got this slice from a box, and nothing else frees it.
            drop(unsafe { Box::from_raw(words) });
        }
    }
}

impl Deref for Words {
    type Target = [u64];

    #[inline]
    fn deref(&self) -> &[u64] {
        // SAFETY: `start` points to `len` initialized words, which live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Words {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: as above. `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Clone for Words {
    fn clone(&self) -> Self {
        let mut words = Self::zeroed(self.len);
        words.copy_from_slice(self);
        words
    }
}

impl PartialEq for Words {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Words {}

/// [`Words`] that threads access concurrently.
pub(crate) struct AtomicWords(Words);

impl AtomicWords {
    /// Returns `len` words that are zero.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self(Words::zeroed(len))
    }
}

impl From<Words> for AtomicWords {
    fn from(words: Words) -> Self {
        Self(words)
    }
}

impl Deref for AtomicWords {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        const { assert!(align_of::<AtomicU64>() <= align_of::<u64>(), "words are aligned for atomics") };
        // SAFETY: `AtomicU64` has the size and the bit validity of `u64`, and its alignment is at
        // most that of `u64` (asserted above). The words live as long as `self`, and the `Words`
        // within is accessed in no other way.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr().cast(), self.0.len) }
    }
}

impl std::fmt::Debug for AtomicWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AtomicWords({})", self.0.len)
    }
}

#[cfg(all(unix, not(miri)))]
fn is_mapped(bytes: usize) -> bool {
    bytes >= MAPPED_BYTES
}

#[cfg(all(unix, not(miri)))]
fn map(bytes: usize) -> Option<NonNull<u64>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) }.ok()?;
    // A huge page would be allocated for a single page of the guest.
    #[cfg(target_os = "linux")]
    // SAFETY: advice on the new mapping, which changes no content. Without the advice, the bitmap
    // takes more memory.
    let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxNoHugepage) };
    NonNull::new(start.cast())
}

#[cfg(all(unix, not(miri)))]
fn unmap(start: NonNull<u64>, bytes: usize) {
    // SAFETY: `map` returned this mapping, and no reference to it is left. The call cannot fail for
    // a whole mapping.
    let _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), bytes) };
}

#[cfg(not(all(unix, not(miri))))]
fn is_mapped(_: usize) -> bool {
    false
}

#[cfg(not(all(unix, not(miri))))]
fn map(_: usize) -> Option<NonNull<u64>> {
    None
}

#[cfg(not(all(unix, not(miri))))]
fn unmap(_: NonNull<u64>, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn words_are_zeroed_and_kept_in_both_kinds_of_memory() {
        for len in [0, 1, 1000, (128 << 10) / 8 - 1, (128 << 10) / 8, 1 << 20] {
            let mut words = Words::zeroed(len);
            assert!(words.len() == len && words.iter().all(|word| *word == 0), "{len}");
            if let Some(last) = words.last_mut() {
                *last = 7;
            }
            let copy = words.clone();
            assert!(copy == words, "{len}");
            let atomics = AtomicWords::from(words);
            assert_eq!(atomics.last().map(|word| word.load(Ordering::Relaxed)), copy.last().copied());
        }
        assert!(AtomicWords::zeroed(70).iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }
}
