//! `vmferry-bench faults`: every fault at every phase of a migration, with real processes and a
//! loaded guest.
//!
//! The bench records the guest's outcome of each case and compares it with the allowed outcomes.

mod branch;
mod disk;
mod link;
mod plan;
mod rlimits;
mod run;
mod snapshot;
mod socket;

use super::args::BenchArgs;
use super::{Finished, no_kvm};
use crate::density::Budget;
use crate::etcd::Etcd;
use crate::host;
use anyhow::Result;
pub(super) use link::{Harm, Link};
pub(super) use plan::{Channel, Phase};
use plan::{End, FAULTS, Fault, NOT_DONE};
use run::{Case, Ran};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use vmferry_report::json::{Case as Line, Document};

const GUESTS: [&str; 2] = ["process", "kvm"];
const MODES: [&str; 7] = ["precopy", "postcopy", "hybrid", "file", "local", "snapshot", "branch"];
/// Modes with the same phases and faults. `--quick` selects one of them.
const OVER_A_LINK: [&str; 3] = ["precopy", "postcopy", "hybrid"];

/// Returns all cases. With `quick`, each fault at each phase occurs once, with a guest and, for a
/// move over a link, a mode that the seed selects.
fn cases(args: &BenchArgs) -> Vec<Case> {
    let mut all = Vec::new();
    for guest in GUESTS {
        for mode in MODES {
            for phase in Phase::of(mode) {
                let fits = FAULTS.into_iter().filter(|fault| fault.fits(mode, *phase));
                for fault in fits {
                    let case =
                        Case { guest, mode, phase: *phase, fault, with_arbiter: false, encoded: false };
                    all.push(case);
                    if fault.hits_encoded_pages(mode, *phase) {
                        all.push(Case { encoded: true, ..case });
                    }
                    if phase.with_arbiter() {
                        all.push(Case { with_arbiter: true, ..case });
                    }
                }
            }
        }
    }
    if args.quick {
        let mut groups: BTreeMap<String, Vec<Case>> = BTreeMap::new();
        for case in all {
            let mode = if OVER_A_LINK.contains(&case.mode) { "" } else { case.mode };
            groups
                .entry(format!("{mode}/{}/{}/{}/{}", case.phase, case.fault, case.with_arbiter, case.encoded))
                .or_default()
                .push(case);
        }
        let mut seed = args.seed;
        let mut pick = |among: &[Case]| {
            // Knuth's constants for a linear congruential generator of 64 bits: a seed selects the
            // same cases on every host.
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(seed >> 33).ok().and_then(|number| among.get(number % among.len())).copied()
        };
        all = groups.values().filter_map(|among| pick(among)).collect();
    }
    let wanted =
        |name: &str| args.only.is_empty() || args.only.iter().any(|only| name.contains(only.as_str()));
    all.retain(|case| wanted(&case.to_string()));
    all
}

/// Etcd that starts when the first case needs it, because a running one writes to the disk.
type SharedEtcd = OnceLock<Result<Etcd, String>>;

/// Returns the reason why a case is impossible on this host.
fn impossible(case: Case, etcd: &SharedEtcd) -> Option<String> {
    if case.guest == "kvm"
        && let Some(why) = no_kvm()
    {
        return Some(why);
    }
    if case.with_arbiter {
        let etcd = etcd.get_or_init(|| Etcd::start().map_err(|why| why.to_string()));
        if let Err(why) = etcd {
            return Some(why.clone());
        }
    }
    match case.fault {
        Fault::Clock if !rustix::process::geteuid().is_root() => {
            Some("a time namespace needs root".to_owned())
        }
        Fault::PressSource | Fault::PressTarget | Fault::PressChildren => {
            Budget::new(1 << 30).err().map(|why| why.to_string())
        }
        Fault::SlowDisk => disk::impossible(),
        Fault::FullDisk => snapshot::no_small_disk(),
        _ if case.mode == "file" => disk::impossible(),
        _ => None,
    }
}

