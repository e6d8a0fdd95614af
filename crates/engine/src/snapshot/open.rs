//! Opened snapshot: the description of the machine, the device state and the pages of the guest.
//!
//! A snapshot is one file, or a chain: an increment, its base, the base of that, and so on, up to a
//! complete file. The content of a page is in the first file of the chain that does not refer to
//! its base for this page. Each file is verified by its own checksums, and the id of the base tells
//! whether the file is the right one.

use super::pio;
use crate::MigrateError;
use crate::vm::warn_if_panics_abort;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use vmferry_core::{
    Layout, MachineConfig, PAGE_BYTES, PageDigest, PageIndex, PageRun, PageSet, Section, TargetVm, VmError,
    Window,
};
use vmferry_wire::{
    BaseName, MigrationId, PageEntry, PageTable, PartSum, RegionOffsets, SNAPSHOT_HEADER_BYTES, SnapshotBase,
    SnapshotError, SnapshotHeader, SnapshotMap, SnapshotPart, TABLE_BYTES, TABLE_PAGES, TableIndex,
    decode_part,
};

/// Maximum number of files of a chain. Each file of a chain adds a table to the work for a block.
pub(super) const MOST_FILES: usize = 64;

/// Reason why a guest cannot be restored from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The file is not a complete snapshot.
    #[error("{0}")]
    Format(#[from] SnapshotError),
    /// The host cannot read the file.
    #[error("the {part} at byte {at:#x} cannot be read: {source}")]
    Read {
        /// Part that cannot be read.
        part: SnapshotPart,
        /// Offset of the part in the file, in bytes.
        at: u64,
        /// Error of the read.
        source: io::Error,
    },
    /// The snapshot belongs to another machine.
    #[error("the machines differ: {0}")]
    Machine(String),
    /// The tables and the header have different numbers of pages with content.
    #[error("the snapshot has {found} pages with content, but its header says {expected}")]
    Pages {
        /// Number of pages with content, according to the tables.
        found: u64,
        /// Number of pages with content, according to the header.
        expected: u64,
    },
    /// A file with pages that the snapshot does not contain cannot be used.
    #[error("the snapshot needs its base {name}, {why}")]
    Base {
        /// Name of the file, in the folder of the snapshot.
        name: String,
        /// Reason why the file cannot be used, and advice.
        why: String,
    },
    /// The snapshot is an increment, and guests that share a file need all pages in it.
    #[error(
        "the snapshot has only the pages that differ from its base, and guests that share a file need all of them; \
         merge it into a complete file first"
    )]
    Increment,
    /// The VMM returned an error.
    #[error("{0}")]
    Vm(#[from] VmError),
}

/// Machine to which a snapshot must belong.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    pub(super) machine: &'a MachineConfig,
    pub(super) layout: &'a Layout,
}

/// File of a chain, with its metadata.
#[derive(Debug)]
struct ChainFile {
    file: File,
    header: SnapshotHeader,
    map: SnapshotMap,
    /// Indexes of the regions, in the order of the map.
    indexes: Vec<TableIndex>,
}

/// Snapshot whose pages are read on request.
#[derive(Debug)]
pub(super) struct SnapshotPages {
    /// Files of the chain: the snapshot itself, its base, the base of that, and so on. The last one
    /// is complete.
    files: Vec<ChainFile>,
    machine: MachineConfig,
    layout: Layout,
}

/// Pages of a block: 512 aligned pages, or fewer at the end of a region.
pub(super) struct BlockPages {
    /// Digests of all pages with content.
    table: PageTable,
    /// For each page with content, the position of its file in the chain.
    files: [u8; TABLE_PAGES],
}

impl BlockPages {
    /// Returns true if the page at `slot` of the block has content.
    pub(super) fn has_content(&self, slot: usize) -> bool {
        self.table.has_content(slot)
    }

    /// Returns true if the page at `slot` has this digest. `None` stands for a page of zeros.
    pub(super) fn fits(&self, slot: usize, digest: Option<PageDigest>) -> bool {
        self.table.fits(slot, digest)
    }

