//! Conversion of runs into figures, and of figures into floors.

use serde_json::{Map, Value, json};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::contest::Contest;
use super::exchange::{ANSWER, REQUEST};
use super::fault::Handler;
use super::samples::count;
use super::{Beside, LINKS, Measured, Options, SideRuns, What, capacity};

/// Function that returns a figure of one round, or `None` if the figure has no meaning for the
/// side.
type Figure = fn(&Measured) -> Option<f64>;

/// Figures of each side besides the mean. The median of the rounds is reported under the name, the
/// extremes under `_min` and `_max`. The name of the mean depends on what the side measures.
const FIGURES: &[(&str, Figure)] = &[
    ("p50_us", |round| Some(round.times.p50_us)),
    ("p99_us", |round| Some(round.times.p99_us)),
    ("max_us", |round| Some(round.times.max_us)),
    ("bulk_gbps", |round| round.bulk_gbps),
    ("pace_gbps", |round| round.pace_gbps),
    ("other_gbps", |round| round.other_gbps),
];

fn mean(round: &Measured) -> Option<f64> {
    Some(round.times.mean_us)
}

fn by_round(runs: &SideRuns, figure: Figure) -> Vec<Option<f64>> {
    runs.rounds.iter().map(|round| round.as_ref().and_then(figure)).collect()
}

/// Returns the side of `link` whose requests run beside `beside`.
fn find<'a>(sides: &'a [SideRuns], link: &str, beside: Beside) -> Option<&'a SideRuns> {
    sides.iter().find(
        |runs| matches!(runs.side.what, What::Requests { beside: b, .. } if runs.side.link == link && b == beside),
    )
}

/// Adds the cases and the summary to the document.
pub(super) fn add(document: &mut Document, options: &Options, sides: &[SideRuns], failures: &[String]) {
    document.cases.extend(sides.iter().map(|runs| case_of(options, sides, runs)));
    let median = |case: &str, name: &str| {
        document.cases.iter().find(|c| c.name == case).and_then(|c| c.metrics.get(name)).copied()
    };
    let fault = |handler: Handler| median(&format!("fault/{}", handler.name()), "local_fault_us");
    let (blocking, spinning) = (fault(Handler::Blocking), fault(Handler::Spinning));
    let mut links = Map::new();
    for link in LINKS.iter().map(|on| on.name) {
        let Some(rtt) = median(&format!("{link}/idle"), "rtt_us") else { continue };
        let mut floor = floor(rtt, blocking, spinning);
        if let Some(rtt) = median(&format!("{link}/idle-back-to-back"), "rtt_us") {
            floor.insert("rtt_back_to_back_us".into(), json!(rtt));
        }
        links.insert(link.to_owned(), Value::Object(floor));
    }
    // The top-level fields of the summary are those of loopback.
    if let Some(Value::Object(loopback)) = links.get("loopback") {
        document.summary.extend(loopback.clone());
    }
    document.summary.insert("links".into(), Value::Object(links));
    document.summary.insert("rounds".into(), options.repeats.into());
    document.summary.insert("failures".into(), failures.into());
}

/// Returns the parts of a remote fault: a round trip on the idle link, and a fault that this host
/// handles. Both are medians of rounds. Single faults, and rounds that the scheduler favours, can
/// be faster.
fn floor(rtt: f64, blocking: Option<f64>, spinning: Option<f64>) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("rtt_us".into(), json!(rtt));
    let faults = [
        ("local_fault_us", "floor_us", blocking),
        ("local_fault_spinning_us", "floor_spinning_us", spinning),
    ];
    for (fault_name, floor_name, fault) in faults {
        if let Some(fault) = fault {
            fields.insert(fault_name.into(), json!(fault));
            fields.insert(floor_name.into(), json!(rtt + fault));
        }
    }
    fields
}

