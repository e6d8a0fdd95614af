//! Exceptions, which end the guest with a reason, and the interrupts that wake a vCPU.

use crate::apic::TIMER_VECTOR;
use core::cell::UnsafeCell;

unsafe extern "C" {
    static trap_stubs: u8;
    static wake_stub: u8;
}

/// Distance between two stubs in `boot.s`, in bytes.
const STUB: usize = 16;
const LAST_EXCEPTION: usize = 31;
const KERNEL_CODE: u64 = 0x08;
/// Flags of a gate: present, interrupt gate.
const GATE: u64 = 0x8e00;

/// Interrupt descriptor table, whose name `boot.s` uses.
#[repr(C, align(4096))]
struct Table(UnsafeCell<[[u64; 2]; 256]>);

// SAFETY: written by the first vCPU in `init` only, before there are others; read by the CPUs
// themselves.
unsafe impl Sync for Table {}

#[unsafe(no_mangle)]
static IDT: Table = Table(UnsafeCell::new([[0; 2]; 256]));

/// Fills the table, to which `boot.s` has already pointed the CPU.
///
/// # Safety
/// Must be called once, while only the first vCPU runs.
pub(crate) unsafe fn init() {
    let table = IDT.0.get();
    for vector in 0..256 {
        let stub = if vector <= LAST_EXCEPTION {
            (&raw const trap_stubs).addr() + STUB * vector
        } else {
            (&raw const wake_stub).addr()
        };
        let stub = stub as u64;
        let low = (stub & 0xffff) | (KERNEL_CODE << 16) | (GATE << 32) | ((stub & 0xffff_0000) << 32);
        // SAFETY: nothing else accesses the table now, by the contract of this function.
        unsafe { (*table)[vector] = [low, stub >> 32] };
    }
    const { assert!(TIMER_VECTOR as usize > LAST_EXCEPTION) };
}

/// Panics with the exception. `boot.s` enters this function for every exception, in ring 3 again.
#[unsafe(no_mangle)]
extern "C" fn trap_main(vector: u64, error: u64, rip: u64, address: u64) -> ! {
    panic!("exception {vector} error {error:#x} at {rip:#x}, CR2 {address:#x}");
}
