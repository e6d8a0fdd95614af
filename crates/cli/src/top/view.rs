//! Drawing of the screen. The functions depend only on their arguments.

use super::Screen;
use super::guest::{Guest, Line};
use crate::codecs;
use crate::output::bytes;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line as Text, Span};
use ratatui::widgets::{
    Axis, Bar, BarChart, BarGroup, Block, Chart, Clear, Dataset, Gauge, GraphType, LegendPosition, Paragraph,
    Row, Table, Wrap,
};
use std::time::Instant;

/// Statistics of the guest that are in bytes. The others are counts.
const BYTES: [&str; 6] = ["swap_in", "swap_out", "free", "total", "available", "caches"];
/// Fewest columns and rows for charts.
const LEAST: (u16, u16) = (40, 12);
/// Most lines about encoded pages.
const ENCODING_LINES: usize = 3;
/// Narrowest and widest bar of the histogram.
const BAR: (u16, u16) = (4, 8);

/// Draws the screen.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen, now: Instant) {
    let area = frame.area();
    let list =
        u16::try_from(screen.guests.len()).unwrap_or(u16::MAX).saturating_add(1).min(area.height / 3 + 1);
    let [title, guests, detail, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(list),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new("vmferry top").style(bold), title);
    frame.render_widget(table(screen, now, guests), guests);
    if let Some(guest) = screen.guests.get(screen.chosen) {
        one(frame, guest, now, detail);
    }
    frame.render_widget(Paragraph::new("q quit  ↑↓ choose  d measure dirty rate  ? help"), keys);
    if screen.help {
        help(frame, area);
    }
}

fn rate(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{}/s", size(value)))
}

fn size(value: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
    bytes(value.clamp(0.0, 1e18) as u64)
}

/// Formats a number as `123`, `12.3k` or `4.5M`.
fn short(value: f64) -> String {
    match value {
        large if large >= 1e9 => format!("{:.1}G", large / 1e9),
        large if large >= 1e6 => format!("{:.1}M", large / 1e6),
        large if large >= 1e4 => format!("{:.1}k", large / 1e3),
        value => format!("{value:.0}"),
    }
}

/// Columns of the table: title and width. The first two columns take the remaining width.
const COLUMNS: [(&str, u16); 7] = [
    ("guest", 9),
    ("migration", 9),
    ("writes", 9),
    ("left", 10),
    ("dirties", 12),
    ("place", 8),
    ("memory", 10),
];

fn table<'a>(screen: &'a Screen, now: Instant, area: Rect) -> Table<'a> {
    let shown = usize::from(area.height.saturating_sub(1)).max(1);
    // The chosen guest is always visible.
    let first = (screen.chosen + 1).saturating_sub(shown);
    // A narrow terminal does not show the last columns.
    let mut room = area.width;
    let fits = COLUMNS.iter().take_while(|(_, width)| {
        let fits = room >= *width;
        room = room.saturating_sub(width + 1);
        fits
    });
    let columns = fits.count().max(2);
    let row = |(index, guest): (usize, &'a Guest)| {
        let chosen = index == screen.chosen;
        let style = if chosen { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        let mut cells = vec![guest.name.clone()];
        match guest.trouble(now) {
            Some(why) => cells.push(why),
            None => cells.extend([
                guest.state().to_owned(),
                guest.writes().map_or("-".into(), |writes| format!("{}/s", short(writes))),
                guest.left().map_or("-".into(), size),
                rate(guest.dirty()),
                guest.text(&["vm", "place"]).to_owned(),
                guest.memory().map_or("-".into(), |(actual, _)| size(actual)),
            ]),
        }
        cells.truncate(columns);
        Row::new(cells).style(style)
    };
    let rows = screen.guests.iter().enumerate().skip(first).take(shown).map(row);
    let widths = COLUMNS.iter().take(columns).enumerate().map(|(index, (_, width))| match index {
        0 | 1 => Constraint::Fill(1),
        _ => Constraint::Length(*width),
    });
    let head = Row::new(COLUMNS.iter().take(columns).map(|(title, _)| *title));
    Table::new(rows, widths).header(head.style(Style::new().fg(Color::DarkGray)))
}

