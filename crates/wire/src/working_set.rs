//! Working set of a guest: the pages of a snapshot that a guest used after its start, in the order
//! in which it used them.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0 to 7 | `VMFWSET\n` |
//! | 8 to 9 | version of the format, 1 |
//! | 10 to 15 | 0 |
//! | 16 to 31 | id of the snapshot |
//! | 32 to 39 | number of runs |
//! | 16 for each run | id of the region (4 bytes), number of pages (4 bytes), first page (8 bytes) |
//! | last 8 | checksum of all bytes before it |
//!
//! A file with a working set is not trusted, just as a snapshot is not. A wrong working set changes
//! only the time at which pages are read, never their content.

use crate::{Fields, MigrationId, crc};
use vmferry_core::{Layout, PageIndex, PageRun, PageSet, RegionId};

const MAGIC: [u8; 8] = *b"VMFWSET\n";
const VERSION: u16 = 1;
const FIXED_BYTES: usize = 40;
const RUN_BYTES: usize = 16;
const SUM_BYTES: usize = 8;
/// Maximum number of runs of a working set.
pub const MAX_WORKING_SET_RUNS: usize = 1 << 22;
/// Maximum length of an encoded working set in bytes.
pub const MAX_WORKING_SET_BYTES: usize = FIXED_BYTES + MAX_WORKING_SET_RUNS * RUN_BYTES + SUM_BYTES;

/// Reason why a working set cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkingSetError {
    /// There are no bytes: the recording has not ended, or its process was killed.
    #[error("it is empty: the recording has not ended, or its process was killed")]
    Empty,
    /// The first bytes are not those of a working set.
    #[error("this is not a working set (its first bytes are {0:02x?})")]
    Foreign([u8; 8]),
    /// The format has another version.
    #[error("the working set is of version {0}, this vmferry reads version {VERSION}")]
    Version(u16),
    /// The length differs from that of the number of runs.
    #[error("the working set has {has} bytes, and its {runs} runs need another number")]
    Length {
        /// Length in bytes.
        has: usize,
        /// Number of runs.
        runs: u64,
    },
    /// The working set is larger than the format allows.
    #[error("the working set has more than {MAX_WORKING_SET_BYTES} bytes")]
    TooLarge,
    /// The checksum is wrong.
    #[error("the working set is damaged (its checksum is wrong)")]
    Damaged,
    /// The working set belongs to another snapshot.
    #[error("the working set belongs to the snapshot {recorded}, and this is the snapshot {snapshot}")]
    OtherSnapshot {
        /// Id of the snapshot that the working set belongs to.
        recorded: MigrationId,
        /// Id of the snapshot that is restored.
        snapshot: MigrationId,
    },
    /// A run is empty, is not in the guest's memory, or has a page of an earlier run.
    #[error("the working set names {region} {run}, which the guest does not have or which it named before")]
    Run {
        /// Region of the run.
        region: RegionId,
        /// Pages of the run.
        run: PageRun,
    },
}

/// Pages that a guest used after its start from a snapshot, in the order in which it used them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkingSet {
    snapshot: MigrationId,
    runs: Vec<(RegionId, PageRun)>,
}

impl WorkingSet {
    /// Returns an empty working set of the snapshot with the id `snapshot`.
    #[must_use]
    pub fn new(snapshot: MigrationId) -> Self {
        Self { snapshot, runs: Vec::new() }
    }

    /// Returns the id of the snapshot.
    #[must_use]
    pub fn snapshot(&self) -> MigrationId {
        self.snapshot
    }

    /// Returns the runs in the order of their use.
    #[must_use]
    pub fn runs(&self) -> &[(RegionId, PageRun)] {
        &self.runs
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.runs.iter().fold(0, |pages, (_, run)| pages.saturating_add(run.count))
    }

    /// Adds the pages of `run`, which the guest used after all pages that were added before.
    /// Returns false if the working set is full. A part of the run may then be missing.
    pub fn push(&mut self, region: RegionId, run: PageRun) -> bool {
        let mut first = run.first.0;
        while first < run.end() {
            if self.runs.len() >= MAX_WORKING_SET_RUNS {
                return false;
            }
            let count = (run.end() - first).min(u64::from(u32::MAX));
            self.runs.push((region, PageRun::new(PageIndex(first), count)));
            first += count;
        }
        true
    }

