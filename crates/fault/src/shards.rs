//! Assignment of pages to shards, each with its own userfaultfd.
//!
//! A mapping belongs to one userfaultfd, and the kernel splits a mapping wherever the userfaultfd
//! changes (hazards.md 16). Therefore regions are cut into chunks, which are assigned to the shards
//! in turn. Chunks are as small as the limit on mappings permits, so that even a small working set
//! is spread over all shards.

use crate::error::FaultError;
use crate::region::PagedRegion;
use std::ops::Range;
use vmferry_core::{MAX_PAGES, MAX_REGIONS, PAGE_SHIFT, PAGE_SIZE, PageIndex, PageRun, RegionId};

/// Maximum number of chunks, and therefore of mappings that result from the split. Each chunk must
/// be registered during the guest's downtime, and the kernel allows a process 65530 mappings by
/// default.
const MAX_CHUNKS: u64 = 512;
/// Number of pages of the smallest chunk, as a binary logarithm. The chunk has 2 MiB, so that no
/// huge page belongs to two userfaultfds, before or after demand paging.
const MIN_CHUNK_SHIFT: u32 = 9;

/// Region with the number of its first chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardedRegion {
    pub(crate) id: RegionId,
    /// Address of the first byte.
    pub(crate) host: u64,
    pub(crate) pages: u64,
    /// Index of the region in the given list.
    pub(crate) position: usize,
    /// Number of the first chunk. Numbers continue from the previous region, so that small regions
    /// do not all start in shard 0.
    first_chunk: u64,
}

impl ShardedRegion {
    /// Returns the addresses of `run`, which lies in the region.
    pub(crate) fn span(&self, run: PageRun) -> Range<u64> {
        self.host + run.first.offset()..self.host + (run.end() << PAGE_SHIFT)
    }

    pub(crate) fn all(&self) -> PageRun {
        PageRun::from(0..self.pages)
    }
}

/// Mapping between addresses, pages and shards.
#[derive(Debug)]
pub(crate) struct ShardMap {
    count: usize,
    /// Number of pages of a chunk, as a binary logarithm.
    shift: u32,
    /// Regions, sorted by address.
    regions: Vec<ShardedRegion>,
}

