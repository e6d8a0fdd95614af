//! Memory above 4 GiB: one page directory for each GiB that contains RAM. (`boot.s` maps the first
//! 4 GiB.)

use crate::memory::{FreeRam, pointer};

/// End of the memory that four levels with one third-level table can map: 512 GiB.
pub(crate) const LIMIT: u64 = 512 << 30;

const GIB: u64 = 1 << 30;
const MIB_2: u64 = 2 << 20;
/// Number of GiB that `boot.s` has mapped.
const MAPPED: u64 = 4;

/// Flags of a table entry: present, writable, user, accessed.
const TABLE: u64 = 0x27;
/// Flags of a 2 MiB page: the same, dirty, and large.
const PAGE_2M: u64 = 0xe7;

unsafe extern "C" {
    /// Third-level table, from `boot.s`.
    static mut pdpt: [u64; 512];
}

/// Maps all of `free` above 4 GiB, with page directories taken out of `free` below. Must run before
/// other vCPUs start.
pub(crate) fn map_high(free: &mut FreeRam) {
    for gib in MAPPED..LIMIT / GIB {
        let (start, end) = (gib * GIB, (gib + 1) * GIB);
        if !free.ranges().iter().any(|range| range.start < end && range.end > start) {
            continue;
        }
        let directory =
            free.take(1).filter(|address| *address < MAPPED * GIB).expect("no memory for page tables");
        for entry in 0..512 {
            // SAFETY: the page lies in the first 4 GiB, which are mapped, and `take` has made it
            // ours.
            unsafe { pointer::<u64>(directory + 8 * entry).write_volatile(start + entry * MIB_2 + PAGE_2M) };
        }
        let slot = (&raw mut pdpt).cast::<u64>().wrapping_add(usize::try_from(gib).unwrap_or(0));
        // SAFETY: `gib` is below 512, and no other vCPU runs. An entry that was not present needs
        // no flush (Intel SDM, volume 3, 4.10.2.3: no translation is cached for it).
        unsafe { slot.write_volatile(directory + TABLE) };
    }
}
