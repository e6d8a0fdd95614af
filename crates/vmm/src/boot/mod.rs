//! Loading a kernel into guest memory.
//!
//! A [`KernelFormat`] is found by its magic number; each format loads its image its own way and says in a [`BootState`]
//! how the first vCPU is to be set up, so that a new format changes nothing outside this folder.

mod elf;
mod pvh;
#[cfg(test)]
pub(crate) mod testing;

use crate::memory::GuestRam;
use kvm_bindings::{kvm_regs, kvm_sregs};
pub(crate) use pvh::whole_pages;

/// Most bytes that a command line may have, without the NUL that ends it.
pub const MAX_CMDLINE: usize = 4095;

/// Why a kernel cannot be loaded.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootError {
    /// Neither an ELF file nor a bzImage.
    #[error("the kernel image is no ELF file: it starts with {0:02x?}")]
    Foreign(Vec<u8>),
    /// A Linux bzImage.
    #[error(
        "the kernel image is a Linux bzImage, which is not supported yet; give an ELF file with a PVH entry (vmlinux)"
    )]
    BzImage,
    /// An ELF file for another machine.
    #[error(
        "the kernel image is an ELF file for another machine: {0}; it must be 64-bit little-endian x86-64"
    )]
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
    /// An ELF file that cannot be loaded for another reason.
    #[error("the kernel image cannot be loaded: {0}")]
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
    /// The command line is too long.
    #[error("the command line has {0} bytes; at most {MAX_CMDLINE} fit")]
    CmdlineTooLong(usize),
    /// The command line holds a NUL, or another character that cannot be passed.
    #[error("the command line is not valid: {0}")]
    Cmdline(String),
}

/// A kernel image's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum KernelFormat {
    /// An ELF file with a PVH entry point.
    PvhElf,
}

impl KernelFormat {
    /// The format of `image`.
    ///
    /// # Errors
    /// If it is none that can be loaded.
    pub(crate) fn detect(image: &[u8]) -> Result<Self, BootError> {
        /// Where a bzImage has its magic number: Linux, Documentation/arch/x86/boot.rst.
        const BZIMAGE_MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
        if image.starts_with(b"\x7fELF") {
            return Ok(Self::PvhElf);
        }
        if image.get(BZIMAGE_MAGIC.0..).is_some_and(|rest| rest.starts_with(BZIMAGE_MAGIC.1)) {
            return Err(BootError::BzImage);
        }
        Err(BootError::Foreign(image[..image.len().min(4)].to_vec()))
    }

    /// Loads `image` and its command line into `ram`.
    ///
    /// # Errors
    /// [`BootError`]; RAM may then hold parts of the image.
    pub(crate) fn load(self, ram: &GuestRam, image: &[u8], cmdline: &str) -> Result<BootState, BootError> {
        if cmdline.len() > MAX_CMDLINE {
            return Err(BootError::CmdlineTooLong(cmdline.len()));
        }
        match self {
            Self::PvhElf => pvh::load(ram, image, cmdline),
        }
    }
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
        let mut bzimage = vec![0; 0x300];
        bzimage[0x202..0x206].copy_from_slice(b"HdrS");
        assert_eq!(KernelFormat::detect(&bzimage), Err(BootError::BzImage));
    }
}
