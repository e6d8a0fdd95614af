//! Conversion of guest addresses to pages of regions, which are checked, sorted and merged.

use std::ops::Range;
use vmferry_core::{Layout, PAGE_SHIFT, PAGE_SIZE, PageRun, RegionId};

/// Pages of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRun {
    /// Region of the pages.
    pub region: RegionId,
    /// Pages in the region.
    pub run: PageRun,
}

/// Error of an invalid range of guest addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadRange {
    /// The range is empty, or does not consist of whole pages.
    Unaligned,
    /// The range is not completely in one region of memory.
    Outside,
}

/// Returns the pages of the `len` bytes of guest memory at `gpa`.
///
/// # Errors
/// Returns an error if the range does not consist of whole pages of one region.
pub fn pages_at(layout: &Layout, gpa: u64, len: u64) -> Result<GuestRun, BadRange> {
    if len == 0 || !len.is_multiple_of(PAGE_SIZE) || !gpa.is_multiple_of(PAGE_SIZE) {
        return Err(BadRange::Unaligned);
    }
    let regions = layout.regions();
    let after = regions.partition_point(|region| region.gpa.0 <= gpa);
    let region = after.checked_sub(1).map(|at| &regions[at]).ok_or(BadRange::Outside)?;
    let offset = gpa - region.gpa.0;
    if offset >= region.len || len > region.len - offset {
        return Err(BadRange::Outside);
    }
    let first = offset >> PAGE_SHIFT;
    Ok(GuestRun { region: region.id, run: PageRun::from(first..first + (len >> PAGE_SHIFT)) })
}

/// Collection of runs, which are merged when all have been added.
#[derive(Debug, Default)]
pub struct Gather {
    runs: Vec<GuestRun>,
}

impl Gather {
    /// Removes all runs.
    pub fn clear(&mut self) {
        self.runs.clear();
    }

    /// Adds the pages of the `len` bytes of guest memory at `gpa`. Returns the number of these
    /// pages.
    ///
    /// # Errors
    /// Returns an error if the range does not consist of whole pages of one region.
    pub fn add(&mut self, layout: &Layout, gpa: u64, len: u64) -> Result<u64, BadRange> {
        let new = pages_at(layout, gpa, len)?;
        match self.runs.last_mut() {
            Some(last) if last.region == new.region && last.run.end() == new.run.first.0 => {
                last.run.count += new.run.count;
            }
            _ => self.runs.push(new),
        }
        Ok(new.run.count)
    }

    /// Returns all added pages, each of them once, sorted by region and page. The runs neither
    /// overlap nor adjoin each other. Therefore, even if a driver repeats pages, the work for one
    /// buffer is bounded by the number of the guest's pages.
    pub fn merged(&mut self) -> &[GuestRun] {
        let key = |g: &GuestRun| (g.region, g.run.first.0);
        if !self.runs.is_sorted_by_key(key) {
            self.runs.sort_unstable_by_key(key);
        }
        self.runs.dedup_by(|next, kept| {
            let joins = next.region == kept.region && next.run.first.0 <= kept.run.end();
            if joins {
                let end = kept.run.end().max(next.run.end());
                kept.run = PageRun::from(kept.run.first.0..end);
            }
            joins
        });
        &self.runs
    }
}

/// Copies `count` bits of `from`, starting at bit `at`, to the pages from `to.start` on, in words
/// of 64 pages. Calls `each` with the number of a word and its bits.
pub(crate) fn copy_bits(from: &[u64], at: u64, to: Range<u64>, mut each: impl FnMut(usize, u64)) {
    let mut page = to.start;
    while page < to.end {
        let shift = page % 64;
        let take = (64 - shift).min(to.end - page);
        let bits = bits_at(from, at + (page - to.start)) & (u64::MAX >> (64 - take));
        if bits != 0 {
            each(usize::try_from(page / 64).unwrap_or(usize::MAX), bits << shift);
        }
        page += take;
    }
}

/// Returns 64 bits of `from`, starting at bit `at`. Bits beyond its end are zero.
fn bits_at(from: &[u64], at: u64) -> u64 {
    let word = usize::try_from(at / 64).unwrap_or(usize::MAX);
    let get = |word: usize| from.get(word).copied().unwrap_or(0);
    let shift = at % 64;
    if shift == 0 { get(word) } else { get(word) >> shift | get(word.saturating_add(1)) << (64 - shift) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vmferry_core::{Gpa, Region};

    fn layout() -> Layout {
        let region =
            |id, gpa, pages: u64| Region { id: RegionId(id), gpa: Gpa(gpa), len: pages << PAGE_SHIFT };
        // The last two regions touch. A range must not cross from one into the other.
        Layout::new(vec![region(0, 0, 16), region(1, 32 << PAGE_SHIFT, 8), region(2, 40 << PAGE_SHIFT, 8)])
            .unwrap()
    }

    #[test]
    fn only_ranges_of_whole_pages_in_one_region_are_valid() {
        let page = |n: u64| n << PAGE_SHIFT;
        let good = pages_at(&layout(), page(34), page(6)).unwrap();
        assert_eq!(good, GuestRun { region: RegionId(1), run: PageRun::from(2..8) });
        for (gpa, len, why) in [
            (1, page(1), BadRange::Unaligned),
            (0, 100, BadRange::Unaligned),
            (0, 0, BadRange::Unaligned),
            (page(15), page(2), BadRange::Outside),
            (page(16), page(1), BadRange::Outside),
            (page(39), page(2), BadRange::Outside),
            (page(48), page(1), BadRange::Outside),
            (0, u64::MAX - 4095, BadRange::Outside),
            (u64::MAX - 4095, page(1), BadRange::Outside),
            (page(40), u64::MAX - 4095, BadRange::Outside),
        ] {
            assert_eq!(pages_at(&layout(), gpa, len), Err(why), "{gpa:#x} {len:#x}");
        }
    }

    proptest! {
        #[test]
        fn merged_runs_contain_each_added_page_once(ranges in prop::collection::vec((0u64..48, 1u64..5), 0..40)) {
            let layout = layout();
            let mut gather = Gather::default();
            let mut want = std::collections::BTreeSet::new();
            for (page, count) in ranges {
                if let Ok(run) = pages_at(&layout, page << PAGE_SHIFT, count << PAGE_SHIFT) {
                    gather.add(&layout, page << PAGE_SHIFT, count << PAGE_SHIFT).unwrap();
                    want.extend(run.run.range().map(|page| (run.region, page)));
                }
            }
            let merged = gather.merged();
            let have: Vec<_> = merged.iter().flat_map(|g| g.run.range().map(|page| (g.region, page))).collect();
            prop_assert!(have.iter().eq(&want));
            prop_assert!(merged.windows(2).all(|w| w[0].region != w[1].region || w[0].run.end() < w[1].run.first.0));
        }

        #[test]
        fn copied_bits_equal_their_source(words in prop::collection::vec(any::<u64>(), 1..6), at in 0u64..200, start in 0u64..130, count in 0u64..300) {
            let bit = |n: u64| words.get(usize::try_from(n / 64).unwrap()).is_some_and(|w| w >> (n % 64) & 1 == 1);
            let mut out = [0u64; 8];
            copy_bits(&words, at, start..start + count, |word, bits| out[word] |= bits);
            for page in 0..512u64 {
                let want = (start..start + count).contains(&page) && bit(at + page - start);
                prop_assert_eq!(out[usize::try_from(page / 64).unwrap()] >> (page % 64) & 1 == 1, want, "{}", page);
            }
        }
    }
}
