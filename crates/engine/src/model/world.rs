//! A state of the model: two hosts, with the sessions that ship, and the links between them.

use super::fence::Fence;
use super::judge::Promise;
use crate::source::session::Session as SourceSession;
use crate::target::session::{Outcome as TargetOutcome, Session as TargetSession};
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use vmferry_core::{Gpa, MachineConfig, Region, RegionId};
use vmferry_protocol::source::{Action, Outcome};
use vmferry_wire::{LackingPages, RunName};

pub(super) const PAGES: usize = 2;
pub(super) const REGION: RegionId = RegionId(0);
/// Every page.
pub(super) const ALL: Mask = (1 << PAGES) - 1;
/// What a damaged page holds.
pub(super) const DAMAGED: u8 = u8::MAX;

/// A set of pages.
pub(super) type Mask = u8;

pub(super) fn has(mask: Mask, page: usize) -> bool {
    mask >> page & 1 != 0
}

/// The pages of a set, lowest first.
pub(super) fn pages(mask: Mask) -> impl Iterator<Item = usize> {
    (0..PAGES).filter(move |page| has(mask, *page))
}

/// Takes a page out of a set; says whether it was there.
pub(super) fn take(mask: &mut Mask, page: usize) -> bool {
    let had = has(*mask, page);
    *mask &= !(1 << page);
    had
}

pub(super) fn machine() -> MachineConfig {
    let region = Region { id: REGION, gpa: Gpa(0), len: (PAGES as u64) << 12 };
    MachineConfig { kind: "model".into(), vcpus: 1, regions: vec![region], extra: vec![], features: vec![] }
}

/// A set as the wire has it.
pub(super) fn piece_of(mask: Mask) -> LackingPages {
    LackingPages { region: REGION, first: 0, words: u64::from(mask).to_le_bytes().to_vec() }
}

pub(super) fn mask_of(piece: &LackingPages) -> Mask {
    piece.words[0]
}

pub(super) fn runs_of(mask: Mask) -> Vec<RunName> {
    pages(mask).map(|page| RunName { region: REGION, first: page as u64, count: 1 }).collect()
}

pub(super) fn mask_of_runs(runs: &[RunName]) -> Mask {
    runs.iter().map(|run| 1 << run.first).sum()
}

/// Something of what ships that has no `Hash` of its own, with a hash of all that matters of it. Two that have the same are the
/// same: the checker tells states apart by 64 bits anyway.
#[derive(Debug, Clone)]
pub(super) struct Keyed<T> {
    pub(super) is: Arc<T>,
    key: u64,
}

impl<T> Hash for Keyed<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key.hash(state);
    }
}

impl<T> PartialEq for Keyed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<T: std::fmt::Debug> Keyed<T> {
    /// A message: all that it says of itself matters.
    pub(super) fn message(is: T) -> Self {
        Self::by(is, |is, hasher| format!("{is:?}").hash(hasher))
    }
}

impl<T> Keyed<T> {
    pub(super) fn by(mut is: T, project: impl FnOnce(&mut T, &mut DefaultHasher)) -> Self {
        let mut hasher = DefaultHasher::new();
        project(&mut is, &mut hasher);
        Self { is: Arc::new(is), key: hasher.finish() }
    }
}

impl<T: Clone> Keyed<T> {
    /// Changes it, or a copy of it if other states have it too.
    pub(super) fn change<R>(
        &mut self,
        work: impl FnOnce(&mut T) -> R,
        project: impl FnOnce(&mut T, &mut DefaultHasher),
    ) -> R {
        let is = Arc::make_mut(&mut self.is);
        let done = work(is);
        let mut hasher = DefaultHasher::new();
        project(is, &mut hasher);
        self.key = hasher.finish();
        done
    }
}

/// What a control channel carries to the target.
#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) enum Down {
    /// The hello of a control channel that takes up a lost link.
    Back,
    Message(Keyed<vmferry_wire::ToTarget>),
}

/// What a control channel carries to the source.
#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) enum Up {
    /// The answer to [`Down::Back`].
    Reply(bool),
    Message(Keyed<vmferry_wire::ToSource>),
}

/// What the channels for pages carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Cargo {
    Hello,
    Page {
        page: usize,
        content: u8,
    },
    /// Digests of these pages, all of them.
    Digests {
        of: Mask,
        contents: [u8; PAGES],
    },
    Barrier(u32),
}

/// One set of channels. Each keeps its order; they do not keep one among each other.
#[derive(Debug, Clone, Default, PartialEq, Hash)]
pub(super) struct Link {
    pub(super) down: VecDeque<Down>,
    pub(super) up: VecDeque<Up>,
    pub(super) bulk: VecDeque<Cargo>,
    pub(super) urgent: VecDeque<Cargo>,
    /// Pages that are asked for, and whether they came damaged before.
    pub(super) requests: VecDeque<(usize, bool)>,
    /// Nothing more gets through; what is under way may, until its receiver notices.
    pub(super) cut: bool,
    /// The same, of the channels for pages only.
    pub(super) pages_cut: bool,
    /// A thread of the target's has found its channel lost.
    pub(super) noticed: bool,
    pub(super) source_closed: bool,
    pub(super) target_closed: bool,
}

impl Link {
    /// Whether what the source sends goes nowhere.
    pub(super) fn dead(&self) -> bool {
        self.cut || self.source_closed || self.target_closed
    }

