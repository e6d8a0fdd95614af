//! Passes over memory, the device state, and the verification.

use super::ready::Ready;
use super::{Action, Channels, Event, Memory, Next, Shared, State, fail, misplaced};
use vmferry_core::Section;
use vmferry_wire::{MAX_SECTIONS, MAX_STATE_BYTES, Refusal, RefusalCode, ToSource, ToTarget};

/// The device state as far as it has come.
#[derive(Debug, Clone, Default)]
struct DeviceState {
    sections: Vec<Section>,
    bytes: usize,
    /// The source has sent all of it.
    complete: bool,
}

/// Receiving the guest.
#[derive(Debug, Clone)]
pub(super) struct Receiving {
    /// For each bulk channel, the number of passes that it has ended.
    barriers: Vec<u32>,
    /// Number of passes that all bulk channels have ended.
    received: u32,
    /// Number of the last pass, once the source has named it.
    last_pass: Option<u32>,
    /// Number of the pass of digests that is to be compared.
    verify_pass: Option<u32>,
    /// The last pass that was received left no damaged page.
    clean: bool,
    state: DeviceState,
}

impl Receiving {
    pub(super) fn begin(channels: Channels) -> Self {
        Self {
            barriers: vec![0; usize::from(channels.bulk)],
            received: 0,
            last_pass: None,
            verify_pass: None,
            clean: false,
            state: DeviceState::default(),
        }
    }

    pub(super) fn handle(mut self: Box<Self>, shared: &Shared, event: Event) -> Next {
        match event {
            Event::Message(ToTarget::Pass { .. }) => self.stay(Vec::new()),
            Event::Message(ToTarget::Final { pass }) => {
                self.last_pass = Some(pass);
                self.stay(Vec::new())
            }
            Event::Message(ToTarget::Section(section)) => self.section(section),
            Event::Message(ToTarget::StateEnd { sections }) => self.state_end(sections),
            Event::Message(ToTarget::Verify { pass }) => {
                self.verify_pass = Some(pass);
                let compared = self.compared_if_complete();
                self.stay(compared.into_iter().collect())
            }
            Event::Message(ToTarget::Load) => self.load(),
            Event::Message(ToTarget::Lacking(piece)) if shared.mode.may_be_lazy() => {
                self.stay(vec![Action::TakeMissing(piece)])
            }
            Event::Message(ToTarget::LoadLazily { pages }) if shared.mode.may_be_lazy() => {
                self.load_with_missing(pages)
            }
            Event::Barrier { channel, pass } => self.barrier(channel, pass),
            Event::Damaged { pass, pages, runs } => {
                self.clean = pages == 0;
                self.stay(vec![Action::Send(ToSource::Received { pass, suspects: pages, runs })])
            }
            Event::Compared { pages, mismatched, samples } => {
                self.stay(vec![Action::Send(ToSource::Verified { pages, mismatched, samples })])
            }
            // Late, or of another word.
            Event::ArbiterAnswered(..) => self.stay(Vec::new()),
            Event::ChannelUp => fail(Refusal::new(RefusalCode::Protocol, "a channel too many")),
            event => fail(misplaced(&event, "receiving the guest")),
        }
    }

    fn stay(self: Box<Self>, actions: Vec<Action>) -> Next {
        (State::Receiving(self), actions)
    }

    fn barrier(mut self: Box<Self>, channel: u16, pass: u32) -> Next {
        let Some(ended) = self.barriers.get_mut(usize::from(channel)) else {
            return fail(Refusal::new(RefusalCode::Protocol, "a barrier on an unknown channel"));
        };
        if pass != *ended {
            let detail = format!("channel {channel} ended pass {pass}, expected was {ended}");
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        *ended = ended.saturating_add(1);
        let complete = self.barriers.iter().copied().min().unwrap_or(0);
        if complete == self.received {
            return self.stay(Vec::new());
        }
        self.received = complete;
        // Unknown until the damaged pages are counted.
        self.clean = false;
        let compared = self.compared_if_complete();
        self.stay([Action::CountDamaged { pass }].into_iter().chain(compared).collect())
    }

    fn compared_if_complete(&mut self) -> Option<Action> {
        let complete = self.verify_pass.is_some_and(|pass| self.received > pass);
        complete.then(|| {
            self.verify_pass = None;
            Action::CountMismatches
        })
    }

    fn section(mut self: Box<Self>, section: Section) -> Next {
        let state = &mut self.state;
        state.bytes += section.name.len() + section.payload.len();
        if state.bytes > MAX_STATE_BYTES || state.sections.len() == MAX_SECTIONS || state.complete {
            let detail =
                format!("more device state than the protocol allows ({} MiB)", MAX_STATE_BYTES >> 20);
            return fail(Refusal::new(RefusalCode::State, detail));
        }
        state.sections.push(section);
        self.stay(Vec::new())
    }

    fn state_end(mut self: Box<Self>, sections: u32) -> Next {
        self.state.complete = true;
        let came = self.state.sections.len();
        if usize::try_from(sections) == Ok(came) {
            return self.stay(Vec::new());
        }
        let detail = format!("{came} of {sections} sections of device state came");
        fail(Refusal::new(RefusalCode::State, detail))
    }

    /// Loads the state over memory that is complete and undamaged, whatever the source believes.
    fn load(self) -> Next {
        let arrived = self.last_pass.is_some_and(|pass| self.received > pass);
        if !(arrived && self.clean && self.state.complete) {
            let detail = format!(
                "load came too early (last pass complete: {arrived}, pages undamaged: {}, state complete: {})",
                self.clean, self.state.complete
            );
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        let ready = Ready::begin(Memory::Complete);
        (State::Ready(ready), vec![Action::Load(self.state.sections)])
    }

    /// Loads the state over memory of which `pages` pages are missing. The source has named them.
    fn load_with_missing(self, pages: u64) -> Next {
        if !self.state.complete {
            let detail = "the source hands over a guest whose device state it has not sent";
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        if self.barriers.iter().any(|ended| *ended != self.received) {
            let detail = "the source hands over a guest in the middle of a pass";
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        let ready = Ready::begin(Memory::Missing { all_here: None });
        (State::Ready(ready), vec![Action::BeginDemandPaging { pages }, Action::Load(self.state.sections)])
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let Self { barriers, received, last_pass, verify_pass, clean, state } = self;
        let DeviceState { sections, bytes, complete } = state;
        (barriers, received, last_pass, verify_pass, clean).hash(hasher);
        (sections.len(), bytes, complete).hash(hasher);
    }
}
