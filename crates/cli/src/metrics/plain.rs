//! Conversion to Prometheus's older text format, for clients that do not accept OpenMetrics. In
//! that format a counter's family has the name of its samples, and there are no units and no end
//! mark.

use std::collections::BTreeSet;

/// Returns the name in a `# WORD NAME ...` line, and the rest of the line.
fn about<'a>(line: &'a str, word: &str) -> Option<(&'a str, &'a str)> {
    line.strip_prefix("# ")?.strip_prefix(word)?.strip_prefix(' ')?.split_once(' ')
}

/// Converts `text`, which is OpenMetrics as `collect` makes it.
pub(super) fn plain(text: &str) -> String {
    let kinds = text.lines().filter_map(|line| about(line, "TYPE"));
    let counters: BTreeSet<_> = kinds.filter(|(_, kind)| *kind == "counter").map(|(name, _)| name).collect();
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        if line == "# EOF" || about(line, "UNIT").is_some() {
            continue;
        }
        let counter = ["HELP", "TYPE"].into_iter().find_map(|word| {
            let (name, rest) = about(line, word)?;
            counters.contains(name).then(|| format!("# {word} {name}_total {rest}\n"))
        });
        match counter {
            Some(line) => out.push_str(&line),
            None => out.extend([line, "\n"]),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_family_has_the_name_of_its_samples() {
        let open = "# HELP a_bytes What # TYPE it is\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total 1.0\n\
                    # HELP b Another\n# TYPE b gauge\nb{x=\"# EOF\"} 2.0\n# EOF\n";
        let want = "# HELP a_bytes_total What # TYPE it is\n# TYPE a_bytes_total counter\na_bytes_total 1.0\n\
                    # HELP b Another\n# TYPE b gauge\nb{x=\"# EOF\"} 2.0\n";
        assert_eq!(plain(open), want);
    }
}
