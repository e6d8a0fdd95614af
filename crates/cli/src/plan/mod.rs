//! `vmferry plan`: what a migration would be like, before anything moves; and migrations that follow a plan.

mod follow;
mod table;

pub(crate) use follow::moved;

use crate::api::{Client, MigrateRequest, Place, Shared};
use crate::args::{TrackerArg, rate, time};
use crate::choices::OnOff;
use crate::guest::Machine;
use crate::tls::TlsArgs;
use crate::{Status, migrate, output, run};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_engine::plan::{GuestCost, Link, Looked, Plan, measure, probe};
use vmferry_engine::{Monitor, Settings, TrackerKind, Uri};

/// How long making one takes at most: the link, the guest's writes, and its answer to what is free.
pub(crate) const LONGEST: Duration = Duration::from_secs(20);

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Control socket of the vmferry whose guest is to be moved
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Where to: tcp:HOST:PORT or unix:PATH, of a target that waits for a guest; the link to it is measured for a second
    #[arg(required_unless_present = "bandwidth")]
    pub(crate) uri: Option<Uri>,
    /// What the link carries, for example 2gbit or 250M/s, instead of measuring it
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) bandwidth: Option<u64>,
    /// Watch the guest's writes for so long; as long as a first pass takes, up to 3s, if left out
    #[arg(long, value_name = "T", value_parser = time)]
    pub(crate) watch: Option<Duration>,
    /// How long the guest may be stopped
    #[arg(long, default_value = "300ms", value_name = "T", value_parser = time)]
    pub(crate) downtime_limit: Duration,
    /// How long the migration may take
    #[arg(long, value_name = "T", value_parser = time)]
    pub(crate) timeout: Option<Duration>,
    /// Use no more than this
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Parallel channels
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) channels: u16,
    /// How the guest's writes are found
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) tracker: TrackerArg,
    /// Leave out what the guest says is free, where it can be asked
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) free_pages: OnOff,
    /// Allow an unencrypted connection to another host
    #[arg(long)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Write the plan as JSON to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What `plan` is asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct PlanRequest {
    /// The target; none if only the bandwidth is known.
    #[serde(default)]
    pub(crate) to: Option<String>,
    /// Bytes a second, instead of measuring.
    #[serde(default)]
    pub(crate) bandwidth: Option<u64>,
    /// How long the guest is watched.
    #[serde(default)]
    pub(crate) watch_ms: Option<u64>,
    /// The migration that is meant; its own address does not count.
    pub(crate) migrate: MigrateRequest,
}

pub(crate) fn plan(args: &PlanArgs) -> Result<Status> {
    let out = args.json.as_deref().map(output::open).transpose()?;
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let to = args.uri.as_ref().map(ToString::to_string);
    let request = PlanRequest {
        bandwidth: args.bandwidth,
        watch_ms: args.watch.map(millis),
        migrate: MigrateRequest {
            tracker: migrate::tracker(args.tracker),
            channels: args.channels,
            downtime_limit_ms: millis(args.downtime_limit),
            timeout_ms: args.timeout.map(millis),
            max_bandwidth: args.max_bandwidth,
            free_pages: args.free_pages,
            insecure: args.insecure,
            tls: args.tls.texts()?,
            ..MigrateRequest::to(to.as_deref().unwrap_or_default())
        },
        to,
    };
    let mut client = Client::connect(&args.api)?;
    if request.migrate.has_secrets() {
        client.trusted_with_secrets()?;
    }
    let plan = client.call("plan", serde_json::to_value(request)?)?;
    match out {
        Some(mut out) => writeln!(out, "{}", serde_json::to_string_pretty(&plan)?)?,
        None => {
            println!("{}", table::text(&plan, output::columns(false)));
        }
    }
    Ok(Status::Done)
}

/// A plan, and what making it cost.
struct Made {
    plan: Plan,
    cost: GuestCost,
    tracker: String,
    busy: Option<String>,
}

impl Made {
    fn value(&self) -> Result<Value> {
        let mut value = serde_json::to_value(&self.plan)?;
        value["guest_cost"] = serde_json::to_value(self.cost)?;
        value["tracker"] = json!(self.tracker);
        value["busy"] = json!(self.busy);
        Ok(value)
    }
}

/// The machine's side: looks at the link and at the guest.
pub(crate) fn order(machine: &mut Machine, shared: &Shared, request: &PlanRequest) -> Result<Value> {
    if shared.place() != Place::Running {
        bail!("the guest does not run: there is nothing to plan by");
    }
    let uri = request.to.as_deref().map(str::parse::<Uri>).transpose()?;
    let link = Way { uri: uri.as_ref(), bandwidth: request.bandwidth };
    let tracker = run::tracker(request.migrate.tracker.as_deref())?;
    let settings = request.migrate.settings(shared.tls.as_ref())?;
    let watch = request.watch_ms.map(Duration::from_millis);
    let stop = || shared.quit.load(Ordering::Acquire);
    make(machine, &link, tracker, &settings, watch, (&Monitor::new(), &stop))?.value()
}

/// Over what a guest is to go, and what is known of it.
struct Way<'a> {
    uri: Option<&'a Uri>,
    bandwidth: Option<u64>,
}

impl Way<'_> {
    fn look(&self, settings: &Settings, monitor: &Monitor) -> Result<Link> {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let given = self.bandwidth.map(|rate| rate as f64);
        let Some(uri) = self.uri else {
            return given.map(Link::given).context("neither a target nor a bandwidth was given");
        };
        match probe(uri, settings, monitor) {
            Ok(link) => Ok(given.map_or(link, |rate| Link {
                bytes_per_s: rate,
                measured: false,
                spread: 0.05,
                ..link
            })),
            // Who knows the rate need not measure.
            Err(error) => given
                .map(Link::given)
                .ok_or(error)
                .context("the link could not be measured (say --bandwidth RATE to plan without)"),
        }
    }
}

fn make(
    machine: &mut Machine,
    way: &Way<'_>,
    tracker: Option<TrackerKind>,
    settings: &Settings,
    watch: Option<Duration>,
    (monitor, stop): (&Monitor, &dyn Fn() -> bool),
) -> Result<Made> {
    let link = way.look(settings, monitor)?;
    let looked = measure(machine.source(), tracker, watch, link, settings, stop)
        .context("the guest could not be looked at")?;
    let Looked { inputs, cost, tracker, busy } = looked;
    Ok(Made { plan: Plan::make(inputs, settings), cost, tracker, busy })
}
