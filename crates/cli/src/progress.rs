//! Progress of a running migration: a bar with the verdict on a terminal, periodic lines elsewhere.

use crate::output::bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Interval of the lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// Time over which the rate of the link is measured.
const RATE_OVER: Duration = Duration::from_millis(500);
/// Size of a page in bytes.
const PAGE: f64 = 4096.0;
/// Fewest columns that are assumed for a terminal.
const NARROWEST: usize = 30;
/// Most lines below the bar.
const MOST_LINES: usize = 5;

/// Display of successive `status` documents.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    colours: bool,
    last_line: Option<Instant>,
    /// Phase, pass and verdict of the last line that was printed without a terminal.
    told: Option<(&'static str, u64, Option<bool>)>,
    link: Link,
    /// Current pass: its number, its begin, and the bytes sent before it.
    pass: Option<(u64, Instant, f64)>,
}

impl Progress {
    /// Returns the display of a migration that may send `limit` bytes per second, if it has a
    /// limit.
    pub(crate) fn new(limit: Option<u64>) -> Self {
        let bar = std::io::stderr()
            .is_terminal()
            .then(|| ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr_with_hz(10)));
        let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { bar, colours, last_line: None, told: None, link: Link::limited(limit), pass: None }
    }

    /// Shows a `status` document.
    pub(crate) fn show(&mut self, status: &Value) {
        let now = Instant::now();
        self.link.take(now, &status["progress"]);
        self.end_of_pass(now, status);
        let view = View::of(status, &self.link);
        match &self.bar {
            Some(bar) => {
                bar.set_style(style(view.verdict, self.colours));
                bar.set_prefix(view.head.clone());
                bar.set_length(view.all.max(1));
                bar.set_position(view.done.min(view.all));
                bar.set_message(view.below(columns()));
            }
            None => self.line(now, &view),
        }
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Prints a line for each pass that has ended, on a terminal.
    fn end_of_pass(&mut self, now: Instant, status: &Value) {
        let progress = &status["progress"];
        let (number, pages) = (count(progress, "pass"), count(progress, "pass_pages"));
        let wire = progress["wire_bytes"].as_f64().unwrap_or(0.0);
        if pages == 0 || self.pass.is_some_and(|(known, ..)| known == number) {
            return;
        }
        if let (Some(bar), Some((number, began, before))) = (&self.bar, self.pass) {
            let seconds = now.saturating_duration_since(began).as_secs_f64();
            let line = format!(
                "pass {number}: {} in {seconds:.1} s, {} dirty after it",
                bytes(whole(wire - before)),
                bytes(pages << 12)
            );
            bar.println(cut(&line, columns()));
        }
        self.pass = Some((number, now, wire));
    }

    fn line(&mut self, now: Instant, view: &View) {
        let about = (view.phase, view.pass, view.verdict);
        let due = self.last_line.is_none_or(|last| now.saturating_duration_since(last) >= LINE_EVERY);
        if self.told == Some(about) && !due {
            return;
        }
        let mut text = view.lines.join("; ");
        if view.all > 0 {
            text = format!("{} of {} pages; {text}", view.done.min(view.all), view.all);
        }
        eprintln!("{}: {text}", view.head);
        (self.told, self.last_line) = (Some(about), Some(now));
    }
}

/// Rate of the link, computed from the source's counters.
#[derive(Debug, Default)]
struct Link {
    /// Time, and bytes of each channel; the first entry is the sum of all.
    looks: std::collections::VecDeque<(Instant, Vec<f64>)>,
    /// Limit of the rate in bytes per second, if there is one.
    limit: Option<f64>,
}

