//! Compared ways of scanning a bitmap: the two baselines, written anew, vmferry's scanners, and
//! other crates.
//!
//! Every side calls the same closure for a bit or a run, which the compiler may inline.

use std::ops::Range;

use bitvec::order::Lsb0;
use bitvec::slice::BitSlice;
use fixedbitset::FixedBitSet;
use roaring::RoaringBitmap;
use vmferry_bitmap::Scanner;

/// Result of a scan, which must be equal for all sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Seen {
    items: u64,
    check: u64,
}

impl Seen {
    #[inline(always)]
    fn bit(&mut self, bit: u64) {
        self.items += 1;
        self.check ^= bit;
    }

    #[inline(always)]
    fn run(&mut self, run: Range<u64>) {
        self.items += 1;
        self.check ^= run.start ^ run.end << 32;
    }

    /// Adds what another scan found.
    pub(super) fn add(&mut self, other: Self) {
        self.items += other.items;
        self.check = self.check.wrapping_add(other.check);
    }

    #[inline(always)]
    fn and_bit(mut self, bit: u64) -> Self {
        self.bit(bit);
        self
    }

    #[inline(always)]
    fn and_run(mut self, run: Range<u64>) -> Self {
        self.run(run);
        self
    }
}

/// Bitmap in the forms that the sides need.
#[derive(Debug)]
pub(super) struct Forms {
    /// Words for the word loop, vmferry's scanners and bitvec.
    pub(super) words: Vec<u64>,
    /// Bytes for the byte loop.
    pub(super) bytes: Vec<u8>,
    /// Types of other crates. `None` if they are not compared in this case.
    pub(super) others: Option<Others>,
}

/// Bitmap in the types of other crates.
#[derive(Debug)]
pub(super) struct Others {
    fixed: FixedBitSet,
    roaring: RoaringBitmap,
}

impl Forms {
    /// Creates the forms of a bitmap. `others` selects the types of other crates.
    pub(super) fn new(words: Vec<u64>, others: bool) -> Self {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let others = others.then(|| Others {
            fixed: FixedBitSet::with_capacity_and_blocks(
                words.len() * 64,
                words.iter().map(|word| usize::try_from(*word).expect("64-bit machines only")),
            ),
            roaring: RoaringBitmap::from_lsb0_bytes(0, &bytes),
        });
        Forms { words, bytes, others }
    }

    /// Replaces the bitmap with `words`, which must be as many as before.
    ///
    /// # Panics
    ///
    /// Panics if the forms include the types of other crates.
    pub(super) fn refill(&mut self, words: &[u64]) {
        assert!(self.others.is_none(), "the types of other crates are built only once");
        self.words.copy_from_slice(words);
        let (bytes, _) = self.bytes.as_chunks_mut::<8>();
        for (bytes, word) in bytes.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
    }

    fn end(&self) -> u64 {
        self.words.len() as u64 * 64
    }
}

/// Way of scanning the bitmap.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    /// Byte by byte with find-first-set, which the published test improved on.
    Bytes,
    /// Word by word, and byte by byte within a word that is not zero: the published form.
    WordBytes,
    /// Word by word.
    Words,
    /// By this scanner, with internal iteration (`fold`).
    Ours(Scanner),
    /// By this scanner, with external iteration (`next`).
    OurIterator(Scanner),
    /// By the crate fixedbitset.
    FixedBitSet,
    /// By the crate bitvec.
    BitVec,
    /// By the crate roaring, from its own compressed form.
    Roaring,
    /// By the crate roaring, from words as a kernel returns them. The crate has to build its form
    /// first.
    RoaringFromWords,
}

impl Side {
    /// Returns the name of the side in metrics.
    pub(super) fn name(self) -> String {
        match self {
            Side::Bytes => "bytes".into(),
            Side::WordBytes => "word_bytes".into(),
            Side::Words => "words".into(),
            Side::Ours(scanner) => scanner.name().into(),
            Side::OurIterator(_) => "iterator".into(),
            Side::FixedBitSet => "fixedbitset".into(),
            Side::BitVec => "bitvec".into(),
            Side::Roaring => "roaring".into(),
            Side::RoaringFromWords => "roaring_from_words".into(),
        }
    }