    /// Returns the number of pages with content.
    pub(super) fn contents(&self) -> u64 {
        self.table.contents()
    }

    /// Returns the runs of the pages of `run`, the block, that have content.
    pub(super) fn runs(&self, run: PageRun) -> impl Iterator<Item = PageRun> {
        let mut page = run.first.0;
        std::iter::from_fn(move || {
            let has = |page: &u64| self.has_content(slot(PageIndex(*page)));
            let first = (page..run.end()).find(has)?;
            page = (first..run.end()).find(|page| !has(page)).unwrap_or(run.end());
            Some(PageRun::from(first..page))
        })
    }

    /// Returns the table of the pages in a complete file.
    pub(super) fn table(&self) -> &PageTable {
        &self.table
    }

    /// Returns how many of the first slots of `slots` have their content in the same file.
    fn together(&self, slots: Range<usize>) -> usize {
        let file = self.files[slots.start];
        slots.take_while(|slot| self.files[*slot] == file).count()
    }
}

impl ChainFile {
    /// Reads the metadata of `file`, and compares its machine with the one that is expected.
    ///
    /// The indexes are read only after the layouts were compared. Therefore the expected layout, or
    /// else the length of the file, bounds the size of all allocations.
    fn open(file: File, expected: Option<Expected<'_>>) -> Result<(Self, MachineConfig), RestoreError> {
        let (header, map) = read_header(&file)?;
        let machine: MachineConfig =
            part(&file, header.machine, SnapshotPart::Machine, map.machine, decode_part)?;
        if let Some(expected) = expected {
            if let Some(difference) = expected.machine.difference(&machine) {
                return Err(RestoreError::Machine(difference));
            }
            if &header.layout()? != expected.layout {
                return Err(RestoreError::Machine(
                    "the memory of this VM differs from its description".into(),
                ));
            }
        }
        let mut indexes = Vec::with_capacity(map.regions.len());
        for (place, region) in map.regions.iter().zip(&header.regions) {
            let (bytes, name) = (u32::try_from(place.index_bytes()), SnapshotPart::Index(place.id));
            let sum = PartSum { bytes: bytes.unwrap_or(u32::MAX), sum: region.index_sum };
            let decode = |bytes: &[u8], sum: PartSum, _, at| TableIndex::decode(bytes, sum.sum, place.id, at);
            indexes.push(part(&file, sum, name, place.index, decode)?);
        }
        Ok((Self { file, header, map, indexes }, machine))
    }

    /// Reads table `block` of the region at `position`. Returns `None` if it was not written.
    fn table(&self, position: usize, block: u64) -> Result<Option<PageTable>, RestoreError> {
        let place = &self.map.regions[position];
        let Some(sum) = self.indexes[position].table(block) else { return Ok(None) };
        let (run, at) = (place.run(block), place.table(block));
        let mut bytes = [0; TABLE_BYTES];
        self.file.read_exact_at(&mut bytes, at).map_err(|source| RestoreError::Read {
            part: SnapshotPart::Table(place.id, run),
            at,
            source,
        })?;
        let pages = usize::try_from(run.count).unwrap_or(TABLE_PAGES);
        Ok(Some(PageTable::decode(&bytes, sum, self.header.kind(), (place.id, run.first, pages), at)?))
    }

    fn damaged(&self, position: usize, page: PageIndex) -> RestoreError {
        let place = &self.map.regions[position];
        SnapshotError::Damaged { part: SnapshotPart::Page(place.id, page), at: place.content(page) }.into()
    }

    fn unreadable(&self, position: usize, page: PageIndex, source: io::Error) -> RestoreError {
        let place = &self.map.regions[position];
        RestoreError::Read { part: SnapshotPart::Page(place.id, page), at: place.content(page), source }
    }
}

