//! Codecs for pages of guest memory, so that a migration sends fewer bytes.
//!
//! | type | use |
//! |---|---|
//! | [`Encoder`], [`Decoder`] | frames of up to [`BATCH_PAGES`] pages, compressed together by LZ4 or zstd |
//! | [`DeltaEncoder`], [`Delta`] | the difference of a page from the version that was sent before |
//! | [`SentPages`] | a bounded cache of versions that were sent |
//! | [`Class`] | a cheap estimate of how well a page compresses |
//! | [`Chooser`] | a controller that chooses the codec of the next batch from measured facts |
//!
//! The crate performs no I/O, starts no threads and reads no clock. All inputs are copies: a
//! `&[u8]` over live guest memory would be undefined behaviour, and a page that changes while it is
//! encoded would have no defined content.
//!
//! A sender thread owns an [`Encoder`], a [`Chooser`] and a [`SentPages`]. They allocate when they
//! are created or grow to their bound, and not for each page or frame.
//!
//! # Untrusted input
//!
//! [`Decoder::decode`] and [`Delta::parse`] accept any bytes. They return an error or succeed, use
//! bounded memory, and never write beyond the output. They do not detect a wrong content: the
//! frames carry no checksum of their own, because a migration sends the digest of each page. The
//! target must compare the digests before it uses the pages.
//!
//! # Example
//!
//! ```
//! use vmferry_codec::{BATCH_BYTES, Codec, Decoder, Encoder, Page};
//!
//! let pages: Vec<Page> = (0..32).map(|number| [number; 4096]).collect();
//! let mut encoder = Encoder::new();
//! let frame = encoder.encode(Codec::Lz4, &pages, BATCH_BYTES).expect("these pages compress");
//! assert!(frame.len() < 2048);
//!
//! let mut back = vec![[0; 4096]; 32];
//! Decoder::new().decode(Codec::Lz4.format(), frame, &mut back)?;
//! assert_eq!(back, pages);
//! # Ok::<(), vmferry_codec::DecodeError>(())
//! ```
// Unsafe code is allowed in delta/x86.rs only.
#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]

mod choose;
mod class;
mod delta;
mod frame;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod sent;

pub use choose::{Choice, Chooser, Facts};
pub use class::Class;
pub use delta::{Comparer, Delta, DeltaEncoder, DeltaError, MAX_DELTA};
pub use frame::{Codec, DecodeError, Decoder, Encoder, Format, Level};
pub use sent::{SentFigures, SentPages};

use vmferry_core::PAGE_BYTES;

/// Bytes of a page.
pub type Page = [u8; PAGE_BYTES];

/// Maximum number of pages in a frame. Larger frames compress little better, and their pages would
/// leave the L2 cache before they are compared with their digests.
pub const BATCH_PAGES: usize = 32;

/// Number of bytes of [`BATCH_PAGES`] pages.
pub const BATCH_BYTES: usize = BATCH_PAGES * PAGE_BYTES;