impl Link {
    fn limited(limit: Option<u64>) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a share for people")]
        Self { limit: limit.filter(|limit| *limit > 0).map(|limit| limit as f64), ..Self::default() }
    }

    /// Returns the rate, its share of the limit, and the shares of the channels, as text.
    fn use_at(&self, rate: f64) -> String {
        let mut text = format!("link {}/s", bytes(whole(rate)));
        if let Some(limit) = self.limit {
            text.push_str(&format!(" ({:.0} % of its limit)", rate / limit * 100.0));
        }
        let shares = self.shares();
        if !shares.is_empty() {
            let shares: Vec<String> = shares.iter().map(|share| format!("{share:.0}")).collect();
            text.push_str(&format!(" by channels {} %", shares.join("/")));
        }
        text
    }

    fn take(&mut self, now: Instant, progress: &Value) {
        let channels = progress["channel_bytes"].as_array().into_iter().flatten();
        let bytes = std::iter::once(&progress["wire_bytes"])
            .chain(channels)
            .map(|bytes| bytes.as_f64().unwrap_or(0.0));
        self.looks.push_back((now, bytes.collect()));
        let old = |(at, _): &(Instant, Vec<f64>)| now.saturating_duration_since(*at) > RATE_OVER;
        while self.looks.len() > 2 && self.looks.get(1).is_some_and(old) {
            self.looks.pop_front();
        }
    }

    /// Returns bytes per second; `None` until bytes have been sent.
    fn rate(&self) -> Option<f64> {
        let ((from, before), (to, after)) = (self.looks.front()?, self.looks.back()?);
        let seconds = to.saturating_duration_since(*from).as_secs_f64();
        let moved = after.first()? - before.first()?;
        (seconds > 0.02 && moved > 0.0).then(|| moved / seconds)
    }

    /// Returns the share of each channel in percent; empty with one channel.
    fn shares(&self) -> Vec<f64> {
        let (Some((_, before)), Some((_, after))) = (self.looks.front(), self.looks.back()) else {
            return Vec::new();
        };
        let moved =
            after.iter().enumerate().skip(1).map(|(index, bytes)| bytes - before.get(index).unwrap_or(&0.0));
        let moved: Vec<f64> = moved.collect();
        let all: f64 = moved.iter().sum();
        if moved.len() < 2 || all <= 0.0 {
            Vec::new()
        } else {
            moved.iter().map(|own| own / all * 100.0).collect()
        }
    }
}

/// Content of the display.
#[derive(Debug, Default, PartialEq)]
struct View {
    phase: &'static str,
    pass: u64,
    /// Text before the bar.
    head: String,
    done: u64,
    all: u64,
    /// The migration converges; `None` if that is not known.
    verdict: Option<bool>,
    lines: Vec<String>,
}

impl View {
    fn of(status: &Value, link: &Link) -> Self {
        let progress = &status["progress"];
        let (phase, counted) = match status["state"].as_str() {
            Some("setup") if progress["busy"].is_string() => ("waiting", false),
            Some("setup") if of_a_file(status) => ("protecting", false),
            Some("precopy") if of_a_file(status) => ("writing", false),
            Some("precopy") => ("pass", true),
            Some("switchover") => ("switchover", false),
            Some("postcopy") => ("postcopy", false),
            Some("postcopy-paused") => ("no link", false),
            _ => ("setup", false),
        };
        let pass = count(progress, "pass");
        let mut view = Self {
            phase,
            pass,
            head: if counted { format!("{phase} {pass}") } else { phase.to_owned() },
            done: count(progress, "pass_done"),
            all: count(progress, "pass_pages"),
            ..Self::default()
        };
        match phase {
            "protecting" => view.lines.push("write-protecting the memory of the running guest".into()),
            "writing" => {
                let rate = link.rate().map_or(String::new(), |rate| format!(", {}/s", bytes(whole(rate))));
                view.lines.push(format!("{} left{rate}, the guest runs", left(progress, "remaining_pages")));
            }
            "setup" => view.lines.push("connecting, negotiating, starting to track".into()),
            "waiting" => {
                view.lines
                    .push(format!("{}; the guest keeps running, and is stopped again later", busy(progress)));
                view.lines.push("`vmferry switch` stops it for as long as its I/O needs, up to 10 s".into());
            }
            "switchover" => {
                view.lines.push(format!("{} left, the guest is stopped", left(progress, "remaining_pages")));
            }
            "postcopy" => {
                let missing = count(progress, "left_pages");
                view.all = view.all.max(missing);
                view.done = view.all - missing;
                let pace = progress["pace"]
                    .as_f64()
                    .map_or(String::new(), |pace| format!(", pace {}/s", bytes(whole(pace))));
                let rate = link.rate().map_or(String::new(), |rate| format!(", {}", link.use_at(rate)));
                view.lines.push(format!(
                    "{} left, the guest runs on the target{rate}{pace}",
                    left(progress, "left_pages")
                ));
            }
            "no link" => {
                let why = progress["interrupted"].as_str().unwrap_or("no reason was given");
                view.lines.push(format!("the link is lost: {why}"));
            }
            _ => view.precopy(progress, link),
        }
        view
    }

