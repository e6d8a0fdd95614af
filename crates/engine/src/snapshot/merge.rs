//! Merging of an increment and the snapshots that it is based on into one complete file.

use super::file::NewFile;
use super::image::{Identity, Image};
use super::open::{SnapshotPages, open_at};
use super::shares::{Shares, on_threads, threads};
use super::uri;
use super::write::Stop;
use crate::{MigrateError, random};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use vmferry_core::PAGE_BYTES;
use vmferry_wire::{MigrationId, SnapshotMap, TABLE_PAGES, encode_machine, encode_state};

/// Amount of data of a merged snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Merged {
    /// Id of the snapshot.
    pub id: String,
    /// Number of files that were merged.
    pub files: usize,
    /// Number of pages with content.
    pub pages: u64,
    /// Length of the file in bytes, without its holes.
    pub bytes: u64,
}

/// Writes the snapshot at `path`, with all pages of the snapshots that it is based on, to the new
/// file at `into`. The files that are merged stay as they are.
///
/// The new file is complete. It stands for the same instant of the guest and has the same id as the
/// snapshot at `path`. Therefore, if it is given the name of that file, increments that are based
/// on that file can be restored with it.
///
/// All pages are compared with their digests. The new file gets its name when all of it has reached
/// the disk. Returns `None` soon after `cancelled` becomes true, and leaves no file then.
///
/// # Errors
/// If a file of the snapshot cannot be read or is damaged, if the file at `into` exists, or if it
/// cannot be written.
pub fn merge_snapshot(
    path: &Path,
    into: &Path,
    cancelled: &AtomicBool,
) -> Result<Option<Merged>, MigrateError> {
    let pages = open_at(path, None)?;
    let damaged = |source| MigrateError::Snapshot { uri: uri(path), source };
    let sections = pages.sections().map_err(damaged)?;
    let failed = |source| MigrateError::File { uri: uri(into), source };
    let mut file = NewFile::create(into, MigrationId(random()?)).map_err(failed)?;
    // If the file system does not allow a file of this length, the error is found here.
    file.file().set_len(SnapshotMap::new(pages.layout(), 0, 0).len).map_err(failed)?;
    let encoded = encode_machine(pages.machine()).and_then(|machine| Ok((machine, encode_state(&sections)?)));
    let (machine, state) = encoded.map_err(|error| damaged(error.into()))?;
    let image = Image::new(file.file(), pages.layout(), machine, state);
    let merge = Merge { pages: &pages, image: &image, shares: Shares::new(1), cancelled };
    let stop = AtomicBool::new(false);
    let merged = on_threads(threads(), "merge", || stop.store(true, Ordering::Relaxed), || merge.work(&stop));
    let identity = Identity { id: pages.id(), copy: pages.is_copy(), base: None };
    let figures = match merged.and_then(|()| image.finish(pages.layout(), identity)) {
        Ok(figures) => figures,
        Err(Stop::Cancelled) => return Ok(None),
        Err(Stop::Read(source)) => return Err(damaged(source)),
        Err(Stop::Format(source)) => return Err(damaged(source.into())),
        Err(Stop::File(source)) => return Err(failed(source)),
        Err(Stop::Vm(source)) => return Err(MigrateError::Vm(source)),
    };
    file.sync().and_then(|()| file.name()).map_err(failed)?;
    let (id, files) = (pages.id().to_string(), pages.files());
    Ok(Some(Merged { id, files, pages: figures.contents, bytes: figures.bytes }))
}

/// Merge that is under way, which the threads share.
struct Merge<'a> {
    pages: &'a SnapshotPages,
    image: &'a Image<'a>,
    shares: Shares,
    cancelled: &'a AtomicBool,
}

impl Merge<'_> {
    fn work(&self, stop: &AtomicBool) -> Result<(), Stop> {
        let mut buffer = vec![0; TABLE_PAGES * PAGE_BYTES];
        while let Some((position, blocks)) = self.shares.take(self.image.places()) {
            for block in blocks {
                if self.cancelled.load(Ordering::Relaxed) || stop.load(Ordering::Relaxed) {
                    return Err(Stop::Cancelled);
                }
                self.merge_block(position, block, &mut buffer)?;
            }
        }
        Ok(())
    }

    fn merge_block(&self, position: usize, block: u64, buffer: &mut [u8]) -> Result<(), Stop> {
        let Some(pages) = self.pages.block(position, block).map_err(Stop::Read)? else { return Ok(()) };
        let place = &self.image.places()[position];
        let run = place.run(block);
        for content in pages.runs(run) {
            let bytes = &mut buffer[..usize::try_from(content.bytes()).unwrap_or(usize::MAX)];
            self.pages.read(position, content.first, bytes, &pages).map_err(Stop::Read)?;
            self.image.file().write_all_at(bytes, place.content(content.first)).map_err(Stop::File)?;
        }
        self.image.put_table(position, block, pages.table(), pages.contents())
    }
}
