//! Line charts as SVG, which are legible as separate files and in a page, on a light and on a dark
//! background.

use super::escape;
use std::fmt::Write;

/// Colours that most readers can distinguish on a light and on a dark background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Grey, for the reference of a comparison.
    Grey,
    /// Red-orange.
    Vermilion,
    /// Yellow-orange.
    Amber,
    /// Green.
    Green,
    /// Blue-green, dashed.
    Cyan,
    /// Blue, for the most important line, which is wider than the others.
    Blue,
    /// Purple, dashed.
    Purple,
    /// Brown, dashed.
    Brown,
}

impl Tone {
    pub(crate) fn class(self) -> &'static str {
        match self {
            Tone::Grey => "grey",
            Tone::Vermilion => "vermilion",
            Tone::Amber => "amber",
            Tone::Green => "green",
            Tone::Blue => "blue",
            Tone::Purple => "purple",
            Tone::Brown => "brown",
            Tone::Cyan => "cyan",
        }
    }
}

/// One line of a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Name of the line in the legend.
    pub name: String,
    /// Colour of the line.
    pub tone: Tone,
    /// Points of the line, ascending in x.
    pub points: Vec<(f64, f64)>,
    /// Position on the x axis at which the measured operation of the line ends, marked at the upper
    /// edge.
    pub end: Option<f64>,
}

impl Line {
    /// Draws a dot with a tooltip at each point.
    fn dots(&self, svg: &mut String, scale: &Scale) {
        for (x, y) in self.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite()) {
            let _ = write!(
                svg,
                "<path class=\"{}\" d=\"M{:.1} {:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0\"><title>{}: {}</title></path>",
                self.tone.class(),
                scale.x(*x) - 4.0,
                scale.y(*y),
                escape(&self.name),
                short(*y)
            );
        }
    }
}

/// Chart with a title, two axes, a legend and lines.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chart {
    /// Title above the chart.
    pub title: String,
    /// Label below the x axis, with its unit.
    pub x_label: String,
    /// Label beside the y axis, with its unit.
    pub y_label: String,
    /// True for a logarithmic y axis. Values below the smallest decade are drawn on the lower edge.
    pub log_y: bool,
    /// Start and end of the x axis and of the y axis. With `None`, an axis has the extent of the
    /// lines.
    pub ranges: [Option<(f64, f64)>; 2],
    /// Labelled positions on the x axis. If empty, round values are labelled.
    pub x_marks: Vec<(f64, String)>,
    /// Position on the x axis at which an event begins for all lines, and the name of the event.
    pub start: Option<(f64, String)>,
    /// Value on the y axis that is marked, and the name of the mark.
    pub level: Option<(f64, String)>,
    /// True if each point of a line has a dot with its value.
    pub dots: bool,
    /// Name of the mark at the end of a line.
    pub end_name: String,
    /// Ranges of the x axis that are shaded, each with its start and its end.
    pub bands: Vec<(f64, f64)>,
    /// Lines of the chart. Later lines are drawn above earlier ones.
    pub lines: Vec<Line>,
}

pub(super) const WIDTH: f64 = 960.0;
pub(super) const HEIGHT: f64 = 380.0;
pub(super) const LEFT: f64 = 78.0;
pub(super) const RIGHT: f64 = 24.0;
pub(super) const TOP: f64 = 52.0;
pub(super) const BOTTOM: f64 = 78.0;
/// Maximum number of decades on a logarithmic axis.
const DECADES: f64 = 5.0;
/// Approximate width of a letter in the legend.
pub(super) const LETTER: f64 = 7.6;

