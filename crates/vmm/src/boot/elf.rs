//! A look at an ELF file before it is loaded, so that what is wrong with it can be said plainly.
//!
//! System V ABI, chapter "Object Files"; offsets are those of the 64-bit class.

use super::BootError;

const HEADER_LEN: u64 = 64;
const PROGRAM_HEADER_LEN: u64 = 56;
const PT_LOAD: u32 = 1;
const EM_X86_64: u16 = 62;
/// RAM from here on is the kernel's, below it is boot data.
const KERNEL_START: u64 = 1 << 20;

/// The `N` bytes at `at`; the caller checked that they are there, what is not there reads as zeros.
fn bytes<const N: usize>(image: &[u8], at: u64) -> [u8; N] {
    let from = usize::try_from(at).ok().and_then(|at| image.get(at..)?.first_chunk());
    from.copied().unwrap_or([0; N])
}

fn u16_at(image: &[u8], at: u64) -> u16 {
    u16::from_le_bytes(bytes(image, at))
}

fn u32_at(image: &[u8], at: u64) -> u32 {
    u32::from_le_bytes(bytes(image, at))
}

fn u64_at(image: &[u8], at: u64) -> u64 {
    u64::from_le_bytes(bytes(image, at))
}

/// Checks that `image` is a complete x86-64 ELF file whose segments fit between 1 MiB and `ram_end`.
pub(super) fn check(image: &[u8], ram_end: u64) -> Result<(), BootError> {
    let has = image.len() as u64;
    let fits = |what: &str, start: u64, len: u64| {
        let needed = start.saturating_add(len);
        if needed > has { Err(BootError::Truncated { what: what.to_owned(), needed, has }) } else { Ok(()) }
    };
    fits("the ELF header", 0, HEADER_LEN)?;
    let (class, data, machine) = (image[4], image[5], u16_at(image, 18));
    if (class, data, machine) != (2, 1, EM_X86_64) {
        return Err(BootError::Machine(format!("class {class}, byte order {data}, machine {machine}")));
    }
    let (offset, entry_len, count) = (u64_at(image, 32), u16_at(image, 54), u64::from(u16_at(image, 56)));
    if u64::from(entry_len) != PROGRAM_HEADER_LEN || count == 0 || offset < HEADER_LEN {
        return Err(BootError::Invalid(format!(
            "{count} program headers of {entry_len} bytes at {offset:#x} make no sense"
        )));
    }
    fits("the table of program headers", offset, count * PROGRAM_HEADER_LEN)?;
    for at in (0..count).map(|i| offset + i * PROGRAM_HEADER_LEN) {
        let (kind, file_at, addr) = (u32_at(image, at), u64_at(image, at + 8), u64_at(image, at + 24));
        let (file_len, mem_len) = (u64_at(image, at + 32), u64_at(image, at + 40));
        fits("a segment", file_at, file_len)?;
        if kind != PT_LOAD || mem_len == 0 {
            continue;
        }
        if addr < KERNEL_START {
            return Err(BootError::LowSegment(addr));
        }
        let needed = addr.saturating_add(mem_len.max(file_len));
        if needed > ram_end {
            return Err(BootError::Memory { needed, has: ram_end });
        }
    }
    Ok(())
}
