//! Each session alone, fed with any event at any moment: what a driver would report next, mixed with what only a
//! hostile peer or a broken driver would say.

mod alone;

use super::here::machine;
use super::rng::Rng;
use super::source;
use super::there::tokens;
use crate::source::session::Phase;
use crate::target::session as target;
use proptest::prelude::*;
use std::time::Duration;
use vmferry_memory::RegionId;
use vmferry_wire::{
    LackingPages, LazyFigures, Mode, PageName, Refusal, RefusalCode, RunName, Section, ToSource, ToTarget,
    Token,
};

const PAGES: u64 = 8;

fn refusal() -> Refusal {
    Refusal::new(RefusalCode::Other, "fuzz")
}

fn section() -> Section {
    Section { name: "s".into(), instance: 0, version: 0, payload: vec![0; 10] }
}

fn settings(rng: &mut Rng) -> source::Settings {
    use source::{MigrationMode, OnTimeout};
    source::Settings {
        mode: [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Hybrid][rng.index(3)],
        channels: 1,
        verify: rng.per_mille(500),
        timeout: rng.per_mille(300).then_some(Duration::from_secs(1)),
        on_timeout: [OnTimeout::Switch, OnTimeout::Cancel, OnTimeout::Postcopy][rng.index(3)],
        reconnect_for: Duration::from_millis(rng.below(200)),
        ..source::Settings::default()
    }
}

fn lacking() -> LackingPages {
    LackingPages { region: RegionId(0), first: 0, words: vec![1, 0, 0, 0, 0, 0, 0, 0] }
}

fn resume(pages: u64) -> ToSource {
    ToSource::Resume { pages, bulk: Token([1; 16]), urgent: Token([2; 16]) }
}

/// Anything that a target can say.
fn to_source(rng: &mut Rng, pass: u32) -> ToSource {
    let run = |rng: &mut Rng| RunName {
        region: RegionId(u32::try_from(rng.below(2)).expect("small")),
        first: [0, 3, PAGES, u64::MAX][rng.index(4)],
        count: [0, 1, PAGES, u64::MAX][rng.index(4)],
    };
    match rng.below(14) {
        0 => ToSource::Accept { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) },
        1 => ToSource::ChannelsUp,
        2..=4 => {
            let suspects = [0, 0, 1, u64::MAX][rng.index(4)];
            let runs = (0..rng.below(3)).map(|_| run(rng)).collect();
            ToSource::Received { pass, suspects, runs }
        }
        5 => ToSource::Verified { pages: rng.below(2) * PAGES, mismatched: rng.below(2), samples: vec![] },
        6 => ToSource::Ready { load_us: u64::MAX },
        7 => ToSource::Running { start_us: u64::MAX, cpu_us: u64::MAX },
        8 => ToSource::Returned(refusal()),
        9 => ToSource::Failed(refusal()),
        10 => ToSource::Lacking(lacking()),
        11 => resume([0, 1, PAGES, u64::MAX][rng.index(4)]),
        12 => ToSource::Complete(LazyFigures::default()),
        _ => ToSource::Pong(rng.below(3)),
    }
}

/// Any event of the source.
fn source_event(rng: &mut Rng, pass: u32) -> source::Event {
    use source::Event;
    match rng.below(23) {
        0..=4 => Event::Message(to_source(rng, pass)),
        5 => Event::ChannelsOpened,
        6 => Event::TrackerStarted,
        7 => Event::Rehearsed { fixed: Duration::from_micros(rng.below(1000)) },
        8 => Event::PassSent { bytes: rng.next() },
        9 => Event::Harvested { pages: rng.below(PAGES), writers: vec![rng.below(9), rng.below(9)] },
        10 => Event::Paused,
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
        19 if rng.per_mille(500) => Event::Recover,
        19 if rng.per_mille(100) => Event::Abandon,
        19 if rng.per_mille(100) => Event::Pause,
        _ if rng.per_mille(300) => Event::Cancel,
        _ => Event::Tick,
    }
}