/// Draws the chosen guest.
fn one(frame: &mut Frame<'_>, guest: &Guest, now: Instant, area: Rect) {
    let encoded = encodings(guest, area.width);
    let height = u16::try_from(encoded.len()).unwrap_or(0);
    let [progress, codecs, rest] =
        Layout::vertical([Constraint::Length(4), Constraint::Length(height), Constraint::Min(0)]).areas(area);
    migration(frame, guest, now, progress);
    frame.render_widget(Paragraph::new(encoded.join("\n")), codecs);
    if rest.width < LEAST.0 || rest.height < LEAST.1 {
        let short = Paragraph::new("(too small for charts)").style(Style::new().fg(Color::DarkGray));
        frame.render_widget(short, rest);
        return;
    }
    let [charts, bottom] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(rest);
    let halves = |area| Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas::<2>(area);
    let [left, right] = halves(charts);
    rates(frame, guest, now, left);
    writes(frame, guest, now, right);
    let [left, right] = halves(bottom);
    let count = u16::try_from(guest.rings().len()).unwrap_or(u16::MAX);
    if count > 0 {
        let [top, rest] =
            Layout::vertical([Constraint::Max(count.saturating_add(2)), Constraint::Min(0)]).areas(left);
        rings(frame, guest, top);
        memory(frame, guest, rest);
    } else {
        memory(frame, guest, left);
    }
    if guest.faults().is_empty() { curve(frame, guest, right) } else { faults(frame, guest, right) }
}

fn migration(frame: &mut Frame<'_>, guest: &Guest, now: Instant, area: Rect) {
    let [bar, first, second] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Length(2)]).areas(area);
    let number = |name: &str| guest.number(&["progress", name]);
    let (done, all) = (number("pass_done").unwrap_or(0.0), number("pass_pages").unwrap_or(0.0));
    let share = if all > 0.0 { (done / all).clamp(0.0, 1.0) } else { 0.0 };
    let label = match guest.state() {
        "precopy" => format!("pass {:.0}: {:.0} %", number("pass").unwrap_or(0.0), share * 100.0),
        "-" => "no migration".into(),
        state => state.to_owned(),
    };
    let colour = match guest.at(&["progress", "verdict", "converging"]).as_bool() {
        Some(false) => Color::Red,
        Some(true) => Color::Green,
        None => Color::Blue,
    };
    frame.render_widget(Gauge::default().ratio(share).label(label).gauge_style(Style::new().fg(colour)), bar);
    frame.render_widget(Paragraph::new(summary(guest)), first);
    // Errors get two lines, because they end with advice.
    frame.render_widget(Paragraph::new(remark(guest, now)).wrap(Wrap { trim: true }), second);
}

fn summary(guest: &Guest) -> String {
    let ended = !guest.at(&["outcome"]).is_null();
    let ms = |path: &[&str]| guest.number(path).map(|ms| format!("{ms:.1} ms"));
    let parts: Vec<Option<String>> = if ended {
        vec![
            ms(&["total_ms"]).map(|ms| format!("took {ms}")),
            ms(&["downtime_ms"]).map(|ms| format!("downtime {ms}")),
            guest.number(&["bytes", "wire"]).map(|wire| format!("sent {}", size(wire))),
        ]
    } else {
        vec![
            guest.left().map(|left| format!("{} left", size(left))),
            guest.dirty().map(|dirty| format!("dirties {}/s", size(dirty))),
            guest
                .sent()
                .filter(|_| !guest.at(&["progress"]).is_null())
                .map(|sent| format!("sends {}/s", size(sent))),
            guest.number(&["progress", "verdict", "eta_s"]).map(|eta| format!("ETA {eta:.1} s")),
        ]
    };
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Returns the lines with the bytes before and after the encoding of pages, and with the pages that
/// the target knew, at most [`ENCODING_LINES`]. There are none without such pages.
fn encodings(guest: &Guest, columns: u16) -> Vec<String> {
    let encoding = |of: codecs::EncodedPages<'_>| {
        let cpu = match of.cpu_ms {
            ms if ms < 1e3 => format!("{ms:.0} ms"),
            ms => format!("{:.1} s", ms / 1e3),
        };
        match of.percent() {
            Some(_) => format!("{} {} → {}, CPU {cpu}", of.name, bytes(of.raw_bytes), bytes(of.bytes)),
            None => format!("{} in vain, CPU {cpu}", of.name),
        }
    };
    let mut parts: Vec<String> = codecs::used(guest.at(&["codecs"])).map(encoding).collect();
    let known = |name: &str| guest.number(&["known_pages", name]);
    if let (Some(found), Some(hashes)) = (known("known"), known("hashes")) {
        parts.push(format!("target knew {} of {} pages", short(found), short(hashes)));
    }
    let cache = |name: &str| guest.number(&["delta_cache", name]);
    if let (Some(hits), Some(misses), Some(memory)) = (cache("hits"), cache("misses"), cache("memory_bytes"))
    {
        parts.push(format!("cache {}: {} hits, {} misses", size(memory), short(hits), short(misses)));
    }
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 2 + part.chars().count() <= columns.into() => {
                line.push_str("; ");
                line.push_str(&part);
            }
            _ => lines.push(part),
        }
    }
    lines.truncate(ENCODING_LINES);
    lines
}

