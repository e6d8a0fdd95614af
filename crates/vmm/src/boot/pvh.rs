//! The PVH boot protocol: Xen, docs/misc/pvh.pandoc, and `hvm_start_info` of
//! xen/include/public/arch-x86/hvm/start_info.h.

use super::{BootError, BootState, elf};
use crate::memory::{GuestRam, HIGH_RAM_START};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_start_info};
use linux_loader::loader::{Cmdline, Elf, KernelLoader, load_cmdline};
use std::io::Cursor;
use vm_memory::{Address, Bytes, GuestAddress};
use vmferry_memory::{Layout, PAGE_SIZE};
use vmferry_virtio::balloon::WholePages;

/// Magic number of `hvm_start_info`: "xEn3" with the 0x80 bit of the "E" set.
const START_INFO_MAGIC: u32 = 0x336e_c578;
/// Version with a memory map.
const START_INFO_VERSION: u32 = 1;

// Where boot data lies in RAM below 1 MiB: clear of the interrupt vectors, the BIOS data area, and each other.
const GDT: u64 = 0x500;
const START_INFO: u64 = 0x6000;
const MEMORY_MAP: u64 = 0x7000;
const CMDLINE: u64 = 0x2_0000;

/// The PC's hole for adapters and firmware: mapped as RAM, but not offered as such.
const LEGACY_HOLE: (u64, u64) = (0x9_fc00, 0x10_0000);

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Loads a PVH kernel.
pub(super) fn load(ram: &GuestRam, image: &[u8], cmdline: &str) -> Result<BootState, BootError> {
    let invalid = |error: &dyn std::fmt::Display| BootError::Invalid(error.to_string());
    let low_end = ram.layout().regions()[0].len;
    elf::check(image, low_end)?;
    let loaded = Elf::load(ram.map(), None, &mut Cursor::new(image), None).map_err(|e| invalid(&e))?;
    let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
        return Err(BootError::NoPvhEntry);
    };

    let mut text = Cmdline::new(super::MAX_CMDLINE + 1).map_err(|e| invalid(&e))?;
    text.insert_str(cmdline).map_err(|e| BootError::Cmdline(e.to_string()))?;
    load_cmdline(ram.map(), GuestAddress(CMDLINE), &text).map_err(|e| invalid(&e))?;

    let map = memory_map(ram.layout());
    let info = hvm_start_info {
        magic: START_INFO_MAGIC,
        version: START_INFO_VERSION,
        cmdline_paddr: CMDLINE,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: u32::try_from(map.len()).map_err(|e| invalid(&e))?,
        ..Default::default()
    };
    let mut params = BootParams::new(&info, GuestAddress(START_INFO));
    params.set_sections(&map, GuestAddress(MEMORY_MAP));
    PvhBootConfigurator::write_bootparams(&params, ram.map()).map_err(|e| invalid(&e))?;
    ram.map().write_slice(&gdt_bytes(), GuestAddress(GDT)).map_err(|e| invalid(&e))?;

    let regs = kvm_regs { rip: entry.raw_value(), rbx: START_INFO, rflags: 2, ..Default::default() };
    Ok(BootState { regs, sregs: protected_mode })
}

/// What the guest is told of its memory.
fn memory_map(layout: &Layout) -> Vec<hvm_memmap_table_entry> {
    let entry = |addr: u64, end: u64, type_: u32| hvm_memmap_table_entry {
        addr,
        size: end - addr,
        type_,
        ..Default::default()
    };
    let mut map = vec![
        entry(0, LEGACY_HOLE.0, E820_RAM),
        entry(LEGACY_HOLE.0, LEGACY_HOLE.1, E820_RESERVED),
        entry(LEGACY_HOLE.1, layout.regions()[0].len, E820_RAM),
    ];
    let high = layout.regions().iter().filter(|r| r.gpa.0 >= HIGH_RAM_START);
    map.extend(high.map(|r| entry(r.gpa.0, r.gpa.0 + r.len, E820_RAM)));
    map
}

/// The whole pages of the RAM entries of that memory map, as a guest that counts its pages has them.
pub(crate) fn whole_pages(layout: &Layout) -> Vec<WholePages> {
    let ram = memory_map(layout).into_iter().filter(|entry| entry.type_ == E820_RAM);
    let pages = |entry: hvm_memmap_table_entry| {
        let (start, end) =
            (entry.addr.next_multiple_of(PAGE_SIZE), (entry.addr + entry.size) / PAGE_SIZE * PAGE_SIZE);
        let region = layout.regions().iter().find(|r| (r.gpa.0..r.gpa.0 + r.len).contains(&start))?;
        let page = |gpa: u64| (gpa - region.gpa.0) / PAGE_SIZE;
        Some(WholePages { region: region.id, pages: page(start)..page(end) })
    };
    ram.filter_map(pages).collect()
}

/// A flat segment of 4 GiB, as PVH wants them; `kind` is the type field of its descriptor.
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

const CODE: kvm_segment = flat(8, 0xb);
const DATA: kvm_segment = flat(16, 0x3);
/// Busy 32-bit task state segment of the least size, as PVH says.
const TASK: kvm_segment = kvm_segment { limit: 0x67, type_: 0xb, db: 0, s: 0, g: 0, ..flat(24, 0) };
const DESCRIPTORS: [u64; 4] = [0, descriptor(&CODE), descriptor(&DATA), descriptor(&TASK)];