fn case_of(options: &Options, sides: &[SideRuns], runs: &SideRuns) -> Case {
    let mut case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(runs.side.name(), why),
        _ => Case::new(runs.side.name()),
    }
    .param("link", runs.side.link)
    .param("rounds", runs.rounds.iter().flatten().count());
    let (mean_name, count_name) = match runs.side.what {
        What::Requests { .. } | What::Contest { .. } => ("rtt_us", "requests"),
        What::Faults(_) => ("local_fault_us", "faults"),
    };
    case.spread(mean_name, Spread::of(by_round(runs, mean).into_iter().flatten()));
    for (name, figure) in FIGURES {
        case.spread(name, Spread::of(by_round(runs, *figure).into_iter().flatten()));
    }
    if runs.rounds.iter().any(Option::is_some) {
        let all = runs.rounds.iter().flatten().map(|round| round.times.count).sum();
        case.metric(count_name, count(all));
    }
    match runs.side.what {
        What::Faults(handler) => case.param("handler", handler.name()).param("pages", options.faults),
        What::Contest { congestion, contest } => {
            add_contest(&mut case, sides, runs, contest);
            describe(case, runs.side.link, congestion, Beside::Found)
        }
        What::Requests { congestion, beside } => {
            add_ratios(&mut case, sides, runs, beside);
            describe(case, runs.side.link, congestion, beside)
        }
    }
}

/// Adds the cost of the bulk stream to the requests, and its share of the link.
fn add_ratios(case: &mut Case, sides: &[SideRuns], runs: &SideRuns, beside: Beside) {
    if matches!(beside, Beside::Idle | Beside::IdleBackToBack) {
        return;
    }
    add_idle_ratios(case, sides, runs);
    let bulk = by_round(runs, |round| round.bulk_gbps);
    let capacity = match find(sides, runs.side.link, Beside::Unpaced) {
        Some(unpaced) if runs.side.link == "loopback" => by_round(unpaced, |round| round.bulk_gbps),
        _ if runs.side.link == "loopback" => Vec::new(),
        _ => vec![capacity(runs.side.link, None); bulk.len()],
    };
    case.spread("bulk_share", Spread::of_ratios(&bulk, &capacity));
}

fn add_idle_ratios(case: &mut Case, sides: &[SideRuns], runs: &SideRuns) {
    let Some(idle) = find(sides, runs.side.link, Beside::Idle) else { return };
    let p99: Figure = |round| Some(round.times.p99_us);
    for (name, figure) in [("ratio_to_idle", mean as Figure), ("p99_ratio_to_idle", p99)] {
        case.spread(name, Spread::of_ratios(&by_round(runs, figure), &by_round(idle, figure)));
    }
}

/// Adds each stream's share of the link, and the fairness between them.
fn add_contest(case: &mut Case, sides: &[SideRuns], runs: &SideRuns, contest: Contest) {
    add_idle_ratios(case, sides, runs);
    let capacity = vec![capacity(runs.side.link, None); runs.rounds.len()];
    let half: Vec<Option<f64>> = capacity.iter().map(|gbps| gbps.map(|gbps| gbps / 2.0)).collect();
    let [bulk, other] = [by_round(runs, |round| round.bulk_gbps), by_round(runs, |round| round.other_gbps)];
    case.spread("bulk_share", Spread::of_ratios(&bulk, &capacity));
    if contest == Contest::Change {
        case.spread("share_of_half", Spread::of_ratios(&other, &half));
        return;
    }
    case.spread("other_share", Spread::of_ratios(&other, &capacity));
    let jain = |(a, b): (&Option<f64>, &Option<f64>)| {
        let (a, b) = ((*a)?, (*b)?);
        Some((a + b).powi(2) / (2.0 * (a * a + b * b)))
    };
    case.spread("jain", Spread::of(bulk.iter().zip(&other).filter_map(jain)));
}

fn describe(case: Case, link: &str, congestion: Option<&str>, beside: Beside) -> Case {
    let mut case = case
        .param("request_bytes", REQUEST)
        .param("answer_bytes", ANSWER)
        .param("gap_us", u64::try_from(beside.gap().as_micros()).unwrap_or(u64::MAX))
        .param("congestion", congestion.unwrap_or("default"))
        .param("beside", beside.name());
    if let Some(gbps) = capacity(link, None) {
        case = case.param("link_gbps", gbps);
    }
    if let Beside::Paced(percent) = beside {
        case = case.param("pace_percent", percent);
    }
    case
}
