//! One migration: its timeline, the guest's speed, and the parts of the downtime.

use crate::bars::{Bars, Group};
use crate::html::{Page, Share};
use crate::lanes::{Lane, Lanes, Span};
use crate::migration::{Migration, Pass};
use crate::svg::{Chart, Line, Tone};

/// Duration in ms above which a migration is shown in seconds.
const LONG_MS: f64 = 3000.0;
/// Maximum number of passes in a table.
const MOST_PASSES: usize = 40;

/// Adds the section of one migration.
pub(super) fn section(page: &mut Page, migration: &Migration) {
    if let Some(error) = &migration.error {
        page.paragraph(&format!("Ended as {}: {error}", migration.state));
    }
    page.facts(&facts(migration));
    let axis = Axis::of(migration);
    if !migration.phases.is_empty() || !migration.passes.is_empty() {
        page.heading("Timeline");
        page.drawing(&timeline(migration, &axis).render(), &timeline_caption(migration));
    }
    if migration.speed.len() > 1 {
        page.heading("The guest's speed");
        page.figure(
            &speed(migration, &axis),
            "Memory writes of the guest, by its own count. Shaded: the guest was stopped.",
        );
    }
    if let Some((remaining, rates)) = on_the_way(migration, &axis) {
        page.heading("Progress");
        page.figure(&remaining, "Pages that were known to be dirty and not yet sent.");
        page.figure(
            &rates,
            "Rate at which the guest dirtied pages (during the previous pass), and rate over the link.",
        );
    }
    downtime(page, migration);
    predicted(page, migration);
    passes(page, migration);
    if !migration.hist_us.is_empty() {
        page.heading("Time for which the guest waited for single pages");
        page.drawing(
            &histogram(&[("faults", migration)], false).render(),
            "Postcopy: time from a fault to its page. Each bar is a power of two.",
        );
    }
    page.more(&format!("All {} figures", migration.everything.len()), |page| {
        let rows: Vec<_> =
            migration.everything.iter().map(|(path, value)| vec![path.clone(), value.clone()]).collect();
        page.table(&["figure", "value"], &rows);
    });
}

/// Returns a duration such as `1.5 ms` or `12.3 s`.
pub(super) fn time(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms >= 1000.0 => format!("{:.2} s", ms / 1e3),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms if ms >= 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.2} ms"),
    }
}

/// Returns a size such as `1.50 GiB`.
pub(super) fn bytes(bytes: f64) -> String {
    let units =
        [(1024f64.powi(4), "TiB"), (1024f64.powi(3), "GiB"), (1024f64.powi(2), "MiB"), (1024.0, "KiB")];
    match units.into_iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{:.2} {unit}", bytes / size),
        None => format!("{bytes:.0} B"),
    }
}