impl SnapshotPages {
    /// Reads the metadata of `file` at `path`, and of the files that it is based on.
    pub(super) fn open(
        path: &Path,
        file: File,
        expected: Option<Expected<'_>>,
    ) -> Result<Self, RestoreError> {
        let (first, machine) = ChainFile::open(file, expected)?;
        let layout = first.header.layout()?;
        let mut pages = Self { files: vec![first], machine, layout };
        while let Some(base) = pages.files.last().and_then(|last| last.header.base.clone()) {
            let failed = |why: String| RestoreError::Base { name: base.name.to_string(), why };
            if pages.files.len() == MOST_FILES {
                return Err(failed(format!(
                    "and a snapshot may have {MOST_FILES} files at most: merge them"
                )));
            }
            let next = pages.open_base(path, &base).map_err(failed)?;
            pages.files.push(next);
        }
        Ok(pages)
    }

    /// Opens the file of `base` in the folder of `path`. Fails with a reason that follows the name
    /// of the file.
    fn open_base(&self, path: &Path, base: &SnapshotBase) -> Result<ChainFile, String> {
        let file = File::open(base_path(path, &base.name));
        let file =
            file.map_err(|error| format!("which cannot be opened in the folder of the snapshot: {error}"))?;
        let expected = Expected { machine: &self.machine, layout: &self.layout };
        let (found, _) =
            ChainFile::open(file, Some(expected)).map_err(|error| format!("and there {error}"))?;
        if found.header.id != base.id {
            return Err(format!("and this file is another snapshot ({}, not {})", found.header.id, base.id));
        }
        Ok(found)
    }

    fn top(&self) -> &ChainFile {
        &self.files[0]
    }

    pub(super) fn id(&self) -> MigrationId {
        self.top().header.id
    }

    pub(super) fn is_copy(&self) -> bool {
        self.top().header.copy
    }

    /// Returns true if all pages are in one file.
    pub(super) fn is_complete(&self) -> bool {
        self.top().header.base.is_none()
    }

