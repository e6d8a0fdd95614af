//! Opened snapshot file: the description of the machine, the device state and the pages of the
//! guest.

use super::pio;
use crate::vm::warn_if_panics_abort;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vmferry_core::{
    Layout, MachineConfig, PAGE_BYTES, PageDigest, PageIndex, PageRun, PageSet, Section, TargetVm, VmError,
    Window,
};
use vmferry_wire::{
    MigrationId, PageTable, PartSum, RegionOffsets, SNAPSHOT_HEADER_BYTES, SnapshotError, SnapshotHeader,
    SnapshotMap, SnapshotPart, TABLE_BYTES, TABLE_PAGES, TableIndex, decode_part,
};

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
    /// The VMM returned an error.
    #[error("{0}")]
    Vm(#[from] VmError),
}

/// Snapshot that fits the machine of the VM. Its pages are read on request.
#[derive(Debug)]
pub(super) struct SnapshotPages {
    file: File,
    header: SnapshotHeader,
    map: SnapshotMap,
    layout: Layout,
    /// Indexes of the regions, in the order of the map.
    indexes: Vec<TableIndex>,
}

impl SnapshotPages {
    /// Reads the metadata of `file`, and compares the machine of the snapshot with the machine of
    /// `vm`, which is to receive the guest.
    ///
    /// The indexes are read only after the layouts were compared. Therefore the layout of `vm`
    /// bounds the size of all allocations, whatever the file contains.
    pub(super) fn open(file: File, vm: &dyn TargetVm) -> Result<Self, RestoreError> {
        let read = |source| RestoreError::Read { part: SnapshotPart::Header, at: 0, source };
        let len = file.metadata().map_err(read)?.len();
        let mut bytes = [0; SNAPSHOT_HEADER_BYTES];
        file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => too_short(&file, len).into(),
            _ => read(error),
        })?;
        let (header, map) = SnapshotHeader::decode(&bytes, len)?;
        let machine: MachineConfig =
            part(&file, header.machine, SnapshotPart::Machine, map.machine, decode_part)?;
        if let Some(difference) = vm.config().difference(&machine) {
            return Err(RestoreError::Machine(difference));
        }
        let layout = header.layout()?;
        if &layout != vm.memory().layout() {
            return Err(RestoreError::Machine("the memory of this VM differs from its description".into()));
        }
        let mut indexes = Vec::with_capacity(map.regions.len());
        for (place, region) in map.regions.iter().zip(&header.regions) {
            let (bytes, name) = (u32::try_from(place.index_bytes()), SnapshotPart::Index(place.id));
            let sum = PartSum { bytes: bytes.unwrap_or(u32::MAX), sum: region.index_sum };
            let decode = |bytes: &[u8], sum: PartSum, _, at| TableIndex::decode(bytes, sum.sum, place.id, at);
            indexes.push(part(&file, sum, name, place.index, decode)?);
        }
        Ok(Self { file, header, map, layout, indexes })
    }

    pub(super) fn id(&self) -> MigrationId {
        self.header.id
    }

    pub(super) fn is_copy(&self) -> bool {
        self.header.copy
    }

    pub(super) fn places(&self) -> &[RegionOffsets] {
        &self.map.regions
    }

    /// Returns the number of pages with content according to the header.
    pub(super) fn contents(&self) -> u64 {
        // The sum does not overflow: each number is at most the number of pages of its region.
        self.header.regions.iter().map(|region| region.contents).sum()
    }

    /// Returns the device state.
    pub(super) fn sections(&self) -> Result<Vec<Section>, RestoreError> {
        part(&self.file, self.header.state, SnapshotPart::State, self.map.state, decode_part)
    }

    /// Returns every page that may have content, which are the pages of all tables that were
    /// written. The call reads no table, so its duration hardly depends on the size of the guest.
    pub(super) fn missing_pages(&self) -> PageSet {
        let mut missing = PageSet::empty(&self.layout);
        for (place, index) in self.map.regions.iter().zip(&self.indexes) {
            let Some(map) = missing.region_mut(place.id) else { continue };
            for block in (0..place.blocks()).filter(|block| index.table(*block).is_some()) {
                map.set_range(place.run(block).range());
            }
        }
        missing
    }

    /// Reads table `block` of the region at `position`. Returns `None` if no page of the table has
    /// content.
    pub(super) fn table(&self, position: usize, block: u64) -> Result<Option<PageTable>, RestoreError> {
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
        Ok(Some(PageTable::decode(&bytes, sum, (place.id, run.first, pages), at)?))
    }

    /// Reads pages, of which `first` is the first, directly into the guest memory `to`, and checks
    /// them against their digests in `table`. If a page does not match its digest, the result is an
    /// error, and the page is nevertheless in memory.
    pub(super) fn read_into(
        &self,
        position: usize,
        first: PageIndex,
        to: Window<'_>,
        table: &PageTable,
        scratch: &mut [u8; PAGE_BYTES],
    ) -> Result<(), RestoreError> {
        let place = &self.map.regions[position];
        pio::read_at(&self.file, to, place.content(first))
            .map_err(|source| unreadable(place, first, source))?;
        // The digests are computed backwards, because the bytes that were read last are still in
        // the cache. In forward order, they would be evicted before their digest is computed.
        for page in (0..to.pages()).rev() {
            let index = PageIndex(first.0 + page as u64);
            if !table.fits(slot(index), to.digest(page, scratch)) {
                return Err(damaged(place, index));
            }
        }
        Ok(())
    }

    /// Reads pages, of which `first` is the first, into `to`, and checks them like
    /// [`read_into`](Self::read_into). All of the pages must have content.
    pub(super) fn read(
        &self,
        position: usize,
        first: PageIndex,
        to: &mut [u8],
        table: &PageTable,
    ) -> Result<(), RestoreError> {
        let place = &self.map.regions[position];
        let read = self.file.read_exact_at(to, place.content(first));
        read.map_err(|source| unreadable(place, first, source))?;
        for (index, page) in (first.0..).map(PageIndex).zip(to.chunks_exact(PAGE_BYTES)) {
            if !table.fits(slot(index), Some(PageDigest::of(page))) {
                return Err(damaged(place, index));
            }
        }
        Ok(())
    }

    /// Tells the kernel that the contents of the pages of `run` will be read soon.
    pub(super) fn will_need(&self, position: usize, run: PageRun) {
        pio::will_need(&self.file, self.map.regions[position].content(run.first), run.bytes());
    }
}

/// Returns the index of a page in its table.
pub(super) fn slot(page: PageIndex) -> usize {
    usize::try_from(page.0 % TABLE_PAGES as u64).unwrap_or(0)
}

fn damaged(place: &RegionOffsets, page: PageIndex) -> RestoreError {
    SnapshotError::Damaged { part: SnapshotPart::Page(place.id, page), at: place.content(page) }.into()
}

fn unreadable(place: &RegionOffsets, page: PageIndex, source: io::Error) -> RestoreError {
    RestoreError::Read { part: SnapshotPart::Page(place.id, page), at: place.content(page), source }
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

/// Opens the file at `path` for the guest of `vm`.
pub(super) fn open(path: &Path, vm: &dyn TargetVm) -> Result<SnapshotPages, crate::MigrateError> {
    warn_if_panics_abort();
    let uri = super::uri(path);
    let file = File::open(path).map_err(|source| crate::MigrateError::File { uri: uri.clone(), source })?;
    SnapshotPages::open(file, vm).map_err(|source| crate::MigrateError::Snapshot { uri, source })
}
