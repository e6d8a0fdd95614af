//! `vmferry-bench scan`: scans of a dirty bitmap.
//!
//! Each side scans a bitmap of each size, density and pattern in turn: the baselines byte by byte
//! and word by word, vmferry's scanners, and other crates. All sides must see the same pages. The
//! bench also compares an empty scan with the speed at which memory can be read, and the summary
//! with the flat scan. It measures the cost of maintaining the summary as well. At the end it
//! replays the dirty bitmaps that were recorded in real migrations.

mod engine;
mod pattern;
mod read;
mod recorded;
mod replay;
mod report;
mod sides;
mod summary;
mod timing;
mod upkeep;

use std::hint::black_box;
use std::time::Duration;

use vmferry_bitmap::Scanner;
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use crate::host::{self, available_memory};
use crate::rounds::MEMORY_RESERVE;
use crate::rounds::turns;
use pattern::{Pattern, build, build_seeded};
use read::Reader;
use sides::{Forms, Seen, Side};

pub use recorded::{Harvest, Recording, write_recordings};
pub use vmferry_report::benches::scan::table;

/// Memory of guests with 4 KiB pages: name, and size in GiB.
const MEMORIES: &[(&str, f64)] =
    &[("512M", 0.5), ("6G", 6.0), ("64G", 64.0), ("512G", 512.0), ("12T", 12.0 * 1024.0)];

const DENSITIES: &[f64] = &[0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0];

/// Density from which most words have a set bit, so that a scan skips little.
const DENSE: f64 = 0.1;

/// Number of rounds of scans that take seconds.
const FEW_ROUNDS: usize = 3;

/// Extent of the measurements.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of rounds.
    pub rounds: usize,
    /// Shortest time of a side's turn. A scan that takes longer is measured once or twice.
    pub turn: Duration,
    /// Memory of the largest guest in GiB.
    pub largest_gib: f64,
    /// Memory in GiB of the guest whose bitmaps are maintained.
    pub upkeep_gib: f64,
    /// Memory in GiB of the largest guest with dense bitmaps.
    pub dense_gib: f64,
    /// Memory in GiB of the largest guest for which other crates are compared.
    pub others_gib: f64,
}

impl Options {
    /// Returns the full options, with every case.
    pub fn full() -> Self {
        Options {
            rounds: 7,
            turn: Duration::from_millis(4),
            largest_gib: f64::INFINITY,
            upkeep_gib: 512.0,
            dense_gib: f64::INFINITY,
            others_gib: 64.0,
        }
    }

    /// Returns the options of `--quick`, which takes less than a minute.
    pub fn quick() -> Self {
        Options {
            rounds: 5,
            turn: Duration::from_micros(500),
            largest_gib: f64::INFINITY,
            upkeep_gib: 512.0,
            dense_gib: 6.0,
            others_gib: 6.0,
        }
    }
}

/// Output of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    Bits,
    Runs,
}

impl Output {
    fn name(self) -> &'static str {
        match self {
            Output::Bits => "bits",
            Output::Runs => "runs",
        }
    }

    fn walk(self, side: Side, forms: &Forms) -> Option<Seen> {
        match self {
            Output::Bits => side.bits(forms),
            Output::Runs => side.runs(forms),
        }
    }
}

/// Parameters of a bitmap.
#[derive(Debug, Clone, Copy)]
struct Shape {
    memory: &'static str,
    gib: f64,
    density: f64,
    pattern: Pattern,
}

impl Shape {
    fn words(self) -> usize {
        words_of(self.gib)
    }

    fn name(self) -> String {
        format!("{}/{}/{}", self.memory, density_name(self.density), self.pattern.name())
    }

    fn case(self, kind: &str) -> Case {
        Case::new(format!("{}/{kind}", self.name()))
            .param("kind", kind)
            .param("memory", self.memory)
            .param("bitmap_bytes", self.words() * 8)
            .param("density", self.density)
            .param("pattern", self.pattern.name())
    }
}

fn density_name(density: f64) -> String {
    if density > 0.0 && density < 0.01 { format!("{density:e}") } else { format!("{density}") }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, far below 2^53")]
fn words_of(gib: f64) -> usize {
    (gib * 4096.0) as usize
}

/// Returns all shapes for one guest's memory. Empty and full bitmaps have no pattern.
fn shapes(memory: &'static str, gib: f64) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for &density in DENSITIES {
        for pattern in [Pattern::Uniform, Pattern::Clustered] {
            if pattern == Pattern::Uniform || (density > 0.0 && density < 1.0) {
                shapes.push(Shape { memory, gib, density, pattern });
            }
        }
    }
    shapes
}

