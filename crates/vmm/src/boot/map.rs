//! Addresses of boot data, and the memory map for the kernel.

use super::BootError;
use crate::memory::{GuestRam, HIGH_RAM_START, LOW_RAM_END};
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::{Layout, PAGE_SIZE};
use vmferry_virtio::balloon::extension::WholePages;

// All of these are in RAM below 1 MiB. They do not overlap each other, the interrupt vectors, or
// the BIOS data area.
pub(super) const GDT: u64 = 0x500;
/// Address of the structure that the kernel is entered with: `hvm_start_info`, or `boot_params`
/// ("zero page", 4 KiB).
pub(super) const START_INFO: u64 = 0x6000;
pub(super) const MEMORY_MAP: u64 = 0x7000;
pub(super) const MODULES: u64 = 0x8000;
/// Address of the six page tables of a kernel that is entered in 64-bit mode.
pub(super) const PAGE_TABLES: u64 = 0x9000;
pub(super) const CMDLINE: u64 = 0x2_0000;

/// Start of the RAM for the kernel. RAM below is for boot data.
pub(super) const KERNEL_START: u64 = 1 << 20;

/// Hole of a PC for adapters and firmware, which is mapped as RAM but not reported as RAM.
const LEGACY_HOLE: (u64, u64) = (0x9_fc00, 0x10_0000);

/// Range of the ACPI tables in that hole. A PC's firmware has them in this range as well, so that a
/// guest that searches finds them.
pub(crate) const ACPI_TABLES: (u64, u64) = (0xe_0000, 0xf_e000);

/// Address of the page of the VM generation ID, in the same hole: an ID must not be in memory that
/// the map reports as RAM or as ACPI memory.
pub(crate) const GENERATION: u64 = 0xf_e000;

/// Address at which an x86 processor starts after a reset, as real mode reaches it: `ffff:0000`.
const RESET_VECTOR: u64 = 0xf_fff0;
/// Code at the reset vector: mov al, 0xfe; out 0x64, al (the keyboard controller's reset line);
/// then an endless halt.
const RESET_CODE: [u8; 7] = [0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd];

/// Writes a minimal firmware: code at the reset vector that resets the machine.
///
/// Linux jumps to this address to reboot. On a hardware-reduced platform it prefers to ask EFI.
/// Without EFI it uses the firmware at this address, instead of writing to ACPI's reset register
/// (arch/x86/kernel/reboot.c, `reboot_init`).
pub(super) fn write_firmware(ram: &GuestRam) -> Result<(), BootError> {
    let written = ram.map().write_slice(&RESET_CODE, GuestAddress(RESET_VECTOR));
    written.map_err(|error| BootError::Invalid(error.to_string()))
}

/// Type of a range of guest-physical addresses. The numbers are those of E820 and of PVH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ram = 1,
    Reserved = 2,
}

/// A range of guest-physical addresses, in bytes; `start < end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MapEntry {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: Kind,
}

/// Returns the memory map for the guest, sorted by address.
pub(super) fn memory_map(layout: &Layout) -> Vec<MapEntry> {
    let entry = |start, end, kind| MapEntry { start, end, kind };
    let mut map = vec![
        entry(0, LEGACY_HOLE.0, Kind::Ram),
        entry(LEGACY_HOLE.0, LEGACY_HOLE.1, Kind::Reserved),
        entry(LEGACY_HOLE.1, layout.regions()[0].len, Kind::Ram),
        // Devices, interrupt controllers, and memory that KVM needs for itself.
        entry(LOW_RAM_END, HIGH_RAM_START, Kind::Reserved),
    ];
    let high = layout.regions().iter().filter(|r| r.gpa.0 >= HIGH_RAM_START);
    map.extend(high.map(|r| entry(r.gpa.0, r.gpa.0 + r.len, Kind::Ram)));
    map
}

/// Returns the whole pages of the RAM entries of the memory map, as a guest that counts its pages
/// sees them.
pub(crate) fn whole_pages(layout: &Layout) -> Vec<WholePages> {
    let ram = memory_map(layout).into_iter().filter(|entry| entry.kind == Kind::Ram);
    let pages = |entry: MapEntry| {
        let (start, end) = (entry.start.next_multiple_of(PAGE_SIZE), entry.end / PAGE_SIZE * PAGE_SIZE);
        let region = layout.regions().iter().find(|r| (r.gpa.0..r.gpa.0 + r.len).contains(&start))?;
        let page = |gpa: u64| (gpa - region.gpa.0) / PAGE_SIZE;
        Some(WholePages { region: region.id, pages: page(start)..page(end) })
    };
    ram.filter_map(pages).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_map_lists_all_ram_once() {
        let map = memory_map(&crate::memory::layout_for(5 << 30).unwrap());
        let ram: u64 = map.iter().filter(|e| e.kind == Kind::Ram).map(|e| e.end - e.start).sum();
        assert_eq!(ram, (5 << 30) - (LEGACY_HOLE.1 - LEGACY_HOLE.0));
        assert_eq!(map.last().unwrap().start, HIGH_RAM_START);
        assert!(map.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(map.iter().all(|entry| entry.start < entry.end));
    }

    #[test]
    fn whole_pages_leave_the_holes_out() {
        let pieces: Vec<_> = whole_pages(&crate::memory::layout_for(5 << 30).unwrap())
            .into_iter()
            .map(|piece| (piece.region.0, piece.pages))
            .collect();
        assert_eq!(pieces, [(0, 0..0x9f), (0, 0x100..0xc_0000), (1, 0..0x8_0000)]);
    }

    #[test]
    fn boot_data_does_not_overlap() {
        const PAGE: u64 = PAGE_SIZE;
        let parts = [
            (GDT, 0x100),
            (START_INFO, PAGE),
            (MEMORY_MAP, PAGE),
            (MODULES, PAGE),
            (PAGE_TABLES, 6 * PAGE),
            (CMDLINE, crate::MAX_CMDLINE as u64 + 1),
            (ACPI_TABLES.0, ACPI_TABLES.1 - ACPI_TABLES.0),
            (GENERATION, PAGE),
            (RESET_VECTOR, RESET_CODE.len() as u64),
            (KERNEL_START, PAGE),
        ];
        assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    }
}