/// What a driver and an honest target would report of these actions, in order.
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
            Action::StartTracker => events.push(Event::TrackerStarted),
            Action::Rehearse => events.push(Event::Rehearsed { fixed: Duration::from_micros(50) }),
            Action::Harvest => events.push(Event::Harvested { pages: 0, writers: Vec::new() }),
            Action::SendPass { number, pass: kind } => {
                *pass = *number;
                let received = ToSource::Received { pass: *number, suspects: 0, runs: vec![] };
                if *kind == source::Pass::Digests {
                    events.push(Event::Comparing { pages: PAGES });
                }
                events.extend([Event::PassSent { bytes: 4096 }, Event::Message(received)]);
                if *kind == source::Pass::Digests {
                    let verified = ToSource::Verified { pages: PAGES, mismatched: 0, samples: vec![] };
                    events.push(Event::Message(verified));
                }
            }
            Action::Pause => events.push(Event::Paused),
            Action::Save => events.push(Event::Saved { sections: vec![section()] }),
            Action::Release => events.push(Event::Released),
            Action::Resume => events.push(Event::Resumed),
            Action::Send(ToTarget::Load) => events.push(Event::Message(ToSource::Ready { load_us: 1 })),
            // Every page: nothing is left to compare.
            Action::HandOver { .. } => events.push(Event::HandedOver { pages: PAGES, skipped: 0 }),
            Action::Send(ToTarget::LoadLazily { .. }) => {
                events.push(Event::Message(ToSource::Ready { load_us: 1 }));
            }
            Action::SendRest { .. } => {
                let complete = Event::Message(ToSource::Complete(LazyFigures::default()));
                events.extend([Event::PassSent { bytes: 4096 }, complete]);
            }
            // What the lost channels still had to say counts no more.
            Action::Disconnect => events.clear(),
            Action::Reconnect { .. } => {
                let told = [ToSource::Lacking(lacking()), resume(1)].map(Event::Message);
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

/// Walks the source's session; returns how it ended, if it did. `wild` events in a thousand are anything.
fn walk_source(seed: u64, wild: u64) -> Result<Option<source::Outcome>, TestCaseError> {
    use source::Outcome;
    use source::{Action, Event};
    let mut rng = Rng::new(seed);
    let pages = usize::try_from(PAGES).expect("small");
    let (mut session, mut actions) =
        source::Session::begin(settings(&mut rng), machine(pages), PAGES, Duration::ZERO);
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
        // Only the answer to the commit counts: once it is known to run there nothing brings it back.
        let before = session.phase();
        returned |= committed && answer && before == Phase::Switchover;
        let late_answer = matches!(event, Event::Message(ToSource::Returned(_)))
            && before == Phase::PostcopyPaused
            && !session.runs_there();
        let (ran, postcopy) =
            (session.runs_there(), [Phase::Postcopy, Phase::PostcopyPaused].contains(&before));
        actions = session.handle(now, event);
        // Over a new link it counts where it is awaited.
        returned |= late_answer && session.phase() == Phase::Ended;
        prop_assert!(ended.is_none() || actions.is_empty(), "{actions:?} after the end");
        for action in &actions {
            match action {
                Action::Send(ToTarget::Commit) => {
                    prop_assert!(!std::mem::replace(&mut committed, true), "a second commit");
                }
                Action::Resume | Action::Rehearse | Action::Pause => {
                    prop_assert!(!committed || returned, "{action:?} after the commit");
                    prop_assert!(!ran, "{action:?} of a guest that runs there");
                }
                Action::SendRest { .. } | Action::Reconnect { .. } | Action::ServeAgain { .. } => {
                    prop_assert!(committed && !returned, "{action:?} before the commit");
                }
                Action::Finish(Outcome::Failed(_) | Outcome::Cancelled(_)) if postcopy => {
                    prop_assert!(false, "{action:?} of a guest that the target may run");
                }
                Action::Finish(outcome) => {
                    prop_assert!(ended.is_none(), "a second end");
                    if matches!(outcome, Outcome::Unknown(_) | Outcome::Completed | Outcome::Lost(_)) {
                        prop_assert!(committed && !returned, "{outcome:?} without a commit");
                    }
                    prop_assert!(ran || !matches!(outcome, Outcome::Lost(_)), "lost, but it never ran");
                    ended = Some(outcome.clone());
                }
                _ => {}
            }
        }
    }
    Ok(ended)
}

