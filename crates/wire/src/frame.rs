//! Frames with pages, which bulk and urgent channels carry: runs of pages, their digests, and their
//! content.

use crate::{Fields, WireError, crc};
use vmferry_core::{PAGE_BYTES, PageDigest, PageIndex, PageRun, RegionId};

/// Length of the header of a frame in bytes.
pub const FRAME_HEADER_BYTES: usize = 64;
/// Maximum number of runs in a frame.
pub const MAX_FRAME_RUNS: usize = 256;
/// Maximum number of pages with content in a frame. Their content has 1 MiB, which fits into a
/// second-level cache between the computation of the digests and the copy.
pub const MAX_FRAME_PAGES: usize = 256;
/// Maximum number of segments in a frame with encoded content.
pub const MAX_SEGMENTS: usize = 32;
/// Maximum length of the table of a frame in bytes. Each run, each digest and each segment takes
/// eight bytes, and the segment of a page takes one.
pub const MAX_TABLE_BYTES: usize = 8 * (MAX_FRAME_RUNS + MAX_FRAME_PAGES + MAX_SEGMENTS) + MAX_FRAME_PAGES;
/// Maximum length of the content of a frame in bytes. Encoded content is never longer than the
/// pages.
pub const MAX_CONTENT_BYTES: usize = MAX_FRAME_PAGES * PAGE_BYTES;

/// Length of the hash of a page in bytes.
pub const HASH_BYTES: usize = 32;

const MAGIC: u32 = u32::from_le_bytes(*b"VMFb");
const KIND_BITS: u32 = 2;
const MAX_RUN: u32 = u32::MAX >> KIND_BITS;

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Pages. Runs of zero pages are encoded as a count only, and other pages with digest and
    /// content.
    Pages,
    /// Digests for a verification. Runs of zero pages are encoded as a count only, and other pages
    /// with digest but without content.
    Digests,
    /// End of a pass: all frames of the pass have been sent on this channel. The frame has no
    /// pages.
    Barrier,
    /// Probe that the target answers at once with [`Request::Echo`](crate::Request::Echo). The
    /// frame has no pages, and its `base` is the number of the probe.
    Probe,
    /// Announcement of touched pages that the source is likely to send in the first pass. The frame
    /// has runs of kind [`Zero`](RunKind::Zero) only, which say nothing about the content. The
    /// target may allocate memory for the pages, and may ignore the frame. The source sends such a
    /// frame only if the reply to the channel's hello has the feature
    /// [`FEATURE_TOUCHED`](crate::FEATURE_TOUCHED).
    Touched,
}

/// Form of the content of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Unencoded content, 4096 bytes for each page, in the order of the table.
    Raw,
    /// Encoded content in this many segments, 1 to [`MAX_SEGMENTS`]. The table assigns each page
    /// with content to a segment. Only frames of kind [`Pages`](FrameKind::Pages) have segments,
    /// and only if the target has offered [`FEATURE_SEGMENTS`](crate::FEATURE_SEGMENTS).
    Segments(usize),
}

impl Content {
    /// Returns the number of segments, 0 for unencoded content.
    fn segments(self) -> usize {
        match self {
            Self::Raw => 0,
            Self::Segments(count) => count,
        }
    }
}

/// Encoding of the pages of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Unencoded content, 4096 bytes for each page.
    Raw,
    /// One LZ4 block of all pages.
    Lz4,
    /// One Zstandard frame of all pages.
    Zstd,
    /// For each page, its difference from the content that the same channel has sent before.
    Delta,
    /// For each page, its BLAKE3 hash of [`HASH_BYTES`] bytes. The target takes the content from
    /// its known pages, and answers with [`ToSource::UnknownPages`](crate::ToSource::UnknownPages).
    /// Allowed only if the target has offered
    /// [`FEATURE_KNOWN_PAGES`](crate::FEATURE_KNOWN_PAGES).
    Hash,
}

impl Encoding {
    const ALL: [Self; 5] = [Self::Raw, Self::Lz4, Self::Zstd, Self::Delta, Self::Hash];

