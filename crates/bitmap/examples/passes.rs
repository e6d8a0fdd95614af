//! Measures the bitmap work of one migration pass, for a flat bitmap and for one with a summary.
//!
//! Run it with `cargo run --release -p vmferry-bitmap --example passes`.
//!
//! A pass merges a log, counts the set pages, adds the harvested pages to the remaining ones,
//! clears the harvest, and walks the runs chunk by chunk.

use std::hint::black_box;
use std::time::Instant;
use vmferry_bitmap::{Bitmap, FlatBitmap};

/// Number of pages of a guest with 512 GiB.
const PAGES: u64 = 1 << 27;
/// Pages in one chunk of 8 MiB, the unit in which the dirty log is protected.
const CHUNK: u64 = 2048;

macro_rules! pass {
    ($since:expr, $base:expr, $take:expr) => {{
        $take;
        let mut seen = $since.count();
        $base.union(&$since);
        $since.clear_all();
        seen += $base.count();
        for chunk in 0..PAGES / CHUNK {
            let mut runs = $base.runs_in(chunk * CHUNK..(chunk + 1) * CHUNK);
            if let Some(run) = runs.next() {
                seen += run.end - run.start + runs.count() as u64;
            }
        }
        $base.clear_all();
        black_box(seen)
    }};
}

fn main() {
    let (mut since, mut base) = (FlatBitmap::full(PAGES), FlatBitmap::full(PAGES));
    let (mut summary_since, mut summary_base) = (Bitmap::full(PAGES), Bitmap::full(PAGES));
    since.clear_all();
    base.clear_all();
    summary_since.clear_all();
    summary_base.clear_all();
    for (name, step, run) in [
        ("nothing", PAGES, 0),
        ("1e-4 in runs of 64", 640_000, 64),
        ("1e-4 single pages", 10_000, 1),
        ("1e-2 single pages", 100, 1),
        ("every second page", 2, 1),
        ("all", 64, 64),
    ] {
        let mut log = FlatBitmap::new(PAGES);
        (0..(PAGES - 64) / step).for_each(|at| log.set_range(at * step..at * step + run));
        let log = log.words();
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..9 {
            let begin = Instant::now();
            let flat = pass!(since, base, since.union_words(log));
            times[0].push(begin.elapsed());
            let begin = Instant::now();
            let summary = pass!(summary_since, summary_base, summary_since.union_words(log));
            times[1].push(begin.elapsed());
            assert_eq!(flat, summary, "both bitmaps have the same pages");
        }
        times.iter_mut().for_each(|times| times.sort_unstable());
        println!("{name:20} flat {:9.3?}, with a summary {:9.3?}", times[0][2], times[1][2]);
    }
}
