//! Draws the effect of each reaper policy on a simulated guest: one file `reaper-POLICY.svg` for
//! each policy, into a folder.
//!
//! ```sh
//! cargo run -p vmferry-baselines --example reapers |
//!     cargo run -p vmferry-report --example policies -- docs/img bursts 4096
//! ```

use std::collections::BTreeMap;
use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use vmferry_report::svg::{Chart, Line, Tone};

/// Figures of one second of the trace.
#[derive(Debug, Clone, Copy)]
struct Second {
    shortest_sleep_ms: f64,
    occupancy_pct: f64,
    harvests: f64,
}

/// Turn of the reaper, from a line of the example `reapers`.
struct Turn<'a> {
    trace: &'a str,
    entries: &'a str,
    policy: &'a str,
    at: f64,
    sleep_ms: f64,
    occupancy: f64,
    harvested: f64,
}

fn turn(line: &str) -> Option<Turn<'_>> {
    // The trace's name is quoted, because it may have commas.
    let (trace, rest) = line.strip_prefix('"')?.split_once("\",")?;
    let fields: Vec<&str> = rest.split(',').collect();
    let [entries, policy, at, sleep_ms, occupancy, harvested] = fields[..] else { return None };
    let number = |text: &str| text.parse::<f64>().ok();
    Some(Turn {
        trace,
        entries,
        policy,
        at: number(at)?,
        sleep_ms: number(sleep_ms)?,
        occupancy: number(occupancy)?,
        harvested: number(harvested)?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, trace, entries] = &args[..] else {
        return Err("usage: policies FOLDER TRACE ENTRIES < reapers.csv".into());
    };
    let mut policies: BTreeMap<String, BTreeMap<u32, Second>> = BTreeMap::new();
    for line in std::io::stdin().lock().lines().skip(1) {
        let line = line?;
        let turn = turn(&line).ok_or_else(|| format!("not a line of the example reapers: {line}"))?;
        if turn.trace != trace || turn.entries != entries {
            continue;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "seconds of a short trace"
        )]
        let at = turn.at.max(0.0) as u32;
        let nothing = Second { shortest_sleep_ms: f64::INFINITY, occupancy_pct: 0.0, harvests: 0.0 };
        let second = policies.entry(turn.policy.into()).or_default().entry(at).or_insert(nothing);
        second.shortest_sleep_ms = second.shortest_sleep_ms.min(turn.sleep_ms);
        second.occupancy_pct = second.occupancy_pct.max(turn.occupancy * 100.0);
        second.harvests += turn.harvested;
    }
    if policies.is_empty() {
        return Err(format!("the input has no turn of trace {trace} with {entries} entries").into());
    }
    for (policy, seconds) in &policies {
        let file = Path::new(folder).join(format!("reaper-{policy}.svg"));
        std::fs::write(&file, chart(policy, trace, entries, seconds).render() + "\n")?;
        println!("{}", file.display());
    }
    Ok(())
}

fn chart(policy: &str, trace: &str, entries: &str, seconds: &BTreeMap<u32, Second>) -> Chart {
    let line = |name: &str, tone, of: fn(&Second) -> f64| {
        // Drawn as steps: a second has one value.
        let points = seconds.iter().flat_map(|(at, second)| {
            let at = f64::from(*at);
            [(at, of(second)), (at + 1.0, of(second))]
        });
        Line { name: name.into(), tone, points: points.collect(), end: None }
    };
    Chart {
        title: format!("{policy}, on the trace \"{trace}\", rings of {entries} entries"),
        x_label: "seconds".into(),
        y_label: "ms, %, harvests/s".into(),
        log_y: true,
        // The same ranges for all charts, so that they can be compared.
        ranges: [Some((0.0, 60.0)), Some((0.3, 1500.0))],
        lines: vec![
            line("shortest sleep, ms", Tone::Grey, |second| second.shortest_sleep_ms),
            line("fullest ring at a turn, %", Tone::Vermilion, |second| second.occupancy_pct),
            line("harvests per second", Tone::Blue, |second| second.harvests),
        ],
        ..Chart::default()
    }
}
