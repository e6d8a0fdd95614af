//! HTML page with headings, paragraphs, tables and figures. The page is a single file without
//! scripts and external resources.

use super::escape;
use super::svg::{Chart, Tone};
use maud::{DOCTYPE, Markup, PreEscaped, Render, html};

const STYLE: &str = include_str!("page.css");

/// Maximum number of characters of a text on a page. Texts in result files may be longer.
const LONGEST: usize = 400;

/// Text for HTML: maud escapes characters with a meaning in HTML, but keeps control characters.
struct Text<'a>(&'a str);

impl Render for Text<'_> {
    fn render_to(&self, to: &mut String) {
        match self.0.char_indices().nth(LONGEST) {
            Some((end, _)) => {
                to.push_str(&escape(&self.0[..end]));
                to.push('…');
            }
            None => to.push_str(&escape(self.0)),
        }
    }
}

/// Maximum number of columns that fit on paper without line breaks in figures.
const FEW: usize = 8;

/// Part of a whole, which [`Page::shares`] draws as one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Share {
    /// Name of the part.
    pub name: String,
    /// Size of the part, with its unit.
    pub text: String,
    /// Start of the bar, as a share of the whole: 0 to 1.
    pub from: f64,
    /// Length of the bar, as a share of the whole: 0 to 1.
    pub size: f64,
    /// Colour of the bar.
    pub tone: Tone,
}

/// HTML page under construction. Each method adds content at the end.
#[derive(Debug)]
pub struct Page {
    title: String,
    body: String,
    /// Headings for the table of contents.
    headings: Vec<String>,
}

impl Page {
    /// Creates an empty page.
    pub fn new(title: &str) -> Self {
        Page { title: title.into(), body: String::new(), headings: Vec::new() }
    }

    fn add(&mut self, markup: &Markup) {
        self.body.push_str(&markup.0);
        self.body.push('\n');
    }

    /// Adds a part of the page with an entry in the table of contents.
    pub fn part(&mut self, text: &str) {
        let id = format!("part-{}", self.headings.len() + 1);
        self.add(&html! { h2.part id=(id) { (Text(text)) } });
        self.headings.push(text.into());
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) {
        self.add(&html! { h3 { (Text(text)) } });
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, text: &str) {
        self.add(&html! { p { (Text(text)) } });
    }

    /// Adds a paragraph for conditions and footnotes.
    pub fn note(&mut self, text: &str) {
        // This program wrote the text, which may be longer than a text from a file.
        self.add(&html! { p.soft { (PreEscaped(escape(text))) } });
    }

    /// Adds figures with their names. The most important figure must come first.
    pub fn facts(&mut self, facts: &[(&str, String)]) {
        self.add(&html! {
            dl.facts { @for (name, value) in facts { div { dt { (Text(name)) } dd { (Text(value)) } } } }
        });
    }

    /// Adds bars for the parts of a whole.
    pub fn shares(&mut self, shares: &[Share]) {
        let bar = |share: &Share| {
            let (x, width) = (share.from.clamp(0.0, 1.0) * 100.0, share.size.clamp(0.0, 1.0) * 100.0);
            html! {
                svg.vf.bar viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" {
                    path class=(share.tone.class()) d=(format!("M{x:.2} 0h{:.2}v10h-{:.2}z", width.max(0.3), width.max(0.3))) {}
                }
            }
        };
        self.add(&html! {
            div.wide { table.shares { tbody {
                @for share in shares { tr { td { (Text(&share.name)) } td { (Text(&share.text)) } td { (bar(share)) } } }
            } } }
        });
    }

    /// Adds a table whose first column is text and whose other columns are figures. A line is drawn
    /// where the part before a `/` in the first column changes.
    pub fn table<S: AsRef<str>>(&mut self, head: &[S], rows: &[Vec<String>]) {
        let group = |row: &Vec<String>| Some(row.first()?.split_once('/')?.0.to_owned());
        let first = |index: usize| index > 0 && group(&rows[index - 1]) != group(&rows[index]);
        self.add(&html! {
            div.wide { table.few[head.len() <= FEW] {
                thead { tr { @for cell in head { th { (Text(cell.as_ref())) } } } }
                tbody {
                    @for (index, row) in rows.iter().enumerate() {
                        tr.first[first(index)] { @for cell in row { td { (Text(cell)) } } }
                    }
                }
            } }
        });
    }

    /// Adds a chart with its caption.
    pub fn figure(&mut self, chart: &Chart, caption: &str) {
        self.drawing(&chart.render(), caption);
    }

    /// Adds a complete SVG element with its caption.
    pub(crate) fn drawing(&mut self, svg: &str, caption: &str) {
        // A separate drawing has its own style. A page has the style once for all drawings.
        let svg = svg.replacen(&format!("<style>{}</style>", super::svg::STYLE), "", 1);
        self.add(&html! {
            figure { div.wide { (PreEscaped(svg)) } figcaption { (PreEscaped(escape(caption))) } }
        });
    }

    /// Adds details that most readers skip. They are collapsed until the reader clicks on
    /// `summary`, and are not printed. `fill` adds their content.
    pub fn more(&mut self, summary: &str, fill: impl FnOnce(&mut Page)) {
        let mut inner = Page::new("");
        fill(&mut inner);
        self.add(&html! { details { summary { (Text(summary)) } (PreEscaped(inner.body)) } });
    }

    /// Returns the content of the complete HTML file.
    pub fn finish(self) -> String {
        let Page { title, body, headings } = self;
        let contents = html! {
            @if headings.len() > 1 {
                nav { ol { @for (index, heading) in headings.iter().enumerate() {
                    li { a href=(format!("#part-{}", index + 1)) { (Text(heading)) } }
                } } }
            }
        };
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width,initial-scale=1";
                    title { (Text(&title)) }
                    style { (PreEscaped(STYLE)) (PreEscaped(super::svg::STYLE)) }
                }
                body {
                    h1 { (Text(&title)) }
                    (contents)
                    (PreEscaped(body))
                }
            }
        }
        .into_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_escapes_text_and_groups_rows() {
        let mut page = Page::new("a & b");
        page.table(&["case", "x"], &[vec!["a/1".into(), "<1>".into()], vec!["b/1".into(), "2".into()]]);
        let text = page.finish();
        for part in ["<title>a &amp; b</title>", "&lt;1&gt;", "<tr class=\"first\"><td>b/1</td>", "</html>"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!text.contains("<script") && !text.contains("<nav"));
        assert_eq!(text.matches("class=\"first\"").count(), 1);
    }

    #[test]
    fn texts_from_files_are_truncated_and_escaped() {
        let mut page = Page::new("x");
        page.part("one <b>");
        page.part("two");
        page.facts(&[("name", "é".repeat(LONGEST + 1))]);
        page.more("rest\u{1}", |page| page.paragraph("</details>"));
        let text = page.finish();
        assert!(text.contains("<a href=\"#part-1\">one &lt;b&gt;</a>"), "{text}");
        assert!(text.contains(&format!("{}…</dd>", "é".repeat(LONGEST))));
        assert!(text.contains("<summary>rest\u{fffd}</summary><p>&lt;/details&gt;</p>"), "{text}");
    }
}
