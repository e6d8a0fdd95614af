//! Local APIC: starting the other vCPUs, and the timer that wakes an idle one.

use crate::cpu;
use crate::memory::pointer;
use vmferry_guest_abi::TscClock;

const BASE: u64 = 0xfee0_0000;
const END_OF_INTERRUPT: u64 = 0xb0;
const SPURIOUS: u64 = 0xf0;
const COMMAND: u64 = 0x300;
const TIMER: u64 = 0x320;
const TIMER_START: u64 = 0x380;
const TIMER_NOW: u64 = 0x390;
const TIMER_DIVIDE: u64 = 0x3e0;

const ENABLE: u32 = 0x100;
const PERIODIC: u32 = 1 << 17;
const MASKED: u32 = 1 << 16;
const DIVIDE_BY_1: u32 = 0b1011;

/// Command: to all but the sender, INIT, assert.
const INIT_OTHERS: u32 = 0x000c_4500;
/// Command: to all but the sender, start-up, assert. The low byte is the page number of the start
/// address.
const START_OTHERS: u32 = 0x000c_4600;

/// Vector of the timer, followed by the vector of spurious interrupts.
pub(crate) const TIMER_VECTOR: u8 = 0x20;
const SPURIOUS_VECTOR: u8 = 0xff;

fn read(register: u64) -> u32 {
    // SAFETY: the registers are mapped, uncached, in every vCPU (`boot.s`), and 32 bits wide.
    unsafe { pointer::<u32>(BASE + register).read_volatile() }
}

fn write(register: u64, value: u32) {
    // SAFETY: as for `read`. The writes in this module start CPUs at the trampoline and raise
    // vectors that have gates.
    unsafe { pointer::<u32>(BASE + register).write_volatile(value) }
}

const PIC_MASKS: [u16; 2] = [0x21, 0xa1];

/// Masks the old interrupt controllers, because firmware leaves them delivering timer ticks at
/// vectors of exceptions.
pub(crate) fn mask_pics() {
    for port in PIC_MASKS {
        cpu::out8(port, 0xff);
    }
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

/// Duration of the timer's calibration in ns: long compared with an access (46 us where it is
/// slowest).
const CALIBRATION_NS: u64 = 5_000_000;

/// Number of readings, of which the quickest counts: a host that takes the vCPU away in the middle
/// of a reading spoils it.
const READINGS: u32 = 5;

/// Raises [`TIMER_VECTOR`] on this vCPU every `period_ns` nanoseconds, after the timer's frequency
/// has been measured.
pub(crate) fn start_timer(period_ns: u64, clock: &TscClock) {
    write(TIMER_DIVIDE, DIVIDE_BY_1);
    write(TIMER, MASKED | u32::from(TIMER_VECTOR));
    write(TIMER_START, u32::MAX);
    let (start, first) = timer_reading(clock);
    while clock.ns(cpu::tsc()) < start + CALIBRATION_NS {
        core::hint::spin_loop();
    }
    let (end, last) = timer_reading(clock);
    let period = u64::from(first.wrapping_sub(last)) * period_ns / (end - start);
    write(TIMER, PERIODIC | u32::from(TIMER_VECTOR));
    write(TIMER_START, u32::try_from(period).unwrap_or(u32::MAX).max(1));
}

/// Returns the time of the reading in nanoseconds, and the timer's count.
fn timer_reading(clock: &TscClock) -> (u64, u32) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..READINGS {
        let before = clock.ns(cpu::tsc());
        let count = read(TIMER_NOW);
        let took = clock.ns(cpu::tsc()) - before;
        best = best.min((took, before + took / 2, count));
    }
    (best.1, best.2)
}

/// Ends the interrupt that this vCPU serves, if any.
pub(crate) fn end_of_interrupt() {
    write(END_OF_INTERRUPT, 0);
}
