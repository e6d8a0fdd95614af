//! `vmferry dirty-rate`: measures how fast a guest dirties its memory, over several windows.

use crate::api::{Client, DirtyRateRequest, GuestPlace, RunContext};
use crate::args::{TrackerArg, heading, time};
use crate::guest::Machine;
use crate::usage::wrong_usage;
use crate::{Status, migrate, output, run};
use anyhow::{Context, Result, bail};
use clap::Args;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_baselines::Policy;
use vmferry_dirty::{RatePoint, check_windows};

/// Longest window. The machine's owner thread executes no other command during a measurement.
pub(crate) const LONGEST: Duration = Duration::from_secs(15);

/// Most columns of the text, on a terminal of any width.
const WIDEST: usize = 120;

#[derive(Debug, Args)]
pub(crate) struct DirtyRateArgs {
    /// Control socket of the process whose guest is measured
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Windows in which written pages are counted; all begin together
    ///
    /// The lengths must ascend. The longest window is 15s, and there can be 64 windows.
    #[arg(
        long,
        value_name = "T,T,..",
        value_delimiter = ',',
        default_value = "50ms,100ms,200ms,500ms,1s,2s",
        value_parser = time,
        help_heading = heading::MEASUREMENT
    )]
    pub(crate) windows: Vec<Duration>,
    /// Tracker of the guest's writes
    #[arg(long, value_enum, default_value = "auto", help_heading = heading::TRACKING, value_name = "TRACKER")]
    pub(crate) tracker: TrackerArg,
    /// Harvest policy of dirty rings: predict, fixed, gears, aimd or aimd-own
    #[arg(long, default_value_t, value_name = "POLICY", help_heading = heading::TRACKING)]
    pub(crate) reaper: Policy,
    /// Write the result as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

pub(crate) fn dirty_rate(args: &DirtyRateArgs) -> Result<Status> {
    check_windows(&args.windows, LONGEST).context("--windows")?;
    if args.windows.iter().any(|window| window.subsec_nanos() % 1_000_000 != 0) {
        wrong_usage!("--windows: a window is not a whole number of milliseconds; write 50ms, or 1s");
    }
    let out = args.json.as_deref().map(output::open).transpose()?;
    let request = DirtyRateRequest {
        windows_ms: args
            .windows
            .iter()
            .map(|window| u64::try_from(window.as_millis()).unwrap_or(0))
            .collect(),
        tracker: migrate::tracker(args.tracker),
        reaper: Some(args.reaper.to_string()),
    };
    let result = Client::connect(&args.api)?.call("dirty-rate", serde_json::to_value(request)?)?;
    match out {
        Some(mut out) => writeln!(out, "{}", serde_json::to_string_pretty(&result)?)?,
        None => println!("{}", table(&result, output::columns(false))),
    }
    Ok(Status::Done)
}

/// Executes the measurement in the process of the guest, for the longest window.
pub(crate) fn measure(
    machine: &mut Machine,
    shared: &RunContext,
    request: &DirtyRateRequest,
) -> Result<Value> {
    if shared.place() != GuestPlace::Running {
        bail!("the guest does not run: it dirties nothing");
    }
    let windows: Vec<_> = request.windows_ms.iter().copied().map(Duration::from_millis).collect();
    check_windows(&windows, LONGEST)?;
    machine.set_reaper(request.reaper.as_deref().map(str::parse).transpose()?.unwrap_or_default());
    let vm = machine.source();
    let mut tracker = vm.tracker(run::tracker(request.tracker.as_deref())?)?;
    let stop = || shared.quit.load(Ordering::Acquire);
    let points = vmferry_dirty::measure(&mut *tracker, &*vm.memory(), &windows, stop)?;
    let points: Vec<_> = points.iter().map(point).collect();
    Ok(json!({ "tracker": tracker.kind().to_string(), "windows": points, "ring": tracker.ring() }))
}

fn point(point: &RatePoint) -> Value {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = |pages: u64| pages as f64 / point.window.as_secs_f64();
    json!({
        "window_ms": point.window.as_secs_f64() * 1e3,
        "pages": point.pages,
        "pages_per_s": rate(point.pages),
        "bytes_per_s": point.bytes_per_s(),
        "vcpu_pages_per_s": point.vcpus.iter().map(|pages| rate(*pages)).collect::<Vec<_>>(),
    })
}

fn table(result: &Value, columns: Option<usize>) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let mut header = vec!["window".to_owned(), "working set".to_owned(), "dirty rate".to_owned()];
    let rows = result["windows"].as_array().map_or(&[][..], Vec::as_slice);
    let vcpus = rows.first().and_then(|row| row["vcpu_pages_per_s"].as_array()).map_or(0, Vec::len);
    header.extend((0..vcpus).map(|vcpu| format!("vCPU {vcpu}, pages/s")));
    table.set_header(header);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap_or(0.0);
        let mut cells = vec![
            format!("{:.0} ms", number("window_ms")),
            format!("{:.1} MiB", number("pages") / 256.0),
            format!("{:.1} MiB/s", number("bytes_per_s") / f64::from(1 << 20)),
        ];
        let each = row["vcpu_pages_per_s"].as_array().into_iter().flatten();
        cells.extend(each.map(|rate| format!("{:.0}", rate.as_f64().unwrap_or(0.0))));
        table.add_row(cells);
    }
    let words = format!(
        "A page that is written twice within a window counts once, so a longer window gives a lower rate. A migration must keep up with \
         the rate over the duration of one of its passes. Tracked by {}.",
        result["tracker"].as_str().unwrap_or("?")
    );
    format!("{table}\n{}", output::fold(&words, columns.unwrap_or(WIDEST).min(WIDEST), 0))
}