    fn precopy(&mut self, progress: &Value, link: &Link) {
        let dirty = progress["dirty_pages_per_s"].as_f64().unwrap_or(0.0) * PAGE;
        let rate = link.rate().or(progress["bandwidth"].as_f64());
        let shown = rate.map_or("link ?".into(), |rate| link.use_at(rate));
        // The first pass ends before the dirty rate is known.
        let known = dirty > 0.0 || count(progress, "pass") > 0;
        let dirties = if known { format!("dirty {}/s", bytes(whole(dirty))) } else { "dirty ?".into() };
        self.lines.push(format!("{} left, {dirties}, {shown}", left(progress, "remaining_pages")));
        let verdict = Verdict::of(progress, dirty, rate);
        self.verdict = verdict.converging;
        self.lines.push(verdict.to_string());
        // `course` contains what `--mode auto` has changed by itself.
        let change = progress["course"].as_array().and_then(|course| course.last()?["why"].as_str());
        self.lines.extend(change.map(str::to_owned));
    }

    /// Returns the lines below the bar, broken at the width of the terminal.
    fn below(&self, columns: usize) -> String {
        let mut lines: Vec<String> = self.lines.iter().flat_map(|line| wrap(line, columns)).collect();
        if lines.len() > MOST_LINES {
            lines.truncate(MOST_LINES);
            lines[MOST_LINES - 1] = cut(&format!("{} …", lines[MOST_LINES - 1]), columns);
        }
        lines.join("\n")
    }
}

/// Expected end of precopy, and remedies if precopy does not converge.
#[derive(Debug, Clone, Default, PartialEq)]
struct Verdict {
    converging: Option<bool>,
    eta_s: Option<f64>,
    passes: Option<u64>,
    help: Vec<String>,
    /// Reason other than the rates.
    busy: Option<String>,
}

impl Verdict {
    /// Returns the engine's verdict. Without one, estimates the end from the two rates.
    fn of(progress: &Value, dirty: f64, link: Option<f64>) -> Self {
        let said = &progress["verdict"];
        let eta_s = said["eta_s"].as_f64();
        let help = || {
            let lines = said["help"].as_array().into_iter().flatten();
            lines.filter_map(|line| line.as_str().map(str::to_owned)).collect()
        };
        if progress["busy"].is_string() {
            let busy = Some(busy(progress));
            return Self { converging: Some(false), help: help(), busy, ..Self::default() };
        }
        if let Some(converging) = said["converging"].as_bool() {
            let (passes, help) = (said["passes_left"].as_u64(), help());
            return Self { converging: Some(converging), eta_s, passes, help, busy: None };
        }
        #[expect(clippy::cast_precision_loss, reason = "an estimate for people")]
        let remaining = count(progress, "remaining_pages") as f64 * PAGE;
        match link {
            Some(link) if link > dirty => Self { eta_s: Some(remaining / (link - dirty)), ..Self::default() },
            // A dirty rate above the link's rate does not prove that precopy does not converge: the
            // guest may write the same pages repeatedly.
            _ => Self::default(),
        }
    }
}

/// Returns why the guest cannot be stopped.
fn busy(progress: &Value) -> String {
    format!(
        "the guest's I/O does not quiesce: {}",
        progress["busy"].as_str().unwrap_or("no reason was given")
    )
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.converging, self.eta_s) {
            (Some(false), _) => {
                let rates = "does not converge: the guest dirties faster than the link carries it away";
                f.write_str(self.busy.as_deref().unwrap_or(rates))?;
                if !self.help.is_empty() {
                    write!(f, "; what would help: {}", self.help.join("; "))?;
                }
                Ok(())
            }
            (Some(true), Some(eta)) => {
                write!(f, "converges, ETA {eta:.1} s")?;
                self.passes.map_or(Ok(()), |passes| write!(f, ", passes left {passes}"))
            }
            (Some(true), None) => f.write_str("converges"),
            (None, Some(eta)) => write!(f, "ETA {eta:.1} s"),
            (None, None) => f.write_str("ETA ?"),
        }
    }
}

