//! Steps that are possible in a state.

use super::Protocol;
use super::flaw::Flaw;
use super::step::Deed;
use super::world::{Dial, Down, Link, PAGES, World, has};
use crate::source::MigrationMode;
use crate::source::session::Phase;

impl Protocol {
    /// Adds the steps that are possible in `world`, without faults within a step.
    pub(super) fn deeds(&self, world: &World, deeds: &mut Vec<Deed>) {
        let (here, there) = (&world.here, &world.there);
        if here.ended() && there.ended() {
            return;
        }
        if !here.ended() {
            self.deeds_here(world, deeds);
        }
        if !there.ended() {
            self.deeds_there(world, deeds);
        }
        // A host refuses the hello of a lost link whose target has ended.
        for (at, link) in world.links.iter().enumerate() {
            if !there.ended() && link.down.front() == Some(&Down::Back) {
                deeds.push(Deed::TargetIsAsked(at));
            }
        }
        if let Some(fence) = &world.fence {
            let fates = fence.fates(world.faults_left > 0);
            deeds.extend(fates.into_iter().map(|(word, fate)| Deed::Fence(word, fate)));
            if self.flaw == Some(Flaw::LeaseRunsOut) && fence.can_lapse() {
                deeds.push(Deed::LeaseEnds);
            }
        }
        if world.faults_left > 0 {
            if !here.ended() {
                deeds.push(Deed::CrashSource);
            }
            if !there.ended() {
                deeds.push(Deed::CrashTarget);
            }
            let current = &world.links[here.link];
            if !current.cut && !here.ended() && here.connected {
                deeds.push(Deed::Cut);
                if !current.pages_cut && here.dial == Dial::No {
                    deeds.push(Deed::CutPages);
                }
            }
        }
    }

    fn deeds_here(&self, world: &World, deeds: &mut Vec<Deed>) {
        let (here, link) = (&world.here, &world.links[world.here.link]);
        if here.running && here.writes_left > 0 {
            deeds.extend((0..PAGES).map(Deed::Writes));
        }
        if here.job.is_some() {
            deeds.push(Deed::Sends);
        }
        if !link.requests.is_empty() && here.connected && here.dial == Dial::No {
            deeds.push(Deed::Serves);
        }
        if here.todo.is_some() {
            deeds.push(Deed::SourceActs);
            return;
        }
        let gone = world.there.ended();
        match here.dial {
            Dial::Wanted if gone => return deeds.push(Deed::DialFails),
            Dial::Wanted => return deeds.push(Deed::Dials),
            Dial::Said | Dial::No => {}
        }
        if here.connected && !link.up.is_empty() {
            deeds.push(Deed::SourceHears);
        }
        let closed = link.target_closed && link.up.is_empty();
        // The hello gets no answer, because the target has ended.
        let refused = here.dial == Dial::Said && gone;
        if here.connected && (link.cut || closed || refused || (link.pages_cut && here.dial == Dial::No)) {
            deeds.push(Deed::SourceNoticesLoss);
        }
        if here.dial == Dial::No {
            self.deeds_of_people_here(world, deeds);
        }
    }

    fn deeds_of_people_here(&self, world: &World, deeds: &mut Vec<Deed>) {
        let (here, gone) = (&world.here, world.there.ended());
        let session = &here.session.is;
        let phase = session.phase();
        let before = matches!(phase, Phase::Setup | Phase::Precopy);
        if before && !here.timed_out && self.mode != MigrationMode::Postcopy {
            deeds.push(Deed::TickAtTimeout);
        }
        if before && !here.switch_asked && self.mode != MigrationMode::Precopy {
            deeds.push(Deed::SwitchNow);
        }
        if world.faults_left > 0 || session.is_resting() {
            deeds.push(Deed::TickMuchLater);
        }
        if world.faults_left > 0 {
            if before || phase == Phase::Switchover {
                deeds.push(Deed::Cancel);
            }
            if phase == Phase::Postcopy {
                deeds.push(Deed::Pause);
            }
        }
        match session.interrupted() {
            Some((false, _)) if !here.connected => {
                if !here.in_vain && phase != Phase::Unknown {
                    deeds.push(Deed::TickSoon);
                }
                deeds.push(Deed::TickMuchLater);
            }
            // With an arbiter, the source repeats its requests without a request of the operator.
            Some((true, _)) if !gone && !here.in_vain && phase != Phase::Unknown => deeds.push(Deed::Recover),
            _ => {}
        }
        if session.interrupted().is_some() && gone && world.fence_is_silent() {
            deeds.push(Deed::Abandon);
        }
    }

    fn deeds_there(&self, world: &World, deeds: &mut Vec<Deed>) {
        let (there, link) = (&world.there, &world.links[world.there.link]);
        if let Some(lazy) = &there.lazy {
            for page in 0..PAGES {
                if has(lazy.present, page) {
                    if there.running && there.writes_left > 0 {
                        deeds.push(Deed::WritesThere(page));
                    }
                } else if !has(lazy.waits, page) && there.touches_left > 0 {
                    deeds.push(Deed::Touches(page));
                }
            }
        }
        // Messages that were received before the link was closed are still handled, unless the
        // close ended the threads too.
        if matches!(link.down.front(), Some(Down::Message(_))) {
            deeds.push(Deed::TargetHears);
        }
        let listens = there.connected;
        if listens && !link.bulk.is_empty() {
            deeds.push(Deed::TargetTakesBulk);
        }
        if listens && !link.urgent.is_empty() {
            deeds.push(Deed::TargetTakesUrgent);
        }
        let late = |link: &Link| !link.bulk.is_empty() || !link.urgent.is_empty();
        if self.flaw == Some(Flaw::RetoldEarly) && world.links[..there.link].iter().any(late) {
            deeds.push(Deed::TargetTakesLate);
        }
        if there.connected {
            if link.cut || (link.source_closed && link.down.is_empty()) || world.faults_left > 0 {
                deeds.push(Deed::TargetNoticesLoss);
            }
            let through = link.source_closed && link.bulk.is_empty() && link.urgent.is_empty();
            if !link.noticed && (link.cut || link.pages_cut || through) {
                deeds.push(Deed::ThreadNoticesLoss);
            }
        }
        if there.loss_noticed {
            deeds.push(Deed::TargetHearsOfLoss);
        }
        if there.last_came {
            deeds.push(Deed::TargetHearsOfLast);
        }
        if world.faults_left > 0 && !there.session.is.renounced() {
            deeds.push(Deed::Stop);
        }
        let lost = there.rest && there.session.is.suspended();
        if world.here.ended() && (there.session.is.renounced() || lost) {
            deeds.push(Deed::GiveUp);
        }
    }
}
