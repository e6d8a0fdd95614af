//! vmferry's side of `vmferry-bench stalls`: a guest whose stalls are observed while it moves.

use super::args::BenchArgs;
use super::postcopy::{Stalls, result};
use super::{Finished, ended, meters, no_kvm, program, request};
use crate::result::MigrationResult;
use crate::stalls::{
    self, CaseSpec, Channels, FLOOR, Options, OurError, OurRunner, Outcome, POLL, Run, on_target,
};
use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use vmferry_client::{Pair, Setup};

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("stalls: {what}");
    let Outcome { document, failures } = stalls::run(&options, &mut Ours, &mut progress);
    let (table, page) = (stalls::table(&document), stalls::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(&mut self, spec: &CaseSpec, channels: Channels) -> Result<Run, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        move_once(spec, channels).map_err(|error| OurError::Failed(error.into()))
    }

    fn stay(&mut self, spec: &CaseSpec) -> Result<Run, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        stay(spec).map_err(|error| OurError::Failed(error.into()))
    }
}

fn setup(spec: &CaseSpec) -> Result<Setup<'static>> {
    Ok(Setup {
        cpus: spec.vcpus,
        // QEMU has no balloon in this bench.
        balloon: false,
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload.clone())
    })
}

/// Observes a guest that is not moved, while all processors are busy.
fn stay(spec: &CaseSpec) -> Result<Run> {
    let mut pair = Pair::start(&setup(spec)?, &AtomicBool::new(false))?;
    let mut here = Stalls::before(&mut pair.source, spec.memory, (spec.warm_up, POLL))?;
    let processors = std::thread::available_parallelism()?.get();
    let others = processors.saturating_sub(usize::try_from(spec.vcpus)?);
    let (start, end) = (Instant::now(), AtomicBool::new(false));
    here.count_from(start);
    std::thread::scope(|scope| {
        for _ in 0..others {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    std::hint::black_box(());
                }
            });
        }
        let mut observe = || {
            while start.elapsed() < FLOOR {
                std::thread::sleep(POLL);
                here.listen(&mut pair.source)?;
            }
            Ok::<_, anyhow::Error>(())
        };
        let observed = observe();
        end.store(true, Ordering::Relaxed);
        observed
    })?;
    Ok(Run { source: here.observed, end: start.elapsed().as_secs_f64(), ..Run::default() })
}

fn move_once(spec: &CaseSpec, channels: Channels) -> Result<Run> {
    let mut pair = Pair::start(&setup(spec)?, &AtomicBool::new(false))?;
    let request = request(spec, channels, &pair.uri)?;
    let mut here = Stalls::before(&mut pair.source, spec.memory, (spec.warm_up, POLL))?;
    let meters = meters(&pair)?;
    let start = Instant::now();
    here.count_from(start);
    pair.migrate(&request)?;
    let report = ended(&mut pair.source, POLL, |source| here.listen(source).map(drop))?;
    let end = start.elapsed().as_secs_f64();
    let (cpu_source, cpu_destination) = (meters[0].used()?, meters[1].used()?);
    // The stopped guest is still in the memory of the source.
    here.listen(&mut pair.source)?;
    let mut there = Stalls::since(start);
    let look = || Ok::<_, anyhow::Error>(there.listen(&mut pair.target)?.cloned());
    let target = on_target(here.observed.last(), look)?;
    let passes = report["passes"].as_array().map(|passes| passes.len() as u64);
    Ok(Run {
        source: here.observed,
        target: target.context("the guest did not report from the target within 10 s")?,
        switched: end,
        end,
        result: MigrationResult { cpu_source, cpu_destination, passes, ..result(&report)? },
        ..Run::default()
    })
}