    fn code(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
            Self::Zstd => 2,
            Self::Delta => 3,
            Self::Hash => 4,
        }
    }
}

/// Segment of the content of a frame: pages that are encoded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Encoding of the pages.
    pub encoding: Encoding,
    /// Number of pages, at least 1.
    pub pages: usize,
    /// Length of the encoded pages in bytes. It is `4096 * pages` with [`Encoding::Raw`],
    /// `32 * pages` with [`Encoding::Hash`], and between 1 and `4096 * pages - 1` otherwise.
    pub bytes: usize,
}

impl Segment {
    const BYTES: usize = 8;

    fn is_valid(&self) -> bool {
        let raw = self.pages * PAGE_BYTES;
        self.pages > 0
            && match self.encoding {
                Encoding::Raw => self.bytes == raw,
                Encoding::Lz4 | Encoding::Zstd | Encoding::Delta => self.bytes > 0 && self.bytes < raw,
                Encoding::Hash => self.bytes == self.pages * HASH_BYTES,
            }
    }

    fn encode(&self) -> [u8; Self::BYTES] {
        let pages = u16::try_from(self.pages).expect("at most MAX_FRAME_PAGES").to_le_bytes();
        let bytes = u32::try_from(self.bytes).expect("at most MAX_CONTENT_BYTES").to_le_bytes();
        let [p0, p1] = pages;
        let [b0, b1, b2, b3] = bytes;
        [self.encoding.code(), 0, p0, p1, b0, b1, b2, b3]
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let (code, _, pages, bytes) = (fields.u8(), fields.u8(), fields.u16(), fields.u32());
        let encoding = Encoding::ALL.into_iter().find(|encoding| encoding.code() == code);
        let encoding =
            encoding.ok_or(WireError::Field { what: "encoding", value: code.into(), allowed: "0 to 4" })?;
        let segment =
            Self { encoding, pages: pages.into(), bytes: usize::try_from(bytes).unwrap_or(usize::MAX) };
        segment.is_valid().then_some(segment).ok_or(WireError::Field {
            what: "bytes of a segment",
            value: bytes.into(),
            allowed: "at least 1, at most those of its pages, and 32 for each hash",
        })
    }
}

/// Fixed header of a frame.
///
/// `runs` is at most [`MAX_FRAME_RUNS`], and `pages` is at most [`MAX_FRAME_PAGES`]. Both are 0 in
/// a barrier and in a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Kind of the frame.
    pub kind: FrameKind,
    /// Form of the content of the pages.
    pub content: Content,
    /// Region of all pages of the frame.
    pub region: RegionId,
    /// Number of the pass to which the frame belongs.
    pub pass: u32,
    /// Number of frames that were sent on this channel before this one.
    pub sequence: u64,
    /// Page to which the offsets of the runs are relative. In a probe, the number of the probe.
    pub base: PageIndex,
    /// Number of runs in the table.
    pub runs: usize,
    /// Number of pages with a digest in all runs together.
    pub pages: usize,
    /// Checksum of the table.
    pub table_sum: u64,
}

impl FrameHeader {
    /// Returns the header of a barrier, which ends pass `pass` on its channel. `sequence` is the
    /// number of frames sent before it.
    #[must_use]
    pub fn barrier(pass: u32, sequence: u64) -> Self {
        Self {
            kind: FrameKind::Barrier,
            content: Content::Raw,
            region: RegionId(0),
            pass,
            sequence,
            base: PageIndex(0),
            runs: 0,
            pages: 0,
            table_sum: crc(&[]),
        }
    }

    /// Returns the header of the probe `number`. `sequence` is the number of frames sent before it.
    #[must_use]
    pub fn probe(number: u64, sequence: u64) -> Self {
        Self { kind: FrameKind::Probe, base: PageIndex(number), ..Self::barrier(0, sequence) }
    }

