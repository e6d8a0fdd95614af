//! `vmferry-bench reaper --traces`: settings of the policy `aimd` in simulated time.
//!
//! The question is whether `aimd`, a rule of 20 lines, could replace the policy `predict`. The
//! sweep plays each combination of thresholds, sleeps and counts on each simulated guest, and
//! compares three figures with those of `predict`: writes of the guest, time for which full rings
//! stopped its vCPUs, and processor time of the reaper. A policy of one VMM has one set of settings
//! for all guests. Therefore the answer depends on the best common settings. The best settings for
//! each guest alone are an upper bound of what any choice of settings can reach.

use std::time::Duration;

use serde_json::{Value, json};
use vmferry_baselines::Aimd;
use vmferry_dirty::sim::{Costs, Trace, run as play};
use vmferry_dirty::{Predict, ReaperPolicy};
use vmferry_report::json::{Case, Document};

use super::spec::ENTRIES;
use crate::host;

pub use vmferry_report::benches::reaper_traces::{page, table};

/// Largest ratio to `predict` at which a figure counts as equal.
const BOUND: f64 = 1.03;
/// Share of vCPU time or of a processor, in percent, below which two figures count as equal. The
/// goal for the reaper of an idle guest has the same bound.
const NEGLIGIBLE_PCT: f64 = 0.1;

/// Values of each setting of `aimd`. The sweep plays all combinations.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Occupancies in percent above which the sleep is halved.
    pub above_percent: Vec<u64>,
    /// Occupancies in percent up to which the sleep grows. Only values below the threshold for
    /// halving are combined with it.
    pub up_to_percent: Vec<u64>,
    /// Shortest sleeps in milliseconds.
    pub shortest_ms: Vec<u64>,
    /// Longest sleeps in milliseconds.
    pub longest_ms: Vec<u64>,
    /// Times in milliseconds by which the sleep grows.
    pub step_ms: Vec<u64>,
    /// Numbers of harvests in a row after which the sleep grows.
    pub after: Vec<u32>,
}

impl Grid {
    /// Returns all combinations, each with the harvest of all rings and of each ring on its own.
    /// The proposed settings come first.
    fn settings(&self) -> Vec<Aimd> {
        let mut all = vec![Aimd::PROPOSED, Aimd::OWN_RINGS];
        for &above_percent in &self.above_percent {
            for &up_to_percent in self.up_to_percent.iter().filter(|low| **low < above_percent) {
                for (&shortest, &longest) in pairs(&self.shortest_ms, &self.longest_ms) {
                    for (&step, &after) in pairs(&self.step_ms, &self.after) {
                        let [shortest, longest, step] = [shortest, longest, step].map(Duration::from_millis);
                        let own = Aimd {
                            above_percent,
                            up_to_percent,
                            shortest,
                            longest,
                            step,
                            after,
                            own_rings: true,
                        };
                        all.extend([own, Aimd { own_rings: false, ..own }]);
                    }
                }
            }
        }
        all.retain(|settings| settings.shortest <= settings.longest);
        all
    }
}

fn pairs<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    a.iter().flat_map(move |a| b.iter().map(move |b| (a, b)))
}

/// Selection of traces and settings.
#[derive(Debug, Clone)]
pub struct Options {
    /// Settings that are played on each of `swept`.
    pub grid: Grid,
    /// Ring sizes in entries.
    pub entries: Vec<u32>,
    /// Traces from which the best settings are selected.
    pub swept: Vec<Trace>,
    /// Simulated time of each of `swept`, in seconds.
    pub seconds: f64,
    /// Traces on which only `predict` and the selected settings are played, because they are long.
    pub checked: Vec<Trace>,
    /// Simulated time of each of `checked`, in seconds.
    pub checked_seconds: f64,
    /// Texts that select traces by name and ring size, as in `bursts/4096`. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of `--quick`: fewer settings, and a tenth of the simulated time.
    pub fn quick() -> Self {
        let grid = Grid {
            above_percent: vec![50, 80],
            up_to_percent: vec![20],
            shortest_ms: vec![1, 100],
            longest_ms: vec![100, 1000],
            step_ms: vec![1, 20],
            after: vec![1],
        };
        Self { grid, seconds: 6.0, checked: Vec::new(), ..Self::full() }
    }

