//! Goals of the bench.

use serde_json::Value;
use vmferry_report::json::Document;

use super::spec::{FreePageSource, Give, InflateBy, Learn, Move, Way};
use crate::cases::{figure, metric};
use crate::goal::{Figure, at_least, at_most};

/// Longest time in milliseconds until the free set is known: with hints on demand, and with the
/// map.
const KNOWN_MS: (f64, f64) = (25.0, 1.0);
/// Smallest ratio of the published inflation to the map: the published result for the bitmap.
const RATIO: f64 = 228.0;
/// Smallest ratio of an inflation by page numbers to one by ranges.
const OF_RANGES: f64 = 10.0;
/// Largest share of bytes or time with skipping beyond the share of memory in use.
const OF_USED: f64 = 0.05;
/// Longest delay of the first page with hints or a map, in milliseconds.
const FIRST_PAGE_MS: f64 = 1.0;

const BY_256: Learn = Learn::Ours(Way::Inflate(InflateBy::Pages(256), Give::DontNeed));
const BY_RANGES: Learn = Learn::Ours(Way::Inflate(InflateBy::Ranges, Give::DontNeed));

/// Main figures of the bench.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Summary {
    pub(super) bitmap_ms: Option<f64>,
    pub(super) hints_ms: Option<f64>,
    pub(super) inflate_256_ms: Option<f64>,
    pub(super) inflate_ranges_ms: Option<f64>,
    /// Time of an inflation by 256 pages divided by the time of the map.
    pub(super) ratio: Option<f64>,
    /// Migration time with the map divided by the time without it.
    pub(super) migrate_ratio_time: Option<f64>,
    pub(super) migrate_ratio_bytes: Option<f64>,
    /// Share of memory in use, of the memory that is sent without skipping.
    pub(super) used_share: Option<f64>,
}

impl Summary {
    pub(super) fn of(document: &Document) -> Self {
        let learn = |side| metric(document, "learn", side, "total_ms");
        let moved = |side, name| metric(document, "move", Move::Ours(side), name);
        let over = |name| Some(moved(FreePageSource::Map, name)? / moved(FreePageSource::Off, name)?);
        let (bitmap_ms, inflate_256_ms) = (learn(Learn::Ours(Way::Map)), learn(BY_256));
        let sent = moved(FreePageSource::Off, "data_mb");
        Self {
            bitmap_ms,
            hints_ms: learn(Learn::Ours(Way::Hints)),
            inflate_256_ms,
            inflate_ranges_ms: learn(BY_RANGES),
            ratio: inflate_256_ms.zip(bitmap_ms).map(|(slow, fast)| slow / fast),
            migrate_ratio_time: over("total_ms"),
            migrate_ratio_bytes: over("wire_mb"),
            used_share: sent
                .zip(moved(FreePageSource::Off, "freed_mb"))
                .map(|(sent, freed)| 1.0 - freed / sent),
        }
    }

    /// Returns the figures under their names in the summary.
    pub(super) fn fields(&self) -> [(&'static str, Option<f64>); 8] {
        [
            ("bitmap_ms", self.bitmap_ms),
            ("hints_ms", self.hints_ms),
            ("inflate_256_ms", self.inflate_256_ms),
            ("inflate_ranges_ms", self.inflate_ranges_ms),
            ("ratio", self.ratio),
            ("migrate_ratio_time", self.migrate_ratio_time),
            ("migrate_ratio_bytes", self.migrate_ratio_bytes),
            ("used_share", self.used_share),
        ]
    }
}

/// Returns the goals whose figures are known, each with its figure.
pub(super) fn goals(document: &Document) -> Vec<Value> {
    let learn = |side: Learn| figure(document, "learn", side, "total_ms");
    let ratio = |slow: Option<Figure>, fast: Option<Figure>| slow?.over(fast?);
    let (map, by_256) = (learn(Learn::Ours(Way::Map)), learn(BY_256));
    let mut goals: Vec<Value> = [
        at_most("hints on demand, ms", KNOWN_MS.0, learn(Learn::Ours(Way::Hints))),
        at_most("incremental map, ms", KNOWN_MS.1, map),
        at_least("inflation by 256 / map", RATIO, ratio(by_256, map)),
        at_least("inflation by 256 / by ranges", OF_RANGES, ratio(by_256, learn(BY_RANGES))),
    ]
    .into_iter()
    .flatten()
    .collect();
    let used_share = Summary::of(document).used_share;
    for source in [FreePageSource::Hints, FreePageSource::Map] {
        goals.extend(of_move(document, source, used_share));
    }
    goals
}

fn of_move(document: &Document, source: FreePageSource, used_share: Option<f64>) -> Vec<Value> {
    let side = Move::Ours(source);
    let of = |source, name: &str| figure(document, "move", Move::Ours(source), name);
    let over = |name: &str| of(source, name)?.over(of(FreePageSource::Off, name)?);
    let mut goals = Vec::new();
    if let Some(most) = used_share.map(|share| share + OF_USED) {
        goals.extend(at_most(format!("{side}: bytes / without"), most, over("wire_mb")));
        goals.extend(at_most(format!("{side}: time / without"), most, over("total_ms")));
    }
    let first = |source| of(source, "first_page_ms");
    let later = first(source).zip(first(FreePageSource::Off)).map(|(with, without)| with.minus(without));
    goals.extend(at_most(format!("{side}: first page later by, ms"), FIRST_PAGE_MS, later));
    goals
}
