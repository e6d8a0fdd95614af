//! `vmferry plan`: predicts a migration before it begins; and migrations that follow a plan.

mod follow;
mod table;

pub(crate) use follow::moved;

use crate::api::{Client, GuestPlace, MigrateRequest, RunContext};
use crate::args::{TrackerArg, heading, rate, time};
use crate::choices::{ChannelsArg, OnOff};
use crate::codecs::EncodingArgs;
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
use vmferry_engine::plan::{GuestCost, GuestMeasurement, Link, Plan, measure, probe};
use vmferry_engine::{MigrationHandle, Settings, TrackerKind, Uri};

/// Longest time that planning takes: measuring the link, the guest's writes, and its report of free
/// pages.
pub(crate) const LONGEST: Duration = Duration::from_secs(20);

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Control socket of the process whose guest would move
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Target: tcp:HOST:PORT or unix:PATH
    ///
    /// The target must be waiting for a guest. The source measures the link to the target for about
    /// one second.
    #[arg(required_unless_present = "bandwidth")]
    pub(crate) uri: Option<Uri>,
    /// Assume this rate of the link, such as 2gbit; the target is optional
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = heading::PREDICTION)]
    pub(crate) bandwidth: Option<u64>,
    /// Time for which the guest's writes are observed
    ///
    /// The default is the expected duration of the first pass, but at least 500ms and at most 3s.
    #[arg(long, value_name = "T", value_parser = time, help_heading = heading::PREDICTION)]
    pub(crate) watch: Option<Duration>,
    /// Downtime limit of the migration
    #[arg(long, default_value = "300ms", value_name = "T", value_parser = time, help_heading = heading::MIGRATION)]
    pub(crate) downtime_limit: Duration,
    /// Time limit of the migration [default: no limit]
    #[arg(long, value_name = "T", value_parser = time, help_heading = heading::MIGRATION)]
    pub(crate) timeout: Option<Duration>,
    /// Bandwidth limit of the migration [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = heading::TRANSFER)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Number of bulk channels
    ///
    /// `auto` is one channel for each processor, from 1 to 4. The prediction is for as many of them
    /// as there are idle processors now.
    #[arg(long, default_value_t, value_name = "auto|N", help_heading = heading::TRANSFER)]
    pub(crate) channels: ChannelsArg,
    /// Tracker of the guest's writes
    #[arg(long, value_enum, default_value = "auto", help_heading = heading::TRACKING, value_name = "TRACKER")]
    pub(crate) tracker: TrackerArg,
    /// Skip pages that the guest reports as free
    #[arg(long, value_enum, default_value = "on", help_heading = heading::TRANSFER, value_name = "on|off", hide_possible_values = true)]
    pub(crate) free_pages: OnOff,
    #[command(flatten)]
    pub(crate) encoding: EncodingArgs,
    /// Allow an unencrypted connection to another host
    #[arg(long, help_heading = heading::ENCRYPTION)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Write the plan as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Arguments of `plan`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct PlanRequest {
    /// Target; `None` if only the bandwidth is known.
    #[serde(default)]
    pub(crate) to: Option<String>,
    /// Bandwidth in bytes per second, instead of measuring.
    #[serde(default)]
    pub(crate) bandwidth: Option<u64>,
    /// Time for which the guest is watched, in milliseconds.
    #[serde(default)]
    pub(crate) watch_ms: Option<u64>,
    /// Migration to plan. Its own address is not used.
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
            free_pages: args.free_pages.into(),
            codec: args.encoding.codec,
            delta: args.encoding.delta,
            delta_cache: args.encoding.delta_cache,
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

/// A plan, and the cost of making it.
struct PlanResult {
    plan: Plan,
    cost: GuestCost,
    tracker: String,
    busy: Option<String>,
}

impl PlanResult {
    fn value(&self) -> Result<Value> {
        let mut value = serde_json::to_value(&self.plan)?;
        value["guest_cost"] = serde_json::to_value(self.cost)?;
        value["tracker"] = json!(self.tracker);
        value["busy"] = json!(self.busy);
        Ok(value)
    }
}

/// Makes a plan in the process of the guest: measures the link and the guest.
pub(crate) fn order(machine: &mut Machine, shared: &RunContext, request: &PlanRequest) -> Result<Value> {
    if shared.place() != GuestPlace::Running {
        bail!("the guest does not run, so its writes cannot be measured");
    }
    let uri = request.to.as_deref().map(str::parse::<Uri>).transpose()?;
    let link = LinkSource { uri: uri.as_ref(), bandwidth: request.bandwidth };
    let tracker = run::tracker(request.migrate.tracker.as_deref())?;
    let settings = request.migrate.settings(shared.tls.as_ref())?;
    let watch = request.watch_ms.map(Duration::from_millis);
    let stop = || shared.quit.load(Ordering::Acquire);
    make(machine, &link, tracker, &settings, watch, (&MigrationHandle::new(), &stop))?.value()
}

/// Address of the target and bandwidth, as far as given.
struct LinkSource<'a> {
    uri: Option<&'a Uri>,
    bandwidth: Option<u64>,
}

impl LinkSource<'_> {
    fn link(&self, settings: &Settings, handle: &MigrationHandle) -> Result<Link> {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let given = self.bandwidth.map(|rate| rate as f64);
        let Some(uri) = self.uri else {
            return given.map(Link::given).context("neither a target nor a bandwidth was given");
        };
        match probe(uri, settings, handle) {
            Ok(link) => Ok(given.map_or(link, |rate| Link {
                bytes_per_s: rate,
                measured: false,
                spread: 0.05,
                ..link
            })),
            // If the rate is given, the link need not be measured.
            Err(error) => given
                .map(Link::given)
                .ok_or(error)
                .context("the link could not be measured (--bandwidth RATE plans without a measurement)"),
        }
    }
}

fn make(
    machine: &mut Machine,
    link_source: &LinkSource<'_>,
    tracker: Option<TrackerKind>,
    settings: &Settings,
    watch: Option<Duration>,
    (handle, stop): (&MigrationHandle, &dyn Fn() -> bool),
) -> Result<PlanResult> {
    let link = link_source.link(settings, handle)?;
    let looked = measure(machine.source(), tracker, watch, link, settings, stop)
        .context("the guest could not be measured")?;
    let GuestMeasurement { inputs, cost, tracker, busy } = looked;
    Ok(PlanResult { plan: Plan::make(inputs, settings), cost, tracker, busy })
}
