//! Command `cargo sim`: simulates thousands of migrations per second under a fake clock. Each run
//! has a seed that replays it.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_engine::sim;

/// Maximum number of failed seeds that the output names.
const MOST_NAMED: usize = 10;
/// Number of seeds that a thread takes at once.
const TAKEN: u64 = 64;

/// Simulate migrations: the state machines that ship, a fake clock, faulty links and hosts
#[derive(Debug, Parser)]
#[command(name = "cargo sim", bin_name = "cargo sim", version)]
struct Args {
    /// Number of runs
    #[arg(long, default_value_t = 100_000)]
    seeds: u64,
    /// Number of the first seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Number of threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=256))]
    jobs: u64,
    /// Replay one run and print its result
    #[arg(long, conflicts_with_all = ["seeds", "first", "jobs", "json", "planted"])]
    seed: Option<u64>,
    /// Stop after this number of seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Write the figures to a file, or to standard output if it is `-`
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Inject each known defect and print the seed that finds it
    #[arg(long)]
    planted: bool,
}

/// Result of all runs.
#[derive(Debug, Clone, Default)]
struct Tally {
    runs: u64,
    steps: u64,
    kinds: Vec<u64>,
    broken: Vec<(u64, String)>,
}

impl Tally {
    fn new() -> Self {
        Self { kinds: vec![0; sim::kinds().count()], ..Self::default() }
    }

    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.steps += other.steps;
        self.kinds.iter_mut().zip(&other.kinds).for_each(|(all, more)| *all += more);
        self.broken.extend_from_slice(&other.broken);
    }

    fn take(&mut self, seed: u64, run: Result<sim::Run, String>) {
        self.runs += 1;
        match run {
            Ok(run) => {
                self.steps += run.steps();
                run.kinds().for_each(|kind| self.kinds[kind] += 1);
            }
            Err(broken) => self.broken.push((seed, broken)),
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match args.seed {
        Some(seed) => replay(seed),
        None if args.planted => plant(args.seeds),
        None => simulate(&args),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo sim: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Runs one seed. A panic of a session is a broken promise like any other.
fn run(seed: u64) -> Result<sim::Run, String> {
    catch_unwind(AssertUnwindSafe(|| sim::run(seed))).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panicked: {}", said.unwrap_or_default()))
    })
}

fn replay(seed: u64) -> Result<bool> {
    match run(seed) {
        Ok(run) => println!("seed {seed}: {run}"),
        Err(broken) => {
            println!("seed {seed}: {broken}");
            return Ok(false);
        }
    }
    Ok(true)
}

fn plant(seeds: u64) -> Result<bool> {
    let mut all = true;
    for defect in sim::planted() {
        let found =
            (0..seeds).find_map(|seed| sim::run_planted(seed, &defect).err().map(|broken| (seed, broken)));
        match found {
            Some((seed, broken)) => {
                let short: String = broken.chars().take(100).collect();
                println!("{defect}: found by seed {seed}: {short}");
            }
            None => {
                all = false;
                println!("{defect}: NOT FOUND by {seeds} seeds");
            }
        }
    }
    Ok(all)
}

fn simulate(args: &Args) -> Result<bool> {
    let end = args.first.checked_add(args.seeds).context("seeds are 64 bits")?;
    ensure!(args.seeds > 0, "--seeds must be at least 1");
    let began = Instant::now();
    let deadline = args.seconds.map(|seconds| began + Duration::from_secs(seconds));
    let (next, over) = (AtomicU64::new(args.first), AtomicBool::new(false));
    let work = || {
        let mut tally = Tally::new();
        loop {
            let from = next.fetch_add(TAKEN, Ordering::Relaxed);
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if from >= end || late || over.load(Ordering::Relaxed) {
                return tally;
            }
            for seed in from..end.min(from.saturating_add(TAKEN)) {
                tally.take(seed, run(seed));
            }
            if tally.broken.len() >= MOST_NAMED {
                over.store(true, Ordering::Relaxed);
            }
        }
    };
    let mut all = Tally::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.jobs).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            // `run` catches a panic of a simulated migration.
            all.add(&thread.join().expect("a thread that only counts"));
        }
    });
    all.broken.sort_unstable();
    tell(args, &all, began.elapsed())?;
    Ok(all.broken.is_empty() && (all.runs == args.seeds || deadline.is_some()))
}

fn tell(args: &Args, all: &Tally, took: Duration) -> Result<()> {
    let (seconds, jobs) = (took.as_secs_f64(), args.jobs);
    let a_minute = all.runs as f64 / seconds * 60.0;
    let Tally { runs, steps, kinds, broken } = all;
    let figures = serde_json::json!({
        "sim": {
            "version": env!("CARGO_PKG_VERSION"),
            "first_seed": args.first, "seeds": args.seeds, "jobs": jobs,
            "runs": runs, "steps": steps, "seconds": seconds, "migrations_per_minute": a_minute,
            "kinds": sim::kinds().zip(kinds).collect::<std::collections::BTreeMap<_, _>>(),
            "broken": broken,
        }
    });
    match &args.json {
        Some(file) if file.as_os_str() == "-" => println!("{figures:#}"),
        Some(file) => std::fs::write(file, format!("{figures:#}\n"))
            .with_context(|| format!("the figures cannot be written to {}", file.display()))?,
        None => {}
    }
    if args.json.as_ref().is_none_or(|file| file.as_os_str() != "-") {
        println!(
            "{runs} migrations, {steps} steps in {seconds:.1} s by {jobs} threads: {a_minute:.0} per minute"
        );
        sim::kinds().zip(kinds).for_each(|(what, count)| println!("{count:9} {what}"));
    }
    if runs < &args.seeds {
        eprintln!("stopped early: ran {runs} of {} seeds", args.seeds);
    }
    for (seed, what) in broken.iter().take(MOST_NAMED) {
        eprintln!("seed {seed}: {what}\n  replay it with: cargo sim --seed {seed}");
    }
    Ok(())
}