    /// Returns the length of the table that follows the header, in bytes.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        let segments = match self.content {
            Content::Raw => 0,
            Content::Segments(count) => Segment::BYTES * count + self.pages,
        };
        8 * (self.runs + self.pages) + segments
    }

    /// Encodes the header.
    ///
    /// # Panics
    /// Panics if `runs` does not fit into 16 bits, or `pages` or the number of segments not into 32
    /// bits. A header from [`TableWriter`] or [`decode`](Self::decode) never exceeds its limits.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&[
            match self.kind {
                FrameKind::Pages => 0,
                FrameKind::Digests => 1,
                FrameKind::Barrier => 2,
                FrameKind::Probe => 3,
                FrameKind::Touched => 4,
            },
            match self.content {
                Content::Raw => 0,
                Content::Segments(_) => 1,
            },
        ]);
        put(&u16::try_from(self.runs).expect("at most MAX_FRAME_RUNS").to_le_bytes());
        put(&u32::try_from(self.pages).expect("at most MAX_FRAME_PAGES").to_le_bytes());
        put(&self.region.0.to_le_bytes());
        put(&self.pass.to_le_bytes());
        put(&u32::try_from(self.content.segments()).expect("at most MAX_SEGMENTS").to_le_bytes());
        put(&self.sequence.to_le_bytes());
        put(&self.base.0.to_le_bytes());
        put(&self.table_sum.to_le_bytes());
        let sum = crc(&bytes[..FRAME_HEADER_BYTES - 8]);
        bytes[FRAME_HEADER_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a header and checks that it keeps every limit.
    ///
    /// # Errors
    /// Returns an error if the bytes are damaged, are not a header, or have a value that the
    /// protocol does not allow.
    pub fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let field = |what, value: u64, allowed| WireError::Field { what, value, allowed };
        let magic = fields.u32();
        if magic != MAGIC {
            return Err(field("frame's magic", magic.into(), "the protocol's"));
        }
        let (body, sum) = bytes.split_at(FRAME_HEADER_BYTES - 8);
        if sum != crc(body).to_le_bytes() {
            return Err(WireError::Damaged { what: "frame header" });
        }
        let kind = match fields.u8() {
            0 => FrameKind::Pages,
            1 => FrameKind::Digests,
            2 => FrameKind::Barrier,
            3 => FrameKind::Probe,
            4 => FrameKind::Touched,
            other => return Err(field("frame kind", other.into(), "0 to 4")),
        };
        let form = fields.u8();
        let (runs, pages) = (usize::from(fields.u16()), fields.u32());
        let region = RegionId(fields.u32());
        let (pass, segments) = (fields.u32(), fields.u32());
        let (sequence, base, table_sum) = (fields.u64(), PageIndex(fields.u64()), fields.u64());
        let empty = matches!(kind, FrameKind::Barrier | FrameKind::Probe);
        if runs > MAX_FRAME_RUNS || (runs == 0) != empty {
            return Err(field("runs in a frame", runs as u64, "1 to 256, and 0 in a barrier or probe"));
        }
        let most = if empty || kind == FrameKind::Touched { 0 } else { MAX_FRAME_PAGES };
        let pages = match usize::try_from(pages) {
            Ok(pages) if pages <= most => pages,
            _ => {
                let allowed = "0 to 256, and 0 in a barrier, probe or announcement";
                return Err(field("pages in a frame", pages.into(), allowed));
            }
        };
        let content = match (form, usize::try_from(segments)) {
            (0, _) => Content::Raw,
            (1, Ok(count)) if kind == FrameKind::Pages && (1..=MAX_SEGMENTS.min(pages)).contains(&count) => {
                Content::Segments(count)
            }
            (1, _) => {
                return Err(field("segments in a frame", segments.into(), "1 to 32, each with pages"));
            }
            (other, _) => return Err(field("form of the content of a frame", other.into(), "0 or 1")),
        };
        Ok(Self { kind, content, region, pass, sequence, base, runs, pages, table_sum })
    }
}

/// Kind of the pages of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// Pages of zeros, which are encoded only as their number.
    Zero,
    /// Pages that each have a digest, and in a frame of kind [`Pages`](FrameKind::Pages) also their
    /// content.
    Data,
}

