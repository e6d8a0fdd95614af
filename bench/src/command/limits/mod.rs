//! `vmferry-bench limits`: many guests at once, a very large guest, hostile peers, and thousands of
//! connections to each endpoint.
//!
//! The bench measures the host resources that the processes use, and the effect on their guests.

mod crowd;
mod fleet;
mod pair;
mod peers;

use super::args::BenchArgs;
use super::{Finished, no_kvm};
use crate::host;
use anyhow::Result;
use serde_json::json;
use vmferry_report::json::{Case, Document};

/// Function that runs one case. It adds its figures to the case, and violated expectations to the
/// list.
type Trial = fn(&mut Case, bool, &mut Vec<String>) -> Result<()>;

const TRIALS: [(&str, Trial); 14] = [
    ("process/fleet", |case, quick, wrong| fleet::fleet("process", case, quick, wrong)),
    ("kvm/fleet", |case, quick, wrong| fleet::fleet("kvm", case, quick, wrong)),
    ("process/large/precopy", |case, quick, wrong| fleet::large("precopy", case, quick, wrong)),
    ("process/large/hybrid", |case, quick, wrong| fleet::large("hybrid", case, quick, wrong)),
    ("process/target-silent", |case, _, wrong| peers::no_answer(case, wrong)),
    ("process/deaf/setup", |case, _, wrong| peers::deaf("setup", case, wrong)),
    ("process/deaf/control", |case, _, wrong| peers::deaf("control", case, wrong)),
    ("process/deaf/bulk", |case, _, wrong| peers::deaf("bulk", case, wrong)),
    ("process/sources-silent", |case, quick, wrong| peers::sources(peers::Bad::Silent, case, quick, wrong)),
    ("process/sources-trickle", |case, quick, wrong| peers::sources(peers::Bad::Trickle, case, quick, wrong)),
    ("process/sources-hello", |case, quick, wrong| peers::sources(peers::Bad::Hello, case, quick, wrong)),
    ("process/crowd/migration", |case, quick, wrong| {
        crowd::crowd(crowd::Endpoint::Migration, case, quick, wrong)
    }),
    ("process/crowd/control", |case, quick, wrong| {
        crowd::crowd(crowd::Endpoint::Control, case, quick, wrong)
    }),
    ("process/crowd/metrics", |case, quick, wrong| {
        crowd::crowd(crowd::Endpoint::Metrics, case, quick, wrong)
    }),
];

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut document = Document::new("limits", host::describe());
    let (mut failures, mut table) = (Vec::new(), String::new());
    for (name, trial) in TRIALS {
        if !args.only.is_empty() && !args.only.iter().any(|only| name.contains(only.as_str())) {
            continue;
        }
        if let Some(why) = no_kvm().filter(|_| name.starts_with("kvm")) {
            document.cases.push(Case::skipped(name, why));
            continue;
        }
        eprintln!("limits: {name}");
        let (mut case, mut wrong) = (Case::new(name).param("quick", args.quick), Vec::new());
        if let Err(error) = trial(&mut case, args.quick, &mut wrong) {
            wrong.push(format!("{error:#}"));
        }
        table.push_str(&format!("{name}\n"));
        for (name, value) in &case.metrics {
            table.push_str(&format!("  {name:<34} {value:>12.1}\n"));
        }
        for wrong in &wrong {
            eprintln!("limits: {name}: FAILED: {wrong}");
        }
        failures.extend(wrong.into_iter().map(|wrong| format!("{name}: {wrong}")));
        document.cases.push(case);
    }
    document.summary.insert("failures".into(), json!(failures));
    let table = format!("{table}{}{}", document.skipped_text(), document.failures_text());
    Ok(Finished { document, table, page: None, failures })
}