/// Style inside the SVG, so that a separate file also looks right. The class names are unique,
/// because a page may have many charts.
pub(super) const STYLE: &str = "\
.vf{--text:#1f2328;--soft:#59636e;--rule:#d1d9e0;--ground:#fff;--grey:#6b7280;--vermilion:#d1495b;--amber:#c77f00;\
--green:#12875f;--blue:#0b62c4;--purple:#9a4fb0;--brown:#8c5a3c;--cyan:#0f7f96}\
@media screen and (prefers-color-scheme:dark){.vf{--text:#e6edf3;--soft:#9198a1;--rule:#30363d;--ground:#0d1117;--grey:#a0a7b0;\
--vermilion:#ff7b86;--amber:#f2b544;--green:#3fd19a;--blue:#62a8ff;--purple:#d49be6;--brown:#cfa081;--cyan:#4cc3da}}\
.vf text{font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--soft)}\
.vf .on{fill:var(--ground);font-weight:600}.vf .figure{fill:var(--text)}.vf .title{font-size:15px;font-weight:600;fill:var(--text)}\
.vf .rule{stroke:var(--rule);stroke-width:1}.vf .ground{fill:var(--ground)}\
.vf .start{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}\
.vf .level{stroke:var(--ground);stroke-width:5px;stroke-linejoin:round;paint-order:stroke}\
.vf polyline,.vf .key{fill:none;stroke-width:1.5;stroke-linejoin:round}\
.vf .grey{stroke:var(--grey);stroke-dasharray:6 3}.vf .vermilion{stroke:var(--vermilion)}.vf .amber{stroke:var(--amber)}\
.vf .green{stroke:var(--green)}.vf .blue{stroke:var(--blue);stroke-width:2.2!important}\
.vf .purple{stroke:var(--purple);stroke-dasharray:2 2}.vf .brown{stroke:var(--brown);stroke-dasharray:7 2 2 2}.vf .cyan{stroke:var(--cyan);stroke-dasharray:5 3}\
.vf path{stroke:none!important}.vf path.grey{fill:var(--grey)}.vf path.vermilion{fill:var(--vermilion)}\
.vf path.amber{fill:var(--amber)}.vf path.green{fill:var(--green)}.vf path.blue{fill:var(--blue)}\
.vf path.band{fill:var(--soft);fill-opacity:.22}.vf path.purple{fill:var(--purple)}.vf path.brown{fill:var(--brown)}.vf path.cyan{fill:var(--cyan)}";

/// Conversion of values to positions.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
    log: bool,
}

impl Scale {
    fn of(chart: &Chart) -> Self {
        let points = || chart.lines.iter().flat_map(|line| line.points.iter().copied());
        let heights = || points().map(|(_, y)| y).chain(chart.level.as_ref().map(|(level, _)| *level));
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values
                .filter(|value| value.is_finite())
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
        };
        let x = range(&mut points().map(|(x, _)| x));
        let x = if x.0 < x.1 { x } else { (0.0, 1.0) };
        let highest = range(&mut heights()).1.max(f64::MIN_POSITIVE);
        let y = if chart.log_y {
            let high = highest.max(10.0).log10();
            let lowest = range(&mut heights().filter(|y| *y > 0.0)).0;
            let lowest = if lowest.is_finite() { lowest.log10().floor() } else { 0.0 };
            (lowest.clamp(high.ceil() - DECADES, high.floor()), high + 0.1)
        } else {
            let highest = if highest > 1e-12 { highest } else { 1.0 };
            (0.0, highest * 1.06)
        };
        let given = chart.ranges[1].map(|(low, high)| {
            if chart.log_y { (low.max(f64::MIN_POSITIVE).log10(), high.log10()) } else { (low, high) }
        });
        Scale { x: chart.ranges[0].unwrap_or(x), y: given.unwrap_or(y), log: chart.log_y }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let value = if self.log { value.max(f64::MIN_POSITIVE).log10() } else { value };
        let share = ((value - self.y.0) / (self.y.1 - self.y.0)).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    /// Returns the labelled values of the y axis.
    fn y_ticks(&self) -> Vec<f64> {
        if !self.log {
            return ticks(self.y.0, self.y.1, 5.0);
        }
        let mut ticks = Vec::new();
        let mut decade = self.y.0.ceil();
        while decade <= self.y.1 {
            ticks.push(10f64.powf(decade));
            decade += 1.0;
        }
        ticks
    }
}

/// Maximum number of ticks of a readable axis.
const MOST_TICKS: usize = 50;

/// Returns about `count` round values from `low` to `high`.
pub(super) fn ticks(low: f64, high: f64, count: f64) -> Vec<f64> {
    let rough = (high - low) / count;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * decade).into_iter().find(|step| *step >= rough);
    let Some(step) = step.filter(|step| *step > 0.0) else { return Vec::new() };
    let mut ticks = Vec::new();
    let mut tick = (low / step - 1e-9).ceil() * step;
    // If the range is tiny compared with its ends, adding a step does not change the value.
    while tick <= high + step * 1e-9 && ticks.len() < MOST_TICKS {
        // Avoids values like 0.30000000000000004 and -0.
        ticks.push((tick / step).round() * step + 0.0);
        tick += step;
    }
    ticks
}