fn style(verdict: Option<bool>, colours: bool) -> ProgressStyle {
    let template = match (colours, verdict) {
        (false, _) => "{prefix} [{bar:28}] {percent}%\n{msg}",
        (true, Some(true)) => "{prefix:.bold} [{bar:28.green}] {percent}%\n{msg}",
        (true, Some(false)) => "{prefix:.bold} [{bar:28.red}] {percent}%\n{msg}",
        (true, None) => "{prefix:.bold} [{bar:28}] {percent}%\n{msg}",
    };
    ProgressStyle::with_template(template)
        .map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("=> "))
}

/// Returns the columns of the terminal on standard error.
fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stderr());
    size.map_or(80, |size| usize::from(size.ws_col)).max(NARROWEST)
}

/// Returns whether a guest is written to a file.
fn of_a_file(status: &Value) -> bool {
    status["mode"] == "file"
}

fn count(progress: &Value, name: &str) -> u64 {
    progress[name].as_u64().unwrap_or(0)
}

fn left(progress: &Value, name: &str) -> String {
    bytes(count(progress, name) << 12)
}

fn whole(value: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
    let whole = value.clamp(0.0, 1e18) as u64;
    whole
}

/// Cuts a text to fit into `columns`. The last column stays free: a terminal would begin a new
/// line.
fn cut(text: &str, columns: usize) -> String {
    let room = columns.saturating_sub(1);
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}

