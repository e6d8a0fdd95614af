//! Chart that draws time spans as bars in rows, on one axis.

use super::escape;
use super::svg::{LEFT, LETTER, RIGHT, Tone, WIDTH, begin, rule, short, ticks};
use std::fmt::Write;

/// Time span, which is drawn as a bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Start and end on the x axis.
    pub range: (f64, f64),
    /// Colour of the bar.
    pub tone: Tone,
    /// Text in the bar, if it fits.
    pub name: String,
    /// Text that is shown when the pointer is on the bar.
    pub detail: String,
}

/// Content of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Lane {
    /// Label left of the row.
    pub name: String,
    /// Bars of the row.
    pub spans: Vec<Span>,
}

/// Rows on one axis.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Lanes {
    /// Title above the chart.
    pub title: String,
    /// Label below the x axis, with its unit.
    pub x_label: String,
    /// Start and end of the axis.
    pub range: (f64, f64),
    /// Rows, from top to bottom.
    pub lanes: Vec<Lane>,
}

const TOP: f64 = 40.0;
const ROW: f64 = 34.0;
const BAR: f64 = 22.0;
/// Height below the rows, for the axis and its label.
const BOTTOM: f64 = 52.0;
/// Minimum width of a bar that is still visible.
const NARROWEST: f64 = 2.0;

impl Lanes {
    fn x(&self, value: f64) -> f64 {
        let (low, high) = self.range;
        let share = if high > low { (value - low) / (high - low) } else { 0.0 };
        LEFT + share.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    /// Returns the chart as an SVG element.
    pub fn render(&self) -> String {
        let rows: f64 = self.lanes.iter().map(|_| ROW).sum();
        let bottom = TOP + rows;
        let mut svg = begin(&self.title, bottom + BOTTOM, LEFT);
        for tick in ticks(self.range.0, self.range.1, 8.0) {
            rule(&mut svg, self.x(tick), (TOP, bottom), &short(tick));
        }
        let mut y = TOP;
        for lane in &self.lanes {
            self.lane(&mut svg, lane, y + (ROW - BAR) / 2.0);
            y += ROW;
        }
        let (middle, y) = (f64::midpoint(LEFT, WIDTH - RIGHT), bottom + 40.0);
        let _ = write!(
            svg,
            "<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\">{}</text></svg>",
            escape(&self.x_label)
        );
        svg
    }

    fn lane(&self, svg: &mut String, lane: &Lane, y: f64) {
        let text = y + BAR / 2.0 + 4.5;
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            escape(&lane.name)
        );
        for span in &lane.spans {
            let (from, to) = (self.x(span.range.0), self.x(span.range.1));
            let width = (to - from).max(NARROWEST);
            let from = from.min(WIDTH - RIGHT - width);
            let detail = escape(&span.detail);
            let _ = write!(
                svg,
                "<path class=\"{}\" d=\"M{from:.1} {y}h{width:.1}v{BAR}h-{width:.1}z\"><title>{detail}</title></path>",
                span.tone.class()
            );
            #[expect(clippy::cast_precision_loss, reason = "the length of a name")]
            let letters = span.name.chars().count() as f64 * LETTER;
            if !span.name.is_empty() && letters + 6.0 < width {
                let _ = write!(
                    svg,
                    "<text class=\"on\" x=\"{:.1}\" y=\"{text}\" text-anchor=\"middle\">{}</text>",
                    from + width / 2.0,
                    escape(&span.name)
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_lie_within_the_axis_and_names_appear_only_if_they_fit() {
        let span = |from, to, name: &str| Span {
            range: (from, to),
            tone: Tone::Blue,
            name: name.into(),
            detail: format!("<{name}>"),
        };
        let lanes = Lanes {
            title: "a & b".into(),
            range: (0.0, 100.0),
            lanes: vec![Lane {
                name: "x".into(),
                spans: vec![span(0.0, 90.0, "long"), span(99.999, 200.0, "short")],
            }],
            ..Lanes::default()
        };
        let svg = lanes.render();
        assert!(svg.contains("a &amp; b") && svg.contains("<title>&lt;short&gt;</title>"), "{svg}");
        assert!(svg.contains(">long</text>") && !svg.contains(">short</text>"), "{svg}");
        assert!(svg.contains(&format!("M{:.1} ", WIDTH - RIGHT - NARROWEST)), "{svg}");
        assert!(!Lanes::default().render().contains("NaN"));
    }
}
