//! Projection of sessions for a model checker that visits every reachable state, and whose clock
//! has no numbers.
//!
//! A session depends on time only in comparisons of the form `now - stamp > limit`. In the model,
//! each such comparison may be true or false at any moment, whatever the stamps are. Therefore the
//! model allows all behaviour that is possible in reality, and states that differ only in their
//! stamps need not be distinguished.

use super::context::{Link, SourceContext};
use super::ending::Resuming;
use super::postcopy::Postcopy;
use super::{Session, State};
use crate::source::events::Outcome;
use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::time::Duration;

impl Session {
    /// Clears all time stamps, and hashes the rest.
    ///
    /// Each field is named, so that the code does not compile with a new field until its treatment
    /// is decided here. Fields that affect no decision (figures and reasons of failures), and
    /// fields that do not change in a run, are left out.
    pub fn project(&mut self, hasher: &mut impl Hasher) {
        let Self { context, state } = self;
        context.project(hasher);
        match state {
            State::Setup(_) | State::Committed(_) => {}
            State::Precopy(precopy) => precopy.project(hasher),
            State::Stopping(stopping) => stopping.project(hasher),
            State::Switchover(switchover) => switchover.project(hasher),
            State::Claiming(claiming) => claiming.project(hasher),
            State::Postcopy(Postcopy { history }) => history.project(),
            State::Recovery(recovery) => recovery.project(hasher),
            State::Resuming(Resuming { outcome }) => discriminant::<Outcome>(outcome).hash(hasher),
            // Nothing follows the end.
            State::Ended(ended) => ended.outcome.as_ref().map(discriminant::<Outcome>).hash(hasher),
        }
        // Hashed after the stamps were cleared.
        self.state.step().hash(hasher);
        self.handed_over().hash(hasher);
    }
}

impl SourceContext {
    fn project(&mut self, hasher: &mut impl Hasher) {
        let Self {
            settings: _,
            pages: _,
            started,
            last_step,
            pass,
            urgency,
            link: Link { rate, last_ping, round_trip },
            target_load,
            wants_trial,
            streams: _,
            deferral,
            claim,
            summary,
        } = self;
        // Nothing takes time in a model, so nothing was measured, and no decision depends on a
        // rate.
        assert!(rate.bandwidth().is_none() && round_trip.is_zero() && target_load.is_none());
        for stamp in [started, last_step, &mut last_ping.1] {
            *stamp = Duration::ZERO;
        }
        last_ping.0 = 0;
        (pass, urgency, wants_trial).hash(hasher);
        summary.verification.as_ref().map(|found| (found.pages, found.mismatched)).hash(hasher);
        deferral.project(hasher);
        if let Some(claim) = claim {
            claim.project(hasher);
        }
    }
}
