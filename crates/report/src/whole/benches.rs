//! One run of a bench: its own tables and charts, medians with spread, and every figure.

use super::others;
use crate::benches::{
    branch, codec, density, free_page, migrate, postcopy, reaper, reaper_traces, rtt, scale, scan, snapshot,
    stalls, upgrade,
};
use crate::by_memory;
use crate::html::Page;
use crate::json::{Case, Document};
use crate::ranges::{Range, Ranges};
use crate::svg::Tone;
use crate::tables;

/// Metric, its description, and whether its axis is logarithmic.
type Key = (&'static str, &'static str, bool);

/// Key metrics of each bench.
pub(super) const KEYS: &[(&str, &[Key])] = &[
    (
        "migrate",
        &[
            ("total_ms", "total time in ms", false),
            ("downtime_ms", "downtime in ms", true),
            ("guest_speed_kept", "share of its speed that the guest kept", false),
        ],
    ),
    ("rtt", &[("rtt_us", "mean round trip in µs", true), ("p99_us", "99 % within so many µs", true)]),
    ("scan", &[("ratio_to_words", "times that the word loop takes", true)]),
    (
        "reaper",
        &[
            ("guest_speed_kept", "share of its speed that the guest kept", false),
            ("total_ms", "total time in ms", false),
        ],
    ),
    ("postcopy", &[("mean_us", "mean wait in µs", true), ("p99_us", "99 % within so many µs", true)]),
    (
        "free-page",
        &[
            ("bitmap_ms", "until the free pages were known, in ms", true),
            ("total_ms", "migration, total time in ms", false),
        ],
    ),
    (
        "plan",
        &[
            ("error_total_pct", "error of the predicted total time in %", false),
            ("error_downtime_ms", "error of the predicted downtime in ms", false),
        ],
    ),
    (
        "limits",
        &[
            ("speed_kept", "share of its speed that the guest kept", false),
            ("downtime_ms", "downtime in ms", true),
        ],
    ),
    ("soak", &[("rss_kib_late", "resident memory after all moves, in KiB", false)]),
    ("faults", &[("decided_ms", "time until the owner was decided, in ms", true)]),
    ("exits", &[("exits", "exits", true), ("syscalls", "system calls", true), ("wakeups", "wakeups", true)]),
    (
        "stalls",
        &[
            ("stall_max_ms", "longest stall outside the blackout, in ms", true),
            ("long_stalls", "stalls of 1 ms and more outside the blackout", false),
            ("total_ms", "total time in ms", false),
        ],
    ),
    (
        "scale",
        &[
            ("total_ms", "total time in ms", true),
            ("downtime_ms", "downtime in ms", true),
            ("bookkeeping_mib", "bookkeeping in MiB", true),
        ],
    ),
    (
        "codec",
        &[
            ("ratio", "bytes of pages divided by bytes sent", true),
            ("encode_gbytes_per_s", "encoding in 10^9 bytes of pages per second", true),
        ],
    ),
    (
        "snapshot",
        &[
            ("pause_ms", "pause of the guest in ms", true),
            ("total_ms", "total time in ms", true),
            ("guest_speed_kept", "share of its speed that the guest kept", false),
            ("stall_max_ms", "longest stall of the guest in ms", true),
        ],
    ),
    (
        "branch",
        &[
            ("pause_ms", "pause of the parent in ms", true),
            ("child_runs_ms", "time until the child runs, or all children run, in ms", true),
            ("used_gib", "memory of the parent and its children in GiB", false),
            ("guest_speed_kept", "share of its speed that the parent kept", false),
        ],
    ),
    ("upgrade", &[("downtime_ms", "downtime in ms", true), ("total_ms", "total time in ms", true)]),
    ("density", &[("residue_pct", "residue in %", false), ("work_ms", "work in ms", false)]),
];

/// Maximum number of rows that a reader can distinguish in a chart.
const MOST_ROWS: usize = 60;

