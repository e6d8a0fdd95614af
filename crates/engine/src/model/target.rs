//! Host of the target in the model: performs the actions of the production session, and reports
//! their events.
//!
//! The effect of each action and the event that answers it are defined in [`Step::perform_there`]
//! only.

use super::Flaw;
use super::fence::Fence;
use super::judge::Promise;
use super::source::failure;
use super::step::{Deed, Mishap, Step};
use super::world::{
    ALL, Cargo, DAMAGED, Down, Fate, Keyed, Lazy, PAGES, REGION, Up, has, mask_of, pages, piece_of, runs_of,
};
use crate::fence::Side;
use crate::run::{self, Agenda};
use crate::target::session::{Action, Event, Outcome, Session, Tokens};
use std::time::Duration;
use vmferry_wire::{LazyFigures, PageName, ToSource, ToTarget, Token};

pub(super) fn tokens() -> Tokens {
    Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) }
}

impl Step<'_> {
    pub(super) fn happen_there(&mut self, deed: Deed) {
        match deed {
            Deed::TargetHears => {
                if let Some(Down::Message(message)) = self.link_there().down.pop_front() {
                    self.target_hears((*message.is).clone());
                }
            }
            Deed::TargetTakesBulk => {
                let cargo = self.link_there().bulk.pop_front();
                cargo.into_iter().for_each(|cargo| self.take_cargo(cargo));
            }
            Deed::TargetTakesUrgent => {
                let cargo = self.link_there().urgent.pop_front();
                cargo.into_iter().for_each(|cargo| self.take_cargo(cargo));
            }
            Deed::TargetTakesLate => {
                let before = &mut self.world.links[..self.world.there.link];
                let late = before
                    .iter_mut()
                    .find_map(|link| link.bulk.pop_front().or_else(|| link.urgent.pop_front()));
                if let Some(Cargo::Page { page, content }) = late {
                    self.place(page, content);
                }
            }
            Deed::TargetNoticesLoss => {
                let link = self.link_there();
                let silent = !(link.cut || (link.source_closed && link.down.is_empty()));
                if silent {
                    // The source is alive, and its messages do not arrive.
                    self.fault();
                }
                let link = self.link_there();
                link.down.clear();
                if link.cut {
                    link.forget_pages();
                }
                self.abandon();
                self.target_loses();
            }
            Deed::ThreadNoticesLoss => {
                self.link_there().forget_pages();
                self.link_there().noticed = true;
                self.abandon();
                self.world.there.loss_noticed = true;
            }
            Deed::TargetHearsOfLoss => {
                self.world.there.loss_noticed = false;
                let session = &self.world.there.session.is;
                // Like the driver: in these states the channel is not needed any more.
                if !session.memory_complete() && !session.renounced() && !session.complete() {
                    self.target_loses();
                }
            }
            Deed::TargetHearsOfLast => {
                self.world.there.last_came = false;
                self.tell_there(Event::MissingArrived(LazyFigures::default()));
            }
            Deed::TargetIsAsked(link) => self.target_is_asked(link),
            Deed::Stop => {
                self.fault();
                self.stop();
            }
            Deed::GiveUp => self.give_up_there(),
            other => unreachable!("{other:?} is not the target's"),
        }
    }

    fn target_loses(&mut self) {
        self.tell_there(Event::PeerLost("the link is lost".into()));
    }

    /// Runs the production loop with `event`, until no action is left.
    pub(super) fn tell_there(&mut self, event: Event) {
        let mut host = AtTarget { step: self, agenda: Agenda::new(Vec::new()), event: Some(event) };
        while let Ok(outcome) = run::advance(&mut host) {
            if host.step.dies_there() {
                return;
            }
            host.step.perform_there(Action::Finish(outcome));
            host.step.at += 1;
        }
    }

    /// Returns true if the target has ended, or dies before its next action.
    fn dies_there(&mut self) -> bool {
        if self.world.there.ended() {
            return true;
        }
        let dies = self.at > 0 && self.goes_wrong(Mishap::TargetDiesBefore(self.at));
        if dies {
            self.crash_target();
        }
        dies
    }

    fn handle_there(&mut self, event: Event) -> Vec<Action> {
        let session = &mut self.world.there.session;
        let mut actions =
            session.change(|session| session.handle(event), |session, hash| session.project(hash));
        if self.flaw(Flaw::EndsRenounced) && self.world.there.session.is.renounced() {
            actions.push(Action::Finish(Outcome::Failed(failure())));
        }
        actions
    }

    /// Performs an action of the target. The effects of all actions are defined here only.
    fn perform_there(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => return self.send_there(message),
            Action::AskArbiter { word, .. } => self.ask_fence(Side::Target, word),
            Action::AwaitChannels(_) => {}
            Action::PrepareDemandPaging => {
                let failed = self.step_fails_there();
                return Some(if failed { Event::LocalFailure(failure()) } else { Event::Prepared });
            }
            Action::TakeMissing(piece) => self.world.there.collected |= mask_of(&piece),
            Action::BeginDemandPaging { pages } => return self.begin_lazily(pages),
            Action::NameMissing => return self.retell(),
            Action::RequestAgain => self.ask_again(),
            Action::Disconnect => self.disconnect_target(),
            Action::EndDemandPaging => {
                let lazy = self.lazy();
                (lazy.ended, lazy.present) = (true, ALL);
            }
            Action::CountDamaged { pass } => {
                let blind = self.flaw(Flaw::BlindToDamage);
                let suspect = if blind { 0 } else { self.world.there.suspect };
                let (pages, runs) = (suspect.count_ones().into(), runs_of(suspect));
                return Some(Event::Damaged { pass, pages, runs });
            }
            Action::CountMismatches => {
                let there = &self.world.there;
                let name = |page| PageName { region: REGION, page: page as u64 };
                let samples: Vec<_> = pages(there.differ).map(name).collect();
                return Some(Event::Compared {
                    pages: there.compared.into(),
                    mismatched: samples.len() as u64,
                    samples,
                });
            }
            Action::Load(_) => return Some(self.load()),
            Action::OpenStream(_) | Action::WriteStream { .. } | Action::FinishStream { .. } => {
                unreachable!("no guest of the model has streams of device state")
            }
            Action::PrepareVm(_) => {
                let failed = self.step_fails_there();
                return Some(if failed {
                    Event::LocalFailure(failure())
                } else {
                    Event::VmPrepared { load_us: None }
                });
            }
            Action::Start { .. } => return Some(self.start_when_told()),
            Action::Finish(Outcome::Running) => self.world.there.rest = true,
            Action::Finish(outcome) => {
                self.world.there.outcome = Some(outcome);
                self.close_target();
            }
        }
        None
    }

    fn step_fails_there(&mut self) -> bool {
        self.goes_wrong(Mishap::StepFails(self.at))
    }

    fn send_there(&mut self, message: ToSource) -> Option<Event> {
        if matches!(message, ToSource::Pong(_)) {
            return None;
        }
        let dead = self.link_there().cut || self.link_there().source_closed;
        if !self.world.there.connected || (dead && self.goes_wrong(Mishap::SendFails(self.at))) {
            return Some(Event::PeerLost("the channel is closed".into()));
        }
        if !dead {
            self.link_there().up.push_back(Up::Message(Keyed::message(message)));
        }
        None
    }

    fn target_hears(&mut self, message: ToTarget) {
        if message == ToTarget::Commit
            && self.flaw(Flaw::StartsRenounced)
            && self.world.there.session.is.renounced()
        {
            return self.start();
        }
        self.tell_there(Event::Message(message));
    }

    /// Takes pages as the channel's own thread does. Other cargo is for the session.
    fn take_cargo(&mut self, cargo: Cargo) {
        match cargo {
            Cargo::Hello => self.tell_there(Event::ChannelUp),
            Cargo::Page { page, content } if self.world.there.lazy.is_some() => self.place(page, content),
            Cargo::Page { page, content } => {
                let frozen = self.world.there.loaded;
                self.promise(Promise::NoPageMissed, !frozen);
                let there = &mut self.world.there;
                there.pages[page] = content;
                there.suspect = there.suspect & !(1 << page) | u8::from(content == DAMAGED) << page;
            }
            Cargo::Digests { of, contents } => {
                let there = &mut self.world.there;
                for page in pages(of) {
                    there.compared += 1;
                    there.differ |= u8::from(there.pages[page] != contents[page]) << page;
                }
            }
            Cargo::Barrier(pass) => self.tell_there(Event::Barrier { channel: 0, pass }),
        }
    }

    fn load(&mut self) -> Event {
        let first = !std::mem::replace(&mut self.world.there.loaded, true);
        self.promise(Promise::StartsOnce, first);
        if self.flaw(Flaw::StartsAtLoad) {
            self.start();
        }
        if self.world.there.lazy.is_some_and(|lazy| lazy.fate == Fate::Abandoned) {
            return Event::PeerLost("while the state was loaded".into());
        }
        if self.step_fails_there() { Event::LocalFailure(failure()) } else { Event::Loaded { micros: 0 } }
    }

    fn start_when_told(&mut self) -> Event {
        if let Some(lazy) = &mut self.world.there.lazy {
            if lazy.fate == Fate::Abandoned && self.model.flaw != Some(Flaw::StartsAbandoned) {
                return Event::StartFailed(failure());
            }
            lazy.fate = Fate::Committed;
        }
        if self.step_fails_there() {
            return Event::StartFailed(failure());
        }
        self.start();
        Event::Started { micros: 0, cpu_us: 0 }
    }

    /// Starts the guest, and checks the promises of a start: the guest runs on the target only if
    /// it was handed over, and only with the memory that it had.
    fn start(&mut self) {
        let (committed, free) = (self.world.here.committed, !self.world.here.holds);
        let alone = !self.world.here.running;
        let first = !std::mem::replace(&mut self.world.there.started, true);
        let claimed = self.world.fence_gives_it_to(Side::Target) != Some(false);
        self.promise(Promise::StartsAfterCommit, committed);
        self.promise(Promise::StartsClaimed, claimed);
        self.promise(Promise::StartsOnce, first);
        self.promise(Promise::OneRunner, alone);
        self.promise(Promise::OneHolder, free);
        let (memory, there) = (self.world.here.memory, &mut self.world.there);
        (there.running, there.holds) = (true, true);
        let missed = match &mut there.lazy {
            None => there.pages != memory,
            Some(lazy) => {
                lazy.model = memory;
                // A thread that touches a page that is not present waits for it.
                (0..PAGES).any(|page| has(lazy.present, page) && there.pages[page] != memory[page])
            }
        };
        self.promise(Promise::NoPageMissed, !missed);
    }

    /// Handles the hello of a control channel for a lost link.
    fn target_is_asked(&mut self, link: usize) {
        self.world.links[link].down.pop_front();
        let session = &self.world.there.session.is;
        let renounced = session.renounced();
        let heard = self.world.there.rest || session.may_be_asked();
        let deaf = self.flaw(Flaw::DeafOnceRenounced) && renounced;
        let yes = heard && !deaf && link > self.world.there.link && !self.world.there.ended();
        if !self.world.links[link].dead() {
            self.world.links[link].up.push_back(Up::Reply(yes));
        }
        if !yes {
            return;
        }
        if self.world.there.connected && !self.flaw(Flaw::RetoldEarly) {
            self.disconnect_target();
        }
        if !self.flaw(Flaw::RetoldEarly) {
            let link = self.link_there();
            link.down.clear();
            link.forget_pages();
        }
        self.last_page_after_all();
        self.world.there.loss_noticed = false;
        self.world.there.link = link;
        self.world.there.connected = true;
        // Events that were found when the old channels ended come first.
        if std::mem::take(&mut self.world.there.last_came) {
            self.tell_there(Event::MissingArrived(LazyFigures::default()));
        }
        self.tell_there(Event::ControlReopened);
    }

    fn retell(&mut self) -> Option<Event> {
        let lazy = *self.lazy();
        let lacking = if lazy.ended { 0 } else { lazy.lacking };
        if lacking != 0
            && let Some(failed) = self.send_there(ToSource::Lacking(piece_of(lacking)))
        {
            return Some(failed);
        }
        let tokens = (tokens().bulk, tokens().urgent);
        Some(Event::MissingNamed { pages: lacking.count_ones().into(), tokens })
    }

    fn disconnect_target(&mut self) {
        let rest = self.world.there.rest;
        let link = self.link_there();
        link.target_closed = true;
        link.requests.clear();
        if rest {
            // The threads of the channels are ended, and their further reports are dropped.
            link.down.clear();
            link.forget_pages();
            self.world.there.loss_noticed = false;
            self.last_page_after_all();
        }
        self.world.there.connected = false;
        if let Some(lazy) = &mut self.world.there.lazy {
            (lazy.lines_up, lazy.asked) = (false, 0);
        }
    }

    /// Restores the report of the last page, if it was dropped with the other reports of the lost
    /// channels.
    fn last_page_after_all(&mut self) {
        let Some(lazy) = self.world.there.lazy else { return };
        self.world.there.last_came = self.world.there.rest
            && lazy.lacking == 0
            && !self.world.there.session.is.complete()
            && !self.flaw(Flaw::ForgetsTheLast);
    }

    fn close_target(&mut self) {
        let connected = self.world.there.connected;
        let link = self.link_there();
        link.target_closed |= connected;
        link.down.clear();
        link.forget_pages();
    }

    fn stop(&mut self) {
        if self.world.there.rest {
            return self.crash_target();
        }
        self.world.there.stopped = true;
        if self.flaw(Flaw::EndsClaiming) && self.world.fence.as_ref().is_some_and(Fence::target_claims) {
            self.send_there(ToSource::Failed(failure()));
            self.world.there.outcome = Some(Outcome::Failed(failure()));
            return self.close_target();
        }
        self.tell_there(Event::Stopped);
    }

    /// The operator ends a target that cannot continue, because its source has ended.
    fn give_up_there(&mut self) {
        if self.world.there.session.is.renounced() {
            self.tell_there(Event::Stopped);
        } else if self.world.there.session.is.complete() {
            // The guest has all of its memory and runs. The target is told to stop listening.
            self.world.there.outcome = Some(Outcome::Completed);
            self.close_target();
        } else {
            self.crash_target();
        }
    }

    pub(super) fn crash_target(&mut self) {
        self.close_target();
        self.link_there().cut = true;
        let there = &mut self.world.there;
        (there.crashed, there.running, there.holds) = (true, false, false);
        self.world.fence.iter_mut().for_each(|fence| fence.dies(Side::Target));
    }

    pub(super) fn lazy(&mut self) -> &mut Lazy {
        self.world.there.lazy.as_mut().expect("after the handover only")
    }

    pub(super) fn new_session(fenced: bool) -> Keyed<Session> {
        let session = Session::begin(super::world::machine(), tokens()).fenced(fenced);
        Keyed::by(session, |session, hash| session.project(hash))
    }
}

/// Host of the target in the model.
struct AtTarget<'m, 'a> {
    step: &'m mut Step<'a>,
    agenda: Agenda<Action>,
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
        &self.step.world.there.session.is
    }

    fn agenda(&mut self) -> &mut Agenda<Action> {
        &mut self.agenda
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.step.handle_there(event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        if self.step.dies_there() {
            return Err(Idle);
        }
        let event = self.step.perform_there(action);
        self.step.at += 1;
        Ok(event)
    }

    fn next(&mut self) -> Result<Option<Event>, Idle> {
        self.event.take().map(Some).ok_or(Idle)
    }
}
