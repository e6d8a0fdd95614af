//! Linux's boot protocol, entered in 64-bit mode: Linux, Documentation/arch/x86/boot.rst, "64-bit
//! Boot Protocol".

use super::elf::{u16_at, u32_at, u64_at};
use super::map::{CMDLINE, GDT, KERNEL_START, MapEntry, PAGE_TABLES, START_INFO, memory_map};
use super::{BootError, BootState, Kernel, initrd, segments};
use crate::memory::GuestRam;
use kvm_bindings::kvm_regs;
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{XLF_KERNEL_64, boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, KernelLoader};
use std::io::Cursor;
use vm_memory::{Bytes, GuestAddress};

/// Offsets in the setup header.
mod offset {
    pub(super) const SETUP_SECTS: u64 = 0x1f1;
    pub(super) const SYSSIZE: u64 = 0x1f4;
    pub(super) const VERSION: u64 = 0x206;
    pub(super) const CODE32_START: u64 = 0x214;
    pub(super) const INITRD_ADDR_MAX: u64 = 0x22c;
    pub(super) const RELOCATABLE: u64 = 0x234;
    pub(super) const XLOADFLAGS: u64 = 0x236;
    pub(super) const CMDLINE_SIZE: u64 = 0x238;
    pub(super) const PREF_ADDRESS: u64 = 0x258;
    pub(super) const INIT_SIZE: u64 = 0x260;
    /// End of the part of the header that is read.
    pub(super) const END: u64 = 0x268;
}

/// Oldest supported version, which has 64-bit flags: Linux 3.8, of 2013.
const OLDEST: u16 = 0x20c;
/// Offset of the 64-bit entry point from the start of the protected-mode kernel.
const ENTRY_64: u64 = 0x200;
/// Type of a boot loader without an ID of its own.
const LOADER: u8 = 0xff;

/// Fields of the setup header that are needed before anything is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setup {
    /// Address at which the kernel is loaded.
    start: u64,
    /// End of the memory that the kernel needs until it has its own page tables and memory map.
    end: u64,
    /// Highest address that an initrd may reach, exclusive.
    initrd_top: u64,
    /// Maximum length of a command line, in bytes.
    cmdline: usize,
}

impl Setup {
    fn read(image: &[u8], ram_end: u64) -> Result<Self, BootError> {
        let has = image.len() as u64;
        let fits = |what: &str, needed: u64| {
            let what = what.to_owned();
            if needed > has { Err(BootError::Truncated { what, needed, has }) } else { Ok(()) }
        };
        fits("the setup header", offset::END)?;
        let version = u16_at(image, offset::VERSION);
        if version < OLDEST {
            return Err(BootError::Invalid(format!(
                "a Linux bzImage with boot protocol {}.{:02} is too old: {}.{:02} (Linux 3.8) is the oldest that can be loaded",
                version >> 8,
                version & 0xff,
                OLDEST >> 8,
                OLDEST & 0xff
            )));
        }
        if u16_at(image, offset::XLOADFLAGS) & XLF_KERNEL_64 == 0 {
            return Err(BootError::Machine("a Linux bzImage without a 64-bit entry point".to_owned()));
        }
        let sectors = match image[usize::try_from(offset::SETUP_SECTS).unwrap_or(0)] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        let body = u64::from(u32_at(image, offset::SYSSIZE)) * 16;
        fits("the kernel after its setup code", (sectors + 1) * 512 + body.max(1))?;

        let preferred = u64_at(image, offset::PREF_ADDRESS);
        let relocatable = image[usize::try_from(offset::RELOCATABLE).unwrap_or(0)] != 0;
        let start = if relocatable { preferred } else { u32_at(image, offset::CODE32_START).into() };
        if start < KERNEL_START {
            return Err(BootError::LowSegment(start));
        }
        // A kernel that is loaded below its preferred address moves itself to that address.
        let len = u64::from(u32_at(image, offset::INIT_SIZE)).max(has - (sectors + 1) * 512);
        let end = start.max(preferred).saturating_add(len);
        if end > ram_end {
            return Err(BootError::Memory { needed: end, has: ram_end });
        }
        let initrd_top = (u64::from(u32_at(image, offset::INITRD_ADDR_MAX)) + 1).min(ram_end);
        let cmdline = usize::try_from(u32_at(image, offset::CMDLINE_SIZE)).unwrap_or(usize::MAX);
        Ok(Self { start, end, initrd_top, cmdline })
    }
}