/// Breaks a text between words into lines that fit into `columns`. Continuation lines are indented.
fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().map_or(0, |line| line.chars().count());
        if line > 2 && line + 1 + word.chars().count() >= columns {
            lines.push("  ".into());
        }
        if let Some(line) = lines.last_mut() {
            if !line.trim().is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.iter().map(|line| cut(line, columns)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn link(rates: &[f64]) -> Link {
        limited(rates, None)
    }

    fn limited(rates: &[f64], limit: Option<u64>) -> Link {
        let mut link = Link::limited(limit);
        let start = Instant::now();
        for (ms, share) in [(0, 0.0), (100, 0.1)] {
            let channels: Vec<f64> = rates.iter().map(|rate| rate * share).collect();
            let progress = json!({"wire_bytes": channels.iter().sum::<f64>(), "channel_bytes": channels});
            link.take(start + Duration::from_millis(ms), &progress);
        }
        link
    }

    fn precopy(more: &Value) -> Value {
        let mut progress = json!({"pass": 1, "pass_pages": 1000, "pass_done": 400, "remaining_pages": 600, "dirty_pages_per_s": 1000.0});
        progress.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"state": "precopy", "progress": progress})
    }

    #[test]
    fn pass_shows_remaining_memory_rates_and_expected_end() {
        let view = View::of(&precopy(&json!({})), &link(&[6_000_000.0, 2_000_000.0]));
        assert_eq!((view.head.as_str(), view.done, view.all, view.verdict), ("pass 1", 400, 1000, None));
        assert_eq!(view.lines[0], "2.3 MiB left, dirty 3.9 MiB/s, link 7.6 MiB/s by channels 75/25 %");
        assert_eq!(view.lines[1], "ETA 0.6 s");
        let view = View::of(&precopy(&json!({})), &limited(&[6_000_000.0, 2_000_000.0], Some(10_000_000)));
        assert!(
            view.lines[0].ends_with("link 7.6 MiB/s (80 % of its limit) by channels 75/25 %"),
            "{view:?}"
        );
        let after = json!({"state": "postcopy", "progress": {"left_pages": 512}});
        let view = View::of(&after, &link(&[6_000_000.0, 2_000_000.0]));
        assert!(view.lines[0].ends_with("on the target, link 7.6 MiB/s by channels 75/25 %"), "{view:?}");
        let unknown = View::of(&precopy(&json!({})), &Link::default());
        assert!(unknown.lines[0].ends_with("link ?") && unknown.lines[1] == "ETA ?", "{unknown:?}");
    }

    #[test]
    fn high_dirty_rate_alone_gives_no_verdict() {
        let view = View::of(&precopy(&json!({"dirty_pages_per_s": 1e6})), &link(&[8e6]));
        assert_eq!((view.verdict, view.lines[1].as_str()), (None, "ETA ?"));
        assert!(!view.lines[0].contains("channels"));
    }

    #[test]
    fn verdict_of_the_engine_replaces_the_estimate() {
        let said = json!({"verdict": {"converging": true, "eta_s": 2.25, "passes_left": 3, "help": []}, "dirty_pages_per_s": 1e6});
        let view = View::of(&precopy(&said), &link(&[8e6]));
        assert_eq!(
            (view.verdict, view.lines[1].as_str()),
            (Some(true), "converges, ETA 2.2 s, passes left 3")
        );
        let said = json!({"verdict": {"converging": false, "help": ["a faster link"]}, "course": [{"why": "slowed"}]});
        let view = View::of(&precopy(&said), &link(&[8e6]));
        assert!(
            view.lines[1].ends_with("what would help: a faster link") && view.lines[2] == "slowed",
            "{view:?}"
        );
    }

    #[test]
    fn slow_disk_is_reported_instead_of_the_rates() {
        let said = json!({"busy": "disk 0 is slow", "verdict": {"converging": false, "help": ["less I/O"]}});
        let view = View::of(&precopy(&said), &link(&[8e6]));
        let want = "the guest's I/O does not quiesce: disk 0 is slow; what would help: less I/O";
        assert_eq!((view.verdict, view.lines[1].as_str()), (Some(false), want));
    }

    #[test]
    fn every_state_has_its_text() {
        for (state, progress, want) in [
            ("setup", json!({}), "connecting"),
            ("setup", json!({"busy": "disk 0 is slow"}), "disk 0 is slow; the guest keeps running"),
            ("switchover", json!({"remaining_pages": 256}), "1.0 MiB left, the guest is stopped"),
            (
                "postcopy",
                json!({"left_pages": 512, "pace": 1048576}),
                "2.0 MiB left, the guest runs on the target, pace 1.0 MiB/s",
            ),
            ("postcopy-paused", json!({"interrupted": "reset"}), "the link is lost: reset"),
        ] {
            let view = View::of(&json!({"state": state, "progress": progress}), &Link::default());
            assert!(view.lines[0].contains(want), "{view:?}");
        }
        let file = |state| json!({"state": state, "mode": "file", "progress": {"remaining_pages": 256}});
        let view = View::of(&file("setup"), &Link::default());
        assert!(view.lines[0].contains("write-protecting"), "{view:?}");
        let view = View::of(&file("precopy"), &link(&[8e6]));
        assert_eq!(view.lines, ["1.0 MiB left, 7.6 MiB/s, the guest runs"]);
        // The members of a document may be missing or of another type.
        View::of(&json!(null), &Link::default());
        View::of(&json!({"state": 7, "progress": {"verdict": [], "channel_bytes": {}}}), &Link::default());
    }

    #[test]
    fn lines_fit_into_a_narrow_terminal() {
        let help = [
            "a link that carries much more than this one does",
            "--auto-converge: the guest held for most of its time",
        ];
        let said = json!({"dirty_pages_per_s": 1e9, "verdict": {"converging": false, "help": help}});
        let view = View::of(&precopy(&said), &link(&[8e6, 9e6]));
        for columns in [30, 60, 120] {
            let below = view.below(columns);
            assert!(below.lines().all(|line| line.chars().count() < columns), "{columns}: {below}");
            assert!(below.lines().count() <= MOST_LINES);
        }
        assert!(view.below(60).contains("does not converge"));
        assert_eq!(wrap(&"x".repeat(50), 30), [format!("{}…", "x".repeat(28))]);
    }
}
