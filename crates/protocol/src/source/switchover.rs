//! Switchover phase, from the saved state to the commit, in which the guest is paused. The source
//! sends the last pages, or names the missing pages. If requested, the pages are verified. Then the
//! target loads the device state.

use super::commit::Committed;
use super::context::{SourceContext, Urgency};
use super::{Next, State, ending, misplaced};
use crate::source::events::{Action, Event, Outcome, Pass, Verification};
use crate::source::settings::MigrationMode;
use std::time::Duration;
use vmferry_core::PageRun;
use vmferry_wire::{Refusal, RefusalCode, RegionRun, ToSource, ToTarget};

/// Number of times that pages with a digest mismatch are sent again before the migration fails.
const MAX_RESENDS: u32 = 4;
/// Maximum number of pages that the message of a failed verification names. The target may name up
/// to 65,536 pages.
const MOST_NAMED: usize = 16;

/// Kind of switchover, by the memory that the target has when it starts the guest.
#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The target has all of the memory.
    Complete,
    /// Pages are missing and follow in postcopy. The target knows which pages are missing.
    HandOver,
    /// The target has mapped the memory of the guest, and no page is sent.
    ///
    /// The memory needs no rule of its own for the question who may write it. The guest's writes
    /// come from its vCPUs and devices, which are quiesced on the source from the pause on. On the
    /// target, they begin with the start of the guest, after the commit. Therefore at most one
    /// process writes the memory at any time, for the same reason for which the vCPUs of at most
    /// one process run. The exception is saving and loading of device state, which may write the
    /// memory while the guest is paused. Saving ends before the state is sent. What loading writes
    /// must not change the guest, because the source may resume it afterwards
    /// ([`TargetVm::take_memory`](vmferry_core::TargetVm::take_memory)).
    Shared,
}

/// Switchover of the guest.
#[derive(Debug, Clone)]
pub(super) struct Switchover {
    step: Step,
    kind: Kind,
    /// Time at which the guest was paused.
    paused: Duration,
    /// Downtime that was expected when the guest was stopped.
    pub(super) predicted: Option<Duration>,
    /// Pages with a digest mismatch that must be sent again.
    mismatched: Vec<RegionRun>,
    /// Number of times that such pages were sent again.
    resends: u32,
    /// Number of pages that were named to the target as missing.
    missing: u64,
    /// Number of pages that the verification must compare, once the number is known.
    to_compare: Option<u64>,
    /// True if all streams of device state were sent.
    streamed: bool,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    LastHarvest,
    /// The target is being told which pages are missing.
    NamingMissing,
    LastPass {
        sent: bool,
        received: bool,
    },
    Verifying {
        sent: bool,
        received: bool,
        verified: bool,
    },
    /// Everything was sent except the streams of device state.
    Streaming,
    Loading,
    /// The target is ready, and the source releases the resources that only one host may hold.
    Releasing,
}

impl Switchover {
    /// Begins the switchover of a guest that was paused at the time `paused`. `state` are the
    /// messages that carry its device state. `mismatched` are the pages for which the target
    /// reported a digest mismatch in the last pass.
    pub(super) fn begin(
        context: &SourceContext,
        (kind, predicted): (Kind, Option<Duration>),
        paused: Duration,
        state: Vec<ToTarget>,
        mismatched: Vec<RegionRun>,
    ) -> Next {
        // Pages with a digest mismatch count as dirty, so the last pass sends them again. Only a
        // handover must name them.
        let mismatched = if kind == Kind::HandOver { mismatched } else { Vec::new() };
        let last = (kind == Kind::Complete).then_some(ToTarget::Final { pass: context.pass });
        let mut actions: Vec<_> = last.into_iter().chain(state).map(Action::Send).collect();
        // Streams continue in parallel with the last pages.
        let streamed = context.streams.is_empty();
        actions.extend((!streamed).then_some(Action::StreamState));
        let switchover = Self {
            step: Step::LastHarvest,
            kind,
            paused,
            predicted,
            mismatched,
            resends: 0,
            missing: 0,
            to_compare: None,
            streamed,
        };
        if kind == Kind::HandOver && context.settings.mode == MigrationMode::Postcopy {
            // No harvest is needed, because every page is missing.
            return Box::new(switchover).name_missing(actions);
        }
        if kind == Kind::Shared {
            // Every write is already in the memory of the target.
            let (state, load) = Box::new(switchover).load();
            actions.extend(load);
            return (state, actions);
        }
        // The harvest must follow the saving of the state, because saving can write guest memory
        // (hazards.md 13). The state is sent before the harvest, so that it is on its way while the
        // pages are harvested.
        actions.push(Action::Harvest);
        (State::Switchover(Box::new(switchover)), actions)
    }

    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn hands_over(&self) -> bool {
        self.kind == Kind::HandOver
    }

