//! vmferry's side of `vmferry-bench density`: guests in separate processes, with or without a
//! memory budget.

use super::args::BenchArgs;
use super::{Finished, no_kvm, program};
use crate::density::{self, Budget, Guest, GuestSpec, Options, OurError, OurRunner, Outcome, Started, Told};
use crate::host::available_memory;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::os::unix::process::ExitStatusExt;
use vmferry_client::{Environment, SameHost, Setup, SingleProcess};
use vmferry_vmm::{Vm, VmOptions};

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let available = available_memory();
    let mut options = if args.quick { Options::quick(available) } else { Options::full(available) };
    if let Some(rounds) = args.rounds.map(usize::from) {
        (options.repeats, options.fleet_repeats) = (rounds, rounds);
    }
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("density: {what}");
    let Outcome { document, failures } = density::run(&options, &mut Ours, &mut progress);
    let (table, page) = (density::table(&document), density::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn tsc_khz(&mut self) -> Option<u32> {
        Vm::new(VmOptions::new(16 << 20, 1)).ok().map(|vm| vm.tsc_khz())
    }

    fn start(&mut self, spec: &GuestSpec, budget: Option<&Budget>) -> Result<Started, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        let setup = Setup {
            cpus: spec.vcpus,
            guest_args: spec.args(),
            environment: budget.map_or(&SameHost as &dyn Environment, |budget| budget),
            ..Setup::new(program::vmferry().map_err(failed)?, spec.memory, spec.workload())
        };
        let kills = || budget.and_then(|budget| budget.kills().ok()).unwrap_or(0);
        let before = kills();
        match SingleProcess::start(&setup) {
            Ok(alone) => Ok(Started::Runs(Box::new(Process(alone)))),
            // The kernel killed this process or another one of the budget while this one started.
            Err(_) if kills() > before => Ok(Started::Killed),
            Err(error) => Err(failed(error)),
        }
    }
}

fn failed(error: anyhow::Error) -> OurError {
    OurError::Failed(error.into())
}

struct Process(SingleProcess);

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Process({})", self.0.runner.pid())
    }
}

impl Guest for Process {
    fn killed(&mut self) -> Result<bool, OurError> {
        match self.0.runner.ended().map_err(failed)? {
            None => Ok(false),
            Some(status) if status.signal() == Some(libc::SIGKILL) => Ok(true),
            Some(status) => Err(failed(anyhow::anyhow!("the guest's process ended: {status}"))),
        }
    }

    fn told(&mut self) -> Result<Option<Told>, OurError> {
        let answer = self.0.runner.client.call("alloc", json!({})).map_err(failed)?;
        if answer["guest"].is_null() {
            return Ok(None);
        }
        told(&answer).map(Some).map_err(failed)
    }

    fn resident(&mut self) -> Result<u64, OurError> {
        density::resident(self.0.runner.pid()).map_err(|error| failed(error.into()))
    }
}

fn told(answer: &Value) -> Result<Told> {
    let vcpus = answer["vcpus"].as_array().context("no vCPUs")?;
    let each =
        |name: &str| vcpus.iter().map(move |vcpu| vcpu[name].as_u64().unwrap_or(0)).collect::<Vec<_>>();
    let sum = |name: &str| each(name).iter().sum::<u64>();
    let most = |name: &str| each(name).into_iter().max().unwrap_or(0);
    let of = |part: &str, name: &str| answer[part][name].as_u64().unwrap_or(0);
    let mut told = Told {
        done: answer["done"] == true,
        unreported_pages: of("guest", "unreported_pages"),
        used_pages: of("guest", "pages").saturating_sub(of("guest", "free_pages")),
        freed_bytes: sum("freed_bytes"),
        work_ns: ["alloc_ns", "touch_ns", "check_ns", "free_ns"].into_iter().map(sum).sum(),
        allocs: (sum("allocs"), sum("alloc_ns")),
        frees: (sum("frees"), sum("free_ns")),
        free_max_ns: most("free_max_ns"),
        report_bytes: sum("report_bytes"),
        report_ns: sum("report_ns"),
        report_max_ns: most("report_max_ns"),
        last_free_us: most("last_free_us"),
        last_report_us: most("last_report_us"),
        waits: sum("waits"),
        wait_ns: sum("wait_ns"),
        failed: sum("failed"),
        missed: sum("missed"),
        deferred: sum("deferred"),
        dropped_pages: of("balloon", "dropped_pages"),
        drop_ns: of("balloon", "drop_ns"),
        corrupt: answer["corrupt"].as_u64().unwrap_or(0),
        ..Told::default()
    };
    for vcpu in vcpus {
        let hist = vcpu["free_hist"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        told.free_hist.iter_mut().zip(hist).for_each(|(sum, count)| *sum += count);
    }
    if told.work_ns == 0 && told.done {
        bail!("the guest is done and did nothing: {answer}");
    }
    Ok(told)
}
