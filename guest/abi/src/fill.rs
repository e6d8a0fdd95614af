//! Content of pages at start, which can be computed from the page number, word by word.

use crate::pick::mix;
use core::fmt;

/// Content of pages before they are first written to.
///
/// Every word of a page can be computed from the page's number alone. A page that was never written
/// to can therefore be checked after any number of migrations. The first two words are the stamp
/// (page number, counter 0), except in zero pages, which stay all zeros until their first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fill {
    /// Incompressible words.
    Random,
    /// All-zero pages. They are written once at start, so they are resident.
    Zero,
    /// Words from a small dictionary. An LZ codec compresses them to about a third.
    Text,
    /// Words as in a heap of objects: pointers into 256 MiB, small numbers, short names and zeros.
    Pointers,
    /// Mix of kinds: this percentage of the pages is random. Every second of the others is text and
    /// every second zero, interleaved pseudo-randomly.
    Mix(u8),
}

/// Kind of content of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageKind {
    Random,
    Zero,
    Text,
    Pointers,
}

impl PageKind {
    /// Returns the kind of the words that a write leaves. Zeros would be no change.
    pub(crate) fn once_written(self) -> Self {
        match self {
            Self::Zero => Self::Random,
            kind => kind,
        }
    }
}

/// Eight-letter words. With 32 of them a page compresses to about a third (LZ4; entropy coders do
/// better).
const WORDS: [&[u8; 8]; 32] = [
    b"harbour ",
    b"current ",
    b"steamer ",
    b"anchors ",
    b"lantern ",
    b"channel ",
    b"tideway ",
    b"quayman ",
    b"ballast ",
    b"capstan ",
    b"dockers ",
    b"estuary ",
    b"fairway ",
    b"gangway ",
    b"hawsers ",
    b"inshore ",
    b"jetties ",
    b"keelson ",
    b"landing ",
    b"mooring ",
    b"narrows ",
    b"oarsmen ",
    b"pontoon ",
    b"quarter ",
    b"rigging ",
    b"seaward ",
    b"towline ",
    b"upriver ",
    b"vessels ",
    b"windage ",
    b"yardarm ",
    b"crossed ",
];

/// Address of the heap in pages of pointers, as a Linux process has it.
const HEAP: u64 = 0x7f3a_4000_0000;
/// Address of the tables of functions that objects refer to.
const TABLES: u64 = 0x55d0_1c20_0000;

/// Seed that keeps content apart from the other uses of [`mix`].
const CONTENT_SEED: u64 = 0x7665_7373_656c_2031;
const KIND_SEED: u64 = 0x7665_7373_656c_2032;

impl Fill {
    /// Parses `random`, `zero`, `text`, `pointers` or `mix:PERCENT`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "random" => Some(Self::Random),
            "zero" => Some(Self::Zero),
            "text" => Some(Self::Text),
            "pointers" => Some(Self::Pointers),
            _ => {
                let percent = text.strip_prefix("mix:")?;
                let digits = percent.bytes().all(|byte| byte.is_ascii_digit());
                percent.parse().ok().filter(|percent| digits && *percent <= 100).map(Self::Mix)
            }
        }
    }

    /// Returns word `word` (`0..512`) of page `page` at start, before its first write.
    #[must_use]
    pub fn word(self, page: u64, word: usize) -> u64 {
        let kind = self.kind(page);
        match (kind, word) {
            (PageKind::Zero, _) | (_, 1) => 0,
            (_, 0) => page,
            _ => content(kind, page, word),
        }
    }

    pub(crate) fn kind(self, page: u64) -> PageKind {
        match self {
            Self::Random => PageKind::Random,
            Self::Zero => PageKind::Zero,
            Self::Text => PageKind::Text,
            Self::Pointers => PageKind::Pointers,
            Self::Mix(percent) => {
                let draw = mix(page ^ KIND_SEED);
                match (draw % 100 < u64::from(percent), (draw >> 32) & 1) {
                    (true, _) => PageKind::Random,
                    (false, 0) => PageKind::Zero,
                    (false, _) => PageKind::Text,
                }
            }
        }
    }
}

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random => f.write_str("random"),
            Self::Zero => f.write_str("zero"),
            Self::Text => f.write_str("text"),
            Self::Pointers => f.write_str("pointers"),
            Self::Mix(percent) => write!(f, "mix:{percent}"),
        }
    }
}

