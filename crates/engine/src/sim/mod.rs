//! Both sessions, the very code that ships, against each other: a fake clock, a link that delays, loses and damages, hosts
//! that fail at any step, people who cancel. One number makes one run; `VMFERRY_SIM_SEED=n` repeats it.
//!
//! Checked in every run: the guest never runs on both sides; it runs on the target only after the commit and only with
//! the memory that it had; whoever says how it ended is right; it ends. And so that a quiet simulation means something,
//! defects are planted and must be found.

mod fuzz;
mod guest;
mod here;
mod link;
mod rng;
mod there;
mod world;

/// The source's session and what it is fed, under one name as the target's are.
mod source {
    pub(super) use crate::source::events::{Action, Event, Pass};
    pub(super) use crate::source::session::Session;
    pub(super) use crate::source::{OnTimeout, Outcome, Settings};
}

use crate::source::Outcome;
use crate::target::session::Outcome as TargetOutcome;
use std::time::Instant;
use world::{Defect, Ending, World};

const SEEDS: u64 = 20_000;

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
    World::new(seed, defect).run()
}

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("VMFERRY_SIM_SEED").ok().and_then(|text| text.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..SEEDS,
    }
}

#[test]
fn no_seed_breaks_a_promise() {
    let (began, range) = (Instant::now(), seeds());
    let alone = range.end - range.start == 1;
    let mut counts = [0u64; 7];
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
        counts[match ending.source {
            Outcome::Completed => 0,
            Outcome::Cancelled(_) => 1,
            Outcome::Failed(_) if ending.committed => 2,
            Outcome::Failed(_) => 3,
            Outcome::Unknown(_) if ending.target == TargetOutcome::Completed => 4,
            Outcome::Unknown(_) | Outcome::Lost(_) => 5,
        }] += 1;
        counts[6] += u64::from(ending.resent > 0);
    }
    let seconds = began.elapsed().as_secs_f64();
    let [completed, cancelled, returned, failed, moved, stuck, resent] = counts;
    println!(
        "simulation: {} runs, {steps} steps in {seconds:.1} s ({:.0} runs/s): {completed} completed, {cancelled} \
         cancelled, {failed} failed before the commit, {returned} given back after it, unknown: {moved} moved and {stuck} \
         not; {resent} with damaged pages sent again",
        range.end - range.start,
        (range.end - range.start) as f64 / seconds,
    );
    // A simulation that no longer reaches a corner proves nothing about it.
    assert!(alone || counts.iter().all(|count| *count >= 20), "{counts:?}");
}

#[test]
fn planted_defects_are_found() {
    let defects = [
        Defect::LostPage,
        Defect::StartsAtLoad,
        Defect::ResumesAfterCommit,
        Defect::ProtectsLate,
        Defect::BlindToDamage,
    ];
    for defect in defects {
        let found = (0..2000).find_map(|seed| run(seed, defect).err().map(|broken| (seed, broken)));
        let (seed, broken) = found.unwrap_or_else(|| panic!("{defect:?} was not found"));
        println!("simulation: {defect:?} found by seed {seed}: {}", &broken[..broken.len().min(120)]);
    }
}
