//! Starting the other vCPUs, and waiting for each other.

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

/// Where the trampoline is copied to; `AP_START` of `boot.s`.
const AP_START: u64 = 0x8000;
const AP_START_PAGE: u8 = 0x08;

const MS: u64 = 1_000_000;
/// The pause after INIT (Intel SDM, volume 3, 11.4.4.1).
const INIT_NS: u64 = 10 * MS;
/// When the number of vCPUs is not known: how long none must have come.
const QUIET_NS: u64 = 100 * MS;
/// When it is known: how long to wait for them. Emulated CPUs on a busy host are slow.
const PATIENCE_NS: u64 = 180_000 * MS;

/// vCPUs that run `guest_main`, the first one included.
static ONLINE: AtomicU32 = AtomicU32::new(1);

/// An AP says that it is there.
pub(crate) fn arrived() {
    ONLINE.fetch_add(1, Ordering::Release);
}

/// Starts the other vCPUs and returns how many there are in all. Panics when `expected` is given and they do not come.
pub(crate) fn start_others(expected: Option<u32>, clock: &TscClock) -> u32 {
    if expected == Some(1) {
        return 1;
    }
    let from = (&raw const ap_trampoline).cast::<u8>();
    let len = (&raw const ap_trampoline_end).addr() - from.addr();
    // SAFETY: memory below 1 MiB is mapped RAM that the guest does not use otherwise, boot structures have been copied.
    unsafe { core::ptr::copy_nonoverlapping(from, pointer::<u8>(AP_START), len) };
    apic::init_others();
    wait(clock, INIT_NS, || false);
    apic::start_others(AP_START_PAGE);
    match expected {
        Some(expected) => {
            wait(clock, PATIENCE_NS, || ONLINE.load(Ordering::Acquire) >= expected);
            let online = ONLINE.load(Ordering::Acquire);
            assert!(online == expected, "{online} vCPUs came, {expected} were expected (cpus=)");
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

/// Waits until `done`, at most `ns` nanoseconds; whether it was done.
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

/// A value that the first vCPU sets once and all others wait for.
pub(crate) struct Once<T> {
    value: UnsafeCell<MaybeUninit<T>>,
    set: AtomicBool,
}

// SAFETY: `get` waits for the flag that `set` raises after its write, and nothing is written after that.
unsafe impl<T: Sync> Sync for Once<T> {}

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Self { value: UnsafeCell::new(MaybeUninit::uninit()), set: AtomicBool::new(false) }
    }

    /// Sets the value.
    ///
    /// # Safety
    /// Called once.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: the caller promises that this is the only write; readers wait for the flag.
        unsafe { (*self.value.get()).write(value) };
        self.set.store(true, Ordering::Release);
    }

    /// The value, as soon as it is there.
    pub(crate) fn get(&self) -> &T {
        while !self.set.load(Ordering::Acquire) {
            core::hint::spin_loop();
        }
        // SAFETY: the flag is set after the value was written, which happens once.
        unsafe { (*self.value.get()).assume_init_ref() }
    }
}
