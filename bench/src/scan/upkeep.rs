//! Cost of maintaining bitmaps, with a summary and without.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use vmferry_bitmap::{AtomicBitmap, Bitmap, FlatBitmap};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::pattern::{Pattern, build};
use super::{Options, timing, words_of};
use crate::rounds::turns;

/// Number of pages that are set in one go.
const PAGES: usize = 1 << 14;

/// One way to do the work of a comparison, with the name of its figure.
type Way<'a> = (&'static str, Box<dyn FnMut() -> u64 + 'a>);

/// Compares `ways` in a separate case. Records the time of each, and the ratio of the first one to
/// the second one as `ratio`.
fn compare(options: &Options, name: &str, per: f64, mut ways: Vec<Way<'_>>) -> Case {
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..options.rounds {
        for side in turns(ways.len(), round) {
            let way = &mut ways[side].1;
            times[side].push(Some(timing::time_us(options.turn, || black_box(way())) / per));
        }
    }
    let mut case =
        Case::new(format!("upkeep/{name}")).param("kind", "upkeep").param("rounds", options.rounds);
    for ((name, _), times) in ways.iter().zip(&times) {
        case.spread(name, Spread::of(times.iter().flatten().copied()));
    }
    case.spread("ratio", Spread::of_ratios(&times[0], &times[1]));
    case
}

/// Returns pages in random order, which no prefetcher can follow, or in sequence.
fn pages(len: u64, random: bool) -> Vec<u64> {
    let mut state = 1_u64;
    (0..PAGES as u64)
        .map(|index| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            if random { (state >> 16) % len } else { index }
        })
        .collect()
}

/// Adds the cases to the document.
pub(super) fn measure(options: &Options, document: &mut Document) {
    let len = words_of(options.upkeep_gib) as u64 * 64;
    #[expect(clippy::cast_precision_loss, reason = "2^14")]
    // The factor converts microseconds for all pages to nanoseconds for each.
    let per_page = PAGES as f64 / 1e3;
    for (random, order) in [(true, "random"), (false, "sequential")] {
        let pages = pages(len, random);
        let (mut flat, mut map) = (FlatBitmap::full(len), Bitmap::full(len));
        flat.clear_all();
        map.clear_all();
        document.cases.push(compare(
            options,
            &format!("set/{order}"),
            per_page,
            vec![
                ("summary_ns", Box::new(|| pages.iter().map(|page| u64::from(map.set(*page))).sum())),
                ("flat_ns", Box::new(|| pages.iter().map(|page| u64::from(flat.set(*page))).sum())),
            ],
        ));
        let marks = AtomicBitmap::new(len);
        let plain: Vec<AtomicU64> = (0..words_of(options.upkeep_gib)).map(|_| AtomicU64::new(0)).collect();
        let set_plain = |page: u64| {
            let word = usize::try_from(page / 64).expect("within the words");
            plain[word].fetch_or(1 << (page % 64), Ordering::Release)
        };
        document.cases.push(compare(
            options,
            &format!("mark/{order}"),
            per_page,
            vec![
                ("summary_ns", Box::new(|| pages.iter().map(|page| u64::from(marks.set(*page))).sum())),
                ("flat_ns", Box::new(|| pages.iter().map(|page| set_plain(*page) & 1).sum())),
            ],
        ));
    }
    harvest(options, len, document);
    for (density, name) in [(0.0, "0"), (1e-4, "1e-4"), (1e-2, "1e-2"), (0.5, "0.5")] {
        log(options, density, name, document);
    }
}

/// Measures how long some marks take to be taken out of an atomic bitmap, by its summary and by a
/// check of all words. Both sides mark the same pages first.
fn harvest(options: &Options, len: u64, document: &mut Document) {
    let pages = pages(len, true);
    let marks = AtomicBitmap::new(len);
    let plain: Vec<AtomicU64> = (0..words_of(options.upkeep_gib)).map(|_| AtomicU64::new(0)).collect();
    let (mut into, mut into_plain) = (Bitmap::full(len), vec![u64::MAX; words_of(options.upkeep_gib)]);
    into.clear_all();
    into_plain.fill(0);
    let few = &pages[..64];
    document.cases.push(compare(
        options,
        "harvest/64-pages",
        1.0,
        vec![
            (
                "summary_us",
                Box::new(|| {
                    for page in few {
                        marks.set(*page);
                    }
                    marks.harvest(&mut into)
                }),
            ),
            (
                "flat_us",
                Box::new(|| {
                    for page in few {
                        let word = usize::try_from(page / 64).expect("within the words");
                        plain[word].fetch_or(1 << (page % 64), Ordering::Release);
                    }
                    let mut moved = 0;
                    for (word, into) in plain.iter().zip(&mut into_plain) {
                        if word.load(Ordering::Relaxed) != 0 {
                            let bits = word.swap(0, Ordering::Acquire);
                            moved += u64::from(bits.count_ones());
                            *into |= bits;
                        }
                    }
                    moved
                }),
            ),
        ],
    ));
}

/// Measures the merge of a kernel's log into an empty set, including the runs of new pages: in one
/// pass, in two passes, and with a summary. The time to clear the set again is included on all
/// sides.
fn log(options: &Options, density: f64, name: &str, document: &mut Document) {
    let log = build(words_of(options.upkeep_gib), density, Pattern::Uniform);
    let len = log.len() as u64 * 64;
    let empty = || {
        let mut map = FlatBitmap::full(len);
        map.clear_all();
        map
    };
    let (mut one, mut two, mut map) = (empty(), empty(), Bitmap::from(empty()));
    document.cases.push(compare(
        options,
        &format!("log/{name}"),
        1.0,
        vec![
            (
                "one_pass_us",
                Box::new(|| {
                    one.clear_all();
                    let mut seen = 0;
                    one.merge_words(0, &log, |run| seen ^= run.start ^ run.end << 32);
                    seen
                }),
            ),
            (
                "two_passes_us",
                Box::new(|| {
                    two.clear_all();
                    let mut seen = 0;
                    two.union_words(&log);
                    two.for_each_run(|run| seen ^= run.start ^ run.end << 32);
                    seen
                }),
            ),
            (
                "summary_us",
                Box::new(|| {
                    map.clear_all();
                    let mut seen = 0;
                    map.merge_words(0, &log, |run| seen ^= run.start ^ run.end << 32);
                    seen
                }),
            ),
        ],
    ));
}
