//! Group `return`: whole migrations of a guest to a host that has an older snapshot of the guest.

use std::fmt;
use std::time::Duration;

use serde_json::Value;
use vmferry_report::Spread;
use vmferry_report::json::Document;

use super::{Options, OurRunner};
use crate::cases::{self, Figures, figure};
use crate::goal::at_most;
use crate::link::{Link, Shape, Tools};
use crate::reaper::to_f64;
use crate::result::MigrationResult;
use crate::rounds::{Rounds, SideRuns, Stop, enough_memory};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// Memory of a guest beyond its data: the guest itself, its counters, and pages of zeros.
const SPARE: u64 = 64 * MIB;

/// Share of the data that the guest changes after the snapshot, as a divisor: 5 %.
const CHANGED: u64 = 20;

/// Name of the case whose ratios are in the summary.
const ONE: &str = "1gbit";

/// Largest share of the bytes, and of the time, that the project accepts with 5 % of the pages
/// changed.
const GOALS: [(&str, &str, f64); 2] =
    [("return_bytes_share", "wire_to_whole", 0.07), ("return_time_share", "total_to_whole", 0.15)];

/// Target of a move back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReturnSide {
    /// The target has no snapshot.
    Whole,
    /// The target has a snapshot of the guest (`run --have`).
    Known,
}

impl fmt::Display for ReturnSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "ours-whole",
            Self::Known => "ours-known",
        })
    }
}

/// Guest, and the link that it moves over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReturnSpec {
    /// Name in the results, without the group.
    pub name: &'static str,
    /// Shape of the link. `None` means loopback.
    pub shape: Option<Shape>,
    /// Bytes of the memory that have content, all of it random.
    pub data: u64,
    /// Number of writes per second. The guest writes one page of its working set after the other.
    pub rate: u64,
}

impl ReturnSpec {
    /// Returns all cases.
    pub(super) fn all() -> Vec<Self> {
        let shape = Some(Shape { bits_per_s: 1_000_000_000, congestion: None });
        // The rates are so low that few pages are sent twice.
        vec![
            Self { name: ONE, shape, data: 256 * MIB, rate: 1000 },
            Self { name: "loopback", shape: None, data: 1024 * MIB, rate: 4000 },
        ]
    }

    /// Returns the memory of the guest in bytes.
    pub fn memory(&self) -> u64 {
        self.data + SPARE
    }

    /// Returns the workload, as on the guest's command line.
    pub fn workload(&self) -> String {
        let (data, ws) = (self.data / MIB, (self.changed_pages() * PAGE) >> 10);
        format!("sequential,ws={ws}K,data={data}M,rate={},fill=random", self.rate)
    }

    /// Returns the number of pages that the guest changes after the snapshot.
    fn changed_pages(&self) -> u64 {
        self.data / CHANGED / PAGE
    }

    /// Returns the time in which the guest changes its working set once, and a reserve.
    pub fn settle(&self) -> Duration {
        Duration::from_secs_f64(1.2 * to_f64(self.changed_pages()) / to_f64(self.rate))
    }
}

/// Result of a move back.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Return {
    /// Figures of the migration.
    pub result: MigrationResult,
    /// Number of pages whose hash was sent, and of those that the target knew. `None` if no hash
    /// was sent.
    pub known: Option<(u64, u64)>,
}

type Runs = SideRuns<ReturnSide, Return>;

/// Runs all selected moves.
pub(super) fn run(
    options: &Options,
    ours: &mut dyn OurRunner,
    tools: &Tools,
    rounds: &mut Rounds<'_>,
    document: &mut Document,
) {
    for spec in &options.returns {
        let name = |side: ReturnSide| format!("return/{}/{side}", spec.name);
        let sides = [ReturnSide::Whole, ReturnSide::Known];
        let sides: Vec<ReturnSide> = sides.into_iter().filter(|side| options.wants(&name(*side))).collect();
        if sides.is_empty() {
            continue;
        }
        let link = Link::of(tools, spec.shape);
        let runs = rounds.run(sides, name, |side, _: &[Runs]| {
            let link = link.as_ref().map_err(|why| Stop::Skip(why.clone()))?;
            enough_memory(spec.memory())?;
            Ok(ours.go_back(spec, side, link)?)
        });
        add_case(document, spec, &runs);
    }
}

/// Returns the figures of a run. A figure that was not measured is absent.
fn figures(run: &Return) -> Figures {
    let result = &run.result;
    let mut figures = result.times();
    let cpu = result.cpu_source + result.cpu_destination;
    figures.insert("cpu_ms", cpu.as_secs_f64() * 1e3);
    figures.extend(result.wire_bytes.map(|wire| ("wire_mb", to_f64(wire) / 1e6)));
    figures.extend(result.passes.map(|passes| ("passes", to_f64(passes))));
    if let Some((hashes, known)) = run.known {
        figures.extend([("hashed_pages", to_f64(hashes)), ("known_pages", to_f64(known))]);
    }
    figures
}

