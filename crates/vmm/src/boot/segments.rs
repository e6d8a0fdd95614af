//! Segments with which a kernel is entered, and their descriptor table.

use super::map::{GDT, PAGE_TABLES};
use kvm_bindings::{kvm_segment, kvm_sregs};

/// Returns a flat segment of 4 GiB. `kind` is the type field of its descriptor.
const fn flat(selector: u16, kind: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

/// Returns a busy task state segment of the minimum size, for 32-bit and 64-bit mode. Its base is
/// 0, and no task is ever loaded from it.
const fn task(selector: u16) -> kvm_segment {
    kvm_segment { limit: 0x67, type_: 0xb, db: 0, s: 0, g: 0, ..flat(selector, 0) }
}

/// Segments that PVH requires, with selectors of our choice.
const CODE_32: kvm_segment = flat(8, 0xb);
const DATA_32: kvm_segment = flat(16, 0x3);
const TASK_32: kvm_segment = task(24);
const TABLE_32: [u64; 4] = [0, descriptor(&CODE_32), descriptor(&DATA_32), descriptor(&TASK_32)];

/// Segments of the 64-bit boot protocol: code at 0x10 and data at 0x18 (`__BOOT_CS`, `__BOOT_DS`;
/// Linux, Documentation/arch/x86/boot.rst).
const CODE_64: kvm_segment = kvm_segment { l: 1, db: 0, ..flat(0x10, 0xb) };
const DATA_64: kvm_segment = flat(0x18, 0x3);
/// Task state segment in 64-bit mode. It has two entries, of which the second is the upper half of
/// the base.
const TASK_64: kvm_segment = task(0x20);
const TABLE_64: [u64; 6] = [0, 0, descriptor(&CODE_64), descriptor(&DATA_64), descriptor(&TASK_64), 0];

/// Returns the descriptor of a segment with base 0, as the processor reads it from the table: Intel
/// SDM volume 3, 3.4.5.
const fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = if segment.g == 1 { segment.limit >> 12 } else { segment.limit } as u64;
    let access = (segment.type_ | segment.s << 4 | segment.dpl << 5 | segment.present << 7) as u64;
    let flags = (segment.avl | segment.l << 1 | segment.db << 2 | segment.g << 3) as u64;
    limit & 0xffff | access << 40 | (limit >> 16 & 0xf) << 48 | flags << 52
}

/// Returns the descriptor table for [`protected_mode`]. PVH does not require one, but a host that
/// emulates part of the guest's start reads it.
pub(super) fn table_32() -> Vec<u8> {
    TABLE_32.iter().flat_map(|d| d.to_le_bytes()).collect()
}

/// Returns the descriptor table for [`long_mode`].
pub(super) fn table_64() -> Vec<u8> {
    TABLE_64.iter().flat_map(|d| d.to_le_bytes()).collect()
}

const CR0_PE: u64 = 1;
/// Bit of CR0 that always reads as one.
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Sets 32-bit protected mode without paging.
pub(super) fn protected_mode(sregs: &mut kvm_sregs) {
    enter(sregs, (CODE_32, DATA_32, TASK_32), size_of_val(&TABLE_32));
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
}

/// Sets 64-bit mode with an identity mapping of the first 4 GiB.
pub(super) fn long_mode(sregs: &mut kvm_sregs) {
    enter(sregs, (CODE_64, DATA_64, TASK_64), size_of_val(&TABLE_64));
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
    sregs.efer = EFER_LME | EFER_LMA;
}

fn enter(sregs: &mut kvm_sregs, (code, data, task): (kvm_segment, kvm_segment, kvm_segment), table: usize) {
    (sregs.cs, sregs.tr) = (code, task);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.gdt.base = GDT;
    sregs.gdt.limit = u16::try_from(table - 1).unwrap_or(u16::MAX);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
}

/// Returns the page tables for [`long_mode`]: one page of the fourth level, one of the third, four
/// of the second, with pages of 2 MiB. Intel SDM volume 3, 4.5.
pub(super) fn page_tables() -> Vec<u8> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    const ENTRIES: u64 = 512;
    let page = |n: u64| PAGE_TABLES + n * 4096;
    let mut entries = Vec::with_capacity(6 * 512);
    let mut table = |used: u64, entry: &dyn Fn(u64) -> u64| {
        entries.extend((0..ENTRIES).map(|n| if n < used { entry(n) } else { 0 }));
    };
    table(1, &|_| page(1) | PRESENT_WRITABLE);
    table(4, &|n| page(2 + n) | PRESENT_WRITABLE);
    for gib in 0..4 {
        table(ENTRIES, &|n| (gib << 30 | n << 21) | PRESENT_WRITABLE | LARGE);
    }
    entries.into_iter().flat_map(u64::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_match_the_manual() {
        // The classic flat 32-bit code and data descriptors, accessed, and a busy TSS of 104 bytes.
        assert_eq!(TABLE_32, [0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067]);
        // The same with a 64-bit code segment.
        assert_eq!(TABLE_64[2..5], [0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067]);
    }

    #[test]
    fn page_tables_map_every_address_below_4_gib_to_itself() {
        let bytes = page_tables();
        let entry = |table: u64, n: u64| {
            let at = usize::try_from(table - PAGE_TABLES + n * 8).unwrap();
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        let next = |entry: u64| {
            assert_eq!(entry & 0xfff, 3);
            entry & !0xfff
        };
        for address in [0, 0x1234_5678, 0x3fff_ffff, 0x4000_0000, 0xcafe_babe, 0xffff_ffff_u64] {
            let third = next(entry(PAGE_TABLES, address >> 39));
            let second = next(entry(third, address >> 30 & 511));
            let page = entry(second, address >> 21 & 511);
            assert_eq!(page, address >> 21 << 21 | 0x83, "{address:#x}");
        }
        assert_eq!(entry(PAGE_TABLES, 1), 0);
        assert_eq!(entry(PAGE_TABLES + 4096, 4), 0);
    }
}