/// One run of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunEntry {
    /// Kind of the pages.
    pub kind: RunKind,
    /// Pages in the region of the frame.
    pub run: PageRun,
}

/// Builder for the table of a frame. One builder can be reused for many frames, and allocates only
/// when it is created.
#[derive(Debug)]
pub struct TableWriter {
    base: PageIndex,
    runs: Vec<(RunKind, u32, u32)>,
    digests: Vec<PageDigest>,
    bytes: Vec<u8>,
}

impl Default for TableWriter {
    fn default() -> Self {
        Self {
            base: PageIndex(0),
            runs: Vec::with_capacity(MAX_FRAME_RUNS),
            digests: Vec::with_capacity(MAX_FRAME_PAGES),
            bytes: Vec::with_capacity(MAX_TABLE_BYTES),
        }
    }
}

impl TableWriter {
    /// Removes all pages, to start a new frame.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.digests.clear();
    }

    /// Returns true if no page has been added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the number of added pages that have a digest.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.digests.len()
    }

    /// Adds `page` with its digest. `None` means that the page contains only zeros. The page must
    /// lie behind all pages that were added before.
    ///
    /// Returns false, and adds nothing, if the page does not fit. In that case, the caller must
    /// send this frame and start another one.
    #[must_use]
    pub fn push(&mut self, page: PageIndex, digest: Option<PageDigest>) -> bool {
        self.push_run(PageRun::new(page, 1), digest)
    }

    /// Adds a run of zero pages, under the conditions of [`TableWriter::push`]. A run of 2^30 pages
    /// or more never fits.
    #[must_use]
    pub fn push_zeros(&mut self, run: PageRun) -> bool {
        self.push_run(run, None)
    }

    fn push_run(&mut self, run: PageRun, digest: Option<PageDigest>) -> bool {
        if self.runs.is_empty() {
            self.base = run.first;
        }
        let kind = if digest.is_some() { RunKind::Data } else { RunKind::Zero };
        let offset = run.first.0.checked_sub(self.base.0).and_then(|offset| u32::try_from(offset).ok());
        let (Some(offset), Ok(count)) = (offset, u32::try_from(run.count)) else { return false };
        if digest.is_some() && self.digests.len() == MAX_FRAME_PAGES {
            return false;
        }
        let full = self.runs.len() == MAX_FRAME_RUNS || count > MAX_RUN;
        match self.runs.last_mut() {
            Some((last, start, len))
                if *last == kind
                    && u64::from(*start) + u64::from(*len) == u64::from(offset)
                    && *len <= MAX_RUN - count.min(MAX_RUN) =>
            {
                *len += count;
            }
            _ if full => return false,
            _ => self.runs.push((kind, offset, count)),
        }
        self.digests.extend(digest);
        true
    }

    /// Returns the header and the table of the added pages.
    pub fn finish(
        &mut self,
        kind: FrameKind,
        region: RegionId,
        pass: u32,
        sequence: u64,
    ) -> (FrameHeader, &[u8]) {
        self.list_pages();
        (self.header((kind, Content::Raw), region, pass, sequence), &self.bytes)
    }

    /// Returns the header and the table of the added pages, as a frame of kind
    /// [`Pages`](FrameKind::Pages) with encoded content. `owners` has the number of the segment of
    /// each page with a digest.
    ///
    /// # Panics
    /// Panics if there are no segments or more than [`MAX_SEGMENTS`], if a segment has an invalid
    /// length, or if `owners` does not agree with the segments and with the added pages.
    pub fn finish_segments(
        &mut self,
        (segments, owners): (&[Segment], &[u8]),
        region: RegionId,
        pass: u32,
        sequence: u64,
    ) -> (FrameHeader, &[u8]) {
        assert!((1..=MAX_SEGMENTS).contains(&segments.len()), "{} segments", segments.len());
        assert_eq!(owners.len(), self.pages(), "each page has a segment");
        assert!(segments.iter().all(Segment::is_valid), "{segments:?}");
        assert!(owns(segments.iter().copied(), owners), "{segments:?}, {owners:?}");
        self.list_pages();
        segments.iter().for_each(|segment| self.bytes.extend(segment.encode()));
        self.bytes.extend(owners);
        let content = Content::Segments(segments.len());
        (self.header((FrameKind::Pages, content), region, pass, sequence), &self.bytes)
    }

    /// Starts the table with the runs and digests of the added pages.
    fn list_pages(&mut self) {
        self.bytes.clear();
        for (kind, offset, count) in &self.runs {
            let kind = match kind {
                RunKind::Zero => 0,
                RunKind::Data => 1,
            };
            self.bytes.extend(offset.to_le_bytes());
            self.bytes.extend((count << KIND_BITS | kind).to_le_bytes());
        }
        self.digests.iter().for_each(|digest| self.bytes.extend(digest.0.to_le_bytes()));
    }

    fn header(
        &self,
        (kind, content): (FrameKind, Content),
        region: RegionId,
        pass: u32,
        sequence: u64,
    ) -> FrameHeader {
        FrameHeader {
            kind,
            content,
            region,
            pass,
            sequence,
            base: self.base,
            runs: self.runs.len(),
            pages: self.digests.len(),
            table_sum: crc(&self.bytes),
        }
    }

    /// Returns the added runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = RunEntry> {
        self.runs.iter().map(|(kind, offset, count)| RunEntry {
            kind: *kind,
            run: PageRun::new(PageIndex(self.base.0 + u64::from(*offset)), u64::from(*count)),
        })
    }
}