    /// Returns an error if the source has been sending for so long that the guest has been paused
    /// for too long.
    pub(super) fn too_slow(&self, context: &SourceContext, now: Duration) -> Option<Refusal> {
        // The time of a verification is not limited here, because it compares every page. An urgent
        // switchover has no limit either.
        let sends = matches!(self.step, Step::LastPass { sent: false, .. } | Step::Streaming);
        let bounded = sends && context.urgency != Urgency::Switch;
        let longest = context.settings.downtime_limit.saturating_add(context.patience());
        (bounded && now.saturating_sub(self.paused) > longest).then(|| {
            let detail = format!(
                "the target received the remaining data so slowly that the guest has been paused for {longest:?}"
            );
            Refusal::new(RefusalCode::Timeout, detail)
        })
    }

    pub(super) fn handle(mut self: Box<Self>, context: &mut SourceContext, event: Event) -> Next {
        match (self.step, event) {
            (Step::LastHarvest, Event::Harvested { .. }) if self.kind == Kind::HandOver => {
                self.name_missing(Vec::new())
            }
            (Step::LastHarvest, Event::Harvested { .. }) => {
                self.send_last(context, Pass::Dirty { first: false }, Vec::new())
            }
            (Step::NamingMissing, Event::HandedOver { pages, skipped }) => {
                self.missing = pages;
                // A missing page is compared when it arrives.
                let nothing_on_target = pages.saturating_add(skipped) == context.pages;
                if !context.settings.verify || nothing_on_target { self.load() } else { self.verify(context) }
            }
            (Step::LastPass { received, .. }, Event::PassSent { .. }) => {
                self.last_pass(context, true, received)
            }
            (Step::LastPass { sent, .. }, Event::Message(ToSource::Received { pass, mismatches, runs }))
                if pass == context.pass =>
            {
                self.received(context, sent, mismatches, runs)
            }
            (Step::Verifying { .. }, Event::Comparing { pages }) => {
                self.to_compare = Some(pages);
                (State::Switchover(self), Vec::new())
            }
            (Step::Verifying { received, verified, .. }, Event::PassSent { .. }) => {
                self.verifying(context, true, received, verified)
            }
            (Step::Verifying { sent, verified, .. }, Event::Message(ToSource::Received { pass, .. }))
                if pass == context.pass =>
            {
                self.verifying(context, sent, true, verified)
            }
            (
                Step::Verifying { sent, received, .. },
                Event::Message(ToSource::Verified { pages, mismatched, samples }),
            ) => {
                context.summary.verification = Some(Verification { pages, mismatched, samples });
                self.verifying(context, sent, received, true)
            }
            (Step::Streaming, Event::StateStreamed { .. }) => {
                self.streamed = true;
                self.load()
            }
            (_, Event::StateStreamed { .. }) if !self.streamed => {
                self.streamed = true;
                (State::Switchover(self), Vec::new())
            }
            (Step::Loading, Event::Message(ToSource::Ready { load_us })) => {
                context.summary.load_time = Duration::from_micros(load_us);
                self.step = Step::Releasing;
                (State::Switchover(self), vec![Action::Release])
            }
            (Step::Releasing, Event::Released) => {
                let committed = Committed::new(self.kind);
                (State::Committed(committed), vec![Action::Send(ToTarget::Commit)])
            }
            (step, event) => fail(misplaced(&event, super::Step::Switchover(step))),
        }
    }

    fn name_missing(mut self: Box<Self>, mut actions: Vec<Action>) -> Next {
        self.step = Step::NamingMissing;
        actions.push(Action::HandOver { also: std::mem::take(&mut self.mismatched) });
        (State::Switchover(self), actions)
    }

    fn send_last(mut self: Box<Self>, context: &SourceContext, pass: Pass, mut actions: Vec<Action>) -> Next {
        self.step = Step::LastPass { sent: false, received: false };
        actions.push(Action::SendPass { number: context.pass, pass });
        (State::Switchover(self), actions)
    }