/// Runs the bench. Calls `progress` with the name of each measurement that begins.
///
/// # Panics
///
/// Panics if two sides see different pages, because the measurements would then be meaningless.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Document {
    let mut document = Document::new("scan", host::describe());
    for &(memory, gib) in MEMORIES {
        if gib > options.largest_gib {
            document.cases.push(Case::skipped(memory, "larger than the limit of this run"));
            continue;
        }
        // The memory holds the words, the bytes, and a copy for each compared crate.
        let needed = words_of(gib) as u64 * 8 * 4 + MEMORY_RESERVE;
        if available_memory().is_some_and(|available| available < needed) {
            let why = format!("needs {} MiB of memory", needed >> 20);
            document.cases.push(Case::skipped(memory, why));
            continue;
        }
        progress(&format!("{memory}: an empty scan compared with reading"));
        document.cases.push(empty_scan(options, memory, gib));
        for shape in shapes(memory, gib) {
            if shape.density >= DENSE && gib > options.dense_gib {
                document
                    .cases
                    .push(Case::skipped(shape.name(), "dense bitmaps of this size are only in a full run"));
                continue;
            }
            progress(&shape.name());
            let words = build(shape.words(), shape.density, shape.pattern);
            if shape.density < DENSE && gib >= 6.0 {
                document.cases.push(summary::measure(options, shape, &words));
            }
            if (6.0..=512.0).contains(&gib) {
                document.cases.push(engine::measure(options, shape, &words));
            }
            measure(options, shape, words, &mut document);
        }
    }
    progress("upkeep");
    upkeep::measure(options, &mut document);
    replay::measure(options, &recorded::shipped(), progress, &mut document);
    report::finish(&mut document, options);
    document
}

/// Replays `recordings` instead of running the whole bench. Calls `progress` with the name of each
/// measurement that begins.
///
/// # Panics
///
/// Panics if a recording has no harvest, or if two sides see different pages.
pub fn replay(options: &Options, recordings: &[Recording], progress: &mut dyn FnMut(&str)) -> Document {
    let mut document = Document::new("scan", host::describe());
    replay::measure(options, recordings, progress, &mut document);
    report::finish(&mut document, options);
    document
}

/// Returns the sides of a shape with the names of their figures. The first one is vmferry's, to
/// which the others are ratios.
fn sides(options: &Options, shape: Shape) -> Vec<(String, Side)> {
    let best = Scanner::best();
    let mut sides = vec![
        ("ours".to_owned(), Side::Ours(best)),
        ("bytes".to_owned(), Side::Bytes),
        ("words".to_owned(), Side::Words),
        ("word_bytes".to_owned(), Side::WordBytes),
    ];
    if shape.gib > 512.0 {
        return sides;
    }
    sides.push(("iterator".into(), Side::OurIterator(best)));
    if shape.gib > options.others_gib {
        return sides;
    }
    for (name, scanner) in Scanner::all() {
        if let Some(scanner) = scanner.ok().filter(|scanner| scanner.name() != best.name()) {
            sides.push((name.into(), Side::Ours(scanner)));
        }
    }
    for side in [Side::FixedBitSet, Side::BitVec, Side::Roaring, Side::RoaringFromWords] {
        sides.push((side.name(), side));
    }
    sides
}

/// Number of words that all bitmaps of a shape have together at least.
///
/// A small bitmap is replaced by several different ones in turn, because a branch predictor learns
/// a bitmap that is repeated. After a hundred scans of one bitmap of 192 KiB (6G at 0.01), a word
/// loop took 32 us instead of 113 us, and vmferry's scanner 31 us instead of 58 us. No migration
/// scans the same bitmap twice.
const LEARNT_WORDS: usize = 1 << 17;

fn measure(options: &Options, shape: Shape, words: Vec<u64>, document: &mut Document) {
    let others = shape.gib <= options.others_gib;
    let copies = (LEARNT_WORDS / words.len()).max(1);
    let more = (1..copies).map(|seed| build_seeded(shape.words(), shape.density, shape.pattern, seed as u64));
    let more: Vec<Forms> = more.map(|words| Forms::new(words, others)).collect();
    let forms: Vec<Forms> = std::iter::once(Forms::new(words, others)).chain(more).collect();
    let sides = sides(options, shape);
    let set: u64 = forms.iter().map(|forms| Scanner::best().count(&forms.words)).sum();
    for output in [Output::Bits, Output::Runs] {
        let seen: Vec<_> = forms.iter().map(|forms| output.walk(sides[0].1, forms)).collect();
        let mut times = vec![Vec::new(); sides.len()];
        // A scan that takes seconds varies little, so a few rounds are enough.
        let rounds = if shape.gib > 512.0 && shape.density >= DENSE { FEW_ROUNDS } else { options.rounds };
        for round in 0..rounds {
            for turn in turns(sides.len(), round) {
                let (name, side) = &sides[turn];
                let (mut last, mut at) = (None, 0);
                times[turn].push(Some(timing::time_us(options.turn, || {
                    at = (at + 1) % forms.len();
                    last = output.walk(*side, &forms[at]);
                })));
                assert_eq!(last, seen[at], "{name} sees different pages in {}", shape.name());
            }
        }
        let mut case = shape.case(output.name()).param("rounds", rounds).param("bitmaps", forms.len());
        // In a small bitmap, few clusters cannot produce every density exactly.
        #[expect(clippy::cast_precision_loss, reason = "counts below 2^53")]
        case.metric("density_found", set as f64 / (forms.len() * shape.words() * 64) as f64);
        for ((name, _), theirs) in sides.iter().zip(&times) {
            case.spread(&format!("{name}_us"), Spread::of(theirs.iter().flatten().copied()));
            if name != "ours" {
                case.spread(&format!("ratio_to_{name}"), Spread::of_ratios(theirs, &times[0]));
            }
        }
        document.cases.push(case);
    }
}