/// Decoded table of a received frame. It agrees with the header of the frame, and every run lies
/// within the region.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    base: u64,
    runs: &'a [u8],
    digests: &'a [u8],
    /// Encoded segments. Empty if the content is not encoded.
    segments: &'a [u8],
    /// Number of the segment of each page with a digest. Empty if the content is not encoded.
    owners: &'a [u8],
}

/// Returns true if each segment owns as many pages as it says, and no page has another owner.
fn owns(segments: impl Iterator<Item = Segment>, owners: &[u8]) -> bool {
    let mut counts = [0; MAX_SEGMENTS];
    let counted = owners.iter().all(|owner| {
        let count = counts.get_mut(usize::from(*owner));
        count.map(|count| *count += 1).is_some()
    });
    let mut left = counts.into_iter();
    counted
        && segments.map(|segment| segment.pages).eq(left.by_ref().take_while(|count| *count > 0))
        && left.all(|count| count == 0)
}

impl<'a> Table<'a> {
    /// Decodes the table of the frame with the header `header`, for a region of `region_pages`
    /// pages.
    ///
    /// # Errors
    /// Returns an error if the table is damaged, if a run is empty, out of order or not within the
    /// region, if runs overlap, if the number of pages with a digest differs from the header, or if
    /// the segments are not valid or do not have exactly the pages with a digest.
    pub fn decode(header: &FrameHeader, bytes: &'a [u8], region_pages: u64) -> Result<Self, WireError> {
        if bytes.len() != header.table_bytes() || crc(bytes) != header.table_sum {
            return Err(WireError::Damaged { what: "frame table" });
        }
        let (runs, bytes) = bytes.split_at(8 * header.runs);
        let (digests, bytes) = bytes.split_at(8 * header.pages);
        let (segments, owners) = bytes.split_at(Segment::BYTES * header.content.segments());
        let table = Self { base: header.base.0, runs, digests, segments, owners };
        let (mut at, mut pages) = (0, 0);
        for RunEntry { kind, run } in table.entries()? {
            if run.count == 0 || run.first.0 < at || run.end() > region_pages {
                return Err(WireError::Field {
                    what: "run of pages that starts at",
                    value: run.first.0,
                    allowed: "in order, not empty, within the region",
                });
            }
            at = run.end();
            pages += if kind == RunKind::Data { run.count } else { 0 };
        }
        if pages != header.pages as u64 {
            return Err(WireError::Field {
                what: "pages in all runs",
                value: pages,
                allowed: "what the header says",
            });
        }
        table.check_segments(header)?;
        Ok(table)
    }

