//! Both sessions, the very code that ships, against each other: a fake clock, a link that delays, loses and damages, hosts
//! that fail at any step, people who cancel. One number makes one run; `VMFERRY_SIM_SEED=n` repeats it.
//!
//! Checked in every run: the guest never runs on both sides; it runs on the target only after the commit and only with
//! the memory that it had; once the target was told to run it, it comes back only by the target's word; of a guest that
//! runs before its memory is there no page comes twice, none is older than what the guest wrote, and if no host dies they
//! all come; no page is missed that the guest has not said to be free, though guests free pages, use them again, and lie;
//! whoever says how it ended is right; it ends. And so that a quiet simulation means something, defects are planted and must be
//! found. `VMFERRY_SIM_SEEDS=n` makes so many runs.

mod defect;
mod fuzz;
mod guest;
mod here;
mod here_free;
mod here_lazy;
mod here_pass;
mod judge;
mod link;
mod rng;
mod there;
mod there_lazy;
mod world;

/// The source's session and what it is fed, under one name as the target's are.
mod source {
    pub(super) use crate::source::events::{Action, Event, Pass};
    pub(super) use crate::source::session::Session;
    pub(super) use crate::source::{MigrationMode, OnTimeout, Outcome, Settings};
}

use crate::source::Outcome;
use crate::sync::unscheduled;
use crate::target::session::Outcome as TargetOutcome;
use std::time::Instant;
use world::{Defect, Ending, World};

const SEEDS: u64 = 60_000;

/// Names the seed if a session panics.
struct Running(u64);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation: panic in seed {0}; replay with VMFERRY_SIM_SEED={0}", self.0);
        }
    }
}

fn run(seed: u64, defect: Defect) -> Result<Ending, String> {
    let _running = Running(seed);
    unscheduled(|| World::new(seed, defect).run())
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn seeds() -> std::ops::Range<u64> {
    match number("VMFERRY_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("VMFERRY_SIM_SEEDS").unwrap_or(SEEDS),
    }
}

#[test]
fn no_seed_breaks_a_promise() {
    let (began, range) = (Instant::now(), seeds());
    let alone = range.end - range.start == 1;
    let mut counts = [0u64; KINDS.len()];
    let mut steps = 0;
    for seed in range.clone() {
        let ending = match run(seed, Defect::None) {
            Ok(ending) => ending,
            Err(broken) => panic!("seed {seed}: {broken}; replay with VMFERRY_SIM_SEED={seed}"),
        };
        if alone {
            println!("seed {seed}: {ending:?}");
        }
        steps += ending.steps;
        KINDS.iter().zip(&mut counts).for_each(|((_, is), count)| *count += u64::from(is(&ending)));
    }
    let seconds = began.elapsed().as_secs_f64();
    let runs = range.end - range.start;
    println!(
        "simulation: {runs} runs, {steps} steps in {seconds:.1} s ({:.0} runs/s)",
        runs as f64 / seconds
    );
    KINDS.iter().zip(counts).for_each(|((what, _), count)| println!("{count:9} {what}"));
    // A simulation that no longer reaches a corner proves nothing about it.
    assert!(alone || counts.iter().all(|count| *count >= 20), "{counts:?}");
}

type Kind = (&'static str, fn(&Ending) -> bool);

/// What is counted.
const KINDS: [Kind; 20] = [
    ("completed in precopy", |end| end.source == Some(Outcome::Completed) && !end.lazy),
    ("completed in postcopy without a break", |end| end.whole() && end.interruptions == 0),
    ("completed in postcopy after one", |end| end.whole() && end.interruptions == 1),
    ("completed in postcopy after several", |end| end.whole() && end.interruptions > 1),
    ("cancelled", |end| matches!(end.source, Some(Outcome::Cancelled(_)))),
    ("failed before the commit", |end| !end.committed && end.failed()),
    ("given back after it", |end| end.committed && end.failed() && end.interruptions == 0),
    ("given back over a new link", |end| end.committed && end.failed() && end.interruptions > 0),
    ("unknown, and moved", |end| end.unknown() && end.target == Some(TargetOutcome::Completed)),
    ("unknown, and not", |end| end.unknown() && end.target != Some(TargetOutcome::Completed)),
    ("lost", |end| matches!(end.source, Some(Outcome::Lost(_)))),
    ("source died, guest whole", |end| end.source.is_none() && end.target == Some(TargetOutcome::Completed)),
    ("guest dead with its hosts", |end| end.crashed && end.committed && end.target.is_none()),
    ("with damaged pages sent again", |end| end.resent > 0),
    ("moved by precopy without free pages", |end| end.moved() && !end.lazy && end.skipped > 0),
    ("moved by postcopy without free pages", |end| end.moved() && end.lazy && end.skipped > 0),
    ("moved early by itself", |end| end.lazy && end.moved() && end.did("postcopy")),
    ("moved after it slowed the guest by itself", |end| end.moved() && end.did("throttle")),
    ("with advice and nothing else to do", |end| end.did("advice")),
    ("with answers about free pages dropped", |end| end.dropped > 0),
];

impl Ending {
    fn whole(&self) -> bool {
        self.source == Some(Outcome::Completed) && self.lazy
    }

    fn did(&self, what: &str) -> bool {
        self.course.iter().any(|change| change == what)
    }

    fn moved(&self) -> bool {
        self.source == Some(Outcome::Completed)
    }

    fn failed(&self) -> bool {
        matches!(self.source, Some(Outcome::Failed(_)))
    }

    fn unknown(&self) -> bool {
        matches!(self.source, Some(Outcome::Unknown(_)))
    }
}

#[test]
fn planted_defects_are_found() {
    let defects = [
        Defect::LostPage,
        Defect::StartsAtLoad,
        Defect::ResumesAfterCommit,
        Defect::KeepsDisks,
        Defect::ProtectsLate,
        Defect::BlindToDamage,
        Defect::ResumesInPostcopy,
        Defect::OlderOverNewer,
        Defect::SendsTwice,
        Defect::ClaimSurvives,
        Defect::RetoldEarly,
        Defect::KeepsStale,
        Defect::ForgetsSuspects,
        Defect::CompleteEarly,
        Defect::ForgetsTheLast,
        Defect::EndsRenounced,
        Defect::StartsRenounced,
        Defect::DropsTheEnd,
        Defect::AsksFirst,
        Defect::ProtectsAfterAsking,
        Defect::ProtectsSent,
        Defect::TakesLateAnswers,
        Defect::SettlesEarly,
    ];
    for defect in defects {
        let found = (0..20_000).find_map(|seed| run(seed, defect).err().map(|broken| (seed, broken)));
        let (seed, broken) = found.unwrap_or_else(|| panic!("{defect:?} was not found"));
        println!("simulation: {defect:?} found by seed {seed}: {}", &broken[..broken.len().min(120)]);
    }
}