fn remark(guest: &Guest, now: Instant) -> Text<'_> {
    let red = Style::new().fg(Color::Red);
    if let Some(why) = guest.trouble(now) {
        return Span::styled(why, red).into();
    }
    for path in [&["progress", "interrupted"][..], &["error"], &["why"]] {
        if let Some(why) = guest.at(path).as_str() {
            return Span::styled(why, red).into();
        }
    }
    if guest.at(&["vm", "guest", "corrupt"]).as_u64().is_some_and(|corrupt| corrupt > 0) {
        return Span::styled("the guest found corrupt pages", red).into();
    }
    if let Some(why) = guest.at(&["progress", "busy"]).as_str() {
        return Span::styled(format!("the guest's I/O does not quiesce: {why}"), red).into();
    }
    if guest.at(&["progress", "verdict", "converging"]) == false {
        let help = guest.at(&["progress", "verdict", "help"])[0].as_str().unwrap_or("see `vmferry migrate`");
        return Span::styled(format!("does not converge; what would help: {help}"), red).into();
    }
    Text::default()
}

fn boxed(title: &str) -> Block<'_> {
    Block::bordered().title(title).border_style(Style::new().fg(Color::DarkGray))
}

/// Name, colour and points of a line.
type Curve<'a> = (&'a str, Color, Vec<(f64, f64)>);

/// Draws lines over the last minute, with the highest value at the upper edge.
fn lines(frame: &mut Frame<'_>, title: &str, lines: &[Curve<'_>], unit: fn(f64) -> String, area: Rect) {
    let all = || lines.iter().flat_map(|(_, _, points)| points);
    let highest = all().map(|(_, y)| *y).fold(0.0, f64::max).max(1.0);
    let oldest = all().map(|(x, _)| *x).fold(-10.0, f64::min);
    let sets = lines.iter().map(|(name, colour, points)| {
        let set = Dataset::default().name(*name).marker(Marker::Braille).graph_type(GraphType::Line);
        set.style(Style::new().fg(*colour)).data(points)
    });
    let grey = Style::new().fg(Color::DarkGray);
    let x =
        Axis::default().bounds([oldest, 0.0]).labels([format!("{oldest:.0} s"), "now".into()]).style(grey);
    let y = Axis::default().bounds([0.0, highest * 1.05]).labels(["0".into(), unit(highest)]).style(grey);
    let legend = (lines.len() > 1).then_some(LegendPosition::TopLeft);
    let chart = Chart::new(sets.collect()).legend_position(legend);
    frame.render_widget(chart.block(boxed(title)).x_axis(x).y_axis(y), area);
}

fn rates(frame: &mut Frame<'_>, guest: &Guest, now: Instant, area: Rect) {
    let (dirty, sent) = (guest.line(now, Line::Dirty), guest.line(now, Line::Sent));
    lines(
        frame,
        "dirtied and sent per second",
        &[("dirtied", Color::Red, dirty), ("sent", Color::Cyan, sent)],
        size,
        area,
    );
}

fn writes(frame: &mut Frame<'_>, guest: &Guest, now: Instant, area: Rect) {
    lines(
        frame,
        "guest, writes per second",
        &[("writes", Color::Green, guest.line(now, Line::Writes))],
        short,
        area,
    );
}

