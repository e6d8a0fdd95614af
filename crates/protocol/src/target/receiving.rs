//! Receiving phase: the passes over memory, the device state, and the digests of a verification
//! arrive.

use super::ready::Ready;
use super::{Action, Channels, Event, Memory, Next, State, TargetContext, fail, misplaced};
use vmferry_core::{RunState, Section};
use vmferry_wire::{
    LocalRegion, MAX_SECTIONS, MAX_STATE_BYTES, MAX_STREAM_BYTES, MAX_STREAMS, Refusal, RefusalCode,
    ToSource, ToTarget,
};

/// Device state that has arrived so far.
#[derive(Debug, Clone, Default)]
struct DeviceState {
    sections: Vec<Section>,
    bytes: usize,
    /// True if the source has sent all of it.
    complete: bool,
}

impl DeviceState {
    /// Adds a section. Returns an error if the state becomes larger than the protocol allows, or
    /// was already complete.
    fn add(&mut self, section: Section) -> Result<(), Refusal> {
        self.bytes += section.name.len() + section.payload.len();
        if self.bytes > MAX_STATE_BYTES || self.sections.len() == MAX_SECTIONS || self.complete {
            let detail =
                format!("more device state than the protocol allows ({} MiB)", MAX_STATE_BYTES >> 20);
            return Err(Refusal::new(RefusalCode::State, detail));
        }
        self.sections.push(section);
        Ok(())
    }

    /// Records that the source has sent all of its `sections` sections. Returns an error if another
    /// number of sections has arrived.
    fn end(&mut self, sections: u32) -> Result<(), Refusal> {
        self.complete = true;
        let came = self.sections.len();
        if usize::try_from(sections) == Ok(came) {
            return Ok(());
        }
        let detail = format!("{came} of {sections} sections of device state arrived");
        Err(Refusal::new(RefusalCode::State, detail))
    }
}

/// Reception of the device state of a trial pause, with which the VM prepares itself.
#[derive(Debug, Clone)]
enum Trial {
    /// The VM does not need the state, or has received it.
    NotWanted,
    /// The VM needs the state, which has not arrived completely.
    Coming(DeviceState),
    /// The VM prepares itself.
    Preparing,
}

/// Memory that the VM maps instead of receiving pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum LocalMemory {
    /// The source has sent no descriptors, and may send pages.
    None,
    /// The VM maps the memory.
    Mapping,
    /// The VM has mapped the memory. It contains every page of the guest.
    Taken,
}

/// Reception of the guest.
#[derive(Debug, Clone)]
pub(super) struct Receiving {
    /// For each bulk channel, the number of passes that have arrived completely on it.
    barriers: Vec<u32>,
    /// Number of passes that have arrived completely on all bulk channels.
    received: u32,
    /// Number of the last pass, once the source has named it.
    last_pass: Option<u32>,
    /// Number of the pass whose digests are to be compared.
    verify_pass: Option<u32>,
    /// True if no page has a digest mismatch after the last received pass.
    clean: bool,
    memory: LocalMemory,
    trial: Trial,
    state: DeviceState,
    /// For each stream of device state, true if it is complete.
    streams: Vec<bool>,
}

impl Receiving {
    pub(super) fn begin(channels: Channels, wants_trial: bool) -> Self {
        Self {
            barriers: vec![0; usize::from(channels.bulk)],
            received: 0,
            last_pass: None,
            verify_pass: None,
            clean: false,
            memory: LocalMemory::None,
            trial: if wants_trial { Trial::Coming(DeviceState::default()) } else { Trial::NotWanted },
            state: DeviceState::default(),
            streams: Vec::new(),
        }
    }

