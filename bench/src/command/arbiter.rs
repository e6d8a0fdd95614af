//! `vmferry-bench arbiter`: cost of an arbiter (etcd) to a guest.
//!
//! A guest moves from one process to another, with and without the arbiter in turn. The etcd has
//! one member, on this host and its disk.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::side::{Folder, Side, Start};
use super::{Finished, no_kvm};
use crate::etcd::Etcd;
use crate::host;
use crate::rounds::turns;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

const GUESTS: [(&str, &str); 2] = [("process", "64M"), ("kvm", "64M")];
const LOAD: &str = "uniform,ws=2M,data=16M,rate=20k,fill=random";
const MODES: [&str; 2] = ["precopy", "postcopy"];
const ROUNDS: u16 = 20;
const QUICK: u16 = 5;

/// Figures of a migration's report.
const FIGURES: [&str; 2] = ["downtime_ms", "total_ms"];

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let rounds = args.rounds.unwrap_or(if args.quick { QUICK } else { ROUNDS });
    let mut document = Document::new("fence", host::describe());
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
            if let Some(why) = no_kvm().filter(|_| kind == "kvm") {
                document.cases.push(Case::skipped(name, why));
                continue;
            }
            eprintln!("fence: {name}");
            let sides = moves((kind, memory), mode, &etcd.arbiter(), rounds).with_context(|| name.clone())?;
            account(&mut document, &mut table, &name, &sides);
        }
    }
    table.push_str(&document.skipped_text());
    document.summary.insert("rounds".into(), json!(rounds));
    Ok(Finished { document, table, page: None, failures: Vec::new() })
}

/// Returns the reports of moves without and with the arbiter.
fn moves(
    guest: (&'static str, &'static str),
    mode: &'static str,
    arbiter: &str,
    rounds: u16,
) -> Result<[Vec<Value>; 2]> {
    let mut sides = [Vec::new(), Vec::new()];
    // The first move finds cold caches, so its report is dropped.
    once(guest, mode, Some(arbiter))?;
    for round in 0..rounds {
        for side in turns(2, round.into()) {
            sides[side].push(once(guest, mode, (side == 1).then_some(arbiter))?);
        }
    }
    Ok(sides)
}

/// Moves a guest from one process to another, and returns the report.
fn once(
    (guest, memory): (&'static str, &'static str),
    mode: &'static str,
    arbiter: Option<&str>,
) -> Result<Value> {
    let folder = Folder::new()?;
    let start = |name: &str, args: [&str; 2]| {
        let arbiter = arbiter.into_iter().flat_map(|arbiter| ["--fence", arbiter]);
        let args = args.into_iter().chain(arbiter).map(String::from).collect();
        Side::start(Start { guest, memory, args, ..Start::default() }, &folder.0, name)
    };
    let mut target = start("target", ["--incoming", "tcp:127.0.0.1:0"])?;
    let mut source = start("source", ["--workload", LOAD])?;
    let uri = target.incoming()?;
    source.working()?;
    source.command("migrate", serde_json::to_value(MigrateRequest { mode, ..MigrateRequest::to(&uri) })?)?;
    let report = source.wait("the migration's end", |status| !status["outcome"].is_null())?;
    ensure!(
        report["outcome"] == "completed",
        "the migration ended as {}: {}",
        report["outcome"],
        report["error"]
    );
    target.wait("all of the guest", |status| status["vm"]["place"] == "running")?;
    target.whole()?;
    Ok(report)
}

fn account(document: &mut Document, table: &mut String, name: &str, sides: &[Vec<Value>; 2]) {
    let spread = |side: usize, figure: &str| {
        Spread::of(sides[side].iter().filter_map(|report| report[figure].as_f64()))
    };
    for (side, word) in ["without", "with"].into_iter().enumerate() {
        let mut case = Case::new(format!("{name}/{word}")).param("moves", sides[side].len());
        FIGURES.into_iter().for_each(|figure| case.spread(figure, spread(side, figure)));
        document.cases.push(case);
    }
    for figure in FIGURES {
        let (Some(without), Some(with)) = (spread(0, figure), spread(1, figure)) else { continue };
        let more = with.median - without.median;
        let what = format!("{name} {}", figure.trim_end_matches("_ms"));
        table.push_str(&format!("{what:24} {:12.1} {:12.1} {more:10.1}\n", without.median, with.median));
        document.summary.insert(format!("{name} {figure}_more"), json!(more));
    }
}
