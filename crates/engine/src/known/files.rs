//! Entries of the index for a file.

use super::Entry;
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use vmferry_core::{PAGE_BYTES, PAGE_SIZE, PageDigest};
use vmferry_wire::{PageEntry, SNAPSHOT_HEADER_BYTES, SnapshotHeader, SnapshotMap, TABLE_BYTES, TableKind};

/// Number of bits of the page number in a [`Place`].
const PAGE_BITS: u32 = 52;
/// Number of bytes that are read at once.
const CHUNK: usize = 1 << 20;
/// Maximum number of threads that read a file.
const MOST_THREADS: usize = 4;

/// Place of a page: the number of the file, and the number of the page in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl Place {
    /// Returns the place of page `page` of file `file`. A file has at most 2^51 pages, because an
    /// offset in a file has 63 bits.
    fn new(file: u16, page: u64) -> Self {
        debug_assert!(page < 1 << PAGE_BITS && usize::from(file) < super::KnownPages::MAX_FILES);
        Self(u64::from(file) << PAGE_BITS | page)
    }

    pub(super) fn file(self) -> usize {
        usize::try_from(self.0 >> PAGE_BITS).unwrap_or(usize::MAX)
    }

    /// Returns the place `pages` pages further on in the file.
    pub(super) fn plus(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }

    pub(super) fn offset(self) -> u64 {
        (self.0 & ((1 << PAGE_BITS) - 1)) * PAGE_SIZE
    }
}

/// Returns the entries of file number `number`, at most `most`, and true if these are all.
pub(super) fn entries(file: &File, number: u16, most: usize) -> io::Result<(Vec<Entry>, bool)> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let len = metadata.len();
    let found = match snapshot(file, len) {
        Some((kind, map)) => of_snapshot(file, number, (kind, &map), most),
        None => of_image(file, number, len, most),
    }?;
    assert!(found.0.len() <= most, "the index is bounded");
    Ok(found)
}

/// Returns the kind and the map of the file if it has the header and the length of a snapshot.
fn snapshot(file: &File, len: u64) -> Option<(TableKind, SnapshotMap)> {
    let mut header = [0; SNAPSHOT_HEADER_BYTES];
    file.read_exact_at(&mut header, 0).ok()?;
    let (header, map) = SnapshotHeader::decode(&header, len).ok()?;
    Some((header.kind(), map))
}

/// Returns the entries of a snapshot, from the tables with the digests of its pages.
///
/// The checksums of the tables are not checked, because an entry is only a hint.
fn of_snapshot(
    file: &File,
    number: u16,
    (kind, map): (TableKind, &SnapshotMap),
    most: usize,
) -> io::Result<(Vec<Entry>, bool)> {
    let mut entries = Vec::new();
    let mut chunk = vec![0; CHUNK];
    for region in &map.regions {
        let tables = region.tables..region.tables + region.blocks() * TABLE_BYTES as u64;
        let first = region.data / PAGE_SIZE;
        for data in extents(file, tables.clone())? {
            for part in chunks(data) {
                let words = part_of(file, &mut chunk, &part)?;
                let page = (part.start - tables.start) / 8;
                for (digest, page) in words.as_chunks::<8>().0.iter().zip(page..region.pages) {
                    let digest = u64::from_le_bytes(*digest);
                    if kind.entry(digest) != PageEntry::Here {
                        continue;
                    }
                    if entries.len() == most {
                        return Ok((entries, false));
                    }
                    entries.push(Entry { digest, place: Place::new(number, first + page) });
                }
            }
        }
    }
    Ok((entries, true))
}

/// Returns the entries of a raw image. Everything except holes is read.
fn of_image(file: &File, number: u16, len: u64, most: usize) -> io::Result<(Vec<Entry>, bool)> {
    let parts: Vec<_> = extents(file, 0..len / PAGE_SIZE * PAGE_SIZE)?.into_iter().flat_map(chunks).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    let (next, count) = (AtomicU64::new(0), AtomicUsize::new(0));
    let read = || -> io::Result<(Vec<Entry>, bool)> {
        let (mut entries, mut chunk) = (Vec::new(), vec![0; CHUNK]);
        let take = || usize::try_from(next.fetch_add(1, Ordering::Relaxed)).ok().and_then(|at| parts.get(at));
        while let Some(part) = take() {
            let bytes = part_of(file, &mut chunk, part)?;
            for (page, number_in_file) in
                bytes.as_chunks::<PAGE_BYTES>().0.iter().zip(part.start / PAGE_SIZE..)
            {
                if page.iter().all(|byte| *byte == 0) {
                    continue;
                }
                // All threads together find at most `most` pages, however long the file is.
                if count.fetch_add(1, Ordering::Relaxed) >= most {
                    return Ok((entries, false));
                }
                let (digest, place) = (PageDigest::of(page).0, Place::new(number, number_in_file));
                entries.push(Entry { digest, place });
            }
        }
        Ok((entries, true))
    };
    let found = std::thread::scope(|scope| {
        let spawn = |index: usize| {
            let (role, name) = (vmferry_thread::Role::Snapshot, format!("index-{index}"));
            vmferry_thread::spawn_scoped(role, name, scope, read)
        };
        let others: Vec<_> = (1..threads.min(parts.len())).map(spawn).collect();
        let own = read();
        let joined = others.into_iter().map(|thread| {
            thread?.join().unwrap_or_else(|_| Err(io::Error::other("a thread that reads the file panicked")))
        });
        std::iter::once(own).chain(joined).collect::<io::Result<Vec<_>>>()
    })?;
    let mut complete = true;
    let mut entries = Vec::new();
    for (more, all) in found {
        entries.extend(more);
        complete &= all;
    }
    Ok((entries, complete))
}

/// Returns the page-aligned ranges of `within` that are not holes. `within` must be page-aligned.
fn extents(file: &File, within: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let (mut extents, mut at) = (Vec::new(), within.start);
    while at < within.end {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start / PAGE_SIZE * PAGE_SIZE,
            // No data follows, or the file is now shorter.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start.max(at))).or_else(|error| match error {
            rustix::io::Errno::NXIO => Ok(start),
            error => Err(error),
        })?;
        let end = end.next_multiple_of(PAGE_SIZE).min(within.end);
        if start.max(at) >= end {
            break;
        }
        extents.push(start.max(at)..end);
        at = end;
    }
    Ok(extents)
}

/// Divides `range` into parts of at most [`CHUNK`] bytes.
fn chunks(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(CHUNK).map(move |start| start..(start + CHUNK as u64).min(end))
}

/// Fills `to` from byte `at` of the file on. Returns the bytes that were read before the end of the
/// file or an error.
pub(super) fn filled<'a>(file: &File, to: &'a mut [u8], at: u64) -> &'a [u8] {
    let mut done = 0;
    while done < to.len() {
        match file.read_at(&mut to[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                tracing::debug!(
                    "a file with known pages cannot be read at byte {}: {error}",
                    at + done as u64
                );
                break;
            }
        }
    }
    &to[..done]
}

/// Reads the bytes of `part` into `chunk`. The result is shorter than `part` if the file ends
/// before.
fn part_of<'a>(file: &File, chunk: &'a mut [u8], part: &Range<u64>) -> io::Result<&'a [u8]> {
    let wanted = usize::try_from(part.end - part.start).unwrap_or(usize::MAX).min(chunk.len());
    // An error at the first byte is reported. After a later one, the rest of the part is not used.
    file.read_at(&mut chunk[..wanted.min(1)], part.start)?;
    Ok(filled(file, &mut chunk[..wanted], part.start))
}
