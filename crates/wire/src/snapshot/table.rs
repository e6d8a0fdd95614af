//! What the pages of a snapshot are: a word each, in tables of 512, and the tables' checksums in an index.

use super::{SnapshotError, SnapshotPart};
use crate::{Fields, crc};
use vmferry_core::{PageDigest, PageIndex, RegionId};

/// Pages of a table: as many as a huge page has.
pub const TABLE_PAGES: usize = 512;
/// Bytes of a table.
pub const TABLE_BYTES: usize = 8 * TABLE_PAGES;

/// Stands for a page of zeros in a table, and for a table of such pages in an index: what a hole in the file reads as.
const NOTHING: u64 = 0;
/// Stands for a checksum that happens to be [`NOTHING`].
const INSTEAD: u64 = 1;

/// A checksum as it is written: never [`NOTHING`].
fn written(sum: u64) -> u64 {
    if sum == NOTHING { INSTEAD } else { sum }
}

/// The digests of 512 consecutive pages of a region, of which pages of zeros have none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageTable {
    words: [u64; TABLE_PAGES],
}

impl Default for PageTable {
    fn default() -> Self {
        Self { words: [NOTHING; TABLE_PAGES] }
    }
}

impl PageTable {
    /// Makes all its pages zeros.
    pub fn clear(&mut self) {
        self.words.fill(NOTHING);
    }

    /// Page `at` of the table has this digest; `None` for a page of zeros.
    ///
    /// # Panics
    /// If `at` is not below [`TABLE_PAGES`].
    pub fn set(&mut self, at: usize, digest: Option<PageDigest>) {
        self.words[at] = digest.map_or(NOTHING, |digest| written(digest.0));
    }

    /// Whether page `at` has content.
    ///
    /// # Panics
    /// If `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn has_content(&self, at: usize) -> bool {
        self.words[at] != NOTHING
    }

    /// Whether page `at` is what has this digest; `None` for a page of zeros.
    ///
    /// # Panics
    /// If `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn fits(&self, at: usize, digest: Option<PageDigest>) -> bool {
        self.words[at] == digest.map_or(NOTHING, |digest| written(digest.0))
    }

    /// How many pages have content.
    #[must_use]
    pub fn contents(&self) -> u64 {
        self.words.iter().filter(|word| **word != NOTHING).count() as u64
    }

    /// Its bytes, and its word in the index; `None` if no page has content: it is then not written.
    #[must_use]
    pub fn encode(&self) -> Option<([u8; TABLE_BYTES], u64)> {
        if self.contents() == 0 {
            return None;
        }
        let mut bytes = [0; TABLE_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(&self.words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let sum = written(crc(&bytes));
        Some((bytes, sum))
    }

    /// Reads the table of the `pages` pages from `first` of `region`, which lies at byte `at` of the file and whose word
    /// in the index is `sum`. Allocates nothing.
    ///
    /// # Errors
    /// If it is damaged, or speaks of pages behind the region's end.
    pub fn decode(
        bytes: &[u8; TABLE_BYTES],
        sum: u64,
        (region, first, pages): (RegionId, PageIndex, usize),
        at: u64,
    ) -> Result<Self, SnapshotError> {
        let part = SnapshotPart::Table(region, (first.0..first.0 + pages as u64).into());
        if sum == NOTHING || written(crc(bytes)) != sum {
            return Err(SnapshotError::Damaged { part, at });
        }
        let (mut table, mut fields) = (Self::default(), Fields(bytes));
        table.words.fill_with(|| fields.u64());
        match table.words.iter().skip(pages).find(|word| **word != NOTHING) {
            None => Ok(table),
            Some(word) => Err(SnapshotError::Field {
                part,
                what: "a page behind the end of its region",
                value: *word,
                allowed: "0",
            }),
        }
    }
}

/// The words of a region's index: one for each table, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableIndex {
    words: Vec<u64>,
}

impl TableIndex {
    /// Of these words.
    #[must_use]
    pub fn new(words: Vec<u64>) -> Self {
        Self { words }
    }

    /// The word of table `block`; `None` if none of its pages has content.
    #[must_use]
    pub fn table(&self, block: u64) -> Option<u64> {
        let word = *usize::try_from(block).ok().and_then(|block| self.words.get(block))?;
        (word != NOTHING).then_some(word)
    }

    /// Its bytes, and their checksum, which stands in the header.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, u64) {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let sum = crc(&bytes);
        (bytes, sum)
    }

    /// Reads the index of `region`, which lies at byte `at` of the file, from all its bytes.
    ///
    /// # Errors
    /// If its checksum is not `sum`.
    pub fn decode(bytes: &[u8], sum: u64, region: RegionId, at: u64) -> Result<Self, SnapshotError> {
        if crc(bytes) != sum {
            return Err(SnapshotError::Damaged { part: SnapshotPart::Index(region), at });
        }
        Ok(Self { words: bytes.chunks_exact(8).map(|word| Fields(word).u64()).collect() })
    }
}