    fn check_segments(&self, header: &FrameHeader) -> Result<(), WireError> {
        for bytes in self.segments.chunks_exact(Segment::BYTES) {
            Segment::decode(bytes)?;
        }
        if header.content != Content::Raw && !owns(self.segments(), self.owners) {
            return Err(WireError::Field {
                what: "pages in all segments",
                value: self.segments().map(|segment| segment.pages as u64).sum(),
                allowed: "each page in one segment",
            });
        }
        Ok(())
    }

    /// Returns true if the content is encoded.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        !self.segments.is_empty()
    }

    /// Returns the segments of the content, in order. There are none if the content is not encoded.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + use<'a> {
        // Decoding the table has checked each segment.
        self.segments.chunks_exact(Segment::BYTES).filter_map(|bytes| Segment::decode(bytes).ok())
    }

    /// Returns the pages of the segment `segment`, as positions among the pages with a digest, in
    /// order.
    pub fn pages_of(&self, segment: usize) -> impl Iterator<Item = usize> + use<'a> {
        let owners = self.owners.iter().enumerate();
        owners.filter(move |(_, owner)| usize::from(**owner) == segment).map(|(page, _)| page)
    }

    /// Returns the digest of the page at `position` among the pages with a digest.
    #[must_use]
    pub fn digest(&self, position: usize) -> Option<PageDigest> {
        self.digests.chunks_exact(8).nth(position).map(|bytes| PageDigest(Fields(bytes).u64()))
    }

    /// Returns the length of the content that follows the table of a frame of pages, in bytes.
    #[must_use]
    pub fn content_bytes(&self) -> usize {
        match self.segments {
            [] => self.digests.len() / 8 * PAGE_BYTES,
            _ => self.segments().map(|segment| segment.bytes).sum(),
        }
    }

    fn entries(&self) -> Result<impl DoubleEndedIterator<Item = RunEntry> + use<'a>, WireError> {
        let base = self.base;
        let entry = move |bytes: &[u8]| {
            let mut fields = Fields(bytes);
            let (offset, word) = (fields.u32(), fields.u32());
            let kind = match word & ((1 << KIND_BITS) - 1) {
                0 => RunKind::Zero,
                1 => RunKind::Data,
                other => {
                    return Err(WireError::Field {
                        what: "kind of run",
                        value: other.into(),
                        allowed: "0 or 1",
                    });
                }
            };
            let first = PageIndex(base.saturating_add(u64::from(offset)));
            Ok(RunEntry { kind, run: PageRun::new(first, u64::from(word >> KIND_BITS)) })
        };
        for bytes in self.runs.chunks_exact(8) {
            entry(bytes)?;
        }
        Ok(self.runs.chunks_exact(8).filter_map(move |bytes| entry(bytes).ok()))
    }

    /// Returns the runs, in order.
    pub fn runs(&self) -> impl DoubleEndedIterator<Item = RunEntry> + use<'a> {
        self.entries().into_iter().flatten()
    }

    /// Returns the digests of all pages of data runs, in order.
    pub fn digests(&self) -> impl DoubleEndedIterator<Item = PageDigest> + use<'a> {
        self.digests.chunks_exact(8).map(|bytes| PageDigest(Fields(bytes).u64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frame_decodes_to_the_pushed_pages(pages in prop::collection::btree_map(0u64..5000, prop::option::of(any::<u64>()), 1..200), start in 0u64..1 << 40) {
            let mut writer = TableWriter::default();
            for (page, digest) in &pages {
                prop_assert!(writer.push(PageIndex(start + page), digest.map(PageDigest)));
            }
            let (header, bytes) = writer.finish(FrameKind::Pages, RegionId(3), 7, 9);
            let header = FrameHeader::decode(&header.encode()).unwrap();
            let table = Table::decode(&header, bytes, start + 5000).unwrap();
            let mut digests = table.digests();
            let mut got = Vec::new();
            for entry in table.runs() {
                for page in entry.run.range() {
                    got.push((page - start, (entry.kind == RunKind::Data).then(|| digests.next().unwrap().0)));
                }
            }
            prop_assert_eq!(got, pages.into_iter().collect::<Vec<_>>());
            prop_assert!(Table::decode(&header, bytes, start).is_err(), "runs beyond the region are refused");
        }

        #[test]
        fn a_damaged_bit_is_found(at in 0usize..FRAME_HEADER_BYTES * 8, in_table in 0usize..32 * 8) {
            let mut writer = TableWriter::default();
            for page in [1, 2, 9] {
                prop_assert!(writer.push(PageIndex(page), Some(PageDigest(page))));
            }
            let (header, table) = writer.finish(FrameKind::Pages, RegionId(0), 0, 0);
            let mut bytes = header.encode();
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert!(FrameHeader::decode(&bytes).is_err());
            let mut table = table.to_vec();
            table[in_table / 8] ^= 1 << (in_table % 8);
            prop_assert!(Table::decode(&header, &table, 100).is_err());
        }

        #[test]
        fn any_table_with_a_right_sum_is_an_error_or_in_bounds(
            words in prop::collection::vec(any::<u64>(), 1..20), runs in 1usize..10, base: u64, region in 1u64..1 << 50,
        ) {
            let runs = runs.min(words.len());
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let header = FrameHeader {
                kind: FrameKind::Pages, content: Content::Raw, region: RegionId(0), pass: 0, sequence: 0,
                base: PageIndex(base), runs, pages: words.len() - runs, table_sum: crc(&bytes),
            };
            if let Ok(table) = Table::decode(&header, &bytes, region) {
                prop_assert!(table.runs().all(|e| e.run.end() <= region));
            }
        }
    }

    /// Returns a header and a table of `owners.len()` pages with `segments`.
    fn encoded(segments: &[Segment], owners: &[u8]) -> (FrameHeader, Vec<u8>) {
        let mut writer = TableWriter::default();
        for page in 0..owners.len() as u64 {
            assert!(writer.push(PageIndex(page * 2), Some(PageDigest(page))));
        }
        let (header, table) = writer.finish_segments((segments, owners), RegionId(1), 2, 3);
        (header, table.to_vec())
    }

    /// Replaces the last bytes of `table` and corrects the checksum.
    fn changed((header, mut table): (FrameHeader, Vec<u8>), end: &[u8]) -> Result<(), WireError> {
        let at = table.len() - end.len();
        table[at..].copy_from_slice(end);
        let header = FrameHeader { table_sum: crc(&table), ..header };
        let header = FrameHeader::decode(&header.encode())?;
        Table::decode(&header, &table, 1000).map(drop)
    }

    #[test]
    fn segments_decode_to_what_was_encoded() {
        let raw = Segment { encoding: Encoding::Raw, pages: 2, bytes: 8192 };
        let all = Encoding::ALL.map(|encoding| match encoding {
            Encoding::Raw => raw,
            Encoding::Hash => Segment { encoding, pages: 1, bytes: HASH_BYTES },
            encoding => Segment { encoding, pages: 1, bytes: 17 },
        });
        let owners = [3, 0, 4, 2, 0, 1];
        let (header, bytes) = encoded(&all, &owners);
        assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        assert_eq!(bytes.len(), header.table_bytes());
        let table = Table::decode(&header, &bytes, 1000).unwrap();
        assert_eq!(table.segments().collect::<Vec<_>>(), all);
        assert_eq!(table.pages_of(0).collect::<Vec<_>>(), [1, 4]);
        assert_eq!(table.pages_of(3).collect::<Vec<_>>(), [0]);
        assert_eq!(table.content_bytes(), 8192 + 3 * 17 + HASH_BYTES);
        assert_eq!(table.digests().count(), 6);
    }

    #[test]
    fn segments_that_do_not_fit_their_frame_are_refused() {
        let lz4 = |pages, bytes| Segment { encoding: Encoding::Lz4, pages, bytes };
        let good = || encoded(&[lz4(2, 100), lz4(1, 4095)], &[0, 0, 1]);
        assert_eq!(changed(good(), &[]), Ok(()));
        for owners in [[0, 1, 1], [0, 0, 0], [0, 0, 2], [0, 0, 255]] {
            assert!(changed(good(), &owners).is_err(), "{owners:?}");
        }
        let mut end = lz4(1, 4095).encode().to_vec();
        end.extend([0, 0, 1]);
        assert_eq!(changed(good(), &end), Ok(()));
        for (at, value) in [(0, 4), (0, 5), (2, 0), (2, 2), (6, 1)] {
            let mut end = end.clone();
            end[at] = value;
            assert!(changed(good(), &end).is_err(), "byte {at} = {value}");
        }
        let mut empty = end.clone();
        empty[4..8].fill(0);
        assert!(changed(good(), &empty).is_err(), "a segment of 0 bytes");
        let (header, _) = good();
        for content in [Content::Segments(0), Content::Segments(4), Content::Segments(1 << 20)] {
            let header = FrameHeader { content, ..header };
            assert!(FrameHeader::decode(&header.encode()).is_err(), "{content:?} of 3 pages");
        }
        for kind in [FrameKind::Digests, FrameKind::Touched] {
            let header = FrameHeader { kind, ..header };
            assert!(FrameHeader::decode(&header.encode()).is_err(), "{kind:?} have no content");
            let header = FrameHeader { pages: 0, ..header };
            assert!(FrameHeader::decode(&header.encode()).is_err(), "{kind:?} have no content");
        }
    }

    #[test]
    fn segment_of_hashes_has_one_hash_for_each_page() {
        let hashes = |pages| Segment { encoding: Encoding::Hash, pages, bytes: pages * HASH_BYTES };
        let frame = || encoded(&[hashes(3)], &[0, 0, 0]);
        let (header, bytes) = frame();
        let table = Table::decode(&header, &bytes, 10).unwrap();
        assert_eq!((table.segments().collect::<Vec<_>>(), table.content_bytes()), (vec![hashes(3)], 96));
        for wrong in [0, 64, 95, 97, 3 * PAGE_BYTES] {
            let mut end = Segment { bytes: wrong, ..hashes(3) }.encode().to_vec();
            end.extend([0, 0, 0]);
            assert!(changed(frame(), &end).is_err(), "3 hashes in {wrong} bytes");
        }
    }

    #[test]
    fn a_frame_takes_no_more_than_its_limits() {
        let mut writer = TableWriter::default();
        let fitted = (0..1000).take_while(|page| writer.push(PageIndex(*page), Some(PageDigest(0)))).count();
        assert_eq!((fitted, writer.pages()), (MAX_FRAME_PAGES, MAX_FRAME_PAGES));
        assert!(writer.push_zeros(PageRun::from(5000..9000)), "zero runs still fit");
        writer.clear();
        let fitted = (0..1000).take_while(|page| writer.push(PageIndex(page * 2), None)).count();
        assert_eq!(fitted, MAX_FRAME_RUNS);
        writer.clear();
        assert!(writer.push(PageIndex(0), None));
        assert!(!writer.push(PageIndex(1 << 33), None), "offsets have 32 bits");
        let (header, table) = writer.finish(FrameKind::Pages, RegionId(0), 0, 0);
        assert!(Table::decode(&header, table, 1).is_ok());
    }

    #[test]
    fn a_barrier_has_no_pages() {
        let barrier = FrameHeader::barrier(4, 11);
        assert_eq!(FrameHeader::decode(&barrier.encode()), Ok(barrier));
        assert!(FrameHeader::decode(&FrameHeader { runs: 1, ..barrier }.encode()).is_err());
        assert!(FrameHeader::decode(&FrameHeader { kind: FrameKind::Pages, ..barrier }.encode()).is_err());
    }
}
