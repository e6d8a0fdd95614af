//! Chart that draws medians with their spread, in rows on one axis.

use super::escape;
use super::svg::{LETTER, RIGHT, Tone, WIDTH, begin, rule, short, ticks};
use std::fmt::Write;

/// Median with its extremes, which is drawn as one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Range {
    /// Label left of the row. The part before a `/` separates groups.
    pub name: String,
    /// Colour of the row.
    pub tone: Tone,
    /// Median value.
    pub middle: f64,
    /// Smallest and largest value.
    pub ends: (f64, f64),
}

/// Rows on an axis that begins at zero or is logarithmic.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ranges {
    /// Title above the chart.
    pub title: String,
    /// Label below the x axis, with its unit.
    pub x_label: String,
    /// True for a logarithmic axis, which omits values that are not positive.
    pub log: bool,
    /// Rows, from top to bottom.
    pub rows: Vec<Range>,
}

const TOP: f64 = 40.0;
const ROW: f64 = 22.0;
const BOTTOM: f64 = 50.0;
/// Width right of the axis, for the median as a figure.
const FIGURE: f64 = 70.0;
/// Maximum length of a name, in letters.
const LONGEST: usize = 44;

impl Ranges {
    fn shown(&self) -> impl Iterator<Item = &Range> {
        let fits = |value: f64| value.is_finite() && (!self.log || value > 0.0);
        self.rows.iter().filter(move |row| fits(row.middle) && fits(row.ends.0) && fits(row.ends.1))
    }

    /// Returns the start and the end of the axis as drawn. On a logarithmic axis these are
    /// logarithms.
    fn span(&self) -> (f64, f64) {
        let high = self.shown().map(|row| row.ends.1.max(row.middle)).fold(f64::NEG_INFINITY, f64::max);
        let low = self.shown().map(|row| row.ends.0.min(row.middle)).fold(f64::INFINITY, f64::min);
        if self.log && low.is_finite() {
            return (low.log10().floor(), high.log10().ceil().max(low.log10().floor() + 1.0));
        }
        let (low, high) = (low.min(0.0), high.max(0.0));
        if low.is_finite() && high > low { (low, high * 1.04) } else { (0.0, 1.0) }
    }

    /// Returns the chart as an SVG element.
    pub fn render(&self) -> String {
        let letters = self.shown().map(|row| row.name.chars().count().min(LONGEST)).max().unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "at most LONGEST letters")]
        let left = (letters as f64 * LETTER + 24.0).max(80.0);
        let rows: f64 = self.shown().map(|_| ROW).sum();
        let bottom = TOP + rows;
        let mut svg = begin(&self.title, bottom + BOTTOM, 12.0);
        let (low, high) = self.span();
        let place = |value: f64| left + (value - low) / (high - low) * (WIDTH - left - RIGHT - FIGURE);
        let x = |value: f64| place(if self.log { value.log10() } else { value });
        let marks = if self.log { ticks(low, high, (high - low).min(8.0)) } else { ticks(low, high, 6.0) };
        for tick in marks {
            let value = if self.log { 10f64.powf(tick) } else { tick };
            rule(&mut svg, place(tick), (TOP, bottom), &short(value));
        }
        let mut y = TOP + ROW / 2.0;
        let (mut group, first) = (None, self.shown().next());
        for row in self.shown() {
            let own = row.name.split_once('/').map(|(group, _)| group);
            if first.is_some_and(|first| first != row) && group != own {
                let line = y - ROW / 2.0;
                let _ =
                    write!(svg, "<line class=\"rule\" x1=\"0\" y1=\"{line}\" x2=\"{WIDTH}\" y2=\"{line}\"/>");
            }
            group = own;
            draw(&mut svg, row, y, (left, [x(row.ends.0), x(row.middle), x(row.ends.1)]));
            y += ROW;
        }
        let middle = f64::midpoint(left, WIDTH - RIGHT - FIGURE);
        let label = escape(&self.x_label);
        let _ = write!(
            svg,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text></svg>",
            bottom + 39.0
        );
        svg
    }
}

fn draw(svg: &mut String, row: &Range, y: f64, (left, [low, middle, high]): (f64, [f64; 3])) {
    let mut name: String = row.name.chars().take(LONGEST).collect();
    if name.len() < row.name.len() {
        name.pop();
        name.push('…');
    }
    let (name, class, width) = (escape(&name), row.tone.class(), (high - low).max(1.0));
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>\
         <path class=\"{class}\" fill-opacity=\".45\" d=\"M{low:.1} {:.1}h{width:.1}v6h-{width:.1}z\"/>\
         <path class=\"{class}\" d=\"M{:.1} {y}l5 -6 5 6 -5 6z\"><title>{name}: {} ({} to {})</title></path>\
         <text class=\"figure\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        left - 12.0,
        y + 4.5,
        y - 3.0,
        middle - 5.0,
        written(row.middle),
        written(row.ends.0),
        written(row.ends.1),
        WIDTH - 10.0,
        y + 4.5,
        written(row.middle)
    );
}

/// Returns `value` with a useful number of digits.
fn written(value: f64) -> String {
    match value.abs() {
        size if (1000.0..1e6).contains(&size) => format!("{value:.0}"),
        size if (10.0..1000.0).contains(&size) => format!("{value:.1}"),
        _ => short(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, middle: f64, ends: (f64, f64)) -> Range {
        Range { name: name.into(), tone: Tone::Blue, middle, ends }
    }

    #[test]
    fn each_row_has_its_median_and_its_spread() {
        for log in [false, true] {
            let ranges = Ranges {
                title: "<t>".into(),
                log,
                rows: vec![
                    row("a/1", 10.0, (9.0, 12.0)),
                    row("b/1", 500.0, (500.0, 500.0)),
                    row("c", 0.0, (0.0, f64::NAN)),
                ],
                ..Ranges::default()
            };
            let svg = ranges.render();
            assert!(
                svg.contains("&lt;t&gt;") && svg.contains("<title>a/1: 10.0 (9 to 12.0)</title>"),
                "{svg}"
            );
            assert_eq!(svg.matches("<title>").count(), 2);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert!(!Ranges::default().render().contains("NaN"));
    }

    #[test]
    fn logarithmic_axis_covers_whole_decades() {
        let ranges = Ranges { log: true, rows: vec![row("a", 20.0, (15.0, 3000.0))], ..Ranges::default() };
        assert_eq!(ranges.span(), (1.0, 4.0));
        let same = Ranges { log: true, rows: vec![row("a", 10.0, (10.0, 10.0))], ..Ranges::default() };
        assert_eq!(same.span(), (1.0, 2.0));
    }
}
