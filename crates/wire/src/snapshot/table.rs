//! Digests of the pages of a snapshot: one word for each page, in tables of 512 words, and an index
//! with the checksums of the tables.

use super::{SnapshotError, SnapshotPart};
use crate::{Fields, crc};
use vmferry_core::{PageDigest, PageIndex, RegionId};

/// Number of pages in a table, which is the number of 4 KiB pages in a huge page.
pub const TABLE_PAGES: usize = 512;
/// Length of a table in bytes.
pub const TABLE_BYTES: usize = 8 * TABLE_PAGES;

/// Word that stands for a page of zeros in a table, and for a table of such pages in an index. A
/// hole in the file reads as this word.
const NOTHING: u64 = 0;
/// Word that replaces a checksum equal to [`NOTHING`].
const INSTEAD: u64 = 1;

/// Returns the word that stands for a checksum. It is never [`NOTHING`].
fn written(sum: u64) -> u64 {
    if sum == NOTHING { INSTEAD } else { sum }
}

/// Table with the digests of 512 consecutive pages of a region. A page of zeros has no digest.
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
    /// Removes all digests, so that all pages of the table count as pages of zeros.
    pub fn clear(&mut self) {
        self.words.fill(NOTHING);
    }

    /// Sets the digest of page `at`, counted from the first page of the table. `None` stands for a
    /// page of zeros.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    pub fn set(&mut self, at: usize, digest: Option<PageDigest>) {
        self.words[at] = digest.map_or(NOTHING, |digest| written(digest.0));
    }

    /// Returns true if page `at` has content.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn has_content(&self, at: usize) -> bool {
        self.words[at] != NOTHING
    }

    /// Returns true if page `at` has this digest. `None` stands for a page of zeros.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn fits(&self, at: usize, digest: Option<PageDigest>) -> bool {
        self.words[at] == digest.map_or(NOTHING, |digest| written(digest.0))
    }

    /// Returns the number of pages with content.
    #[must_use]
    pub fn contents(&self) -> u64 {
        self.words.iter().filter(|word| **word != NOTHING).count() as u64
    }

    /// Encodes the table. Returns its bytes and its word for the index, or `None` if no page has
    /// content, because such a table is not written.
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

    /// Decodes the table of `pages` pages that start at page `first` of `region`. `sum` is the word
    /// of the table in the index, and `at` is the offset of the table in the file, in bytes.
    /// Allocates nothing.
    ///
    /// # Errors
    /// Returns an error if the table is damaged, or if it has a digest for a page behind the end of
    /// the region.
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

/// Index of a region: one word for each table, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableIndex {
    words: Vec<u64>,
}

impl TableIndex {
    /// Creates an index from its words.
    #[must_use]
    pub fn new(words: Vec<u64>) -> Self {
        Self { words }
    }

    /// Returns the word of table `block`, or `None` if no page of the table has content.
    #[must_use]
    pub fn table(&self, block: u64) -> Option<u64> {
        let word = *usize::try_from(block).ok().and_then(|block| self.words.get(block))?;
        (word != NOTHING).then_some(word)
    }

    /// Encodes the index. Returns its bytes and their checksum for the header.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, u64) {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let sum = crc(&bytes);
        (bytes, sum)
    }

    /// Decodes the index of `region` from all of its bytes. `at` is its offset in the file, in
    /// bytes.
    ///
    /// # Errors
    /// Returns an error if the checksum of the bytes is not `sum`.
    pub fn decode(bytes: &[u8], sum: u64, region: RegionId, at: u64) -> Result<Self, SnapshotError> {
        if crc(bytes) != sum {
            return Err(SnapshotError::Damaged { part: SnapshotPart::Index(region), at });
        }
        Ok(Self { words: bytes.chunks_exact(8).map(|word| Fields(word).u64()).collect() })
    }
}