    /// Returns the full options: all traces, for a minute each, and an hour of the day's trace.
    pub fn full() -> Self {
        Self {
            grid: Grid {
                // A ring of 4096 entries is full at 98 %. Above 99 %, only a full ring halves.
                above_percent: vec![50, 80, 90, 99],
                up_to_percent: vec![10, 20, 50, 90],
                shortest_ms: vec![1, 10, 40, 100],
                longest_ms: vec![100, 1000, 10_000],
                step_ms: vec![1, 5, 20, 100],
                after: vec![1, 6],
            },
            entries: ENTRIES.to_vec(),
            swept: Trace::steady().into_iter().chain(Trace::changing()).collect(),
            seconds: 60.0,
            checked: vec![Trace::day()],
            checked_seconds: 3600.0,
            only: Vec::new(),
        }
    }

    /// Returns whether `only` leaves a trace of the sweep.
    pub fn selects_any(&self) -> bool {
        self.guests().iter().any(|guest| guest.swept)
    }

    fn guests(&self) -> Vec<Guest<'_>> {
        let swept = self.swept.iter().map(|trace| (trace, self.seconds, true));
        let checked = self.checked.iter().map(|trace| (trace, self.checked_seconds, false));
        let all = swept.chain(checked).flat_map(|(trace, seconds, swept)| {
            self.entries.iter().map(move |&entries| Guest { trace, entries, seconds, swept })
        });
        let wanted = |guest: &Guest<'_>| {
            self.only.is_empty() || self.only.iter().any(|text| guest.name().contains(text.as_str()))
        };
        all.filter(wanted).collect()
    }
}

/// Simulated guest with rings of one size.
#[derive(Debug, Clone, Copy)]
struct Guest<'a> {
    trace: &'a Trace,
    entries: u32,
    seconds: f64,
    /// True if the best settings depend on this guest.
    swept: bool,
}

impl Guest<'_> {
    fn name(&self) -> String {
        format!("{}/{}", self.trace.name, self.entries)
    }

    fn play(&self, policy: &dyn ReaperPolicy) -> Figures {
        let costs = Costs::default();
        let outcome = play(policy, self.trace, self.entries, &costs, self.seconds, false);
        Figures {
            writes_per_s: outcome.writes / self.seconds,
            full_exits: outcome.full_exits,
            stall_pct: outcome.stalled / (self.seconds * self.trace.vcpus.len() as f64) * 100.0,
            cpu_pct: outcome.reaper_cpu / self.seconds * 100.0,
            lost_us_per_write: outcome.lost_per_million(&costs),
        }
    }
}

/// Figures of a policy on a guest.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Figures {
    writes_per_s: f64,
    full_exits: u64,
    /// Time for which full rings stopped the vCPUs, in percent of vCPU time.
    stall_pct: f64,
    /// Processor time of the reaper, in percent of a processor.
    cpu_pct: f64,
    /// Time that the guest lost to faults and full rings, in microseconds per write. Not finite if
    /// the guest does not write.
    lost_us_per_write: f64,
}

/// Ratios of the figures of `aimd` to those of `predict`. A ratio above 1 is worse than `predict`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ratios {
    /// Inverse ratio of the guest's writes.
    slowdown: f64,
    stall: f64,
    cpu: f64,
}

impl Ratios {
    fn of(ours: Figures, predict: Figures) -> Self {
        let costs = |ours: f64, predict: f64| ours.max(NEGLIGIBLE_PCT) / predict.max(NEGLIGIBLE_PCT);
        Self {
            slowdown: if predict.writes_per_s > 0.0 { predict.writes_per_s / ours.writes_per_s } else { 1.0 },
            stall: costs(ours.stall_pct, predict.stall_pct),
            cpu: costs(ours.cpu_pct, predict.cpu_pct),
        }
    }

    /// Returns the worst of the three ratios.
    fn worst(self) -> f64 {
        self.slowdown.max(self.stall).max(self.cpu)
    }

    fn within(self) -> bool {
        self.worst() <= BOUND
    }
}

/// Settings, or a choice of settings for each guest, with the result on each guest.
struct Side {
    name: &'static str,
    /// Settings for each guest, or `None` if the guest was not swept.
    settings: Vec<Option<Aimd>>,
}

