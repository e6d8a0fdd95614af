//! Instructions without a Rust equivalent. All of them work in ring 3, and ports below 0x400 are
//! permitted by the bitmap in `boot.s`.

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count, _rdtsc};

/// Writes a byte to a port.
pub(crate) fn out8(port: u16, value: u8) {
    // SAFETY: port I/O touches no memory that Rust knows; `boot.s` permits it. The caller is
    // responsible for what the device does.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags)) }
}

/// Writes 32 bits to a port, after all earlier writes to memory.
pub(crate) fn out32(port: u16, value: u32) {
    // SAFETY: as for `out8`, except that the device may read memory that the caller has prepared:
    // no `nomem`.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack, preserves_flags)) }
}

/// Reads a byte from a port.
pub(crate) fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: as for `out8`.
    unsafe { asm!("in al, dx", out("al") value, in("dx") port, options(nomem, nostack, preserves_flags)) }
    value
}

/// Returns the time stamp counter.
#[inline]
pub(crate) fn tsc() -> u64 {
    // SAFETY: every x86-64 CPU has it, and CR4.TSD is clear.
    unsafe { _rdtsc() }
}

/// Returns EAX of a CPUID leaf, if the CPU has the leaf.
pub(crate) fn cpuid_eax(leaf: u32) -> Option<u32> {
    cpuid(leaf).map(|registers| registers[0])
}

/// Returns EAX, EBX, ECX and EDX of a CPUID leaf (subleaf 0), if the CPU has the leaf.
pub(crate) fn cpuid(leaf: u32) -> Option<[u32; 4]> {
    // Each range of leaves (basic, hypervisor) begins with a leaf that gives the last one.
    let last = __cpuid(leaf & 0xc000_0000).eax;
    (leaf <= last && last - (leaf & 0xc000_0000) < 0x1000).then(|| {
        let result = __cpuid_count(leaf, 0);
        [result.eax, result.ebx, result.ecx, result.edx]
    })
}

/// Sleeps until the next interrupt, which is served before this returns.
pub(crate) fn halt() {
    // SAFETY: `hlt` raises #GP in ring 3; the handler in `boot.s` sleeps instead and changes no
    // registers.
    unsafe { asm!("hlt", options(nomem)) }
}