/// Anything that a source can say.
fn to_target(rng: &mut Rng, pass: u32) -> ToTarget {
    match rng.below(16) {
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
        11 => ToTarget::Lacking(lacking()),
        12..=13 => ToTarget::LoadLazily { pages: [0, 1, u64::MAX][rng.index(3)] },
        14 => ToTarget::Thanks,
        _ => ToTarget::Ping(rng.next()),
    }
}

fn retold() -> target::Event {
    target::Event::Retold { pages: 1, tokens: (Token([1; 16]), Token([2; 16])) }
}

fn target_event(rng: &mut Rng, pass: u32) -> target::Event {
    use target::Event;
    match rng.below(20) {
        0..=6 => Event::Message(to_target(rng, pass)),
        7 => Event::ChannelUp,
        8..=9 => {
            let channel = [0, 0, 1, u16::MAX][rng.index(4)];
            Event::Barrier { channel, pass: [pass, pass, u32::MAX][rng.index(3)] }
        }
        10 => Event::Suspects { pass, pages: rng.below(2), runs: vec![] },
        11 => {
            let samples = vec![PageName { region: RegionId(0), page: 1 }];
            Event::Compared { pages: PAGES, mismatched: 1, samples }
        }
        12 => Event::Loaded { micros: 1 },
        13 => Event::Started { micros: 1, cpu_us: 1 },
        14 => Event::StartFailed(refusal()),
        15 => Event::Prepared,
        16 => Event::AllHere(LazyFigures::default()),
        17 => Event::ControlBack,
        18 if rng.per_mille(500) => retold(),
        18 => Event::Stopped,
        _ if rng.per_mille(500) => Event::LocalFailure(refusal()),
        _ => Event::PeerLost("fuzz".into()),
    }
}

/// What a driver would report of these actions.
fn honest_target_events(actions: &[target::Action], events: &mut Vec<target::Event>) {
    use target::{Action, Event};
    for action in actions {
        match action {
            Action::PrepareLazily => events.push(Event::Prepared),
            Action::AwaitChannels(channels) => {
                let count = channels.bulk + channels.urgent + u16::from(channels.probe);
                events.extend((0..count).map(|_| Event::ChannelUp));
            }
            Action::Retell => events.push(retold()),
            Action::Finish(target::Outcome::RunsLazily) | Action::AskAgain => {
                events.push(Event::AllHere(LazyFigures::default()));
            }
            Action::Send(ToSource::Complete(_) | ToSource::Returned(_)) => {
                events.push(Event::Message(ToTarget::Thanks));
            }
            Action::CountSuspects { pass } => {
                events.insert(0, Event::Suspects { pass: *pass, pages: 0, runs: vec![] });
            }
            Action::CountDifferences => {
                events.push(Event::Compared { pages: PAGES, mismatched: 0, samples: vec![] });
            }
            Action::Load(_) => events.push(Event::Loaded { micros: 1 }),
            Action::Start => events.push(Event::Started { micros: 1, cpu_us: 1 }),
            _ => {}
        }
    }
}

/// An honest source's script for a guest in two passes, or in one and the rest when it runs.
fn script(mode: Mode) -> Vec<target::Event> {
    use target::Event;
    let machine = machine(usize::try_from(PAGES).expect("small"));
    let message = Event::Message;
    let barrier = |pass| Event::Barrier { channel: 0, pass };
    let urgent_channels = u16::from(mode != Mode::Precopy);
    let setup = ToTarget::Setup { machine, mode, bulk_channels: 1, urgent_channels, probe: false };
    let state = [ToTarget::Section(section()), ToTarget::StateEnd { sections: 1 }].map(message);
    let mut script = vec![message(setup), message(ToTarget::Pass { pass: 0, pages: 0 }), barrier(0)];
    if mode == Mode::Precopy {
        script.push(message(ToTarget::Final { pass: 1 }));
        script.extend(state);
        script.extend([barrier(1), message(ToTarget::Load)]);
    } else {
        script.extend(state);
        let handover = [ToTarget::Lacking(lacking()), ToTarget::LoadLazily { pages: 1 }];
        script.extend(handover.map(message));
    }
    script.push(message(ToTarget::Commit));
    script
}

