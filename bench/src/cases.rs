//! Conversion of the rounds of each side into cases of a document, and of cases into figures.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use serde_json::Value;
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use crate::goal::Figure;
use crate::rounds::SideRuns;

/// Figures of one run by name. Each name ends with its unit.
pub(crate) type Figures = BTreeMap<&'static str, f64>;

/// Adds one case for each side of a group to the document, named `group/side`.
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

/// Adds to `case` the spread over `rounds` of each figure that occurs in any round.
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

/// Returns the metric `name` of the case `group/side`.
pub(crate) fn figure(document: &Document, group: &str, side: impl Display, name: &str) -> Option<Figure> {
    let case = format!("{group}/{side}");
    Figure::of(document.cases.iter().find(|own| own.name == case)?, name)
}

/// Returns the median of the metric `name` of the case `group/side`.
pub(crate) fn metric(document: &Document, group: &str, side: impl Display, name: &str) -> Option<f64> {
    figure(document, group, side, name).map(|figure| figure.median)
}