/// Measures the scan of an empty bitmap, and the sum of the same words.
fn empty_scan(options: &Options, memory: &'static str, gib: f64) -> Case {
    let shape = Shape { memory, gib, density: 0.0, pattern: Pattern::Uniform };
    let words = build(shape.words(), 0.0, shape.pattern);
    let scanner = Scanner::best();
    let readers = Reader::all();
    let end = words.len() as u64 * 64;
    let walk = |side: usize| match side {
        0 => timing::time_us(options.turn, || {
            let mut seen = 0;
            scanner.for_each_bit(black_box(&words), 0..end, |bit| seen ^= bit);
            seen
        }),
        1 => timing::time_us(options.turn, || {
            let mut seen = 0;
            scanner.for_each_run(black_box(&words), 0..end, |run| seen ^= run.end);
            seen
        }),
        reader => timing::time_us(options.turn, || readers[reader - 2].sum(black_box(&words))),
    };
    let mut times = vec![Vec::new(); readers.len() + 2];
    for round in 0..options.rounds {
        for side in turns(times.len(), round) {
            times[side].push(Some(walk(side)));
        }
    }
    // The floor is the fastest reader at this size, chosen by its median. The smallest of several
    // figures of each round would be better than any single reader.
    let median = |times: &[Option<f64>]| {
        Spread::of(times.iter().flatten().copied()).map_or(f64::MAX, |all| all.median)
    };
    let reads = times[2..].iter().min_by(|a, b| median(a).total_cmp(&median(b))).cloned().unwrap_or_default();
    let (bits, runs) = (&times[0], &times[1]);
    let mut case = shape.case("empty").param("rounds", options.rounds);
    for (name, times) in [("read", &reads), ("bits", bits), ("runs", runs)] {
        case.spread(&format!("{name}_us"), Spread::of(times.iter().flatten().copied()));
    }
    case.spread("bits_of_read", Spread::of_ratios(&reads, bits));
    case.spread("runs_of_read", Spread::of_ratios(&reads, runs));
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let bytes = (words.len() * 8) as f64;
    if let Some(read) = case.metrics.get("read_us").copied() {
        case.metric("read_gbytes_per_s", bytes / read / 1e3);
    }
    case
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_run_returns_the_documented_figures() {
        let options = Options {
            rounds: 1,
            turn: Duration::from_micros(1),
            largest_gib: 0.5,
            dense_gib: 0.5,
            others_gib: 0.5,
            upkeep_gib: 0.5,
        };
        let document = run(&options, &mut |_| {});
        assert_eq!(document.bench, "scan");
        let case = document.cases.iter().find(|case| case.name == "512M/0.1/clustered/runs").unwrap();
        for metric in
            ["ours_us", "bytes_us", "words_us", "ratio_to_bytes", "ratio_to_words", "ratio_to_roaring"]
        {
            assert!(case.metrics[metric] > 0.0, "{metric}");
        }
        // Every density and pattern has two outputs. Five densities have two patterns, and two have
        // one.
        let walks = |case: &&Case| case.params["kind"] != "recorded";
        let walks =
            document.cases.iter().filter(|case| case.metrics.contains_key("ratio_to_words")).filter(walks);
        assert_eq!(walks.count(), 24);
        for name in ["min_ratio_to_words", "empty_scan_of_read_bandwidth", "summary_set_random_ns"] {
            assert!(document.summary[name].as_f64().unwrap() > 0.0, "{name}");
        }
        // Sizes that were not measured are listed as skipped, and no target judges them.
        let skipped: Vec<_> = document.cases.iter().filter(|case| case.skipped.is_some()).collect();
        assert_eq!(skipped.len(), 4);
        assert!(!document.summary.contains_key("runs_512g_ms"));
        // One round has no spread.
        let targets = document.summary["targets"].as_array().unwrap();
        assert!(!targets.is_empty() && targets.iter().all(|target| target["met"] == "inconclusive"));
        assert!(table(&document).contains("512M/1/uniform/bits"));
    }
}
