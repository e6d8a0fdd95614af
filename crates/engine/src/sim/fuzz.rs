//! Each session alone, with any event at any moment: events that a driver would report, mixed with
//! events that only a hostile peer or a broken driver would cause.

#[cfg(test)]
mod alone;

use super::rng::Rng;
use super::source;
use super::source_host::machine;
use super::target_host::tokens;
use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership, Side};
use crate::source::session::Phase;
use crate::target::session as target;
use std::time::Duration;
use vmferry_core::{RegionId, RunState, Section, StreamName};
use vmferry_wire::{
    LocalRegion, MissingPages, Mode, PagingFigures, Refusal, RefusalCode, RegionPage, RegionRun, ToSource,
    ToTarget, Token,
};

const PAGES: u64 = 8;

fn refusal() -> Refusal {
    Refusal::new(RefusalCode::Other, "fuzz")
}

fn section() -> Section {
    Section { name: "s".into(), instance: 0, version: 0, payload: vec![0; 10] }
}

fn stream(instance: u32) -> StreamName {
    StreamName { name: "device".into(), instance, version: 1 }
}

fn settings(rng: &mut Rng) -> source::Settings {
    use source::{MigrationMode, OnTimeout};
    source::Settings {
        mode: [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Hybrid, MigrationMode::Local]
            [rng.index(4)],
        channels: 1,
        verify: rng.per_mille(500),
        timeout: rng.per_mille(300).then_some(Duration::from_secs(1)),
        on_timeout: [OnTimeout::Switch, OnTimeout::Cancel, OnTimeout::Postcopy][rng.index(3)],
        reconnect_for: Duration::from_millis(rng.below(200)),
        arbiter: super::arbiter::choose(rng),
        ..source::Settings::default()
    }
}

fn local_region() -> LocalRegion {
    LocalRegion { region: RegionId(0), len: PAGES << 12, offset: 0 }
}

fn missing_pages() -> MissingPages {
    MissingPages { region: RegionId(0), first: 0, words: vec![1, 0, 0, 0, 0, 0, 0, 0] }
}

fn resume(pages: u64) -> ToSource {
    ToSource::Resume { pages, bulk: Token([1; 16]), urgent: Token([2; 16]) }
}

/// Returns any message of a target.
fn to_source(rng: &mut Rng, pass: u32) -> ToSource {
    let run = |rng: &mut Rng| RegionRun {
        region: RegionId(u32::try_from(rng.below(2)).expect("small")),
        first: [0, 3, PAGES, u64::MAX][rng.index(4)],
        count: [0, 1, PAGES, u64::MAX][rng.index(4)],
    };
    match rng.below(19) {
        0 => ToSource::Accept { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) },
        1 => ToSource::ChannelsUp,
        2..=4 => {
            let mismatches = [0, 0, 1, u64::MAX][rng.index(4)];
            let runs = (0..rng.below(3)).map(|_| run(rng)).collect();
            ToSource::Received { pass, mismatches, runs }
        }
        5 => ToSource::Verified { pages: rng.below(2) * PAGES, mismatched: rng.below(2), samples: vec![] },
        6 => ToSource::Ready { load_us: u64::MAX },
        7 => ToSource::Running { start_us: u64::MAX, cpu_us: u64::MAX },
        8 => ToSource::Returned(refusal()),
        9 => ToSource::Failed(refusal()),
        10 => ToSource::Lacking(missing_pages()),
        11 => resume([0, 1, PAGES, u64::MAX][rng.index(4)]),
        12 => ToSource::Complete(PagingFigures::default()),
        13 => ToSource::Costs { load_us: [0, u64::MAX][rng.index(2)] },
        14 => ToSource::WantsTrial,
        15 => ToSource::Prepared,
        16 => ToSource::UnknownPages { channel: 0, frame: rng.below(3), unknown: vec![255] },
        17 => ToSource::MemoryTaken,
        _ => ToSource::Pong(rng.below(3)),
    }
}

