//! Compares every scanner with a bit-by-bit walk, on random patterns, lengths and ranges.

use proptest::prelude::*;
use std::ops::Range;
use vmferry_bitmap::{FlatBitmap, Scanner};
use vmferry_testkit::{Need, skip};

/// Maximum number of words: longer than a batch (2048 words) and not a multiple of any unit, so
/// that every path is taken.
const MAX_WORDS: usize = 4500;

/// Returns the scanners of this processor. `every_scanner_runs_in_the_other_tests` reports those
/// that it does not support.
fn scanners() -> Vec<Scanner> {
    let all = Scanner::all();
    assert_eq!(all.iter().map(|(name, _)| *name).collect::<Vec<_>>().last(), Some(&"portable"));
    all.into_iter().filter_map(|(_, scanner)| scanner.ok()).collect()
}

#[test]
fn every_scanner_runs_in_the_other_tests() {
    for (name, scanner) in Scanner::all() {
        match scanner {
            Ok(scanner) => assert_eq!(scanner.name(), name),
            Err(why) => skip(Need::Cpu, format!("scanner {name}: {why}")),
        }
    }
}

fn naive_bits(words: &[u64], range: Range<u64>) -> Vec<u64> {
    range.filter(|bit| words[usize::try_from(bit / 64).unwrap()] >> (bit % 64) & 1 != 0).collect()
}

fn naive_runs(bits: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &bit in bits {
        match runs.last_mut() {
            Some(run) if run.end == bit => run.end += 1,
            _ => runs.push(bit..bit + 1),
        }
    }
    runs
}

/// Generates words of one kind for some length: the patterns of real bitmaps, for which the
/// scanners take different paths.
fn stretch() -> impl Strategy<Value = Vec<u64>> {
    // Under Miri, at most two blocks of 64 words: more would take too long.
    let (some, many) = if cfg!(miri) { (20usize, 80usize) } else { (200, 2500) };
    let length = prop_oneof![0usize..10, 0..some, 0..many];
    let kind = prop_oneof![
        3 => Just(0),                     // empty
        2 => Just(1),                     // full
        2 => Just(2),                     // one bit now and then
        1 => Just(3),                     // random
        1 => Just(4),                     // runs that end at the ends of words
        1 => Just(5),                     // a single word now and then
    ];
    (kind, length, any::<u64>()).prop_map(|(kind, length, seed)| {
        let mut state = seed | 1;
        let mut next = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            state ^ state >> 31
        };
        let mut word = |_| match kind {
            0 => 0,
            1 => u64::MAX,
            2 => u64::from(next() % 50 == 0) << (next() % 64),
            3 => next(),
            4 => {
                if next() % 2 == 0 {
                    u64::MAX << (next() % 64)
                } else {
                    u64::MAX >> (next() % 64)
                }
            }
            _ => {
                if next() % 9 == 0 {
                    next()
                } else {
                    0
                }
            }
        };
        (0..length).map(&mut word).collect()
    })
}

/// Generates words, and the number of words to skip at the front so that the rest is unaligned.
fn pattern() -> impl Strategy<Value = (Vec<u64>, usize)> {
    (prop::collection::vec(stretch(), 0..if cfg!(miri) { 3 } else { 8 }), 0usize..9).prop_map(
        |(parts, skip)| {
            let mut words: Vec<u64> = parts.concat();
            words.truncate(MAX_WORDS);
            let skip = skip.min(words.len());
            (words, skip)
        },
    )
}

/// Converts fractions into a range of bits, sometimes aligned to words.
fn cut(bits: u64, (from, to, whole): (f64, f64, bool)) -> Range<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a fraction of a count"
    )]
    let at = |share: f64| (bits as f64 * share) as u64;
    let (from, to) = (at(from.min(to)), at(from.max(to)));
    if whole { from / 64 * 64..to.div_ceil(64) * 64 } else { from..to }
}

