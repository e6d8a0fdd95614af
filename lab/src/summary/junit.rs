//! JUnit's XML in the form that CI systems read: one suite, with one case for each scenario.

use crate::record::{Outcome, Record};
use std::fmt::Write;

pub(super) fn xml(records: &[Record], seconds: f64) -> String {
    let count = |wanted: &[Outcome]| records.iter().filter(|record| wanted.contains(&record.outcome)).count();
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    // A write to a String does not fail.
    let _ = writeln!(
        text,
        "<testsuite name=\"vmferry-lab\" tests=\"{}\" failures=\"{}\" skipped=\"{}\" time=\"{seconds:.1}\">",
        records.len(),
        count(&[Outcome::Failed, Outcome::NotRun, Outcome::Emulator]),
        count(&[Outcome::Skipped]),
    );
    for record in records {
        let name = escaped(&record.scenario);
        let _ = write!(
            text,
            "  <testcase classname=\"vmferry-lab\" name=\"{name}\" time=\"{:.1}\">",
            record.seconds
        );
        let why = escaped(record.why.as_deref().unwrap_or_default());
        match record.outcome {
            Outcome::Passed => {}
            Outcome::Skipped => _ = write!(text, "<skipped message=\"{why}\"/>"),
            Outcome::Failed => _ = write!(text, "<failure message=\"{why}\"/>"),
            Outcome::Emulator => _ = write!(text, "<failure message=\"emulator: {why}\"/>"),
            Outcome::NotRun => _ = write!(text, "<failure message=\"not run: {why}\"/>"),
        }
        if !record.figures.is_empty() {
            let figures = serde_json::to_string(&record.figures).unwrap_or_default();
            let _ = write!(text, "<system-out>{}</system-out>", escaped(&figures));
        }
        text.push_str("</testcase>\n");
    }
    text.push_str("</testsuite>\n");
    text
}

/// Escapes text for attributes and content. XML 1.0 cannot represent most control characters, so
/// they are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_outcomes_are_written_and_special_characters_are_escaped() {
        let records = [
            Record::new("good", Outcome::Passed, None, 1.0),
            Record::new("bad", Outcome::Failed, Some("got <\"&\u{1b}[0m\">".into()), 1.0),
            Record::new("not-here", Outcome::Skipped, Some("no tap".into()), 1.0),
            Record::new("late", Outcome::NotRun, Some("no time".into()), 0.0),
        ];
        let text = xml(&records, 3.0);
        assert!(text.contains("tests=\"4\" failures=\"2\" skipped=\"1\" time=\"3.0\""), "{text}");
        assert!(text.contains("<failure message=\"got &lt;&quot;&amp;[0m&quot;&gt;\"/>"), "{text}");
        assert!(text.contains("<failure message=\"not run: no time\"/>"), "{text}");
        assert!(text.contains("<skipped message=\"no tap\"/>"), "{text}");
        assert_eq!(text.matches("<testcase").count(), 4);
    }
}
