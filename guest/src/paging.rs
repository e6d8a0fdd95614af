//! Memory above 4 GiB: one page directory for each GiB that holds RAM. (The first 4 GiB are mapped in `boot.s`.)

use crate::memory::{FreeRam, pointer};

/// What four levels with one third-level table map: 512 GiB.
pub(crate) const LIMIT: u64 = 512 << 30;

const GIB: u64 = 1 << 30;
const MIB_2: u64 = 2 << 20;
/// GiB that `boot.s` has mapped.
const MAPPED: u64 = 4;

/// Present, writable, user, accessed.
const TABLE: u64 = 0x27;
/// The same, dirty, and 2 MiB.
const PAGE_2M: u64 = 0xe7;

unsafe extern "C" {
    /// The third-level table, from `boot.s`.
    static mut pdpt: [u64; 512];
}

/// Maps all of `free` that lies above 4 GiB, with page directories out of `free` below. Must run before other vCPUs do.
pub(crate) fn map_high(free: &mut FreeRam) {
    for gib in MAPPED..LIMIT / GIB {
        let (start, end) = (gib * GIB, (gib + 1) * GIB);
        if !free.ranges().iter().any(|range| range.start < end && range.end > start) {
            continue;
        }
        let directory =
            free.take(1).filter(|address| *address < MAPPED * GIB).expect("no memory for page tables");
        for entry in 0..512 {
            // SAFETY: the page lies in the first 4 GiB, which are mapped, and `take` made it ours.
            unsafe { pointer::<u64>(directory + 8 * entry).write_volatile(start + entry * MIB_2 + PAGE_2M) };
        }
        let slot = (&raw mut pdpt).cast::<u64>().wrapping_add(usize::try_from(gib).unwrap_or(0));
        // SAFETY: `gib` is below 512, and no other vCPU runs. An entry that was not present needs no flush (Intel SDM, volume
        // 3, 4.10.2.3: no translation is cached for it).
        unsafe { slot.write_volatile(directory + TABLE) };
    }
}
