//! The verdict: what a migration will be like, said before anything moves, and while it does.
//!
//! [`measure`] looks at a guest that runs, [`probe`] at a link; [`Plan::make`] runs migrations on paper with what they found, by the
//! same policy that decides in earnest ([`Settings`](crate::Settings)), many times with figures that are a little off, as measurements are. So
//! each prediction is an interval, and "will it converge" is a share of these runs. While a migration runs, [`Standing`] judges it
//! after each pass, and [`Auto`] changes its course. Everything but the two measurements is pure.

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
pub use inputs::{Costs, Inputs, Link, Place, Protection};
pub use measure::{GuestCost, Looked, Windows, measure};
pub use predict::{Chances, Interval, ModePlan, Plan, Way};
pub use score::{Real, Score, score};
pub use vmferry_protocol::source::{Auto, Course, CourseChange, Expected, Remedy, Seen, Standing, Verdict};
