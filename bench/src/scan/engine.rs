//! Walk of the engine over the pages of a pass, compared with plain scanners.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use vmferry_bitmap::Bitmap;
use vmferry_core::{Gpa, Layout, PAGE_SIZE, PageSet, Region, RegionId};
use vmferry_engine::WalkedPass;
use vmferry_report::Spread;
use vmferry_report::json::Case;

use super::{Options, Shape};
use crate::rounds::turns;

/// Compared sides, by the names of their figures. The scanners only find the runs. The engine also
/// takes the pages out of the pass: by chunks if only senders take pages, and by claims of 64 pages
/// if the driver skips free pages, too.
const SIDES: [&str; 4] = ["engine", "scanner", "summary", "engine_claims"];

/// Measures the walk of a sender over a pass with the pages of `words`, and scans of the same
/// pages.
///
/// A walk uses its set up, so every sample walks a new copy, which is made before the time is
/// taken.
pub(super) fn measure(options: &Options, shape: Shape, words: &[u64]) -> Case {
    let id = RegionId(0);
    let region = Region { id, gpa: Gpa(0), len: words.len() as u64 * 64 * PAGE_SIZE };
    let layout = Layout::new(vec![region]).expect("one region");
    let mut set = PageSet::empty(&layout);
    set.region_mut(id).expect("the one region").union_words(words);
    let pages = set.count();
    let mut times = vec![Vec::new(); SIDES.len()];
    for round in 0..options.rounds {
        for side in turns(SIDES.len(), round) {
            times[side].push(Some(sample(options.turn, &set, side, pages)));
        }
    }
    let mut case = shape.case("engine").param("rounds", options.rounds).param("pages", pages);
    for (name, theirs) in SIDES.iter().zip(&times) {
        case.spread(&format!("{name}_us"), Spread::of(theirs.iter().flatten().copied()));
    }
    let fastest: Vec<_> =
        times[1].iter().zip(&times[2]).map(|(flat, summary)| Some((*flat)?.min((*summary)?))).collect();
    case.spread("engine_to_scanner", Spread::of_ratios(&times[0], &fastest));
    case
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let done = work();
    (start.elapsed(), done)
}

/// Returns the median time of one walk in microseconds, over walks that take at least `turn`
/// together.
fn sample(turn: Duration, set: &PageSet, side: usize, pages: u64) -> f64 {
    let (mut samples, mut total) = (Vec::new(), Duration::ZERO);
    while samples.is_empty() || (total < turn && samples.len() < 1000) {
        let copy = set.clone();
        let map: &Bitmap = copy.iter().next().map(|(_, map)| map).expect("the one region");
        let each = |seen: u64, run: Range<u64>| seen + run.end - run.start;
        let (took, seen) = match SIDES[side] {
            "scanner" => timed(|| map.flat().runs().fold(0, each)),
            "summary" => timed(|| map.runs().fold(0, each)),
            side => {
                let pass = WalkedPass::new(copy, side == "engine_claims");
                timed(|| pass.walk(0, each))
            }
        };
        assert_eq!(black_box(seen), pages, "the walk sees every page");
        samples.push(took.as_secs_f64() * 1e6);
        total += took;
    }
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
