//! Encoding of a set of missing pages as messages, and decoding of these messages.

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::indexing_slicing
    )
)]

use vmferry_core::{Layout, PageSet};
use vmferry_wire::{MAX_MISSING_BYTES, MissingPages};

/// Maximum number of 64-bit words in a message.
const MOST_WORDS: usize = MAX_MISSING_BYTES / 8;

/// Returns messages that encode `set`. Parts of `set` without any page are left out.
pub(crate) fn pieces(set: &PageSet) -> impl Iterator<Item = MissingPages> {
    set.iter().flat_map(|(region, map)| {
        let chunks = map.word_parts().flat_map(|(first, words)| {
            words.chunks(MOST_WORDS).enumerate().map(move |(at, words)| (first + at * MOST_WORDS, words))
        });
        chunks.filter_map(move |(at, words)| {
            // Zeros at both ends are not sent.
            let begin = words.iter().position(|word| *word != 0)?;
            let end = words.iter().rposition(|word| *word != 0)? + 1;
            let first = (at + begin) as u64 * 64;
            let words = words.get(begin..end)?.iter().flat_map(|word| word.to_le_bytes()).collect();
            Some(MissingPages { region, first, words })
        })
    })
}

/// Adds a message's pages to `set`.
///
/// # Errors
/// If the message is not valid or names pages that do not exist.
pub(crate) fn merge(set: &mut PageSet, piece: &MissingPages) -> Result<(), String> {
    let MissingPages { region, first, words } = piece;
    let wrong = |what: &str| format!("a set of missing pages of {region} {what}");
    let map = set.region_mut(*region).ok_or_else(|| wrong("is not valid: the region does not exist"))?;
    if words.len() > MAX_MISSING_BYTES || !words.len().is_multiple_of(8) || !first.is_multiple_of(64) {
        return Err(wrong("has a length or an offset that the protocol does not allow"));
    }
    let len = map.len();
    let word = usize::try_from(first / 64).map_err(|_| wrong("begins beyond its end"))?;
    for (at, bytes) in (word..).zip(words.chunks_exact(8)) {
        let bits = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let room = len.saturating_sub((at as u64).saturating_mul(64)).min(64);
        let allowed = if room == 64 { u64::MAX } else { (1 << room) - 1 };
        if bits & !allowed != 0 {
            return Err(wrong("names pages beyond its end"));
        }
        if bits != 0 {
            map.union_word(at, bits);
        }
    }
    Ok(())
}

/// Set of missing pages that is being received.
#[derive(Debug)]
pub(crate) struct CollectedPages {
    pages: PageSet,
}

impl CollectedPages {
    pub(crate) fn new(layout: &Layout) -> Self {
        Self { pages: PageSet::empty(layout) }
    }

    pub(crate) fn add(&mut self, piece: &MissingPages) -> Result<(), String> {
        merge(&mut self.pages, piece)
    }

    /// Returns the set, or an error unless it has the number of pages that the peer announced.
    pub(crate) fn complete(self, pages: u64) -> Result<PageSet, String> {
        let have = self.pages.count();
        if have == pages {
            return Ok(self.pages);
        }
        Err(format!("{have} missing pages were named, but {pages} were announced"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vmferry_core::{Gpa, Region, RegionId};

    fn layout(pages: &[u64]) -> Layout {
        let region = |(at, pages): (u32, &u64)| Region {
            id: RegionId(at * 2),
            gpa: Gpa(u64::from(at) << 40),
            len: pages << 12,
        };
        Layout::new((0..).zip(pages).map(region).collect()).unwrap()
    }

    proptest! {
        #[test]
        fn sets_decode_as_encoded(
            lens in prop::collection::vec(1u64..2000, 1..4),
            pages in prop::collection::vec((0usize..4, 0u64..2000), 0..200),
        ) {
            let layout = layout(&lens);
            let mut set = PageSet::empty(&layout);
            for (region, page) in pages {
                if let Some(map) = set.region_mut(RegionId(u32::try_from(region * 2).unwrap())) && page < map.len() {
                    map.set(page);
                }
            }
            let mut collected = CollectedPages::new(&layout);
            pieces(&set).for_each(|piece| collected.add(&piece).unwrap());
            prop_assert_eq!(collected.complete(set.count()).unwrap(), set);
        }

        #[test]
        fn any_message_is_an_error_or_pages_of_the_region(
            region in 0u32..3, first: u64, near in 0u64..40, words in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let layout = layout(&[100, 1000]);
            for first in [first, near * 64] {
                let mut set = PageSet::empty(&layout);
                let _ = merge(&mut set, &MissingPages { region: RegionId(region), first, words: words.clone() });
                prop_assert!(set.count() <= 1100);
            }
        }
    }

    #[test]
    fn large_set_is_split_and_incomplete_set_is_rejected() {
        let layout = layout(&[20 << 20]);
        let set = PageSet::full(&layout);
        let messages: Vec<_> = pieces(&set).collect();
        assert_eq!(messages.len(), 3);
        assert!(messages.iter().all(|piece| piece.words.len() <= MAX_MISSING_BYTES));
        let mut collected = CollectedPages::new(&layout);
        messages[1..].iter().for_each(|piece| collected.add(piece).unwrap());
        assert!(collected.complete(set.count()).unwrap_err().contains("were announced"));
    }
}