    /// Scans all set bits. Returns `None` if the form for this side was not created.
    pub(super) fn bits(self, forms: &Forms) -> Option<Seen> {
        let mut seen = Seen::default();
        let each = |bit| seen.bit(bit);
        match self {
            Side::Bytes => byte_bits(&forms.bytes, each),
            Side::WordBytes => word_byte_bits(&forms.words, each),
            Side::Words => word_bits(&forms.words, each),
            Side::Ours(scanner) => {
                return Some(scanner.bits(&forms.words, 0..forms.end()).fold(seen, Seen::and_bit));
            }
            Side::OurIterator(scanner) => {
                for bit in scanner.bits(&forms.words, 0..forms.end()) {
                    seen.bit(bit);
                }
            }
            Side::FixedBitSet => forms.others.as_ref()?.fixed.ones().map(|bit| bit as u64).for_each(each),
            Side::BitVec => {
                forms.others.as_ref()?;
                BitSlice::<u64, Lsb0>::from_slice(&forms.words)
                    .iter_ones()
                    .map(|bit| bit as u64)
                    .for_each(each);
            }
            Side::Roaring => forms.others.as_ref()?.roaring.iter().map(u64::from).for_each(each),
            Side::RoaringFromWords => {
                forms.others.as_ref()?;
                RoaringBitmap::from_lsb0_bytes(0, &forms.bytes).iter().map(u64::from).for_each(each);
            }
        }
        Some(seen)
    }

    /// Scans all set bits and clears the bitmap. Returns `None` for the iterator and for other
    /// crates, which are not compared in this case.
    pub(super) fn take_bits(self, forms: &mut Forms) -> Option<Seen> {
        let mut seen = Seen::default();
        let each = |bit| seen.bit(bit);
        match self {
            Side::Bytes => take_byte_bits(&mut forms.bytes, each),
            Side::WordBytes => take_word_byte_bits(&mut forms.words, each),
            Side::Words => take_word_bits(&mut forms.words, each),
            Side::Ours(scanner) => {
                seen = scanner.bits(&forms.words, 0..forms.end()).fold(seen, Seen::and_bit);
                forms.words.fill(0);
            }
            _ => return None,
        }
        Some(seen)
    }

    /// Scans all maximal runs. Returns `None` if the form for this side was not created.
    pub(super) fn runs(self, forms: &Forms) -> Option<Seen> {
        let mut seen = Seen::default();
        let each = |run| seen.run(run);
        match self {
            Side::Bytes => {
                let mut joined = Joined { run: 0..0, each };
                byte_bits(&forms.bytes, |bit| joined.bit(bit));
                joined.finish();
            }
            Side::WordBytes => {
                let mut joined = Joined { run: 0..0, each };
                word_byte_bits(&forms.words, |bit| joined.bit(bit));
                joined.finish();
            }
            Side::Words => word_runs(&forms.words, each),
            Side::Ours(scanner) => {
                return Some(scanner.runs(&forms.words, 0..forms.end()).fold(seen, Seen::and_run));
            }
            Side::OurIterator(scanner) => {
                for run in scanner.runs(&forms.words, 0..forms.end()) {
                    seen.run(run);
                }
            }
            Side::FixedBitSet => {
                let mut joined = Joined { run: 0..0, each };
                forms.others.as_ref()?.fixed.ones().for_each(|bit| joined.bit(bit as u64));
                joined.finish();
            }
            Side::BitVec => {
                forms.others.as_ref()?;
                let mut joined = Joined { run: 0..0, each };
                let bits = BitSlice::<u64, Lsb0>::from_slice(&forms.words);
                bits.iter_ones().for_each(|bit| joined.bit(bit as u64));
                joined.finish();
            }
            Side::Roaring => roaring_runs(&forms.others.as_ref()?.roaring, each),
            Side::RoaringFromWords => {
                forms.others.as_ref()?;
                roaring_runs(&RoaringBitmap::from_lsb0_bytes(0, &forms.bytes), each);
            }
        }
        Some(seen)
    }
}

/// Joins bits to runs, for sides that produce only bits.
struct Joined<F> {
    run: Range<u64>,
    each: F,
}

impl<F: FnMut(Range<u64>)> Joined<F> {
    #[inline(always)]
    fn bit(&mut self, bit: u64) {
        if bit != self.run.end {
            self.finish();
            self.run.start = bit;
        }
        self.run.end = bit + 1;
    }

    #[inline(always)]
    fn finish(&mut self) {
        if !self.run.is_empty() {
            (self.each)(self.run.clone());
        }
    }
}

fn byte_bits(bytes: &[u8], mut each: impl FnMut(u64)) {
    for (index, &byte) in bytes.iter().enumerate() {
        let mut rest = byte;
        while rest != 0 {
            each(index as u64 * 8 + u64::from(rest.trailing_zeros()));
            rest &= rest - 1;
        }
    }
}

fn word_bits(words: &[u64], mut each: impl FnMut(u64)) {
    for (index, &word) in words.iter().enumerate() {
        let mut rest = word;
        while rest != 0 {
            each(index as u64 * 64 + u64::from(rest.trailing_zeros()));
            rest &= rest - 1;
        }
    }
}

fn word_byte_bits(words: &[u64], mut each: impl FnMut(u64)) {
    for (index, &word) in words.iter().enumerate() {
        if word != 0 {
            bits_by_byte(word, index as u64 * 64, &mut each);
        }
    }
}