/// Result of a case, for the document, the table and the summary.
struct Told {
    line: Line,
    row: String,
    end: Option<End>,
    failure: Option<String>,
}

fn words(ends: &[End]) -> String {
    ends.iter().map(End::to_string).collect::<Vec<_>>().join(" or ")
}

fn one(case: Case, etcd: &SharedEtcd) -> Told {
    let name = case.to_string();
    if let Some(why) = impossible(case, etcd) {
        return Told { line: Line::skipped(&name, why), row: String::new(), end: None, failure: None };
    }
    let allowed = case.fault.allowed(case.mode, case.phase, case.with_arbiter);
    let line = Line::new(&name)
        .param("guest", case.guest)
        .param("mode", case.mode)
        .param("phase", case.phase.to_string())
        .param("fault", case.fault.to_string())
        .param("fence", case.with_arbiter)
        .param("encoded", case.encoded);
    let arbiter = etcd.get().and_then(|etcd| Some(etcd.as_ref().ok()?.arbiter()));
    let ran = run::run(case, arbiter.as_deref().filter(|_| case.with_arbiter));
    match ran {
        Ok((Ran { end, took, killed }, attempt)) => {
            let allowed = if killed { case.fault.allowed_if_killed(case.mode, case.phase) } else { allowed };
            let text = words(allowed);
            let mut line = line
                .param("killed_for_memory", killed)
                .param("allowed", text.clone())
                .param("outcome", end.to_string())
                .param("attempt", attempt);
            line.metric("decided_ms", took.as_secs_f64() * 1e3);
            let failure = (!allowed.contains(&end)).then(|| format!("{name}: {end}, allowed is {text}"));
            let took = format!("{:.1} s", took.as_secs_f64());
            Told { line, row: format!("{name:<42} {end:<8} {took:>7}  {text}\n"), end: Some(end), failure }
        }
        Err(error) => {
            let text = words(allowed);
            Told {
                line: line.param("allowed", text.clone()).param("outcome", "broken"),
                row: format!("{name:<42} {:<8} {:>7}  {text}\n", "BROKEN", ""),
                end: None,
                failure: Some(format!("{name}: {error:#}")),
            }
        }
    }
}

/// Runs all cases, `jobs` at a time. Most of a case's time is spent waiting for timeouts.
fn all(cases: &[Case], jobs: usize) -> Vec<Told> {
    let (etcd, next) = (SharedEtcd::new(), AtomicUsize::new(0));
    let told: Vec<OnceLock<Told>> = cases.iter().map(|_| OnceLock::new()).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((case, told)) = cases.get(number).zip(told.get(number)) else { break };
                    eprintln!("faults: {}/{} {case}", number + 1, cases.len());
                    let first = told.set(one(*case, &etcd));
                    assert!(first.is_ok(), "{case} is told twice");
                }
            });
        }
    });
    told.into_iter().filter_map(OnceLock::into_inner).collect()
}

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let cases = cases(args);
    let mut document = Document::new("faults", host::describe());
    let (mut failures, mut counts) = (Vec::new(), BTreeMap::<String, u64>::new());
    let mut table = format!("{:<42} {:<8} {:>7}  allowed\n", "case", "guest", "after");
    for Told { line, row, end, failure } in all(&cases, args.jobs.into()) {
        document.cases.push(line);
        table.push_str(&row);
        end.into_iter().for_each(|end| *counts.entry(end.to_string()).or_default() += 1);
        failures.extend(failure);
    }
    for (what, why) in NOT_DONE {
        document.cases.push(Line::skipped(what, why));
    }
    document.summary.insert("seed".into(), json!(args.seed));
    document.summary.insert("jobs".into(), json!(args.jobs));
    document.summary.insert("outcomes".into(), json!(counts));
    document.summary.insert("failures".into(), json!(failures));
    let table = format!("{table}{}{}", document.skipped_text(), document.failures_text());
    Ok(Finished { document, table, page: None, failures })
}
