//! Modified snapshot file, and both ways to restore a guest from it.

use super::memory::{Memory, layout};
use crate::known::{KnownPages, PageHash};
use crate::snapshot::{FillState, restore, restore_on_demand};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{
    DemandPaging, GuestMemory, MachineConfig, Migratable, PAGE_BYTES, PageDigest, PageIndex, PageRun, Region,
    RegionId, RunState, Section, TargetVm, VmError,
};
use vmferry_wire::{
    BaseName, MigrationId, PageTable, PartSum, SNAPSHOT_HEADER_BYTES, SnapshotBase, SnapshotHeader,
    SnapshotMap, SnapshotRegion, TABLE_BYTES, TABLE_PAGES, TableIndex, TableKind, encode_machine,
    encode_state, hostile,
};

/// Number of pages of each region, by its number. The first region has two tables.
const REGIONS: [(u32, u64); 2] = [(0, 600), (3, 9)];
/// Pages with content, with the position of their region.
const CONTENTS: [(usize, u64); 5] = [(0, 0), (0, 1), (0, 599), (1, 2), (1, 8)];
/// Flag: checksums and lengths are corrected.
const MEND: u8 = 1;
/// Flag: the guest runs before its pages are present.
const LAZY: u8 = 2;
/// Flag: the file ends early.
const CUT: u8 = 4;
/// Flag: the file is an increment of a valid file.
const INCREMENT: u8 = 8;
/// Pages with content that an increment leaves to its base.
const IN_BASE: [(usize, u64); 2] = [(0, 1), (1, 8)];
/// Word of a page of the base in a table of an increment.
const BASE_WORD: u64 = u64::MAX;
/// Maximum number of changes. Bytes behind them are ignored.
const CHANGES: usize = 64;
/// Maximum number of bytes by which a part may grow.
const GROWTH: usize = 4096;

/// Machine that accepts any state of a known version.
struct Machine {
    config: MachineConfig,
    memory: Arc<Memory>,
    started: bool,
}

impl Machine {
    fn new(regions: &[Region]) -> Self {
        let config = MachineConfig {
            kind: "hostile".into(),
            vcpus: 2,
            regions: regions.to_vec(),
            extra: vec![("a".into(), "b".into())],
            features: vec!["one".into(), "two".into()],
        };
        Self { config, memory: Arc::new(Memory::new(regions)), started: false }
    }
}

impl Migratable for Machine {
    fn config(&self) -> MachineConfig {
        self.config.clone()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }
}

impl TargetVm for Machine {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        Ok(Arc::clone(&self.memory) as _)
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        if sections.iter().any(|section| section.version > 9) {
            return Err(VmError::new("an unknown version"));
        }
        Ok(())
    }

    fn start(&mut self, _: RunState) -> Result<(), VmError> {
        self.started = true;
        Ok(())
    }
}

fn content(position: usize, page: u64) -> [u8; PAGE_BYTES] {
    [u8::try_from(1 + page % 200).unwrap_or(1) ^ u8::try_from(position).unwrap_or(0) << 7; PAGE_BYTES]
}

/// Parts of a file, before they have offsets.
struct Parts {
    header: [u8; SNAPSHOT_HEADER_BYTES],
    machine: Vec<u8>,
    state: Vec<u8>,
    /// Indexes and tables of each region.
    indexes: Vec<Vec<u8>>,
    tables: Vec<Vec<[u8; TABLE_BYTES]>>,
    pages: Vec<(usize, u64, [u8; PAGE_BYTES])>,
    kind: TableKind,
}

impl Parts {
    /// Returns the parts of a valid file, which is an increment if `base` is given.
    fn new(config: &MachineConfig, base: Option<SnapshotBase>) -> Self {
        let kind = if base.is_some() { TableKind::Increment } else { TableKind::Complete };
        let in_base = |page: &(usize, u64)| base.is_some() && IN_BASE.contains(page);
        let section = Section { name: "cpu".into(), instance: 1, version: 1, payload: vec![5; 70] };
        let (machine, machine_sum) = encode_machine(config).expect("small");
        let (state, state_sum) = encode_state(&[section.clone(), section]).expect("small");
        let here: Vec<_> = CONTENTS.iter().filter(|page| !in_base(page)).collect();
        let pages = here.iter().map(|(at, page)| (*at, *page, content(*at, *page))).collect();
        let (mut regions, mut indexes, mut tables) = (vec![], vec![], vec![]);
        for (position, region) in config.regions.iter().enumerate() {
            let (mut words, mut own) = (vec![], vec![]);
            for block in 0..region.pages().div_ceil(TABLE_PAGES as u64) {
                let first = block * TABLE_PAGES as u64;
                let mut table = PageTable::new(kind);
                for page in (first..region.pages().min(first + TABLE_PAGES as u64))
                    .filter(|page| !in_base(&(position, *page)))
                {
                    let slot = usize::try_from(page - first).expect("small");
                    let digest = || PageDigest::of(&content(position, page));
                    table.set(slot, CONTENTS.contains(&(position, page)).then(digest));
                }
                let (bytes, sum) = table.encode().unwrap_or(([0; TABLE_BYTES], 0));
                words.push(sum);
                own.push(bytes);
            }
            let (bytes, index_sum) = TableIndex::new(words).encode();
            let contents = CONTENTS.iter().filter(|(at, _)| *at == position).count() as u64;
            regions.push(SnapshotRegion { region: *region, index_sum, contents });
            indexes.push(bytes);
            tables.push(own);
        }
        let header = SnapshotHeader {
            id: MigrationId([7; 16]),
            copy: false,
            base,
            machine: machine_sum,
            state: state_sum,
            regions,
        };
        let header = header.encode().expect("a layout");
        Self { header, machine, state, indexes, tables, pages, kind }
    }

