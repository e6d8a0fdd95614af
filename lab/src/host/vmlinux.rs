//! Extraction of the ELF file (`vmlinux`) from a bzImage. Other loaders boot this file by PVH.
//!
//! The setup header has the position of the packed kernel (Linux, Documentation/arch/x86/boot.rst,
//! `payload_offset`). Linux's build packs the kernel with one of several programs, and appends four
//! bytes with the unpacked size.

use super::modules::unpack;
use anyhow::{Context, Result, bail, ensure};

/// Offsets in the setup header.
const SETUP_SECTS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// Length of the unpacked size after the packed kernel, in bytes.
const SIZE: usize = 4;
/// Size in bytes that no kernel reaches.
const LARGEST: usize = 1 << 30;

/// Returns the ELF file in a kernel's image.
pub(crate) fn of(image: &[u8]) -> Result<Vec<u8>> {
    let number = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the kernel's image has no setup header")?;
        Ok(usize::try_from(u32::from_le_bytes(bytes.try_into()?))?)
    };
    let sectors = match image.get(SETUP_SECTS).context("the kernel's image has no setup header")? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let from = (sectors + 1) * 512 + number(PAYLOAD_OFFSET)?;
    let packed =
        image.get(from..from + number(PAYLOAD_LENGTH)?).context("the kernel's image is cut short")?;
    let packed = packed.split_last_chunk::<SIZE>().context("the kernel's image has no content")?.0;
    let elf = match packed {
        [0x02, 0x21, 0x4c, 0x18, blocks @ ..] => lz4(blocks)?,
        [0xfd, b'7', b'z', ..] => unpack("xz", packed)?,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => unpack("zstd", packed)?,
        [0x1f, 0x8b, ..] => unpack("gzip", &[packed, &image[from + packed.len()..][..SIZE]].concat())?,
        _ => bail!("the kernel is packed in an unknown format"),
    };
    ensure!(elf.starts_with(b"\x7fELF"), "the content of the kernel's image is not an ELF file");
    Ok(elf)
}

/// Unpacks the blocks of LZ4's legacy frame, each of which follows its length (lz4,
/// doc/lz4_Frame_format.md, "Legacy frame").
fn lz4(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let (block, behind) =
            behind.split_at_checked(u32::from_le_bytes(*length) as usize).context("a block is cut short")?;
        lz4_block(block, &mut out)?;
        rest = behind;
    }
    Ok(out)
}

/// Unpacks a block of literals and copies of earlier bytes (lz4, doc/lz4_Block_format.md). Copies
/// refer only to the same block.
fn lz4_block(block: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let start = out.len();
    let mut bytes = block.iter().copied();
    while let Some(token) = bytes.next() {
        let literals = length(usize::from(token >> 4), &mut bytes)?;
        let before = out.len();
        out.extend(bytes.by_ref().take(literals));
        ensure!(out.len() == before + literals, "literals are cut short");
        // The last sequence has literals only.
        let Some(low) = bytes.next() else { return Ok(()) };
        let distance =
            usize::from(u16::from_le_bytes([low, bytes.next().context("a distance is cut short")?]));
        let copied = length(usize::from(token & 15), &mut bytes)? + 4;
        ensure!(distance > 0 && distance <= out.len() - start, "a copy reaches before its block");
        ensure!(out.len() + copied <= LARGEST, "the unpacked data is larger than any kernel");
        // Byte by byte, because a copy may overlap its own output.
        for at in out.len() - distance..out.len() - distance + copied {
            out.push(out[at]);
        }
    }
    Ok(())
}

/// Returns a length: four bits, plus bytes up to the first one that is not 255.
fn length(first: usize, bytes: &mut impl Iterator<Item = u8>) -> Result<usize> {
    let mut length = first;
    if first == 15 {
        loop {
            let more = bytes.next().context("a length is cut short")?;
            length += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a bzImage that contains `packed`.
    fn image(packed: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 0x400];
        image[SETUP_SECTS] = 1;
        image[PAYLOAD_OFFSET] = 16;
        let length = u32::try_from(packed.len() + SIZE).unwrap();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        [&image[..], &[0; 16], packed, &[0; SIZE]].concat()
    }

    /// Block that unpacks to "\x7fELF", eight copies of it, and "end".
    const BLOCK: [u8; 13] = [0x4f, 0x7f, b'E', b'L', b'F', 4, 0, 13, 0x30, b'e', b'n', b'd', 0];

    #[test]
    fn literals_and_copies_are_unpacked() {
        let block = &BLOCK[..12];
        let packed = [&[0x02, 0x21, 0x4c, 0x18][..], &12_u32.to_le_bytes(), block].concat();
        let elf = of(&image(&packed)).unwrap();
        assert_eq!(elf, [b"\x7fELF".repeat(9), b"end".to_vec()].concat());
    }

    #[test]
    fn damaged_image_is_an_error() {
        for (block, why) in [
            (&BLOCK[..3], "literals are cut short"),
            (&BLOCK[..6], "a distance"),
            (&BLOCK[..7], "a length"),
            (&[0x10, 1, 2, 0][..], "before its block"),
        ] {
            let error = lz4_block(block, &mut Vec::new()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(of(&image(b"what is this")).unwrap_err().to_string().contains("unknown format"));
        assert!(of(&[0; 100]).is_err());
        let packed = [0x02, 0x21, 0x4c, 0x18, 200, 0, 0, 0, 1];
        assert!(of(&image(&packed)).unwrap_err().to_string().contains("cut short"));
    }
}
