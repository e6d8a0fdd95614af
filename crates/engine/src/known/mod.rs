//! Known pages: pages that files of the target host contain, so that the source need not send them.
//!
//! A guest often has pages that the target host already has in a file: in an old snapshot of the
//! same guest, or in an image of the template that it was made from. The source sends the BLAKE3
//! hash of such a page instead of its content.
//!
//! # Why no page is wrong
//! A file may be stale, belong to another guest, or change while it is read. The target reads a
//! page into a buffer of its own, and computes the hash of that buffer. Only if all 32 bytes are
//! equal to the hash from the source, it writes the buffer to guest memory. The index only
//! suggests where to read. The files are read with `pread`, not mapped, so a file that becomes
//! shorter causes an error and no signal.
//!
//! # Why no page is lost
//! The target marks each page that it does not know as a page with a digest mismatch, so it does
//! not load the guest before the page has arrived with its content. It also names the page to the
//! source at once, which sends the content in the same pass (`source::hashes`).

mod files;
#[cfg(test)]
mod tests;

use crate::MigrateError;
use files::Place;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_codec::Page;
use vmferry_core::{PAGE_BYTES, PageDigest};
use vmferry_wire::HASH_BYTES;

/// BLAKE3 hash of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageHash(pub(crate) [u8; HASH_BYTES]);

impl PageHash {
    /// Returns the hash of `page`.
    pub(crate) fn of(page: &Page) -> Self {
        Self(*blake3::hash(page).as_bytes())
    }
}

/// Page of a file, with the digest that the index was built from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    digest: u64,
    place: Place,
}

/// Pages of files that a target uses instead of pages from the source.
///
/// Pass the value to [`Arrival::known_pages`](crate::Arrival::known_pages). The files may contain
/// anything: a page is used only if its BLAKE3 hash is equal to the hash that the source has sent.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::fs::File;
/// use vmferry_engine::KnownPages;
///
/// # let path = std::env::current_exe()?;
/// let files = vec![(path.display().to_string(), File::open(&path)?)];
/// let known = KnownPages::index(files)?;
/// println!("{} pages in {} KiB of memory", known.pages(), known.memory_bytes() >> 10);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct KnownPages {
    files: Vec<(String, File)>,
    /// Entries in the order of their digests. Each digest occurs once.
    index: Vec<Entry>,
    /// True if the files have more pages than the index holds.
    truncated: bool,
    /// Number of times that a page at an indexed place was no longer there.
    stale: AtomicU64,
}

impl KnownPages {
    /// Maximum number of files.
    pub const MAX_FILES: usize = 1024;
    /// Maximum number of pages in the index. The index takes 16 bytes for each page, so it takes at
    /// most 1 GiB.
    pub const MAX_PAGES: usize = 1 << 26;

    /// Builds the index of `files`, each of which has a name for messages.
    ///
    /// A file is a snapshot that vmferry has written, or a raw image of memory. A snapshot contains
    /// digests of its pages, so the call reads only these digests, which are about 1/500 of the
    /// file. Of any other file, the call reads everything except holes, with up to four threads,
    /// and indexes each block of 4096 bytes that does not contain only zeros.
    ///
    /// A file with an unexpected content is no error. If the files have more than
    /// [`MAX_PAGES`](Self::MAX_PAGES) pages, the index contains the first of them.
    ///
    /// # Errors
    /// [`MigrateError::File`] if a file is not a regular file or cannot be read, and
    /// [`MigrateError::Settings`] if there are more than [`MAX_FILES`](Self::MAX_FILES) files.
    pub fn index(files: Vec<(String, File)>) -> Result<Self, MigrateError> {
        Self::index_at_most(files, Self::MAX_PAGES)
    }

    fn index_at_most(files: Vec<(String, File)>, most: usize) -> Result<Self, MigrateError> {
        if files.len() > Self::MAX_FILES {
            let (count, most) = (files.len(), Self::MAX_FILES);
            return Err(MigrateError::Settings(format!(
                "{count} files with known pages; at most {most} can be used"
            )));
        }
        let (mut index, mut truncated) = (Vec::new(), false);
        for (number, (name, file)) in (0..).zip(&files) {
            let found = files::entries(file, number, most - index.len());
            let (entries, complete) =
                found.map_err(|source| MigrateError::File { uri: name.clone(), source })?;
            index.extend(entries);
            truncated |= !complete;
        }
        index.sort_unstable();
        index.dedup_by_key(|entry| entry.digest);
        index.shrink_to_fit();
        Ok(Self { files, index, truncated, stale: AtomicU64::new(0) })
    }

