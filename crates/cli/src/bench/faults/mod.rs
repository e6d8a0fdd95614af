//! `vmferry bench faults`: every fault at every moment of a migration, with real processes and a loaded guest, and what became of the guest.

mod disk;
mod link;
mod plan;
mod run;

use super::Finished;
use crate::args::BenchArgs;
use crate::guest;
use anyhow::Result;
pub(super) use link::{Harm, Link};
pub(super) use plan::{Channel, Phase};
use plan::{End, FAULTS, Fault, NOT_DONE};
use run::{Case, Ran};
use serde_json::json;
use std::collections::BTreeMap;
use vmferry_bench::density::Budget;
use vmferry_bench::etcd::Etcd;
use vmferry_bench::host::Host;
use vmferry_bench::json::{Case as Line, Document};

const GUESTS: [&str; 2] = ["process", "kvm"];
const MODES: [&str; 4] = ["precopy", "postcopy", "hybrid", "file"];

/// All cases, or with `quick` each fault at each phase once, by a mode and a guest that the seed chooses.
fn cases(args: &BenchArgs) -> Vec<Case> {
    let mut all = Vec::new();
    for guest in GUESTS {
        for mode in MODES {
            for phase in Phase::of(mode) {
                let fits = FAULTS.into_iter().filter(|fault| fault.fits(mode, *phase));
                for fault in fits {
                    let case = Case { guest, mode, phase: *phase, fault, fenced: false };
                    all.push(case);
                    if phase.fenced() {
                        all.push(Case { fenced: true, ..case });
                    }
                }
            }
        }
    }
    if args.quick {
        let mut groups: BTreeMap<String, Vec<Case>> = BTreeMap::new();
        for case in all {
            groups.entry(format!("{}/{}/{}", case.phase, case.fault, case.fenced)).or_default().push(case);
        }
        let mut seed = args.seed;
        let mut pick = |among: &[Case]| {
            // Knuth's constants for a linear congruence of 64 bits: a seed chooses the same everywhere.
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

/// What makes a case impossible here.
fn impossible(case: Case, etcd: &mut Option<Result<Etcd, String>>) -> Option<String> {
    if case.guest == "kvm"
        && let Some(why) = guest::no_kvm()
    {
        return Some(why);
    }
    if case.fenced {
        // Only where it is needed: it writes to the disk.
        let etcd = etcd.get_or_insert_with(|| Etcd::start().map_err(|why| why.to_string()));
        if let Err(why) = etcd {
            return Some(why.clone());
        }
    }
    match case.fault {
        Fault::Clock if !rustix::process::geteuid().is_root() => {
            Some("a time namespace needs root".to_owned())
        }
        Fault::PressSource | Fault::PressTarget => Budget::new(1 << 30).err().map(|why| why.to_string()),
        _ if case.phase == Phase::Save => disk::impossible(),
        _ => None,
    }
}

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let cases = cases(args);
    let mut document = Document::new("faults", Host::describe());
    let mut etcd = None;
    let (mut failures, mut counts) = (Vec::new(), BTreeMap::<String, u64>::new());
    let mut table = format!("{:<42} {:<8} {:>7}  allowed\n", "case", "guest", "after");
    for (number, case) in cases.iter().enumerate() {
        let name = case.to_string();
        eprintln!("bench faults: {}/{} {name}", number + 1, cases.len());
        if let Some(why) = impossible(*case, &mut etcd) {
            document.cases.push(Line::skipped(&name, why));
            continue;
        }
        let allowed = case.fault.allowed(case.mode, case.phase, case.fenced);
        let text = allowed.iter().map(End::to_string).collect::<Vec<_>>().join(" or ");
        let mut line = Line::new(&name)
            .param("guest", case.guest)
            .param("mode", case.mode)
            .param("phase", case.phase.to_string())
            .param("fault", case.fault.to_string())
            .param("fence", case.fenced)
            .param("allowed", text.clone());
        let fence = etcd.as_ref().and_then(|etcd| Some(etcd.as_ref().ok()?.fence()));
        let ran = if case.phase == Phase::Save {
            disk::run(*case)
        } else {
            run::run(*case, fence.as_deref().filter(|_| case.fenced))
        };
        match ran {
            Ok(Ran { end, took, killed }) => {
                let allowed = if killed { case.fault.allowed_if_killed(case.phase) } else { allowed };
                let text = allowed.iter().map(End::to_string).collect::<Vec<_>>().join(" or ");
                line = line.param("killed_for_memory", killed).param("allowed", text.clone());
                line = line.param("outcome", end.to_string());
                line.metric("decided_ms", took.as_secs_f64() * 1e3);
                *counts.entry(end.to_string()).or_default() += 1;
                if !allowed.contains(&end) {
                    failures.push(format!("{name}: {end}, allowed is {text}"));
                }
                let took = format!("{:.1} s", took.as_secs_f64());
                table.push_str(&format!("{name:<42} {end:<8} {took:>7}  {text}\n"));
            }
            Err(error) => {
                failures.push(format!("{name}: {error:#}"));
                line = line.param("outcome", "broken");
                table.push_str(&format!("{name:<42} {:<8} {:>7}  {text}\n", "BROKEN", ""));
            }
        }
        document.cases.push(line);
    }
    for (what, why) in NOT_DONE {
        document.cases.push(Line::skipped(what, why));
    }
    document.summary.insert("seed".into(), json!(args.seed));
    document.summary.insert("outcomes".into(), json!(counts));
    document.summary.insert("failures".into(), json!(failures));
    let table = format!("{table}{}{}", document.skipped_text(), document.failures_text());
    Ok(Finished { document, table, page: None, failures })
}
