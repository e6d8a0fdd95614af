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
        let (source, target) = (&world.source, &world.target);
        let two = source.running && target.running;
        let missed = target.running
            && target.paging.is_some_and(|paging| {
                (0..paging.model.len())
                    .any(|page| has(paging.present, page) && target.pages[page] != paging.model[page])
            });
        let known = known(world);
        let right = !(source.ended() && target.ended()) || ends_right(world);
        self.promise(Promise::OneRunner, !two);
        self.promise(Promise::NoPageMissed, !missed);
        self.promise(Promise::KnownToRun, known);
        self.promise(Promise::EndsRight, right);
    }
}

/// Returns true if a living host reports where the guest is: the guest runs, or is being moved, or
/// has a named state.
fn known(world: &World) -> bool {
    let (source, target) = (&world.source, &world.target);
    if target.running && !(target.in_postcopy || target.outcome.is_some()) {
        return false;
    }
    if target.in_postcopy && !source.ended() && !target.crashed && !source.session.is.handed_over() {
        return false;
    }
    if source.running || target.running {
        return true;
    }
    let being_moved = !source.ended()
        && matches!(
            source.session.is.phase(),
            Phase::Switchover | Phase::Postcopy | Phase::PostcopyPaused | Phase::Unknown | Phase::Ended
        );
    let named = match &source.outcome {
        Some(Outcome::Unknown(_) | Outcome::Lost(_)) => true,
        // The owner died, or cannot start the guest and reports it.
        Some(Outcome::Completed) => target.crashed,
        Some(Outcome::Cancelled(_) | Outcome::Failed(_)) => source.resume_failed,
        None => source.crashed,
    };
    being_moved || named
}

/// Returns true if the outcomes that source and target report are correct. Both have ended.
fn ends_right(world: &World) -> bool {
    let (source, target) = (&world.source, &world.target);
    let moved = target.outcome == Some(TargetOutcome::Completed);
    if target.running != moved || (moved && !source.committed) {
        return false;
    }
    if let Some(paging) = target.paging.filter(|_| moved)
        && (paging.missing != 0 || target.pages != paging.model)
    {
        return false;
    }
    let gone = source.crashed || target.crashed;
    let whole = source.outcome == Some(Outcome::Completed) && moved;
    let unknown = matches!(source.outcome, Some(Outcome::Unknown(_)));
    if target.in_postcopy && !gone && !whole {
        // No host died, but the guest's memory did not become complete.
        return false;
    }
    let renounced = source.committed && target.paging.is_some() && !target.in_postcopy;
    if renounced && !gone && !target.stopped && unknown {
        return false;
    }
    if world.arbiter.is_some() && !gone && unknown {
        // No host died, but the arbiter has not decided.
        return false;
    }
    if world.fault_free && !whole {
        return false;
    }
    match &source.outcome {
        None => source.crashed,
        Some(Outcome::Completed) => !source.running && (moved || target.crashed),
        Some(Outcome::Unknown(_)) => source.committed && !source.running,
        Some(Outcome::Lost(_)) => source.committed && !source.running && target.started,
        Some(Outcome::Cancelled(_) | Outcome::Failed(_)) => {
            !moved && (source.running || source.resume_failed)
        }
    }
}
