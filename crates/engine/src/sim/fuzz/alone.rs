//! The source's session with a target that does less than the protocol requires.

use super::*;

/// A target that only answers pings holds a guest for a limited time in any state.
#[test]
fn a_target_that_only_answers_pings_is_given_up() {
    use source::Outcome;
    use source::{Action, Event};
    let (mut waited_for, pages) = (Vec::new(), usize::try_from(PAGES).expect("small"));
    for honest in 0..40 {
        let settings = source::Settings { channels: 1, verify: true, ..source::Settings::default() };
        let (mut session, mut actions) =
            source::Session::begin(settings.session(), machine(pages), PAGES, Duration::ZERO);
        let (mut expected, mut now, mut pass, mut left, mut end) =
            (Vec::new(), Duration::ZERO, 0, honest, None);
        while end.is_none() {
            honest_source_events(&actions, &mut pass, &mut expected);
            // Local steps of the source always complete. The target sends a limited number of
            // messages, and then none.
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

/// A verification that compared fewer pages than all is refused.
#[test]
fn a_verification_of_some_pages_is_refused() {
    use source::Outcome;
    use source::{Action, Event};
    let settings = source::Settings { channels: 1, verify: true, ..source::Settings::default() };
    let pages = usize::try_from(PAGES).expect("small");
    let (mut session, mut actions) =
        source::Session::begin(settings.session(), machine(pages), PAGES, Duration::ZERO);
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

/// An unexpected message is reported by its name, without its content, which may have megabytes.
#[test]
fn unexpected_messages_are_reported_by_name() {
    let pages = usize::try_from(PAGES).expect("small");
    let mut session = target::Session::begin(machine(pages), tokens());
    let long = Section { payload: vec![7; 1 << 20], ..section() };
    let actions = session.handle(target::Event::Message(ToTarget::Section(long)));
    let Some(target::Action::Send(ToSource::Failed(why))) = actions.first() else { panic!("{actions:?}") };
    assert!(
        why.detail.contains("the source sent Section, which is not allowed") && why.detail.len() < 200,
        "{why}"
    );
    let settings = source::Settings { channels: 1, ..source::Settings::default() };
    let (mut session, _) = source::Session::begin(settings.session(), machine(pages), PAGES, Duration::ZERO);
    let run = RegionRun { region: RegionId(0), first: 0, count: 1 };
    let received = ToSource::Received { pass: 0, mismatches: 1, runs: vec![run; 60_000] };
    let actions = session.handle(Duration::ZERO, source::Event::Message(received));
    let told = actions.iter().find_map(|action| match action {
        source::Action::Send(ToTarget::Cancel(why)) => Some(why.detail.clone()),
        _ => None,
    });
    let told = told.unwrap_or_else(|| panic!("{actions:?}"));
    assert!(told.contains("the target sent Received, which is not allowed") && told.len() < 200, "{told}");
}
