//! What tells two sessions apart in a model that looks at every reachable state, and in which the clock is no number.

use super::fenced::Fenced;
use super::{Session, postcopy};
use crate::source::events::Outcome;
use std::hash::{Hash, Hasher};
use std::time::Duration;

impl Session {
    /// Forgets when anything was, and hashes the rest.
    ///
    /// What a session does depends on time only by `now - stamp > limit`. A model that may let any limit run out at any moment,
    /// or not, whatever the stamps are, allows for more than can happen, and never for less; so stamps need not be told apart. Each
    /// field is named here: who adds one has to say what becomes of it.
    ///
    /// Left out is what nothing is decided by (statistics, and why something failed), and what does not change in a run.
    pub(crate) fn project(&mut self, hasher: &mut impl Hasher) {
        let Self {
            settings: _,
            state,
            started,
            policy,
            pass,
            pass_began,
            pass_bytes,
            remaining,
            fixed,
            save,
            state_bytes: _,
            expected_load,
            listing,
            settle,
            rehearsed,
            rehearse_after: _,
            busy,
            put_off: _,
            put_off_for: _,
            // It is judged by how long that was, where there is a bandwidth to judge by.
            rested: _,
            rests_since,
            after_rest,
            harvest_began,
            last_harvest,
            switch_wanted,
            postcopy_wanted,
            postcopy_advised,
            lazy,
            lacking,
            left_before,
            // Whether the last link was of any use decides for how long it is tried again, and nothing else.
            recovery:
                postcopy::Recovery {
                    running,
                    since,
                    pause,
                    waiting,
                    why: _,
                    interruptions: _,
                    left: _,
                    stalled: _,
                    resumed,
                },
            figures: _,
            writers,
            shares,
            judged: _,
            resends,
            again,
            last_ping,
            round_trip,
            ended,
            // That is told, and nothing comes after it.
            stands_still: _,
            pages: _,
            comparing,
            last_step,
            stopped,
            suspects_resent: _,
            verification,
            load_time: _,
            start_time: _,
            target_cpu: _,
            fenced,
        } = self;
        for stamp in [
            started,
            pass_began,
            rehearsed,
            rests_since,
            settle,
            harvest_began,
            last_step,
            stopped,
            since,
            pause,
            resumed,
            &mut last_ping.1,
        ] {
            *stamp = Duration::ZERO;
        }
        last_ping.0 = 0;
        // Nothing takes any time in a model, so nothing was measured: no rate, and no decision that rests on one.
        assert!(policy.bandwidth().is_none() && shares.is_empty() && *round_trip == Duration::ZERO);
        assert!(expected_load.is_none() && [*save, *listing] == [Duration::ZERO; 2]);
        assert!(*last_harvest == Duration::ZERO && fixed.is_none_or(|fixed| fixed == Duration::ZERO));
        state.hash(hasher);
        (pass, pass_bytes, remaining, fixed.is_some(), lacking, left_before).hash(hasher);
        (switch_wanted, postcopy_wanted, postcopy_advised, busy.is_some(), lazy, running, waiting, writers)
            .hash(hasher);
        after_rest.hash(hasher);
        (resends, comparing).hash(hasher);
        again.iter().for_each(|run| (run.region, run.first, run.count).hash(hasher));
        verification.as_ref().map(|found| (found.pages, found.mismatched)).hash(hasher);
        ended.as_ref().map(std::mem::discriminant::<Outcome>).hash(hasher);
        // How long until it asks again decides nothing, nor does what the fence said last: that is for people.
        let fenced = fenced.as_ref();
        fenced.map(|Fenced { asking, claimed, again: _, answer: _ }| (asking, claimed)).hash(hasher);
    }
}
