//! One step of the model: what can happen in a state, and where it can go wrong.

use super::fence::{Fate, Fence};
use super::judge::Promise;
use super::world::{Link, World};
use super::{Flaw, Protocol};
use crate::run::Agenda;
use vmferry_protocol::source::Action;

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Deed {
    /// The guest writes a page, where it runs; or touches one, there.
    Writes(usize),
    WritesThere(usize),
    Touches(usize),
    /// The source's session gets what is next on its control channel, or does what takes its time.
    SourceHears,
    SourceActs,
    SourceNoticesLoss,
    /// The thread of the bulk channel, and one that answers requests.
    Sends,
    Serves,
    /// The clock ticks: soon, when the migration's timeout has passed, when every limit has.
    TickSoon,
    TickAtTimeout,
    TickMuchLater,
    /// The attempt at a new control channel.
    Dials,
    DialFails,
    /// People, at the source.
    Cancel,
    SwitchNow,
    Pause,
    Recover,
    Abandon,
    /// The target's session gets what is next, or what its threads found.
    TargetHears,
    TargetTakesBulk,
    TargetTakesUrgent,
    /// What a channel of a link before brings.
    TargetTakesLate,
    TargetNoticesLoss,
    /// A thread finds its channel lost before the session hears of it.
    ThreadNoticesLoss,
    TargetHearsOfLoss,
    TargetHearsOfLast,
    /// The hello of a new control channel.
    TargetIsAsked(usize),
    /// People, at the target: it is told to stop; or what it waits for is past help.
    Stop,
    GiveUp,
    CrashSource,
    CrashTarget,
    Cut,
    CutPages,
    /// Something becomes of a word to the fence; or what it has given it takes back.
    Fence(usize, Fate),
    LeaseEnds,
}

/// What goes wrong in it: before or in the action of that number, of those that follow from one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mishap {
    SourceDiesBefore(u8),
    TargetDiesBefore(u8),
    StepFails(u8),
    /// The guest's I/O does not come to rest in time.
    Busy(u8),
    /// A message to a lost link: it is known that nothing of it left; or that it failed. Else it is taken for sent.
    NotSent(u8),
    SendFails(u8),
    /// The link is lost as a message is sent, which arrives all the same, or may.
    BreaksAfter(u8),
    /// The page is damaged on its way.
    Damage,
}

impl Mishap {
    /// Whether it is one of the faults that are counted, and not what follows from one.
    fn counts(self) -> bool {
        !matches!(self, Self::NotSent(_) | Self::SendFails(_))
    }
}

/// A step under way.
pub(super) struct Step<'a> {
    pub(super) model: &'a Protocol,
    pub(super) world: World,
    mishap: Option<Mishap>,
    happened: bool,
    /// Actions so far, and what could go wrong in them.
    pub(super) at: u8,
    could: Vec<Mishap>,
}

impl<'a> Step<'a> {
    pub(super) fn new(model: &'a Protocol, world: &World, mishap: Option<Mishap>) -> Self {
        Self { model, world: world.clone(), mishap, happened: false, at: 0, could: Vec::new() }
    }

    /// Asks whether that goes wrong here.
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

    /// What could go wrong in `deed`, each of which is another step.
    pub(super) fn mishaps(model: &'a Protocol, world: &World, deed: Deed) -> Vec<Mishap> {
        let mut step = Self::new(model, world, None);
        step.happen(deed);
        step.could
    }

    /// The state after it, if it changes anything and the mishap could happen.
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

    /// Whether what the source sends arrives.
    pub(super) fn link_up(&self) -> bool {
        self.world.here.connected && !self.world.links[self.world.here.link].dead()
    }

    /// What the source's session does at first.
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

    /// A set of channels that neither side has any more, and which carries nothing, is as good as never having been.
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