/// Compares the four walks over `words` with the naive walk.
fn check(scanner: Scanner, words: &[u64], range: Range<u64>) -> Result<(), TestCaseError> {
    let bits = naive_bits(words, range.clone());
    let runs = naive_runs(&bits);
    let name = scanner.name();
    let mut seen = Vec::new();
    scanner.for_each_bit(words, range.clone(), |bit| seen.push(bit));
    prop_assert_eq!(&seen, &bits, "{} for_each_bit", name);
    let mut seen = Vec::new();
    scanner.for_each_run(words, range.clone(), |run| seen.push(run));
    prop_assert_eq!(&seen, &runs, "{} for_each_run", name);
    // The check calls `next`: `collect` may use `fold`.
    let (mut bits_iter, mut runs_iter) =
        (scanner.bits(words, range.clone()), scanner.runs(words, range.clone()));
    prop_assert!(bits.iter().all(|bit| bits_iter.next() == Some(*bit)), "{} bits", name);
    prop_assert_eq!((bits_iter.next(), bits_iter.next()), (None, None), "{} bits", name);
    prop_assert!(runs.iter().all(|run| runs_iter.next() == Some(run.clone())), "{} runs", name);
    prop_assert_eq!((runs_iter.next(), runs_iter.next()), (None, None), "{} runs", name);
    // An iterator that is first used by `next` and then by `fold` returns each element once.
    for begun in [0, 1, bits.len() / 2, bits.len()] {
        let mut iter = scanner.bits(words, range.clone());
        let mut seen: Vec<u64> = iter.by_ref().take(begun).collect();
        iter.for_each(|bit| seen.push(bit));
        prop_assert_eq!(&seen, &bits, "{} bits, {} by next", name, begun);
    }
    for begun in [0, 1, runs.len() / 2, runs.len(), runs.len() + 1] {
        let mut iter = scanner.runs(words, range.clone());
        let mut seen: Vec<Range<u64>> = iter.by_ref().take(begun).collect();
        iter.for_each(|run| seen.push(run));
        prop_assert_eq!(&seen, &runs, "{} runs, {} by next", name, begun);
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_scanner_finds_all_set_bits(
        (words, skip) in pattern(),
        ends in (0.0..=1.0f64, 0.0..=1.0f64, any::<bool>()),
    ) {
        let words = &words[skip..];
        let bits = words.len() as u64 * 64;
        for scanner in scanners() {
            check(scanner, words, 0..bits)?;
            check(scanner, words, cut(bits, ends))?;
            prop_assert_eq!(scanner.any(words), words.iter().any(|word| *word != 0));
            prop_assert_eq!(scanner.count(words), words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>());
        }
    }

    #[test]
    fn every_scanner_handles_short_ranges_at_any_position(
        words in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 1..6),
        from in 0u64..400, count in 0u64..400,
    ) {
        let bits = words.len() as u64 * 64;
        let from = from.min(bits);
        for scanner in scanners() {
            check(scanner, &words, from..(from + count).min(bits))?;
        }
    }

    #[test]
    fn a_merge_gives_the_union_and_the_new_runs(
        (set, _) in pattern(), (log, skip) in pattern(), tail in 0u64..64, first in 0usize..200,
    ) {
        let words = set.len().max(1);
        let mut map = FlatBitmap::new(words as u64 * 64 - tail);
        map.union_words(&set);
        let first = first.min(words - 1);
        let log = &log[skip..];
        let log = &log[..log.len().min(words - first)];

        let before = map.clone();
        let mut expected = map.clone();
        log.iter().enumerate().for_each(|(at, word)| expected.union_word(first + at, *word));
        let mut new = expected.clone();
        new.subtract(&before);
        let mut runs = Vec::new();
        map.merge_words(first, log, |run| runs.push(run));
        prop_assert_eq!(&map, &expected);
        prop_assert_eq!(runs, naive_runs(&naive_bits(new.words(), 0..new.len())));
    }
}

/// Uses more words than a cache holds (2^20): the path for memory only, and runs over many batches.
#[test]
#[cfg_attr(miri, ignore = "a million words take Miri an hour; the tests above run the same code")]
fn every_scanner_handles_a_bitmap_larger_than_the_cache() {
    let words: u64 = (1 << 20) + 5000;
    let len = words * 64 - 7;
    // A run at each end, long runs, and single pages far apart, some of them at the start or end of
    // a batch (131072 pages).
    let mut runs: Vec<Range<u64>> = [0..3, 600_000..1_500_000, 2_097_152..2_228_224, len - 5..len].to_vec();
    runs.extend((3_000_000..len - 100).step_by(131_072 * 5 + 4097).map(|page| page..page + 1));
    runs.extend((20..30).map(|batch| 20 * 131_072 + batch * 1000..20 * 131_072 + batch * 1000 + batch));
    runs.extend([40 * 131_072 - 1..40 * 131_072 + 1, 131_072 * 60..131_072 * 61]);
    let mut map = FlatBitmap::new(len);
    runs.into_iter().for_each(|run| map.set_range(run));
    let want = {
        let mut bits = Vec::new();
        for (index, word) in map.words().iter().enumerate().filter(|(_, word)| **word != 0) {
            bits.extend((0..64u64).filter(|bit| word >> bit & 1 != 0).map(|bit| index as u64 * 64 + bit));
        }
        bits
    };
    let want_runs = naive_runs(&want);
    for scanner in scanners() {
        let name = scanner.name();
        let mut bits = Vec::new();
        scanner.for_each_bit(map.words(), 0..len, |bit| bits.push(bit));
        assert!(bits == want, "{name} for_each_bit");
        let mut runs = Vec::new();
        scanner.for_each_run(map.words(), 0..len, |run| runs.push(run));
        assert_eq!(runs, want_runs, "{name} for_each_run");
        let mut iter = scanner.runs(map.words(), 0..len);
        assert!(
            want_runs.iter().all(|run| iter.next() == Some(run.clone())) && iter.next().is_none(),
            "{name}"
        );
    }
}

#[test]
#[should_panic(expected = "range 0..65 of 1 words")]
fn a_range_beyond_the_words_is_refused() {
    let _ = Scanner::best().runs(&[0], 0..65);
}