impl Side {
    fn common(name: &'static str, settings: Aimd, guests: usize) -> Self {
        Self { name, settings: vec![Some(settings); guests] }
    }
}

/// Runs the sweep. Calls `progress` with the name of each guest that begins.
///
/// # Panics
///
/// Panics if the options select no trace of the sweep.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Document {
    let (guests, all) = (options.guests(), options.grid.settings());
    assert!(options.selects_any(), "no trace to sweep is selected");
    let mut predicts = Vec::new();
    // For each guest that is swept, the ratios of all settings.
    let mut ratios: Vec<Vec<Ratios>> = Vec::new();
    for guest in &guests {
        progress(&guest.name());
        let predict = guest.play(&Predict);
        predicts.push(predict);
        if guest.swept {
            ratios.push(all.iter().map(|settings| Ratios::of(guest.play(settings), predict)).collect());
        }
    }
    // Swept guests come first.
    let here =
        |index: usize| ratios.get(index).map(|own| all[least(own.iter().map(|ratios| ratios.worst()))]);
    let sides = [
        Side::common("aimd", Aimd::PROPOSED, guests.len()),
        Side::common("aimd-own", Aimd::OWN_RINGS, guests.len()),
        Side::common("aimd-common", all[best_common(&ratios)], guests.len()),
        Side::common("aimd-fastest", all[fastest(&ratios)], guests.len()),
        Side { name: "aimd-each", settings: (0..guests.len()).map(here).collect() },
    ];
    let mut document = Document::new("reaper-traces", host::describe());
    let mut summaries = Vec::new();
    for (index, guest) in guests.iter().enumerate() {
        document.cases.push(case(guest, "predict", predicts[index], None));
    }
    for side in &sides {
        let mut of_side = Vec::new();
        for ((guest, predict), settings) in guests.iter().zip(&predicts).zip(&side.settings) {
            let Some(settings) = settings else { continue };
            let figures = guest.play(settings);
            let ratios = Ratios::of(figures, *predict);
            of_side.push((guest.name(), ratios));
            document.cases.push(case(guest, side.name, figures, Some((settings, ratios))));
        }
        summaries.push(summary(side, &of_side));
    }
    finish(&mut document, options, all.len(), summaries);
    document
}

/// Returns the index of the smallest number, the first one of several. Infinite numbers are the
/// largest.
fn least(numbers: impl Iterator<Item = f64>) -> usize {
    let best = numbers.enumerate().reduce(|best, next| if next.1 < best.1 { next } else { best });
    best.map_or(0, |(index, _)| index)
}

/// Returns the index of the settings that are close to `predict` on most guests. Among equals, the
/// settings with the smallest mean of the worst ratios win (geometric mean).
fn best_common(ratios: &[Vec<Ratios>]) -> usize {
    let outside = |index: usize| ratios.iter().filter(|own| !own[index].within()).count();
    let fewest = (0..ratios[0].len()).map(outside).min().unwrap_or(0);
    least((0..ratios[0].len()).map(|index| {
        let mean = ratios.iter().map(|own| own[index].worst().ln()).sum::<f64>();
        if outside(index) == fewest { mean } else { f64::INFINITY }
    }))
}

/// Returns the index of the settings whose slowest guest, compared with `predict`, is the fastest.
fn fastest(ratios: &[Vec<Ratios>]) -> usize {
    let slowest = |index: usize| ratios.iter().map(|own| own[index].slowdown).fold(0.0, f64::max);
    least((0..ratios[0].len()).map(slowest))
}

fn case(guest: &Guest<'_>, side: &str, figures: Figures, aimd: Option<(&Aimd, Ratios)>) -> Case {
    let mut case = Case::new(format!("{}/{side}", guest.name()))
        .param("trace", guest.trace.name)
        .param("ring_entries", guest.entries)
        .param("side", side)
        .param("seconds", guest.seconds)
        .param("swept", guest.swept)
        .param("settings", aimd.map(|(settings, _)| text(settings)));
    case.metric("writes_per_s", figures.writes_per_s);
    case.metric("full_exits", super::to_f64(figures.full_exits));
    case.metric("stall_pct", figures.stall_pct);
    case.metric("reaper_cpu_pct", figures.cpu_pct);
    if figures.lost_us_per_write.is_finite() {
        case.metric("lost_us_per_write", figures.lost_us_per_write);
    }
    if let Some((_, ratios)) = aimd {
        case.metric("writes_to_predict", 1.0 / ratios.slowdown);
        case.metric("stall_to_predict", ratios.stall);
        case.metric("reaper_cpu_to_predict", ratios.cpu);
    }
    case
}