/// Adds the section of one run.
pub(super) fn section(page: &mut Page, document: &Document) {
    page.note(&format!("{}, vmferry {}, {}.", document.host.date, document.version, document.host.cpu));
    by_memory::charts(page, document);
    charts(page, document);
    match document.bench.as_str() {
        "scan" => scan::section(page, document),
        "rtt" => rtt::section(page, document),
        "migrate" => migrate::section(page, document),
        "reaper" => reaper::section(page, document),
        "reaper-traces" => reaper_traces::section(page, document),
        "postcopy" => postcopy::section(page, document),
        "free-page" => free_page::section(page, document),
        "density" => density::section(page, document),
        "stalls" => stalls::section(page, document),
        "codec" => codec::section(page, document),
        "scale" => scale::section(page, document),
        "snapshot" => snapshot::section(page, document),
        "branch" => branch::section(page, document),
        "upgrade" => upgrade::section(page, document),
        _ => others::section(page, document),
    }
    let rows: Vec<Vec<String>> = document.cases.iter().flat_map(figures).chain(summary(document)).collect();
    page.more(&format!("All {} figures", rows.len()), |page| {
        page.table(&["case/figure", "median", "smallest", "largest"], &rows);
    });
}

/// Returns the median of a metric with its extremes.
pub(super) fn spread(case: &Case, metric: &str) -> Option<(f64, (f64, f64))> {
    let of = |suffix: &str| case.metrics.get(&format!("{metric}{suffix}")).copied();
    let middle = of("")?;
    Some((middle, (of("_min").unwrap_or(middle).min(middle), of("_max").unwrap_or(middle).max(middle))))
}

fn charts(page: &mut Page, document: &Document) {
    let keys = KEYS.iter().find(|(bench, _)| *bench == document.bench).map_or(&[][..], |(_, keys)| keys);
    for (metric, what, log) in keys {
        let row = |case: &Case| {
            let (middle, ends) = spread(case, metric)?;
            Some(Range { name: case.name.clone(), tone: tone(&case.name), middle, ends })
        };
        let rows: Vec<Range> = document.cases.iter().filter_map(row).collect();
        if rows.len() > 1 && rows.len() <= MOST_ROWS {
            let chart = Ranges { title: (*what).into(), x_label: (*what).into(), log: *log, rows };
            page.drawing(
                &chart.render(),
                "Diamonds are medians of the rounds, bars reach from the smallest to the largest.",
            );
        }
    }
}

/// Returns the colour of a case: a distinct colour for vmferry, and one colour for each compared
/// program.
fn tone(name: &str) -> Tone {
    let side = name.rsplit('/').next().unwrap_or(name);
    match side {
        side if side.starts_with("ours") || side.contains("predict") => Tone::Blue,
        side if side == "vmferry" || side.ends_with("-branch") => Tone::Blue,
        side if side.starts_with("qemu") => Tone::Purple,
        side if side.starts_with("floor") => Tone::Grey,
        _ => Tone::Green,
    }
}

fn figures(case: &Case) -> Vec<Vec<String>> {
    let extreme = |name: &&String| {
        let stem = name.strip_suffix("_min").or(name.strip_suffix("_max"));
        !stem.is_some_and(|stem| case.metrics.contains_key(stem))
    };
    let row = |name: &String| {
        let text = |suffix: &str| case.metrics.get(&format!("{name}{suffix}")).map_or("-".into(), figure);
        vec![format!("{}/{name}", case.name), text(""), text("_min"), text("_max")]
    };
    case.metrics.keys().filter(extreme).map(row).collect()
}

fn summary(document: &Document) -> Vec<Vec<String>> {
    let plain = document.summary.iter().filter(|(_, value)| value.is_number() || value.is_string());
    let text = |value: &serde_json::Value| {
        value.as_f64().map_or_else(|| tables::text(value), |value| figure(&value))
    };
    plain.map(|(name, value)| vec![format!("summary/{name}"), text(value), "-".into(), "-".into()]).collect()
}

/// Returns `value` with enough digits to distinguish figures.
pub(super) fn figure(value: &f64) -> String {
    match value.abs() {
        size if size == 0.0 || size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.2e}"),
    }
}
