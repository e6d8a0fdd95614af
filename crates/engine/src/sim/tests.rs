//! So many seeds in every build, and every planted defect found. `VMFERRY_SIM_SEEDS=n` makes so many runs,
//! `VMFERRY_SIM_SEED=n` repeats one.

use super::*;
use std::time::Instant;

/// Each kind of ending is reached some ten times at least; most planted defects are found by the first hundreds.
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
    // A simulation that no longer reaches a corner proves nothing about it. Fewer runs reach only some.
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
