//! Histograms of several groups as grouped bars.

use std::fmt::Write;

use super::escape;
use super::svg::{
    BOTTOM, HEIGHT, LEFT, LETTER, RIGHT, TOP, Tone, WIDTH, axis_labels, begin, mark_at, short, ticks, x_tick,
    y_tick,
};

/// Group of bars with one colour, which has one bar for each interval.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Name of the group in the legend.
    pub name: String,
    /// Colour of the bars.
    pub tone: Tone,
    /// Values of the bars, one for each interval.
    pub values: Vec<f64>,
}

/// Grouped bars over intervals that have equal width in the drawing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bars {
    /// Title above the chart.
    pub title: String,
    /// Label below the x axis, with its unit.
    pub x_label: String,
    /// Label beside the y axis, with its unit.
    pub y_label: String,
    /// Start of each interval, and the end of the last interval. The values must be ascending
    /// powers of the same number.
    pub bounds: Vec<f64>,
    /// Value on the x axis that is marked, and the label of the mark.
    pub mark: Option<(f64, String)>,
    /// Groups of bars.
    pub groups: Vec<Group>,
}

/// Share of the width of an interval that stays free.
const GAP: f64 = 0.16;

impl Bars {
    fn width(&self) -> f64 {
        (WIDTH - LEFT - RIGHT) / count(self.bounds.len().saturating_sub(1).max(1))
    }

    fn highest(&self) -> f64 {
        let values = self.groups.iter().flat_map(|group| group.values.iter().copied());
        let highest = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        if highest > 0.0 { highest * 1.06 } else { 1.0 }
    }

    /// Returns the position of a value on the logarithmic x axis, or `None` if it is outside.
    fn x(&self, value: f64) -> Option<f64> {
        let (low, high) = (*self.bounds.first()?, *self.bounds.last()?);
        let share = (value / low).ln() / (high / low).ln();
        (0.0..=1.0).contains(&share).then_some(LEFT + share * (WIDTH - LEFT - RIGHT))
    }

    /// Returns the chart as an SVG element.
    pub fn render(&self) -> String {
        let mut svg = begin(&self.title, HEIGHT, LEFT);
        self.axes(&mut svg);
        self.draw(&mut svg);
        self.legend(&mut svg);
        svg.push_str("</svg>");
        svg
    }

    fn draw(&self, svg: &mut String) {
        let (highest, width) = (self.highest(), self.width());
        let bar = width * (1.0 - GAP) / count(self.groups.len().max(1));
        for (side, group) in self.groups.iter().enumerate() {
            for (interval, value) in group.values.iter().enumerate().filter(|(_, value)| **value > 0.0) {
                let x = LEFT + width * (count(interval) + GAP / 2.0) + bar * count(side);
                let height = (value / highest * (HEIGHT - TOP - BOTTOM)).max(0.5);
                let y = HEIGHT - BOTTOM - height;
                let _ = write!(
                    svg,
                    "<path class=\"{}\" d=\"M{x:.1} {y:.1}h{:.1}v{height:.1}h-{:.1}z\"><title>{}: {value:.1}</title></path>",
                    group.tone.class(),
                    bar * 0.92,
                    bar * 0.92,
                    escape(&group.name)
                );
            }
        }
    }

    fn axes(&self, svg: &mut String) {
        let bottom = HEIGHT - BOTTOM;
        let highest = self.highest();
        for tick in ticks(0.0, highest, 5.0) {
            let y = bottom - tick / highest * (bottom - TOP);
            y_tick(svg, y, &short(tick));
        }
        for (index, bound) in self.bounds.iter().enumerate() {
            let x = LEFT + self.width() * count(index);
            x_tick(svg, x, &power(*bound));
        }
        axis_labels(svg, &self.x_label, &self.y_label);
        if let Some((x, what)) = self.mark.as_ref().and_then(|(at, what)| Some((self.x(*at)?, what))) {
            mark_at(svg, x, what);
        }
    }

    fn legend(&self, svg: &mut String) {
        let y = HEIGHT - 14.0;
        let mut x = LEFT;
        for group in &self.groups {
            let _ = write!(
                svg,
                "<path class=\"{}\" d=\"M{x:.1} {:.1}h14v10h-14z\"/><text x=\"{:.1}\" y=\"{}\">{}</text>",
                group.tone.class(),
                y - 5.0,
                x + 20.0,
                y + 4.0,
                escape(&group.name)
            );
            x += 38.0 + count(group.name.chars().count()) * LETTER;
        }
    }
}

/// Returns a bound in few letters: 16384 would overlap its neighbour.
fn power(bound: f64) -> String {
    match bound {
        large if large >= 1e6 => format!("{:.0}M", large / 1e6),
        large if large >= 1e4 => format!("{:.0}k", large / 1e3),
        bound => bound.round().to_string(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a number of drawn items")]
fn count(number: usize) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_a_bar_for_each_positive_value() {
        let group =
            |name: &str, tone, values: &[f64]| Group { name: name.into(), tone, values: values.into() };
        let bars = Bars {
            title: "a < b".into(),
            bounds: vec![32.0, 64.0, 128.0],
            mark: Some((64.0, "floor".into())),
            groups: vec![group("x & y", Tone::Blue, &[75.0, 25.0]), group("z", Tone::Grey, &[0.0, f64::NAN])],
            ..Bars::default()
        };
        let svg = bars.render();
        // Two bars and a legend key of the first group, a legend key of the second.
        assert_eq!(
            (svg.matches("path class=\"blue\"").count(), svg.matches("path class=\"grey\"").count()),
            (3, 1)
        );
        assert!(svg.contains("a &lt; b") && svg.contains("x &amp; y") && !svg.contains("NaN"), "{svg}");
        assert_eq!(bars.x(64.0), Some(f64::midpoint(LEFT, WIDTH - RIGHT)));
        assert_eq!(bars.x(10.0), None);
    }

    #[test]
    fn chart_without_bars_is_valid_svg() {
        let svg = Bars::default().render();
        assert!(svg.ends_with("</svg>") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
