//! Projection of sessions for a model checker that visits every reachable state.

use super::renounced::Renounced;
use super::{Memory, Session, State, TargetContext};
use std::hash::{Hash, Hasher};
use std::mem::discriminant;

impl Session {
    /// Hashes the fields that affect decisions.
    ///
    /// Each field is named, so that the code does not compile with a new field until its treatment
    /// is decided here. Fields that do not change in a run, and reasons of failures, are left out.
    pub fn project(&self, hasher: &mut impl Hasher) {
        let Self { context, state } = self;
        let TargetContext {
            machine: _,
            tokens: _,
            with_arbiter: _,
            load_us: _,
            wants_trial: _,
            takes_memory: _,
            wanted,
            mode: _,
            channels,
            accepted,
        } = context;
        (wanted, channels.count(), accepted).hash(hasher);
        discriminant(state).hash(hasher);
        match state {
            State::Setup(setup) => setup.hash(hasher),
            State::Receiving(receiving) => receiving.project(hasher),
            State::Ready(ready) => ready.project(hasher),
            State::Claiming(claiming) => claiming.project(hasher),
            State::Starting(starting) => starting.project(hasher),
            State::Renounced(Renounced { why: _, giving_back: _, accepts_new_link }) => {
                accepts_new_link.hash(hasher)
            }
            State::Postcopy(postcopy) => postcopy.project(hasher),
            State::Ended { complete } => complete.hash(hasher),
        }
    }
}

impl Memory {
    pub(super) fn project(&self, hasher: &mut impl Hasher) {
        discriminant(self).hash(hasher);
        if let Self::Missing { all_arrived } = self {
            all_arrived.is_some().hash(hasher);
        }
    }
}
