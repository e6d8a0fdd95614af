//! Charts of figures against the memory of the guest.
//!
//! A figure that does not depend on the memory is a horizontal line. A figure that is proportional
//! to the memory is a line with the slope of one decade for each decade.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain::TextTable;
use crate::svg::{Chart, Line, Tone};
use crate::tables::number;
use crate::{Spread, to_f64};
use serde_json::Value;

/// Goal for the pause of a guest of any size, for a snapshot and for a branch.
pub const PAUSE_GOAL_MS: f64 = 5.0;
/// Goal for the time until the child of a branched guest of 4 GiB runs.
pub const CHILD_RUNS_GOAL_MS: f64 = 20.0;
/// Goal for the downtime of an upgrade of a guest of 8 GiB.
pub const UPGRADE_DOWNTIME_GOAL_MS: f64 = 2.0;
/// Goal for the total time of an upgrade of a guest of 8 GiB.
pub const UPGRADE_TOTAL_GOAL_MS: f64 = 10.0;

/// Line of a chart: name of the side in the results, name in the legend, colour.
type Side = (&'static str, &'static str, Tone);

/// Chart: metric in ms, title, goal.
type Curve = (&'static str, &'static str, Option<f64>);

/// Charts of each bench.
const CHARTS: [(&str, &[Side], &[Curve]); 3] = [
    (
        "snapshot",
        &[
            ("qemu", "QEMU", Tone::Purple),
            ("vmferry-since", "vmferry, increment", Tone::Green),
            ("vmferry", "vmferry", Tone::Blue),
        ],
        &[("pause_ms", "Pause", Some(PAUSE_GOAL_MS)), ("total_ms", "Time until the file is complete", None)],
    ),
    (
        "branch",
        &[
            ("process-file", "process guest, through a file", Tone::Amber),
            ("kvm-file", "KVM guest, through a file", Tone::Vermilion),
            ("process-branch", "process guest, branch", Tone::Green),
            ("kvm-branch", "KVM guest, branch", Tone::Blue),
        ],
        &[
            ("pause_ms", "Pause of the parent", Some(PAUSE_GOAL_MS)),
            ("child_runs_ms", "Time until the child runs", Some(CHILD_RUNS_GOAL_MS)),
        ],
    ),
    (
        "upgrade",
        &[("qemu-cpr", "QEMU, cpr-transfer", Tone::Purple), ("ours", "vmferry", Tone::Blue)],
        &[
            ("downtime_ms", "Downtime", Some(UPGRADE_DOWNTIME_GOAL_MS)),
            ("total_ms", "Total time", Some(UPGRADE_TOTAL_GOAL_MS)),
        ],
    ),
];

/// Adds the charts of one run, if its bench has any.
pub(crate) fn charts(page: &mut Page, document: &Document) {
    add(page, &[document], "Medians of the rounds. Both axes are logarithmic.");
}

/// Adds charts of several runs of one bench. Returns true if there are any.
pub(crate) fn charts_of_runs(page: &mut Page, runs: &[&Document]) -> bool {
    let caption = "All runs together: each point is the median of those runs that measured this size. Both axes are \
                   logarithmic.";
    add(page, runs, caption)
}

/// Adds the charts of `runs`, which are of one bench. Returns true if there are any.
fn add(page: &mut Page, runs: &[&Document], caption: &str) -> bool {
    let own = CHARTS.iter().filter(|(bench, ..)| runs.first().is_some_and(|run| run.bench == *bench));
    let curves = own.flat_map(|(_, sides, curves)| curves.iter().map(move |curve| (sides, curve)));
    let charts: Vec<Chart> = curves.filter_map(|(sides, curve)| chart(runs, sides, curve)).collect();
    charts.iter().for_each(|chart| page.figure(chart, caption));
    !charts.is_empty()
}

/// Returns the table of the growth of the pause, by the summary of `document`. `sides` has the name
/// of each side, and the prefix of its figures.
pub(crate) fn growth(document: &Document, sides: &[(&str, &str)]) -> TextTable {
    let row = |(side, prefix): &(&str, &str)| {
        let slope = document.summary.get(&format!("{prefix}pause_slope_ms_per_gib"));
        let largest = document.summary.get(&format!("{prefix}pause_ms_16g"));
        let text = |value: Option<&Value>, digits| value.map_or("-".into(), |value| number(value, digits));
        slope.or(largest)?;
        Some(vec![(*side).to_owned(), text(slope, 3), text(largest, 2)])
    };
    TextTable {
        title: "Growth of the pause with the memory",
        head: vec!["side", "ms for each GiB", "ms with 16 GiB"],
        rows: sides.iter().filter_map(row).collect(),
    }
}

/// Returns a chart with a line for each side, or `None` if fewer than two sizes were measured.
fn chart(runs: &[&Document], sides: &[Side], (metric, title, goal): &Curve) -> Option<Chart> {
    let line = |(side, name, tone): &Side| {
        let own = runs.iter().flat_map(|run| &run.cases).filter(|case| side_of(case) == Some(*side));
        let point = |case: &Case| Some((memory_mib(case)?.log2(), *case.metrics.get(*metric)?));
        Line { name: (*name).into(), tone: *tone, points: medians(own.filter_map(point)), end: None }
    };
    let lines: Vec<Line> = sides.iter().map(line).filter(|line| !line.points.is_empty()).collect();
    let mut sizes: Vec<f64> = lines.iter().flat_map(|line| line.points.iter().map(|(x, _)| *x)).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let ends = sizes.first().copied().zip(sizes.last().copied()).filter(|(first, last)| first < last)?;
    Some(Chart {
        title: format!("{title}, against the memory of the guest"),
        x_label: "guest memory".into(),
        y_label: "ms".into(),
        log_y: true,
        ranges: [Some(ends), None],
        x_marks: sizes.iter().map(|size| (*size, size_text(size.exp2()))).collect(),
        level: goal.map(|goal| (goal, format!("goal: {goal} ms"))),
        dots: true,
        lines,
        ..Chart::default()
    })
}

