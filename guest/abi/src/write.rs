//! Part of a page that a write changes, and the content that it leaves.

use crate::PAGE_WORDS;
use crate::fill::{PageKind, content};
use crate::pick::mix;
use core::fmt;

/// Number of parts that [`Write::Append`] fills one after the other.
const PARTS: usize = 15;

/// Words of each part: 272 bytes. All parts together are the words after the stamp.
const PART_WORDS: usize = (PAGE_WORDS - 2) / PARTS;

const _: () = assert!(PARTS * PART_WORDS == PAGE_WORDS - 2);

/// Change that each write makes to its page, besides the stamp.
///
/// The new content depends on the page's number and its counter only. Therefore the guest can check
/// a page after any number of migrations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Write {
    /// The stamp only: a counter in each page.
    #[default]
    Counter,
    /// New content for the next 272 bytes of the page. After the last ones of the page follow the
    /// first ones.
    Append,
    /// New content for the whole page.
    Whole,
}

impl Write {
    /// Parses `counter`, `append` or `whole`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "counter" => Some(Self::Counter),
            "append" => Some(Self::Append),
            "whole" => Some(Self::Whole),
            _ => None,
        }
    }

    /// Returns the words of the page (`2..512`) that the write changes which raises the page's
    /// counter to `counter`.
    #[inline]
    pub(crate) fn words(self, counter: u64) -> core::ops::Range<usize> {
        match self {
            Self::Counter => 2..2,
            Self::Append => {
                let start = 2 + part_of(counter) * PART_WORDS;
                start..start + PART_WORDS
            }
            Self::Whole => 2..PAGE_WORDS,
        }
    }

    /// Returns the counter of the last write that changed word `word` (`2..512`) of a page with the
    /// counter `counter`. 0 means that no write has changed it.
    #[inline]
    fn last(self, word: usize, counter: u64) -> u64 {
        match self {
            Self::Counter => 0,
            Self::Whole => counter,
            Self::Append if counter == 0 => 0,
            Self::Append => {
                let part = (word - 2) / PART_WORDS;
                let writes_ago = (part_of(counter) + PARTS - part) % PARTS;
                counter.saturating_sub(writes_ago as u64)
            }
        }
    }

    /// Returns word `word` (`2..512`) of a page of the given kind whose counter is `counter`.
    #[inline]
    pub(crate) fn content(self, kind: PageKind, page: u64, word: usize, counter: u64) -> u64 {
        match self.last(word, counter) {
            0 => content(kind, page, word),
            last => content(kind.once_written(), page.wrapping_add(mix(last)), word),
        }
    }
}

/// Returns the part that the write with the counter `counter` fills.
#[expect(clippy::cast_possible_truncation, reason = "below 15")]
fn part_of(counter: u64) -> usize {
    (counter.wrapping_sub(1) % PARTS as u64) as usize
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Counter => "counter",
            Self::Append => "append",
            Self::Whole => "whole",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn page(write: Write, kind: PageKind, counter: u64) -> Vec<u64> {
        (2..PAGE_WORDS).map(|word| write.content(kind, 7, word, counter)).collect()
    }

    fn changed(write: Write, kind: PageKind, counter: u64) -> Vec<usize> {
        let (old, new) = (page(write, kind, counter - 1), page(write, kind, counter));
        (2..PAGE_WORDS).filter(|word| old[word - 2] != new[word - 2]).collect()
    }

    #[test]
    fn write_changes_its_words_and_no_others() {
        for counter in 1..40 {
            for write in [Write::Counter, Write::Append, Write::Whole] {
                let want: Vec<usize> = write.words(counter).collect();
                assert_eq!(changed(write, PageKind::Random, counter), want, "{write} {counter}");
            }
        }
    }

    #[test]
    fn page_begins_with_the_content_of_its_kind() {
        for kind in [PageKind::Random, PageKind::Text, PageKind::Pointers, PageKind::Zero] {
            let start: Vec<u64> = (2..PAGE_WORDS).map(|word| content(kind, 7, word)).collect();
            for write in [Write::Counter, Write::Append, Write::Whole] {
                assert_eq!(page(write, kind, 0), start, "{write}");
            }
        }
    }

    #[test]
    fn written_zero_page_is_not_zero() {
        assert!(page(Write::Whole, PageKind::Zero, 1).iter().all(|word| *word != 0));
        let appended = page(Write::Append, PageKind::Zero, 1);
        assert_eq!(appended.iter().filter(|word| **word != 0).count(), PART_WORDS);
    }
}
