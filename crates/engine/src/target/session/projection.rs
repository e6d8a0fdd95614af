//! What tells two sessions apart in a model that looks at every reachable state.

use super::Session;
use super::fenced::Fenced;
use std::hash::{Hash, Hasher};

impl Session {
    /// Hashes what is decided by. Left out is what does not change in a run, and what is said of failures. Each field is named here:
    /// who adds one has to say what becomes of it.
    pub(crate) fn project(&self, hasher: &mut impl Hasher) {
        let Self {
            machine: _,
            tokens: _,
            state,
            accepted,
            barriers,
            received,
            last_pass,
            verify_pass,
            clean,
            sections,
            state_bytes,
            state_complete,
            mode: _,
            channels,
            lazy,
            lost,
            complete,
            renounced,
            fenced,
            load_us: _,
        } = self;
        state.hash(hasher);
        (accepted, barriers, received, last_pass, verify_pass, clean).hash(hasher);
        (sections.len(), state_bytes, state_complete, channels.count()).hash(hasher);
        (lazy, lost, complete.is_some(), renounced.is_some()).hash(hasher);
        let fenced = fenced.as_ref();
        fenced.map(|Fenced { vain, giving_back, again: _, why: _ }| (vain, giving_back)).hash(hasher);
    }
}