    pub(super) fn forget_pages(&mut self) {
        self.bulk.clear();
        self.urgent.clear();
        self.requests.clear();
    }
}

/// What the thread of the bulk channel sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Job {
    /// The pages of the pass that no thread has taken. `hand` is the one that is protected, and read as it is sent (or what was read of it, where that
    /// comes first); `told` is that the pass's end was.
    Pages {
        pass: u32,
        hand: Option<(usize, Option<u8>)>,
        told: bool,
    },
    Digests {
        pass: u32,
        of: Mask,
    },
    /// What is left is claimed as it goes.
    Rest {
        pass: u32,
    },
}

/// A lost link that is being taken up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Dial {
    No,
    /// Not tried yet.
    Wanted,
    /// Hello is said.
    Said,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Here {
    pub(super) session: Keyed<SourceSession>,
    /// A step that it has not done yet: while the guest runs, that takes its time.
    pub(super) todo: Option<Action>,
    pub(super) running: bool,
    pub(super) paused: bool,
    /// It has what only the side that runs the guest may have.
    pub(super) holds: bool,
    pub(super) committed: bool,
    /// The target has renounced the guest, or the commit never left.
    pub(super) given_back: bool,
    pub(super) resume_failed: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) crashed: bool,
    pub(super) link: usize,
    pub(super) connected: bool,
    pub(super) dial: Dial,
    /// Attempts at a target that is gone.
    pub(super) in_vain: bool,
    pub(super) timed_out: bool,
    pub(super) switch_asked: bool,
    pub(super) live_passes: u8,
    /// Each page is the number of its writes.
    pub(super) memory: [u8; PAGES],
    pub(super) protected: Mask,
    pub(super) marked: Mask,
    /// Harvested, or there from the start, and of no pass yet.
    pub(super) pending: Mask,
    /// What nobody has taken of the pass under way.
    pub(super) in_pass: Mask,
    pub(super) job: Option<Job>,
    pub(super) claims: Option<Mask>,
    pub(super) serving: bool,
    pub(super) early: Vec<(usize, bool)>,
    pub(super) lacking: Mask,
    pub(super) writes_left: u8,
}

/// Whether the guest may still be started without the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    Open,
    Committed,
    Abandoned,
}

/// The target's memory once the guest is about to run without all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Lazy {
    pub(super) fate: Fate,
    pub(super) lacking: Mask,
    /// What is not makes a fault.
    pub(super) present: Mask,
    pub(super) asked: Mask,
    pub(super) waits: Mask,
    pub(super) lines_up: bool,
    pub(super) ended: bool,
    /// What the guest wrote, wherever it was then.
    pub(super) model: [u8; PAGES],
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct There {
    pub(super) session: Keyed<TargetSession>,
    pub(super) running: bool,
    pub(super) holds: bool,
    pub(super) outcome: Option<TargetOutcome>,
    pub(super) crashed: bool,
    pub(super) stopped: bool,
    pub(super) link: usize,
    pub(super) connected: bool,
    /// A thread has found its channel lost, and the session has not heard of it.
    pub(super) loss_noticed: bool,
    /// The same, of the last page.
    pub(super) last_came: bool,
    pub(super) collected: Mask,
    pub(super) pages: [u8; PAGES],
    pub(super) suspect: Mask,
    pub(super) compared: u8,
    pub(super) differ: Mask,
    pub(super) loaded: bool,
    pub(super) started: bool,
    pub(super) lazy: Option<Lazy>,
    /// It runs, and the rest is being taken.
    pub(super) rest: bool,
    pub(super) touches_left: u8,
    pub(super) writes_left: u8,
}

#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct World {
    pub(super) here: Here,
    pub(super) there: There,
    /// Of all sets of channels there ever were.
    pub(super) links: Vec<Link>,
    pub(super) fence: Option<Fence>,
    /// How much may still go wrong.
    pub(super) faults_left: u8,
    /// Nothing went wrong so far.
    pub(super) calm: bool,
    /// The first promise that was broken.
    pub(super) broken: Option<Promise>,
}

impl Here {
    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

impl There {
    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

// Of a host that has ended only how it ended counts, so that states which differ in what it left lying about are one.
impl Hash for Here {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let outcome = self.outcome.as_ref().map(std::mem::discriminant);
        (self.running, self.holds, self.committed, self.given_back, self.resume_failed).hash(state);
        (outcome, self.crashed, self.memory).hash(state);
        if self.ended() {
            return;
        }
        self.session.hash(state);
        // What takes its time has no more to it than its name.
        self.todo.as_ref().map(std::mem::discriminant).hash(state);
        (self.paused, self.link, self.connected, self.dial, self.in_vain).hash(state);
        (self.timed_out, self.switch_asked, self.live_passes).hash(state);
        (self.protected, self.marked, self.pending, self.in_pass, self.job).hash(state);
        (self.claims, self.serving, &self.early, self.lacking, self.writes_left).hash(state);
    }
}

impl Hash for There {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let outcome = self.outcome.as_ref().map(std::mem::discriminant);
        (self.running, self.holds, outcome, self.crashed, self.stopped, self.started, self.rest).hash(state);
        (self.pages, self.lazy).hash(state);
        if self.ended() {
            return;
        }
        self.session.hash(state);
        (self.link, self.connected, self.loss_noticed, self.last_came, self.collected).hash(state);
        (self.suspect, self.compared, self.differ, self.loaded).hash(state);
        (self.touches_left, self.writes_left).hash(state);
    }
}