impl ShardMap {
    /// Assigns `regions` to `count` shards, at least 1.
    pub(crate) fn new(regions: &[PagedRegion], count: usize) -> Result<Self, FaultError> {
        let mut regions: Vec<ShardedRegion> =
            regions.iter().enumerate().map(place).collect::<Result<_, _>>()?;
        let (number, pages) =
            (regions.len(), regions.iter().map(|place| place.pages).fold(0, u64::saturating_add));
        if regions.is_empty() || number > MAX_REGIONS || pages > MAX_PAGES {
            return Err(FaultError::Regions(format!("{number} regions of {pages} pages")));
        }
        regions.sort_by_key(|place| place.host);
        for pair in regions.windows(2) {
            if pair[0].span(pair[0].all()).end > pair[1].host {
                return Err(FaultError::Regions(format!("{} and {}", pair[0].id, pair[1].id)));
            }
        }
        for (index, place) in regions.iter().enumerate() {
            if regions[..index].iter().any(|other| other.id == place.id) {
                return Err(FaultError::Regions(format!("{} twice", place.id)));
            }
        }
        let chunks = |shift: u32| regions.iter().map(|place| place.pages.div_ceil(1 << shift)).sum::<u64>();
        let mut shift = if count > 1 { MIN_CHUNK_SHIFT } else { MAX_PAGES.ilog2() };
        // The loop ends: with a chunk longer than the longest region, the number of chunks is the
        // number of regions, and MAX_REGIONS < MAX_CHUNKS.
        while chunks(shift) > MAX_CHUNKS {
            shift += 1;
        }
        let mut first_chunk = 0;
        for place in &mut regions {
            place.first_chunk = first_chunk;
            first_chunk += place.pages.div_ceil(1 << shift);
        }
        Ok(Self { count: count.max(1), shift, regions })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the regions, sorted by address.
    pub(crate) fn regions(&self) -> &[ShardedRegion] {
        &self.regions
    }

    /// Returns the region with the id `id`.
    pub(crate) fn region(&self, id: RegionId) -> Result<&ShardedRegion, FaultError> {
        self.regions.iter().find(|place| place.id == id).ok_or(FaultError::NoRegion(id))
    }

    /// Returns the region with the id `id` if it has the pages of `run`.
    pub(crate) fn with_pages(&self, id: RegionId, run: PageRun) -> Result<&ShardedRegion, FaultError> {
        let place = self.region(id)?;
        if run.end() > place.pages {
            return Err(FaultError::NoPages { region: id, have: place.pages, run });
        }
        Ok(place)
    }

    /// Returns the shard of `page` in `place`.
    pub(crate) fn shard(&self, place: &ShardedRegion, page: u64) -> usize {
        let chunk = place.first_chunk + (page >> self.shift);
        // The remainder is below `count`, a usize.
        usize::try_from(chunk % self.count as u64).unwrap_or(0)
    }

    /// Returns the region and the page at `address`, found by bisection over at most
    /// [`MAX_REGIONS`] regions.
    pub(crate) fn locate(&self, address: u64) -> Option<(&ShardedRegion, PageIndex)> {
        let after = self.regions.partition_point(|place| place.host <= address);
        let place = &self.regions[after.checked_sub(1)?];
        let page = (address - place.host) >> PAGE_SHIFT;
        (page < place.pages).then_some((place, PageIndex(page)))
    }

    /// Returns `run`, which lies in `place`, cut where the shard changes.
    pub(crate) fn parts(
        &self,
        place: &ShardedRegion,
        run: PageRun,
    ) -> impl Iterator<Item = (usize, PageRun)> + use<> {
        let (shift, count, first_chunk) = (self.shift, self.count as u64, place.first_chunk);
        let (mut at, end) = (run.first.0, run.end());
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let chunk = at >> shift;
            let upto = if count == 1 { end } else { ((chunk + 1) << shift).min(end) };
            let part = PageRun::from(at..upto);
            at = upto;
            Some((usize::try_from((first_chunk + chunk) % count).unwrap_or(0), part))
        })
    }
}

