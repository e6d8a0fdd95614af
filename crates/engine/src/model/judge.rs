//! Promises that must hold in every state, and at the end.

use super::step::Step;
use super::world::{World, has};
use crate::source::Outcome;
use crate::source::session::Phase;
use crate::target::session::Outcome as TargetOutcome;
use stateright::{Model, Property};

/// List of the promises with their texts. Each promise in the list is checked in every state.
macro_rules! promises {
    ($($promise:ident: $text:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(super) enum Promise {
            $($promise,)*
        }

        impl Promise {
            pub(super) fn properties<M: Model<State = World>>() -> Vec<Property<M>> {
                vec![$(Property::always($text, |_, world: &World| {
                    world.broken != Some(Self::$promise)
                }),)*]
            }
        }
    };
}

promises! {
    OneRunner: "never two runners",
    OneHolder: "disks are held by one host at a time",
    CommitsOnce: "one commit, with the guest stopped",
    StartsAfterCommit: "no start before the commit",
    StartsClaimed: "with an arbiter, no start without its grant",
    StartsOnce: "one load and one start",
    NotTakenBack: "resumed after the commit only if the target or the arbiter gives the guest back",
    NoPageMissed: "no page lost, stale or damaged",
    EachPageOnce: "each page once",
    KnownToRun: "a guest that runs nowhere has a named state",
    EndsRight: "reported outcomes are correct",
}

impl Step<'_> {
    /// Checks the promises after a step.
    pub(super) fn check(&mut self) {
        let world = &self.world;
        let (here, there) = (&world.here, &world.there);
        let two = here.running && there.running;
        let missed = there.running
            && there.lazy.is_some_and(|lazy| {
                (0..lazy.model.len())
                    .any(|page| has(lazy.present, page) && there.pages[page] != lazy.model[page])
            });
        let known = known(world);
        let right = !(here.ended() && there.ended()) || ends_right(world);
        self.promise(Promise::OneRunner, !two);
        self.promise(Promise::NoPageMissed, !missed);
        self.promise(Promise::KnownToRun, known);
        self.promise(Promise::EndsRight, right);
    }
}

/// Returns true if a living host reports where the guest is: the guest runs, or is being moved, or
/// has a named state.
fn known(world: &World) -> bool {
    let (here, there) = (&world.here, &world.there);
    if there.running && !(there.rest || there.outcome.is_some()) {
        return false;
    }
    if there.rest && !here.ended() && !there.crashed && !here.session.is.handed_over() {
        return false;
    }
    if here.running || there.running {
        return true;
    }
    let being_moved = !here.ended()
        && matches!(
            here.session.is.phase(),
            Phase::Switchover | Phase::Postcopy | Phase::PostcopyPaused | Phase::Unknown | Phase::Ended
        );
    let named = match &here.outcome {
        Some(Outcome::Unknown(_) | Outcome::Lost(_)) => true,
        // The owner died, or cannot start the guest and reports it.
        Some(Outcome::Completed) => there.crashed,
        Some(Outcome::Cancelled(_) | Outcome::Failed(_)) => here.resume_failed,
        None => here.crashed,
    };
    being_moved || named
}

/// Returns true if the outcomes that source and target report are correct. Both have ended.
fn ends_right(world: &World) -> bool {
    let (here, there) = (&world.here, &world.there);
    let moved = there.outcome == Some(TargetOutcome::Completed);
    if there.running != moved || (moved && !here.committed) {
        return false;
    }
    if let Some(lazy) = there.lazy.filter(|_| moved)
        && (lazy.lacking != 0 || there.pages != lazy.model)
    {
        return false;
    }
    let gone = here.crashed || there.crashed;
    let whole = here.outcome == Some(Outcome::Completed) && moved;
    let unknown = matches!(here.outcome, Some(Outcome::Unknown(_)));
    if there.rest && !gone && !whole {
        // No host died, but the guest's memory did not become complete.
        return false;
    }
    let renounced = here.committed && there.lazy.is_some() && !there.rest;
    if renounced && !gone && !there.stopped && unknown {
        return false;
    }
    if world.fence.is_some() && !gone && unknown {
        // No host died, but the arbiter has not decided.
        return false;
    }
    if world.calm && !whole {
        return false;
    }
    match &here.outcome {
        None => here.crashed,
        Some(Outcome::Completed) => !here.running && (moved || there.crashed),
        Some(Outcome::Unknown(_)) => here.committed && !here.running,
        Some(Outcome::Lost(_)) => here.committed && !here.running && there.started,
        Some(Outcome::Cancelled(_) | Outcome::Failed(_)) => !moved && (here.running || here.resume_failed),
    }
}
