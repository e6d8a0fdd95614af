//! Projection of sessions for a model that visits every reachable state.

use super::renounced::Renounced;
use super::{Memory, Session, Shared, State};
use std::hash::{Hash, Hasher};
use std::mem::discriminant;

impl Session {
    /// Hashes the fields that affect decisions.
    ///
    /// Each field is named, so that a new field does not compile before its treatment is decided
    /// here. Fields that do not change in a run and reasons of failures are left out.
    pub fn project(&self, hasher: &mut impl Hasher) {
        let Self { shared, state } = self;
        let Shared {
            machine: _,
            tokens: _,
            fenced: _,
            load_us: _,
            wants_trial: _,
            wanted,
            mode: _,
            channels,
            accepted,
        } = shared;
        (wanted, channels.count(), accepted).hash(hasher);
        discriminant(state).hash(hasher);
        match state {
            State::Setup(setup) => setup.hash(hasher),
            State::Receiving(receiving) => receiving.project(hasher),
            State::Ready(ready) => ready.project(hasher),
            State::Claiming(claiming) => claiming.project(hasher),
            State::Starting(starting) => starting.project(hasher),
            State::Renounced(Renounced { why: _, giving_back: _, source_asks }) => source_asks.hash(hasher),
            State::Postcopy(postcopy) => postcopy.project(hasher),
            State::Ended { complete } => complete.hash(hasher),
        }
    }
}

impl Memory {
    pub(super) fn project(&self, hasher: &mut impl Hasher) {
        discriminant(self).hash(hasher);
        if let Self::Missing { all_here } = self {
            all_here.is_some().hash(hasher);
        }
    }
}
