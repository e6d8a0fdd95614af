//! Loading a kernel into guest memory.
//!
//! A [`KernelFormat`] is found by its magic number; each format loads its image its own way and says in a [`BootState`]
//! how the first vCPU is to be set up, so that a new format changes nothing outside this folder.

mod bzimage;
mod elf;
mod initrd;
mod map;
mod pvh;
mod segments;
#[cfg(test)]
pub(crate) mod testing;

use crate::memory::GuestRam;
use kvm_bindings::{kvm_regs, kvm_sregs};
pub(crate) use map::{ACPI_TABLES, GENERATION, whole_pages};
use vm_memory::{Bytes, GuestAddress};

/// Most bytes that a command line may have, without the NUL that ends it.
pub const MAX_CMDLINE: usize = 4095;

/// Why a kernel cannot be loaded.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootError {
    /// Neither an ELF file nor a bzImage.
    #[error("the kernel image is neither a Linux bzImage nor an ELF file: it starts with {0:02x?}")]
    Foreign(Vec<u8>),
    /// For another machine.
    #[error("the kernel image is for another machine: {0}; it must be for 64-bit x86 (x86-64, amd64)")]
    Machine(String),
    /// The file ends before what it says it holds.
    #[error("the kernel image is truncated: {what} needs {needed} bytes and the file has {has}")]
    Truncated {
        /// What does not fit.
        what: String,
        /// Where it would end.
        needed: u64,
        /// The file's length.
        has: u64,
    },
    /// It cannot be loaded for another reason.
    #[error("the kernel cannot be loaded: {0}")]
    Invalid(String),
    /// No PVH entry point.
    #[error(
        "the kernel image has no PVH entry point (ELF note XEN_ELFNOTE_PHYS32_ENTRY); Linux needs CONFIG_PVH=y"
    )]
    NoPvhEntry,
    /// A segment does not fit into RAM.
    #[error(
        "the kernel needs memory up to {needed:#x} and the guest's RAM below 3 GiB ends at {has:#x}; give it more"
    )]
    Memory {
        /// End of the last segment.
        needed: u64,
        /// End of RAM.
        has: u64,
    },
    /// A segment lies where boot data goes.
    #[error("the kernel has a segment at {0:#x}; RAM below 1 MiB is for boot data")]
    LowSegment(u64),
    /// The initrd does not fit beside the kernel.
    #[error(
        "the initrd has {len} bytes and beside the kernel there is room for {room}; give the guest more memory"
    )]
    InitrdTooLarge {
        /// Its length.
        len: u64,
        /// Bytes between the kernel and the end of the RAM where it may be.
        room: u64,
    },
    /// The command line is too long.
    #[error("the command line has {len} bytes; this kernel takes at most {most}")]
    CmdlineTooLong {
        /// Its length, with what the machine puts in front.
        len: usize,
        /// What fits.
        most: usize,
    },
    /// The ACPI tables do not fit.
    #[error("the ACPI tables have {len} bytes and there is room for {room}")]
    Tables {
        /// Their length.
        len: u64,
        /// The room.
        room: u64,
    },
    /// The command line holds a NUL, or another character that cannot be passed.
    #[error("the command line is not valid: {0}")]
    Cmdline(String),
}

/// A kernel and what goes with it.
#[derive(Debug, Clone, Copy)]
pub struct Kernel<'a> {
    /// The kernel's file: a Linux bzImage, or an ELF file with a PVH entry point.
    pub image: &'a [u8],
    /// The initial RAM disk's file.
    pub initrd: Option<&'a [u8]>,
    /// Its command line.
    pub cmdline: &'a str,
}

/// A kernel image's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum KernelFormat {
    /// An ELF file with a PVH entry point.
    PvhElf,
    /// Linux's own.
    BzImage,
}