    /// Returns the number of pages in the index. Pages with the same content count once.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.index.len() as u64
    }

    /// Returns the memory that the index takes, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        size_of_val(&*self.index) as u64
    }

    /// Returns true if the files have more pages than the index can hold.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// Reads the pages with these digests and hashes into `pages`. Returns for each page whether
    /// it is known. The content of a page that is not known is unspecified.
    pub(crate) fn find(&self, wanted: &[(PageDigest, PageHash)], pages: &mut [Page]) -> Vec<bool> {
        assert_eq!(wanted.len(), pages.len(), "each page has a place in memory");
        let places: Vec<_> = wanted.iter().map(|(digest, _)| self.place(*digest)).collect();
        let (mut known, mut at) = (Vec::with_capacity(wanted.len()), 0);
        while at < wanted.len() {
            // Pages that are next to each other in a file, as they often are, are read together.
            let run = places[at..].iter().zip(0..);
            let count =
                run.take_while(|(place, after)| **place == places[at].map(|at| at.plus(*after))).count();
            let read = places[at].map(|place| self.read(place, &mut pages[at..at + count]));
            for index in at..at + count {
                let is_read = read.as_ref().is_some_and(|read| index - at < *read);
                // The hash of the bytes that were read decides, not the index.
                let is_known = is_read && PageHash::of(&pages[index]) == wanted[index].1;
                if let Some(place) = places[index].filter(|_| !is_known) {
                    self.note_stale(place);
                }
                known.push(is_known);
            }
            at += count;
        }
        known
    }

    /// Returns the place of the page with this digest.
    fn place(&self, digest: PageDigest) -> Option<Place> {
        // Digests are spread evenly, so the entry is near this position, and most of the accesses
        // to a large index are to the same cache lines. Other digests only make the search longer.
        let guess = (u128::from(digest.0) * self.index.len() as u128) >> 64;
        let guess = usize::try_from(guess).expect("a position in the index");
        let near = around(guess, self.index.len(), |at| self.index[at].digest.cmp(&digest.0));
        let at = self.index[near.clone()].binary_search_by_key(&digest.0, |entry| entry.digest).ok()?;
        Some(self.index[near.start + at].place)
    }

    /// Fills `pages` from `place` on. Returns the number of pages that were read before the end of
    /// the file or an error.
    fn read(&self, place: Place, pages: &mut [Page]) -> usize {
        let Some((_, file)) = self.files.get(place.file()) else { return 0 };
        files::filled(file, pages.as_flattened_mut(), place.offset()).len() / PAGE_BYTES
    }

    /// Counts a page that is no longer at its place.
    fn note_stale(&self, place: Place) {
        if self.stale.fetch_add(1, Ordering::Relaxed) == 0
            && let Some((name, _)) = self.files.get(place.file())
        {
            tracing::warn!(
                "{name} has changed since it was indexed, or is damaged: the source sends the pages that \
                 were there"
            );
        }
    }
}

/// Returns a range of `0..len` that contains the position that is sought, if there is one. Begins
/// at `guess`, and doubles the distance from it. `compare` compares the element at a position with
/// the one that is sought.
fn around(guess: usize, len: usize, compare: impl Fn(usize) -> std::cmp::Ordering) -> Range<usize> {
    let (mut low, mut high) = (guess.min(len), guess.min(len));
    let mut step = FIRST_STEP;
    while low > 0 && compare(low - 1).is_ge() {
        low = low.saturating_sub(step);
        step *= 2;
    }
    step = FIRST_STEP;
    while high < len && compare(high).is_le() {
        high = high.saturating_add(step).min(len);
        step *= 2;
    }
    low..high
}

/// Distance of the first step from a guessed position, in entries. Four of them are a cache line.
const FIRST_STEP: usize = 64;

const _: () = assert!(size_of::<Entry>() == 16 && PAGE_BYTES == 4096);
