//! From the rounds of each side to cases, and from cases to goals.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use serde_json::Value;
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use crate::rounds::SideRuns;

/// Figures of one run by name, with the unit at its end.
pub(crate) type Figures = BTreeMap<&'static str, f64>;

/// Adds the sides of a group to the document, as `group/side`.
pub(crate) fn add<S: Copy + Display, R>(
    document: &mut Document,
    (group, params): (&str, &[(&str, Value)]),
    sides: &[SideRuns<S, R>],
    figures: impl Fn(&R) -> Figures,
) {
    for runs in sides {
        let name = format!("{group}/{}", runs.side);
        let mut case = match &runs.skipped {
            Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
            _ => Case::new(name),
        };
        let measured: Vec<Figures> = runs.rounds.iter().flatten().map(&figures).collect();
        case = case.param("case", group).param("side", runs.side.to_string()).param("rounds", measured.len());
        for (name, value) in params {
            case = case.param(name, value.clone());
        }
        add_spreads(&mut case, measured.iter());
        document.cases.push(case);
    }
}

/// Adds the spread over `rounds` of each figure that any of them has.
pub(crate) fn add_spreads<'a, K: Ord + AsRef<str> + 'a>(
    case: &mut Case,
    rounds: impl Iterator<Item = &'a BTreeMap<K, f64>> + Clone,
) {
    let names: BTreeSet<&K> = rounds.clone().flat_map(BTreeMap::keys).collect();
    for name in names {
        case.spread(
            name.as_ref(),
            Spread::of(rounds.clone().filter_map(|figures| figures.get(name).copied())),
        );
    }
}

/// A metric of `group/side`, its median.
pub(crate) fn metric(document: &Document, group: &str, side: impl Display, name: &str) -> Option<f64> {
    let case = format!("{group}/{side}");
    let case = document.cases.iter().find(|own| own.name == case)?;
    case.metrics.get(name).copied().filter(|value| value.is_finite())
}

/// A goal for the summary.
pub(crate) fn goal(name: &str, want: String, got: f64, met: bool) -> Value {
    serde_json::json!({ "name": name, "want": want, "got": got, "met": met })
}

/// One that must not be exceeded, if it is known.
pub(crate) fn at_most(name: &str, most: f64, got: Option<f64>) -> Option<Value> {
    let got = got.filter(|got| got.is_finite())?;
    Some(goal(name, format!("<= {most:.3}"), got, got <= most))
}

/// One that must be reached, if it is known.
pub(crate) fn at_least(name: &str, least: f64, got: Option<f64>) -> Option<Value> {
    let got = got.filter(|got| got.is_finite())?;
    Some(goal(name, format!(">= {least}"), got, got >= least))
}
