//! Checks of an ELF file before it is loaded, which give clear errors.
//!
//! System V ABI, chapter "Object Files"; offsets are those of the 64-bit class.

use super::BootError;
use super::map::KERNEL_START;

const HEADER_LEN: u64 = 64;
const PROGRAM_HEADER_LEN: u64 = 56;
const PT_LOAD: u32 = 1;
const EM_X86_64: u16 = 62;
const PT_NOTE: u32 = 4;

/// Returns the `N` bytes at `at`. Bytes beyond the end of the image read as zeros; the caller has
/// checked that there are none.
fn bytes<const N: usize>(image: &[u8], at: u64) -> [u8; N] {
    let from = usize::try_from(at).ok().and_then(|at| image.get(at..)?.first_chunk());
    from.copied().unwrap_or([0; N])
}

pub(super) fn u16_at(image: &[u8], at: u64) -> u16 {
    u16::from_le_bytes(bytes(image, at))
}

pub(super) fn u32_at(image: &[u8], at: u64) -> u32 {
    u32::from_le_bytes(bytes(image, at))
}

pub(super) fn u64_at(image: &[u8], at: u64) -> u64 {
    u64::from_le_bytes(bytes(image, at))
}

/// Checks that `image` is a complete x86-64 ELF file whose segments fit between 1 MiB and
/// `ram_end`. Returns the end of the last segment.
pub(super) fn check(image: &[u8], ram_end: u64) -> Result<u64, BootError> {
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
            "{count} program headers of {entry_len} bytes at {offset:#x} are not valid"
        )));
    }
    fits("the table of program headers", offset, count * PROGRAM_HEADER_LEN)?;
    let mut end = KERNEL_START;
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
        end = end.max(needed);
    }
    Ok(end)
}

/// Maximum number of note segments, and of notes in each, that are checked. Kernels have one
/// segment with about ten notes.
const MAX_NOTES: (usize, usize) = (8, 256);

/// Returns true if `image` is a Linux kernel, which has notes with the name "Linux"
/// (include/linux/elfnote.h).
pub(super) fn is_linux(image: &[u8]) -> bool {
    let (offset, count) = (u64_at(image, 32), u64::from(u16_at(image, 56)));
    let headers = (0..count).map(|i| offset.saturating_add(i * PROGRAM_HEADER_LEN));
    let notes = headers.filter(|at| u32_at(image, *at) == PT_NOTE);
    let mut ranges = notes.map(|at| (u64_at(image, at + 8), u64_at(image, at + 32))).take(MAX_NOTES.0);
    ranges.any(|(at, len)| has_linux_note(image, at, len))
}

fn has_linux_note(image: &[u8], start: u64, len: u64) -> bool {
    const HEADER: u64 = 12;
    let end = start.saturating_add(len).min(image.len() as u64);
    let mut at = start;
    for _ in 0..MAX_NOTES.1 {
        if at.saturating_add(HEADER) > end {
            break;
        }
        let (name, content) = (u64::from(u32_at(image, at)), u64::from(u32_at(image, at + 4)));
        if name == 6 && bytes::<6>(image, at + HEADER) == *b"Linux\0" {
            return true;
        }
        at += HEADER + name.next_multiple_of(4) + content.next_multiple_of(4);
    }
    false
}