fn add_case(document: &mut Document, spec: &ReturnSpec, sides: &[Runs]) {
    let params = [
        ("kind", Value::from("return")),
        ("group", "return".into()),
        ("link", spec.name.into()),
        ("workload", spec.workload().into()),
        ("memory_bytes", spec.memory().into()),
        ("data_bytes", spec.data.into()),
        ("changed_bytes", (spec.changed_pages() * PAGE).into()),
    ];
    let first = document.cases.len();
    cases::add(document, (&format!("return/{}", spec.name), &params), sides, figures);
    let by_round = |runs: &Runs, name: &str| -> Vec<Option<f64>> {
        runs.rounds.iter().map(|run| figures(run.as_ref()?).get(name).copied()).collect()
    };
    let of = |side| sides.iter().find(|runs| runs.side == side);
    let (Some(whole), Some(known)) = (of(ReturnSide::Whole), of(ReturnSide::Known)) else { return };
    let case = document.cases[first..].iter_mut().zip(sides).find(|(_, runs)| runs.side == known.side);
    let Some((case, _)) = case else { return };
    for (ratio, compared) in
        [("total_to_whole", "total_ms"), ("wire_to_whole", "wire_mb"), ("cpu_to_whole", "cpu_ms")]
    {
        case.spread(ratio, Spread::of_ratios(&by_round(known, compared), &by_round(whole, compared)));
    }
}

/// Adds the figures of the moves to the summary, and returns their goals.
pub(super) fn finish(document: &mut Document) -> Vec<Value> {
    let group = format!("return/{ONE}");
    let found =
        GOALS.map(|(name, metric, most)| (name, most, figure(document, &group, ReturnSide::Known, metric)));
    let values =
        found.iter().filter_map(|(name, _, got)| Some(((*name).to_owned(), got.as_ref()?.median.into())));
    document.summary.extend(values);
    found.into_iter().filter_map(|(name, most, got)| at_most(name, most, got)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_report::host::Host;

    fn runs(side: ReturnSide, rounds: &[(u64, u64)], known: Option<(u64, u64)>) -> Runs {
        let of = |(ms, wire): &(u64, u64)| {
            let total = Duration::from_millis(*ms);
            let result = MigrationResult { total, wire_bytes: Some(*wire), ..MigrationResult::default() };
            Some(Return { result, known })
        };
        SideRuns { side, rounds: rounds.iter().map(of).collect(), skipped: None }
    }

    #[test]
    fn shares_are_taken_within_the_rounds() {
        let mut document = Document::new("codec", Host::default());
        let spec = &ReturnSpec::all()[0];
        let sides = [
            runs(ReturnSide::Whole, &[(2000, 250_000_000), (4000, 250_000_000), (2000, 250_000_000)], None),
            runs(
                ReturnSide::Known,
                &[(400, 15_000_000), (400, 15_000_000), (200, 20_000_000)],
                Some((65_536, 62_000)),
            ),
        ];
        add_case(&mut document, spec, &sides);
        let goals = finish(&mut document);
        let case = document.cases.iter().find(|case| case.name == "return/1gbit/ours-known").unwrap();
        assert_eq!((case.metrics["total_to_whole"], case.metrics["total_to_whole_max"]), (0.1, 0.2));
        assert_eq!(case.metrics["known_pages"], 62_000.0);
        assert_eq!(document.summary["return_bytes_share"], 0.06);
        assert_eq!((goals.len(), document.summary["return_time_share"].as_f64()), (2, Some(0.1)));
        let whole = &document.cases[0];
        assert!(whole.name.ends_with("ours-whole") && !whole.metrics.contains_key("wire_to_whole"));
    }

    #[test]
    fn guest_changes_its_working_set_before_the_move() {
        for spec in ReturnSpec::all() {
            let writes = spec.settle().as_secs_f64() * to_f64(spec.rate);
            assert!(writes > to_f64(spec.changed_pages()), "{}", spec.name);
            assert!(spec.workload().parse::<vmferry_guest_abi::Workload>().is_ok(), "{}", spec.workload());
        }
    }

    #[test]
    fn document_without_the_group_has_no_shares() {
        let mut document = Document::new("codec", Host::default());
        assert!(finish(&mut document).is_empty());
        assert!(!document.summary.contains_key("return_bytes_share"));
    }
}
