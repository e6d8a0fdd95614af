//! Text form of a plan.

use crate::output::{self, INDENT};
use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde_json::Value;

/// Columns of the table of all ways, and of the table of encodings.
const MODES: [&str; 7] = ["mode", "converges", "total", "downtime", "sent", "guest slowed by", "passes"];
const ENCODINGS: [&str; 6] = ["encoding", "mode", "total", "downtime", "sent", "encoder's CPU"];

/// Formatter of a figure.
type Shown = fn(f64) -> String;

/// Returns the table, at most `columns` wide if there is a terminal, and its explanation.
pub(super) fn text(plan: &Value, columns: Option<usize>) -> String {
    let table = fitting(&MODES, columns, |between| modes(plan, between));
    // Without a sample, there is nothing to compare.
    let compared = plan["codecs"].as_array().is_some_and(|codecs| codecs.len() > 1);
    let encodings = compared.then(|| fitting(&ENCODINGS, columns, |between| encodings(plan, between)));
    let fold = |line: String, indent: usize| match columns {
        Some(columns) => output::fold(&line, columns, indent),
        None => line,
    };
    let text = |name: &str| plan[name].as_str().unwrap_or("?").to_owned();
    let means =
        fold("Expected values; nine of ten simulated runs lie within the range in brackets.".into(), 0);
    let words = [
        format!("recommended  {}: {}", text("recommended"), text("reason")),
        format!("encoding     {}", encoding(&plan["encoding"])),
        format!("how sure     {}", text("certainty")),
        format!("measured     {}", measured(&plan["inputs"])),
        format!("its cost     {}", cost(&plan["guest_cost"])),
    ];
    let busy = plan["busy"]
        .as_str()
        .map(|why| format!("but          {why}; the plan assumes that the guest's I/O is quiesced"));
    let words = words.into_iter().chain(busy).map(|line| fold(line, INDENT));
    let encodings = encodings.map_or_else(String::new, |table| format!("{table}\n"));
    format!("{table}\n{encodings}{means}\n\n{}", words.collect::<Vec<_>>().join("\n"))
}

/// Returns a table that is at most `columns` wide if there is a terminal. `make` makes it with the
/// text before the range in brackets.
fn fitting(head: &[&str], columns: Option<usize>, make: impl Fn(&str) -> Table) -> Table {
    let table = make(" ");
    let too_wide = |columns: &usize| table.to_string().lines().any(|line| wider(line, *columns));
    let Some(columns) = columns.filter(too_wide) else { return table };
    let mut table = make("\n");
    let width = u16::try_from(columns).unwrap_or(u16::MAX);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    table.set_constraints(head.iter().map(|title| least(title)));
    table
}

/// Returns the least width of a column: no word of its head is broken, and no mode's name.
fn least(title: &str) -> ColumnConstraint {
    if title == MODES[0] || title == ENCODINGS[0] {
        return ColumnConstraint::ContentWidth;
    }
    let word = title.split(' ').map(str::len).max().unwrap_or(0);
    // A time in brackets is not separated from its unit.
    let word = if title == "total" { "to 1.3 s)".len() } else { word };
    // The width includes the padding.
    ColumnConstraint::LowerBoundary(Width::Fixed(u16::try_from(word + 2).unwrap_or(u16::MAX)))
}

/// Returns the table of all ways. `between` precedes the range in brackets.
fn modes(plan: &Value, between: &str) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(MODES);
    for mode in plan["modes"].as_array().into_iter().flatten() {
        let name = mode["mode"].as_str().unwrap_or("?");
        let star = if plan["recommended"] == mode["mode"] { "* " } else { "  " };
        let mut row = vec![Cell::new(format!("{star}{name}")), Cell::new(converges(mode))];
        let columns: [(&str, Shown); 5] = [
            ("total_ms", time),
            ("downtime_ms", time),
            ("bytes", size),
            ("slowdown", percent),
            ("passes", count),
        ];
        for (name, shown) in columns {
            row.push(Cell::new(interval(&mode[name], shown, between)).set_alignment(CellAlignment::Right));
        }
        table.add_row(row);
    }
    table
}

/// Returns the table of all encodings of pages. `between` precedes the range in brackets.
fn encodings(plan: &Value, between: &str) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(ENCODINGS);
    let same = |a: &Value, b: &Value| a["codec"] == b["codec"] && a["deltas"] == b["deltas"];
    for codec in plan["codecs"].as_array().into_iter().flatten() {
        let name = codec["codec"].as_str().unwrap_or("?");
        let deltas = if codec["deltas"] == true { " + deltas" } else { "" };
        let star = if same(codec, &plan["encoding"]) { "* " } else { "  " };
        let mode = codec["mode"].as_str().unwrap_or("?");
        let mut row = vec![Cell::new(format!("{star}{name}{deltas}")), Cell::new(mode)];
        for (name, shown) in [("total_ms", time as Shown), ("downtime_ms", time), ("bytes", size)] {
            row.push(Cell::new(interval(&codec[name], shown, between)).set_alignment(CellAlignment::Right));
        }
        let cpu = codec["encoding_cpu_ms"]["expected"].as_f64().map_or("-".into(), time);
        row.push(Cell::new(cpu).set_alignment(CellAlignment::Right));
        table.add_row(row);
    }
    table
}

/// Returns the recommended encoding as options, and the reason.
fn encoding(advice: &Value) -> String {
    let codec = advice["codec"].as_str().unwrap_or("?");
    let deltas = if advice["deltas"] == true { " --delta on" } else { "" };
    format!("--codec {codec}{deltas}: {}", advice["reason"].as_str().unwrap_or("?"))
}

