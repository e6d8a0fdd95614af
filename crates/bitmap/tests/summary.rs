//! Tests that a bitmap with a summary behaves like a flat bitmap after any sequence of operations.

use proptest::prelude::*;
use std::ops::Range;
use vmferry_bitmap::{AtomicBitmap, Bitmap, SummaryBitmap};

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

fn of_ranges(len: u64, ranges: &[(u64, u64)]) -> Bitmap {
    let mut map = Bitmap::new(len);
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
fn apply(op: Op, map: &mut SummaryBitmap, model: &mut Bitmap) -> Result<(), TestCaseError> {
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
            map.union_words(at, log);
            log.iter().enumerate().for_each(|(index, word)| model.union_word(at + index, *word));
        }
        Op::Merge(at, log) => {
            let (at, log) = fitted(len, at, &log);
            let (mut got, mut want) = (Vec::new(), Vec::new());
            map.merge_words(at, log, |run| got.push(run));
            model.merge_words(at, log, |run| want.push(run));
            prop_assert_eq!(got, want);
        }
        Op::Union(ranges) => {
            map.union(&SummaryBitmap::from(of_ranges(len, &ranges)));
            model.union(&of_ranges(len, &ranges));
        }
        Op::Subtract(ranges) => {
            map.subtract(&SummaryBitmap::from(of_ranges(len, &ranges)));
            model.subtract(&of_ranges(len, &ranges));
        }
        Op::Retain(at, count, ranges) => {
            map.retain_range(cut(len, at, count), &SummaryBitmap::from(of_ranges(len, &ranges)));
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
            (SummaryBitmap::full(len), Bitmap::full(len))
        } else {
            (SummaryBitmap::new(len), Bitmap::new(len))
        };
        for op in ops {
            apply(op, &mut map, &mut model)?;
            prop_assert_eq!(map.flat(), &model);
            prop_assert_eq!(map.is_empty(), model.is_empty());
            prop_assert_eq!(map.count(), model.count());
        }
        prop_assert_eq!(&map, &SummaryBitmap::from(model.clone()));
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
            prop_assert_eq!(harvested, model);
            prop_assert!(marks.is_empty());
        }
    }
}