    /// Returns the number of files.
    pub(super) fn files(&self) -> usize {
        self.files.len()
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn machine(&self) -> &MachineConfig {
        &self.machine
    }

    pub(super) fn places(&self) -> &[RegionOffsets] {
        &self.top().map.regions
    }

    /// Returns the number of pages with content according to the header.
    pub(super) fn contents(&self) -> u64 {
        // The sum does not overflow: each number is at most the number of pages of its region.
        self.top().header.regions.iter().map(|region| region.contents).sum()
    }

    /// Returns the device state.
    pub(super) fn sections(&self) -> Result<Vec<Section>, RestoreError> {
        let ChainFile { file, header, map, .. } = self.top();
        part(file, header.state, SnapshotPart::State, map.state, decode_part)
    }

    /// Returns every page that may have content, which are the pages of all tables that were
    /// written. The call reads no table, so its duration hardly depends on the size of the guest.
    pub(super) fn missing_pages(&self) -> PageSet {
        let mut missing = PageSet::empty(&self.layout);
        for (position, place) in self.places().iter().enumerate() {
            let Some(map) = missing.region_mut(place.id) else { continue };
            for block in (0..place.blocks()).filter(|block| self.has_block(position, *block)) {
                map.set_range(place.run(block).range());
            }
        }
        missing
    }

    /// Returns true if a page of the block may have content.
    pub(super) fn has_block(&self, position: usize, block: u64) -> bool {
        self.files.iter().any(|file| file.indexes[position].table(block).is_some())
    }

    /// Reads the tables of the block of the region at `position`. Returns `None` if no page of the
    /// block has content.
    pub(super) fn block(&self, position: usize, block: u64) -> Result<Option<BlockPages>, RestoreError> {
        let slots = usize::try_from(self.places()[position].run(block).count).unwrap_or(TABLE_PAGES);
        let mut pages = BlockPages { table: PageTable::default(), files: [0; TABLE_PAGES] };
        let (mut found, mut left) = ([false; TABLE_PAGES], slots);
        for (number, file) in (0..).zip(&self.files) {
            if left == 0 {
                break;
            }
            let table = file.table(position, block).map_err(|error| self.of_file(number, error))?;
            let Some(table) = table else { continue };
            for (slot, found) in found.iter_mut().enumerate().take(slots) {
                if !*found && table.entry(slot) != PageEntry::Base {
                    (*found, left) = (true, left - 1);
                    pages.table.copy_entry(slot, &table);
                    pages.files[slot] = number;
                }
            }
        }
        // A page that was not found has no table in the last file, which is complete: it is zero.
        Ok((pages.contents() > 0).then_some(pages))
    }

    /// Reads pages, of which `first` is the first, directly into the guest memory `to`, and checks
    /// them against their digests in `block`. If a page does not match its digest, the result is an
    /// error, and the page is nevertheless in memory. All of the pages must have content.
    pub(super) fn read_into(
        &self,
        position: usize,
        first: PageIndex,
        to: Window<'_>,
        block: &BlockPages,
        scratch: &mut [u8; PAGE_BYTES],
    ) -> Result<(), RestoreError> {
        self.each_part(position, first, to.pages(), block, |file, pages| {
            let start = PageIndex(first.0 + pages.start as u64);
            let part = to.slice(pages.start, pages.len());
            pio::read_at(&file.file, part, file.map.regions[position].content(start))
                .map_err(|source| file.unreadable(position, start, source))?;
            // The digests are computed backwards, because the bytes that were read last are still
            // in the cache. In forward order, they would be evicted before their digest is
            // computed.
            for page in pages.rev() {
                let index = PageIndex(first.0 + page as u64);
                if !block.fits(slot(index), to.digest(page, scratch)) {
                    return Err(file.damaged(position, index));
                }
            }
            Ok(())
        })
    }

    /// Reads pages, of which `first` is the first, into `to`, and checks them like
    /// [`read_into`](Self::read_into). All of the pages must have content.
    pub(super) fn read(
        &self,
        position: usize,
        first: PageIndex,
        to: &mut [u8],
        block: &BlockPages,
    ) -> Result<(), RestoreError> {
        self.each_part(position, first, to.len() / PAGE_BYTES, block, |file, pages| {
            let start = PageIndex(first.0 + pages.start as u64);
            let part = &mut to[pages.start * PAGE_BYTES..pages.end * PAGE_BYTES];
            let read = file.file.read_exact_at(part, file.map.regions[position].content(start));
            read.map_err(|source| file.unreadable(position, start, source))?;
            for (index, page) in (start.0..).map(PageIndex).zip(part.chunks_exact(PAGE_BYTES)) {
                if !block.fits(slot(index), Some(PageDigest::of(page))) {
                    return Err(file.damaged(position, index));
                }
            }
            Ok(())
        })
    }

    /// Calls `read` for each part of the `count` pages from `first` on that is in one file, with
    /// the numbers of the pages counted from `first`.
    fn each_part(
        &self,
        position: usize,
        first: PageIndex,
        count: usize,
        block: &BlockPages,
        mut read: impl FnMut(&ChainFile, Range<usize>) -> Result<(), RestoreError>,
    ) -> Result<(), RestoreError> {
        debug_assert!(slot(first) + count <= TABLE_PAGES, "the pages of {position} are of one block");
        let mut at = 0;
        while at < count {
            let length = block.together(slot(first) + at..slot(first) + count);
            let number = block.files[slot(first) + at];
            read(&self.files[usize::from(number)], at..at + length)
                .map_err(|error| self.of_file(number, error))?;
            at += length;
        }
        Ok(())
    }

    /// Returns `error` with the name of the file, unless that is the file which the user has named.
    fn of_file(&self, number: u8, error: RestoreError) -> RestoreError {
        let above = usize::from(number).checked_sub(1).and_then(|above| self.files.get(above));
        match above.and_then(|above| above.header.base.as_ref()) {
            Some(base) => {
                RestoreError::Base { name: base.name.to_string(), why: format!("and there {error}") }
            }
            None => error,
        }
    }

    /// Tells the kernel that the contents of the pages of `run` will be read soon.
    pub(super) fn will_need(&self, position: usize, run: PageRun) {
        // Of the pages of a chain, it is not known which file has them. A hint for all files would
        // fill the cache with the pages of holes.
        if self.is_complete() {
            pio::will_need(&self.top().file, self.places()[position].content(run.first), run.bytes());
        }
    }
}

/// Returns the index of a page in its table.
pub(super) fn slot(page: PageIndex) -> usize {
    usize::try_from(page.0 % TABLE_PAGES as u64).unwrap_or(0)
}

/// Returns the path of a base of the snapshot at `path`.
fn base_path(path: &Path, name: &BaseName) -> PathBuf {
    path.with_file_name(OsStr::from_bytes(name.as_bytes()))
}

/// Returns the id of the snapshot in the file at `path`.
pub(super) fn id_of(path: &Path) -> Result<MigrationId, RestoreError> {
    let read = |source| RestoreError::Read { part: SnapshotPart::Header, at: 0, source };
    Ok(read_header(&File::open(path).map_err(read)?)?.0.id)
}

/// Returns the paths of the files that the snapshot at `path` is based on, as far as they can be
/// read: its base, the base of that, and so on. A process that confines itself before it restores
/// the snapshot must keep the right to read them.
#[must_use]
pub fn snapshot_bases(path: &Path) -> Vec<PathBuf> {
    let mut bases: Vec<PathBuf> = Vec::new();
    while bases.len() < MOST_FILES {
        let last = bases.last().map_or(path, PathBuf::as_path);
        let header = File::open(last).ok().and_then(|file| read_header(&file).ok());
        let Some((SnapshotHeader { base: Some(base), .. }, _)) = header else { break };
        bases.push(base_path(path, &base.name));
    }
    bases
}

/// Reads and checks the header of `file`.
fn read_header(file: &File) -> Result<(SnapshotHeader, SnapshotMap), RestoreError> {
    let read = |source| RestoreError::Read { part: SnapshotPart::Header, at: 0, source };
    let len = file.metadata().map_err(read)?.len();
    let mut bytes = [0; SNAPSHOT_HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => too_short(file, len).into(),
        _ => read(error),
    })?;
    Ok(SnapshotHeader::decode(&bytes, len)?)
}