/// Returns any answer of an arbiter, or an error.
fn answer(rng: &mut Rng) -> Result<Ownership, ArbiterError> {
    match rng.below(6) {
        0 => Ok(Ownership::Open),
        1 => Ok(Ownership::Source),
        2 => Ok(Ownership::Target { runs: false }),
        3 => Ok(Ownership::Target { runs: true }),
        4 => Err(ArbiterError::NoRegister("fuzz".into())),
        _ => Err(ArbiterError::Unreachable("fuzz".into())),
    }
}

/// Returns any event of the source.
fn source_event(rng: &mut Rng, pass: u32) -> source::Event {
    use source::Event;
    match rng.below(27) {
        #[cfg(feature = "hostile")]
        26 => said(rng).map_or(Event::Tick, Event::Message),
        0..=4 => Event::Message(to_source(rng, pass)),
        5 => Event::ChannelsOpened,
        6 => Event::TrackerStarted,
        7 => {
            let fixed = Duration::from_micros(rng.below(1000));
            Event::TrialPaused {
                stop: fixed,
                save: fixed / 4,
                quiesce: fixed / 2,
                paused: fixed,
                state_bytes: rng.next(),
                trial: rng.per_mille(500).then(|| vec![section()]),
            }
        }
        8 => Event::PassSent { bytes: rng.next(), listing: Duration::ZERO, held: Duration::ZERO },
        9 => Event::Harvested { pages: rng.below(PAGES), writers: vec![rng.below(9), rng.below(9)] },
        10 => Event::Paused { wanted: [RunState::Running, RunState::Paused][rng.index(2)] },
        11 => Event::Saved { sections: vec![section()] },
        12 => Event::Resumed,
        13 => Event::LocalFailure(refusal()),
        14 if rng.per_mille(500) => Event::PeerLost("fuzz".into()),
        14 => Event::NotSent("fuzz".into()),
        15 => Event::HandedOver { pages: rng.below(PAGES), skipped: rng.below(PAGES) },
        16 => Event::Reconnected,
        17 => Event::NotReconnected("fuzz".into()),
        18 => Event::SwitchNow,
        20 => Event::Comparing { pages: rng.below(2) * PAGES },
        21 => Event::Released,
        25 => Event::StateStreamed { bytes: rng.next(), left: rng.next() },
        22..=23 => Event::ArbiterAnswered(answer(rng)),
        19 if rng.per_mille(500) => Event::Recover,
        19 if rng.per_mille(100) => Event::Abandon,
        19 if rng.per_mille(100) => Event::Pause,
        _ if rng.per_mille(300) => Event::Cancel,
        _ => Event::Tick,
    }
}

/// Adds the events of a pass that is sent and received.
fn pass_events(number: u32, kind: &source::Pass, events: &mut Vec<source::Event>) {
    use source::Event;
    let with_digests = *kind == source::Pass::Digests;
    events.extend(with_digests.then_some(Event::Comparing { pages: PAGES }));
    events.extend([
        Event::PassSent { bytes: 4096, listing: Duration::ZERO, held: Duration::ZERO },
        Event::Message(ToSource::Received { pass: number, mismatches: 0, runs: vec![] }),
    ]);
    let verified = ToSource::Verified { pages: PAGES, mismatched: 0, samples: vec![] };
    events.extend(with_digests.then_some(Event::Message(verified)));
}