    fn received(
        mut self: Box<Self>,
        context: &mut SourceContext,
        sent: bool,
        mismatches: u64,
        runs: Vec<RegionRun>,
    ) -> Next {
        if mismatches != 0 && runs.is_empty() {
            let detail = "the target reported pages with a digest mismatch and did not name them";
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        self.mismatched = if mismatches == 0 { Vec::new() } else { runs };
        self.last_pass(context, sent, true)
    }

    fn last_pass(mut self: Box<Self>, context: &mut SourceContext, sent: bool, received: bool) -> Next {
        if !(sent && received) {
            self.step = Step::LastPass { sent, received };
            return (State::Switchover(self), Vec::new());
        }
        if !self.mismatched.is_empty() {
            return self.resend(context);
        }
        context.pass += 1;
        if context.settings.verify { self.verify(context) } else { self.load() }
    }

    fn resend(mut self: Box<Self>, context: &mut SourceContext) -> Next {
        let runs = std::mem::take(&mut self.mismatched);
        self.resends += 1;
        if self.resends > MAX_RESENDS {
            let first = &runs[0];
            let detail = format!(
                "pages keep arriving with a digest mismatch ({} of {}, sent {MAX_RESENDS} times): the link or a host's memory is faulty",
                PageRun::from(first.first..first.first.saturating_add(first.count)),
                first.region,
            );
            return fail(Refusal::new(RefusalCode::Memory, detail));
        }
        let resent = &mut context.summary.digest_mismatches_resent;
        *resent = runs.iter().fold(*resent, |sum, run| sum.saturating_add(run.count));
        context.pass += 1;
        let announce = vec![Action::Send(ToTarget::Final { pass: context.pass })];
        self.send_last(context, Pass::Again(runs), announce)
    }

    fn verify(mut self: Box<Self>, context: &SourceContext) -> Next {
        self.step = Step::Verifying { sent: false, received: false, verified: false };
        let actions = vec![
            Action::Send(ToTarget::Verify { pass: context.pass }),
            Action::SendPass { number: context.pass, pass: Pass::Digests },
        ];
        (State::Switchover(self), actions)
    }

    fn verifying(
        mut self: Box<Self>,
        context: &SourceContext,
        sent: bool,
        received: bool,
        verified: bool,
    ) -> Next {
        if !(sent && received && verified) {
            self.step = Step::Verifying { sent, received, verified };
            return (State::Switchover(self), Vec::new());
        }
        let found = context.summary.verification.clone().unwrap_or_default();
        if found.mismatched > 0 {
            return fail(Refusal::new(RefusalCode::Memory, differing(&found)));
        }
        // A target that compared fewer pages than expected has not verified the memory.
        if Some(found.pages) != self.to_compare {
            let wanted = self.to_compare.unwrap_or(context.pages);
            let detail = format!("the target compared {} of {wanted} pages", found.pages);
            return fail(Refusal::new(RefusalCode::Memory, detail));
        }
        self.load()
    }

    fn load(mut self: Box<Self>) -> Next {
        if !self.streamed {
            self.step = Step::Streaming;
            return (State::Switchover(self), Vec::new());
        }
        self.step = Step::Loading;
        let load = match self.kind {
            Kind::Complete | Kind::Shared => ToTarget::Load,
            Kind::HandOver => ToTarget::LoadLazily { pages: self.missing },
        };
        (State::Switchover(self), vec![Action::Send(load)])
    }
}

fn fail(why: Refusal) -> Next {
    ending::give_up(Outcome::Failed(why), true)
}

/// Returns the text of a failed verification.
fn differing(found: &Verification) -> String {
    let Verification { pages, mismatched, samples } = found;
    let mut names: Vec<String> = samples
        .iter()
        .take(MOST_NAMED)
        .map(|name| format!("{} page {:#x}", name.region, name.page))
        .collect();
    let more = mismatched.saturating_sub(names.len() as u64);
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    format!("{mismatched} of {pages} pages differ between source and target: {}", names.join(", "))
}

#[cfg(feature = "model")]
impl Switchover {
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let Self { step: _, kind, paused, predicted: _, mismatched, resends, missing, to_compare, streamed } =
            self;
        *paused = Duration::ZERO;
        (kind, resends, missing, to_compare, streamed).hash(hasher);
        mismatched.iter().for_each(|run| (run.region, run.first, run.count).hash(hasher));
    }
}