/// Loads a bzImage. `rsdp` is the address of the ACPI tables.
pub(super) fn load(ram: &GuestRam, kernel: &Kernel<'_>, rsdp: u64) -> Result<BootState, BootError> {
    let invalid = |error: &dyn std::fmt::Display| BootError::Invalid(error.to_string());
    let setup = Setup::read(kernel.image, ram.layout().regions()[0].len)?;
    super::check_cmdline(kernel.cmdline, setup.cmdline)?;
    let start = Some(GuestAddress(setup.start));
    let loaded = BzImage::load(ram.map(), start, &mut Cursor::new(kernel.image), None);
    let loaded = loaded.map_err(|e| invalid(&e))?;
    let initrd = initrd::place(ram, kernel.initrd, setup.end, setup.initrd_top)?;

    let mut params = boot_params {
        hdr: loaded.setup_header.ok_or_else(|| invalid(&"the image has no setup header"))?,
        acpi_rsdp_addr: rsdp,
        ..Default::default()
    };
    hand_over(&mut params.hdr, initrd)?;
    for (to, entry) in params.e820_table.iter_mut().zip(memory_map(ram.layout())) {
        let MapEntry { start, end, kind } = entry;
        *to = boot_e820_entry { addr: start, size: end - start, r#type: kind as u32 };
        params.e820_entries += 1;
    }
    let params = BootParams::new(&params, GuestAddress(START_INFO));
    LinuxBootConfigurator::write_bootparams(&params, ram.map()).map_err(|e| invalid(&e))?;
    super::write_cmdline(ram, kernel.cmdline)?;
    for (bytes, at) in [(segments::table_64(), GDT), (segments::page_tables(), PAGE_TABLES)] {
        ram.map().write_slice(&bytes, GuestAddress(at)).map_err(|e| invalid(&e))?;
    }
    let regs = kvm_regs { rip: setup.start + ENTRY_64, rsi: START_INFO, rflags: 2, ..Default::default() };
    Ok(BootState { regs, sregs: segments::long_mode })
}

/// Fills in the boot loader's fields of the header.
fn hand_over(header: &mut setup_header, initrd: Option<initrd::Placed>) -> Result<(), BootError> {
    let below_4g =
        |at: u64| u32::try_from(at).map_err(|_| BootError::Invalid(format!("{at:#x} is not below 4 GiB")));
    header.type_of_loader = LOADER;
    header.cmd_line_ptr = below_4g(CMDLINE)?;
    if let Some(initrd) = initrd {
        header.ramdisk_image = below_4g(initrd.address)?;
        header.ramdisk_size = below_4g(initrd.len)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::KernelFormat;
    use crate::boot::testing::TestBzImage;
    use crate::options::VmOptions;
    use proptest::prelude::*;

    const RAM: u64 = 32 << 20;

    fn load_into(kernel: &Kernel<'_>) -> Result<(GuestRam, BootState), BootError> {
        let ram = GuestRam::new(&VmOptions::new(RAM, 1)).unwrap();
        let state = KernelFormat::detect(kernel.image)?.load(&ram, kernel, 0xe_0000)?;
        Ok((ram, state))
    }

    fn load_image(image: &[u8]) -> Result<(GuestRam, BootState), BootError> {
        load_into(&Kernel { image, initrd: None, cmdline: "" })
    }

    fn read(ram: &GuestRam, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        ram.map().read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    #[test]
    fn kernel_initrd_and_boot_parameters_are_loaded() {
        let image = TestBzImage::default().build();
        let kernel = Kernel { image: &image, initrd: Some(b"initrd"), cmdline: "a=b c" };
        let (ram, state) = load_into(&kernel).unwrap();
        let TestBzImage { preferred, code, .. } = TestBzImage::default();
        assert_eq!((state.regs.rip, state.regs.rsi), (preferred + 0x200, START_INFO));
        assert_eq!(read(&ram, preferred + 0x200, code.len()), code);
        assert_eq!(read(&ram, CMDLINE, 6), b"a=b c\0");
        let zero_page = read(&ram, START_INFO, 4096);
        assert_eq!(zero_page[0x210], 0xff);
        assert_eq!(u64_at(&zero_page, 0x70), 0xe_0000);
        assert_eq!(u64::from(u32_at(&zero_page, 0x228)), CMDLINE);
        let (at, len) = (u32_at(&zero_page, 0x218), u32_at(&zero_page, 0x21c));
        assert_eq!((u64::from(at), len), (RAM - 4096, 6));
        assert_eq!(read(&ram, at.into(), 6), b"initrd");
        let map: Vec<_> = (0..u64::from(zero_page[0x1e8]))
            .map(|n| 0x2d0 + n * 20)
            .map(|at| (u64_at(&zero_page, at), u64_at(&zero_page, at + 8), u32_at(&zero_page, at + 16)))
            .collect();
        assert_eq!(
            map,
            [
                (0, 0x9_fc00, 1),
                (0x9_fc00, 0x400 + 0x6_0000, 2),
                (0x10_0000, RAM - 0x10_0000, 1),
                (0xc000_0000, 0x4000_0000, 2)
            ]
        );
    }

    #[test]
    fn kernel_that_is_not_relocatable_is_loaded_at_its_address() {
        let image = TestBzImage { relocatable: false, ..Default::default() }.build();
        assert_eq!(load_image(&image).unwrap().1.regs.rip, 0x10_0000 + ENTRY_64);
    }

    #[test]
    fn bad_images_are_refused_with_a_clear_error() {
        let refused = |image: TestBzImage| load_image(&image.build()).err().unwrap();
        let old = refused(TestBzImage { version: 0x20b, ..Default::default() }).to_string();
        assert!(old.contains("boot protocol 2.11"), "{old}");
        let other = refused(TestBzImage { xloadflags: 0, ..Default::default() });
        assert!(matches!(other, BootError::Machine(_)), "{other}");
        let low = refused(TestBzImage { preferred: 0x8000, ..Default::default() });
        assert_eq!(low, BootError::LowSegment(0x8000));
        let large = refused(TestBzImage { init_size: 64 << 20, ..Default::default() });
        assert_eq!(large, BootError::Memory { needed: 80 << 20, has: RAM });
        let far = refused(TestBzImage { preferred: u64::MAX, ..Default::default() });
        assert_eq!(far, BootError::Memory { needed: u64::MAX, has: RAM });
        let image = TestBzImage::default().build();
        for len in [0x206, 0x260, 0x400, image.len() - 1] {
            let error = load_image(&image[..len]).err().unwrap();
            assert!(matches!(error, BootError::Truncated { .. }), "{len}: {error}");
        }
    }

    #[test]
    fn kernel_limits_the_length_of_its_command_line() {
        let image = TestBzImage { cmdline_size: 100, ..Default::default() }.build();
        let load = |len: usize| load_into(&Kernel { image: &image, initrd: None, cmdline: &"x".repeat(len) });
        assert!(load(100).is_ok());
        assert_eq!(load(101).err(), Some(BootError::CmdlineTooLong { len: 101, most: 100 }));
    }

    #[test]
    fn initrd_stays_below_the_kernels_limit() {
        let image = TestBzImage { initrd_addr_max: (24 << 20) - 1, ..Default::default() }.build();
        let load =
            |len: usize| load_into(&Kernel { image: &image, initrd: Some(&vec![1; len]), cmdline: "" });
        let (ram, _) = load(4096).unwrap();
        assert_eq!(u64::from(u32_at(&read(&ram, START_INFO + 0x218, 4), 0)), (24 << 20) - 4096);
        let room = (24 << 20) - (16 << 20) - u64::from(TestBzImage::default().init_size);
        let len = usize::try_from(room).unwrap() + 1;
        assert_eq!(load(len).err(), Some(BootError::InitrdTooLarge { len: room + 1, room }));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn damaged_image_never_panics(changes in prop::collection::vec((0x1f1usize..0x270, any::<u8>()), 1..8), cut in 0usize..2000) {
            let mut image = TestBzImage::default().build();
            for (at, value) in changes {
                image[at] = value;
            }
            image.truncate(image.len().saturating_sub(cut.saturating_sub(1000)));
            let _ = load_into(&Kernel { image: &image, initrd: Some(&[1; 5000]), cmdline: "x" });
        }
    }
}
