//! State of the model: two hosts with the production sessions, and the links between them.

use super::arbiter::ModelArbiter;
use super::judge::Promise;
use crate::source::session::Session as SourceSession;
use crate::target::session::{Outcome as TargetOutcome, Session as TargetSession};
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use vmferry_core::{Gpa, MachineConfig, Region, RegionId};
use vmferry_protocol::source::{Action, Outcome};
use vmferry_wire::{MissingPages, RegionRun};

pub(super) const PAGES: usize = 2;
pub(super) const REGION: RegionId = RegionId(0);
/// Set of all pages.
pub(super) const ALL: Mask = (1 << PAGES) - 1;
/// Content of a damaged page.
pub(super) const DAMAGED: u8 = u8::MAX;

/// Set of pages.
pub(super) type Mask = u8;

pub(super) fn has(mask: Mask, page: usize) -> bool {
    mask >> page & 1 != 0
}

/// Returns the pages of a set, lowest first.
pub(super) fn pages(mask: Mask) -> impl Iterator<Item = usize> {
    (0..PAGES).filter(move |page| has(mask, *page))
}

/// Removes a page from a set. Returns true if the page was in the set.
pub(super) fn take(mask: &mut Mask, page: usize) -> bool {
    let had = has(*mask, page);
    *mask &= !(1 << page);
    had
}

pub(super) fn machine() -> MachineConfig {
    let region = Region { id: REGION, gpa: Gpa(0), len: (PAGES as u64) << 12 };
    MachineConfig { kind: "model".into(), vcpus: 1, regions: vec![region], extra: vec![], features: vec![] }
}

/// Returns a set in its wire format.
pub(super) fn piece_of(mask: Mask) -> MissingPages {
    MissingPages { region: REGION, first: 0, words: u64::from(mask).to_le_bytes().to_vec() }
}

pub(super) fn mask_of(piece: &MissingPages) -> Mask {
    piece.words[0]
}

pub(super) fn runs_of(mask: Mask) -> Vec<RegionRun> {
    pages(mask).map(|page| RegionRun { region: REGION, first: page as u64, count: 1 }).collect()
}

pub(super) fn mask_of_runs(runs: &[RegionRun]) -> Mask {
    runs.iter().map(|run| 1 << run.first).sum()
}

/// Value of a production type that has no `Hash`, with a hash of everything in it that affects
/// decisions. Two values with the same hash count as equal: the checker distinguishes states by 64
/// bits anyway.
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
    /// Returns a message with a hash of its complete debug text.
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
    /// Changes the value, or a copy of it if other states share it.
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

/// Cargo of a control channel to the target.
#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) enum ToTargetCargo {
    /// Hello of a control channel that takes up a lost link.
    Back,
    Message(Keyed<vmferry_wire::ToTarget>),
}

/// Cargo of a control channel to the source.
#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) enum ToSourceCargo {
    /// Answer to [`ToTargetCargo::Back`].
    Reply(bool),
    Message(Keyed<vmferry_wire::ToSource>),
}

/// Cargo of the channels for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Cargo {
    Hello,
    Page {
        page: usize,
        content: u8,
    },
    /// Digests of these pages, complete.
    Digests {
        of: Mask,
        contents: [u8; PAGES],
    },
    Barrier(u32),
}

/// Set of channels. Each channel keeps its order, but the channels are not ordered relative to each
/// other.
#[derive(Debug, Clone, Default, PartialEq, Hash)]
pub(super) struct Link {
    pub(super) down: VecDeque<ToTargetCargo>,
    pub(super) up: VecDeque<ToSourceCargo>,
    pub(super) bulk: VecDeque<Cargo>,
    pub(super) urgent: VecDeque<Cargo>,
    /// Requested pages, each with a flag for a request after damage.
    pub(super) requests: VecDeque<(usize, bool)>,
    /// True if nothing more is transmitted. Cargo that is on its way may arrive until its receiver
    /// notices.
    pub(super) cut: bool,
    /// True if the channels for pages are cut, but not the control channel.
    pub(super) pages_cut: bool,
    /// True if a thread of the target has found that its channel is lost.
    pub(super) noticed: bool,
    pub(super) source_closed: bool,
    pub(super) target_closed: bool,
}

impl Link {
    /// Returns true if cargo from the source is lost.
    pub(super) fn dead(&self) -> bool {
        self.cut || self.source_closed || self.target_closed
    }

    pub(super) fn forget_pages(&mut self) {
        self.bulk.clear();
        self.urgent.clear();
        self.requests.clear();
    }
}

/// Work of the thread of the bulk channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Job {
    /// Pages of the pass that no thread has taken. `hand` is the page that is protected, with its
    /// content if it was read before. `told` is true if the end of the pass was sent.
    Pages {
        pass: u32,
        hand: Option<(usize, Option<u8>)>,
        told: bool,
    },
    Digests {
        pass: u32,
        of: Mask,
    },
    /// Remaining pages, which are claimed one by one.
    Remaining {
        pass: u32,
    },
}