/// A segment as the processor reads it from the descriptor table: Intel SDM volume 3, 3.4.5. Base 0.
const fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = if segment.g == 1 { segment.limit >> 12 } else { segment.limit } as u64;
    let access = (segment.type_ | segment.s << 4 | segment.dpl << 5 | segment.present << 7) as u64;
    let flags = (segment.avl | segment.l << 1 | segment.db << 2 | segment.g << 3) as u64;
    limit & 0xffff | access << 40 | (limit >> 16 & 0xf) << 48 | flags << 52
}

/// The descriptor table. PVH does not ask for one; a host that emulates part of the guest's start reads it.
fn gdt_bytes() -> Vec<u8> {
    DESCRIPTORS.iter().flat_map(|d| d.to_le_bytes()).collect()
}

/// 32-bit protected mode without paging.
fn protected_mode(sregs: &mut kvm_sregs) {
    (sregs.cs, sregs.tr) = (CODE, TASK);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (DATA, DATA, DATA, DATA, DATA);
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 31;
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    // Protection on; bit 4 always reads as one.
    sregs.cr0 = 0x11;
    sregs.cr4 = 0;
    sregs.efer = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::testing::TestElf;
    use crate::boot::{KernelFormat, MAX_CMDLINE};
    use crate::options::VmOptions;
    use proptest::prelude::*;

    fn load_into(memory: u64, image: &[u8], cmdline: &str) -> Result<(GuestRam, BootState), BootError> {
        let ram = GuestRam::new(&VmOptions::new(memory, 1)).unwrap();
        let state = KernelFormat::detect(image)?.load(&ram, image, cmdline)?;
        Ok((ram, state))
    }

    #[test]
    fn descriptors_are_those_of_the_manual() {
        // The classic flat 32-bit code and data descriptors, accessed, and a busy TSS of 104 bytes.
        assert_eq!(DESCRIPTORS, [0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067]);
    }

    #[test]
    fn a_kernel_its_command_line_and_its_map_arrive() {
        let image = TestElf::default().build();
        let (ram, state) = load_into(8 << 20, &image, "a=b c").unwrap();
        assert_eq!((state.regs.rip, state.regs.rbx), (0x10_0010, START_INFO));
        let read = |at: u64, len: usize| {
            let mut bytes = vec![0; len];
            ram.map().read_slice(&mut bytes, GuestAddress(at)).unwrap();
            bytes
        };
        assert_eq!(read(0x10_0000, 4), [0xf4, 0xeb, 0xfd, 0x90]);
        assert_eq!(read(CMDLINE, 6), b"a=b c\0");
        assert_eq!(read(START_INFO, 4), START_INFO_MAGIC.to_le_bytes());
        assert_eq!(read(MEMORY_MAP + 8, 8), LEGACY_HOLE.0.to_le_bytes());
    }

    #[test]
    fn the_map_names_all_ram_once() {
        let map = memory_map(&crate::memory::layout_for(5 << 30).unwrap());
        let ram: u64 = map.iter().filter(|e| e.type_ == E820_RAM).map(|e| e.size).sum();
        assert_eq!(ram, (5 << 30) - (LEGACY_HOLE.1 - LEGACY_HOLE.0));
        assert_eq!(map.last().unwrap().addr, HIGH_RAM_START);
        assert!(map.windows(2).all(|pair| pair[0].addr + pair[0].size <= pair[1].addr));
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
    fn bad_images_are_refused_in_words() {
        let refused = |elf: TestElf| load_into(8 << 20, &elf.build(), "").err().unwrap();
        assert_eq!(refused(TestElf { note: false, ..Default::default() }), BootError::NoPvhEntry);
        assert!(matches!(refused(TestElf { machine: 183, ..Default::default() }), BootError::Machine(_)));
        assert_eq!(refused(TestElf { addr: 0x8000, ..Default::default() }), BootError::LowSegment(0x8000));
        let bss = refused(TestElf { mem_len: 8 << 20, ..Default::default() });
        assert_eq!(bss, BootError::Memory { needed: 9 << 20, has: 8 << 20 });
        let image = TestElf::default().build();
        for len in [4, 63, 100, image.len() - 1] {
            let error = load_into(8 << 20, &image[..len], "").err().unwrap();
            assert!(matches!(error, BootError::Truncated { .. }), "{len}: {error}");
        }
    }

    #[test]
    fn a_command_line_fits_exactly_or_is_refused() {
        let image = TestElf::default().build();
        assert!(load_into(8 << 20, &image, &"x".repeat(MAX_CMDLINE)).is_ok());
        let error = load_into(8 << 20, &image, &"x".repeat(MAX_CMDLINE + 1)).err().unwrap();
        assert_eq!(error, BootError::CmdlineTooLong(MAX_CMDLINE + 1));
        assert!(matches!(load_into(8 << 20, &image, "a\0b").err().unwrap(), BootError::Cmdline(_)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_damaged_image_never_panics(changes in prop::collection::vec((0usize..300, any::<u8>()), 1..8), cut in 0usize..300) {
            let mut image = TestElf::default().build();
            for (at, value) in changes {
                let len = image.len();
                image[at % len] = value;
            }
            image.truncate(image.len().saturating_sub(cut / 4));
            let _ = load_into(8 << 20, &image, "x");
        }
    }
}
