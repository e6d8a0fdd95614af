//! The plan: each way of moving the guest, run on paper many times, and what follows from that.

use super::curve::Curve;
use super::inputs::Inputs;
use super::model::{Run, World};
use super::rng::Rng;
use crate::source::{AutoConverge, MigrationMode, OnTimeout, Settings};
use serde::Serialize;
use vmferry_protocol::source::readable_time as ms;

/// Runs of each way.
const RUNS: u32 = 200;
/// How far a curve of writes is off as a rule, beside what the fit says; beyond the windows that were seen, more.
const CURVE_SPREAD: f64 = 0.02;
const UNSEEN_SPREAD: f64 = 0.10;
/// How far fixed costs are off.
const FIXED_SPREAD: f64 = 0.15;
/// Error of the model with figures that are right, as `vmferry-bench plan` finds it.
const TOTAL_OFF: f64 = 0.04;
const DOWNTIME_OFF: f64 = 0.25;
/// What the steps of the switchover wait for processors, on both hosts, all together: the mean, in seconds.
const WAITS_S: f64 = 1.5e-3;
/// A share of runs from which on it is a yes, and up to which it is a no.
const SURE: f64 = 0.9;
/// Throttling that costs the guest more than this is not recommended where postcopy would do.
const BEARABLE: f64 = 0.5;

/// A way of moving a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Its memory first.
    Precopy,
    /// Its memory first, and the guest slowed as far as that takes.
    AutoConverge,
    /// The guest first.
    Postcopy,
    /// As much of its memory as is worth while, then the guest.
    Hybrid,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Precopy, Self::AutoConverge, Self::Postcopy, Self::Hybrid];

    /// The settings that it is.
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

    /// The way that `settings` ask for.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        match (settings.mode, settings.auto_converge) {
            (MigrationMode::Postcopy, _) => Self::Postcopy,
            (MigrationMode::Hybrid, _) => Self::Hybrid,
            (MigrationMode::Precopy, AutoConverge::Off) => Self::Precopy,
            (MigrationMode::Precopy, _) => Self::AutoConverge,
        }
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Precopy => "precopy",
            Self::AutoConverge => "auto-converge",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        })
    }
}

/// What is expected, and between what nine of ten runs lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Interval {
    /// One of twenty lies below.
    pub low: f64,
    /// The median.
    pub expected: f64,
    /// One of twenty lies above.
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

/// Whether it ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Chances {
    /// In nine of ten runs or more.
    Yes,
    /// In between.
    Borderline,
    /// In one of ten or less.
    No,
}

/// What is to be expected of one way.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModePlan {
    /// Which.
    pub mode: Way,
    /// The share of runs that ended by themselves, with the downtime that is allowed.
    pub probability: f64,
    /// The same as a word.
    pub converges: Chances,
    /// From the first connection to the guest running on the target, with all of its memory, in ms; of the runs that ended.
    pub total_ms: Option<Interval>,
    /// How long the guest stands still, in ms; of the runs that ended.
    pub downtime_ms: Option<Interval>,
    /// Bytes on the wire; of the runs that ended, or else of all.
    pub bytes: Option<Interval>,
    /// The share of its time that the guest loses meanwhile, the downtime not counted.
    pub slowdown: Option<Interval>,
    /// Passes before the guest is stopped.
    pub passes: Option<Interval>,
}

/// What is to be expected.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// Each way.
    pub modes: Vec<ModePlan>,
    /// The one that is recommended.
    pub recommended: Way,
    /// Why.
    pub reason: String,
    /// How sure all of this is, and what it depends on.
    pub certainty: String,
    /// What it was made of.
    pub inputs: Inputs,
}

impl Plan {
    /// Of what was measured, for a migration with `settings`.
    #[must_use]
    pub fn make(inputs: Inputs, settings: &Settings) -> Self {
        let content = inputs.touched_pages.saturating_sub(inputs.free_pages) as f64;
        let curve = Curve::fit(&inputs.curve, content.max(1.0), inputs.run_pages);
        let modes = Way::ALL.map(|way| try_out(way, &inputs, &curve, &way.settings(settings)));
        let (recommended, reason) = recommend(&modes, settings);
        let certainty = certainty(&inputs, &curve, &modes[0]);
        Self { modes: modes.into(), recommended, reason, certainty, inputs }
    }

    /// What is expected of `way`.
    #[must_use]
    pub fn of(&self, way: Way) -> Option<&ModePlan> {
        self.modes.iter().find(|mode| mode.mode == way)
    }
}