    /// Makes the change that the next bytes describe. Returns false if no bytes are left.
    fn change(&mut self, bytes: &mut &[u8]) -> bool {
        let Some((&[part, low, high, len], rest)) = bytes.split_first_chunk::<4>() else { return false };
        let (change, rest) = rest.split_at(rest.len().min(usize::from(len % 64)));
        *bytes = rest;
        let at = usize::from(u16::from_le_bytes([low, high]));
        let tables: usize = self.tables.iter().map(Vec::len).sum();
        match usize::from(part) % 16 {
            // Most bytes of a header are zeros. Most changes of the header therefore affect the
            // part that has fields.
            0 => put(&mut self.header, at, change),
            1..=3 => put(&mut self.header, 8 + at % 150, change),
            4 | 5 => grow(&mut self.machine, at, change),
            6..=8 => grow(&mut self.state, at, change),
            9 | 10 => {
                let position = at % self.indexes.len();
                put(&mut self.indexes[position], at / 2, change);
            }
            11..=13 => {
                let table = at % tables;
                let table = self.tables.iter_mut().flatten().nth(table).expect("as many as there are");
                put(table, at / tables, change);
            }
            _ => {
                let page = at % self.pages.len();
                put(&mut self.pages[page].2, at, change);
            }
        }
        true
    }

    /// Corrects what an attacker who changes a file would correct: each checksum, and the length of
    /// each part.
    fn mend(&mut self) {
        for (position, tables) in self.tables.iter().enumerate() {
            for (block, table) in tables.iter().enumerate() {
                let unwritten = if self.kind == TableKind::Increment { 0xff } else { 0 };
                let empty = table.iter().all(|byte| *byte == unwritten);
                let word = if empty { 0 } else { hostile::part_sum(table).max(1) };
                put(&mut self.indexes[position], 8 * block, &word.to_le_bytes());
            }
            let sum = hostile::part_sum(&self.indexes[position]);
            put(&mut self.header, 72 + 40 * position + 24, &sum.to_le_bytes());
        }
        for (len_at, sum_at, part) in [(48, 56, &self.machine), (52, 64, &self.state)] {
            let len = u32::try_from(part.len()).expect("small");
            put(&mut self.header, len_at, &len.to_le_bytes());
            put(&mut self.header, sum_at, &hostile::part_sum(part).to_le_bytes());
        }
        hostile::seal_snapshot(&mut self.header);
    }

    /// Writes all parts at their offsets.
    fn write(&mut self, regions: &[Region], mend: bool, cut: Option<u64>) -> File {
        let sizes = [&self.machine, &self.state].map(|part| u32::try_from(part.len()).expect("small"));
        let sum = |bytes| PartSum { bytes, sum: 0 };
        let entries =
            regions.iter().map(|region| SnapshotRegion { region: *region, index_sum: 0, contents: 0 });
        let header = SnapshotHeader {
            id: MigrationId([0; 16]),
            copy: false,
            base: None,
            machine: sum(sizes[0]),
            state: sum(sizes[1]),
            regions: entries.collect(),
        };
        let map = SnapshotMap::new(&header.layout().expect("ours"), sizes[0], sizes[1]);
        if mend {
            put(&mut self.header, 40, &map.len.to_le_bytes());
            hostile::seal_snapshot(&mut self.header);
        }
        let file = memory_file();
        file.set_len(map.len).expect("a file");
        let put = |bytes: &[u8], at| file.write_all_at(bytes, at).expect("a file");
        put(&self.header, 0);
        put(&self.machine, map.machine);
        put(&self.state, map.state);
        for (position, place) in map.regions.iter().enumerate() {
            put(&self.indexes[position], place.index);
            for (block, table) in (0..).zip(&self.tables[position]) {
                put(table, place.table(block));
            }
        }
        for (position, page, bytes) in &self.pages {
            put(bytes, map.regions[*position].content(PageIndex(*page)));
        }
        if let Some(cut) = cut {
            file.set_len(cut.min(map.len)).expect("a file");
        }
        file
    }
}

