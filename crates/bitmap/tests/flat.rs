//! Tests that a bitmap with a summary behaves like a flat bitmap after any sequence of operations.

use proptest::prelude::*;
use std::ops::Range;
use vmferry_bitmap::{AtomicBitmap, Bitmap, FlatBitmap};

/// Several blocks of the summary (4096 pages each) and a partial one.
const MAX_LEN: u64 = 40_000;

#[derive(Debug, Clone)]
enum Op {
    Set(u64),
    Clear(u64),
    SetRange(u64, u64),
    ClearRange(u64, u64),
    ClearAll,
    Log(u64, Vec<u64>),
    WholeLog(Vec<u64>),
    Word(u64, u64),
    Merge(u64, Vec<u64>),
    Union(Vec<(u64, u64)>),
    Subtract(Vec<(u64, u64)>),
    Retain(u64, u64, Vec<(u64, u64)>),
    Tighten,
}

fn log() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![12 => Just(0), 1 => any::<u64>(), 1 => Just(u64::MAX)];
    prop::collection::vec(word, 0..300)
}

fn ranges() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..MAX_LEN, 0..MAX_LEN / 8), 0..6)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..MAX_LEN).prop_map(Op::Set),
        2 => (0..MAX_LEN).prop_map(Op::Clear),
        3 => (0..MAX_LEN, 0..9000u64).prop_map(|(at, n)| Op::SetRange(at, n)),
        3 => (0..MAX_LEN, 0..20_000u64).prop_map(|(at, n)| Op::ClearRange(at, n)),
        1 => Just(Op::ClearAll),
        2 => (0..MAX_LEN / 64, log()).prop_map(|(at, log)| Op::Log(at, log)),
        1 => log().prop_map(Op::WholeLog),
        1 => (0..MAX_LEN / 64, any::<u64>()).prop_map(|(at, bits)| Op::Word(at, bits)),
        2 => (0..MAX_LEN / 64, log()).prop_map(|(at, log)| Op::Merge(at, log)),
        1 => ranges().prop_map(Op::Union),
        1 => ranges().prop_map(Op::Subtract),
        1 => (0..MAX_LEN, 0..MAX_LEN, ranges()).prop_map(|(a, b, r)| Op::Retain(a, b, r)),
        1 => Just(Op::Tighten),
    ]
}

fn cut(len: u64, at: u64, count: u64) -> Range<u64> {
    at.min(len)..(at + count).min(len)
}

fn of_ranges(len: u64, ranges: &[(u64, u64)]) -> FlatBitmap {
    let mut map = FlatBitmap::new(len);
    ranges.iter().for_each(|(at, count)| map.set_range(cut(len, *at, *count)));
    map
}

/// Returns the part of the log that fits, and the word at which it begins.
fn fitted(len: u64, at: u64, log: &[u64]) -> (usize, &[u64]) {
    let words = usize::try_from(len.div_ceil(64)).unwrap();
    let at = usize::try_from(at).unwrap().min(words);
    (at, &log[..log.len().min(words - at)])
}

/// Applies `op` to both bitmaps and compares the results.
fn apply(op: Op, map: &mut Bitmap, model: &mut FlatBitmap) -> Result<(), TestCaseError> {
    let len = model.len();
    match op {
        Op::Set(page) if page < len => prop_assert_eq!(map.set(page), model.set(page)),
        Op::Clear(page) if page < len => {
            prop_assert_eq!(map.test_and_clear(page), model.test_and_clear(page))
        }
        Op::Set(_) | Op::Clear(_) => {}
        Op::SetRange(at, count) => {
            map.set_range(cut(len, at, count));
            model.set_range(cut(len, at, count));
        }
        Op::ClearRange(at, count) => {
            map.clear_range(cut(len, at, count));
            model.clear_range(cut(len, at, count));
        }
        Op::ClearAll => {
            map.clear_all();
            model.clear_all();
        }
        Op::Log(at, log) => {
            let (at, log) = fitted(len, at, &log);
            map.union_words_at(at, log);
            log.iter().enumerate().for_each(|(index, word)| model.union_word(at + index, *word));
        }
        Op::WholeLog(log) => {
            map.union_words(&log);
            model.union_words(&log);
        }
        Op::Word(at, bits) => {
            let (at, bits) = fitted(len, at, std::slice::from_ref(&bits));
            if let Some(bits) = bits.first() {
                map.union_word(at, *bits);
                model.union_word(at, *bits);
            }
        }
        Op::Merge(at, log) => {
            let (at, log) = fitted(len, at, &log);
            let (mut got, mut want) = (Vec::new(), Vec::new());
            map.merge_words(at, log, |run| got.push(run));
            model.merge_words(at, log, |run| want.push(run));
            prop_assert_eq!(got, want);
        }
        Op::Union(ranges) => {
            map.union(&Bitmap::from(of_ranges(len, &ranges)));
            model.union(&of_ranges(len, &ranges));
        }
        Op::Subtract(ranges) => {
            map.subtract(&Bitmap::from(of_ranges(len, &ranges)));
            model.subtract(&of_ranges(len, &ranges));
        }
        Op::Retain(at, count, ranges) => {
            map.retain_range(cut(len, at, count), &Bitmap::from(of_ranges(len, &ranges)));
            model.retain_range(cut(len, at, count), &of_ranges(len, &ranges));
        }
        Op::Tighten => map.tighten(),
    }
    Ok(())
}

