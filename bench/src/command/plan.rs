//! vmferry's side of `vmferry-bench plan`: a guest whose migration is predicted, run and compared.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::{Finished, no_kvm, program};
use crate::link::{Link, Shape, Shaped, Tools};
use crate::plan::{self, CaseSpec, Options, OurError, OurRunner, Outcome, Run, Way};
use crate::warm::Warm;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Environment, Pair, SameHost, Setup};

/// Time for which a guest runs before it is measured.
const WARM_UP: Duration = Duration::from_millis(400);
/// Time that a prediction and a migration may take beyond the timeout of the case.
const BESIDE: Duration = Duration::from_secs(60);

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("plan: {what}");
    let mut ours = Ours { link: None };
    let Outcome { document, failures } = plan::run(&options, &mut ours, &mut progress);
    Ok(Finished { table: plan::table(&document), document, page: None, failures })
}

/// Runner that keeps the last link, because consecutive cases share it.
struct Ours {
    link: Option<(Shape, Link)>,
}

impl Ours {
    fn link(&mut self, way: Way) -> Result<Option<&Link>, OurError> {
        let Way::Shaped(shape) = way else { return Ok(None) };
        if self.link.as_ref().is_none_or(|(known, _)| *known != shape) {
            self.link = None;
            let shaped = Shaped::new(&Tools::here(), shape).map_err(OurError::Unavailable)?;
            self.link = Some((shape, Link::Shaped(shaped)));
        }
        Ok(self.link.as_ref().map(|(_, link)| link))
    }
}

impl OurRunner for Ours {
    fn run(&mut self, spec: &CaseSpec) -> Result<Run, OurError> {
        if spec.guest == "kvm"
            && let Some(why) = no_kvm()
        {
            return Err(OurError::Unavailable(why));
        }
        let link = self.link(spec.way)?;
        once(spec, link).map_err(|error| OurError::Failed(error.into()))
    }
}

fn once(spec: &CaseSpec, link: Option<&Link>) -> Result<Run> {
    let stop = AtomicBool::new(false);
    let setup = Setup {
        guest: spec.guest,
        environment: link.map_or(&SameHost as &dyn Environment, |link| link),
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload())
    };
    let mut pair = Pair::start(&setup, &stop)?;
    let warm = Warm::hold(spec.memory);
    std::thread::sleep(WARM_UP);
    drop(warm);
    pair.migrate(&request(spec, &pair.uri)?)?;
    let deadline = Instant::now() + spec.timeout + BESIDE;
    let report = loop {
        let status = pair.source.client.call("status", json!({}))?;
        if !status["outcome"].is_null() {
            break status;
        }
        if Instant::now() > deadline {
            bail!("the migration did not end in time");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    scored(&report)
}

fn request(spec: &CaseSpec, uri: &str) -> Result<MigrateRequest> {
    let (mode, slow) = match spec.mode {
        "precopy" => ("precopy", "off"),
        "auto-converge" => ("precopy", "all"),
        "postcopy" => ("postcopy", "off"),
        "hybrid" => ("hybrid", "off"),
        other => bail!("no mode '{other}'"),
    };
    let cap = match spec.way {
        Way::Capped(rate) => Some(rate),
        Way::Free | Way::Shaped(_) => None,
    };
    Ok(MigrateRequest {
        mode,
        auto_converge: slow,
        plan: true,
        max_bandwidth: cap,
        downtime_limit_ms: u64::try_from(spec.downtime_limit.as_millis())?,
        timeout_ms: Some(u64::try_from(spec.timeout.as_millis())?),
        insecure: matches!(spec.way, Way::Shaped(_)),
        ..MigrateRequest::to(uri)
    })
}

/// Returns the predicted and the real figures of a report.
fn scored(report: &Value) -> Result<Run> {
    let plan = &report["plan"];
    let predicted = &plan["predicted"];
    if predicted.is_null() {
        bail!("no prediction was made: {}; {}", plan["failed"], report["error"]);
    }
    let real = &plan["real"];
    if real.is_null() {
        bail!("the migration ended as {}: {}", report["outcome"], report["error"]);
    }
    let number = |value: &Value, what: &str| value.as_f64().with_context(|| format!("no {what}"));
    let interval = |name: &str| {
        let part = |part: &str| predicted[name][part].as_f64();
        Some([part("low")?, part("expected")?, part("high")?])
    };
    Ok(Run {
        probability: number(&predicted["probability"], "probability")?,
        total: interval("total_ms"),
        downtime: interval("downtime_ms"),
        bytes: interval("bytes").map(|[_, expected, _]| expected),
        link: number(&plan["inputs"]["link"]["bytes_per_s"], "link")?,
        converged: real["converged"] == true,
        real_total: number(&real["total_ms"], "total time")?,
        real_downtime: number(&real["downtime_ms"], "downtime")?,
        real_bytes: number(&real["bytes"], "bytes")?,
        passes: f64::from(u32::try_from(report["passes"].as_array().map_or(0, Vec::len))?),
        tracked: number(&plan["guest_cost"]["tracked_ms"], "cost")?,
        paused: number(&plan["guest_cost"]["paused_ms"], "cost")?,
    })
}
