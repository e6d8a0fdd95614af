//! Host of the target in the model: performs the actions of the production session, and reports
//! their events.
//!
//! The effect of each action and the event that answers it are defined in [`Step::perform_target`]
//! only.

use super::Flaw;
use super::arbiter::ModelArbiter;
use super::judge::Promise;
use super::source::failure;
use super::step::{Operation, Step, StepFault};
use super::world::{
    ALL, Cargo, DAMAGED, Fate, Keyed, PAGES, Paging, REGION, ToSourceCargo, ToTargetCargo, has, mask_of,
    pages, piece_of, runs_of,
};
use crate::arbiter::Side;
use crate::run::{self, ActionQueue};
use crate::source::MigrationMode;
use crate::target::session::{Action, Event, Outcome, Session, Tokens};
use std::time::Duration;
use vmferry_wire::{PagingFigures, RegionPage, ToSource, ToTarget, Token};

pub(super) fn tokens() -> Tokens {
    Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) }
}

impl Step<'_> {
    pub(super) fn happen_on_target(&mut self, operation: Operation) {
        match operation {
            Operation::TargetReceives => {
                if let Some(ToTargetCargo::Message(message)) = self.target_link().down.pop_front() {
                    self.target_receives((*message.is).clone());
                }
            }
            Operation::TargetTakesBulk => {
                let cargo = self.target_link().bulk.pop_front();
                cargo.into_iter().for_each(|cargo| self.take_cargo(cargo));
            }
            Operation::TargetTakesUrgent => {
                let cargo = self.target_link().urgent.pop_front();
                cargo.into_iter().for_each(|cargo| self.take_cargo(cargo));
            }
            Operation::TargetTakesLate => {
                let before = &mut self.world.links[..self.world.target.link];
                let late = before
                    .iter_mut()
                    .find_map(|link| link.bulk.pop_front().or_else(|| link.urgent.pop_front()));
                if let Some(Cargo::Page { page, content }) = late {
                    self.place(page, content);
                }
            }
            Operation::TargetNoticesLoss => {
                let link = self.target_link();
                let silent = !(link.cut || (link.source_closed && link.down.is_empty()));
                if silent {
                    // The source is alive, and its messages do not arrive.
                    self.fault();
                }
                let link = self.target_link();
                link.down.clear();
                if link.cut {
                    link.forget_pages();
                }
                self.abandon();
                self.target_loses();
            }
            Operation::ThreadNoticesLoss => {
                self.target_link().forget_pages();
                self.target_link().noticed = true;
                self.abandon();
                self.world.target.loss_noticed = true;
            }
            Operation::TargetLearnsOfLoss => {
                self.world.target.loss_noticed = false;
                let session = &self.world.target.session.is;
                // Like the driver: in these states the channel is not needed any more.
                if !session.memory_complete() && !session.renounced() && !session.complete() {
                    self.target_loses();
                }
            }
            Operation::TargetLearnsOfLast => {
                self.world.target.last_came = false;
                self.tell_target(Event::MissingArrived(PagingFigures::default()));
            }
            Operation::TargetIsAsked(link) => self.target_is_asked(link),
            Operation::Stop => {
                self.fault();
                self.stop();
            }
            Operation::GiveUp => self.target_gives_up(),
            other => unreachable!("{other:?} is not the target's"),
        }
    }

    fn target_loses(&mut self) {
        self.tell_target(Event::PeerLost("the link is lost".into()));
    }

    /// Runs the production loop with `event`, until no action is left.
    pub(super) fn tell_target(&mut self, event: Event) {
        let mut host =
            AtTarget { step: self, action_queue: ActionQueue::new(Vec::new()), event: Some(event) };
        while let Ok(outcome) = run::advance(&mut host) {
            if host.step.target_dies() {
                return;
            }
            host.step.perform_target(Action::Finish(outcome));
            host.step.at += 1;
        }
    }

    /// Returns true if the target has ended, or dies before its next action.
    fn target_dies(&mut self) -> bool {
        if self.world.target.ended() {
            return true;
        }
        let dies = self.at > 0 && self.injects(StepFault::TargetDiesBefore(self.at));
        if dies {
            self.crash_target();
        }
        dies
    }

    fn handle_target(&mut self, event: Event) -> Vec<Action> {
        let session = &mut self.world.target.session;
        let mut actions =
            session.change(|session| session.handle(event), |session, hash| session.project(hash));
        if self.flaw(Flaw::EndsRenounced) && self.world.target.session.is.renounced() {
            actions.push(Action::Finish(Outcome::Failed(failure())));
        }
        actions
    }

    /// Performs an action of the target. The effects of all actions are defined here only.
    fn perform_target(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => return self.target_sends(message),
            Action::AskArbiter { request, .. } => self.ask_arbiter(Side::Target, request),
            Action::AwaitChannels(_) => {}
            Action::PrepareDemandPaging => {
                let failed = self.target_step_fails();
                return Some(if failed { Event::LocalFailure(failure()) } else { Event::Prepared });
            }
            Action::TakeMissing(piece) => self.world.target.collected |= mask_of(&piece),
            Action::BeginDemandPaging { pages } => return self.begin_paging(pages),
            Action::NameMissing => return self.retell(),
            Action::RequestAgain => self.request_again(),
            Action::Disconnect => self.disconnect_target(),
            Action::EndDemandPaging => {
                let paging = self.paging();
                (paging.ended, paging.present) = (true, ALL);
            }
            Action::CountDigestMismatches { pass } => {
                let blind = self.flaw(Flaw::BlindToDamage);
                let mismatched = if blind { 0 } else { self.world.target.mismatched };
                let (pages, runs) = (mismatched.count_ones().into(), runs_of(mismatched));
                return Some(Event::DigestMismatches { pass, pages, runs });
            }
            Action::CountMismatches => {
                let target = &self.world.target;
                let name = |page| RegionPage { region: REGION, page: page as u64 };
                let samples: Vec<_> = pages(target.differ).map(name).collect();
                return Some(Event::Compared {
                    pages: target.compared.into(),
                    mismatched: samples.len() as u64,
                    samples,
                });
            }
            Action::Load(_) => return Some(self.load()),
            Action::OpenStream(_) | Action::WriteStream { .. } | Action::FinishStream { .. } => {
                unreachable!("no guest of the model has streams of device state")
            }
            Action::TakeMemory(_) => {
                if self.target_step_fails() {
                    return Some(Event::LocalFailure(failure()));
                }
                self.world.target.shares = true;
                return Some(Event::MemoryTaken);
            }
            Action::PrepareVm(_) => {
                let failed = self.target_step_fails();
                return Some(if failed {
                    Event::LocalFailure(failure())
                } else {
                    Event::VmPrepared { load_us: None }
                });
            }
            Action::Start { .. } => return Some(self.start_when_told()),
            Action::Finish(Outcome::Running) => self.world.target.in_postcopy = true,
            Action::Finish(outcome) => {
                self.world.target.outcome = Some(outcome);
                self.close_target();
            }
        }
        None
    }

    fn target_step_fails(&mut self) -> bool {
        self.injects(StepFault::StepFails(self.at))
    }

    fn target_sends(&mut self, message: ToSource) -> Option<Event> {
        if matches!(message, ToSource::Pong(_)) {
            return None;
        }
        let dead = self.target_link().cut || self.target_link().source_closed;
        if !self.world.target.connected || (dead && self.injects(StepFault::SendFails(self.at))) {
            return Some(Event::PeerLost("the channel is closed".into()));
        }
        if !dead {
            self.target_link().up.push_back(ToSourceCargo::Message(Keyed::message(message)));
        }
        None
    }

    fn target_receives(&mut self, message: ToTarget) {
        if message == ToTarget::Commit
            && self.flaw(Flaw::StartsRenounced)
            && self.world.target.session.is.renounced()
        {
            return self.start();
        }
        self.tell_target(Event::Message(message));
    }

    /// Takes pages as the channel's own thread does. Other cargo is for the session.
    fn take_cargo(&mut self, cargo: Cargo) {
        match cargo {
            Cargo::Hello => self.tell_target(Event::ChannelUp),
            Cargo::Page { page, content } if self.world.target.paging.is_some() => self.place(page, content),
            Cargo::Page { page, content } => {
                let frozen = self.world.target.loaded;
                self.promise(Promise::NoPageMissed, !frozen);
                let target = &mut self.world.target;
                target.pages[page] = content;
                target.mismatched = target.mismatched & !(1 << page) | u8::from(content == DAMAGED) << page;
            }
            Cargo::Digests { of, contents } => {
                let target = &mut self.world.target;
                for page in pages(of) {
                    target.compared += 1;
                    target.differ |= u8::from(target.pages[page] != contents[page]) << page;
                }
            }
            Cargo::Barrier(pass) => self.tell_target(Event::Barrier { channel: 0, pass }),
        }
    }

    fn load(&mut self) -> Event {
        let first = !std::mem::replace(&mut self.world.target.loaded, true);
        self.promise(Promise::StartsOnce, first);
        if self.flaw(Flaw::StartsAtLoad) {
            self.start();
        }
        if self.flaw(Flaw::WritesAtLoad) {
            self.write(0);
        }
        if self.world.target.paging.is_some_and(|paging| paging.fate == Fate::Abandoned) {
            return Event::PeerLost("while the state was loaded".into());
        }
        if self.target_step_fails() { Event::LocalFailure(failure()) } else { Event::Loaded { micros: 0 } }
    }

    fn start_when_told(&mut self) -> Event {
        if let Some(paging) = &mut self.world.target.paging {
            if paging.fate == Fate::Abandoned && self.model.flaw != Some(Flaw::StartsAbandoned) {
                return Event::StartFailed(failure());
            }
            paging.fate = Fate::Committed;
        }
        if self.target_step_fails() {
            return Event::StartFailed(failure());
        }
        self.start();
        Event::Started { micros: 0, cpu_us: 0 }
    }

    /// Starts the guest, and checks the promises of a start: the guest runs on the target only if
    /// it was handed over, and only with the memory that it had.
    fn start(&mut self) {
        let (committed, free) = (self.world.source.committed, !self.world.source.holds);
        let alone = !self.world.source.running;
        let first = !std::mem::replace(&mut self.world.target.started, true);
        let claimed = self.world.arbiter_permits(Side::Target) != Some(false);
        self.promise(Promise::StartsAfterCommit, committed);
        self.promise(Promise::StartsClaimed, claimed);
        self.promise(Promise::StartsOnce, first);
        self.promise(Promise::OneRunner, alone);
        self.promise(Promise::OneHolder, free);
        let (memory, saved) = (self.world.source.memory, self.world.source.saved);
        let target = &mut self.world.target;
        (target.running, target.holds) = (true, true);
        let missed = match &mut target.paging {
            // The device state belongs to the memory of the moment at which it was saved.
            None if target.shares => saved != Some(memory),
            None => target.pages != memory,
            Some(paging) => {
                paging.model = memory;
                // A thread that touches a page that is not present waits for it.
                (0..PAGES).any(|page| has(paging.present, page) && target.pages[page] != memory[page])
            }
        };
        self.promise(Promise::NoPageMissed, !missed);
    }

    /// Handles the hello of a control channel for a lost link.
    fn target_is_asked(&mut self, link: usize) {
        self.world.links[link].down.pop_front();
        let session = &self.world.target.session.is;
        let renounced = session.renounced();
        let listens = self.world.target.in_postcopy || session.accepts_new_link();
        let deaf = self.flaw(Flaw::DeafOnceRenounced) && renounced;
        let yes = listens && !deaf && link > self.world.target.link && !self.world.target.ended();
        if !self.world.links[link].dead() {
            self.world.links[link].up.push_back(ToSourceCargo::Reply(yes));
        }
        if !yes {
            return;
        }
        if self.world.target.connected && !self.flaw(Flaw::RetoldEarly) {
            self.disconnect_target();
        }
        if !self.flaw(Flaw::RetoldEarly) {
            let link = self.target_link();
            link.down.clear();
            link.forget_pages();
        }
        self.last_page_after_all();
        self.world.target.loss_noticed = false;
        self.world.target.link = link;
        self.world.target.connected = true;
        // Events that were found when the old channels ended come first.
        if std::mem::take(&mut self.world.target.last_came) {
            self.tell_target(Event::MissingArrived(PagingFigures::default()));
        }
        self.tell_target(Event::ControlReopened);
    }

    fn retell(&mut self) -> Option<Event> {
        let paging = *self.paging();
        let missing = if paging.ended { 0 } else { paging.missing };
        if missing != 0
            && let Some(failed) = self.target_sends(ToSource::Lacking(piece_of(missing)))
        {
            return Some(failed);
        }
        let tokens = (tokens().bulk, tokens().urgent);
        Some(Event::MissingNamed { pages: missing.count_ones().into(), tokens })
    }

    fn disconnect_target(&mut self) {
        let in_postcopy = self.world.target.in_postcopy;
        let link = self.target_link();
        link.target_closed = true;
        link.requests.clear();
        if in_postcopy {
            // The threads of the channels are ended, and their further reports are dropped.
            link.down.clear();
            link.forget_pages();
            self.world.target.loss_noticed = false;
            self.last_page_after_all();
        }
        self.world.target.connected = false;
        if let Some(paging) = &mut self.world.target.paging {
            (paging.lines_up, paging.requested) = (false, 0);
        }
    }

    /// Restores the report of the last page, if it was dropped with the other reports of the lost
    /// channels.
    fn last_page_after_all(&mut self) {
        let Some(paging) = self.world.target.paging else { return };
        self.world.target.last_came = self.world.target.in_postcopy
            && paging.missing == 0
            && !self.world.target.session.is.complete()
            && !self.flaw(Flaw::ForgetsTheLast);
    }

    fn close_target(&mut self) {
        let connected = self.world.target.connected;
        let link = self.target_link();
        link.target_closed |= connected;
        link.down.clear();
        link.forget_pages();
    }

    fn stop(&mut self) {
        if self.world.target.in_postcopy {
            return self.crash_target();
        }
        self.world.target.stopped = true;
        if self.flaw(Flaw::EndsClaiming)
            && self.world.arbiter.as_ref().is_some_and(ModelArbiter::target_claims)
        {
            self.target_sends(ToSource::Failed(failure()));
            self.world.target.outcome = Some(Outcome::Failed(failure()));
            return self.close_target();
        }
        self.tell_target(Event::Stopped);
    }

    /// The operator ends a target that cannot continue, because its source has ended.
    fn target_gives_up(&mut self) {
        if self.world.target.session.is.renounced() {
            self.tell_target(Event::Stopped);
        } else if self.world.target.session.is.complete() {
            // The guest has all of its memory and runs. The target is told to stop listening.
            self.world.target.outcome = Some(Outcome::Completed);
            self.close_target();
        } else {
            self.crash_target();
        }
    }

    pub(super) fn crash_target(&mut self) {
        self.close_target();
        self.target_link().cut = true;
        let target = &mut self.world.target;
        (target.crashed, target.running, target.holds) = (true, false, false);
        self.world.arbiter.iter_mut().for_each(|arbiter| arbiter.dies(Side::Target));
    }

    pub(super) fn paging(&mut self) -> &mut Paging {
        self.world.target.paging.as_mut().expect("after the handover only")
    }

    pub(super) fn new_session(mode: MigrationMode, with_arbiter: bool) -> Keyed<Session> {
        let session = Session::begin(super::world::machine(), tokens()).with_arbiter(with_arbiter);
        let session = session.taking_memory(mode == MigrationMode::Local);
        Keyed::by(session, |session, hash| session.project(hash))
    }
}

/// Host of the target in the model.
struct AtTarget<'m, 'a> {
    step: &'m mut Step<'a>,
    action_queue: ActionQueue<Action>,
    /// Next event.
    event: Option<Event>,
}

/// Error of a host that has no event before something else happens.
struct Idle;

impl run::Host for AtTarget<'_, '_> {
    type Session = Session;
    type Idle = Idle;

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn session(&self) -> &Session {
        &self.step.world.target.session.is
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.step.handle_target(event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        if self.step.target_dies() {
            return Err(Idle);
        }
        let event = self.step.perform_target(action);
        self.step.at += 1;
        Ok(event)
    }

    fn next(&mut self) -> Result<Option<Event>, Idle> {
        self.event.take().map(Some).ok_or(Idle)
    }
}
