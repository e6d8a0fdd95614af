//! One step of the model: the possible steps of a state, and the faults within them.

use super::arbiter::{Fate, ModelArbiter};
use super::judge::Promise;
use super::world::{Link, World};
use super::{Flaw, Protocol};
use crate::run::ActionQueue;
use vmferry_protocol::source::Action;

/// Step without its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Operation {
    /// The guest writes a page on the source, writes one on the target, or touches one on the
    /// target.
    Writes(usize),
    WritesOnTarget(usize),
    Touches(usize),
    /// The source's session gets the next message of its control channel, or performs an action
    /// that takes time.
    SourceReceives,
    SourceActs,
    SourceNoticesLoss,
    /// The thread of the bulk channel sends, or a thread answers a request.
    Sends,
    Serves,
    /// The clock ticks: soon, after the migration's timeout, or after every limit.
    TickSoon,
    TickAtTimeout,
    TickMuchLater,
    /// Attempt to open a new control channel.
    Dials,
    DialFails,
    /// Requests of the operator of the source.
    Cancel,
    SwitchNow,
    Pause,
    Recover,
    Abandon,
    /// The target's session gets the next message, or a report of its threads.
    TargetReceives,
    TargetTakesBulk,
    TargetTakesUrgent,
    /// A channel of an earlier link delivers a page.
    TargetTakesLate,
    TargetNoticesLoss,
    /// A thread finds that its channel is lost before the session is told.
    ThreadNoticesLoss,
    TargetLearnsOfLoss,
    TargetLearnsOfLast,
    /// The hello of a new control channel arrives.
    TargetIsAsked(usize),
    /// Requests of the operator of the target: stop, or give up a guest that cannot continue.
    Stop,
    GiveUp,
    CrashSource,
    CrashTarget,
    Cut,
    CutPages,
    /// A step of a request to the arbiter, or the expiry of a lease.
    Arbiter(usize, Fate),
    LeaseEnds,
}

/// Fault within a step: before or in the action with this number, among those that follow from one
/// event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StepFault {
    SourceDiesBefore(u8),
    TargetDiesBefore(u8),
    StepFails(u8),
    /// The guest's I/O is not quiesced in time.
    Busy(u8),
    /// Result of sending on a lost link: known not to have been sent, or below, failed. Otherwise
    /// the message counts as sent.
    NotSent(u8),
    SendFails(u8),
    /// The link is lost while a message is sent, which may arrive nevertheless.
    BreaksAfter(u8),
    /// The page is damaged on the link.
    Damage,
}

impl StepFault {
    /// Returns true if the fault is counted, and is not a consequence of another one.
    fn counts(self) -> bool {
        !matches!(self, Self::NotSent(_) | Self::SendFails(_))
    }
}

/// Step in progress.
pub(super) struct Step<'a> {
    pub(super) model: &'a Protocol,
    pub(super) world: World,
    step_fault: Option<StepFault>,
    happened: bool,
    /// Number of actions so far, and below, the faults that were possible in them.
    pub(super) at: u8,
    could: Vec<StepFault>,
}

impl<'a> Step<'a> {
    pub(super) fn new(model: &'a Protocol, world: &World, step_fault: Option<StepFault>) -> Self {
        Self { model, world: world.clone(), step_fault, happened: false, at: 0, could: Vec::new() }
    }

    /// Returns true if this fault happens here.
    pub(super) fn injects(&mut self, what: StepFault) -> bool {
        if self.step_fault == Some(what) && !self.happened {
            self.happened = true;
            if what.counts() {
                self.fault();
            }
            return true;
        }
        if self.step_fault.is_none() && (self.world.faults_left > 0 || !what.counts()) {
            self.could.push(what);
        }
        false
    }

    /// Returns the faults that are possible in `operation`, each of which is another step.
    pub(super) fn step_faults(model: &'a Protocol, world: &World, operation: Operation) -> Vec<StepFault> {
        let mut step = Self::new(model, world, None);
        step.happen(operation);
        step.could
    }

    /// Returns the state after the step, if the step changes anything and its fault was possible.
    pub(super) fn done(mut self, operation: Operation) -> Option<World> {
        let before = self.step_fault.is_none().then(|| self.world.clone());
        self.happen(operation);
        self.check();
        if self.step_fault.is_some() != self.happened || before.is_some_and(|before| before == self.world) {
            return None;
        }
        Some(self.world)
    }

    pub(super) fn fault(&mut self) {
        self.world.faults_left -= 1;
        self.world.fault_free = false;
    }

    pub(super) fn flaw(&self, flaw: Flaw) -> bool {
        self.model.flaw == Some(flaw)
    }

    pub(super) fn promise(&mut self, promise: Promise, kept: bool) {
        if !kept && self.world.broken.is_none() {
            self.world.broken = Some(promise);
        }
    }

    pub(super) fn source_link(&mut self) -> &mut Link {
        &mut self.world.links[self.world.source.link]
    }

    pub(super) fn target_link(&mut self) -> &mut Link {
        &mut self.world.links[self.world.target.link]
    }

    /// Returns true if messages of the source arrive.
    pub(super) fn link_up(&self) -> bool {
        self.world.source.connected && !self.world.links[self.world.source.link].dead()
    }

    /// Performs the first actions of the source's session.
    pub(super) fn begin(&mut self, first: Vec<Action>) {
        self.run_source(ActionQueue::new(first), None);
    }

    fn happen(&mut self, operation: Operation) {
        match operation {
            Operation::Writes(page) => {
                self.world.source.writes_left -= 1;
                self.write(page);
            }
            Operation::WritesOnTarget(page) => self.write_on_target(page),
            Operation::Touches(page) => {
                self.world.target.touches_left -= 1;
                self.touch(page);
            }
            Operation::Cut | Operation::CutPages => {
                self.fault();
                for link in &mut self.world.links {
                    link.pages_cut = true;
                    link.cut |= operation == Operation::Cut;
                }
            }
            Operation::CrashSource => {
                self.fault();
                self.crash_source();
            }
            Operation::CrashTarget => {
                self.fault();
                self.crash_target();
            }
            Operation::Arbiter(request, fate) => self.arbiter_step(request, fate),
            Operation::LeaseEnds => self.world.arbiter.iter_mut().for_each(ModelArbiter::lapse),
            Operation::TargetReceives
            | Operation::TargetTakesBulk
            | Operation::TargetTakesUrgent
            | Operation::TargetTakesLate
            | Operation::TargetNoticesLoss
            | Operation::ThreadNoticesLoss
            | Operation::TargetLearnsOfLoss
            | Operation::TargetLearnsOfLast
            | Operation::TargetIsAsked(_)
            | Operation::Stop
            | Operation::GiveUp => self.happen_on_target(operation),
            operation => self.happen_on_source(operation),
        }
        self.forget_links();
    }

    /// Forgets sets of channels that neither host uses any more and that carry nothing.
    fn forget_links(&mut self) {
        let (source, target) = (self.world.source.link, self.world.target.link);
        let keep = self.flaw(Flaw::RetoldEarly);
        let gone = (self.world.source.ended(), self.world.target.ended());
        for (at, link) in self.world.links.iter_mut().enumerate() {
            let past = at < target && (at < source || gone.0);
            if (past && !keep) || gone == (true, true) {
                *link = Link { cut: true, ..Link::default() };
            }
        }
    }
}
