//! Pages with charts, for people: one file each, without scripts and without anything from elsewhere.

pub mod bars;
pub mod html;
pub mod input;
pub mod lanes;
pub mod migration;
pub(crate) mod plain;
pub mod ranges;
pub mod svg;
pub(crate) mod tables;
mod whole;

pub use whole::page;

/// `text` with what has a meaning in HTML and SVG replaced.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // XML has no way to write the other control characters at all.
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
    fn nothing_gets_out_of_its_element() {
        assert_eq!(escape("a<b>&\"c\"'d'\u{7}\n"), "a&lt;b&gt;&amp;&quot;c&quot;&#39;d&#39;\u{fffd}\n");
        assert_eq!(escape("plain, 5 µs"), "plain, 5 µs");
    }
}
