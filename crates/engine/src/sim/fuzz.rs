//! Each session alone, fed with any event at any moment: what a driver would report next, mixed with what only a
//! hostile peer or a broken driver would say.

use super::here::machine;
use super::rng::Rng;
use super::source;
use super::there::tokens;
use crate::target::session as target;
use proptest::prelude::*;
use std::time::Duration;
use vmferry_memory::RegionId;
use vmferry_wire::{Mode, PageName, Refusal, RefusalCode, RunName, Section, ToSource, ToTarget, Token};

const PAGES: u64 = 8;

fn refusal() -> Refusal {
    Refusal::new(RefusalCode::Other, "fuzz")
}

fn section() -> Section {
    Section { name: "s".into(), instance: 0, version: 0, payload: vec![0; 10] }
}

fn settings(rng: &mut Rng) -> source::Settings {
    source::Settings {
        channels: 1,
        verify: rng.per_mille(500),
        timeout: rng.per_mille(300).then_some(Duration::from_secs(1)),
        on_timeout: if rng.per_mille(500) { source::OnTimeout::Switch } else { source::OnTimeout::Cancel },
        ..source::Settings::default()
    }
}

/// Anything that a target can say.
fn to_source(rng: &mut Rng, pass: u32) -> ToSource {
    let run = |rng: &mut Rng| RunName {
        region: RegionId(u32::try_from(rng.below(2)).expect("small")),
        first: [0, 3, PAGES, u64::MAX][rng.index(4)],
        count: [0, 1, PAGES, u64::MAX][rng.index(4)],
    };
    match rng.below(11) {
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
        _ => ToSource::Pong(rng.below(3)),
    }
}

