//! Comparison of the summary with the flat scan.

use std::hint::black_box;
use std::ops::Range;

use roaring::RoaringBitmap;
use vmferry_bitmap::{Bitmap, FlatBitmap};
use vmferry_report::Spread;
use vmferry_report::json::Case;

use super::{Options, Shape, timing};
use crate::rounds::turns;

/// Compared sides, by the names of their figures.
const SIDES: [&str; 4] = ["summary", "summary_iterator", "flat", "roaring"];

/// Measures scans of runs by the summary, by a flat scan, and from roaring's compressed form.
pub(super) fn measure(options: &Options, shape: Shape, words: &[u64]) -> Case {
    let mut flat = FlatBitmap::new(words.len() as u64 * 64);
    flat.union_words(words);
    let map = Bitmap::from(flat);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let roaring = RoaringBitmap::from_lsb0_bytes(0, &bytes);
    drop(bytes);
    let walk = |side: usize| {
        let each =
            |(items, check): (u64, u64), run: Range<u64>| (items + 1, check ^ run.start ^ run.end << 32);
        let mut seen = (0, 0);
        match SIDES[side] {
            "summary" => seen = map.runs().fold(seen, each),
            "summary_iterator" => {
                for run in map.runs() {
                    seen = each(seen, run);
                }
            }
            "flat" => seen = map.flat().runs().fold(seen, each),
            _ => {
                let mut iter = roaring.iter();
                while let Some(run) = iter.next_range() {
                    seen = each(seen, u64::from(*run.start())..u64::from(*run.end()) + 1);
                }
            }
        }
        black_box(seen)
    };
    let seen = walk(0);
    let mut times = vec![Vec::new(); SIDES.len()];
    for round in 0..options.rounds {
        for side in turns(SIDES.len(), round) {
            let mut last = (0, 0);
            times[side].push(Some(timing::time_us(options.turn, || last = walk(side))));
            assert_eq!(last, seen, "{} sees different pages in {}", SIDES[side], shape.name());
        }
    }
    let mut case = shape.case("summary").param("rounds", options.rounds).param("runs", seen.0);
    for (name, theirs) in SIDES.iter().zip(&times) {
        case.spread(&format!("{name}_us"), Spread::of(theirs.iter().flatten().copied()));
        if *name != "summary" {
            case.spread(&format!("ratio_to_{name}"), Spread::of_ratios(theirs, &times[0]));
        }
    }
    case
}