/// Returns `value` as a short text, such as `250k`, `1.5M` or `0.2`.
pub fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{scaled:.2}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Returns the beginning of an SVG element, with its title.
pub(super) fn begin(title: &str, height: f64, left: f64) -> String {
    let title = escape(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"vf\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"{title}\"><style>{STYLE}</style><rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\
         <text class=\"title\" x=\"{left}\" y=\"22\">{title}</text>",
    )
}

impl Chart {
    /// Returns the chart as an SVG element.
    pub fn render(&self) -> String {
        let scale = Scale::of(self);
        let mut svg = begin(&self.title, HEIGHT, LEFT);
        for (from, to) in &self.bands {
            let (from, to) = (scale.x(*from), scale.x(*to));
            let _ = write!(
                svg,
                "<path class=\"band\" d=\"M{from:.1} {TOP}h{:.1}v{:.1}h-{:.1}z\"/>",
                (to - from).max(1.5),
                HEIGHT - TOP - BOTTOM,
                (to - from).max(1.5)
            );
        }
        self.axes(&mut svg, &scale);
        for line in &self.lines {
            svg.push_str(&format!("<polyline class=\"{}\" points=\"", line.tone.class()));
            for (x, y) in line.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite()) {
                let _ = write!(svg, "{:.1},{:.1} ", scale.x(*x), scale.y(*y));
            }
            svg.push_str("\"/>");
            if self.dots {
                line.dots(&mut svg, &scale);
            }
            if let Some(end) = line.end {
                let (x, y) = (scale.x(end), TOP - 1.0);
                let _ = write!(svg, "<path class=\"{}\" d=\"M{x:.1} {y}l-5 -9h10z\"/>", line.tone.class());
            }
        }
        self.level(&mut svg, &scale);
        self.legend(&mut svg);
        svg.push_str("</svg>");
        svg
    }

    /// Draws the marked level, above the lines, so that they do not cross its name.
    fn level(&self, svg: &mut String, scale: &Scale) {
        let Some((at, what)) = &self.level else { return };
        let (right, y) = (WIDTH - RIGHT, scale.y(*at));
        let _ = write!(
            svg,
            "<line class=\"start\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
             <text class=\"level\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            right - 12.0,
            y - 6.0,
            escape(what)
        );
    }

    fn axes(&self, svg: &mut String, scale: &Scale) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in scale.y_ticks() {
            let y = scale.y(tick);
            y_tick(svg, y, &short(tick));
        }
        let _ = write!(
            svg,
            "<line class=\"rule\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>"
        );
        if self.x_marks.is_empty() {
            for tick in ticks(scale.x.0, scale.x.1, 10.0) {
                x_tick(svg, scale.x(tick), &short(tick));
            }
        }
        for (at, name) in &self.x_marks {
            x_tick(svg, scale.x(*at), &escape(name));
        }
        axis_labels(svg, &self.x_label, &self.y_label);
        if let Some((at, what)) = &self.start {
            let x = scale.x(*at);
            mark_at(svg, x, what);
        }
    }

    fn legend(&self, svg: &mut String) {
        let y = HEIGHT - 14.0;
        let mut x = LEFT;
        for line in &self.lines {
            let _ = write!(
                svg,
                "<line class=\"key {}\" x1=\"{x:.1}\" y1=\"{y}\" x2=\"{:.1}\" y2=\"{y}\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{}</text>",
                line.tone.class(),
                x + 22.0,
                x + 28.0,
                y + 4.0,
                escape(&line.name)
            );
            #[expect(clippy::cast_precision_loss, reason = "the length of a name")]
            let letters = line.name.chars().count() as f64;
            x += 46.0 + letters * LETTER;
        }
        if !self.end_name.is_empty() && self.lines.iter().any(|line| line.end.is_some()) {
            let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{}\">▼ {}</text>", y + 4.0, escape(&self.end_name));
        }
    }
}

/// Draws a line across the chart with its value on the left.
pub(super) fn y_tick(svg: &mut String, y: f64, text: &str) {
    let right = WIDTH - RIGHT;
    let _ = write!(
        svg,
        "<line class=\"rule\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        LEFT - 8.0,
        y + 4.0,
        text
    );
}

/// Draws a short line below the chart with its value.
pub(super) fn x_tick(svg: &mut String, x: f64, text: &str) {
    rule(svg, x, (HEIGHT - BOTTOM, HEIGHT - BOTTOM), text);
}

/// Draws a vertical rule from `top` to below `bottom`, with its value.
pub(super) fn rule(svg: &mut String, x: f64, (top, bottom): (f64, f64), text: &str) {
    let _ = write!(
        svg,
        "<line class=\"rule\" x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
         <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        bottom + 5.0,
        bottom + 19.0,
        text
    );
}

