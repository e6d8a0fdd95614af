//! Question of the published review: a guest that stalls less also dirties more, so does its
//! migration take longer?
//!
//! Each policy is compared with `fixed` in migrations that end before their timeout, with the same
//! ring size. The comparison counts only if the guest stalled less than with `fixed` by more than
//! the spread of the rounds.

use serde_json::{Value, json};
use vmferry_report::json::Document;

use super::goals::{Sides, sides_of};
use super::spec::ENTRIES;
use super::{Policy, Purpose, Side};
use crate::goal::{Figure, Verdict};

/// Returns a row for each policy other than `fixed`, ring size and converging case.
pub(super) fn stall_and_total(document: &Document) -> Vec<Value> {
    let mut rows = Vec::new();
    for sides in sides_of(document, &[Purpose::Converge]) {
        for entries in ENTRIES {
            let others = Policy::ALL.into_iter().filter(|policy| *policy != Policy::Fixed);
            rows.extend(others.filter_map(|policy| row(&sides, entries, policy)));
        }
    }
    rows
}

fn row(sides: &Sides<'_>, entries: u32, policy: Policy) -> Option<Value> {
    let of = |policy, metric| sides.of(Side::Ring { entries, policy }, metric);
    let both = |metric| Some((of(policy, metric)?, of(Policy::Fixed, metric)?));
    let (stall, fixed_stall) = both("full_stall_pct")?;
    let (total, fixed_total) = both("total_ms")?;
    let ratio = total.over(fixed_total)?;
    let timed_out = both("timed_out").is_none_or(|(ours, fixed)| ours.median > 0.0 || fixed.median > 0.0);
    let writes = both("writes_during_per_s").and_then(|(ours, fixed)| ours.over(fixed));
    let less = fixed_stall.minus(stall);
    Some(json!({
        "name": format!("{}/{entries} {} to fixed", sides.name, policy.name()),
        "stall_pct": stall.median,
        "fixed_stall_pct": fixed_stall.median,
        "total_ms": total.median,
        "fixed_total_ms": fixed_total.median,
        "total_to_fixed": ratio.median,
        "spread": ratio.spread,
        "writes_to_fixed": writes.map(|writes| writes.median),
        "timed_out": timed_out,
        "stalls_less": Verdict::of(less.median, less.spread).value(),
        "takes_longer": longer(ratio).value(),
    }))
}

/// Returns whether the total time is longer by more than the spread.
fn longer(ratio: Figure) -> Verdict {
    Verdict::of(ratio.median - 1.0, ratio.spread)
}

/// Returns the answer that the rows give, or `None` without rows.
pub(super) fn answer(rows: &[Value]) -> Option<String> {
    if rows.is_empty() {
        return None;
    }
    let counted: Vec<_> =
        rows.iter().filter(|row| row["stalls_less"] == true && row["timed_out"] == false).collect();
    let count = |verdict: Value| counted.iter().filter(|row| row["takes_longer"] == verdict).count();
    let (all, more, fewer) = (counted.len(), count(true.into()), count(false.into()));
    let word = match (all, more) {
        (0, _) => "Unknown",
        (_, 0) => "No",
        (all, more) if all == more => "Yes",
        _ => "Not always",
    };
    Some(format!(
        "Does a guest that stalls less migrate longer? {word}. In {all} of {} comparisons with fixed, the migration converged \
         and the guest stalled less by more than the spread. Of these migrations, {more} took longer, {fewer} took less time, \
         and {} took equally long within the spread.",
        rows.len(),
        all - more - fewer,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_report::Spread;
    use vmferry_report::host::Host;
    use vmferry_report::json::Case;

    /// Returns a document with a converging case: for each policy, stalls in percent and total
    /// times of two rounds.
    fn document(policies: &[(Policy, [f64; 2], [f64; 2])]) -> Document {
        let mut document = Document::new("reaper", Host::default());
        for (policy, stalls, totals) in policies {
            let side = Side::Ring { entries: 4096, policy: *policy };
            let mut case = Case::new(format!("converge/{side}"))
                .param("case", "converge")
                .param("purpose", Purpose::Converge.name())
                .param("rounds", 2);
            case.spread("full_stall_pct", Spread::of(*stalls));
            case.spread("total_ms", Spread::of(*totals));
            case.spread("timed_out", Spread::of(totals.map(|total| f64::from(u8::from(total >= 9000.0)))));
            document.cases.push(case);
        }
        document
    }

    fn answer_of(policies: &[(Policy, [f64; 2], [f64; 2])]) -> String {
        answer(&stall_and_total(&document(policies))).unwrap()
    }

    const FIXED: (Policy, [f64; 2], [f64; 2]) = (Policy::Fixed, [5.0, 6.0], [1000.0, 1010.0]);

    #[test]
    fn answer_depends_on_migrations_with_fewer_stalls() {
        let longer = (Policy::Predict, [0.1, 0.2], [1200.0, 1210.0]);
        let alike = (Policy::Gears, [1.0, 1.1], [1000.0, 1020.0]);
        let no_less = (Policy::Aimd, [5.0, 5.5], [2000.0, 2010.0]);
        assert!(answer_of(&[FIXED, longer]).contains("? Yes. In 1 of 1"));
        assert!(answer_of(&[FIXED, alike]).contains("? No. In 1 of 1"));
        let both = answer_of(&[FIXED, longer, alike]);
        assert!(both.contains("? Not always. In 2 of 2") && both.contains("1 took longer, 0 took"), "{both}");
        assert!(answer_of(&[FIXED, no_less]).contains("? Unknown. In 0 of 1"));
    }

    #[test]
    fn migration_that_ended_by_its_timeout_answers_nothing() {
        let late = (Policy::Predict, [0.1, 0.2], [9500.0, 9510.0]);
        let rows = stall_and_total(&document(&[FIXED, late]));
        assert_eq!((&rows[0]["timed_out"], &rows[0]["stalls_less"]), (&json!(true), &json!(true)));
        assert!(answer(&rows).unwrap().contains("? Unknown."));
        assert_eq!(answer(&[]), None);
    }
}
