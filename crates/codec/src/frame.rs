//! Frames: up to 32 pages that are compressed together.
//!
//! A frame has no header of vmferry. The frame of the wire that contains it names the [`Format`],
//! the number of pages and the length in bytes.
//!
//! | format | bytes |
//! |---|---|
//! | [`Format::Lz4`] | one block of the LZ4 block format, without the size of its content |
//! | [`Format::Zstd`] | one frame of RFC 8878, with the restrictions below |
//!
//! A zstd frame starts with the only header that is allowed for its number of pages:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `28 b5 2f fd` |
//! | 4 | 1 | `0x60` for 1 to 16 pages, `0xa0` for 17 and more: a single segment, no checksum, no dictionary |
//! | 5 | 2 or 4 | size of the content in bytes: minus 256 as u16 after `0x60`, as u32 after `0xa0` |
//!
//! A single segment has no window beyond its content, so a frame cannot require more memory than
//! its pages. The blocks follow, and the last block ends the frame. Skippable frames, further
//! frames and trailing bytes are refused.
//!
//! Frames of both formats must be shorter than their pages.

use crate::{BATCH_BYTES, BATCH_PAGES, Page};
use lz4::block::{compress_to_buffer, decompress_to_buffer};
use std::fmt;
use vmferry_core::PAGE_BYTES;
use zstd_safe::zstd_sys::ZSTD_ErrorCode;
use zstd_safe::{CCtx, CParameter, DCtx, ResetDirective};

/// Format of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// A block of LZ4.
    Lz4,
    /// A frame of zstd.
    Zstd,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Lz4 => "LZ4",
            Format::Zstd => "zstd",
        })
    }
}

/// Level of zstd, from 1 (fast) to 19 (small).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(u8);

impl Level {
    /// Fastest level.
    pub const MIN: Self = Self(1);
    /// Level with the smallest frames.
    pub const MAX: Self = Self(19);

    /// Returns the level `level`, or `None` if zstd does not have it.
    #[must_use]
    pub const fn new(level: u8) -> Option<Self> {
        if level >= Self::MIN.0 && level <= Self::MAX.0 { Some(Self(level)) } else { None }
    }

    /// Returns the level as a number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// Compression of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// LZ4.
    Lz4,
    /// zstd with a level.
    Zstd(Level),
}

impl Codec {
    /// Returns the format of the codec's frames.
    #[must_use]
    pub const fn format(self) -> Format {
        match self {
            Codec::Lz4 => Format::Lz4,
            Codec::Zstd(_) => Format::Zstd,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Lz4 => f.write_str("lz4"),
            Codec::Zstd(Level(level)) => write!(f, "zstd:{level}"),
        }
    }
}

/// Encoder of frames, with its contexts and its buffer.
///
/// An encoder is created once for each sender thread. LZ4 has its table on the stack. zstd
/// allocates its tables when a level needs larger ones, and again if the frames needed less than a
/// third of them for 128 frames in a row. No other frame allocates, except that LZ4 creates an
/// error of some bytes when it gives up.
pub struct Encoder {
    zstd: CCtx<'static>,
    /// Level to which `zstd` is set.
    level: Option<Level>,
    out: Box<[u8]>,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("level", &self.level).finish_non_exhaustive()
    }
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Encoder {
    /// Creates an encoder.
    #[must_use]
    pub fn new() -> Self {
        let mut zstd = CCtx::create();
        for parameter in [
            CParameter::ContentSizeFlag(true),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ] {
            zstd.set_parameter(parameter).expect("every zstd has the flags of a frame");
        }
        Self { zstd, level: None, out: vec![0; BATCH_BYTES].into_boxed_slice() }
    }

    /// Returns the frame of `pages`, or `None` if the frame would have more than `limit` bytes.
    ///
    /// The frame is always shorter than the pages, so `None` also means that the pages do not
    /// compress. LZ4 gives up at the first sequence that does not fit, and zstd at the first of its
    /// blocks (at most 128 KiB). Both skip through random bytes with growing steps, which takes a
    /// fraction of the usual time. `None` is returned as well if zstd cannot allocate memory. The
    /// caller then sends the pages as they are.
    ///
    /// # Panics
    /// Panics if `pages` is empty or has more than [`BATCH_PAGES`] pages.
    pub fn encode(&mut self, codec: Codec, pages: &[Page], limit: usize) -> Option<&[u8]> {
        assert!((1..=BATCH_PAGES).contains(&pages.len()), "{} pages in a frame", pages.len());
        let bytes = pages.as_flattened();
        let limit = limit.min(bytes.len() - 1);
        let len = match codec {
            Codec::Lz4 => compress_to_buffer(bytes, None, false, &mut self.out[..limit]).ok()?,
            Codec::Zstd(level) => self.zstd(level, bytes, limit)?,
        };
        Some(&self.out[..len])
    }

    fn zstd(&mut self, level: Level, bytes: &[u8], limit: usize) -> Option<usize> {
        if self.level != Some(level) {
            self.zstd
                .set_parameter(CParameter::CompressionLevel(level.0.into()))
                .expect("no frame is in progress, and the level is in range");
            self.level = Some(level);
        }
        match self.zstd.compress2(&mut self.out[..limit], bytes) {
            Ok(len) => Some(len),
            Err(code) => {
                let expected = [
                    ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall,
                    ZSTD_ErrorCode::ZSTD_error_memory_allocation,
                ];
                debug_assert!(
                    expected.into_iter().any(|kind| zstd_safe::is_error_kind(code, kind)),
                    "{}",
                    zstd_safe::get_error_name(code)
                );
                // The frame is still in progress. The level can change only after its end.
                self.zstd.reset(ResetDirective::SessionOnly).expect("a session can always be reset");
                None
            }
        }
    }

    /// Returns the number of bytes of memory that the encoder holds.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.out.len() + self.zstd.sizeof()
    }
}

