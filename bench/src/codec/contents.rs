//! Contents of pages, and changes of pages.

use std::fmt;
use std::fs;
use std::io::Read;

use vmferry_codec::{BATCH_BYTES, BATCH_PAGES, Codec, Encoder, Level, Page};

/// Size of a page in bytes.
const PAGE: usize = size_of::<Page>();

/// Small random generator (xorshift64*), which produces the same pages in every run.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        usize::try_from((self.word() >> 11) % end as u64).expect("below a usize")
    }

    /// Returns a number below `end`, where small numbers are more frequent: number `n` has about
    /// the probability `1 / n`, as the words of a text have.
    fn ranked(&mut self, end: usize) -> usize {
        let bits = self.below(end.ilog2() as usize + 1);
        self.below(1 << bits) % end
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            part.copy_from_slice(&word[..part.len()]);
        }
    }
}

/// Content of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Random bytes.
    Random,
    /// Sentences of 4096 different words.
    Text,
    /// An eighth of each page is text or pointers, the rest is zero.
    ZeroHeavy,
    /// Executables and libraries of this host.
    Files,
    /// Text that is already compressed.
    Compressed,
    /// Objects of a heap: pointers into 256 MiB, lengths, flags, short strings.
    Pointers,
}

impl Content {
    pub(super) const ALL: [Self; 6] =
        [Self::Random, Self::Text, Self::ZeroHeavy, Self::Files, Self::Compressed, Self::Pointers];

    /// Returns `count` pages, or the reason why this host does not have them.
    pub(super) fn pages(self, count: usize, seed: u64) -> Result<Vec<Page>, String> {
        let mut random = Random::new(seed);
        let mut pages = vec![[0; PAGE]; count];
        let bytes = pages.as_flattened_mut();
        let words = Words::new(&mut random);
        match self {
            Self::Random => random.fill(bytes),
            Self::Text => words.write(&mut random, bytes),
            Self::Pointers => bytes.chunks_mut(PAGE).for_each(|page| objects(&mut random, page)),
            Self::ZeroHeavy => {
                for page in bytes.chunks_mut(PAGE) {
                    let at = random.below(8) * (PAGE / 8);
                    let part = &mut page[at..at + PAGE / 8];
                    if random.below(2) == 0 {
                        words.write(&mut random, part)
                    } else {
                        objects(&mut random, part)
                    }
                }
            }
            Self::Files => files(bytes)?,
            Self::Compressed => compressed(&words, &mut random, bytes),
        }
        Ok(pages)
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Random => "random",
            Self::Text => "text",
            Self::ZeroHeavy => "zero-heavy",
            Self::Files => "files",
            Self::Compressed => "compressed",
            Self::Pointers => "pointers",
        })
    }
}

/// Words of a text. Frequent words are at the beginning.
struct Words(Vec<Vec<u8>>);

impl Words {
    fn new(random: &mut Random) -> Self {
        const LETTERS: &[u8] = b"etaoinshrdlucmfwypvbgkjqxz";
        let mut word = || (0..2 + random.below(9)).map(|_| LETTERS[random.ranked(LETTERS.len())]).collect();
        Self((0..4096).map(|_| word()).collect())
    }

    /// Fills `to` with sentences.
    fn write(&self, random: &mut Random, to: &mut [u8]) {
        let mut at = 0;
        while at < to.len() {
            let mut word = self.0[random.ranked(self.0.len())].clone();
            match random.below(40) {
                0 => word.extend(b".\n"),
                1..4 => word.extend(b", "),
                4 => word = format!("{} ", random.below(100_000)).into_bytes(),
                _ => word.push(b' '),
            }
            let len = word.len().min(to.len() - at);
            to[at..at + len].copy_from_slice(&word[..len]);
            at += len;
        }
    }
}

