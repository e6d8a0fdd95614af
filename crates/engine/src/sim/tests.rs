//! Simulation with many seeds in every build, and a check that every planted defect is found.
//! `VMFERRY_SIM_SEEDS=n` sets the number of runs, and `VMFERRY_SIM_SEED=n` repeats one.

use super::*;
use std::time::Instant;

/// Number of seeds: each kind of ending is reached ten times or more, and the first hundreds of
/// seeds find most planted defects.
const SEEDS: u64 = 30_000;

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
        let run = match run(seed) {
            Ok(run) => run,
            Err(broken) => panic!("seed {seed}: {broken}; replay with VMFERRY_SIM_SEED={seed}"),
        };
        if alone {
            println!("seed {seed}: {run}");
        }
        steps += run.steps();
        KINDS.iter().zip(&mut counts).for_each(|((_, is), count)| *count += u64::from(is(&run.0)));
    }
    let seconds = began.elapsed().as_secs_f64();
    let runs = range.end - range.start;
    println!(
        "simulation: {runs} runs, {steps} steps in {seconds:.1} s ({:.0} runs/s)",
        runs as f64 / seconds
    );
    KINDS.iter().zip(counts).for_each(|((what, _), count)| println!("{count:9} {what}"));
    // If the simulation no longer reached some kind, it would prove nothing about it. A smaller
    // number of runs reaches only some kinds.
    assert!(runs < SEEDS || counts.iter().all(|count| *count >= 5), "{counts:?}");
}

#[test]
fn planted_defects_are_found() {
    if vmferry_testkit::skip_long_search_if_emulated() {
        return;
    }
    for defect in planted() {
        let found =
            (0..20_000).find_map(|seed| run_planted(seed, &defect).err().map(|broken| (seed, broken)));
        let (seed, broken) = found.unwrap_or_else(|| panic!("{defect} was not found"));
        println!("simulation: {defect} found by seed {seed}: {}", &broken[..broken.len().min(120)]);
    }
}
