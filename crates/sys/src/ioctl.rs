//! Encoding of ioctl numbers, and the functions that make the call.

use std::os::fd::{AsRawFd, BorrowedFd};

const NONE: u64 = 0;
const WRITE: u64 = 1;
const READ: u64 = 2;

/// Encodes a request as Linux's `asm-generic/ioctl.h` describes it: direction, size, type, number.
const fn encode(direction: u64, group: u8, number: u8, size: usize) -> u64 {
    assert!(size < 1 << 14, "the size field has 14 bits");
    direction << 30 | (size as u64) << 16 | (group as u64) << 8 | number as u64
}

/// Returns the number of a request without an argument structure.
pub(crate) const fn io(group: u8, number: u8) -> u64 {
    encode(NONE, group, number, 0)
}

/// Returns the number of a request whose result is a `T`.
pub(crate) const fn ior<T>(group: u8, number: u8) -> u64 {
    encode(READ, group, number, size_of::<T>())
}

/// Returns the number of a request whose argument is a `T`.
pub(crate) const fn iow<T>(group: u8, number: u8) -> u64 {
    encode(WRITE, group, number, size_of::<T>())
}

/// Returns the number of a request whose argument and result is a `T`.
pub(crate) const fn iowr<T>(group: u8, number: u8) -> u64 {
    encode(READ | WRITE, group, number, size_of::<T>())
}

/// Calls `ioctl(fd, request, argument)`. A negative result is an error, and `errno` has its number.
///
/// # Safety
/// `T` is the structure of `request`. Every address in `argument` is valid for the accesses of the
/// request. The request does not break Rust's rules for memory.
pub(crate) unsafe fn call<T>(fd: BorrowedFd<'_>, request: u64, argument: &mut T) -> i32 {
    // SAFETY: the caller guarantees the contract of the request and its argument. The descriptor is
    // open for as long as it is borrowed.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) }
}

/// Calls `ioctl(fd, request, value)`. A negative result is an error, and `errno` has its number.
///
/// # Safety
/// The contract of [`call`], with an integer as the argument.
pub(crate) unsafe fn call_value(fd: BorrowedFd<'_>, request: u64, value: u64) -> i32 {
    // SAFETY: the caller guarantees the contract of the request.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, value) }
}
