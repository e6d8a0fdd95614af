//! One step of the model: the possible steps of a state, and the faults within them.

use super::fence::{Fate, Fence};
use super::judge::Promise;
use super::world::{Link, World};
use super::{Flaw, Protocol};
use crate::run::Agenda;
use vmferry_protocol::source::Action;

/// Step without its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Deed {
    /// The guest writes a page on the source, writes one on the target, or touches one on the
    /// target.
    Writes(usize),
    WritesThere(usize),
    Touches(usize),
    /// The source's session gets the next message of its control channel, or performs an action
    /// that takes time.
    SourceHears,
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
    TargetHears,
    TargetTakesBulk,
    TargetTakesUrgent,
    /// A channel of an earlier link delivers a page.
    TargetTakesLate,
    TargetNoticesLoss,
    /// A thread finds that its channel is lost before the session is told.
    ThreadNoticesLoss,
    TargetHearsOfLoss,
    TargetHearsOfLast,
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
    Fence(usize, Fate),
    LeaseEnds,
}

/// Fault within a step: before or in the action with this number, among those that follow from one
/// event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mishap {
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

impl Mishap {
    /// Returns true if the fault is counted, and is not a consequence of another one.
    fn counts(self) -> bool {
        !matches!(self, Self::NotSent(_) | Self::SendFails(_))
    }
}

/// Step in progress.
pub(super) struct Step<'a> {
    pub(super) model: &'a Protocol,
    pub(super) world: World,
    mishap: Option<Mishap>,
    happened: bool,
    /// Number of actions so far, and below, the faults that were possible in them.
    pub(super) at: u8,
    could: Vec<Mishap>,
}

impl<'a> Step<'a> {
    pub(super) fn new(model: &'a Protocol, world: &World, mishap: Option<Mishap>) -> Self {
        Self { model, world: world.clone(), mishap, happened: false, at: 0, could: Vec::new() }
    }

    /// Returns true if this fault happens here.
    pub(super) fn goes_wrong(&mut self, what: Mishap) -> bool {
        if self.mishap == Some(what) && !self.happened {
            self.happened = true;
            if what.counts() {
                self.fault();
            }
            return true;
        }
        if self.mishap.is_none() && (self.world.faults_left > 0 || !what.counts()) {
            self.could.push(what);
        }
        false
    }

    /// Returns the faults that are possible in `deed`, each of which is another step.
    pub(super) fn mishaps(model: &'a Protocol, world: &World, deed: Deed) -> Vec<Mishap> {
        let mut step = Self::new(model, world, None);
        step.happen(deed);
        step.could
    }

    /// Returns the state after the step, if the step changes anything and its fault was possible.
    pub(super) fn done(mut self, deed: Deed) -> Option<World> {
        let before = self.mishap.is_none().then(|| self.world.clone());
        self.happen(deed);
        self.check();
        if self.mishap.is_some() != self.happened || before.is_some_and(|before| before == self.world) {
            return None;
        }
        Some(self.world)
    }

    pub(super) fn fault(&mut self) {
        self.world.faults_left -= 1;
        self.world.calm = false;
    }

    pub(super) fn flaw(&self, flaw: Flaw) -> bool {
        self.model.flaw == Some(flaw)
    }

    pub(super) fn promise(&mut self, promise: Promise, kept: bool) {
        if !kept && self.world.broken.is_none() {
            self.world.broken = Some(promise);
        }
    }

    pub(super) fn link_here(&mut self) -> &mut Link {
        &mut self.world.links[self.world.here.link]
    }

    pub(super) fn link_there(&mut self) -> &mut Link {
        &mut self.world.links[self.world.there.link]
    }

    /// Returns true if messages of the source arrive.
    pub(super) fn link_up(&self) -> bool {
        self.world.here.connected && !self.world.links[self.world.here.link].dead()
    }

    /// Performs the first actions of the source's session.
    pub(super) fn begin(&mut self, first: Vec<Action>) {
        self.run_here(Agenda::new(first), None);
    }

    fn happen(&mut self, deed: Deed) {
        match deed {
            Deed::Writes(page) => {
                self.world.here.writes_left -= 1;
                self.write(page);
            }
            Deed::WritesThere(page) => self.write_there(page),
            Deed::Touches(page) => {
                self.world.there.touches_left -= 1;
                self.touch(page);
            }
            Deed::Cut | Deed::CutPages => {
                self.fault();
                for link in &mut self.world.links {
                    link.pages_cut = true;
                    link.cut |= deed == Deed::Cut;
                }
            }
            Deed::CrashSource => {
                self.fault();
                self.crash_source();
            }
            Deed::CrashTarget => {
                self.fault();
                self.crash_target();
            }
            Deed::Fence(word, fate) => self.fence_happens(word, fate),
            Deed::LeaseEnds => self.world.fence.iter_mut().for_each(Fence::lapse),
            Deed::TargetHears
            | Deed::TargetTakesBulk
            | Deed::TargetTakesUrgent
            | Deed::TargetTakesLate
            | Deed::TargetNoticesLoss
            | Deed::ThreadNoticesLoss
            | Deed::TargetHearsOfLoss
            | Deed::TargetHearsOfLast
            | Deed::TargetIsAsked(_)
            | Deed::Stop
            | Deed::GiveUp => self.happen_there(deed),
            deed => self.happen_here(deed),
        }
        self.forget_links();
    }

    /// Forgets sets of channels that neither host uses any more and that carry nothing.
    fn forget_links(&mut self) {
        let (here, there) = (self.world.here.link, self.world.there.link);
        let keep = self.flaw(Flaw::RetoldEarly);
        let gone = (self.world.here.ended(), self.world.there.ended());
        for (at, link) in self.world.links.iter_mut().enumerate() {
            let past = at < there && (at < here || gone.0);
            if (past && !keep) || gone == (true, true) {
                *link = Link { cut: true, ..Link::default() };
            }
        }
    }
}
