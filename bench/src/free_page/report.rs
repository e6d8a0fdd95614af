//! Conversion of runs into the document.

use serde_json::Value;
use vmferry_report::json::Document;

use super::Options;
use super::goals::{Summary, goals};

/// Adds the summary of the whole run.
pub(super) fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let known = Summary::of(document).fields().into_iter().filter_map(|(name, value)| Some((name, value?)));
    let known: Vec<(&str, Value)> = known.map(|(name, value)| (name, value.into())).collect();
    let rest = [
        ("rounds", Value::from(options.repeats)),
        ("smaller", options.learn.smaller.clone().into()),
        ("goals", goals(document).into()),
        ("failures", failures.into()),
    ];
    document.summary.extend(known.into_iter().chain(rest).map(|(name, value)| (name.to_owned(), value)));
}