fn put(bytes: &mut [u8], at: usize, change: &[u8]) {
    let at = at % bytes.len();
    let len = change.len().min(bytes.len() - at);
    bytes[at..at + len].copy_from_slice(&change[..len]);
}

/// Overwrites bytes, inserts bytes, or truncates.
fn grow(bytes: &mut Vec<u8>, at: usize, change: &[u8]) {
    let (kind, at) = (at % 3, at / 3 % (bytes.len() + 1));
    match kind {
        0 if !bytes.is_empty() => put(bytes, at, change),
        1 if bytes.len() < GROWTH => drop(bytes.splice(at..at, change.iter().copied())),
        _ => bytes.truncate(at),
    }
}

fn memory_file() -> File {
    // SAFETY: the name ends with a zero. The descriptor is new and has no other owner.
    unsafe {
        let fd = libc::memfd_create(c"snapshot".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "a file in memory: {}", std::io::Error::last_os_error());
        File::from_raw_fd(fd)
    }
}

/// Restores a guest from a valid file, or a valid increment, with the changes that `bytes`
/// describe. The first byte has flags.
///
/// # Panics
/// If a guest is started whose memory differs from the tables of the file, or from a changed file
/// whose checksums do not match. A write outside guest memory ends the process.
pub fn drive_snapshot(bytes: &[u8]) {
    let Some((flags, mut rest)) = bytes.split_first() else { return };
    let regions = layout(&REGIONS);
    let mut vm = Machine::new(&regions);
    // The base is found in the folder of the file: that of the descriptors of this process.
    let base_file = Parts::new(&vm.config, None).write(&regions, false, None);
    let base = SnapshotBase {
        id: MigrationId([7; 16]),
        name: BaseName::new(base_file.as_raw_fd().to_string().as_bytes()).expect("a name"),
    };
    let mut parts = Parts::new(&vm.config, (flags & INCREMENT != 0).then_some(base));
    let cut = (flags & CUT != 0).then(|| first(&mut rest) * 1024);
    let mut changes = 0;
    while changes < CHANGES && parts.change(&mut rest) {
        changes += 1;
    }
    if flags & MEND != 0 {
        parts.mend();
    }
    let file = parts.write(&regions, flags & MEND != 0, cut);
    check_known(&file);
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if flags & LAZY == 0 {
        let restored = restore(&mut vm, &path);
        assert_eq!(restored.is_ok(), vm.started, "{restored:?}");
    } else if let Ok(filling) = restore_on_demand(&mut vm, &path) {
        assert!(vm.started);
        let end = filling.wait(Duration::from_secs(10));
        assert_ne!(end.state, FillState::Filling, "it comes to an end: {end:?}");
        if end.state != FillState::Completed {
            return;
        }
    }
    if vm.started {
        check(&vm.memory, &parts);
    }
}

/// Looks up the pages of the valid file among those of `file`.
fn check_known(file: &File) {
    let file = file.try_clone().expect("a descriptor");
    let known = KnownPages::index(vec![("file".into(), file)]).expect("a readable file");
    let pages = CONTENTS.map(|(position, page)| content(position, page));
    let wanted = pages.map(|page| (PageDigest::of(&page), PageHash::of(&page)));
    let mut found = [[0; PAGE_BYTES]; CONTENTS.len()];
    let is_known = known.find(&wanted, &mut found);
    for ((is_known, found), page) in is_known.into_iter().zip(&found).zip(&pages) {
        assert!(!is_known || found == page, "a known page has another content");
    }
}

/// Checks that each page is what its table says.
fn check(memory: &Memory, parts: &Parts) {
    let mut scratch = Box::new([0; PAGE_BYTES]);
    for ((position, (id, pages)), tables) in REGIONS.iter().enumerate().zip(&parts.tables) {
        let window = memory.window(RegionId(*id), PageRun::from(0..*pages)).expect("a region");
        for (page, word) in tables.as_flattened().chunks_exact(8).enumerate().take(window.pages()) {
            let want = match u64::from_le_bytes(word.try_into().expect("a word")) {
                BASE_WORD if parts.kind == TableKind::Increment => digest_in_base(position, page as u64),
                word => word,
            };
            let digest = window.digest(page, &mut scratch).map_or(0, |digest| digest.0.max(1));
            assert_eq!(digest, want, "page {page} of region {position}");
        }
    }
}

/// Returns the word of a page in the table of the base.
fn digest_in_base(position: usize, page: u64) -> u64 {
    let has_content = CONTENTS.contains(&(position, page));
    if has_content { PageDigest::of(&content(position, page)).0.max(1) } else { 0 }
}

/// Returns the next byte and removes it.
fn first(bytes: &mut &[u8]) -> u64 {
    let Some((first, rest)) = bytes.split_first() else { return 0 };
    *bytes = rest;
    u64::from(*first)
}