/// Returns word `word` (`2..512`) of a page of the given kind.
#[inline]
pub(crate) fn content(kind: PageKind, page: u64, word: usize) -> u64 {
    if kind == PageKind::Zero {
        return 0;
    }
    // Pages and words never share an input, because a page has 512 words. The seed is added, so
    // that page 0 is no special case.
    let draw = mix((page.wrapping_mul(512) + word as u64).wrapping_add(CONTENT_SEED));
    match kind {
        PageKind::Text => u64::from_le_bytes(*WORDS[(draw >> 59) as usize]),
        PageKind::Pointers => object_word(draw),
        _ => draw,
    }
}

/// Returns a word of an object: of ten words, four are pointers to objects, which are aligned to 16
/// bytes, one to a table of functions, two small numbers, one a name, and two are zero.
#[inline]
fn object_word(draw: u64) -> u64 {
    let bits = draw >> 8;
    match draw % 256 {
        0..102 => HEAP + 16 * (bits & 0xff_ffff),
        102..128 => TABLES + 256 * (bits & 0x3f),
        128..179 => (bits & 0xffff) >> ((bits >> 16) & 0xf),
        179..205 => {
            // Four to seven letters, and spaces.
            let letters_end = u64::MAX >> (8 * ((bits & 0x3) + 1));
            let letters = ((bits >> 2) & 0x0f0f_0f0f_0f0f_0f0f) | 0x6060_6060_6060_6060;
            (letters & letters_end) | (0x2020_2020_2020_2020 & !letters_end)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn page(fill: Fill, page: u64) -> std::vec::Vec<u64> {
        (0..512).map(|word| fill.word(page, word)).collect()
    }

    #[test]
    fn random_pages_have_distinct_words() {
        let words: HashSet<u64> =
            (0..64).flat_map(|number| page(Fill::Random, number)[2..].to_vec()).collect();
        assert_eq!(words.len(), 64 * 510);
    }

    #[test]
    fn pages_start_with_a_stamp_except_zero_pages() {
        assert_eq!(page(Fill::Random, 7)[..2], [7, 0]);
        assert_eq!(page(Fill::Text, 7)[..2], [7, 0]);
        assert!(page(Fill::Zero, 7).iter().all(|word| *word == 0));
    }

    #[test]
    fn text_consists_of_repeated_words() {
        let words = page(Fill::Text, 3);
        let distinct: HashSet<u64> = words[2..].iter().copied().collect();
        assert!((25..=32).contains(&distinct.len()), "{}", distinct.len());
        assert!(
            words[2..]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .all(|b| b == b' ' || b.is_ascii_lowercase())
        );
    }

    #[test]
    fn pages_of_pointers_have_words_of_each_sort() {
        let words: std::vec::Vec<u64> =
            (0..64).flat_map(|number| page(Fill::Pointers, number)[2..].to_vec()).collect();
        let share = |of: fn(u64) -> bool| {
            let count = words.iter().filter(|word| of(**word)).count();
            count * 100 / words.len()
        };
        let pointers = share(|word| (HEAP..HEAP + (256 << 20)).contains(&word) && word % 16 == 0);
        assert!((38..=42).contains(&pointers), "{pointers}");
        let tables = share(|word| (TABLES..TABLES + (1 << 14)).contains(&word));
        assert!((9..=11).contains(&tables), "{tables}");
        let small = share(|word| word < 1 << 16);
        assert!((38..=42).contains(&small), "{small}");
        let is_name = |word: u64| word.to_le_bytes().iter().all(|byte| (b' '..=b'o').contains(byte));
        assert!((9..=11).contains(&share(is_name)), "{}", share(is_name));
    }

    #[test]
    fn mix_has_the_requested_percentage() {
        for percent in [0u8, 30, 100] {
            let random = (0..20_000).filter(|p| Fill::Mix(percent).kind(*p) == PageKind::Random).count();
            assert!(random.abs_diff(200 * usize::from(percent)) < 300, "{percent}: {random}");
        }
        let kinds: std::vec::Vec<_> = (0..20_000).map(|page| Fill::Mix(0).kind(page)).collect();
        let zero = kinds.iter().filter(|kind| **kind == PageKind::Zero).count();
        assert!(zero.abs_diff(10_000) < 300, "{zero}");
    }
}