/// Any event of the source.
fn source_event(rng: &mut Rng, pass: u32) -> source::Event {
    use source::Event;
    match rng.below(16) {
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
                events.extend([Event::PassSent { bytes: 4096 }, Event::Message(received)]);
                if *kind == source::Pass::Digests {
                    let verified = ToSource::Verified { pages: PAGES, mismatched: 0, samples: vec![] };
                    events.push(Event::Message(verified));
                }
            }
            Action::Pause => events.push(Event::Paused),
            Action::Save => events.push(Event::Saved { sections: vec![section()] }),
            Action::Resume => events.push(Event::Resumed),
            Action::Send(ToTarget::Load) => events.push(Event::Message(ToSource::Ready { load_us: 1 })),
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
        let gives_back =
            matches!(event, Event::Message(ToSource::Returned(_) | ToSource::Failed(_)) | Event::NotSent(_));
        returned |= committed && gives_back;
        actions = session.handle(now, event);
        prop_assert!(ended.is_none() || actions.is_empty(), "{actions:?} after the end");
        for action in &actions {
            match action {
                Action::Send(ToTarget::Commit) => {
                    prop_assert!(!std::mem::replace(&mut committed, true), "a second commit");
                }
                Action::Resume | Action::Rehearse | Action::Pause => {
                    prop_assert!(!committed || returned, "{action:?} after the commit");
                }
                Action::Finish(outcome) => {
                    prop_assert!(ended.is_none(), "a second end");
                    if matches!(outcome, Outcome::Unknown(_) | Outcome::Completed) {
                        prop_assert!(committed && !returned, "{outcome:?} without a commit");
                    }
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
    match rng.below(12) {
        0 => {
            let pages = [PAGES, PAGES, 0, 9][rng.index(4)];
            let machine = machine(usize::try_from(pages).expect("small"));
            let bulk_channels = [1, 1, 2, 0, 64, 65, u16::MAX][rng.index(7)];
            ToTarget::Setup { machine, mode: Mode::Precopy, bulk_channels, urgent_channels: 0, probe: false }
        }
        1 => ToTarget::Pass { pass, pages: rng.next() },
        2 => ToTarget::Final { pass },
        3 => ToTarget::Section(section()),
        4 => ToTarget::StateEnd { sections: u32::try_from(rng.below(3)).expect("small") },
        5 => ToTarget::Verify { pass },
        6..=7 => ToTarget::Load,
        8..=9 => ToTarget::Commit,
        10 => ToTarget::Cancel(refusal()),
        _ => ToTarget::Ping(rng.next()),
    }
}

fn target_event(rng: &mut Rng, pass: u32) -> target::Event {
    use target::Event;
    match rng.below(16) {
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
        _ if rng.per_mille(500) => Event::LocalFailure(refusal()),
        _ => Event::PeerLost("fuzz".into()),
    }
}

/// What a driver would report of these actions.
fn honest_target_events(actions: &[target::Action], events: &mut Vec<target::Event>) {
    use target::{Action, Event};
    for action in actions {
        match action {
            Action::AwaitChannels(channels) => events.extend((0..channels.bulk).map(|_| Event::ChannelUp)),
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

/// An honest source's script for a guest in three passes.
fn script() -> Vec<target::Event> {
    use target::Event;
    let machine = machine(usize::try_from(PAGES).expect("small"));
    let message = Event::Message;
    let barrier = |pass| Event::Barrier { channel: 0, pass };
    vec![
        message(ToTarget::Setup {
            machine,
            mode: Mode::Precopy,
            bulk_channels: 1,
            urgent_channels: 0,
            probe: false,
        }),
        message(ToTarget::Pass { pass: 0, pages: 0 }),
        barrier(0),
        message(ToTarget::Final { pass: 1 }),
        message(ToTarget::Section(section())),
        message(ToTarget::StateEnd { sections: 1 }),
        barrier(1),
        message(ToTarget::Load),
        message(ToTarget::Commit),
    ]
}

/// Walks the target's session; returns how it ended, if it did.
fn walk_target(seed: u64, wild: u64) -> Result<Option<target::Outcome>, TestCaseError> {
    use target::{Action, Event, Outcome};
    let mut rng = Rng::new(seed);
    let pages = usize::try_from(PAGES).expect("small");
    let mut session = target::Session::begin(machine(pages), tokens());
    let (mut expected, mut script) = (Vec::new(), script());
    let (mut commit_read, mut start_failed, mut starts, mut ended) = (false, false, 0, None);
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
        let was_started = matches!(event, Event::Started { .. });
        let actions = session.handle(event);
        prop_assert!(ended.is_none() || actions.is_empty(), "{actions:?} after the end");
        for action in &actions {
            match action {
                Action::Start => {
                    starts += 1;
                    prop_assert!(commit_read && starts == 1, "a start without a commit, or a second one");
                }
                Action::Finish(Outcome::Completed) => {
                    prop_assert!(starts == 1 && was_started, "completed without a start");
                }
                // Once it was told to start, only the start's own failure may renounce the guest.
                Action::Finish(Outcome::Failed(_))
                | Action::Send(ToSource::Failed(_) | ToSource::Returned(_)) => {
                    prop_assert!(starts == 0 || start_failed, "{action:?} of a guest that may run here");
                }
                _ => {}
            }
            if let Action::Finish(outcome) = action {
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

/// A target that answers pings and does nothing else holds a guest for so long and no longer, in whatever state.
#[test]
fn a_target_that_only_answers_pings_is_given_up() {
    use source::Outcome;
    use source::{Action, Event};
    let (mut waited_for, pages) = (Vec::new(), usize::try_from(PAGES).expect("small"));
    for honest in 0..40 {
        let settings = source::Settings { channels: 1, verify: true, ..source::Settings::default() };
        let (mut session, mut actions) =
            source::Session::begin(settings.clone(), machine(pages), PAGES, Duration::ZERO);
        let (mut expected, mut now, mut pass, mut left, mut end) =
            (Vec::new(), Duration::ZERO, 0, honest, None);
        while end.is_none() {
            honest_source_events(&actions, &mut pass, &mut expected);
            // This side's own steps always go on; the target says so many words and then no more.
            let at = expected.iter().position(|event| left > 0 || !matches!(event, Event::Message(_)));
            let event = if let Some(at) = at {
                left -= usize::from(matches!(expected[at], Event::Message(_)));
                now += Duration::from_millis(1);
                expected.remove(at)
            } else {
                now += Duration::from_millis(100);
                Event::Tick
            };
            actions = session.handle(now, event);
            for number in pings(&actions) {
                assert_eq!(session.handle(now, Event::Message(ToSource::Pong(number))), []);
            }
            end = actions.iter().find_map(|action| match action {
                Action::Finish(outcome) => Some(outcome.clone()),
                _ => None,
            });
            assert!(now <= settings.peer_timeout * 4, "still waiting: {session:?}");
        }
        match end {
            Some(Outcome::Completed) => break,
            Some(Outcome::Failed(why)) => waited_for.push(why.detail),
            Some(Outcome::Unknown(why)) => waited_for.push(why),
            other => panic!("{other:?}"),
        }
    }
    for what in [
        "accepted the guest",
        "taken its channels",
        "received the pages",
        "compared",
        "loaded",
        "runs the guest",
    ] {
        assert!(waited_for.iter().any(|why| why.contains(what)), "{what}: {waited_for:?}");
    }
}

fn pings(actions: &[source::Action]) -> Vec<u64> {
    let number = |action: &source::Action| match action {
        source::Action::Send(ToTarget::Ping(number)) => Some(*number),
        _ => None,
    };
    actions.iter().filter_map(number).collect()
}

/// A verification that looked at less than everything is none.
#[test]
fn a_verification_of_some_pages_is_refused() {
    use source::Outcome;
    use source::{Action, Event};
    let settings = source::Settings { channels: 1, verify: true, ..source::Settings::default() };
    let pages = usize::try_from(PAGES).expect("small");
    let (mut session, mut actions) = source::Session::begin(settings, machine(pages), PAGES, Duration::ZERO);
    let (mut expected, mut pass, mut now) = (Vec::new(), 0, Duration::ZERO);
    let end = loop {
        honest_source_events(&actions, &mut pass, &mut expected);
        let mut event = expected.remove(0);
        if let Event::Message(ToSource::Verified { pages, .. }) = &mut event {
            *pages -= 1;
        }
        now += Duration::from_millis(1);
        actions = session.handle(now, event);
        assert!(!actions.contains(&Action::Send(ToTarget::Commit)));
        if let Some(Action::Finish(outcome)) = actions.last() {
            break outcome.clone();
        }
    };
    assert!(matches!(&end, Outcome::Failed(why) if why.detail.contains("compared 7 of 8 pages")), "{end:?}");
}