/// Draws the labels of the axes.
pub(super) fn axis_labels(svg: &mut String, x: &str, y: &str) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        f64::midpoint(LEFT, right),
        bottom + 38.0,
        escape(x),
        f64::midpoint(TOP, bottom),
        escape(y)
    );
}

/// Draws a vertical line with a label above it.
pub(super) fn mark_at(svg: &mut String, x: f64, what: &str) {
    let bottom = HEIGHT - BOTTOM;
    let _ = write!(
        svg,
        "<line class=\"start\" x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
         <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        TOP - 5.0,
        escape(what)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(log_y: bool) -> Chart {
        let line = |name: &str, tone, points: &[(f64, f64)]| Line {
            name: name.into(),
            tone,
            points: points.to_vec(),
            end: Some(2.0),
        };
        Chart {
            title: "a < b".into(),
            x_label: "s".into(),
            y_label: "writes/s".into(),
            log_y,
            ranges: [None; 2],
            x_marks: Vec::new(),
            start: Some((0.0, "start".into())),
            level: Some((2e6, "a goal > 1".into())),
            dots: true,
            end_name: "end".into(),
            bands: vec![(0.5, 1.0)],
            lines: vec![
                line("one & two", Tone::Grey, &[(-1.0, 1000.0), (0.0, 0.0), (3.0, 500.0)]),
                line("nan", Tone::Blue, &[(-1.0, f64::NAN), (3.0, 1e6)]),
            ],
        }
    }

    #[test]
    fn names_are_escaped_and_values_that_are_not_numbers_are_omitted() {
        let svg = chart(false).render();
        assert!(svg.contains("a &lt; b") && svg.contains("one &amp; two"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 2);
    }

    #[test]
    fn every_point_lies_within_the_axes() {
        for log_y in [false, true] {
            let chart = chart(log_y);
            let scale = Scale::of(&chart);
            for (x, y) in chart.lines.iter().flat_map(|line| &line.points).filter(|(_, y)| y.is_finite()) {
                let place = (scale.x(*x), scale.y(*y));
                assert!((LEFT..=WIDTH - RIGHT).contains(&place.0), "{place:?}");
                assert!((TOP..=HEIGHT - BOTTOM).contains(&place.1), "{place:?}");
            }
            // Larger values are higher, and zero lies on the lower edge.
            assert!(scale.y(1e6) < scale.y(1e5));
            assert!((scale.y(0.0) - (HEIGHT - BOTTOM)).abs() < 1e-9);
        }
    }

    #[test]
    fn level_lies_within_the_axes_and_each_point_has_a_dot() {
        for log_y in [false, true] {
            let (scale, svg) = (Scale::of(&chart(log_y)), chart(log_y).render());
            let y = scale.y(2e6);
            assert!(y > TOP && y < scale.y(1e6), "{y}");
            assert!(
                svg.contains(&format!("y1=\"{y:.1}\"")) && svg.contains(">a goal &gt; 1</text>"),
                "{svg}"
            );
            // The value that is not a number has none.
            assert_eq!(svg.matches("a4 4 0 1 0 8").count(), 4, "{svg}");
            assert!(svg.contains("<title>one &amp; two: 1000</title>"), "{svg}");
            assert!(!Chart { level: None, dots: false, ..chart(log_y) }.render().contains("a4 4"));
        }
    }

    #[test]
    fn chart_without_lines_is_valid_svg() {
        let svg = Chart::default().render();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn marks_replace_the_round_values_of_the_x_axis() {
        let marked = Chart { x_marks: vec![(2.0, "4 < 8".into())], ..chart(false) }.render();
        assert!(marked.contains(">4 &lt; 8</text>") && !marked.contains(">0.5</text>"), "{marked}");
        assert!(chart(false).render().contains(">0.5</text>"));
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(-1.2, 4.0, 5.0), [0.0, 2.0, 4.0]);
        assert_eq!(ticks(0.0, 0.5, 5.0).len(), 6);
        let scale = Scale { x: (0.0, 1.0), y: (2.0, 4.3), log: true };
        assert_eq!(scale.y_ticks(), [100.0, 1000.0, 10_000.0]);
    }

    #[test]
    fn values_are_short() {
        assert_eq!(
            [0.0, 0.2, 950.0, 1500.0, 250_000.0, 1_500_000.0, 2e9].map(short),
            ["0", "0.2", "950", "1500", "250k", "1.5M", "2G"]
        );
    }
}