fn rings(frame: &mut Frame<'_>, guest: &Guest, area: Rect) {
    let title = match guest.reaper_error() {
        None => "dirty rings, full exits".to_owned(),
        Some(error) => format!("dirty rings, full exits; reaper failed: {error}"),
    };
    let block = boxed(&title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    for (row, (cpu, (used, entries, full))) in inner.rows().zip(guest.rings().into_iter().enumerate()) {
        #[expect(clippy::cast_precision_loss, reason = "a bar")]
        let share = (used as f64 / entries as f64).clamp(0.0, 1.0);
        let colour = if share > 0.75 { Color::Red } else { Color::Blue };
        let label = format!("vCPU {cpu}: {used}/{entries}, {full} full");
        frame.render_widget(
            Gauge::default().ratio(share).label(label).gauge_style(Style::new().fg(colour)),
            row,
        );
    }
}

fn memory(frame: &mut Frame<'_>, guest: &Guest, area: Rect) {
    let mut text = Vec::new();
    match guest.memory() {
        Some((actual, all)) => text.push(format!("has {} of {}", size(actual), size(all))),
        None => text.push("no balloon".into()),
    }
    if guest.at(&["vm", "balloon", "driver"]) == false {
        text.push("the guest has no driver for its balloon".into());
    }
    let stats = guest.at(&["vm", "balloon", "stats"]).as_object().into_iter().flatten();
    let stat = |(name, value): (&String, &serde_json::Value)| {
        let value = value.as_f64()?;
        let text = if BYTES.contains(&name.as_str()) { size(value) } else { short(value) };
        Some(format!("{} {text}", name.replace('_', " ")))
    };
    text.extend(stats.filter_map(stat));
    for (name, path) in [("checks", &["vm", "guest", "checks"][..]), ("kind", &["vm", "kind"])] {
        match guest.at(path) {
            serde_json::Value::Null => {}
            serde_json::Value::String(value) => text.push(format!("{name} {value}")),
            value => text.push(format!("{name} {value}")),
        }
    }
    frame.render_widget(Paragraph::new(text.join("\n")).block(boxed("memory")), area);
}

fn faults(frame: &mut Frame<'_>, guest: &Guest, area: Rect) {
    let faults = guest.faults();
    let us = |name: &str| guest.number(&["postcopy", name]).map_or("-".into(), short);
    let title = format!("waits: mean {} us, 99 % {} us", us("mean_us"), us("p99_us"));
    let room = area.width.saturating_sub(2);
    let each = room / u16::try_from(faults.len()).unwrap_or(u16::MAX).max(1);
    let width = each.saturating_sub(1).clamp(BAR.0, BAR.1);
    // If not all bars fit, the longest waits are shown.
    let skip = faults.len().saturating_sub(usize::from(room / (width + 1)).max(1));
    let bars = faults.into_iter().skip(skip).map(|(bound, count)| {
        #[expect(clippy::cast_precision_loss, reason = "a label")]
        let label = match bound as f64 {
            large if large >= 1e6 => format!("<{:.0}M", large / 1e6),
            large if large >= 1e3 => format!("<{:.0}k", large / 1e3),
            bound => format!("<{bound}"),
        };
        Bar::default().value(count).label(label)
    });
    let group = BarGroup::default().bars(&bars.collect::<Vec<_>>());
    let chart = BarChart::default()
        .data(group)
        .bar_width(width)
        .bar_gap(1)
        .bar_style(Style::new().fg(Color::Magenta));
    frame.render_widget(chart.block(boxed(&title)), area);
}

/// Draws the measured dirty rate: pages over the length of the window.
fn curve(frame: &mut Frame<'_>, guest: &Guest, area: Rect) {
    let title = if guest.measuring { "dirty pages by window (measuring)" } else { "dirty pages by window" };
    let points = match &guest.rate {
        Some(Ok(points)) if !points.is_empty() => points,
        Some(Ok(_)) | None => {
            let text = "press d to measure: for a second, each page that the guest writes costs a fault";
            frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }).block(boxed(title)), area);
            return;
        }
        Some(Err(why)) => {
            let text =
                Paragraph::new(why.as_str()).wrap(Wrap { trim: true }).style(Style::new().fg(Color::Red));
            frame.render_widget(text.block(boxed(title)), area);
            return;
        }
    };
    let (longest, most) =
        points.iter().fold((0.1f64, 1.0f64), |(x, y), point| (x.max(point.0), y.max(point.1)));
    let set = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(Color::Yellow));
    let grey = Style::new().fg(Color::DarkGray);
    let x =
        Axis::default().bounds([0.0, longest]).labels(["0".into(), format!("{longest:.1} s")]).style(grey);
    let y = Axis::default().bounds([0.0, most * 1.05]).labels(["0".into(), short(most)]).style(grey);
    frame.render_widget(Chart::new(vec![set.data(points)]).block(boxed(title)).x_axis(x).y_axis(y), area);
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    // The lines are short: the narrowest terminal that shows this help has 60 columns.
    let text = "q, Esc, Ctrl-C   leave\n\
                up, down, Tab    choose a guest\n\
                d                measure the dirty rate: each page that\n\
                \u{20}                is written in a second costs a fault\n\
                ?                this help\n\
                \n\
                The screen changes nothing else: the screen asks\n\
                for the status four times a second.";
    let (width, height) = (60.min(area.width), 10.min(area.height));
    let own = Rect::new((area.width - width) / 2, (area.height - height) / 2, width, height);
    frame.render_widget(Clear, own);
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title("help")), own);
}
