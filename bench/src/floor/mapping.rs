//! Anonymous memory that is mapped like a guest's: private and with huge pages enabled.

use std::io;
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Size and alignment of a transparent huge page on x86-64, in bytes.
const HUGE_PAGE: usize = 2 << 20;

/// Private anonymous mapping that is aligned to a huge page and advised to use huge pages.
///
/// Invariant: `base .. base + mapped` is one readable and writable mapping that only this value
/// owns, and `start .. start + len` lies inside it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    mapped: usize,
    start: *mut u8,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes. The first write to each page makes the page present.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let mapped = len
            .checked_add(HUGE_PAGE)
            .ok_or_else(|| io::Error::other(format!("{len} bytes cannot be mapped")))?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice changes no other
        // mapping.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        let base = base.cast::<u8>();
        let start = base.wrapping_add(base.align_offset(HUGE_PAGE));
        let mapping = Mapping { base, mapped, start, len };
        // SAFETY: the range is part of the mapping made above, and the advice changes no content.
        unsafe { madvise(mapping.start.cast(), len, Advice::LinuxHugepage)? };
        Ok(mapping)
    }

    /// Makes all pages present.
    pub(crate) fn touch(&self) {
        // SAFETY: this value owns the range, and populating changes no content. A kernel without
        // this advice leaves the memory as it is.
        let _ = unsafe { madvise(self.start.cast(), self.len, Advice::LinuxPopulateWrite) };
    }

    /// Returns the memory. Pages that were never written read as zeros.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped and initialized (the kernel provides zeros) for as long as
        // `self` lives, and only `bytes_mut`, which needs `&mut self`, writes to it.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Returns the memory for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: only this value owns the mapping, and no reference outlives `self`. After a
        // failure the memory stays mapped until the process ends, which is harmless.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_is_aligned_zeroed_and_writable_to_both_ends() {
        let mut mapping = Mapping::new(3 << 20).unwrap();
        assert_eq!(mapping.bytes().as_ptr().align_offset(HUGE_PAGE), 0);
        assert!(mapping.bytes().iter().all(|&b| b == 0));
        let bytes = mapping.bytes_mut();
        bytes[0] = 1;
        *bytes.last_mut().unwrap() = 2;
        assert_eq!((mapping.bytes()[0], mapping.bytes()[(3 << 20) - 1]), (1, 2));
    }

    #[test]
    fn impossible_size_is_an_error() {
        assert!(Mapping::new(usize::MAX).is_err());
        assert!(Mapping::new(usize::MAX >> 1).is_err());
    }
}