    pub(super) fn handle(mut self: Box<Self>, context: &mut TargetContext, event: Event) -> Next {
        match event {
            // Pages of such a source would be written over the memory of a guest that runs.
            event if self.memory != LocalMemory::None && is_for_pages(&event) => {
                fail(misplaced(&event, "mapping the memory of the guest"))
            }
            Event::Message(ToTarget::LocalMemory { regions })
                if context.takes_memory && !self.has_begun_passes() =>
            {
                self.map_memory(regions)
            }
            Event::MemoryTaken if self.memory == LocalMemory::Mapping => {
                self.memory = LocalMemory::Taken;
                self.stay(vec![Action::Send(ToSource::MemoryTaken)])
            }
            Event::Message(ToTarget::Pass { .. }) => self.stay(Vec::new()),
            Event::Message(ToTarget::Final { pass }) => {
                self.last_pass = Some(pass);
                self.stay(Vec::new())
            }
            Event::Message(ToTarget::Section(section)) => self.section(section),
            Event::Message(ToTarget::StateEnd { sections }) => self.state_end(sections),
            Event::Message(ToTarget::StaysPaused) if !self.state.complete => {
                context.wanted = RunState::Paused;
                self.stay(Vec::new())
            }
            Event::Message(
                message @ (ToTarget::StreamOpen { .. }
                | ToTarget::StreamBytes { .. }
                | ToTarget::StreamEnd { .. }),
            ) => self.stream(message),
            Event::Message(message @ (ToTarget::TrialSection(_) | ToTarget::TrialEnd { .. })) => {
                self.trial(message)
            }
            Event::VmPrepared { load_us } if matches!(self.trial, Trial::Preparing) => self.prepared(load_us),
            Event::Message(ToTarget::Verify { pass }) => {
                self.verify_pass = Some(pass);
                let compared = self.compared_if_complete();
                self.stay(compared.into_iter().collect())
            }
            Event::Message(ToTarget::Load) => self.load(),
            Event::Message(ToTarget::Lacking(piece)) if context.mode.may_use_postcopy() => {
                self.stay(vec![Action::TakeMissing(piece)])
            }
            Event::Message(ToTarget::LoadLazily { pages }) if context.mode.may_use_postcopy() => {
                self.load_with_missing(pages)
            }
            Event::Barrier { channel, pass } => self.barrier(channel, pass),
            Event::DigestMismatches { pass, pages, runs } => {
                self.clean = pages == 0;
                self.stay(vec![Action::Send(ToSource::Received { pass, mismatches: pages, runs })])
            }
            Event::LookedUp { channel, frame, unknown } => {
                self.stay(vec![Action::Send(ToSource::UnknownPages { channel, frame, unknown })])
            }
            Event::Compared { pages, mismatched, samples } => {
                self.stay(vec![Action::Send(ToSource::Verified { pages, mismatched, samples })])
            }
            // A late answer, or the answer to another request.
            Event::ArbiterAnswered(..) => self.stay(Vec::new()),
            Event::ChannelUp => {
                fail(Refusal::new(RefusalCode::Protocol, "the source opened more channels than it announced"))
            }
            event => fail(misplaced(&event, "receiving the guest")),
        }
    }

    fn prepared(mut self: Box<Self>, load_us: Option<u64>) -> Next {
        self.trial = Trial::NotWanted;
        // A source that sends the state of a trial pause supports `Costs`.
        let costs = load_us.map(|load_us| ToSource::Costs { load_us });
        self.stay(costs.into_iter().chain([ToSource::Prepared]).map(Action::Send).collect())
    }

    /// Returns true if the source has begun to send pages.
    fn has_begun_passes(&self) -> bool {
        self.last_pass.is_some() || self.barriers.iter().any(|ended| *ended > 0)
    }

    fn map_memory(mut self: Box<Self>, regions: Vec<LocalRegion>) -> Next {
        self.memory = LocalMemory::Mapping;
        self.stay(vec![Action::TakeMemory(regions)])
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
        // Whether pages have a digest mismatch is unknown until they are counted.
        self.clean = false;
        let compared = self.compared_if_complete();
        self.stay([Action::CountDigestMismatches { pass }].into_iter().chain(compared).collect())
    }

    fn compared_if_complete(&mut self) -> Option<Action> {
        let complete = self.verify_pass.is_some_and(|pass| self.received > pass);
        complete.then(|| {
            self.verify_pass = None;
            Action::CountMismatches
        })
    }

    fn section(mut self: Box<Self>, section: Section) -> Next {
        match self.state.add(section) {
            Ok(()) => self.stay(Vec::new()),
            Err(why) => fail(why),
        }
    }

    fn state_end(mut self: Box<Self>, sections: u32) -> Next {
        match self.state.end(sections) {
            Ok(()) => self.stay(Vec::new()),
            Err(why) => fail(why),
        }
    }

    /// Handles a message of a stream of device state.
    fn stream(mut self: Box<Self>, message: ToTarget) -> Next {
        let name = message.name();
        if let Some(action) = self.stream_action(message) {
            return self.stay(vec![action]);
        }
        let detail = format!("the source sent {name} out of order, or longer than the protocol allows");
        fail(Refusal::new(RefusalCode::Protocol, detail))
    }

