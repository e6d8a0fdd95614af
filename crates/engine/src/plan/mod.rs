//! Plans of migrations: predictions before a migration begins, and while it runs.
//!
//! [`measure`] measures a running guest, and [`probe`] measures a link. From these figures,
//! [`Plan::make`] simulates many migrations, with the policy that real migrations use
//! ([`Settings`](crate::Settings)). Because measurements have errors, each simulation varies the
//! figures slightly. Therefore each prediction is an interval, and the probability of convergence
//! is the share of simulations that converged.
//!
//! While a migration runs, [`PassState`] predicts after each pass whether the migration will
//! converge, and [`Auto`] decides whether it changes its course. All parts except the two
//! measurements are pure functions.

mod content;
mod curve;
mod encoding;
mod inputs;
mod measure;
mod model;
mod predict;
mod ring;
mod rng;
mod score;

pub use crate::source::probe;
pub use content::{Content, DeltaSample, EncodingSample};
pub use curve::CurvePoint;
pub use encoding::{CodecPlan, EncodingAdvice};
pub use inputs::{Costs, Inputs, Link, MemoryPart, Protection};
pub use measure::{GuestCost, GuestMeasurement, Windows, measure};
pub use predict::{Interval, Likelihood, ModePlan, Plan, Strategy};
pub use score::{ActualFigures, Score, score};
pub use vmferry_protocol::source::{
    Auto, Course, CourseChange, Expected, Observations, PassState, Remedy, Verdict,
};
