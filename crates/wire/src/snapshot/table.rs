//! Digests of the pages of a snapshot: one word for each page, in tables of 512 words, and an index
//! with the checksums of the tables.

use super::{SnapshotError, SnapshotPart};
use crate::{Fields, crc};
use vmferry_core::{PageDigest, PageIndex, RegionId};

/// Number of pages in a table, which is the number of 4 KiB pages in a huge page.
pub const TABLE_PAGES: usize = 512;
/// Length of a table in bytes.
pub const TABLE_BYTES: usize = 8 * TABLE_PAGES;

/// Word that stands for a page of zeros in a table. A hole in the file reads as this word. In an
/// index, it stands for a table that was not written.
const NOTHING: u64 = 0;
/// Word that replaces a checksum equal to [`NOTHING`].
const INSTEAD: u64 = 1;
/// Word that stands for a page of the base in a table of an increment. In other tables, it is a
/// digest.
const BASE: u64 = u64::MAX;
/// Word that replaces a digest equal to [`BASE`] in a table of an increment.
const INSTEAD_OF_BASE: u64 = u64::MAX - 1;

/// Returns the word that stands for a checksum. It is never [`NOTHING`].
fn written(sum: u64) -> u64 {
    if sum == NOTHING { INSTEAD } else { sum }
}

/// Place of the content of a page, according to a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageEntry {
    /// The page is zero.
    Zero,
    /// The content is in the file of the table.
    Here,
    /// The page is that of the base.
    Base,
}

/// Kind of a table, which is that of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TableKind {
    /// The file has all pages with content.
    #[default]
    Complete,
    /// The file has the pages that differ from those of its base.
    Increment,
}

impl TableKind {
    /// Returns the word of all pages of a table that is not written.
    fn unwritten(self) -> u64 {
        match self {
            Self::Complete => NOTHING,
            Self::Increment => BASE,
        }
    }

    /// Returns the place that a word of a table of this kind gives.
    #[must_use]
    pub fn entry(self, word: u64) -> PageEntry {
        match (word, self) {
            (NOTHING, _) => PageEntry::Zero,
            (BASE, Self::Increment) => PageEntry::Base,
            _ => PageEntry::Here,
        }
    }
}

/// Table with the digests of 512 consecutive pages of a region. A page of zeros has no digest, and
/// neither has a page of the base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageTable {
    kind: TableKind,
    words: [u64; TABLE_PAGES],
}

impl Default for PageTable {
    fn default() -> Self {
        Self::new(TableKind::Complete)
    }
}

impl PageTable {
    /// Returns a table like one that is not written: all pages are zero, or, in an increment, those
    /// of the base.
    #[must_use]
    pub fn new(kind: TableKind) -> Self {
        Self { kind, words: [kind.unwritten(); TABLE_PAGES] }
    }

    /// Returns the kind of the table.
    #[must_use]
    pub fn kind(&self) -> TableKind {
        self.kind
    }

    /// Sets the digest of page `at`, counted from the first page of the table. `None` stands for a
    /// page of zeros.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    pub fn set(&mut self, at: usize, digest: Option<PageDigest>) {
        let word = digest.map_or(NOTHING, |digest| written(digest.0));
        let reserved = self.kind == TableKind::Increment && word == BASE;
        self.words[at] = if reserved { INSTEAD_OF_BASE } else { word };
    }

    /// Gives page `at` the entry that it has in `other`.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    pub fn copy_entry(&mut self, at: usize, other: &Self) {
        debug_assert!(
            self.kind == TableKind::Increment || other.entry(at) != PageEntry::Base,
            "a complete file has no base"
        );
        let digest = other.entry(at) == PageEntry::Here && other.words[at] == BASE;
        let reserved = digest && self.kind == TableKind::Increment;
        self.words[at] = if reserved { INSTEAD_OF_BASE } else { other.words[at] };
    }

    /// Returns true if page `at` has the same digest here and in `other`.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn has_digest_of(&self, at: usize, other: &Self) -> bool {
        self.has_content(at) && other.has_content(at) && self.words[at] == other.words[at]
    }

    /// Returns the place of the content of page `at`.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn entry(&self, at: usize) -> PageEntry {
        self.kind.entry(self.words[at])
    }

    /// Returns true if the content of page `at` is in the file of the table.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn has_content(&self, at: usize) -> bool {
        self.entry(at) == PageEntry::Here
    }

    /// Returns true if page `at` has this digest. `None` stands for a page of zeros.
    ///
    /// # Panics
    /// Panics if `at` is not below [`TABLE_PAGES`].
    #[must_use]
    pub fn fits(&self, at: usize, digest: Option<PageDigest>) -> bool {
        let word = digest.map_or(NOTHING, |digest| written(digest.0));
        match self.entry(at) {
            PageEntry::Base => false,
            _ => self.words[at] == word || (word == BASE && self.words[at] == INSTEAD_OF_BASE),
        }
    }

    /// Returns the number of pages whose content is in the file of the table.
    #[must_use]
    pub fn contents(&self) -> u64 {
        self.words.iter().filter(|word| self.kind.entry(**word) == PageEntry::Here).count() as u64
    }

    /// Encodes the table. Returns its bytes and its word for the index, or `None` if the table is
    /// [not written](Self::new).
    #[must_use]
    pub fn encode(&self) -> Option<([u8; TABLE_BYTES], u64)> {
        if self.words.iter().all(|word| *word == self.kind.unwritten()) {
            return None;
        }
        let mut bytes = [0; TABLE_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(&self.words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let sum = written(crc(&bytes));
        Some((bytes, sum))
    }

    /// Decodes the table of `pages` pages that start at page `first` of `region`, from a file of
    /// this `kind`. `sum` is the word of the table in the index, and `at` is the offset of the
    /// table in the file, in bytes. Allocates nothing.
    ///
    /// # Errors
    /// Returns an error if the table is damaged, or if it has a digest for a page behind the end of
    /// the region.
    pub fn decode(
        bytes: &[u8; TABLE_BYTES],
        sum: u64,
        kind: TableKind,
        (region, first, pages): (RegionId, PageIndex, usize),
        at: u64,
    ) -> Result<Self, SnapshotError> {
        let part = SnapshotPart::Table(region, (first.0..first.0 + pages as u64).into());
        if sum == NOTHING || written(crc(bytes)) != sum {
            return Err(SnapshotError::Damaged { part, at });
        }
        let (mut table, mut fields) = (Self::new(kind), Fields(bytes));
        table.words.fill_with(|| fields.u64());
        match table.words.iter().skip(pages).find(|word| **word != kind.unwritten()) {
            None => Ok(table),
            Some(word) => Err(SnapshotError::Field {
                part,
                what: "a page behind the end of its region",
                value: *word,
                allowed: "no digest",
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

    /// Returns the word of table `block`, or `None` if the table was not written.
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