/// Fills `to` with objects of four to twelve words.
fn objects(random: &mut Random, to: &mut [u8]) {
    let mut left = 0;
    for word in to.chunks_exact_mut(8) {
        if left == 0 {
            left = 4 + random.below(9);
        }
        left -= 1;
        let value = match random.below(10) {
            // Pointers to objects, which are aligned to 16 bytes.
            0..4 => 0x7f3a_4000_0000 + 16 * random.below(1 << 24) as u64,
            // A table of functions of the object's type.
            4 => 0x55d0_1c20_0000 + 256 * random.below(64) as u64,
            5 | 6 => random.ranked(1 << 16) as u64,
            7 => {
                let mut name = *b"        ";
                name[..3 + random.below(5)].fill_with(|| b'a' + u8::try_from(random.below(26)).unwrap_or(0));
                u64::from_le_bytes(name)
            }
            _ => 0,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Fills `to` with the contents of executables and libraries, in the order of their names.
fn files(to: &mut [u8]) -> Result<(), String> {
    let mut at = 0;
    for folder in ["/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"] {
        let Ok(entries) = fs::read_dir(folder) else { continue };
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            // A link is another name of a file.
            let is_file =
                fs::symlink_metadata(&path).is_ok_and(|data| data.is_file() && data.len() >= 16 << 10);
            let Ok(mut file) = fs::File::open(&path) else { continue };
            // No file has more than a quarter, so that the pages are of several kinds.
            let most = (to.len() / 4).min(to.len() - at);
            let mut start = [0; 4];
            if !is_file || file.read_exact(&mut start).is_err() || start != *b"\x7fELF" {
                continue;
            }
            let mut bytes = start.to_vec();
            if file.take(most as u64).read_to_end(&mut bytes).is_err() {
                continue;
            }
            // Each file begins at a page, as in the page cache.
            bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
            let len = bytes.len().min(to.len() - at);
            to[at..at + len].copy_from_slice(&bytes[..len]);
            at += len;
            if at == to.len() {
                return Ok(());
            }
        }
    }
    Err(format!("needs {} MiB of executables and libraries, this host has {}", to.len() >> 20, at >> 20))
}

/// Fills `to` with frames of compressed text.
fn compressed(words: &Words, random: &mut Random, to: &mut [u8]) {
    let mut encoder = Encoder::new();
    let mut pages = vec![[0; PAGE]; BATCH_PAGES];
    let mut at = 0;
    while at < to.len() {
        words.write(random, pages.as_flattened_mut());
        let frame = encoder.encode(Codec::Zstd(Level::MIN), &pages, BATCH_BYTES).expect("text compresses");
        let len = frame.len().min(to.len() - at);
        to[at..at + len].copy_from_slice(&frame[..len]);
        at += len;
    }
}

/// Difference of a page from its earlier version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// None.
    Unchanged,
    /// One word was incremented.
    Counter,
    /// 256 bytes in a row are new.
    Append,
    /// A tenth of all words are new.
    Tenth,
    /// A tenth of all words were incremented.
    TenthCounters,
    /// All bytes are new.
    Whole,
}

impl Change {
    pub(super) const ALL: [Self; 6] =
        [Self::Unchanged, Self::Counter, Self::Append, Self::Tenth, Self::TenthCounters, Self::Whole];

    /// True if at most a tenth of the page changes.
    pub(super) fn is_sparse(self) -> bool {
        self != Self::Whole
    }

    /// Returns the new versions of `old`.
    pub(super) fn of(self, old: &[Page], seed: u64) -> Vec<Page> {
        let mut random = Random::new(seed ^ 0x5bd1);
        let mut new = old.to_vec();
        new.iter_mut().for_each(|page| self.apply(page, &mut random));
        new
    }

    fn apply(self, page: &mut Page, random: &mut Random) {
        const WORDS: usize = PAGE / 8;
        let (words, _) = page.as_chunks_mut::<8>();
        let increment = |word: &mut [u8; 8]| *word = u64::from_le_bytes(*word).wrapping_add(1).to_le_bytes();
        match self {
            Self::Unchanged => {}
            // The lowest byte of a counter that does not carry.
            Self::Counter => words[random.below(WORDS)][0] ^= 1,
            Self::Append => {
                let at = random.below(PAGE / 256) * 256;
                random.fill(&mut page[at..at + 256]);
            }
            Self::Tenth => {
                (0..WORDS / 10).for_each(|_| words[random.below(WORDS)] = random.word().to_le_bytes())
            }
            Self::TenthCounters => (0..WORDS / 10).for_each(|_| increment(&mut words[random.below(WORDS)])),
            Self::Whole => random.fill(page),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unchanged => "unchanged",
            Self::Counter => "counter",
            Self::Append => "append",
            Self::Tenth => "tenth",
            Self::TenthCounters => "tenth-counters",
            Self::Whole => "whole",
        })
    }
}