impl KernelFormat {
    /// The format of `image`.
    ///
    /// # Errors
    /// If it is none that can be loaded.
    pub(crate) fn detect(image: &[u8]) -> Result<Self, BootError> {
        let has = |at: usize, magic: &[u8]| image.get(at..).is_some_and(|rest| rest.starts_with(magic));
        if has(0, b"\x7fELF") {
            return Ok(Self::PvhElf);
        }
        // Linux, Documentation/arch/x86/boot.rst.
        if has(0x202, b"HdrS") {
            return Ok(Self::BzImage);
        }
        // Linux, Documentation/arch/arm64/booting.rst and Documentation/arch/riscv/boot-image-header.rst: the images that somebody who
        // mixes machines up is likely to have.
        for (magic, machine) in [(&b"ARM\x64"[..], "64-bit ARM"), (b"RSC\x05", "RISC-V")] {
            if has(0x38, magic) {
                return Err(BootError::Machine(format!("a Linux image for {machine}")));
            }
        }
        Err(BootError::Foreign(image[..image.len().min(4)].to_vec()))
    }

    /// Whether a guest of this kernel looks for its devices on its command line. Linux looks in the ACPI tables, and one that is built to
    /// look in both places would find each device twice.
    pub(crate) fn reads_devices(self, image: &[u8]) -> bool {
        match self {
            Self::PvhElf => !elf::is_linux(image),
            Self::BzImage => false,
        }
    }

    /// Loads `kernel` into `ram`; `rsdp` is where the ACPI tables begin.
    ///
    /// # Errors
    /// [`BootError`]; RAM may then hold parts of the image.
    pub(crate) fn load(self, ram: &GuestRam, kernel: &Kernel<'_>, rsdp: u64) -> Result<BootState, BootError> {
        check_cmdline(kernel.cmdline, MAX_CMDLINE)?;
        map::write_firmware(ram)?;
        match self {
            Self::PvhElf => pvh::load(ram, kernel, rsdp),
            Self::BzImage => bzimage::load(ram, kernel, rsdp),
        }
    }
}

/// Checks that a command line can be passed, to a kernel that takes `most` bytes.
fn check_cmdline(cmdline: &str, most: usize) -> Result<(), BootError> {
    if cmdline.len() > most {
        return Err(BootError::CmdlineTooLong { len: cmdline.len(), most });
    }
    match cmdline.chars().find(|c| !matches!(c, ' '..='~')) {
        Some(odd) => Err(BootError::Cmdline(format!("{odd:?} cannot be part of one"))),
        None => Ok(()),
    }
}

/// Puts a command line that was checked where kernels are told to find it.
fn write_cmdline(ram: &GuestRam, cmdline: &str) -> Result<(), BootError> {
    let text = [cmdline.as_bytes(), b"\0"].concat();
    let written = ram.map().write_slice(&text, GuestAddress(map::CMDLINE));
    written.map_err(|error| BootError::Invalid(error.to_string()))
}

/// How the first vCPU starts. The others wait for the guest to start them (INIT, SIPI).
#[derive(Debug, Clone, Copy)]
pub(crate) struct BootState {
    /// Its registers.
    pub(crate) regs: kvm_regs,
    /// Changes its special registers, given as KVM has them after reset.
    pub(crate) sregs: fn(&mut kvm_sregs),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_apart() {
        assert_eq!(KernelFormat::detect(b"\x7fELF\x02"), Ok(KernelFormat::PvhElf));
        assert_eq!(KernelFormat::detect(b"MZ"), Err(BootError::Foreign(b"MZ".to_vec())));
        assert_eq!(KernelFormat::detect(b""), Err(BootError::Foreign(vec![])));
        let mut image = vec![0; 0x300];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        assert_eq!(KernelFormat::detect(&image), Ok(KernelFormat::BzImage));
        let mut image = vec![0; 0x300];
        image[0x38..0x3c].copy_from_slice(b"ARM\x64");
        let error = KernelFormat::detect(&image).unwrap_err().to_string();
        assert!(error.contains("64-bit ARM"), "{error}");
    }

    #[test]
    fn only_a_kernel_that_is_not_linux_reads_devices_from_its_command_line() {
        let elf = testing::TestElf::default();
        assert!(KernelFormat::PvhElf.reads_devices(&elf.build()));
        let linux = testing::TestElf { linux: true, ..elf }.build();
        assert!(!KernelFormat::PvhElf.reads_devices(&linux));
        for len in 0..linux.len() {
            let _ = KernelFormat::PvhElf.reads_devices(&linux[..len]);
        }
    }
}
