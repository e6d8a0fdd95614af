//! Plan: predictions from many simulations of each strategy, and a recommendation.

use super::curve::Curve;
use super::encoding::{self, CodecPlan, Encoding, EncodingAdvice};
use super::inputs::Inputs;
use super::model::{Run, World};
use super::rng::Rng;
use crate::source::{AutoConverge, Deltas, MigrationMode, OnTimeout, Settings};
use serde::Serialize;
use vmferry_protocol::source::readable_time as ms;

/// Number of simulations of each strategy.
const RUNS: u32 = 200;
/// Number of simulations of each encoding.
const CODEC_RUNS: u32 = 100;
/// Relative error of the curve of writes in addition to its misfit, and the additional error beyond
/// the measured windows.
const CURVE_SPREAD: f64 = 0.02;
const UNSEEN_SPREAD: f64 = 0.10;
/// Relative error of the fixed costs.
const FIXED_SPREAD: f64 = 0.15;
/// Relative errors of the simulation with exact inputs, as measured by `vmferry-bench plan`.
const TOTAL_OFF: f64 = 0.04;
const DOWNTIME_OFF: f64 = 0.25;
/// Mean time in seconds for which the steps of the switchover wait for processors, in total on both
/// hosts.
const WAITS_S: f64 = 1.5e-3;
/// Share of the simulations that must converge for convergence to count as certain. If at most one
/// minus this share converge, convergence counts as excluded.
const SURE: f64 = 0.9;
/// Largest share of its time that the guest may lose by throttling. If the guest would lose more,
/// hybrid is recommended instead.
const BEARABLE: f64 = 0.5;

/// Strategy for moving a guest: a migration mode, with or without throttling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Precopy: the memory moves while the guest runs on the source.
    Precopy,
    /// Precopy in which the vCPUs are throttled as far as necessary.
    AutoConverge,
    /// Postcopy: the memory moves while the guest runs on the target.
    Postcopy,
    /// Hybrid: precopy passes for as long as they shrink, then postcopy for the rest of the memory.
    Hybrid,
}

impl Strategy {
    /// All strategies, in the order in which a plan lists them.
    pub const ALL: [Self; 4] = [Self::Precopy, Self::AutoConverge, Self::Postcopy, Self::Hybrid];

    /// Returns `settings`, changed to this strategy and without changes of course.
    #[must_use]
    pub fn settings(self, settings: &Settings) -> Settings {
        let mode = match self {
            Self::Precopy | Self::AutoConverge => MigrationMode::Precopy,
            Self::Postcopy => MigrationMode::Postcopy,
            Self::Hybrid => MigrationMode::Hybrid,
        };
        let slow = match (self, settings.auto_converge) {
            (Self::AutoConverge, AutoConverge::Off) => AutoConverge::All,
            (Self::AutoConverge, how) => how,
            _ => AutoConverge::Off,
        };
        Settings { mode, auto_converge: slow, auto: None, ..settings.clone() }
    }

    /// Returns the strategy that `settings` select. A handoff inside one host has no strategy of
    /// its own, because it sends no pages: for its settings, the result is precopy.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        match (settings.mode, settings.auto_converge) {
            (MigrationMode::Postcopy, _) => Self::Postcopy,
            (MigrationMode::Hybrid, _) => Self::Hybrid,
            (MigrationMode::Local, _) | (MigrationMode::Precopy, AutoConverge::Off) => Self::Precopy,
            (MigrationMode::Precopy, _) => Self::AutoConverge,
        }
    }
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Precopy => "precopy",
            Self::AutoConverge => "auto-converge",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        })
    }
}

/// Predicted value, with the interval that contains nine of ten simulated values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Interval {
    /// 5th percentile of the simulated values.
    pub low: f64,
    /// Median of the simulated values.
    pub expected: f64,
    /// 95th percentile of the simulated values.
    pub high: f64,
}

impl Interval {
    fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |percent: usize| values[last * percent / 100];
        Some(Self { low: at(5), expected: at(50), high: at(95) })
    }
}

/// Prediction of whether a migration converges, which means that it ends by itself within the
/// downtime limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Likelihood {
    /// At least nine of ten simulations converged.
    Yes,
    /// More than one and fewer than nine of ten simulations converged.
    Borderline,
    /// At most one of ten simulations converged.
    No,
}

