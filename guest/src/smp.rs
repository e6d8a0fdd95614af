//! Starting the other vCPUs, and synchronization between vCPUs.

use crate::memory::pointer;
use crate::{apic, cpu};
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vmferry_guest_abi::TscClock;

unsafe extern "C" {
    static ap_trampoline: u8;
    static ap_trampoline_end: u8;
}

/// Address to which the trampoline is copied; `AP_START` of `boot.s`.
const AP_START: u64 = 0x8000;
const AP_START_PAGE: u8 = 0x08;

const MS: u64 = 1_000_000;
/// Pause after INIT, in ns (Intel SDM, volume 3, 11.4.4.1).
const INIT_NS: u64 = 10 * MS;
/// Time without a new vCPU that ends the start if the number of vCPUs is not known, in ns.
const QUIET_NS: u64 = 100 * MS;
/// Longest wait for the vCPUs if their number is known, in ns. Emulated CPUs on a busy host are
/// slow.
const PATIENCE_NS: u64 = 180_000 * MS;

/// Number of vCPUs that run `guest_main`, the first one included.
static ONLINE: AtomicU32 = AtomicU32::new(1);

/// Counts this vCPU as started. Called by each vCPU but the first.
pub(crate) fn arrived() {
    ONLINE.fetch_add(1, Ordering::Release);
}

/// Starts the other vCPUs and returns the number of all. Panics if `expected` is given and not all
/// of them start.
pub(crate) fn start_others(expected: Option<u32>, clock: &TscClock) -> u32 {
    if expected == Some(1) {
        return 1;
    }
    let from = (&raw const ap_trampoline).cast::<u8>();
    let len = (&raw const ap_trampoline_end).addr() - from.addr();
    // SAFETY: memory below 1 MiB is mapped RAM that the guest does not use otherwise; boot
    // structures have been copied.
    unsafe { core::ptr::copy_nonoverlapping(from, pointer::<u8>(AP_START), len) };
    apic::init_others();
    wait(clock, INIT_NS, || false);
    apic::start_others(AP_START_PAGE);
    match expected {
        Some(expected) => {
            wait(clock, PATIENCE_NS, || ONLINE.load(Ordering::Acquire) >= expected);
            let online = ONLINE.load(Ordering::Acquire);
            assert!(online == expected, "{online} vCPUs started, {expected} were expected (cpus=)");
            online
        }
        None => loop {
            let online = ONLINE.load(Ordering::Acquire);
            if !wait(clock, QUIET_NS, || ONLINE.load(Ordering::Acquire) != online) {
                return online;
            }
        },
    }
}

/// Waits until `done` returns true, at most `ns` nanoseconds. Returns true if it did.
fn wait(clock: &TscClock, ns: u64, done: impl Fn() -> bool) -> bool {
    let end = clock.ns(cpu::tsc()) + ns;
    while clock.ns(cpu::tsc()) < end {
        if done() {
            return true;
        }
        core::hint::spin_loop();
    }
    done()
}

/// Value that the first vCPU sets once and all others wait for.
pub(crate) struct Once<T> {
    value: UnsafeCell<MaybeUninit<T>>,
    set: AtomicBool,
}

// SAFETY: `get` waits for the flag that `set` raises after its write, and nothing is written after
// that.
unsafe impl<T: Sync> Sync for Once<T> {}

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Self { value: UnsafeCell::new(MaybeUninit::uninit()), set: AtomicBool::new(false) }
    }

    /// Sets the value.
    ///
    /// # Safety
    /// Must be called only once.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: by the contract of this function this is the only write; readers wait for the
        // flag.
        unsafe { (*self.value.get()).write(value) };
        self.set.store(true, Ordering::Release);
    }

    /// Returns the value, after waiting until it is set.
    pub(crate) fn get(&self) -> &T {
        while !self.set.load(Ordering::Acquire) {
            core::hint::spin_loop();
        }
        // SAFETY: the flag is set after the value was written, which happens once.
        unsafe { (*self.value.get()).assume_init_ref() }
    }
}
