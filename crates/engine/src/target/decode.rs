//! Frames with encoded content.

use super::frames::FrameSource;
use super::receiver::ReceiveError;
use super::urgent::TABLE;
use crate::channel::IoBuf;
use crate::known::PageHash;
use vmferry_codec::{Decoder, Delta, Format, Page};
use vmferry_core::PAGE_BYTES;
use vmferry_wire::{Encoding, MAX_CONTENT_BYTES, MAX_FRAME_PAGES, Segment, Table, WireError};

/// Decoder for the frames of a channel. Its memory is allocated at the first frame with encoded
/// content. The size does not depend on the peer: 2 MiB, and the context of the codecs.
#[derive(Debug, Default)]
pub(super) struct SegmentDecoder(Option<Box<Buffers>>);

#[derive(Debug)]
struct Buffers {
    decoder: Decoder,
    /// Content of a frame as it was received.
    content: Vec<u8>,
    /// Decoded pages of a segment.
    pages: Vec<Page>,
}

/// Pages of a frame, by their positions among the pages with content.
pub(super) trait FramePages {
    /// Copies the content that the page had before the frame to `to`. Returns an error if the frame
    /// must not refer to this content.
    fn before(&self, position: usize, to: &mut Page) -> Result<(), WireError>;

    /// Finds pages by their positions and hashes, and copies them to `to`. Returns for each page
    /// whether the target knows it, or an error if the frame must not contain hashes.
    fn find(&mut self, wanted: &[(usize, PageHash)], to: &mut [Page]) -> Result<Vec<bool>, WireError>;

    /// Takes the new content of the page.
    fn put(&mut self, position: usize, content: &Page) -> Result<(), ReceiveError>;

    /// Takes the new content of a page that [`find`](Self::find) has found. Its hash is equal to
    /// the one from the source, so its digest need not be compared.
    fn put_found(&mut self, position: usize, content: &Page) -> Result<(), ReceiveError> {
        self.put(position, content)
    }
}

impl SegmentDecoder {
    /// Receives the content of a frame from `source`, and puts each of its pages into `pages`.
    ///
    /// If this fails, some pages may have been put already.
    pub(super) fn receive(
        &mut self,
        table: &Table<'_>,
        source: &impl FrameSource,
        pages: &mut impl FramePages,
    ) -> Result<(), ReceiveError> {
        let Buffers { decoder, content, pages: decoded } = &mut **self.0.get_or_insert_default();
        let content = content.get_mut(..table.content_bytes()).ok_or(TABLE)?;
        source.fill(&mut [IoBuf::from_bytes_mut(content)])?;
        let mut rest = &*content;
        for (number, segment) in table.segments().enumerate() {
            let (own, after) = rest.split_at_checked(segment.bytes).ok_or(TABLE)?;
            rest = after;
            let decoded = decoded.get_mut(..segment.pages).ok_or(TABLE)?;
            if segment.encoding == Encoding::Hash {
                find(own, decoded, (table.pages_of(number), pages))?;
                continue;
            }
            decode(decoder, segment, own, decoded, (table.pages_of(number), pages))?;
            for (content, position) in decoded.iter().zip(table.pages_of(number)) {
                pages.put(position, content)?;
            }
        }
        assert!(rest.is_empty(), "the content is as long as all of its segments");
        Ok(())
    }
}

impl Default for Buffers {
    fn default() -> Self {
        Self {
            decoder: Decoder::new(),
            content: vec![0; MAX_CONTENT_BYTES],
            pages: vec![[0; PAGE_BYTES]; MAX_FRAME_PAGES],
        }
    }
}

/// Finds the pages whose hashes are in `bytes`, and puts the known ones. The pages have the positions
/// `positions` in `pages`.
fn find(
    bytes: &[u8],
    found: &mut [Page],
    (positions, pages): (impl Iterator<Item = usize>, &mut impl FramePages),
) -> Result<(), ReceiveError> {
    // The table has been checked, so each page has a hash.
    let wanted: Vec<_> = positions.zip(bytes.as_chunks().0.iter().map(|hash| PageHash(*hash))).collect();
    let known = pages.find(&wanted, found)?;
    let known = known.into_iter().zip(&wanted).zip(found).filter(|((is_known, _), _)| *is_known);
    known.into_iter().try_for_each(|((_, (position, _)), page)| pages.put_found(*position, page))
}

/// Decodes `bytes`, the content of `segment`, to `decoded`. The pages of the segment have the
/// positions `positions` in `pages`.
fn decode(
    decoder: &mut Decoder,
    segment: Segment,
    mut bytes: &[u8],
    decoded: &mut [Page],
    (positions, pages): (impl Iterator<Item = usize>, &impl FramePages),
) -> Result<(), ReceiveError> {
    match segment.encoding {
        // The table has been checked, so both have the same length.
        Encoding::Raw => decoded.as_flattened_mut().copy_from_slice(bytes),
        Encoding::Lz4 => decoder.decode(Format::Lz4, bytes, decoded)?,
        Encoding::Zstd => decoder.decode(Format::Zstd, bytes, decoded)?,
        // The caller finds these pages.
        Encoding::Hash => {}
        Encoding::Delta => {
            for (page, position) in decoded.iter_mut().zip(positions) {
                let (delta, rest) = Delta::parse(bytes)?;
                bytes = rest;
                pages.before(position, page)?;
                delta.apply(page);
            }
            if !bytes.is_empty() {
                return Err(WireError::Damaged { what: "end of a segment of deltas" }.into());
            }
        }
    }
    Ok(())
}