/// Prediction for one strategy.
///
/// Unless a field states otherwise, its value covers the simulations that converged, and is `None`
/// if none did.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModePlan {
    /// Strategy that the prediction is for.
    pub mode: Strategy,
    /// Share of the simulations that converged, 0 to 1.
    pub probability: f64,
    /// Classification of `probability`.
    pub converges: Likelihood,
    /// Time in ms from the start of the migration until the guest runs on the target with all of
    /// its memory.
    pub total_ms: Option<Interval>,
    /// Downtime in ms.
    pub downtime_ms: Option<Interval>,
    /// Bytes on the wire. If no simulation converged, covers all simulations.
    pub bytes: Option<Interval>,
    /// CPU time of the source for the encoding of pages, in ms. If no simulation converged, covers
    /// all simulations.
    pub encoding_cpu_ms: Option<Interval>,
    /// Share of its time, 0 to 1, that the guest loses by throttling and faults, not counting the
    /// downtime. If no simulation converged, covers all simulations.
    pub slowdown: Option<Interval>,
    /// Number of passes before the guest is stopped.
    pub passes: Option<Interval>,
}

/// Plan of a migration: a prediction for each strategy, and a recommendation.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// Prediction for each strategy, in the order of [`Strategy::ALL`].
    pub modes: Vec<ModePlan>,
    /// Recommended strategy.
    pub recommended: Strategy,
    /// Reason for the recommendation, as text for the operator.
    pub reason: String,
    /// Reliability and assumptions of the predictions, as text for the operator.
    pub certainty: String,
    /// Prediction for each encoding of pages. The first one is without encoding.
    pub codecs: Vec<CodecPlan>,
    /// Recommended encoding of pages.
    pub encoding: EncodingAdvice,
    /// Measured figures that the plan was made from.
    pub inputs: Inputs,
}

impl Plan {
    /// Makes a plan from the measured `inputs` for a migration with `settings`. Equal arguments
    /// result in equal plans.
    ///
    /// [`Plan::modes`] and the recommended strategy are for the encoding of `settings`.
    /// [`Plan::codecs`] compares the encodings.
    #[must_use]
    pub fn make(inputs: Inputs, settings: &Settings) -> Self {
        let content = inputs.touched_pages.saturating_sub(inputs.free_pages) as f64;
        let curve = Curve::fit(&inputs.curve, content.max(1.0), inputs.run_pages);
        let modes = Strategy::ALL
            .map(|strategy| try_out(strategy, RUNS, &inputs, &curve, &strategy.settings(settings)));
        let codecs: Vec<CodecPlan> = encoding::candidates(&inputs.content)
            .into_iter()
            .map(|(codec, deltas)| {
                let with = if deltas { Deltas::On } else { Deltas::Off };
                let settings = Settings { codec, deltas: with, ..settings.clone() };
                let predict = |strategy: Strategy| {
                    try_out(strategy, CODEC_RUNS, &inputs, &curve, &strategy.settings(&settings))
                };
                let prediction =
                    encoding::that_ends(predict(Strategy::Precopy), || predict(Strategy::Hybrid));
                CodecPlan { codec, deltas, prediction }
            })
            .collect();
        let encoding = encoding::advise(&codecs, &inputs.content);
        let (recommended, reason) = recommend(&modes, settings);
        let certainty = certainty(&inputs, &curve, &modes[0]);
        Self { modes: modes.into(), recommended, reason, certainty, codecs, encoding, inputs }
    }

    /// Returns the prediction for `strategy`.
    #[must_use]
    pub fn of(&self, strategy: Strategy) -> Option<&ModePlan> {
        self.modes.iter().find(|mode| mode.mode == strategy)
    }
}

