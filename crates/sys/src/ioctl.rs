//! ioctl numbers, and the one place that makes the call.

use std::os::fd::{AsRawFd, BorrowedFd};

const NONE: u64 = 0;
const WRITE: u64 = 1;
const READ: u64 = 2;

/// Encodes a request as Linux's `asm-generic/ioctl.h` describes it: direction, size, type, number.
const fn encode(direction: u64, group: u8, number: u8, size: usize) -> u64 {
    assert!(size < 1 << 14, "the size field has 14 bits");
    direction << 30 | (size as u64) << 16 | (group as u64) << 8 | number as u64
}

/// A request without an argument structure.
pub(crate) const fn io(group: u8, number: u8) -> u64 {
    encode(NONE, group, number, 0)
}

/// A request that reads back a `T`.
pub(crate) const fn ior<T>(group: u8, number: u8) -> u64 {
    encode(READ, group, number, size_of::<T>())
}

/// A request that passes a `T`.
pub(crate) const fn iow<T>(group: u8, number: u8) -> u64 {
    encode(WRITE, group, number, size_of::<T>())
}

/// A request that passes a `T` and reads it back.
pub(crate) const fn iowr<T>(group: u8, number: u8) -> u64 {
    encode(READ | WRITE, group, number, size_of::<T>())
}

/// Calls `ioctl(fd, request, argument)`; negative means an error, left in `errno`.
///
/// # Safety
/// `T` is the structure that `request` is defined with, every address in it is valid for what the request does with it,
/// and what the request does keeps Rust's promises about memory.
pub(crate) unsafe fn call<T>(fd: BorrowedFd<'_>, request: u64, argument: &mut T) -> i32 {
    // SAFETY: the caller vouches for the request and its argument; the fd is open for as long as it is borrowed.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) }
}

/// Calls `ioctl(fd, request, value)`; negative means an error, left in `errno`.
///
/// # Safety
/// As for [`call`], with an integer for an argument.
pub(crate) unsafe fn call_value(fd: BorrowedFd<'_>, request: u64, value: u64) -> i32 {
    // SAFETY: the caller vouches for the request.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, value) }
}
