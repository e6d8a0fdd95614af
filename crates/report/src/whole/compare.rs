//! Comparison of several results.

use super::Named;
use super::benches::{KEYS, figure, spread};
use super::migration::{bytes, histogram, time};
use crate::Spread;
use crate::by_memory;
use crate::html::Page;
use crate::json::{Case, Document};
use crate::migration::Migration;
use crate::ranges::{Range, Ranges};
use crate::svg::Tone;

/// Maximum number of migrations whose histograms are drawn in one chart.
const MOST_GROUPS: usize = 4;
/// Maximum number of rows of a chart.
const MOST_ROWS: usize = 60;
/// Maximum number of runs of a bench in one table.
const MOST_COLUMNS: usize = 12;

/// Compared figure of a migration: title, value, format.
type Figure = (&'static str, fn(&Migration) -> Option<f64>, fn(f64) -> String);

const FIGURES: &[Figure] = &[
    ("total", |m| m.figure("total_ms"), time),
    ("downtime", |m| m.figure("downtime_ms"), time),
    ("sent", |m| m.figure("bytes.wire"), bytes),
    ("Mbit/s", |m| m.figure("throughput_mbps"), whole),
    ("passes", |m| m.figure("bytes.wire").map(|_| count(m.passes.len())), whole),
    ("guest kept %", kept, whole),
    ("longest stall", |m| m.figure("guest.stall_max_us").map(|us| us / 1e3), time),
    ("faults", |m| m.figure("postcopy.faults"), whole),
    ("fault 99 %", |m| m.figure("postcopy.p99_us").map(|us| us / 1e3), time),
];

fn whole(value: f64) -> String {
    format!("{value:.0}")
}

#[expect(clippy::cast_precision_loss, reason = "a number of passes")]
fn count(number: usize) -> f64 {
    number as f64
}

/// Returns the guest's speed during the migration, in percent of its speed before.
fn kept(migration: &Migration) -> Option<f64> {
    let before = migration.figure("guest.before_writes_per_s").filter(|before| *before > 0.0)?;
    Some(migration.figure("guest.during_writes_per_s")? / before * 100.0)
}

/// Adds tables and charts of several migrations.
pub(super) fn migrations(page: &mut Page, migrations: &[Named<Migration>]) {
    let head: Vec<&str> = ["migration", "kind", "outcome"]
        .into_iter()
        .chain(FIGURES.iter().map(|(title, ..)| *title))
        .collect();
    let row = |named: &Named<Migration>| {
        let migration = &named.result;
        let figures = FIGURES.iter().map(|(_, of, text)| of(migration).map_or("-".into(), text));
        [named.name.clone(), migration.alike(), migration.state.clone()].into_iter().chain(figures).collect()
    };
    page.table(&head, &migrations.iter().map(row).collect::<Vec<Vec<String>>>());
    for (title, of) in [("Total time in ms", "total_ms"), ("Downtime in ms", "downtime_ms")] {
        let row = |named: &Named<Migration>| {
            let middle = named.result.figure(of)?;
            Some(Range { name: named.name.clone(), tone: Tone::Blue, middle, ends: (middle, middle) })
        };
        let rows: Vec<Range> = migrations.iter().filter_map(row).collect();
        if rows.len() <= MOST_ROWS {
            let chart = Ranges { title: title.into(), x_label: title.into(), log: false, rows };
            page.drawing(&chart.render(), "");
        }
    }
    repeats(page, migrations);
    let faulted = migrations.iter().filter(|named| !named.result.hist_us.is_empty());
    let faulted: Vec<(&str, &Migration)> =
        faulted.map(|named| (named.name.as_str(), &named.result)).collect();
    if (2..=MOST_GROUPS).contains(&faulted.len()) {
        page.drawing(
            &histogram(&faulted, true).render(),
            "Postcopy: time from a fault to its page, in percent of the faults of each migration.",
        );
    }
}

/// Adds medians and spread of completed migrations of the same kind.
fn repeats(page: &mut Page, migrations: &[Named<Migration>]) {
    let mut kinds: Vec<(String, Vec<&Migration>)> = Vec::new();
    for migration in migrations.iter().map(|named| &named.result).filter(|own| own.state == "completed") {
        let kind = migration.alike();
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, own)) => own.push(migration),
            None => kinds.push((kind, vec![migration])),
        }
    }
    kinds.retain(|(_, own)| own.len() > 1);
    if kinds.is_empty() {
        return;
    }
    page.heading("Repeats: medians and spread");
    page.note("Completed migrations with the same kind of guest, mode and tracker. The smallest and the largest value are in brackets.");
    let head: Vec<&str> =
        ["kind", "runs"].into_iter().chain(FIGURES.iter().map(|(title, ..)| *title)).collect();
    let row = |(kind, own): &(String, Vec<&Migration>)| {
        let cell = |(_, of, text): &Figure| match Spread::of(own.iter().filter_map(|migration| of(migration)))
        {
            Some(spread) if spread.min < spread.max => {
                format!("{} ({} – {})", text(spread.median), text(spread.min), text(spread.max))
            }
            Some(spread) => text(spread.median),
            None => "-".into(),
        };
        [kind.clone(), own.len().to_string()].into_iter().chain(FIGURES.iter().map(cell)).collect()
    };
    page.table(&head, &kinds.iter().map(row).collect::<Vec<Vec<String>>>());
}