fn try_out(way: Way, inputs: &Inputs, curve: &Curve, settings: &Settings) -> ModePlan {
    let mut rng = Rng::new(0x7665_7264_6963_7421);
    let cap = settings.max_bandwidth.map_or(f64::INFINITY, |cap| cap as f64);
    let longest_seen = curve.known_s;
    let pass = inputs.touched_pages as f64 * 4096.0 / inputs.link.bytes_per_s.max(1.0);
    let unseen = if pass > 1.5 * longest_seen { UNSEEN_SPREAD } else { 0.0 };
    let spread = CURVE_SPREAD + curve.misfit / 3.0 + unseen;
    let runs: Vec<Run> = (0..RUNS)
        .map(|_| {
            let bandwidth = (inputs.link.bytes_per_s * rng.around(inputs.link.spread)).min(cap).max(1.0);
            let world = World {
                inputs,
                settings,
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
    let probability = ended.len() as f64 / f64::from(RUNS);
    let of_ended = |value: fn(&Run) -> f64| Interval::of(ended.iter().map(|run| value(run)).collect());
    let of_all = |value: fn(&Run) -> f64| Interval::of(runs.iter().map(value).collect());
    ModePlan {
        mode: way,
        probability,
        converges: match probability {
            share if share >= SURE => Chances::Yes,
            share if share <= 1.0 - SURE => Chances::No,
            _ => Chances::Borderline,
        },
        total_ms: of_ended(|run| run.total * 1e3),
        downtime_ms: of_ended(|run| run.downtime * 1e3),
        bytes: of_ended(|run| run.bytes).or_else(|| of_all(|run| run.bytes)),
        slowdown: of_ended(|run| run.lost).or_else(|| of_all(|run| run.lost)),
        passes: of_ended(|run| f64::from(run.passes)),
    }
}

fn recommend(modes: &[ModePlan; 4], settings: &Settings) -> (Way, String) {
    let [precopy, slowed, _, _] = modes;
    let limit = ms(settings.downtime_limit.as_secs_f64());
    let stop = |mode: &ModePlan| mode.downtime_ms.map_or_else(String::new, |down| ms(down.expected / 1e3));
    let within =
        settings.timeout.map_or_else(String::new, |time| format!(" within {}", ms(time.as_secs_f64())));
    match precopy.converges {
        Chances::Yes => {
            let why = format!(
                "precopy ends by itself{within} and stops the guest for about {} where {limit} are allowed; until then the guest \
                 stays where a lost link cannot hurt it",
                stop(precopy)
            );
            return (Way::Precopy, why);
        }
        Chances::Borderline => {
            let percent = precopy.probability * 100.0;
            let why = format!(
                "precopy may or may not end by itself{within} (about {percent:.0} % likely): hybrid sends the same passes first and goes on \
                 by postcopy where they no longer shrink, so that it ends in either case"
            );
            return (Way::Hybrid, why);
        }
        Chances::No => {}
    }
    let lost = slowed.slowdown.map_or(1.0, |lost| lost.expected);
    if slowed.converges == Chances::Yes && lost <= BEARABLE && settings.on_timeout != OnTimeout::Postcopy {
        let why = format!(
            "the guest dirties too much for precopy to end{within} with {limit} of downtime; slowed by about {:.0} % it ends, and \
             stays where a lost link cannot hurt it. Postcopy and hybrid need no slowing",
            lost * 100.0
        );
        return (Way::AutoConverge, why);
    }
    let why = format!(
        "the guest dirties too much for precopy to end{within} with {limit} of downtime: hybrid moves it after the passes that are \
         worth while, and the rest follows; while it does, the guest depends on the link"
    );
    (Way::Hybrid, why)
}

fn certainty(inputs: &Inputs, curve: &Curve, precopy: &ModePlan) -> String {
    let mut parts = vec![match precopy.converges {
        Chances::Yes => {
            format!("precopy ended in {:.0} % of {RUNS} runs on paper", precopy.probability * 100.0)
        }
        Chances::No => {
            format!("precopy ended in {:.0} % of {RUNS} runs on paper", precopy.probability * 100.0)
        }
        Chances::Borderline => format!(
            "borderline: precopy ended in {:.0} % of {RUNS} runs on paper, each with figures a little off",
            precopy.probability * 100.0
        ),
    }];
    parts.push(if inputs.link.measured {
        format!("the link was measured, to {:.0} %", inputs.link.spread * 100.0)
    } else {
        "the link's rate is what was said, not measured".to_owned()
    });
    let pass = inputs.touched_pages as f64 * 4096.0 / inputs.link.bytes_per_s.max(1.0);
    if pass > 1.5 * curve.known_s {
        parts.push(format!(
            "the first pass takes {}, of which {} of the guest's writes were seen: the rest is extrapolated",
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
    parts.push("a guest that changes what it does makes all of it wrong".to_owned());
    parts.join("; ")
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
