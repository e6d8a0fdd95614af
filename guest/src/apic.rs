//! The local APIC: starting the other vCPUs, and the timer that wakes an idle one.

use crate::memory::pointer;

const BASE: u64 = 0xfee0_0000;
const END_OF_INTERRUPT: u64 = 0xb0;
const SPURIOUS: u64 = 0xf0;
const COMMAND: u64 = 0x300;
const TIMER: u64 = 0x320;
const TIMER_START: u64 = 0x380;
const TIMER_NOW: u64 = 0x390;
const TIMER_DIVIDE: u64 = 0x3e0;

const ENABLE: u32 = 0x100;
const ONCE: u32 = 0;
const MASKED: u32 = 1 << 16;
const DIVIDE_BY_1: u32 = 0b1011;

/// To all but oneself, INIT, assert.
const INIT_OTHERS: u32 = 0x000c_4500;
/// To all but oneself, start-up, assert; the low byte is the page number where to start.
const START_OTHERS: u32 = 0x000c_4600;

/// Vector of the timer, and of interrupts that nobody sent.
pub(crate) const TIMER_VECTOR: u8 = 0x20;
const SPURIOUS_VECTOR: u8 = 0xff;

fn read(register: u64) -> u32 {
    // SAFETY: the registers are mapped, uncached, in every vCPU (`boot.s`), and 32 bits wide.
    unsafe { pointer::<u32>(BASE + register).read_volatile() }
}

fn write(register: u64, value: u32) {
    // SAFETY: as for `read`. The writes in this module start CPUs at the trampoline and raise vectors that have gates.
    unsafe { pointer::<u32>(BASE + register).write_volatile(value) }
}

/// Enables this vCPU's APIC.
pub(crate) fn enable() {
    write(SPURIOUS, ENABLE | u32::from(SPURIOUS_VECTOR));
}

/// Resets all other vCPUs.
pub(crate) fn init_others() {
    write(COMMAND, INIT_OTHERS);
}

/// Starts all other vCPUs in real mode at page `page` of the first mebibyte.
pub(crate) fn start_others(page: u8) {
    write(COMMAND, START_OTHERS | u32::from(page));
}