/// Adds a table for each key figure of a bench, with a column for each run.
pub(super) fn benches(page: &mut Page, runs: &[&Named<Document>]) {
    let shown = &runs[..runs.len().min(MOST_COLUMNS)];
    for (index, run) in shown.iter().enumerate() {
        page.note(&format!("Run {}: {} ({})", index + 1, run.name, run.result.host.date));
    }
    if shown.len() < runs.len() {
        page.note(&format!("{} further runs are not shown.", runs.len() - shown.len()));
    }
    let documents: Vec<&Document> = shown.iter().map(|run| &run.result).collect();
    let mut compared = by_memory::charts_of_runs(page, &documents);
    let mut names: Vec<&str> = Vec::new();
    for case in shown.iter().flat_map(|run| &run.result.cases) {
        if !names.contains(&case.name.as_str()) {
            names.push(&case.name);
        }
    }
    let bench = &runs[0].result.bench;
    let keys = KEYS.iter().find(|(known, _)| known == bench).map_or(&[][..], |(_, keys)| keys);
    for (metric, what, _) in keys {
        let row = |name: &&str| {
            let cells: Vec<Option<(f64, (f64, f64))>> =
                shown.iter().map(|run| spread(case(&run.result, name)?, metric)).collect();
            // A row needs values of at least two runs.
            (cells.iter().flatten().count() > 1).then(|| {
                let cells = cells.into_iter().map(|cell| cell.map_or("-".into(), written));
                [(*name).to_owned()].into_iter().chain(cells).collect()
            })
        };
        let rows: Vec<Vec<String>> = names.iter().filter_map(row).collect();
        if !rows.is_empty() {
            compared = true;
            page.heading(what);
            let head: Vec<String> = ["case".to_owned()]
                .into_iter()
                .chain((1..=shown.len()).map(|n| format!("run {n}")))
                .collect();
            page.table(&head, &rows);
        }
    }
    if !compared {
        page.note("No key figure was measured in more than one run.");
    }
}

fn case<'a>(document: &'a Document, name: &str) -> Option<&'a Case> {
    document.cases.iter().find(|case| case.name == name)
}

fn written((middle, (low, high)): (f64, (f64, f64))) -> String {
    if low < high {
        format!("{} ({} – {})", figure(&middle), figure(&low), figure(&high))
    } else {
        figure(&middle)
    }
}