/// Error of a frame that a decoder refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The number of pages of a frame is not allowed.
    #[error("a frame of {pages} compressed pages was announced, allowed are 1 to {BATCH_PAGES}")]
    Pages {
        /// Number of pages.
        pages: usize,
    },
    /// A frame is not shorter than its pages.
    #[error("the {format} frame of {pages} pages has {len} bytes, which is not less than the pages have")]
    TooLong {
        /// Format of the frame.
        format: Format,
        /// Number of pages.
        pages: usize,
        /// Length of the frame in bytes.
        len: usize,
    },
    /// A zstd frame has another header than the one that its number of pages requires: another
    /// size of the content, a window, a dictionary, a checksum, or another kind of frame.
    #[error("the zstd frame of {pages} pages does not start with the only header that is allowed for it")]
    Header {
        /// Number of pages.
        pages: usize,
    },
    /// A zstd frame ends before the bytes that were announced for it.
    #[error("the zstd frame of {pages} pages ends after {end} of {len} bytes")]
    Trailing {
        /// Number of pages.
        pages: usize,
        /// Number of bytes up to the end of the frame.
        end: usize,
        /// Number of bytes that were announced.
        len: usize,
    },
    /// A frame has less content than its pages.
    #[error("the {format} frame of {pages} pages has a content of {content} bytes")]
    Short {
        /// Format of the frame.
        format: Format,
        /// Number of pages.
        pages: usize,
        /// Number of bytes of the content.
        content: usize,
    },
    /// The compressed bytes of a frame are damaged, or their content is larger than the pages.
    #[error("the {format} frame of {pages} pages cannot be decoded: {reason}")]
    Damaged {
        /// Format of the frame.
        format: Format,
        /// Number of pages.
        pages: usize,
        /// Message of the library that decodes the format.
        reason: String,
    },
}

/// Decoder of frames, with its context.
///
/// A decoder is created once for each receiver thread, and does not allocate afterwards, except for
/// the message of an error.
pub struct Decoder {
    zstd: DCtx<'static>,
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// Creates a decoder.
    #[must_use]
    pub fn new() -> Self {
        Self { zstd: DCtx::create() }
    }

    /// Decodes `frame` into all pages of `out`.
    ///
    /// The content of `out` is unspecified after an error. The decoder writes nothing beyond `out`
    /// in any case.
    ///
    /// # Errors
    /// Returns an error if the frame is not a complete frame of exactly these pages, and nothing
    /// else. A frame that was changed can also be decoded without an error: the digests of the
    /// pages detect the change.
    pub fn decode(&mut self, format: Format, frame: &[u8], out: &mut [Page]) -> Result<(), DecodeError> {
        let pages = out.len();
        if !(1..=BATCH_PAGES).contains(&pages) {
            return Err(DecodeError::Pages { pages });
        }
        let out = out.as_flattened_mut();
        if frame.len() >= out.len() {
            return Err(DecodeError::TooLong { format, pages, len: frame.len() });
        }
        let damaged = |reason: String| DecodeError::Damaged { format, pages, reason };
        let content = match format {
            Format::Lz4 => {
                let len = i32::try_from(out.len()).expect("at most BATCH_BYTES");
                decompress_to_buffer(frame, Some(len), out).map_err(|error| damaged(error.to_string()))?
            }
            Format::Zstd => {
                let zstd_error = |code: usize| damaged(zstd_safe::get_error_name(code).to_owned());
                if !frame.starts_with(ZstdHeader::of(pages).bytes()) {
                    return Err(DecodeError::Header { pages });
                }
                let end = zstd_safe::find_frame_compressed_size(frame).map_err(zstd_error)?;
                if end != frame.len() {
                    return Err(DecodeError::Trailing { pages, end, len: frame.len() });
                }
                self.zstd.decompress(out, frame).map_err(zstd_error)?
            }
        };
        if content != out.len() {
            return Err(DecodeError::Short { format, pages, content });
        }
        Ok(())
    }

    /// Returns the number of bytes of memory that the decoder holds.
    #[must_use]
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.zstd.sizeof()
    }
}

/// Header of a zstd frame.
struct ZstdHeader {
    bytes: [u8; 9],
    len: usize,
}

impl ZstdHeader {
    /// Returns the header that a frame of `pages` pages (at most [`BATCH_PAGES`]) must have.
    fn of(pages: usize) -> Self {
        let content = u32::try_from(pages * PAGE_BYTES).expect("at most BATCH_BYTES");
        let mut bytes = [0x28, 0xb5, 0x2f, 0xfd, 0x60, 0, 0, 0, 0];
        match u16::try_from(content - 256) {
            Ok(size) => bytes[5..7].copy_from_slice(&size.to_le_bytes()),
            Err(_) => {
                bytes[4] = 0xa0;
                bytes[5..9].copy_from_slice(&content.to_le_bytes());
            }
        }
        let len = if bytes[4] == 0x60 { 7 } else { 9 };
        Self { bytes, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