/// Adds the events that a driver and a correct target would report for these actions, in order.
fn honest_source_events(actions: &[source::Action], pass: &mut u32, events: &mut Vec<source::Event>) {
    use source::{Action, Event};
    for action in actions {
        match action {
            Action::Send(ToTarget::Setup { .. }) => {
                let (bulk, urgent) = (Token([1; 16]), Token([2; 16]));
                events.push(Event::Message(ToSource::Accept { bulk, urgent, resume: Token([3; 16]) }));
            }
            Action::OpenChannels { .. } => {
                events.extend([Event::ChannelsOpened, Event::Message(ToSource::ChannelsUp)]);
            }
            Action::ShareMemory => events.push(Event::Message(ToSource::MemoryTaken)),
            Action::StartTracker => events.push(Event::TrackerStarted),
            Action::TrialPause { .. } => {
                let fixed = Duration::from_micros(50);
                events.push(Event::TrialPaused {
                    stop: fixed,
                    save: fixed,
                    quiesce: fixed,
                    paused: fixed,
                    state_bytes: 64,
                    trial: Some(vec![section()]),
                });
            }
            Action::Send(ToTarget::TrialEnd { .. }) => events.push(Event::Message(ToSource::Prepared)),
            Action::Harvest => events.push(Event::Harvested { pages: 0, writers: Vec::new() }),
            Action::SendPass { number, pass: kind } => {
                *pass = *number;
                pass_events(*number, kind, events);
            }
            Action::Pause => events.push(Event::Paused { wanted: RunState::Running }),
            Action::Save { .. } => events.push(Event::Saved { sections: vec![section()] }),
            Action::StreamState => events.push(Event::StateStreamed { bytes: 1, left: 1 }),
            Action::Release => events.push(Event::Released),
            Action::Resume | Action::RunOn => events.push(Event::Resumed),
            Action::Send(ToTarget::Load) => events.push(Event::Message(ToSource::Ready { load_us: 1 })),
            // Every page is missing, so none is left to compare.
            Action::HandOver { .. } => events.push(Event::HandedOver { pages: PAGES, skipped: 0 }),
            Action::Send(ToTarget::LoadLazily { .. }) => {
                events.push(Event::Message(ToSource::Ready { load_us: 1 }));
            }
            Action::SendRemaining { .. } => {
                let complete = Event::Message(ToSource::Complete(PagingFigures::default()));
                events.extend([
                    Event::PassSent { bytes: 4096, listing: Duration::ZERO, held: Duration::ZERO },
                    complete,
                ]);
            }
            // Further reports of the lost channels are dropped.
            Action::Disconnect => events.clear(),
            Action::Reconnect { .. } => {
                let told = [ToSource::Lacking(missing_pages()), resume(1)].map(Event::Message);
                events.push(Event::Reconnected);
                events.extend(told);
            }
            Action::Send(ToTarget::Commit) => {
                events.push(Event::Message(ToSource::Running { start_us: 1, cpu_us: 1 }));
            }
            _ => {}
        }
    }
}

/// Runs the source's session with random events. Returns its outcome, if it ended. `wild` is the
/// share of arbitrary events, per mille.
fn walk_source(mut rng: Rng, wild: u64) -> Option<source::Outcome> {
    use source::Outcome;
    use source::{Action, Event};
    let pages = usize::try_from(PAGES).expect("small");
    let settings = settings(&mut rng);
    let has_arbiter = settings.arbiter.is_some();
    let (session, mut actions) =
        source::Session::begin(settings.session(), machine(pages), PAGES, Duration::ZERO);
    let mut session =
        session.streaming((0..u32::try_from(rng.below(2)).expect("small")).map(stream).collect());
    let (mut expected, mut now, mut pass) = (Vec::new(), Duration::ZERO, 0);
    let (mut committed, mut returned, mut ended) = (false, false, None);
    for _ in 0..200 {
        honest_source_events(&actions, &mut pass, &mut expected);
        now += Duration::from_micros(rng.latency(20_000));
        let event = if rng.per_mille(wild) || expected.is_empty() {
            let near = pass.saturating_sub(1) + u32::try_from(rng.below(3)).expect("small");
            source_event(&mut rng, near)
        } else {
            expected.remove(0)
        };
        let answer =
            matches!(event, Event::Message(ToSource::Returned(_) | ToSource::Failed(_)) | Event::NotSent(_));
        // Only the answer to the commit counts. Once the guest is known to run on the target, no
        // message brings it back.
        let before = session.phase();
        returned |= committed && answer && before == Phase::Switchover;
        let late_answer = matches!(event, Event::Message(ToSource::Returned(_)))
            && before == Phase::PostcopyPaused
            && !session.runs_on_target();
        // The arbiter's answer counts while the owner is unknown, if there is an arbiter.
        let asked =
            before == Phase::Unknown || (before == Phase::PostcopyPaused && !session.runs_on_target());
        let won = has_arbiter && asked && matches!(event, Event::ArbiterAnswered(Ok(Ownership::Source)));
        let (ran, postcopy) =
            (session.runs_on_target(), [Phase::Postcopy, Phase::PostcopyPaused].contains(&before));
        actions = session.handle(now, event);
        // Over a new link the answer counts while it is awaited.
        returned |= (late_answer || won) && session.phase() == Phase::Ended;
        assert!(ended.is_none() || actions.is_empty(), "{actions:?} after the end");
        for action in &actions {
            match action {
                Action::AskArbiter { .. } => assert!(committed && !returned, "claimed before the commit"),
                Action::Send(ToTarget::Commit) => {
                    assert!(!std::mem::replace(&mut committed, true), "a second commit");
                }
                Action::Resume | Action::RunOn | Action::TrialPause { .. } | Action::Pause => {
                    assert!(!committed || returned, "{action:?} after the commit");
                    assert!(!ran, "{action:?} of a guest that runs there");
                }
                Action::SendRemaining { .. } | Action::Reconnect { .. } | Action::ServeMissing { .. } => {
                    assert!(committed && !returned, "{action:?} before the commit");
                }
                Action::Finish(Outcome::Failed(_) | Outcome::Cancelled(_)) if postcopy => {
                    panic!("{action:?} of a guest that the target may run");
                }
                Action::Finish(outcome) => {
                    assert!(ended.is_none(), "a second end");
                    if matches!(outcome, Outcome::Unknown(_) | Outcome::Completed | Outcome::Lost(_)) {
                        assert!(committed && !returned, "{outcome:?} without a commit");
                    }
                    assert!(ran || !matches!(outcome, Outcome::Lost(_)), "lost, but it never ran");
                    ended = Some(outcome.clone());
                }
                _ => {}
            }
        }
    }
    ended
}

