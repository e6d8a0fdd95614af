//! Results of migrations and benches: their JSON documents, and the tables and pages that display
//! them.
//!
//! `vmferry report` shows result files with this crate. `vmferry-bench` writes its results with
//! [`json`] and shows them with [`benches`]. The crate measures nothing.
//!
//! A page is one HTML file with charts. It has no scripts, and loads no external resources.

#![forbid(unsafe_code)]

pub mod bars;
pub mod benches;
pub mod by_memory;
pub mod host;
pub mod html;
pub mod input;
pub mod json;
pub mod lanes;
pub mod migration;
mod plain;
pub mod ranges;
mod stats;
pub mod svg;
mod tables;
mod whole;

pub use stats::Spread;
pub use whole::page;

/// Converts `count` to a number for charts.
#[expect(clippy::cast_precision_loss, reason = "charts need no more than 53 bits")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

/// Returns `text` with those characters escaped that have a meaning in HTML and SVG. Control
/// characters that XML cannot express are replaced.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // XML cannot express the other control characters.
            c if c.is_control() && !matches!(c, '\n' | '\t') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_cannot_end_its_element() {
        assert_eq!(escape("a<b>&\"c\"'d'\u{7}\n"), "a&lt;b&gt;&amp;&quot;c&quot;&#39;d&#39;\u{fffd}\n");
        assert_eq!(escape("plain, 5 µs"), "plain, 5 µs");
    }
}