    fn stream_action(&mut self, message: ToTarget) -> Option<Action> {
        Some(match message {
            ToTarget::StreamOpen { stream, name } => {
                let next = self.streams.len();
                if usize::try_from(stream) != Ok(next) || next == MAX_STREAMS {
                    return None;
                }
                self.streams.push(false);
                Action::OpenStream(name)
            }
            ToTarget::StreamBytes { stream, bytes } => {
                self.open_stream(stream)?;
                if bytes.len() > MAX_STREAM_BYTES {
                    return None;
                }
                Action::WriteStream { stream, bytes }
            }
            ToTarget::StreamEnd { stream } => {
                *self.open_stream(stream)? = true;
                Action::FinishStream { stream }
            }
            _ => return None,
        })
    }

    /// Returns the completion flag of `stream`, if the stream exists and is not complete.
    fn open_stream(&mut self, stream: u32) -> Option<&mut bool> {
        let complete = self.streams.get_mut(usize::try_from(stream).ok()?)?;
        (!*complete).then_some(complete)
    }

    /// Returns true if all device state has arrived.
    fn state_is_complete(&self) -> bool {
        self.state.complete && self.streams.iter().all(|complete| *complete)
    }

    /// Handles a message that carries device state of a trial pause.
    fn trial(mut self: Box<Self>, message: ToTarget) -> Next {
        let Trial::Coming(state) = &mut self.trial else {
            return fail(misplaced(&Event::Message(message), "receiving the guest"));
        };
        let taken = match message {
            ToTarget::TrialSection(section) => state.add(section),
            ToTarget::TrialEnd { sections } => state.end(sections),
            other => return fail(misplaced(&Event::Message(other), "receiving the guest")),
        };
        if let Err(why) = taken {
            return fail(why);
        }
        if !state.complete {
            return self.stay(Vec::new());
        }
        let sections = std::mem::take(&mut state.sections);
        self.trial = Trial::Preparing;
        self.stay(vec![Action::PrepareVm(sections)])
    }

    /// Loads the device state, if the memory is complete and has no digest mismatch. The target
    /// checks this itself, and does not rely on the source.
    fn load(self) -> Next {
        let arrived = self.last_pass.is_some_and(|pass| self.received > pass);
        let complete = self.state_is_complete();
        let has_memory = self.memory == LocalMemory::Taken || (arrived && self.clean);
        if !(has_memory && complete) {
            let detail = format!(
                "Load arrived too early (last pass complete: {arrived}, no digest mismatch: {}, state complete: {complete})",
                self.clean
            );
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        let ready = Ready::begin(Memory::Complete);
        (State::Ready(ready), vec![Action::Load(self.state.sections)])
    }

    /// Loads the device state over memory with `pages` missing pages, which the source has named.
    fn load_with_missing(self, pages: u64) -> Next {
        if !self.state_is_complete() {
            let detail = "the source hands over a guest whose device state it has not sent";
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        if self.barriers.iter().any(|ended| *ended != self.received) {
            let detail = "the source hands over a guest in the middle of a pass";
            return fail(Refusal::new(RefusalCode::Protocol, detail));
        }
        let ready = Ready::begin(Memory::Missing { all_arrived: None });
        (State::Ready(ready), vec![Action::BeginDemandPaging { pages }, Action::Load(self.state.sections)])
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let Self { barriers, received, last_pass, verify_pass, clean, memory, trial, state, streams } = self;
        (barriers, received, last_pass, verify_pass, clean, memory, streams).hash(hasher);
        let figures =
            |DeviceState { sections, bytes, complete }: &DeviceState| (sections.len(), *bytes, *complete);
        figures(state).hash(hasher);
        std::mem::discriminant(trial).hash(hasher);
        if let Trial::Coming(trial) = trial {
            figures(trial).hash(hasher);
        }
    }
}

/// Returns true for the events of pages and of their comparison, and for a second set of
/// descriptors.
fn is_for_pages(event: &Event) -> bool {
    matches!(
        event,
        Event::Message(
            ToTarget::Pass { .. }
                | ToTarget::Final { .. }
                | ToTarget::Verify { .. }
                | ToTarget::Lacking(_)
                | ToTarget::LoadLazily { .. }
                | ToTarget::LocalMemory { .. }
        ) | Event::Barrier { .. }
            | Event::LookedUp { .. }
    )
}