/// Returns the median of the values at each position, ascending.
fn medians(values: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut values: Vec<(f64, f64)> = values.collect();
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let median = |same: &[(f64, f64)]| Some((same[0].0, Spread::of(same.iter().map(|(_, y)| *y))?.median));
    values.chunk_by(|a, b| a.0.total_cmp(&b.0).is_eq()).filter_map(median).collect()
}

/// Returns the memory of the guest of a case, which the benches record in different ways.
fn memory_mib(case: &Case) -> Option<f64> {
    let number = |name: &str| case.params.get(name).and_then(Value::as_f64);
    let in_name = || case.params.get("case")?.as_str()?.strip_suffix('M')?.parse().ok();
    let in_bytes = || Some(number("touched_bytes")? / to_f64(1 << 20));
    number("memory_mib").or_else(in_bytes).or_else(in_name).filter(|mib| *mib >= 1.0 && mib.is_finite())
}

/// Returns the compared side of a case.
fn side_of(case: &Case) -> Option<&str> {
    case.params.get("side").or_else(|| case.params.get("program"))?.as_str()
}

/// Returns a size as text.
fn size_text(mib: f64) -> String {
    let (size, unit) = if mib < 1024.0 { (mib, "MiB") } else { (mib / 1024.0, "GiB") };
    let text = format!("{size:.2}");
    format!("{} {unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;

    fn document(points: &[(u64, &str, f64)]) -> Document {
        let mut document = Document::new("snapshot", Host::default());
        for (mib, side, pause) in points {
            let name = format!("{mib}M/{side}");
            let mut case = Case::new(name).param("memory_mib", *mib).param("program", *side);
            case.metric("pause_ms", *pause);
            document.cases.push(case);
        }
        document
    }

    fn page_of(document: &Document) -> String {
        let mut page = Page::new("x");
        charts(&mut page, document);
        page.finish()
    }

    /// Returns the heights of the points of each line, from the upper edge.
    fn heights(page: &str) -> Vec<Vec<f64>> {
        let of_line = |line: &str| {
            let points = line.split('"').next().unwrap();
            points.split_whitespace().map(|point| point.split_once(',').unwrap().1.parse().unwrap()).collect()
        };
        page.split(" points=\"").skip(1).map(of_line).collect()
    }

    #[test]
    fn constant_pause_is_a_flat_line_and_growing_pause_is_not() {
        let sizes = [256, 1024, 4096, 16384];
        let flat = sizes.map(|mib| (mib, "vmferry", 0.5));
        let grows = sizes.map(|mib| (mib, "qemu", 0.002 * to_f64(mib)));
        // The order of the cases does not matter.
        let mut points = [flat, grows].concat();
        points.reverse();
        let page = page_of(&document(&points));
        let [qemu, ours] = &heights(&page)[..] else { panic!("{page}") };
        assert!(ours.len() == 4 && ours.iter().all(|y| (y - ours[0]).abs() < 0.1), "{ours:?}");
        let steps: Vec<f64> = qemu.windows(2).map(|pair| pair[0] - pair[1]).collect();
        assert!(steps.iter().all(|step| *step > 20.0 && (step - steps[0]).abs() < 0.2), "{steps:?}");
        for part in [">256 MiB</text>", ">16 GiB</text>", "goal: 5 ms</text>", "QEMU</text>"] {
            assert!(page.contains(part), "{part} is not in {page}");
        }
    }

    #[test]
    fn runs_with_different_sizes_have_one_line() {
        let run = |points: &[(u64, f64)]| {
            document(&points.iter().map(|(mib, pause)| (*mib, "vmferry", *pause)).collect::<Vec<_>>())
        };
        let runs = [run(&[(256, 0.5), (1024, 1.0)]), run(&[(1024, 4.0), (16384, 0.5)]), run(&[(1024, 0.5)])];
        let mut page = Page::new("x");
        assert!(charts_of_runs(&mut page, &runs.each_ref()));
        let [line] = &heights(&page.finish())[..] else { panic!("more than one line") };
        assert_eq!(line.len(), 3);
        let one = page_of(&run(&[(256, 0.5), (1024, 1.0), (16384, 0.5)]));
        assert_eq!(line, &heights(&one)[0], "the median of three runs is 1 ms");
        assert!(!charts_of_runs(&mut Page::new("x"), &[&run(&[(256, 0.5)])]));
    }

    #[test]
    fn single_size_has_no_chart() {
        let page = page_of(&document(&[(1024, "vmferry", 0.5), (1024, "qemu", 3.0)]));
        assert!(!page.contains("<svg"), "{page}");
    }

    #[test]
    fn size_is_found_however_a_bench_records_it() {
        let case = Case::new("x");
        assert_eq!(memory_mib(&case.clone().param("memory_mib", 256)), Some(256.0));
        assert_eq!(memory_mib(&case.clone().param("touched_bytes", 4_u64 << 30)), Some(4096.0));
        assert_eq!(memory_mib(&case.clone().param("case", "8192M")), Some(8192.0));
        for wrong in ["density", "infM", "-1M", "0M"] {
            assert_eq!(memory_mib(&case.clone().param("case", wrong)), None, "{wrong}");
        }
        assert_eq!(size_text(1536.0), "1.5 GiB");
    }
}