fn place((position, region): (usize, &PagedRegion)) -> Result<ShardedRegion, FaultError> {
    let whole = region.len != 0
        && region.len.is_multiple_of(PAGE_SIZE)
        && region.host.is_multiple_of(PAGE_SIZE)
        && region.host.checked_add(region.len).is_some_and(|end| i64::try_from(end).is_ok());
    if !whole {
        return Err(FaultError::Regions(format!(
            "{} of {} bytes at {:#x}",
            region.id, region.len, region.host
        )));
    }
    Ok(ShardedRegion {
        id: region.id,
        host: region.host,
        pages: region.len >> PAGE_SHIFT,
        position,
        first_chunk: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;
    use proptest::prelude::*;

    fn region(id: u32, host: u64, pages: u64) -> PagedRegion {
        PagedRegion { id: RegionId(id), host, len: pages * PAGE_SIZE, backing: Backing::Anonymous }
    }

    /// Returns regions with the given gaps before them and the given sizes, both in pages. The ids
    /// count down, the addresses up.
    fn regions(sizes: &[(u64, u64)]) -> Vec<PagedRegion> {
        let mut at = 1 << 20;
        let mut regions = Vec::new();
        for (index, (gap, pages)) in (0..).zip(sizes) {
            at += gap * PAGE_SIZE;
            regions.push(region(100 - index, at, *pages));
            at += pages * PAGE_SIZE;
        }
        regions
    }

    proptest! {
        #[test]
        fn addresses_and_pages_convert_into_each_other(
            sizes in prop::collection::vec((0u64..3000, 1u64..5_000_000), 1..8), count in 1usize..9,
            pick: prop::sample::Index, at: prop::sample::Index, byte in 0u64..4096,
        ) {
            let regions = regions(&sizes);
            let shards = ShardMap::new(&regions, count).unwrap();
            let region = &regions[pick.index(regions.len())];
            let page = at.index(usize::try_from(region.len / PAGE_SIZE).unwrap()) as u64;
            let (place, found) = shards.locate(region.host + page * PAGE_SIZE + byte).unwrap();
            prop_assert_eq!((place.id, found.0), (region.id, page));
            prop_assert!(shards.shard(place, page) < count);
            prop_assert_eq!(place.span(PageRun::from(page..page + 1)).start, region.host + page * PAGE_SIZE);
        }

        #[test]
        fn parts_cover_the_run_and_each_lies_in_one_shard(
            sizes in prop::collection::vec((0u64..3000, 1u64..5_000_000), 1..8), count in 1usize..9,
            pick: prop::sample::Index, first: prop::sample::Index, len in 1u64..20_000,
        ) {
            let regions = regions(&sizes);
            let shards = ShardMap::new(&regions, count).unwrap();
            let place = shards.region(regions[pick.index(regions.len())].id).unwrap();
            let first = first.index(usize::try_from(place.pages).unwrap()) as u64;
            let run = PageRun::from(first..(first + len).min(place.pages));
            let mut at = run.first.0;
            for (shard, part) in shards.parts(place, run) {
                prop_assert_eq!(part.first.0, at);
                prop_assert!(part.count > 0);
                for page in [part.first.0, part.end() - 1, part.first.0 + part.count / 2] {
                    prop_assert_eq!(shards.shard(place, page), shard);
                }
                at = part.end();
            }
            prop_assert_eq!(at, run.end());
        }

        #[test]
        fn mappings_are_bounded(sizes in prop::collection::vec((0u64..3000, 1u64..(1 << 28)), 1..64), count in 1usize..9) {
            let shards = ShardMap::new(&regions(&sizes), count).unwrap();
            let chunks: usize = shards.regions().iter().map(|p| shards.parts(p, p.all()).count()).sum();
            prop_assert!(chunks <= 512, "{}", chunks);
        }
    }

    #[test]
    fn addresses_outside_the_regions_are_not_found() {
        let shards = ShardMap::new(&regions(&[(0, 4), (2, 4)]), 2).unwrap();
        let start = 1 << 20;
        for address in [0, start - 1, start + 4 * 4096, start + 6 * 4096 - 1, start + 10 * 4096, u64::MAX] {
            assert_eq!(shards.locate(address), None, "{address:#x}");
        }
        assert!(shards.with_pages(RegionId(100), PageRun::new(PageIndex(3), 1)).is_ok());
        assert!(shards.with_pages(RegionId(100), PageRun::new(PageIndex(3), 2)).is_err());
        assert!(shards.with_pages(RegionId(100), PageRun::new(PageIndex(1), u64::MAX)).is_err());
        assert!(shards.with_pages(RegionId(7), PageRun::new(PageIndex(0), 1)).is_err());
    }

    #[test]
    fn random_and_sequential_pages_spread_in_small_and_in_huge_guests() {
        // Guests of 64 MiB, 1 GiB, and 1 TiB below and above a hole.
        for (low, high) in [(1 << 14, 0), (1 << 18, 0), (3 << 18, (1 << 28) - (3 << 18))] {
            let sizes: Vec<_> = [(0, low), (1 << 18, high)].into_iter().filter(|s| s.1 > 0).collect();
            let shards = ShardMap::new(&regions(&sizes), 4).unwrap();
            let mut pages = [0; 4];
            for place in shards.regions() {
                shards.parts(place, place.all()).for_each(|(shard, part)| pages[shard] += part.count);
            }
            let (least, most) = (pages.iter().min().unwrap(), pages.iter().max().unwrap());
            assert!(most - least <= (low + high) / 100 + 512, "{pages:?}");
        }
    }

    #[test]
    fn regions_that_cannot_be_guest_memory_are_refused() {
        for regions in [
            vec![],
            vec![region(0, 1, 1)],
            vec![region(0, 4096, 0)],
            vec![region(0, u64::MAX - 4095, 1)],
            vec![region(0, 4096, 2), region(1, 8192, 1)],
            vec![region(0, 4096, 1), region(0, 8192, 1)],
            (0..65).map(|id| region(id, u64::from(id + 1) << 20, 1)).collect(),
        ] {
            let error = ShardMap::new(&regions, 2).unwrap_err();
            assert!(matches!(error, FaultError::Regions(_)), "{error}");
        }
    }
}