/// Returns the settings in one line.
fn text(settings: &Aimd) -> String {
    let Aimd { above_percent, up_to_percent, shortest, longest, step, after, own_rings } = settings;
    format!(
        "halve above {above_percent} %, add {} ms after {after} harvest(s) up to {up_to_percent} %, {} to {} ms, {}",
        step.as_millis(),
        shortest.as_millis(),
        longest.as_millis(),
        if *own_rings { "own rings" } else { "all rings" }
    )
}

/// Returns the summary of a side: its worst ratios, and the number of guests on which it is as good
/// as `predict`.
fn summary(side: &Side, guests: &[(String, Ratios)]) -> Value {
    let within = guests.iter().filter(|(_, ratios)| ratios.within()).count();
    let worst = |of: fn(&Ratios) -> f64| {
        let (name, ratios) = &guests[least(guests.iter().map(|(_, ratios)| -of(ratios)))];
        (of(ratios), name.clone())
    };
    let (slowdown, stall, cpu) =
        (worst(|ratios| ratios.slowdown), worst(|ratios| ratios.stall), worst(|ratios| ratios.cpu));
    let count = |of: fn(&Ratios) -> f64| guests.iter().filter(|(_, ratios)| of(ratios) <= BOUND).count();
    let first = side.settings.first().copied().flatten();
    let common = first.filter(|first| side.settings.iter().all(|own| *own == Some(*first)));
    json!({
        "name": side.name,
        "settings": common.as_ref().map(text),
        "traces": guests.len(),
        "within": within,
        "writes_within": count(|ratios| ratios.slowdown),
        "stall_within": count(|ratios| ratios.stall),
        "reaper_cpu_within": count(|ratios| ratios.cpu),
        "worst_writes_to_predict": 1.0 / slowdown.0,
        "worst_writes_trace": slowdown.1,
        "worst_stall_to_predict": stall.0,
        "worst_stall_trace": stall.1,
        "worst_reaper_cpu_to_predict": cpu.0,
        "worst_reaper_cpu_trace": cpu.1,
    })
}