fn facts(migration: &Migration) -> Vec<(&'static str, String)> {
    let figure = |path: &str| migration.figure(path);
    let ms = |path: &str| figure(path).map(time);
    let count = |path: &str| figure(path).map(|count| format!("{count:.0}"));
    let speed = |path: &str| figure(path).map(|speed| format!("{speed:.0} writes/s"));
    let during =
        figure("guest.during_writes_per_s").map(|during| match figure("guest.before_writes_per_s") {
            Some(before) if before > 0.0 => {
                format!("{during:.0} writes/s ({:.0} %)", during / before * 100.0)
            }
            _ => format!("{during:.0} writes/s"),
        });
    let verified = figure("verified_pages")
        .filter(|pages| *pages > 0.0)
        .map(|pages| format!("{pages:.0}, {:.0} differ", figure("mismatched_pages").unwrap_or(0.0)));
    let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let facts = [
        ("Outcome", text(&migration.state)),
        ("Mode", text(&migration.mode)),
        ("Tracker", text(&migration.tracker)),
        ("Guest", text(&migration.kind)),
        ("Total", ms("total_ms")),
        ("Downtime", ms("downtime_ms")),
        ("Downtime predicted", ms("predicted_downtime_ms")),
        ("Sent", figure("bytes.wire").map(bytes)),
        ("Throughput", figure("throughput_mbps").map(|rate| format!("{rate:.0} Mbit/s"))),
        ("Passes", Some(migration.passes.len().to_string())),
        ("Guest before", speed("guest.before_writes_per_s")),
        ("Guest during", during),
        ("Guest after", speed("guest.after_writes_per_s")),
        ("Longest stall", figure("guest.stall_max_us").map(|us| time(us / 1e3))),
        ("Faults in postcopy", count("postcopy.faults")),
        ("Fault, median", figure("postcopy.p50_us").map(|us| format!("{us:.0} µs"))),
        ("Fault, 99 %", figure("postcopy.p99_us").map(|us| format!("{us:.0} µs"))),
        ("Full rings", count("ring.full_exits")),
        ("CPU, source", ms("cpu_ms.source")),
        ("CPU, target", ms("cpu_ms.destination")),
        ("Pages compared", verified),
    ];
    facts.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// X axis that all charts of a migration share.
struct Axis {
    /// Number of milliseconds in a unit of the axis.
    unit: f64,
    label: &'static str,
    range: (f64, f64),
    /// Time ranges in which the guest was stopped.
    still: Vec<(f64, f64)>,
}

impl Axis {
    fn of(migration: &Migration) -> Self {
        let phases = migration.phases.iter().map(|phase| phase.start_ms + phase.ms);
        let passes = migration.passes.iter().map(|pass| pass.start_ms + pass.ms);
        let samples = migration.samples.iter().map(|sample| sample.at_ms);
        let ends = phases.chain(passes).chain(samples).chain(migration.speed.iter().map(|(at, _)| *at));
        let end = ends.fold(0.0, f64::max);
        let start = migration.speed.first().map_or(0.0, |(at, _)| at.min(0.0));
        let (unit, label) = if end - start > LONG_MS {
            (1e3, "seconds since the start")
        } else {
            (1.0, "milliseconds since the start")
        };
        let still = migration.phases.iter().filter(|phase| phase.name == "switchover");
        let still = still.map(|phase| (phase.start_ms / unit, (phase.start_ms + phase.ms) / unit)).collect();
        let range = if end > start { (start / unit, end / unit) } else { (0.0, 1.0) };
        Self { unit, label, range, still }
    }

    fn chart(&self, title: &str, y_label: &str, lines: Vec<Line>) -> Chart {
        Chart {
            title: title.into(),
            x_label: self.label.into(),
            y_label: y_label.into(),
            ranges: [Some(self.range), None],
            start: Some((0.0, "start".into())),
            bands: self.still.clone(),
            lines,
            ..Chart::default()
        }
    }

    fn line(&self, name: &str, tone: Tone, points: impl Iterator<Item = (f64, f64)>) -> Line {
        let points = points.map(|(at, value)| (at / self.unit, value)).collect();
        Line { name: name.into(), tone, points, end: None }
    }
}

fn phase_tone(name: &str) -> Tone {
    match name {
        "setup" => Tone::Grey,
        "precopy" => Tone::Blue,
        "switchover" => Tone::Vermilion,
        "verify" => Tone::Purple,
        "postcopy" => Tone::Green,
        _ => Tone::Amber,
    }
}

fn timeline(migration: &Migration, axis: &Axis) -> Lanes {
    let span = |start: f64, ms: f64, tone, name: String, detail: String| Span {
        range: (start / axis.unit, (start + ms) / axis.unit),
        tone,
        name,
        detail,
    };
    let phases = migration.phases.iter().map(|phase| {
        let detail = format!("{}: {} after {}", phase.name, time(phase.ms), time(phase.start_ms));
        (
            phase.name == "verify",
            span(phase.start_ms, phase.ms, phase_tone(&phase.name), phase.name.clone(), detail),
        )
    });
    let (verify, phases): (Vec<_>, Vec<_>) = phases.partition(|(verify, _)| *verify);
    let passes = migration.passes.iter().enumerate().map(|(index, pass)| {
        let tone = if index % 2 == 0 { Tone::Blue } else { Tone::Green };
        let detail = format!("pass {index}: {:.0} pages in {}", pass.pages, time(pass.ms));
        span(pass.start_ms, pass.ms, tone, index.to_string(), detail)
    });
    let spans = |spans: Vec<(bool, Span)>| spans.into_iter().map(|(_, span)| span).collect::<Vec<_>>();
    let lanes = [("phases", spans(phases)), ("passes", passes.collect()), ("compare", spans(verify))];
    let lanes = lanes.into_iter().filter(|(_, spans)| !spans.is_empty());
    Lanes {
        title: "Timeline".into(),
        x_label: axis.label.into(),
        range: axis.range,
        lanes: lanes.map(|(name, spans)| Lane { name: name.into(), spans }).collect(),
    }
}

fn timeline_caption(migration: &Migration) -> String {
    let phases = migration.phases.iter().map(|phase| match phase.name.as_str() {
        "verify" => format!("{} of comparing pages, which do not count as downtime", time(phase.ms)),
        name => format!("{name} {}", time(phase.ms)),
    });
    let phases: Vec<String> = phases.collect();
    if phases.is_empty() { String::new() } else { format!("{}.", phases.join(", ")) }
}

fn speed(migration: &Migration, axis: &Axis) -> Chart {
    let line = axis.line("guest", Tone::Blue, migration.speed.iter().copied());
    axis.chart("The guest before, during and after", "writes per second", vec![line])
}

/// Returns the charts of remaining bytes and of rates, if the migration was sampled.
fn on_the_way(migration: &Migration, axis: &Axis) -> Option<(Chart, Chart)> {
    let samples = &migration.samples;
    if samples.len() < 2 {
        return None;
    }
    let mib = |value: f64| value / 1024.0 / 1024.0;
    let of = |name, tone, value: fn(&crate::migration::Sample) -> Option<f64>| {
        axis.line(name, tone, samples.iter().filter_map(|sample| Some((sample.at_ms, mib(value(sample)?)))))
    };
    let remaining = of("left to send", Tone::Blue, |sample| sample.remaining);
    let rates = vec![
        of("dirtied", Tone::Vermilion, |sample| sample.dirty),
        of("sent", Tone::Blue, |sample| sample.sent),
    ];
    Some((axis.chart("Left to send", "MiB", vec![remaining]), axis.chart("Rates", "MiB/s", rates)))
}

fn part_name(part: &str) -> String {
    let (name, what) = match part {
        "pause_ms" => ("pause", "until the last vCPU had stopped"),
        "send_state_ms" => ("send state", "passing the device state to the link"),
        "last_harvest_ms" => ("last harvest", "finding the last dirty pages"),
        "list_pages_ms" => ("list pages", "listing the pages that are sent last, or that are missing"),
        "last_pages_ms" => ("last pages", "sending the last pages"),
        "target_prepare_ms" => ("target prepare", "preparation of the target before it loads the state"),
        "device_state_ms" => ("device state", "saving it on the source and loading it on the target"),
        "commit_ms" => ("commit", "transferring ownership of the guest"),
        "resume_ms" => ("resume", "starting the vCPUs on the target"),
        other => return other.trim_end_matches("_ms").replace('_', " "),
    };
    format!("{name}: {what}")
}

fn downtime(page: &mut Page, migration: &Migration) {
    let known: f64 = migration.downtime.iter().map(|(_, ms)| ms.max(0.0)).sum();
    let whole = migration.figure("downtime_ms").unwrap_or(0.0).max(known);
    if known <= 0.0 {
        return;
    }
    page.heading(&format!("Parts of {} of downtime", time(whole)));
    let tones = [Tone::Grey, Tone::Purple, Tone::Blue, Tone::Amber, Tone::Green, Tone::Vermilion];
    let mut from = 0.0;
    let mut share = |name: String, ms: f64, tone| {
        let text = format!("{} ({:.0} %)", time(ms), ms / whole * 100.0);
        let share = Share { name, text, from: from / whole, size: ms / whole, tone };
        from += ms;
        share
    };
    let parts = migration.downtime.iter().zip(tones.into_iter().cycle());
    let mut shares: Vec<Share> =
        parts.map(|((part, ms), tone)| share(part_name(part), ms.max(0.0), tone)).collect();
    let rest = whole - known;
    if rest > whole * 0.01 {
        shares.push(share("rest: waiting for threads and messages".into(), rest, Tone::Brown));
    }
    page.shares(&shares);
}

/// Predicted figure: name, key in the plan, format.
type Predicted = (&'static str, &'static str, fn(f64) -> String);

/// Adds the predictions of the plan with the real values, and the changes of course during the
/// migration.
fn predicted(page: &mut Page, migration: &Migration) {
    let row = |(name, key, text): &Predicted| {
        let of = |end: &str| migration.figure(&format!("plan.predicted.{key}.{end}"));
        let real = match *key {
            "bytes" => migration.figure("bytes.wire"),
            key => migration.figure(key),
        };
        let (expected, real) = (of("expected")?, real?);
        let range = of("low").zip(of("high")).map(|(low, high)| format!("{} – {}", text(low), text(high)));
        let error =
            if real > 0.0 { format!("{:+.0} %", (expected - real) / real * 100.0) } else { "-".into() };
        Some(vec![(*name).to_owned(), text(expected), range.unwrap_or("-".into()), text(real), error])
    };
    let figures: [Predicted; 3] =
        [("total", "total_ms", time), ("downtime", "downtime_ms", time), ("sent", "bytes", bytes)];
    let rows: Vec<Vec<String>> = figures.iter().filter_map(row).collect();
    if !rows.is_empty() {
        page.heading("Predicted and real values");
        page.table(&["", "predicted", "between", "real", "off by"], &rows);
    }
    let course = migration
        .everything
        .iter()
        .filter(|(path, _)| path.starts_with("course[") && path.ends_with("].why"));
    course.for_each(|(_, why)| page.paragraph(&format!("Changed course: {why}")));
}

fn passes(page: &mut Page, migration: &Migration) {
    if migration.passes.is_empty() {
        return;
    }
    page.heading("Passes");
    let rate = |bytes: f64, ms: f64| {
        if ms > 0.0 { format!("{}/s", super::migration::bytes(bytes * 1e3 / ms)) } else { "-".into() }
    };
    let row = |(index, pass): (usize, &Pass)| {
        vec![
            index.to_string(),
            time(pass.start_ms),
            format!("{:.0}", pass.pages),
            bytes(pass.wire_bytes),
            if pass.ms > 0.0 { time(pass.ms) } else { "-".into() },
            rate(pass.wire_bytes, pass.ms),
            format!("{:.0}", pass.dirtied),
            rate(pass.dirtied * 4096.0, pass.ms),
        ]
    };
    let head = ["pass", "began after", "pages", "sent", "took", "at", "dirtied pages", "at"];
    let rows: Vec<_> = migration.passes.iter().enumerate().take(MOST_PASSES).map(row).collect();
    page.table(&head, &rows);
    if migration.passes.len() > MOST_PASSES {
        page.note(&format!("And {} more; see all figures.", migration.passes.len() - MOST_PASSES));
    }
}

/// Returns the histogram of fault durations. For several migrations, the values are in percent, so
/// that they can be compared.
pub(super) fn histogram(migrations: &[(&str, &Migration)], share: bool) -> Bars {
    let bounds = migrations
        .iter()
        .flat_map(|(_, migration)| migration.hist_us.keys().copied())
        .filter(|bound| *bound > 1);
    let (low, high) = bounds.fold((u64::MAX, 0), |(low, high), bound| (low.min(bound), high.max(bound)));
    let bounds: Vec<u64> = std::iter::successors(Some(low), |bound| bound.checked_mul(2))
        .take_while(|bound| *bound <= high)
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "counts and bounds to be drawn")]
    let float = |value: u64| value as f64;
    let tones =
        [Tone::Blue, Tone::Vermilion, Tone::Green, Tone::Amber, Tone::Purple, Tone::Brown, Tone::Grey];
    let groups = migrations.iter().zip(tones.into_iter().cycle()).map(|((name, migration), tone)| {
        let total: f64 = migration.hist_us.values().copied().map(float).sum();
        let scale = if share { 100.0 / total.max(1.0) } else { 1.0 };
        let count = |bound: &u64| float(migration.hist_us.get(bound).copied().unwrap_or(0)) * scale;
        Group { name: (*name).into(), tone, values: bounds.iter().map(count).collect() }
    });
    Bars {
        title: "Waits for a page".into(),
        x_label: "duration of a wait, in microseconds".into(),
        y_label: if share { "% of faults" } else { "faults" }.into(),
        groups: groups.collect(),
        bounds: bounds.iter().map(|bound| float(bound / 2)).chain([float(high)]).collect(),
        mark: None,
    }
}