fn try_out(strategy: Strategy, count: u32, inputs: &Inputs, curve: &Curve, settings: &Settings) -> ModePlan {
    let mut rng = Rng::new(0x7665_7264_6963_7421);
    let cap = settings.max_bandwidth.map_or(f64::INFINITY, |cap| cap as f64);
    let longest_seen = curve.known_s;
    let pass = inputs.touched_pages as f64 * 4096.0 / inputs.link.bytes_per_s.max(1.0);
    let unseen = if pass > 1.5 * longest_seen { UNSEEN_SPREAD } else { 0.0 };
    let spread = CURVE_SPREAD + curve.misfit / 3.0 + unseen;
    let runs: Vec<Run> = (0..count)
        .map(|_| {
            let bandwidth = (inputs.link.bytes_per_s * rng.around(inputs.link.spread)).min(cap).max(1.0);
            let world = World {
                inputs,
                settings,
                encoding: Encoding::new(inputs, settings),
                curve: curve.faster(rng.around(spread)),
                bandwidth,
                fixed: rng.around(FIXED_SPREAD),
                spread: inputs.written_over(),
                round_trip: inputs.link.round_trip_s * rng.around(FIXED_SPREAD),
            };
            let run = world.run(&mut rng);
            let (total, downtime) = (rng.around(TOTAL_OFF), rng.around(DOWNTIME_OFF));
            let waits = rng.wait(WAITS_S);
            Run { total: run.total * total + waits, downtime: run.downtime * downtime + waits, ..run }
        })
        .collect();
    let ended: Vec<&Run> = runs.iter().filter(|run| run.ends).collect();
    let probability = ended.len() as f64 / f64::from(count);
    let of_ended = |value: fn(&Run) -> f64| Interval::of(ended.iter().map(|run| value(run)).collect());
    let of_all = |value: fn(&Run) -> f64| Interval::of(runs.iter().map(value).collect());
    ModePlan {
        mode: strategy,
        probability,
        converges: match probability {
            share if share >= SURE => Likelihood::Yes,
            share if share <= 1.0 - SURE => Likelihood::No,
            _ => Likelihood::Borderline,
        },
        total_ms: of_ended(|run| run.total * 1e3),
        downtime_ms: of_ended(|run| run.downtime * 1e3),
        bytes: of_ended(|run| run.bytes).or_else(|| of_all(|run| run.bytes)),
        encoding_cpu_ms: of_ended(|run| run.encode * 1e3).or_else(|| of_all(|run| run.encode * 1e3)),
        slowdown: of_ended(|run| run.lost).or_else(|| of_all(|run| run.lost)),
        passes: of_ended(|run| f64::from(run.passes)),
    }
}

fn recommend(modes: &[ModePlan; 4], settings: &Settings) -> (Strategy, String) {
    let [precopy, slowed, _, _] = modes;
    let limit = ms(settings.downtime_limit.as_secs_f64());
    let stop = |mode: &ModePlan| mode.downtime_ms.map_or_else(String::new, |down| ms(down.expected / 1e3));
    let within =
        settings.timeout.map_or_else(String::new, |time| format!(" within {}", ms(time.as_secs_f64())));
    match precopy.converges {
        Likelihood::Yes => {
            let why = format!(
                "precopy ends by itself{within} and stops the guest for about {} where {limit} are allowed; until then the guest \
                 stays on the source, where a lost link does not affect it",
                stop(precopy)
            );
            return (Strategy::Precopy, why);
        }
        Likelihood::Borderline => {
            let percent = precopy.probability * 100.0;
            let why = format!(
                "precopy may or may not end by itself{within} (about {percent:.0} % likely): hybrid sends the same passes first and continues \
                 with postcopy where they no longer shrink, so that it ends in either case"
            );
            return (Strategy::Hybrid, why);
        }
        Likelihood::No => {}
    }
    let lost = slowed.slowdown.map_or(1.0, |lost| lost.expected);
    if slowed.converges == Likelihood::Yes && lost <= BEARABLE && settings.on_timeout != OnTimeout::Postcopy {
        let why = format!(
            "the guest dirties too much for precopy to end{within} with {limit} of downtime; slowed by about {:.0} % it ends, and \
             the guest stays on the source until then, where a lost link does not affect it. Postcopy and hybrid need no slowing",
            lost * 100.0
        );
        return (Strategy::AutoConverge, why);
    }
    let why = format!(
        "the guest dirties too much for precopy to end{within} with {limit} of downtime: hybrid moves it after the passes that are \
         worthwhile, and the rest of its memory follows; until then the guest depends on the link"
    );
    (Strategy::Hybrid, why)
}

fn certainty(inputs: &Inputs, curve: &Curve, precopy: &ModePlan) -> String {
    let mut parts = vec![match precopy.converges {
        Likelihood::Yes | Likelihood::No => {
            format!("precopy ended in {:.0} % of {RUNS} simulated runs", precopy.probability * 100.0)
        }
        Likelihood::Borderline => format!(
            "borderline: precopy ended in {:.0} % of {RUNS} simulated runs, each with slightly varied figures",
            precopy.probability * 100.0
        ),
    }];
    parts.push(if inputs.link.measured {
        format!("the link was measured with a spread of {:.0} %", inputs.link.spread * 100.0)
    } else {
        "the link's rate was given, not measured".to_owned()
    });
    let pass = inputs.touched_pages as f64 * 4096.0 / inputs.link.bytes_per_s.max(1.0);
    if pass > 1.5 * curve.known_s {
        parts.push(format!(
            "the first pass takes {}, of which {} of the guest's writes were measured: the rest is extrapolated",
            ms(pass),
            ms(curve.known_s)
        ));
    }
    if curve.misfit > 0.15 {
        parts.push(format!(
            "the guest's writes fit no steady pattern (off by up to {:.0} %)",
            curve.misfit * 100.0
        ));
    }
    parts.push("the plan does not hold if the guest changes its behaviour".to_owned());
    parts.join("; ")
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