/// Returns any message of a source.
fn to_target(rng: &mut Rng, pass: u32) -> ToTarget {
    match rng.below(23) {
        0 => {
            let pages = [PAGES, PAGES, 0, 9][rng.index(4)];
            let machine = machine(usize::try_from(pages).expect("small"));
            let bulk_channels = [1, 1, 2, 0, 64, 65, u16::MAX][rng.index(7)];
            let (mode, urgent_channels) = [
                (Mode::Precopy, 0),
                (Mode::Precopy, 1),
                (Mode::Postcopy, 1),
                (Mode::Hybrid, 2),
                (Mode::Hybrid, 0),
                (Mode::Hybrid, u16::MAX),
            ][rng.index(6)];
            ToTarget::Setup { machine, mode, bulk_channels, urgent_channels, probe: rng.per_mille(300) }
        }
        1 => ToTarget::Pass { pass, pages: rng.next() },
        2 => ToTarget::Final { pass },
        3 => ToTarget::Section(section()),
        4 => ToTarget::StateEnd { sections: u32::try_from(rng.below(3)).expect("small") },
        5 => ToTarget::Verify { pass },
        6..=7 => ToTarget::Load,
        8..=9 => ToTarget::Commit,
        10 => ToTarget::Cancel(refusal()),
        11 => ToTarget::Lacking(missing_pages()),
        12..=13 => ToTarget::LoadLazily { pages: [0, 1, u64::MAX][rng.index(3)] },
        14 => ToTarget::Thanks,
        15 => ToTarget::TrialSection(section()),
        16 => ToTarget::TrialEnd { sections: u32::try_from(rng.below(3)).expect("small") },
        17 => ToTarget::StaysPaused,
        18 => ToTarget::StreamOpen { stream: [0, 0, 1, u32::MAX][rng.index(4)], name: stream(0) },
        19 => ToTarget::StreamBytes { stream: [0, 0, 1, u32::MAX][rng.index(4)], bytes: vec![7; 3] },
        20 => ToTarget::StreamEnd { stream: [0, 0, 1, u32::MAX][rng.index(4)] },
        21 => ToTarget::LocalMemory { regions: vec![local_region(); rng.index(3)] },
        _ => ToTarget::Ping(rng.next()),
    }
}

fn retold() -> target::Event {
    target::Event::MissingNamed { pages: 1, tokens: (Token([1; 16]), Token([2; 16])) }
}

