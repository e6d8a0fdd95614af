//! Buffers that are addressed like an `iovec`: bytes of this process, or guest memory.

use std::marker::PhantomData;
use vmferry_core::Window;

/// Buffer with the layout of an `iovec`: the address and length of bytes of this process or of
/// guest memory.
///
/// Guest memory never becomes a `&[u8]`, because the guest accesses it concurrently. Therefore the
/// standard library's `IoSlice` cannot be used.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct IoBuf<'a> {
    raw: libc::iovec,
    bytes: PhantomData<&'a ()>,
}

// SAFETY: the value is an address and a length. The bytes at the address are borrowed for 'a. They
// are shared bytes that no thread writes, a unique borrow, or guest memory, which all threads may
// access through raw addresses.
unsafe impl Send for IoBuf<'_> {}

impl<'a> IoBuf<'a> {
    /// Creates a buffer to send `bytes`. It must only be passed to [`Stream::send`].
    pub(crate) fn from_bytes(bytes: &'a [u8]) -> Self {
        Self::raw(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Creates a buffer to receive into `bytes`, or to send them.
    pub(crate) fn from_bytes_mut(bytes: &'a mut [u8]) -> Self {
        Self::raw(bytes.as_mut_ptr(), bytes.len())
    }

    /// Creates a buffer to send or receive guest memory.
    pub(crate) fn from_window(window: Window<'a>) -> Self {
        Self::raw(window.as_ptr(), window.len())
    }

    /// Returns the number of bytes left.
    pub(crate) fn len(&self) -> usize {
        self.raw.iov_len
    }

    /// Returns true if no bytes are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.raw.iov_len == 0
    }

    /// Copies as much of `from` as fits into the buffer, advances the buffer by the number of
    /// copied bytes, and returns this number.
    ///
    /// The buffer must be one that may be received into.
    pub(crate) fn copy_from(&mut self, from: &[u8]) -> usize {
        let len = from.len().min(self.raw.iov_len);
        // SAFETY: the buffer's bytes are mapped and may be written: the buffer was made to be
        // received into, which callers ensure as for `recvmsg`. They cannot overlap `from`, which
        // is a shared borrow of other bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.raw.iov_base.cast(), len) };
        self.advance(len);
        len
    }

    /// Copies bytes from the start of the buffer to `to`, until the buffer is empty or `to` is
    /// full. Advances the buffer by the number of copied bytes, and returns this number.
    ///
    /// A copy of guest memory may be torn if the guest writes at the same time, as may guest memory
    /// that the kernel sends.
    #[cfg(any(feature = "tls", test))]
    pub(super) fn take(&mut self, to: &mut [u8]) -> usize {
        let len = to.len().min(self.raw.iov_len);
        // SAFETY: the buffer's bytes are mapped and may be read, as every constructor ensures. They
        // cannot overlap `to`, which is a unique borrow of other bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.raw.iov_base.cast(), to.as_mut_ptr(), len) };
        self.advance(len);
        len
    }

    fn raw(start: *mut u8, len: usize) -> Self {
        Self { raw: libc::iovec { iov_base: start.cast(), iov_len: len }, bytes: PhantomData }
    }

    /// Drops the first `count` bytes.
    fn advance(&mut self, count: usize) {
        // The address stays within the buffer or one past its end, because callers advance by at
        // most iov_len.
        self.raw.iov_base = self.raw.iov_base.cast::<u8>().wrapping_add(count).cast();
        self.raw.iov_len -= count;
    }
}

/// Returns the buffers from the first one that has bytes left on, or `None` if all buffers are used
/// up.
pub(super) fn skip_empty<'a, 'b>(bufs: &'a mut [IoBuf<'b>]) -> Option<&'a mut [IoBuf<'b>]> {
    let first = bufs.iter().position(|buf| buf.raw.iov_len > 0)?;
    bufs.get_mut(first..)
}

pub(super) fn consume(bufs: &mut [IoBuf<'_>], mut moved: usize) {
    for buf in bufs {
        let here = moved.min(buf.raw.iov_len);
        buf.advance(here);
        moved -= here;
        if moved == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Miri checks in this test that addresses keep their provenance and that no borrow is
    /// violated.
    #[test]
    fn bytes_go_in_and_out_across_buffers() {
        let (mut head, mut page) = ([1, 2, 3], [0; 8]);
        let mut bufs = [IoBuf::from_bytes_mut(&mut head), IoBuf::from_bytes_mut(&mut page)];
        consume(&mut bufs, 1);
        assert_eq!(bufs[0].copy_from(&[7, 8, 9]), 2);
        assert_eq!(skip_empty(&mut bufs).map(|rest| rest.len()), Some(1));
        consume(&mut bufs, 3);
        assert_eq!((bufs[0].is_empty(), bufs[1].len()), (true, 5));
        assert_eq!((bufs[1].copy_from(&[4; 5]), bufs[1].copy_from(&[5])), (5, 0));
        assert!(skip_empty(&mut bufs).is_none());
        assert_eq!((head, page), ([1, 7, 8], [0, 0, 0, 4, 4, 4, 4, 4]));

        let mut buf = IoBuf::from_bytes(&page);
        let mut to = [9; 6];
        assert_eq!((buf.take(&mut to), buf.len()), (6, 2));
        assert_eq!(to, [0, 0, 0, 4, 4, 4]);
        let moved = std::thread::scope(|scope| scope.spawn(move || buf.take(&mut [0; 3])).join().unwrap());
        assert_eq!(moved, 2);
    }
}
