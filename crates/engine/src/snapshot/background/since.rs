//! Base of an increment: the snapshot with whose pages those of the guest are compared.
//!
//! A page is not written if the base has a page with the same digest, and reading that page from
//! the file of the base gives the same bytes. The digest alone does not suffice: it has 64 bits and
//! is not cryptographic, so a guest could make two pages with one digest. A page of the base that
//! cannot be read, or that is damaged, counts as different, and is written.

use super::copies::Block;
use super::writer::{BLOCK_BYTES, slot};
use crate::MigrateError;
use crate::snapshot::open::{BlockPages, Expected, MOST_FILES, SnapshotPages, id_of, open_at};
use crate::snapshot::{RestoreError, uri};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, SourceVm};
use vmferry_wire::{BaseName, PageTable, SnapshotBase, TableKind};

/// Base of the increment that is being written.
#[derive(Debug)]
pub(super) struct Since {
    path: PathBuf,
    base: SnapshotBase,
    pages: SnapshotPages,
    /// Called at the first page of the base that cannot be read.
    unreadable: Once,
}

impl Since {
    /// Opens the base at `base` for an increment at `path`. Both must be in one folder.
    pub(super) fn open(base: &Path, path: &Path, vm: &dyn SourceVm) -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::File { uri: uri(base), source };
        let name = base.file_name().and_then(|name| BaseName::new(name.as_bytes()));
        let name = name.ok_or_else(|| failed(io::ErrorKind::InvalidFilename.into()))?;
        if folder(base).map_err(failed)? != folder(path).map_err(failed)? {
            return Err(MigrateError::Settings(format!(
                "an increment must be in the folder of its base, and {} is not in the folder of {}",
                path.display(),
                base.display()
            )));
        }
        let (machine, memory) = (vm.config(), vm.memory());
        let pages = open_at(base, Some(Expected { machine: &machine, layout: memory.layout() }))?;
        if pages.files() >= MOST_FILES {
            return Err(MigrateError::Settings(format!(
                "{} is the last of {MOST_FILES} files that need each other, and there may not be more: merge them",
                base.display()
            )));
        }
        let base_of = SnapshotBase { id: pages.id(), name };
        Ok(Self { path: base.to_owned(), base: base_of, pages, unreadable: Once::new() })
    }

    /// Returns the base for the header of the increment.
    pub(super) fn base(&self) -> &SnapshotBase {
        &self.base
    }

    /// Checks that the base still has its name, without which the increment cannot be restored.
    pub(super) fn check(&self) -> io::Result<()> {
        let why = match id_of(&self.path) {
            Ok(id) if id == self.base.id => return Ok(()),
            Ok(_) => "another snapshot has its name now".to_owned(),
            Err(error) => error.to_string(),
        };
        Err(io::Error::other(format!("its base {} has changed: {why}", self.path.display())))
    }

    /// Returns true if a page of the block may have content in the base.
    pub(super) fn has_block(&self, block: Block) -> bool {
        self.pages.has_block(block.position, block.number)
    }

    /// Returns what was read from the base, or `None` if it cannot be read or is damaged.
    fn readable<T>(&self, read: Result<T, RestoreError>) -> Option<T> {
        read.inspect_err(|error| {
            self.unreadable.call_once(|| {
                tracing::warn!(
                    "{}: {error}; pages of the base that cannot be read are written again",
                    self.path.display()
                );
            });
        })
        .ok()
    }
}

/// Comparison of blocks with the base, by one writer.
pub(super) struct Comparison<'a> {
    since: &'a Since,
    /// Pages of the base, at the same places as those of the guest in the buffer of the writer.
    buffer: Vec<u8>,
}

impl<'a> Comparison<'a> {
    pub(super) fn new(since: &'a Since) -> Self {
        Self { since, buffer: vec![0; BLOCK_BYTES] }
    }

    /// Returns the base.
    pub(super) fn since(&self) -> &'a Since {
        self.since
    }

    /// Returns the table of the increment for the block with the pages `run`. `now` has the digests
    /// of the guest's pages, and `bytes` their contents.
    pub(super) fn differences(
        &mut self,
        block: Block,
        run: PageRun,
        now: &PageTable,
        bytes: &[u8],
    ) -> PageTable {
        let mut table = PageTable::new(TableKind::Increment);
        let before = self.since.readable(self.since.pages.block(block.position, block.number));
        let Some(before) = before.as_ref().map(Option::as_ref) else {
            run.range().for_each(|page| table.copy_entry(slot(page), now));
            return table;
        };
        let equal = |page: u64| before.is_some_and(|before| before.table().has_digest_of(slot(page), now));
        let mut page = run.first.0;
        while page < run.end() {
            let count = (page..run.end()).take_while(|page| equal(*page)).count() as u64;
            if let (Some(before), 1..) = (before, count) {
                self.compare(block.position, page..page + count, before, (now, bytes), &mut table);
                page += count;
                continue;
            }
            if now.has_content(slot(page)) || before.is_some_and(|before| before.has_content(slot(page))) {
                table.copy_entry(slot(page), now);
            }
            page += 1;
        }
        table
    }

    /// Compares the bytes of pages whose digests are equal, and enters those that differ.
    fn compare(
        &mut self,
        position: usize,
        pages: std::ops::Range<u64>,
        before: &BlockPages,
        (now, bytes): (&PageTable, &[u8]),
        table: &mut PageTable,
    ) {
        let at = |page: u64| slot(page) * PAGE_BYTES;
        let length = usize::try_from(pages.end - pages.start).unwrap_or(0) * PAGE_BYTES;
        let start = at(pages.start);
        let there = &mut self.buffer[start..start + length];
        let read = self.since.pages.read(position, PageIndex(pages.start), there, before);
        if self.since.readable(read).is_none() {
            if length == PAGE_BYTES {
                return table.copy_entry(slot(pages.start), now);
            }
            // One page that cannot be read must not prevent its neighbours from being compared.
            return pages.for_each(|page| {
                self.compare(position, page..page + 1, before, (now, bytes), table);
            });
        }
        for page in pages {
            let range = at(page)..at(page) + PAGE_BYTES;
            if self.buffer[range.clone()] != bytes[range] {
                table.copy_entry(slot(page), now);
            }
        }
    }
}

fn folder(path: &Path) -> io::Result<PathBuf> {
    crate::snapshot::file::folder(path).canonicalize()
}