proptest! {
    #[test]
    fn summary_and_flat_bitmap_agree_after_any_operations(
        len in 1..MAX_LEN, full in prop::bool::weighted(0.1), ops in prop::collection::vec(op(), 0..25),
        a in 0..MAX_LEN, b in 0..MAX_LEN,
    ) {
        let (mut map, mut model) = if full {
            (Bitmap::full(len), FlatBitmap::full(len))
        } else {
            (Bitmap::new(len), FlatBitmap::new(len))
        };
        for op in ops {
            apply(op, &mut map, &mut model)?;
            prop_assert_eq!(map.flat(), &model);
            prop_assert_eq!(map.is_empty(), model.is_empty());
            prop_assert_eq!(map.count(), model.count());
        }
        prop_assert_eq!(&map, &Bitmap::from(model.clone()));
        let (a, b) = (a.min(b).min(len), a.max(b).min(len));
        prop_assert_eq!(map.count_range(a..b), model.count_range(a..b));
        // Runs by `next`, and by closure.
        prop_assert_eq!(map.runs().collect::<Vec<_>>(), model.runs().collect::<Vec<_>>());
        prop_assert_eq!(map.runs_in(a..b).collect::<Vec<_>>(), model.runs_in(a..b).collect::<Vec<_>>());
        let (mut runs, mut bits) = (Vec::new(), Vec::new());
        map.for_each_run(|run| runs.push(run));
        map.for_each_bit(|bit| bits.push(bit));
        prop_assert_eq!(runs, model.runs().collect::<Vec<_>>());
        prop_assert_eq!(bits, model.bits().collect::<Vec<_>>());
        prop_assert_eq!(map.bits().collect::<Vec<_>>(), model.bits().collect::<Vec<_>>());
        prop_assert_eq!(map.bits_in(a..b).sum::<u64>(), model.bits_in(a..b).sum::<u64>());
        prop_assert_eq!(map.next_set(a), model.bits_in(a..len).next());
        prop_assert_eq!(&map.clone(), &map);
        let mut parts = vec![0; model.words().len()];
        for (first, words) in map.word_parts() {
            parts[first..first + words.len()].copy_from_slice(words);
        }
        prop_assert_eq!(&parts, model.words());
        for (at, word) in model.words().iter().enumerate() {
            prop_assert_eq!(map.word(at), *word);
        }
        prop_assert_eq!(map.word(model.words().len()), 0);
        // The same pages as claims.
        let claims = vmferry_bitmap::ClaimBitmap::new(map.clone());
        prop_assert_eq!((claims.left(), &claims.snapshot()), (map.count(), &map));
        let (mut taken, mut at) = (Bitmap::new(len), 0);
        while let Some(page) = claims.next_block(at) {
            let first = page / 64 * 64;
            taken.union_word(usize::try_from(first / 64).unwrap(), claims.take_64(first, u64::MAX));
            at = first + 64;
        }
        prop_assert_eq!((&taken, claims.left()), (&map, 0));
    }

    #[test]
    fn every_mark_is_harvested_exactly_once(
        len in 1..MAX_LEN, rounds in prop::collection::vec((ranges(), prop::collection::vec(0..MAX_LEN, 0..5)), 1..5),
    ) {
        let marks = AtomicBitmap::new(len);
        for (ranges, pages) in rounds {
            let mut model = of_ranges(len, &ranges);
            ranges.iter().for_each(|(at, count)| marks.set_range(cut(len, *at, *count)));
            for page in pages.into_iter().filter(|page| *page < len) {
                prop_assert_eq!(marks.set(page), model.set(page));
                prop_assert!(marks.test(page));
            }
            prop_assert_eq!(marks.is_empty(), model.is_empty());
            let mut harvested = Bitmap::new(len);
            prop_assert_eq!(marks.harvest(&mut harvested), model.count());
            prop_assert_eq!(harvested.flat(), &model);
            prop_assert!(marks.is_empty());
        }
    }
}
