//! Steps that are possible in a state.

use super::Protocol;
use super::flaw::Flaw;
use super::step::Operation;
use super::world::{DialState, Link, PAGES, ToTargetCargo, World, has};
use crate::source::MigrationMode;
use crate::source::session::Phase;

impl Protocol {
    /// Adds the steps that are possible in `world`, without faults within a step.
    pub(super) fn operations(&self, world: &World, operations: &mut Vec<Operation>) {
        let (source, target) = (&world.source, &world.target);
        if source.ended() && target.ended() {
            return;
        }
        if !source.ended() {
            self.source_operations(world, operations);
        }
        if !target.ended() {
            self.target_operations(world, operations);
        }
        // A host refuses the hello of a lost link whose target has ended.
        for (at, link) in world.links.iter().enumerate() {
            if !target.ended() && link.down.front() == Some(&ToTargetCargo::Back) {
                operations.push(Operation::TargetIsAsked(at));
            }
        }
        if let Some(arbiter) = &world.arbiter {
            let fates = arbiter.fates(world.faults_left > 0);
            operations.extend(fates.into_iter().map(|(request, fate)| Operation::Arbiter(request, fate)));
            if self.flaw == Some(Flaw::LeaseRunsOut) && arbiter.can_lapse() {
                operations.push(Operation::LeaseEnds);
            }
        }
        if world.faults_left > 0 {
            if !source.ended() {
                operations.push(Operation::CrashSource);
            }
            if !target.ended() {
                operations.push(Operation::CrashTarget);
            }
            let current = &world.links[source.link];
            if !current.cut && !source.ended() && source.connected {
                operations.push(Operation::Cut);
                if !current.pages_cut && source.dial == DialState::No {
                    operations.push(Operation::CutPages);
                }
            }
        }
    }

    fn source_operations(&self, world: &World, operations: &mut Vec<Operation>) {
        let (source, link) = (&world.source, &world.links[world.source.link]);
        if source.running && source.writes_left > 0 {
            operations.extend((0..PAGES).map(Operation::Writes));
        }
        if source.job.is_some() {
            operations.push(Operation::Sends);
        }
        if !link.requests.is_empty() && source.connected && source.dial == DialState::No {
            operations.push(Operation::Serves);
        }
        if source.todo.is_some() {
            operations.push(Operation::SourceActs);
            return;
        }
        let gone = world.target.ended();
        match source.dial {
            DialState::Wanted if gone => return operations.push(Operation::DialFails),
            DialState::Wanted => return operations.push(Operation::Dials),
            DialState::Said | DialState::No => {}
        }
        if source.connected && !link.up.is_empty() {
            operations.push(Operation::SourceReceives);
        }
        let closed = link.target_closed && link.up.is_empty();
        // The hello gets no answer, because the target has ended.
        let refused = source.dial == DialState::Said && gone;
        if source.connected
            && (link.cut || closed || refused || (link.pages_cut && source.dial == DialState::No))
        {
            operations.push(Operation::SourceNoticesLoss);
        }
        if source.dial == DialState::No {
            self.operator_operations(world, operations);
        }
    }

    fn operator_operations(&self, world: &World, operations: &mut Vec<Operation>) {
        let (source, gone) = (&world.source, world.target.ended());
        let session = &source.session.is;
        let phase = session.phase();
        let before = matches!(phase, Phase::Setup | Phase::Precopy);
        let passes = matches!(self.mode, MigrationMode::Precopy | MigrationMode::Hybrid);
        if before && !source.timed_out && passes {
            operations.push(Operation::TickAtTimeout);
        }
        let postcopy = matches!(self.mode, MigrationMode::Postcopy | MigrationMode::Hybrid);
        if before && !source.switch_requested && postcopy {
            operations.push(Operation::SwitchNow);
        }
        if world.faults_left > 0 || session.is_waiting() {
            operations.push(Operation::TickMuchLater);
        }
        if world.faults_left > 0 {
            if before || phase == Phase::Switchover {
                operations.push(Operation::Cancel);
            }
            if phase == Phase::Postcopy {
                operations.push(Operation::Pause);
            }
        }
        match session.interrupted() {
            Some((false, _)) if !source.connected => {
                if !source.in_vain && phase != Phase::Unknown {
                    operations.push(Operation::TickSoon);
                }
                operations.push(Operation::TickMuchLater);
            }
            // With an arbiter, the source repeats its requests without a request of the operator.
            Some((true, _)) if !gone && !source.in_vain && phase != Phase::Unknown => {
                operations.push(Operation::Recover)
            }
            _ => {}
        }
        if session.interrupted().is_some() && gone && world.arbiter_is_idle() {
            operations.push(Operation::Abandon);
        }
    }

    fn target_operations(&self, world: &World, operations: &mut Vec<Operation>) {
        let (target, link) = (&world.target, &world.links[world.target.link]);
        if let Some(paging) = &target.paging {
            for page in 0..PAGES {
                if has(paging.present, page) {
                    if target.running && target.writes_left > 0 {
                        operations.push(Operation::WritesOnTarget(page));
                    }
                } else if !has(paging.waits, page) && target.touches_left > 0 {
                    operations.push(Operation::Touches(page));
                }
            }
        }
        // Messages that were received before the link was closed are still handled, unless the
        // close ended the threads too.
        if matches!(link.down.front(), Some(ToTargetCargo::Message(_))) {
            operations.push(Operation::TargetReceives);
        }
        let listens = target.connected;
        if listens && !link.bulk.is_empty() {
            operations.push(Operation::TargetTakesBulk);
        }
        if listens && !link.urgent.is_empty() {
            operations.push(Operation::TargetTakesUrgent);
        }
        let late = |link: &Link| !link.bulk.is_empty() || !link.urgent.is_empty();
        if self.flaw == Some(Flaw::RetoldEarly) && world.links[..target.link].iter().any(late) {
            operations.push(Operation::TargetTakesLate);
        }
        if target.connected {
            if link.cut || (link.source_closed && link.down.is_empty()) || world.faults_left > 0 {
                operations.push(Operation::TargetNoticesLoss);
            }
            let through = link.source_closed && link.bulk.is_empty() && link.urgent.is_empty();
            if !link.noticed && (link.cut || link.pages_cut || through) {
                operations.push(Operation::ThreadNoticesLoss);
            }
        }
        if target.loss_noticed {
            operations.push(Operation::TargetLearnsOfLoss);
        }
        if target.last_came {
            operations.push(Operation::TargetLearnsOfLast);
        }
        if world.faults_left > 0 && !target.session.is.renounced() {
            operations.push(Operation::Stop);
        }
        let lost = target.in_postcopy && target.session.is.suspended();
        if world.source.ended() && (target.session.is.renounced() || lost) {
            operations.push(Operation::GiveUp);
        }
    }
}