fn target_event(rng: &mut Rng, pass: u32) -> target::Event {
    use target::Event;
    match rng.below(25) {
        #[cfg(feature = "hostile")]
        24 => said(rng).map_or(Event::Stopped, Event::Message),
        20..=21 => {
            let request = [
                ArbiterRequest::Look,
                ArbiterRequest::Claim(Side::Target),
                ArbiterRequest::GiveBack,
                ArbiterRequest::Runs,
            ][rng.index(4)];
            Event::ArbiterAnswered(request, answer(rng))
        }
        0..=6 => Event::Message(to_target(rng, pass)),
        7 => Event::ChannelUp,
        8..=9 => {
            let channel = [0, 0, 1, u16::MAX][rng.index(4)];
            Event::Barrier { channel, pass: [pass, pass, u32::MAX][rng.index(3)] }
        }
        10 => Event::DigestMismatches { pass, pages: rng.below(2), runs: vec![] },
        11 => {
            let samples = vec![RegionPage { region: RegionId(0), page: 1 }];
            Event::Compared { pages: PAGES, mismatched: 1, samples }
        }
        12 => Event::Loaded { micros: 1 },
        13 => Event::Started { micros: 1, cpu_us: 1 },
        14 => Event::StartFailed(refusal()),
        15 => Event::Prepared,
        23 => Event::MemoryTaken,
        22 => Event::VmPrepared { load_us: rng.per_mille(500).then_some(u64::MAX) },
        16 => Event::MissingArrived(PagingFigures::default()),
        17 => Event::ControlReopened,
        18 if rng.per_mille(500) => retold(),
        18 => Event::Stopped,
        _ if rng.per_mille(500) => Event::LocalFailure(refusal()),
        _ => Event::PeerLost("fuzz".into()),
    }
}

/// Adds the events that a driver would report for these actions.
fn honest_target_events(actions: &[target::Action], events: &mut Vec<target::Event>) {
    use target::{Action, Event};
    for action in actions {
        match action {
            Action::PrepareDemandPaging => events.push(Event::Prepared),
            Action::AwaitChannels(channels) => {
                let count = channels.bulk + channels.urgent + u16::from(channels.probe);
                events.extend((0..count).map(|_| Event::ChannelUp));
            }
            Action::NameMissing => events.push(retold()),
            Action::Finish(target::Outcome::Running) | Action::RequestAgain => {
                events.push(Event::MissingArrived(PagingFigures::default()));
            }
            Action::Send(ToSource::Complete(_) | ToSource::Returned(_)) => {
                events.push(Event::Message(ToTarget::Thanks));
            }
            Action::CountDigestMismatches { pass } => {
                events.insert(0, Event::DigestMismatches { pass: *pass, pages: 0, runs: vec![] });
            }
            Action::CountMismatches => {
                events.push(Event::Compared { pages: PAGES, mismatched: 0, samples: vec![] });
            }
            Action::Load(_) => events.push(Event::Loaded { micros: 1 }),
            Action::PrepareVm(_) => events.push(Event::VmPrepared { load_us: None }),
            Action::TakeMemory(_) => events.push(Event::MemoryTaken),
            Action::Start { .. } => events.push(Event::Started { micros: 1, cpu_us: 1 }),
            Action::AskArbiter { request, .. } if *request != ArbiterRequest::Runs => {
                let owner = match request {
                    ArbiterRequest::Look => Ownership::Open,
                    ArbiterRequest::Claim(_) => Ownership::Target { runs: false },
                    _ => Ownership::Source,
                };
                events.push(Event::ArbiterAnswered(*request, Ok(owner)));
            }
            _ => {}
        }
    }
}