/// State of reopening a lost link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DialState {
    No,
    /// Not tried yet.
    Wanted,
    /// The hello was sent.
    Said,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct SourceState {
    pub(super) session: Keyed<SourceSession>,
    /// Action that was not performed yet: while the guest runs, it takes time.
    pub(super) todo: Option<Action>,
    pub(super) running: bool,
    pub(super) paused: bool,
    /// True if the source holds what only the host that runs the guest may hold.
    pub(super) holds: bool,
    pub(super) committed: bool,
    /// True if the target has renounced the guest, or the commit was not sent.
    pub(super) given_back: bool,
    pub(super) resume_failed: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) crashed: bool,
    pub(super) link: usize,
    pub(super) connected: bool,
    pub(super) dial: DialState,
    /// True after an attempt to reach a target that has ended.
    pub(super) in_vain: bool,
    pub(super) timed_out: bool,
    pub(super) switch_requested: bool,
    pub(super) live_passes: u8,
    /// Content of each page: the number of its writes. In a handoff, the target has the same
    /// memory.
    pub(super) memory: [u8; PAGES],
    /// Content of the memory when the device state was saved. `None` while the guest runs.
    pub(super) saved: Option<[u8; PAGES]>,
    pub(super) protected: Mask,
    pub(super) marked: Mask,
    /// Pages that were harvested, or are dirty from the start, and are in no pass yet.
    pub(super) pending: Mask,
    /// Pages of the present pass that no thread has taken.
    pub(super) in_pass: Mask,
    pub(super) job: Option<Job>,
    pub(super) claims: Option<Mask>,
    pub(super) serving: bool,
    pub(super) early: Vec<(usize, bool)>,
    pub(super) missing: Mask,
    pub(super) writes_left: u8,
}

/// State of the permission to start the guest without the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    Open,
    Committed,
    Abandoned,
}

/// The target's memory after the handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Paging {
    pub(super) fate: Fate,
    pub(super) missing: Mask,
    /// Pages that are present. Other pages make a fault.
    pub(super) present: Mask,
    pub(super) requested: Mask,
    pub(super) waits: Mask,
    pub(super) lines_up: bool,
    pub(super) ended: bool,
    /// Expected content: the writes of the guest on either host.
    pub(super) model: [u8; PAGES],
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct TargetState {
    pub(super) session: Keyed<TargetSession>,
    pub(super) running: bool,
    pub(super) holds: bool,
    pub(super) outcome: Option<TargetOutcome>,
    pub(super) crashed: bool,
    pub(super) stopped: bool,
    pub(super) link: usize,
    pub(super) connected: bool,
    /// True if a thread has found that its channel is lost, and the session has not been told.
    pub(super) loss_noticed: bool,
    /// True if a thread has placed the last page, and the session has not been told.
    pub(super) last_came: bool,
    pub(super) collected: Mask,
    pub(super) pages: [u8; PAGES],
    /// True if the target has mapped the memory of the source.
    pub(super) shares: bool,
    pub(super) mismatched: Mask,
    pub(super) compared: u8,
    pub(super) differ: Mask,
    pub(super) loaded: bool,
    pub(super) started: bool,
    pub(super) paging: Option<Paging>,
    /// True if the guest runs, and the rest of its memory is being received.
    pub(super) in_postcopy: bool,
    pub(super) touches_left: u8,
    pub(super) writes_left: u8,
}

#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct World {
    pub(super) source: SourceState,
    pub(super) target: TargetState,
    /// All sets of channels so far.
    pub(super) links: Vec<Link>,
    pub(super) arbiter: Option<ModelArbiter>,
    /// Number of faults that may still happen.
    pub(super) faults_left: u8,
    /// True if there was no fault so far.
    pub(super) fault_free: bool,
    /// First promise that was broken.
    pub(super) broken: Option<Promise>,
}

impl SourceState {
    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

impl TargetState {
    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

// For a host that has ended, only the outcome is hashed, so that states that differ only in its
// leftover data are equal.
impl Hash for SourceState {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let outcome = self.outcome.as_ref().map(std::mem::discriminant);
        (self.running, self.holds, self.committed, self.given_back, self.resume_failed).hash(state);
        (outcome, self.crashed, self.memory, self.saved).hash(state);
        if self.ended() {
            return;
        }
        self.session.hash(state);
        // An action that takes time is hashed by its name only.
        self.todo.as_ref().map(std::mem::discriminant).hash(state);
        (self.paused, self.link, self.connected, self.dial, self.in_vain).hash(state);
        (self.timed_out, self.switch_requested, self.live_passes).hash(state);
        (self.protected, self.marked, self.pending, self.in_pass, self.job).hash(state);
        (self.claims, self.serving, &self.early, self.missing, self.writes_left).hash(state);
    }
}

impl Hash for TargetState {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let outcome = self.outcome.as_ref().map(std::mem::discriminant);
        (self.running, self.holds, outcome, self.crashed, self.stopped, self.started, self.in_postcopy)
            .hash(state);
        (self.pages, self.shares, self.paging).hash(state);
        if self.ended() {
            return;
        }
        self.session.hash(state);
        (self.link, self.connected, self.loss_noticed, self.last_came, self.collected).hash(state);
        (self.mismatched, self.compared, self.differ, self.loaded).hash(state);
        (self.touches_left, self.writes_left).hash(state);
    }
}
