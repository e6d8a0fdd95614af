//! Symbols that the compiler needs: memory functions, a personality, a panic handler.

use crate::{cpu, serial, stats};
use core::arch::asm;
use core::panic::PanicInfo;
use vmferry_guest_abi::{DEBUG_EXIT_PORT, PANIC_EXIT, State};

/// Copies `count` bytes that do not overlap.
///
/// # Safety
/// The contract is that of C's `memcpy`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller guarantees both ranges; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
    }
    to
}

/// Copies `count` bytes that may overlap.
///
/// # Safety
/// The contract is that of C's `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if to.addr().wrapping_sub(from.addr()) >= count {
        // SAFETY: copying upwards is correct if the target begins below the source or after its
        // end.
        return unsafe { memcpy(to, from, count) };
    }
    // SAFETY: the caller guarantees both ranges, and count is above 0 at this point. The flag is
    // cleared again.
    unsafe {
        asm!(
            "std", "rep movsb", "cld",
            inout("rcx") count => _,
            inout("rdi") to.add(count - 1) => _,
            inout("rsi") from.add(count - 1) => _,
            options(nostack)
        );
    }
    to
}

/// Sets `count` bytes.
///
/// # Safety
/// The contract is that of C's `memset`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller guarantees the range; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("eax") byte, options(nostack, preserves_flags));
    }
    to
}

/// Compares `count` bytes.
///
/// # Safety
/// The contract is that of C's `memcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    for i in 0..count {
        // SAFETY: the caller guarantees both ranges. The reads are volatile, so that the compiler
        // does not turn the loop into a call of this function.
        let (a, b) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// Compares `count` bytes for equality.
///
/// # Safety
/// The contract is that of C's `bcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(a, b, count) }
}

/// Does nothing. `core` names this symbol, because it is compiled to unwind, but nothing unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    stats::PAGE.raise(State::Panicked);
    match info.location() {
        Some(at) => {
            serial::force(format_args!("PANIC {} ({}:{})", info.message(), at.file(), at.line()));
        }
        None => serial::force(format_args!("PANIC {}", info.message())),
    }
    cpu::out8(DEBUG_EXIT_PORT, PANIC_EXIT);
    loop {
        core::hint::spin_loop();
    }
}