/// Returns the events of a correct source for a guest with two passes, with one pass and a
/// postcopy, or with shared memory.
fn script(mode: Mode, wants_trial: bool, local: bool) -> Vec<target::Event> {
    use target::Event;
    let machine = machine(usize::try_from(PAGES).expect("small"));
    let message = Event::Message;
    let barrier = |pass| Event::Barrier { channel: 0, pass };
    let urgent_channels = u16::from(mode != Mode::Precopy);
    let setup = ToTarget::Setup { machine, mode, bulk_channels: 1, urgent_channels, probe: false };
    let state = [
        ToTarget::StreamBytes { stream: 0, bytes: vec![7] },
        ToTarget::Section(section()),
        ToTarget::StreamEnd { stream: 0 },
        ToTarget::StateEnd { sections: 1 },
    ]
    .map(message);
    let opened = ToTarget::StreamOpen { stream: 0, name: stream(0) };
    if local {
        let mut script = vec![message(setup), message(opened)];
        script.push(message(ToTarget::LocalMemory { regions: vec![local_region()] }));
        script.extend(state);
        script.extend([ToTarget::Load, ToTarget::Commit].map(message));
        return script;
    }
    let passed = [opened, ToTarget::Pass { pass: 0, pages: 0 }].map(message);
    let mut script = vec![message(setup)];
    script.extend(passed);
    script.push(barrier(0));
    if wants_trial {
        let trial = [ToTarget::TrialSection(section()), ToTarget::TrialEnd { sections: 1 }];
        script.extend(trial.map(message));
    }
    if mode == Mode::Precopy {
        script.push(message(ToTarget::Final { pass: 1 }));
        script.extend(state);
        script.extend([barrier(1), message(ToTarget::Load)]);
    } else {
        script.extend(state);
        let handover = [ToTarget::Lacking(missing_pages()), ToTarget::LoadLazily { pages: 1 }];
        script.extend(handover.map(message));
    }
    script.push(message(ToTarget::Commit));
    script
}

/// Rules for the actions of the target's session, and what they depend on.
#[derive(Debug, Default)]
struct TargetRules {
    has_arbiter: bool,
    wants_trial: bool,
    takes_memory: bool,
    prepared: bool,
    taken: bool,
    stays_paused: bool,
    all_arrived: bool,
    commit_read: bool,
    starts: u32,
    start_failed: bool,
    started: bool,
    in_postcopy: bool,
    renounced: bool,
    ended: Option<target::Outcome>,
    /// True if the event that is being handled is the arbiter's grant.
    granted: bool,
    /// True if the event that is being handled is the start of the guest.
    is_start: bool,
    /// True if the event that is being handled is the thanks of the source.
    is_thanks: bool,
}

impl TargetRules {
    /// Records the event that the session handles next.
    fn record(&mut self, event: &target::Event) {
        use target::Event;
        self.commit_read |= matches!(event, Event::Message(ToTarget::Commit));
        self.stays_paused |= matches!(event, Event::Message(ToTarget::StaysPaused));
        self.granted =
            matches!(event, Event::ArbiterAnswered(ArbiterRequest::Claim(_), Ok(Ownership::Target { .. })));
        self.start_failed |= matches!(event, Event::StartFailed(_));
        self.is_start = matches!(event, Event::Started { .. });
        self.started |= self.starts == 1 && self.is_start;
        self.all_arrived |= matches!(event, Event::MissingArrived(_));
        self.is_thanks = matches!(event, Event::Message(ToTarget::Thanks));
    }

    /// Checks an action that follows the recorded event.
    fn check(&mut self, action: &target::Action) {
        use target::{Action, Outcome};
        match action {
            Action::AskArbiter { request: ArbiterRequest::GiveBack, .. } => {
                assert!(self.starts == 0 || self.start_failed, "gives back a guest that may run here");
                self.renounced = true;
            }
            Action::TakeMemory(_) => {
                let first = !std::mem::replace(&mut self.taken, true);
                assert!(self.takes_memory && first, "memory taken in vain");
                assert!(self.starts == 0, "memory taken after the start");
            }
            Action::PrepareVm(_) => {
                let first = !std::mem::replace(&mut self.prepared, true);
                assert!(self.wants_trial && first, "prepared in vain");
                assert!(self.starts == 0, "prepared after the start");
            }
            Action::Start { wanted } => self.check_start(*wanted),
            Action::Finish(Outcome::Completed) => {
                let whole = self.is_start || (self.all_arrived && self.is_thanks);
                assert!(self.starts == 1 && self.started && whole, "completed without a start, or half");
            }
            Action::Finish(Outcome::Running) => {
                let first = !std::mem::replace(&mut self.in_postcopy, true);
                assert!(self.is_start && first, "runs without a start");
            }
            Action::EndDemandPaging | Action::Send(ToSource::Complete(_)) => {
                assert!(self.all_arrived && self.started, "{action:?} while pages lack");
            }
            Action::NameMissing | Action::RequestAgain => {
                assert!(self.in_postcopy, "{action:?} before it runs");
            }
            // After the start action, only a failure of the start may renounce the guest.
            Action::Finish(Outcome::Failed(_))
            | Action::Send(ToSource::Failed(_) | ToSource::Returned(_)) => {
                assert!(self.starts == 0 || self.start_failed, "{action:?} of a guest that may run here");
                self.renounced = true;
            }
            _ => {}
        }
        if let Action::Finish(outcome @ (Outcome::Completed | Outcome::Failed(_))) = action {
            assert!(self.ended.is_none(), "a second end");
            self.ended = Some(outcome.clone());
        }
    }