/// Walks the target's session; returns how it ended, if it did.
fn walk_target(seed: u64, wild: u64) -> Result<Option<target::Outcome>, TestCaseError> {
    use target::{Action, Event, Outcome};
    let mut rng = Rng::new(seed);
    let pages = usize::try_from(PAGES).expect("small");
    let mut session = target::Session::begin(machine(pages), tokens());
    let mode = [Mode::Precopy, Mode::Hybrid][rng.index(2)];
    let (mut expected, mut script) = (Vec::new(), script(mode));
    let (mut all_here, mut started, mut lazily) = (false, false, false);
    let (mut commit_read, mut start_failed, mut starts, mut ended) = (false, false, 0, None);
    let mut renounced = false;
    for _ in 0..60 {
        let event = if rng.per_mille(wild) || (expected.is_empty() && script.is_empty()) {
            let near = u32::try_from(rng.below(3)).expect("small");
            target_event(&mut rng, near)
        } else if expected.is_empty() {
            script.remove(0)
        } else {
            expected.remove(0)
        };
        commit_read |= matches!(event, Event::Message(ToTarget::Commit));
        start_failed |= matches!(event, Event::StartFailed(_));
        started |= starts == 1 && matches!(event, Event::Started { .. });
        all_here |= matches!(event, Event::AllHere(_));
        let (was_started, thanked) =
            (matches!(event, Event::Started { .. }), matches!(event, Event::Message(ToTarget::Thanks)));
        let actions = session.handle(event);
        prop_assert!(ended.is_none() || actions.is_empty(), "{actions:?} after the end");
        for action in &actions {
            match action {
                Action::Start => {
                    starts += 1;
                    prop_assert!(commit_read && starts == 1, "a start without a commit, or a second one");
                    prop_assert!(!renounced, "the start of a guest that was renounced");
                }
                Action::Finish(Outcome::Completed) => {
                    let whole = was_started || (all_here && thanked);
                    prop_assert!(starts == 1 && started && whole, "completed without a start, or half");
                }
                Action::Finish(Outcome::RunsLazily) => {
                    prop_assert!(
                        was_started && !std::mem::replace(&mut lazily, true),
                        "runs without a start"
                    );
                }
                Action::EndLazily | Action::Send(ToSource::Complete(_)) => {
                    prop_assert!(all_here && started, "{action:?} while pages lack");
                }
                Action::Retell | Action::AskAgain => prop_assert!(lazily, "{action:?} before it runs"),
                // Once it was told to start, only the start's own failure may renounce the guest.
                Action::Finish(Outcome::Failed(_))
                | Action::Send(ToSource::Failed(_) | ToSource::Returned(_)) => {
                    prop_assert!(starts == 0 || start_failed, "{action:?} of a guest that may run here");
                    renounced = true;
                }
                _ => {}
            }
            if let Action::Finish(outcome @ (Outcome::Completed | Outcome::Failed(_))) = action {
                prop_assert!(ended.is_none(), "a second end");
                ended = Some(outcome.clone());
            }
        }
        honest_target_events(&actions, &mut expected);
    }
    Ok(ended)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_source_bears_any_event_at_any_moment(seed: u64, wild in 0u64..600) {
        walk_source(seed, wild)?;
    }

    #[test]
    fn the_target_bears_any_event_at_any_moment(seed: u64, wild in 0u64..600) {
        walk_target(seed, wild)?;
    }
}

/// A walk that never gets anywhere would keep every promise.
#[test]
fn the_walks_reach_the_end_of_the_road() {
    for seed in 0..20 {
        assert_eq!(walk_source(seed, 0).unwrap(), Some(source::Outcome::Completed));
        assert_eq!(walk_target(seed, 0).unwrap(), Some(target::Outcome::Completed));
    }
    let moved = |seed: &u64| walk_source(*seed, 60).unwrap() == Some(source::Outcome::Completed);
    let lost = |seed: &u64| matches!(walk_source(*seed, 60).unwrap(), Some(source::Outcome::Unknown(_)));
    assert!((0..2000).filter(moved).count() > 50 && (0..2000).filter(lost).count() > 5);
}
