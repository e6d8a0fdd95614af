//! Plans of migrations: predictions before a migration moves anything, and while it runs.
//!
//! [`measure`] measures a running guest, and [`probe`] measures a link. [`Plan::make`] simulates
//! migrations with these figures many times, with the policy that real migrations use
//! ([`Settings`](crate::Settings)). Each simulation varies the figures slightly, because
//! measurements have errors. Therefore each prediction is an interval, and the probability of
//! convergence is a share of the simulations. While a migration runs, [`PassState`] judges it after
//! each pass, and [`Auto`] changes its course. All parts except the two measurements are pure
//! functions.

mod curve;
mod inputs;
mod measure;
mod model;
mod predict;
mod ring;
mod rng;
mod score;

pub use crate::source::probe;
pub use curve::CurvePoint;
pub use inputs::{Costs, Inputs, Link, MemoryPart, Protection};
pub use measure::{GuestCost, GuestMeasurement, Windows, measure};
pub use predict::{Interval, Likelihood, ModePlan, Plan, Strategy};
pub use score::{ActualFigures, Score, score};
pub use vmferry_protocol::source::{
    Auto, Course, CourseChange, Expected, Observations, PassState, Remedy, Verdict,
};