fn wider(line: &str, columns: usize) -> bool {
    line.chars().count() > columns
}

fn converges(mode: &Value) -> String {
    let percent = mode["probability"].as_f64().unwrap_or(0.0) * 100.0;
    match mode["converges"].as_str() {
        Some("yes") => "yes".into(),
        Some("no") => "no".into(),
        _ => format!("perhaps ({percent:.0} %)"),
    }
}

fn interval(value: &Value, shown: Shown, between: &str) -> String {
    let number = |name: &str| value[name].as_f64().map(shown);
    match (number("low"), number("expected"), number("high")) {
        (Some(low), Some(expected), Some(high)) if low == high => expected,
        (Some(low), Some(expected), Some(high)) => {
            let unit = |text: &str| text.split_once(' ').map(|(_, unit)| unit.to_owned());
            // A common unit is printed once.
            let low = low.split_once(' ').filter(|_| unit(&low) == unit(&high)).map_or(&*low, |(low, _)| low);
            format!("{expected}{between}({low} to {high})")
        }
        _ => "-".into(),
    }
}

fn time(ms: f64) -> String {
    match ms {
        ms if ms >= 9950.0 => format!("{:.0} s", ms / 1e3),
        ms if ms >= 995.0 => format!("{:.1} s", ms / 1e3),
        ms => format!("{ms:.0} ms"),
    }
}

fn size(bytes: f64) -> String {
    let mib = bytes / f64::from(1 << 20);
    if mib >= 1000.0 { format!("{:.1} GiB", mib / 1024.0) } else { format!("{mib:.0} MiB") }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn count(value: f64) -> String {
    format!("{value:.0}")
}

fn measured(inputs: &Value) -> String {
    let number = |name: &str| inputs[name].as_f64().unwrap_or(0.0);
    let cost = |name: &str| inputs["costs"][name].as_f64().unwrap_or(0.0);
    let link = &inputs["link"];
    let said = if link["measured"] == true { "" } else { " (as given)" };
    let last = inputs["curve"].as_array().and_then(|curve| curve.last()).cloned().unwrap_or_default();
    format!(
        "{} of {} hold content; link {:.0} MB/s{said}, round trip {:.2} ms; {} dirtied within {}; stopping takes {:.1} ms",
        size((number("touched_pages") - number("zero_pages") - number("free_pages")) * 4096.0),
        size(number("memory_pages") * 4096.0),
        link["bytes_per_s"].as_f64().unwrap_or(0.0) / 1e6,
        link["round_trip_s"].as_f64().unwrap_or(0.0) * 1e3,
        size(last["pages"].as_f64().unwrap_or(0.0) * 4096.0),
        time(last["window_s"].as_f64().unwrap_or(0.0) * 1e3),
        (cost("pause_s") + cost("settle_s") + 2.0 * cost("save_s")) * 1e3,
    )
}

fn cost(cost: &Value) -> String {
    let number = |name: &str| cost[name].as_f64().unwrap_or(0.0);
    format!(
        "the guest's writes were tracked for {}, {} of its page faults took about {}; it was stopped {} times for {:.1} ms in all",
        time(number("tracked_ms")),
        count(number("faults")),
        time(number("faults_ms")),
        count(number("pauses")),
        number("paused_ms"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn plan_is_printed_as_a_table_with_an_explanation() {
        let interval =
            |low: f64, expected: f64, high: f64| json!({ "low": low, "expected": expected, "high": high });
        let plan = json!({
            "modes": [
                { "mode": "precopy", "converges": "borderline", "probability": 0.4, "total_ms": interval(900.0, 1000.0, 12_000.0), "downtime_ms": interval(700.0, 800.0, 900.0) },
                { "mode": "hybrid", "converges": "yes", "probability": 1.0, "bytes": interval(1e9, 1e9, 1e9) },
            ],
            "codecs": [
                { "codec": "raw", "deltas": false, "mode": "hybrid", "total_ms": interval(4e4, 5e4, 6e4), "encoding_cpu_ms": interval(0.0, 0.0, 0.0) },
                { "codec": "zstd:1", "deltas": true, "mode": "precopy", "bytes": interval(1e8, 2e8, 3e8), "encoding_cpu_ms": interval(900.0, 1300.0, 1400.0) },
            ],
            "encoding": { "codec": "zstd:1", "deltas": true, "reason": "it is faster" },
            "recommended": "hybrid", "reason": "because", "certainty": "not very",
            "inputs": { "link": { "bytes_per_s": 1e8, "measured": false } },
        });
        let narrow = super::text(&plan, Some(78));
        assert!(narrow.lines().all(|line| !wider(line, 78)) && narrow.contains("1.0 s"), "{narrow}");
        for word in ["converges", "downtime", "slowed", "passes", "encoding", "CPU"] {
            assert!(narrow.contains(word), "{word} is broken: {narrow}");
        }
        let text = super::text(&plan, None);
        for part in [
            "perhaps (40 %)",
            "1.0 s (900 ms to 12 s)",
            "800 ms (700 to 900 ms)",
            "* hybrid",
            "954 MiB",
            "hybrid: because",
            "as given",
            "* zstd:1 + deltas",
            "191 MiB (95 to 286 MiB)",
            "encoding     --codec zstd:1 --delta on: it is faster",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut alone = plan;
        alone["codecs"].as_array_mut().unwrap().truncate(1);
        let text = super::text(&alone, None);
        assert!(!text.contains("encoder's CPU") && text.contains("encoding     --codec"), "{text}");
    }
}
