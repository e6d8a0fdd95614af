//! The PVH boot protocol: Xen, docs/misc/pvh.pandoc, and `hvm_start_info` of
//! xen/include/public/arch-x86/hvm/start_info.h.

use super::map::{CMDLINE, GDT, MEMORY_MAP, MODULES, MapEntry, START_INFO, memory_map};
use super::{BootError, BootState, Kernel, elf, initrd, segments};
use crate::memory::GuestRam;
use kvm_bindings::kvm_regs;
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use linux_loader::loader::{Elf, KernelLoader};
use std::io::Cursor;
use vm_memory::{Address, Bytes, GuestAddress};

/// Magic number of `hvm_start_info`: "xEn3" with the 0x80 bit of the "E" set.
const START_INFO_MAGIC: u32 = 0x336e_c578;
/// Version of `hvm_start_info` with a memory map.
const START_INFO_VERSION: u32 = 1;

/// Loads a PVH kernel. `rsdp` is the address of the ACPI tables.
pub(super) fn load(ram: &GuestRam, kernel: &Kernel<'_>, rsdp: u64) -> Result<BootState, BootError> {
    let invalid = |error: &dyn std::fmt::Display| BootError::Invalid(error.to_string());
    let low_end = ram.layout().regions()[0].len;
    let kernel_end = elf::check(kernel.image, low_end)?;
    let loaded = Elf::load(ram.map(), None, &mut Cursor::new(kernel.image), None).map_err(|e| invalid(&e))?;
    let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
        return Err(BootError::NoPvhEntry);
    };
    let initrd = initrd::place(ram, kernel.initrd, kernel_end, low_end)?;
    super::write_cmdline(ram, kernel.cmdline)?;

    let map: Vec<_> = memory_map(ram.layout()).into_iter().map(map_entry).collect();
    let modules: Vec<_> = initrd.map(|placed| module(&placed)).into_iter().collect();
    let count = |len: usize| u32::try_from(len).map_err(|e| invalid(&e));
    let info = hvm_start_info {
        magic: START_INFO_MAGIC,
        version: START_INFO_VERSION,
        nr_modules: count(modules.len())?,
        modlist_paddr: if modules.is_empty() { 0 } else { MODULES },
        cmdline_paddr: CMDLINE,
        rsdp_paddr: rsdp,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: count(map.len())?,
        ..Default::default()
    };
    let mut params = BootParams::new(&info, GuestAddress(START_INFO));
    params.set_sections(&map, GuestAddress(MEMORY_MAP));
    if !modules.is_empty() {
        params.set_modules(&modules, GuestAddress(MODULES));
    }
    PvhBootConfigurator::write_bootparams(&params, ram.map()).map_err(|e| invalid(&e))?;
    ram.map().write_slice(&segments::table_32(), GuestAddress(GDT)).map_err(|e| invalid(&e))?;

    let regs = kvm_regs { rip: entry.raw_value(), rbx: START_INFO, rflags: 2, ..Default::default() };
    Ok(BootState { regs, sregs: segments::protected_mode })
}

fn map_entry(entry: MapEntry) -> hvm_memmap_table_entry {
    let MapEntry { start, end, kind } = entry;
    hvm_memmap_table_entry { addr: start, size: end - start, type_: kind as u32, ..Default::default() }
}

fn module(initrd: &initrd::Placed) -> hvm_modlist_entry {
    hvm_modlist_entry { paddr: initrd.address, size: initrd.len, ..Default::default() }
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
        let kernel = Kernel { image, initrd: None, cmdline };
        let state = KernelFormat::detect(image)?.load(&ram, &kernel, 0xe_0000)?;
        Ok((ram, state))
    }

    #[test]
    fn kernel_command_line_and_memory_map_are_loaded() {
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
        assert_eq!(read(START_INFO + 32, 8), 0xe_0000u64.to_le_bytes());
        assert_eq!(read(MEMORY_MAP + 8, 8), 0x9_fc00u64.to_le_bytes());
        assert_eq!(read(START_INFO + 12, 4), [0; 4], "no module");
    }

    #[test]
    fn initrd_is_passed_as_a_module() {
        let image = TestElf::default().build();
        let ram = GuestRam::new(&VmOptions::new(8 << 20, 1)).unwrap();
        let kernel = Kernel { image: &image, initrd: Some(b"initrd"), cmdline: "" };
        KernelFormat::PvhElf.load(&ram, &kernel, 0).unwrap();
        let word = |at: u64| ram.map().read_obj::<u64>(GuestAddress(at)).unwrap();
        assert_eq!((word(START_INFO + 8) >> 32, word(START_INFO + 16)), (1, MODULES));
        assert_eq!((word(MODULES), word(MODULES + 8)), ((8 << 20) - 4096, 6));
        let large = Kernel { initrd: Some(&[0; 8 << 20]), ..kernel };
        assert!(matches!(KernelFormat::PvhElf.load(&ram, &large, 0), Err(BootError::InitrdTooLarge { .. })));
    }

    #[test]
    fn bad_images_are_refused_with_a_clear_error() {
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
    fn command_line_fits_exactly_or_is_refused() {
        let image = TestElf::default().build();
        assert!(load_into(8 << 20, &image, &"x".repeat(MAX_CMDLINE)).is_ok());
        let error = load_into(8 << 20, &image, &"x".repeat(MAX_CMDLINE + 1)).err().unwrap();
        assert_eq!(error, BootError::CmdlineTooLong { len: MAX_CMDLINE + 1, most: MAX_CMDLINE });
        assert!(matches!(load_into(8 << 20, &image, "a\0b").err().unwrap(), BootError::Cmdline(_)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn damaged_image_never_panics(changes in prop::collection::vec((0usize..300, any::<u8>()), 1..8), cut in 0usize..300) {
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
