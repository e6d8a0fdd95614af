//! A page: headings, paragraphs, tables, figures.

use super::escape;
use super::svg::Chart;

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1f2328;--soft:#59636e;--line:#d1d9e0;--ground:#fff;--band:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--text:#e6edf3;--soft:#9198a1;--line:#3d444d;--ground:#0d1117;--band:#151b23}}
body{margin:2rem auto;max-width:68rem;padding:0 1rem;background:var(--ground);color:var(--text);
font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}
h1{font-size:1.7rem}h2{font-size:1.25rem;margin-top:2.5rem}
p{max-width:52rem}p.soft,figcaption{color:var(--soft);font-size:.9rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal}
th:first-child,td:first-child{text-align:left}
tr.first td{border-top:2px solid var(--line)}
tbody tr:hover{background:var(--band)}
figure{margin:1.5rem 0}figure svg{width:100%;height:auto}";

/// A page that grows from its head to its end.
#[derive(Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// An empty page.
    pub fn new(title: &str) -> Self {
        Page { title: title.into(), body: format!("<h1>{}</h1>\n", escape(title)) }
    }

    /// A heading.
    pub fn heading(&mut self, text: &str) {
        self.body.push_str(&format!("<h2>{}</h2>\n", escape(text)));
    }

    /// A paragraph.
    pub fn paragraph(&mut self, text: &str) {
        self.body.push_str(&format!("<p>{}</p>\n", escape(text)));
    }

    /// A paragraph beside the point: conditions, footnotes.
    pub fn note(&mut self, text: &str) {
        self.body.push_str(&format!("<p class=\"soft\">{}</p>\n", escape(text)));
    }

    /// A table whose first column is text and whose others are figures. A line is drawn where the first column's part
    /// before a `/` changes.
    pub fn table(&mut self, head: &[&str], rows: &[Vec<String>]) {
        self.body.push_str("<div class=\"wide\"><table><thead><tr>");
        for cell in head {
            self.body.push_str(&format!("<th>{}</th>", escape(cell)));
        }
        self.body.push_str("</tr></thead><tbody>\n");
        let mut group = None;
        for row in rows {
            let own = row.first().and_then(|name| name.split('/').next());
            let class = if group.is_some() && group != own { " class=\"first\"" } else { "" };
            group = own;
            self.body.push_str(&format!("<tr{class}>"));
            for cell in row {
                self.body.push_str(&format!("<td>{}</td>", escape(cell)));
            }
            self.body.push_str("</tr>\n");
        }
        self.body.push_str("</tbody></table></div>\n");
    }

    /// A chart, with what it shows below it.
    pub fn figure(&mut self, chart: &Chart, caption: &str) {
        self.drawing(&chart.render(), caption);
    }

    /// An SVG element that is ready, with what it shows below it.
    pub(crate) fn drawing(&mut self, svg: &str, caption: &str) {
        let caption = escape(caption);
        self.body.push_str(&format!("<figure>{svg}<figcaption>{caption}</figcaption></figure>\n"));
    }

    /// The whole file.
    pub fn finish(self) -> String {
        let Page { title, body } = self;
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <title>{}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n",
            escape(&title)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_escaped_and_groups_its_rows() {
        let mut page = Page::new("a & b");
        page.table(&["case", "x"], &[vec!["a/1".into(), "<1>".into()], vec!["b/1".into(), "2".into()]]);
        let text = page.finish();
        for part in ["<title>a &amp; b</title>", "&lt;1&gt;", "<tr class=\"first\"><td>b/1</td>", "</html>"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!text.contains("<script"));
        assert_eq!(text.matches("class=\"first\"").count(), 1);
    }
}
