//! Tests of the bench with scripted guests, without a VMM or QEMU.

use super::*;
use crate::result::MigrationResult;
use std::time::Duration;

/// Runner with scripted times.
struct Scripted {
    /// Milliseconds of an inflation by 256 pages, of one by ranges, of hints, and of the map.
    learn: [u64; 4],
    /// Bytes and time with skipping, in percent of those without.
    skipping: u64,
    /// Milliseconds from the start to the first page with hints or the map.
    first_ms: u64,
}

const GOOD: Scripted = Scripted { learn: [1000, 10, 20, 1], skipping: 12, first_ms: 2 };

impl OurRunner for Scripted {
    fn tsc_khz(&mut self) -> Option<u32> {
        None
    }

    fn learn(&mut self, spec: &LearnSpec, way: Way) -> Result<Learned, OurError> {
        let [by_256, by_ranges, hints, map] = self.learn;
        let (total, inflation) = match way {
            Way::Inflate(InflateBy::Ranges, _) => (by_ranges, Some(Inflation::default())),
            Way::Inflate(InflateBy::Pages(16_384), _) => {
                return Err(OurError::Failed("the guest is gone".into()));
            }
            Way::Inflate(..) => (by_256, Some(Inflation::default())),
            Way::Hints => (hints, None),
            Way::Map => (map, None),
        };
        let pages = spec.inflate / 4096;
        Ok(Learned {
            total: Duration::from_millis(total),
            pages,
            free_pages: pages,
            inflation,
            ..Learned::default()
        })
    }

    fn give(&mut self, touched: u64, how: Drop) -> Result<Given, OurError> {
        if how.huge {
            return Err(OurError::Unavailable("no huge pages".into()));
        }
        Ok(Given { pages: touched / 4096, madvise: Duration::from_millis(5), returned: touched })
    }

    fn migrate(&mut self, spec: &MoveSpec, source: FreePageSource) -> Result<Moved, OurError> {
        let (percent, first) =
            if source == FreePageSource::Off { (100, 2) } else { (self.skipping, self.first_ms) };
        Ok(Moved {
            result: MigrationResult {
                total: Duration::from_millis(10 * percent),
                data_bytes: (spec.data + spec.alloc) / 100 * percent,
                wire_bytes: Some((spec.data + spec.alloc) / 100 * percent),
                ..MigrationResult::default()
            },
            first_page: Some(Duration::from_millis(first)),
            skipped_pages: Some(0),
            freed: spec.alloc,
            ..Moved::default()
        })
    }

    fn low(&mut self, _: &LowSpec, _: Claim) -> Result<LowMemory, OurError> {
        Ok(Self::LOW)
    }

    fn migrate_after(&mut self, spec: &MoveSpec, wait: AnswerWait, link: &Link) -> Result<Moved, OurError> {
        assert!(matches!(link, Link::Loopback));
        let waited = Some(Duration::from_millis(wait.ms.min(20)));
        Ok(Moved { waited, ..self.migrate(spec, FreePageSource::Hints)? })
    }
}

impl Scripted {
    const LOW: LowMemory = LowMemory {
        work: Duration::from_millis(40),
        waits_reported: 1,
        waits_held: 2,
        waits_balloon: 3,
        wait: Duration::from_millis(4),
        wait_max: Duration::from_millis(3),
        failed: 6,
        failed_held: 5,
        short_rounds: 4,
        inflate_short: 7,
        taken_back_pages: 1000,
        hint_releases: 8,
        missed: 9,
        hint_full: 10,
        deferred: 11,
    };
}

#[test]
fn figures_of_low_memory_are_in_every_side() {
    let outcome = bench(GOOD);
    for side in ["none", "balloon", "question", "reports"] {
        let name = format!("low/{side}");
        let case = outcome.document.cases.iter().find(|case| case.name == name).expect("a case");
        let of = |name: &str| case.metrics[name];
        assert_eq!((of("work_ms"), of("waits_held"), of("wait_max_ms")), (40.0, 2.0, 3.0));
        assert_eq!((of("taken_back_mb"), of("failed_held"), of("hint_full")), (4.096, 5.0, 10.0));
    }
    assert!(table(&outcome.document).contains("balloon"));
}

fn bench(mut runner: Scripted) -> Outcome {
    let mut options = Options { repeats: 2, touched: 1 << 20, ..Options::quick(None) };
    options.moved = MoveSpec { memory: 4 << 20, data: 100 << 10, alloc: 900 << 10 };
    options.ways.retain(|side| matches!(side, Learn::Ours(_)));
    options.moves.retain(|side| matches!(side, Move::Ours(_)));
    run(&options, &mut runner, &mut |_| {})
}

/// Returns the names of the goals with the verdict `met`.
fn with_verdict(outcome: &Outcome, met: impl Into<serde_json::Value>) -> Vec<&str> {
    let met = met.into();
    let goals = outcome.document.summary["goals"].as_array().unwrap();
    goals.iter().filter(|goal| goal["met"] == met).map(|goal| goal["name"].as_str().unwrap()).collect()
}

fn unmet(outcome: &Outcome) -> Vec<&str> {
    with_verdict(outcome, false)
}

#[test]
fn summary_has_the_documented_fields() {
    let outcome = bench(GOOD);
    let summary = &outcome.document.summary;
    let close = |name: &str, want: f64| {
        let got = summary[name].as_f64().unwrap();
        assert!((got - want).abs() < 1e-3, "{name}: {got}, want {want}");
    };
    close("bitmap_ms", 1.0);
    close("inflate_256_ms", 1000.0);
    close("ratio", 1000.0);
    close("migrate_ratio_time", 0.12);
    close("migrate_ratio_bytes", 0.12);
    close("used_share", 0.1);
    assert_eq!(unmet(&outcome), [""; 0]);
    assert_eq!(summary["goals"].as_array().unwrap().len(), 10);
    // The map takes exactly as long as the goal allows.
    assert_eq!(with_verdict(&outcome, "inconclusive"), ["incremental map, ms"]);
}

#[test]
fn goals_report_slow_results_as_unmet() {
    let slow = bench(Scripted { learn: [200, 100, 30, 2], skipping: 50, first_ms: 9 });
    assert_eq!(
        unmet(&slow),
        [
            "hints on demand, ms",
            "incremental map, ms",
            "inflation by 256 / map",
            "inflation by 256 / by ranges",
            "hints: bytes / without",
            "hints: time / without",
            "hints: first page later by, ms",
            "map: bytes / without",
            "map: time / without",
            "map: first page later by, ms",
        ]
    );
}

#[test]
fn failures_and_skips_are_reported_separately() {
    let outcome = bench(GOOD);
    assert_eq!(
        outcome.failures,
        [1, 2].map(|round| format!("learn/inflate-16384, round {round}: the guest is gone"))
    );
    let text = table(&outcome.document);
    for part in ["skipped drop/dontneed-huge: no huge pages", "FAILED learn/inflate-16384", "inflate-ranges"]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(page(&outcome.document).contains("no huge pages"));
}

#[test]
fn waits_are_compared_on_each_link() {
    let outcome = bench(GOOD);
    let waited = |side: &str| {
        let case = outcome.document.cases.iter().find(|case| case.name == format!("wait-loopback/{side}"));
        case.and_then(|case| case.metrics.get("waited_ms").copied())
    };
    assert_eq!([waited("0ms"), waited("50ms"), waited("200ms")], [Some(0.0), Some(20.0), Some(20.0)]);
    assert!(table(&outcome.document).contains("first answer ms"));
}
