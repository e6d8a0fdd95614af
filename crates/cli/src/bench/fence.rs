//! `vmferry bench fence`: what it costs a guest that an etcd decides who owns it. The same guest moves with and without in turn; the etcd is one of
//! one member, on this host and its disk.

use super::{Finished, hop};
use crate::args::BenchArgs;
use crate::fence::FenceArg;
use crate::guest;
use anyhow::{Context, Result, anyhow};
use serde_json::json;
use std::sync::Arc;
use vmferry_bench::etcd::Etcd;
use vmferry_bench::host::Host;
use vmferry_bench::json::{Case, Document};
use vmferry_bench::stats::{Spread, turns};
use vmferry_engine::fence::Arbiter;
use vmferry_engine::{MigrationMode, Report, Settings};

const GUESTS: [(&str, &str); 2] = [("process", "64M"), ("kvm", "64M")];
const LOAD: &str = "uniform,ws=2M,data=16M,rate=20k,fill=random";
const MODES: [MigrationMode; 2] = [MigrationMode::Precopy, MigrationMode::Postcopy];
const ROUNDS: u16 = 20;
const QUICK: u16 = 5;

/// A figure's name, and what it is of a report.
type Figure = (&'static str, fn(&Report) -> f64);

const FIGURES: [Figure; 2] =
    [("downtime_ms", |report| report.downtime_ms), ("total_ms", |report| report.total_ms)];

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let rounds = args.rounds.unwrap_or(if args.quick { QUICK } else { ROUNDS });
    let mut document = Document::new("fence", Host::describe());
    let mut table = format!("{:24} {:>12} {:>12} {:>10}\n", "", "without, ms", "with, ms", "more");
    let etcd = Etcd::start();
    for (kind, memory) in GUESTS {
        for mode in MODES {
            let name = format!("{kind}/{mode}");
            if !args.only.is_empty() && !args.only.iter().any(|only| name.contains(only.as_str())) {
                continue;
            }
            let etcd = match &etcd {
                Ok(etcd) => etcd,
                Err(why) => {
                    document.cases.push(Case::skipped(name, why.to_string()));
                    continue;
                }
            };
            if let Some(why) = guest::no_kvm().filter(|_| kind == "kvm") {
                document.cases.push(Case::skipped(name, why));
                continue;
            }
            eprintln!("bench fence: {name}");
            let arg: FenceArg = etcd.fence().parse().map_err(|error: String| anyhow!(error))?;
            let sides =
                moves((kind, memory), mode, &arg.build(false)?, rounds).with_context(|| name.clone())?;
            account(&mut document, &mut table, &name, &sides);
        }
    }
    table.push_str(&document.skipped_text());
    document.summary.insert("rounds".into(), json!(rounds));
    Ok(Finished { document, table, page: None, failures: Vec::new() })
}

/// The reports of a guest's moves, without and with the fence.
fn moves(
    (kind, memory): (&str, &str),
    mode: MigrationMode,
    fence: &Arc<dyn Arbiter>,
    rounds: u16,
) -> Result<[Vec<Report>; 2]> {
    let (mut machine, target) = hop::running(kind, memory, LOAD)?;
    let plain = Settings { mode, ..Settings::default() };
    let settings = [plain.clone(), Settings { fence: Some(Arc::clone(fence)), ..plain }];
    let mut sides = [Vec::new(), Vec::new()];
    // The first of all finds nothing warm.
    (machine, _) = hop::once(machine, &target, &settings[1])?;
    for round in 0..rounds {
        for side in turns(2, round.into()) {
            let report;
            (machine, report) = hop::once(machine, &target, &settings[side])?;
            sides[side].push(report);
        }
    }
    Ok(sides)
}

fn account(document: &mut Document, table: &mut String, name: &str, sides: &[Vec<Report>; 2]) {
    let spread = |side: usize, of: fn(&Report) -> f64| Spread::of(sides[side].iter().map(of));
    for (side, word) in ["without", "with"].into_iter().enumerate() {
        let mut case = Case::new(format!("{name}/{word}")).param("moves", sides[side].len());
        for (figure, of) in FIGURES {
            let Some(spread) = spread(side, of) else { continue };
            case.metric(figure, spread.median);
            case.metric(format!("{figure}_min"), spread.min);
            case.metric(format!("{figure}_max"), spread.max);
        }
        document.cases.push(case);
    }
    for (figure, of) in FIGURES {
        let (Some(without), Some(with)) = (spread(0, of), spread(1, of)) else { continue };
        let more = with.median - without.median;
        let what = format!("{name} {}", figure.trim_end_matches("_ms"));
        table.push_str(&format!("{what:24} {:12.1} {:12.1} {more:10.1}\n", without.median, with.median));
        document.summary.insert(format!("{name} {figure}_more"), json!(more));
    }
}