    /// Encodes the working set.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + self.runs.len() * RUN_BYTES + SUM_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([0; 6]);
        bytes.extend(self.snapshot.0);
        bytes.extend((self.runs.len() as u64).to_le_bytes());
        for (region, run) in &self.runs {
            bytes.extend(region.0.to_le_bytes());
            // `push` has split longer runs.
            bytes.extend(u32::try_from(run.count).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend(run.first.0.to_le_bytes());
        }
        bytes.extend(crc(&bytes).to_le_bytes());
        bytes
    }

    /// Decodes a working set. The allocated memory is bounded by the length of `bytes`.
    ///
    /// # Errors
    /// Returns an error if the bytes are damaged, too many, or not a working set.
    pub fn decode(bytes: &[u8]) -> Result<Self, WorkingSetError> {
        if bytes.is_empty() {
            return Err(WorkingSetError::Empty);
        }
        let mut magic = [0; MAGIC.len()];
        magic.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
        if magic != MAGIC {
            return Err(WorkingSetError::Foreign(magic));
        }
        if bytes.len() > MAX_WORKING_SET_BYTES {
            return Err(WorkingSetError::TooLarge);
        }
        if bytes.len() < FIXED_BYTES + SUM_BYTES {
            return Err(WorkingSetError::Length { has: bytes.len(), runs: 0 });
        }
        let (body, sum) = bytes.split_at(bytes.len() - SUM_BYTES);
        let mut fields = Fields(body);
        let (_, version, _): ([u8; 8], _, [u8; 6]) = (fields.take(), fields.u16(), fields.take());
        if version != VERSION {
            return Err(WorkingSetError::Version(version));
        }
        let (snapshot, runs) = (MigrationId(fields.take()), fields.u64());
        let count = (body.len() - FIXED_BYTES) / RUN_BYTES;
        if !(body.len() - FIXED_BYTES).is_multiple_of(RUN_BYTES) || runs != count as u64 {
            return Err(WorkingSetError::Length { has: bytes.len(), runs });
        }
        if crc(body).to_le_bytes() != sum {
            return Err(WorkingSetError::Damaged);
        }
        let run = |_| {
            let (region, count) = (RegionId(fields.u32()), u64::from(fields.u32()));
            (region, PageRun::new(PageIndex(fields.u64()), count))
        };
        Ok(Self { snapshot, runs: (0..count).map(run).collect() })
    }

