//! Loading a kernel into guest memory.
//!
//! [`KernelFormat`] detects the format by its magic number. Each format loads its image in its own
//! way and returns a [`BootState`] for the first vCPU. A new format therefore changes nothing
//! outside this folder.

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

/// Maximum length of a command line in bytes, without the terminating NUL.
pub const MAX_CMDLINE: usize = 4095;

/// Error that loading a kernel returns.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootError {
    /// The image is neither an ELF file nor a bzImage.
    #[error("the kernel image is neither a Linux bzImage nor an ELF file: it starts with {0:02x?}")]
    Foreign(Vec<u8>),
    /// The image is for another machine.
    #[error("the kernel image is for another machine: {0}; it must be for 64-bit x86 (x86-64, amd64)")]
    Machine(String),
    /// The file ends before the end of the content that its headers describe.
    #[error("the kernel image is truncated: {what} needs {needed} bytes and the file has {has}")]
    Truncated {
        /// Part that does not fit.
        what: String,
        /// End of the part, in bytes from the start of the file.
        needed: u64,
        /// Length of the file in bytes.
        has: u64,
    },
    /// The image cannot be loaded for another reason.
    #[error("the kernel cannot be loaded: {0}")]
    Invalid(String),
    /// The image has no PVH entry point.
    #[error(
        "the kernel image has no PVH entry point (ELF note XEN_ELFNOTE_PHYS32_ENTRY); Linux needs CONFIG_PVH=y"
    )]
    NoPvhEntry,
    /// A segment does not fit into RAM.
    #[error(
        "the kernel needs memory up to {needed:#x} and the guest's RAM below 3 GiB ends at {has:#x}; give the guest more memory"
    )]
    Memory {
        /// End of the last segment.
        needed: u64,
        /// End of the RAM below 3 GiB.
        has: u64,
    },
    /// A segment overlaps the boot data.
    #[error("the kernel has a segment at {0:#x}; RAM below 1 MiB is for boot data")]
    LowSegment(u64),
    /// The initrd does not fit next to the kernel.
    #[error(
        "the initrd has {len} bytes and there is room for {room} next to the kernel; give the guest more memory"
    )]
    InitrdTooLarge {
        /// Length of the initrd in bytes.
        len: u64,
        /// Number of bytes between the kernel and the end of the RAM in which the initrd may be.
        room: u64,
    },
    /// The command line is too long.
    #[error("the command line has {len} bytes; this kernel takes at most {most}")]
    CmdlineTooLong {
        /// Length of the command line in bytes, with the part that the machine adds.
        len: usize,
        /// Maximum length in bytes.
        most: usize,
    },
    /// The ACPI tables do not fit.
    #[error("the ACPI tables have {len} bytes and there is room for {room}")]
    Tables {
        /// Length of the tables in bytes.
        len: u64,
        /// Available space in bytes.
        room: u64,
    },
    /// The command line contains a character that cannot be passed to a kernel, such as NUL.
    #[error("the command line is not valid: {0}")]
    Cmdline(String),
}

/// Kernel with its initrd and command line.
#[derive(Debug, Clone, Copy)]
pub struct Kernel<'a> {
    /// Content of the kernel's file: a Linux bzImage, or an ELF file with a PVH entry point.
    pub image: &'a [u8],
    /// Content of the initial RAM disk, if there is one.
    pub initrd: Option<&'a [u8]>,
    /// Command line of the kernel.
    pub cmdline: &'a str,
}

/// Format of a kernel image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum KernelFormat {
    /// ELF file with a PVH entry point.
    PvhElf,
    /// Linux bzImage.
    BzImage,
}

impl KernelFormat {
    /// Returns the format of `image`.
    ///
    /// # Errors
    /// Returns an error if the format is not supported.
    pub(crate) fn detect(image: &[u8]) -> Result<Self, BootError> {
        let has = |at: usize, magic: &[u8]| image.get(at..).is_some_and(|rest| rest.starts_with(magic));
        if has(0, b"\x7fELF") {
            return Ok(Self::PvhElf);
        }
        // Linux, Documentation/arch/x86/boot.rst.
        if has(0x202, b"HdrS") {
            return Ok(Self::BzImage);
        }
        // Linux, Documentation/arch/arm64/booting.rst and
        // Documentation/arch/riscv/boot-image-header.rst: the most likely images for a wrong
        // machine.
        for (magic, machine) in [(&b"ARM\x64"[..], "64-bit ARM"), (b"RSC\x05", "RISC-V")] {
            if has(0x38, magic) {
                return Err(BootError::Machine(format!("a Linux image for {machine}")));
            }
        }
        Err(BootError::Foreign(image[..image.len().min(4)].to_vec()))
    }

    /// Returns true if a guest with this kernel finds its devices on its command line. Linux finds
    /// them in the ACPI tables. If a Linux kernel also read the command line, it would find each
    /// device twice.
    pub(crate) fn reads_devices(self, image: &[u8]) -> bool {
        match self {
            Self::PvhElf => !elf::is_linux(image),
            Self::BzImage => false,
        }
    }

    /// Loads `kernel` into `ram`. `rsdp` is the address of the ACPI tables.
    ///
    /// # Errors
    /// Returns a [`BootError`]. RAM may then contain parts of the image.
    pub(crate) fn load(self, ram: &GuestRam, kernel: &Kernel<'_>, rsdp: u64) -> Result<BootState, BootError> {
        check_cmdline(kernel.cmdline, MAX_CMDLINE)?;
        map::write_firmware(ram)?;
        match self {
            Self::PvhElf => pvh::load(ram, kernel, rsdp),
            Self::BzImage => bzimage::load(ram, kernel, rsdp),
        }
    }
}

/// Checks that a command line can be passed to a kernel that accepts `most` bytes.
fn check_cmdline(cmdline: &str, most: usize) -> Result<(), BootError> {
    if cmdline.len() > most {
        return Err(BootError::CmdlineTooLong { len: cmdline.len(), most });
    }
    match cmdline.chars().find(|c| !matches!(c, ' '..='~')) {
        Some(odd) => Err(BootError::Cmdline(format!("{odd:?} is not allowed"))),
        None => Ok(()),
    }
}

/// Writes a checked command line to the address that kernels are told.
fn write_cmdline(ram: &GuestRam, cmdline: &str) -> Result<(), BootError> {
    let text = [cmdline.as_bytes(), b"\0"].concat();
    let written = ram.map().write_slice(&text, GuestAddress(map::CMDLINE));
    written.map_err(|error| BootError::Invalid(error.to_string()))
}

/// State in which the first vCPU starts. The others wait for the guest to start them (INIT, SIPI).
#[derive(Debug, Clone, Copy)]
pub(crate) struct BootState {
    /// General registers.
    pub(crate) regs: kvm_regs,
    /// Function that changes the special registers from KVM's reset state.
    pub(crate) sregs: fn(&mut kvm_sregs),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_detected() {
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
    fn only_non_linux_kernels_find_devices_on_their_command_line() {
        let elf = testing::TestElf::default();
        assert!(KernelFormat::PvhElf.reads_devices(&elf.build()));
        let linux = testing::TestElf { linux: true, ..elf }.build();
        assert!(!KernelFormat::PvhElf.reads_devices(&linux));
        for len in 0..linux.len() {
            let _ = KernelFormat::PvhElf.reads_devices(&linux[..len]);
        }
    }
}