fn finish(document: &mut Document, options: &Options, settings: usize, sides: Vec<Value>) {
    // Only one set of settings for all guests can be a default.
    let would_do = |side: &Value| side["name"] != "aimd-each" && side["within"] == side["traces"];
    let would_do = sides.iter().any(would_do);
    let of = |name: &str, field: &str| {
        let side = sides.iter().find(|side| side["name"] == name);
        side.map_or(Value::Null, |side| side[field].clone())
    };
    let answer = format!(
        "Would aimd do, the policy of 20 lines? {}. The best of {settings} common settings are within {:.0} % of predict on \
         {} of {} traces, and the proposed settings on {}. With the best settings for each trace, aimd is within on {} of the \
         {} traces of the sweep. In the guest's writes alone, the best common settings reach {:.2} of predict on their worst \
         trace.",
        if would_do { "Yes" } else { "No" },
        (BOUND - 1.0) * 100.0,
        of("aimd-common", "within"),
        of("aimd-common", "traces"),
        of("aimd", "within"),
        of("aimd-each", "within"),
        of("aimd-each", "traces"),
        of("aimd-fastest", "worst_writes_to_predict").as_f64().unwrap_or(0.0),
    );
    let summary = [
        ("settings", json!(settings)),
        ("bound", BOUND.into()),
        ("negligible_pct", NEGLIGIBLE_PCT.into()),
        ("seconds", options.seconds.into()),
        ("would_do", would_do.into()),
        ("answer", answer.into()),
        ("sides", sides.into()),
    ];
    document.summary.extend(summary.map(|(name, value)| (name.to_owned(), value)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_dirty::sim::Phase;

    fn ratios(slowdown: f64, stall: f64, cpu: f64) -> Ratios {
        Ratios { slowdown, stall, cpu }
    }

    #[test]
    fn grid_has_each_valid_combination_after_the_proposed_settings() {
        let grid = Grid {
            above_percent: vec![50, 80],
            up_to_percent: vec![20, 50],
            shortest_ms: vec![1, 200],
            longest_ms: vec![100, 1000],
            step_ms: vec![20],
            after: vec![1, 6],
        };
        let all = grid.settings();
        assert_eq!(all[..2], [Aimd::PROPOSED, Aimd::OWN_RINGS]);
        // Three pairs of thresholds, three pairs of sleeps, two counts, both harvests.
        assert_eq!(all.len(), 2 + 3 * 3 * 2 * 2);
        assert!(all.iter().all(|own| own.up_to_percent < own.above_percent && own.shortest <= own.longest));
    }

    #[test]
    fn negligible_costs_are_equal_and_others_are_compared() {
        let of = |writes_per_s, stall_pct, cpu_pct| Figures {
            writes_per_s,
            full_exits: 0,
            stall_pct,
            cpu_pct,
            lost_us_per_write: 0.0,
        };
        assert_eq!(Ratios::of(of(0.0, 0.09, 0.0), of(0.0, 0.0, 0.05)), ratios(1.0, 1.0, 1.0));
        let got = Ratios::of(of(50.0, 2.0, 0.05), of(100.0, 0.5, 0.2));
        assert_eq!(got, ratios(2.0, 4.0, 0.5));
        assert!(!got.within() && ratios(1.03, 0.2, 1.0).within());
    }

    #[test]
    fn best_settings_are_close_on_most_guests_and_fastest_ones_ignore_costs() {
        // Settings in columns, guests in rows.
        let guests = [
            vec![ratios(1.5, 1.0, 1.0), ratios(1.0, 1.0, 1.0), ratios(1.0, 9.0, 1.0)],
            vec![ratios(1.0, 1.0, 1.0), ratios(1.2, 1.0, 1.0), ratios(1.0, 1.0, 9.0)],
        ];
        assert_eq!(best_common(&guests), 1, "as many as the first, and nearer");
        assert_eq!(fastest(&guests), 2);
    }

    fn options(trace: Trace) -> Options {
        Options {
            entries: vec![4096],
            swept: vec![trace.clone()],
            seconds: 4.0,
            checked: vec![trace],
            checked_seconds: 2.0,
            ..Options::quick()
        }
    }

    fn side<'a>(document: &'a Document, name: &str) -> &'a Value {
        let sides = document.summary["sides"].as_array().unwrap();
        sides.iter().find(|side| side["name"] == name).unwrap()
    }

    #[test]
    fn idle_guest_does_not_need_predict() {
        let idle = Trace { name: "idle", vcpus: vec![vec![Phase::idle(1e9)]] };
        let document = run(&options(idle), &mut |_| {});
        assert_eq!(document.summary["would_do"], true, "{:#?}", document.summary);
        assert!(document.summary["answer"].as_str().unwrap().contains("? Yes."));
        // The checked trace has no best settings of its own.
        assert_eq!(
            (&side(&document, "aimd")["traces"], &side(&document, "aimd-each")["traces"]),
            (&json!(2), &json!(1))
        );
    }

    #[test]
    fn proposed_settings_do_not_do_for_a_guest_that_fills_its_ring() {
        let stress =
            Trace { name: "stress", vcpus: vec![vec![Phase::uniform(1e9, f64::INFINITY, 786_432.0)]] };
        let document = run(&options(stress), &mut |_| {});
        let proposed = side(&document, "aimd");
        assert_eq!(proposed["within"], 0, "{proposed:#}");
        assert!(proposed["worst_stall_to_predict"].as_f64().unwrap() > 2.0, "{proposed:#}");
        let each = side(&document, "aimd-each");
        assert!(each["worst_stall_to_predict"].as_f64() < proposed["worst_stall_to_predict"].as_f64());
        let text = table(&document);
        for part in ["stress/4096", "halve above 80 %, add 20 ms", "Would aimd do", "aimd-each"] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(page(&document).contains("stress/4096"));
    }

    #[test]
    fn options_select_traces_by_name_and_ring_size() {
        let options = Options { only: vec!["bursts/4096".into()], ..Options::full() };
        assert_eq!(options.guests().iter().map(Guest::name).collect::<Vec<_>>(), ["bursts/4096"]);
        let all = Options::full();
        assert_eq!(all.guests().len(), 2 * 17, "the traces of the simulation, for two ring sizes");
    }
}