    /// Checks that the working set belongs to the snapshot with the id `snapshot` of a guest with
    /// the memory `layout`, and that no page occurs twice.
    ///
    /// # Errors
    /// Returns [`WorkingSetError::OtherSnapshot`] or [`WorkingSetError::Run`].
    pub fn check(&self, snapshot: MigrationId, layout: &Layout) -> Result<(), WorkingSetError> {
        if self.snapshot != snapshot {
            return Err(WorkingSetError::OtherSnapshot { recorded: self.snapshot, snapshot });
        }
        let mut named = PageSet::empty(layout);
        for (region, run) in &self.runs {
            let wrong = || WorkingSetError::Run { region: *region, run: *run };
            let end = run.first.0.checked_add(run.count).ok_or_else(wrong)?;
            let pages = named.region_mut(*region).ok_or_else(wrong)?;
            let fits = run.count > 0 && end <= pages.len();
            if !fits || pages.count_range(run.first.0..end) > 0 {
                return Err(wrong());
            }
            pages.set_range(run.first.0..end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_core::{Gpa, Region};

    const ID: MigrationId = MigrationId([7; 16]);

    fn layout() -> Layout {
        Layout::new(vec![
            Region { id: RegionId(0), gpa: Gpa(0), len: 100 << 12 },
            Region { id: RegionId(3), gpa: Gpa(1 << 32), len: 10 << 12 },
        ])
        .unwrap()
    }

    fn set(runs: &[(u32, std::ops::Range<u64>)]) -> WorkingSet {
        let mut set = WorkingSet::new(ID);
        for (region, run) in runs {
            assert!(set.push(RegionId(*region), run.clone().into()));
        }
        set
    }

    #[test]
    fn working_set_keeps_its_order() {
        let sent = set(&[(3, 9..10), (0, 50..100), (0, 0..1)]);
        let bytes = sent.encode();
        assert_eq!(bytes.len(), 40 + 3 * 16 + 8);
        let came = WorkingSet::decode(&bytes).unwrap();
        assert_eq!(came, sent);
        assert_eq!((came.snapshot(), came.pages()), (ID, 52));
        assert_eq!(came.runs()[0], (RegionId(3), PageRun::from(9..10)));
        came.check(ID, &layout()).unwrap();
        assert_eq!(WorkingSet::decode(&set(&[]).encode()), Ok(WorkingSet::new(ID)));
    }

    #[test]
    fn encoding_does_not_change() {
        let bytes = set(&[(3, 0x0102..0x0104)]).encode();
        let mut want = b"VMFWSET\n\x01\0\0\0\0\0\0\0".to_vec();
        want.extend([7; 16]);
        want.extend([1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        want.extend(crc(&want).to_le_bytes());
        assert_eq!(bytes, want);
    }

    #[test]
    fn long_runs_are_split() {
        let long = u64::from(u32::MAX) + 5;
        let split = set(&[(0, 0..long)]);
        assert_eq!(split.runs().len(), 2);
        assert_eq!(WorkingSet::decode(&split.encode()).unwrap().pages(), long);
    }

    #[test]
    fn changed_bytes_are_found() {
        let bytes = set(&[(0, 1..5), (3, 2..4)]).encode();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(WorkingSet::decode(&changed).is_err(), "byte {at}");
            assert!(WorkingSet::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(WorkingSet::decode(&[]), Err(WorkingSetError::Empty));
        assert_eq!(WorkingSet::decode(b"VMFSNAP\n and more"), Err(WorkingSetError::Foreign(*b"VMFSNAP\n")));
        let more = [&bytes[..], &[0; 16]].concat();
        assert!(matches!(WorkingSet::decode(&more), Err(WorkingSetError::Length { .. })));
        let mut newer = bytes.clone();
        newer[8] = 2;
        assert_eq!(WorkingSet::decode(&newer), Err(WorkingSetError::Version(2)));
    }

    #[test]
    fn sets_with_a_valid_checksum_are_checked() {
        let mut accepted = 0;
        for seed in 0..20_000_u64 {
            // A generator of numbers is enough: each number becomes one run.
            let mut next = seed;
            let mut number = || {
                next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                next >> 33
            };
            let mut bytes = WorkingSet::new(ID).encode();
            bytes.truncate(FIXED_BYTES);
            let runs = number() % 4;
            bytes[32..40].copy_from_slice(&runs.to_le_bytes());
            for _ in 0..runs {
                let pages = u32::try_from(number() % 40).unwrap();
                bytes.extend(u32::try_from(number() % 4).unwrap().to_le_bytes());
                bytes.extend(pages.to_le_bytes());
                bytes.extend((number() % 110).to_le_bytes());
            }
            bytes.extend(crc(&bytes).to_le_bytes());
            let set = WorkingSet::decode(&bytes).unwrap();
            let mut named = std::collections::BTreeSet::new();
            let valid = set.runs().iter().all(|(region, run)| {
                let have = layout().region(*region).map_or(0, Region::pages);
                run.count > 0 && run.range().all(|page| page < have && named.insert((region.0, page)))
            });
            assert_eq!(set.check(ID, &layout()).is_ok(), valid, "{set:?}");
            accepted += u32::from(valid);
        }
        assert!(accepted > 1000, "{accepted}");
    }

    #[test]
    fn larger_sets_than_the_format_allows_are_refused() {
        let mut bytes = set(&[]).encode();
        bytes.resize(MAX_WORKING_SET_BYTES + 1, 0);
        assert_eq!(WorkingSet::decode(&bytes), Err(WorkingSetError::TooLarge));
    }

    #[test]
    fn sets_of_other_guests_are_refused() {
        let other = MigrationId([8; 16]);
        let error = set(&[(0, 1..5)]).check(other, &layout()).unwrap_err();
        assert!(matches!(error, WorkingSetError::OtherSnapshot { .. }));
        assert!(error.to_string().contains(&other.to_string()), "{error}");
        for wrong in
            [vec![(1, 0..1)], vec![(3, 9..11)], vec![(0, 100..101)], vec![(0, 0..5), (3, 0..1), (0, 4..6)]]
        {
            let error = set(&wrong).check(ID, &layout());
            assert!(matches!(error, Err(WorkingSetError::Run { .. })), "{wrong:?}: {error:?}");
        }
        // Runs that `push` never makes.
        for (first, count) in [(5, 0), (u64::MAX, 1), (u64::MAX, 5)] {
            let run = (RegionId(0), PageRun::new(PageIndex(first), count));
            let wrong = WorkingSet { snapshot: ID, runs: vec![run] };
            assert!(wrong.check(ID, &layout()).is_err(), "{first} {count}");
        }
    }
}