/// Scans the bits of a word byte by byte. `base` is the page of the lowest bit.
#[inline(always)]
fn bits_by_byte(word: u64, base: u64, each: &mut impl FnMut(u64)) {
    for (index, byte) in word.to_le_bytes().into_iter().enumerate() {
        bits_of(byte.into(), base + index as u64 * 8, each);
    }
}

/// Scans the bits of a word or a byte. `base` is the page of the lowest bit.
#[inline(always)]
fn bits_of(mut rest: u64, base: u64, each: &mut impl FnMut(u64)) {
    while rest != 0 {
        each(base + u64::from(rest.trailing_zeros()));
        rest &= rest - 1;
    }
}

fn take_byte_bits(bytes: &mut [u8], mut each: impl FnMut(u64)) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        if *byte != 0 {
            bits_of(std::mem::take(byte).into(), index as u64 * 8, &mut each);
        }
    }
}

fn take_word_bits(words: &mut [u64], mut each: impl FnMut(u64)) {
    for (index, word) in words.iter_mut().enumerate() {
        if *word != 0 {
            bits_of(std::mem::take(word), index as u64 * 64, &mut each);
        }
    }
}

fn take_word_byte_bits(words: &mut [u64], mut each: impl FnMut(u64)) {
    for (index, word) in words.iter_mut().enumerate() {
        if *word != 0 {
            bits_by_byte(std::mem::take(word), index as u64 * 64, &mut each);
        }
    }
}

/// Scans runs with the fastest known word loop. It goes from run to run instead of from bit to bit,
/// and skips uniform words.
fn word_runs(words: &[u64], mut each: impl FnMut(Range<u64>)) {
    let mut open = None;
    for (index, &word) in words.iter().enumerate() {
        let base = index as u64 * 64;
        let mut rest = word;
        if let Some(start) = open {
            let ones = word.trailing_ones();
            if ones == 64 {
                continue;
            }
            each(start..base + u64::from(ones));
            open = None;
            rest &= u64::MAX << ones;
        }
        while rest != 0 {
            let from = rest.trailing_zeros();
            let ones = (rest >> from).trailing_ones();
            if from + ones == 64 {
                open = Some(base + u64::from(from));
                break;
            }
            each(base + u64::from(from)..base + u64::from(from + ones));
            rest &= u64::MAX << (from + ones);
        }
    }
    if let Some(start) = open {
        each(start..words.len() as u64 * 64);
    }
}

fn roaring_runs(map: &RoaringBitmap, mut each: impl FnMut(Range<u64>)) {
    let mut iter = map.iter();
    while let Some(run) = iter.next_range() {
        each(u64::from(*run.start())..u64::from(*run.end()) + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::pattern::{Pattern, build};

    #[test]
    fn all_sides_see_the_same() {
        for (density, pattern) in [
            (0.0, Pattern::Uniform),
            (1e-3, Pattern::Uniform),
            (0.5, Pattern::Uniform),
            (0.3, Pattern::Clustered),
            (1.0, Pattern::Uniform),
        ] {
            let forms = Forms::new(build(5000, density, pattern), true);
            let best = Scanner::best();
            let (bits, runs) = (Side::Bytes.bits(&forms).unwrap(), Side::Bytes.runs(&forms).unwrap());
            assert_eq!(bits.items, forms.words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>());
            assert_eq!(runs.items == 0, density == 0.0);
            for side in [
                Side::WordBytes,
                Side::Words,
                Side::Ours(best),
                Side::OurIterator(best),
                Side::FixedBitSet,
                Side::BitVec,
                Side::Roaring,
                Side::RoaringFromWords,
            ] {
                assert_eq!(side.bits(&forms), Some(bits), "{} at {density}", side.name());
                assert_eq!(side.runs(&forms), Some(runs), "{} at {density}", side.name());
            }
        }
        let forms = Forms::new(vec![1], false);
        assert_eq!(Side::Roaring.bits(&forms), None);
    }

    #[test]
    fn clearing_sides_see_the_same_and_leave_nothing() {
        for density in [0.0, 1e-3, 0.5, 1.0] {
            let words = build(5000, density, Pattern::Uniform);
            let mut forms = Forms::new(vec![0; words.len()], false);
            let bits = Side::Bytes.bits(&Forms::new(words.clone(), false));
            for side in [Side::Bytes, Side::WordBytes, Side::Words, Side::Ours(Scanner::best())] {
                forms.refill(&words);
                assert_eq!(side.bits(&forms), bits, "{} at {density}", side.name());
                assert_eq!(side.take_bits(&mut forms), bits, "{} at {density}", side.name());
                assert_eq!(side.bits(&forms), Some(Seen::default()), "{} at {density}", side.name());
            }
        }
        assert_eq!(Side::BitVec.take_bits(&mut Forms::new(vec![1], false)), None);
    }
}