/// Returns the error for a file that is shorter than a header. If the file does not start like a
/// snapshot, an error about its first bytes is more helpful than one about its length.
fn too_short(file: &File, len: u64) -> SnapshotError {
    let mut bytes = [0; SNAPSHOT_HEADER_BYTES];
    let _ = file.read_at(&mut bytes, 0);
    match SnapshotHeader::decode(&bytes, len) {
        Err(error @ SnapshotError::Foreign(first)) if len >= first.len() as u64 => error,
        _ => SnapshotError::Length { has: len, wants: SNAPSHOT_HEADER_BYTES as u64 },
    }
}

/// Reads and decodes a part of the file. The caller has checked the length of the part.
fn part<T>(
    file: &File,
    sum: PartSum,
    part: SnapshotPart,
    at: u64,
    decode: impl Fn(&[u8], PartSum, SnapshotPart, u64) -> Result<T, SnapshotError>,
) -> Result<T, RestoreError> {
    let mut bytes = vec![0; usize::try_from(sum.bytes).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, at).map_err(|source| RestoreError::Read { part, at, source })?;
    Ok(decode(&bytes, sum, part, at)?)
}

/// Opens the snapshot at `path`, which must belong to `expected` if that is given.
pub(super) fn open_at(path: &Path, expected: Option<Expected<'_>>) -> Result<SnapshotPages, MigrateError> {
    let uri = super::uri(path);
    let file = File::open(path).map_err(|source| MigrateError::File { uri: uri.clone(), source })?;
    SnapshotPages::open(path, file, expected).map_err(|source| MigrateError::Snapshot { uri, source })
}

/// Opens the snapshot at `path` for the guest of `vm`.
pub(super) fn open(path: &Path, vm: &dyn TargetVm) -> Result<SnapshotPages, MigrateError> {
    warn_if_panics_abort();
    let (machine, memory) = (vm.config(), vm.memory());
    open_at(path, Some(Expected { machine: &machine, layout: memory.layout() }))
}