    /// Checks and counts a start of the guest.
    fn check_start(&mut self, wanted: RunState) {
        let paused = wanted == RunState::Paused;
        assert!(!paused || self.stays_paused, "paused although its source said nothing of that");
        self.starts += 1;
        assert!(self.commit_read && self.starts == 1, "a start without a commit, or a second one");
        assert!(!self.renounced, "the start of a guest that was renounced");
        assert!(!self.has_arbiter || self.granted, "the start of a guest that was not granted");
    }
}

/// Runs the target's session with random events. Returns its outcome, if it ended.
fn walk_target(mut rng: Rng, wild: u64) -> Option<target::Outcome> {
    use target::Event;
    let pages = usize::try_from(PAGES).expect("small");
    let has_arbiter = rng.per_mille(500);
    let wants_trial = rng.per_mille(300);
    let session = target::Session::begin(machine(pages), tokens()).with_arbiter(has_arbiter);
    let session = session.wanting_trial(wants_trial);
    let mode = [Mode::Precopy, Mode::Hybrid][rng.index(2)];
    let takes_memory = rng.per_mille(400);
    let local = takes_memory && mode == Mode::Precopy && rng.per_mille(800);
    let mut session = session.taking_memory(takes_memory);
    let mut rules = TargetRules { has_arbiter, wants_trial, takes_memory, ..TargetRules::default() };
    let (mut expected, mut script) = (Vec::new(), script(mode, wants_trial, local));
    for _ in 0..60 {
        let event = if rng.per_mille(wild) || (expected.is_empty() && script.is_empty()) {
            let near = u32::try_from(rng.below(3)).expect("small");
            target_event(&mut rng, near)
        } else if expected.is_empty() {
            script.remove(0)
        } else {
            expected.remove(0)
        };
        rules.record(&event);
        let (heeded, was_renounced) =
            (matches!(event, Event::Stopped) && session.heeds_stop(), session.renounced());
        let actions = session.handle(event);
        let took_effect = session.ended() || (session.renounced() && !was_renounced);
        assert!(!heeded || took_effect, "a stop that is reported for ever");
        assert!(rules.ended.is_none() || actions.is_empty(), "{actions:?} after the end");
        actions.iter().for_each(|action| rules.check(action));
        honest_target_events(&actions, &mut expected);
    }
    rules.ended
}

/// Returns any message that the bytes of a peer can encode.
#[cfg(feature = "hostile")]
fn said<M: serde::de::DeserializeOwned>(rng: &mut Rng) -> Option<M> {
    let len = rng.index(200);
    vmferry_wire::hostile::message(&rng.bytes(len))
}

/// Runs the source's session with events that `bytes` select: results of its driver, its host and
/// its target.
///
/// # Panics
/// If a promise is broken: see the module.
#[cfg(feature = "hostile")]
pub fn drive_source(bytes: &[u8]) {
    let mut rng = Rng::of(bytes);
    let wild = rng.below(1000);
    walk_source(rng, wild);
}

/// Runs the target's session with events that `bytes` select.
///
/// # Panics
/// If a promise is broken: see the module.
#[cfg(feature = "hostile")]
pub fn drive_target(bytes: &[u8]) {
    let mut rng = Rng::of(bytes);
    let wild = rng.below(1000);
    walk_target(rng, wild);
}

#[cfg(test)]
mod tests;
