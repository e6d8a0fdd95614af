//! What a busy host or a slow peer must not do to the decision when to stop the guest.

use super::*;
use crate::source::settings::AutoConverge;
use std::time::Duration;
use vmferry_wire::Token;

const PAGES: u64 = 1 << 20;
const MS: Duration = Duration::from_millis(1);

/// A session whose first pass is under way, begun at 0.
fn passing(settings: Settings) -> Session {
    let machine = MachineConfig {
        kind: "test".into(),
        vcpus: 1,
        regions: Vec::new(),
        extra: Vec::new(),
        features: Vec::new(),
    };
    let (mut session, _) = Session::begin(settings, machine, PAGES, Duration::ZERO);
    let (bulk, urgent) = (Token([1; 16]), Token([2; 16]));
    for event in [
        Event::Message(ToSource::Accept { bulk, urgent, resume: Token([3; 16]) }),
        Event::ChannelsOpened,
        Event::Message(ToSource::ChannelsUp),
        Event::TrackerStarted,
    ] {
        session.handle(Duration::ZERO, event);
    }
    assert_eq!(session.state, State::Passing { sent: false, received: false });
    session
}

/// One live pass from `now`; what is asked for after its harvest.
fn pass(session: &mut Session, now: &mut Duration, bytes: u64, took: Duration, dirty: u64) -> Vec<Action> {
    while session.state == State::Resting {
        *now += 20 * MS;
        session.handle(*now, Event::Tick);
    }
    *now += took;
    session.handle(*now, Event::PassSent { bytes });
    let received = ToSource::Received { pass: session.pass, suspects: 0, runs: Vec::new() };
    assert_eq!(session.handle(*now, Event::Message(received)), [Action::Harvest]);
    *now += MS;
    session.handle(*now, Event::Harvested { pages: dirty, writers: Vec::new() })
}

/// With as much time as the usual limit is.
const REHEARSE: Action = Action::Rehearse { within: Duration::from_millis(300) };

#[test]
fn one_slow_answer_does_not_keep_an_idle_guest() {
    let mut session = passing(Settings::default());
    let mut now = Duration::from_secs(2);
    let ping = session.handle(now, Event::Tick);
    assert_eq!(ping, [Action::Send(ToTarget::Ping(1))]);
    // The answer stood behind 400 ms of pages.
    now += 400 * MS;
    session.handle(now, Event::Message(ToSource::Pong(1)));
    assert_eq!(session.round_trip, 400 * MS);
    let asked = pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    assert_eq!(asked, [REHEARSE]);
    session.handle(now, Event::Rehearsed { fixed: MS });
    assert_eq!(session.state, State::Passing { sent: false, received: false }, "3 x 400 ms do not fit 300");
    // The next pass is tiny and back within 2 ms, so a round trip takes no longer.
    assert_eq!(pass(&mut session, &mut now, 5 << 12, 2 * MS, 5), [Action::Pause]);
}

#[test]
fn one_slow_rehearsal_does_not_keep_an_idle_guest() {
    let mut session = passing(Settings::default());
    let mut now = Duration::ZERO;
    assert_eq!(pass(&mut session, &mut now, 4 << 30, 100 * MS, 5), [REHEARSE]);
    session.handle(now, Event::Rehearsed { fixed: 2000 * MS });
    let mut rehearsed = 0;
    for _ in 0..1000 {
        match pass(&mut session, &mut now, 5 << 12, 2 * MS, 5)[..] {
            [Action::Rehearse { .. }] => {
                rehearsed += 1;
                if session.handle(now, Event::Rehearsed { fixed: MS }) == [Action::Pause] {
                    assert_eq!(rehearsed, 1);
                    assert!(now > REHEARSE_AGAIN, "not at once: each stops the guest");
                    return;
                }
            }
            [Action::Pause] => panic!("2 s do not fit 300 ms"),
            _ => {}
        }
    }
    panic!("it was never tried again");
}

fn busy(stood: Duration) -> Event {
    Event::Busy { stood, why: "requests are under way".into() }
}

#[test]
fn a_guest_whose_io_is_busy_goes_on_and_is_stopped_again_ever_more_seldom() {
    let mut session = passing(Settings::default());
    let (mut now, mut stops) = (Duration::ZERO, Vec::new());
    assert_eq!(pass(&mut session, &mut now, 4 << 30, 100 * MS, 5), [REHEARSE]);
    session.handle(now, busy(300 * MS));
    assert!(session.verdict().unwrap().help[0].contains("less I/O"), "{:?}", session.verdict());
    assert!(session.busy().unwrap().contains("under way"));
    while now < Duration::from_secs(300) {
        match pass(&mut session, &mut now, 5 << 12, 20 * MS, 5)[..] {
            [Action::Rehearse { .. }] => {
                stops.push(now);
                let more = session.handle(now, busy(300 * MS));
                assert!(!more.contains(&Action::Pause), "{more:?}");
            }
            ref actions => assert!(!actions.contains(&Action::Pause), "{actions:?}"),
        }
    }
    assert!((10..20).contains(&stops.len()), "{stops:?}");
    let longest = stops.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(longest <= LONGEST_BETWEEN_REHEARSALS + 100 * MS, "{longest:?}");
    // Once it comes to rest it moves.
    loop {
        if let [Action::Rehearse { .. }] = pass(&mut session, &mut now, 5 << 12, 20 * MS, 5)[..] {
            assert_eq!(session.handle(now, Event::Rehearsed { fixed: MS }), [Action::Pause]);
            return;
        }
        assert!(now < Duration::from_secs(400));
    }
}

#[test]
fn a_pause_that_finds_io_under_way_goes_back_to_passing() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
        let mut session = passing(Settings { mode, ..Settings::default() });
        let mut now = Duration::ZERO;
        pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
        assert_eq!(session.handle(now, Event::Rehearsed { fixed: MS }), [Action::Pause]);
        let [Action::Save { within }] = session.handle(now, Event::Paused)[..] else { panic!("it is saved") };
        assert!(within <= 300 * MS && within > 290 * MS, "5 pages leave nearly all of the limit: {within:?}");
        assert_eq!(session.handle(now + within, busy(within)), [Action::GoOn]);
        now += within;
        let more = session.handle(now, Event::Resumed);
        assert!(
            matches!(more[..], [Action::Send(ToTarget::Pass { .. }), Action::SendPass { .. }]),
            "{more:?}"
        );
        assert_eq!((session.phase(), session.put_off()), (Phase::Precopy, 1));
        // Not at once again; and then by a rehearsal.
        let again = loop {
            match &pass(&mut session, &mut now, 5 << 12, 2 * MS, 5)[..] {
                [Action::Rehearse { .. }] => break now,
                actions => assert!(!actions.contains(&Action::Pause), "{actions:?}"),
            }
        };
        assert!(again > within + REHEARSE_AGAIN);
        assert_eq!(session.handle(now, Event::Rehearsed { fixed: MS }), [Action::Pause]);
    }
}

#[test]
fn a_limit_below_what_any_flush_takes_does_not_keep_a_hybrid() {
    for (mode, patience) in [(MigrationMode::Precopy, 0), (MigrationMode::Hybrid, 300)] {
        let mut session = passing(Settings { mode, downtime_limit: Duration::ZERO, ..Settings::default() });
        let mut now = Duration::ZERO;
        let asked = pass(&mut session, &mut now, 4 << 30, 100 * MS, 100_000);
        assert_eq!(asked, [Action::Rehearse { within: patience * MS }], "{mode}");
        session.handle(now, Event::Rehearsed { fixed: 20 * MS });
        let asked = pass(&mut session, &mut now, 400 << 20, 100 * MS, 100_000);
        assert_eq!(asked == [Action::Pause], mode == MigrationMode::Hybrid, "{asked:?}");
        if mode == MigrationMode::Hybrid {
            assert_eq!(session.handle(now, Event::Paused), [Action::Save { within: 300 * MS }]);
        }
    }
}

#[test]
fn whoever_insists_waits_as_long_as_the_vm_does_and_no_longer() {
    let mut session = passing(Settings::default());
    let mut now = Duration::ZERO;
    pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    session.handle(now, Event::Rehearsed { fixed: MS });
    session.switch_wanted = true;
    assert_eq!(session.handle(now, Event::Paused), [Action::Save { within: Duration::MAX }]);
    let ended = session.handle(now, busy(10_000 * MS));
    assert!(matches!(ended[..], [Action::Resume, Action::Send(ToTarget::Cancel(_))]), "{ended:?}");
}

#[test]
fn a_target_that_takes_the_last_pages_slowly_does_not_keep_a_stopped_guest() {
    for (verify, switch, patient) in [(false, false, false), (true, false, false), (false, true, true)] {
        let settings = Settings { verify, ..Settings::default() };
        let limit = settings.downtime_limit + settings.peer_timeout * 3;
        let mut session = passing(settings);
        let mut now = Duration::ZERO;
        pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
        assert_eq!(session.handle(now, Event::Rehearsed { fixed: MS }), [Action::Pause]);
        session.switch_wanted = switch;
        session.handle(now, Event::Paused);
        session.handle(now, Event::Saved { sections: Vec::new() });
        session.handle(now, Event::Harvested { pages: 5, writers: Vec::new() });
        let stopped = now;
        // It answers every ping.
        let ended = loop {
            now += 100 * MS;
            let actions = session.handle(now, Event::Tick);
            if actions.contains(&Action::Resume) {
                break true;
            }
            if now > stopped + limit * 2 {
                break false;
            }
        };
        assert_eq!(ended, !patient, "who wants the switch whatever it takes waits for it");
        assert!(patient || now - stopped <= limit + 200 * MS);
    }
}

/// What is asked for after a pass of 100 ms at 400 MiB/s in which a guest dirtied all of that again.
fn throttled(auto_converge: AutoConverge, writers: &[u64]) -> Option<Vec<f64>> {
    let mut session = passing(Settings { auto_converge, downtime_limit: 20 * MS, ..Settings::default() });
    let mut now = Duration::ZERO;
    let pages = (40 << 20) / 4096;
    assert_eq!(
        pass(&mut session, &mut now, 40 << 20, 100 * MS, pages),
        [Action::Rehearse { within: 20 * MS }]
    );
    session.writers = writers.to_vec();
    let asked = session.handle(now, Event::Rehearsed { fixed: MS });
    asked
        .into_iter()
        .find_map(|action| if let Action::Throttle(shares) = action { Some(shares) } else { None })
}

#[test]
fn a_guest_is_slowed_as_far_as_the_link_needs_and_only_who_writes_most_if_asked() {
    let near = |got: Option<Vec<f64>>, want: &[f64]| {
        let got = got.expect("a throttle");
        let same = got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() < 0.01);
        assert!(same, "{got:?} and not {want:?}");
    };
    assert_eq!(throttled(AutoConverge::Off, &[9, 1]), None);
    // It dirties as fast as the link carries, and may half of that.
    near(throttled(AutoConverge::All, &[9, 1]), &[0.5]);
    near(throttled(AutoConverge::Writers, &[]), &[0.5]);
    near(throttled(AutoConverge::Writers, &[1, 1]), &[0.5, 0.5]);
    // Of 10 parts 5 may be dirtied: one is the modest vCPU's, four are left for the other's nine.
    near(throttled(AutoConverge::Writers, &[9, 1]), &[1.0 - 4.0 / 9.0, 0.0]);
}

#[test]
fn a_link_that_was_cut_on_request_is_not_taken_up_before_somebody_asks_for_it() {
    let mut session = passing(Settings { mode: crate::MigrationMode::Hybrid, ..Settings::default() });
    assert_eq!(session.handle(MS, Event::Pause), [], "not before the guest runs there");
    session.lazy = true;
    session.running_lazily(MS);
    assert_eq!(session.handle(2 * MS, Event::Pause), [Action::Disconnect]);
    assert_eq!(session.interrupted().map(|(waiting, _)| waiting), Some(true));
    for seconds in 1..100 {
        assert_eq!(session.handle(Duration::from_secs(seconds), Event::Tick), []);
    }
    let again = session.handle(Duration::from_secs(100), Event::Recover);
    assert_eq!(again, [Action::Reconnect { after: Duration::ZERO }]);
}

/// Loses the link of a guest that runs there at once whenever it was taken up again; for how long that is tried. The target lacks as many
/// pages as `lacks` says, by the attempt.
fn tried_for(lacks: impl Fn(u64) -> u64) -> Duration {
    let mut session = passing(Settings { mode: crate::MigrationMode::Hybrid, ..Settings::default() });
    session.lazy = true;
    session.running_lazily(MS);
    let (mut now, mut attempts) = (2 * MS, 0);
    session.handle(now, Event::LocalFailure(Refusal::new(RefusalCode::Other, "memory cannot be read")));
    let most = Duration::from_secs(3600);
    while now < most && session.interrupted().is_some_and(|(waiting, _)| !waiting) {
        now += MS;
        let [Action::Reconnect { after }] = session.handle(now, Event::Tick)[..] else { continue };
        now += after;
        session.handle(now, Event::Reconnected);
        attempts += 1;
        let resume =
            ToSource::Resume { pages: lacks(attempts), bulk: Token([1; 16]), urgent: Token([2; 16]) };
        session.handle(now, Event::Message(resume));
        session.handle(now, Event::ChannelsOpened);
        assert!(matches!(
            session.handle(now, Event::Message(ToSource::ChannelsUp))[..],
            [Action::SendRest { .. }]
        ));
        session.handle(now, Event::LocalFailure(Refusal::new(RefusalCode::Other, "memory cannot be read")));
    }
    assert!(u128::from(attempts) < now.as_millis() / 20, "{attempts} attempts in {now:?}");
    now
}

#[test]
fn links_that_bring_nothing_are_not_taken_up_for_ever() {
    let tried = tried_for(|_| 100);
    let patience = Settings::default().reconnect_for;
    assert!((patience..patience + Duration::from_secs(5)).contains(&tried), "{tried:?}");
    // As long as pages come it goes on.
    assert_eq!(tried_for(|attempt| (1 << 40) - attempt).as_secs(), 3600);
}

#[test]
fn a_target_that_waits_for_its_fence_hears_that_its_source_is_there() {
    let mut session = passing(Settings::default());
    session.state = State::Releasing;
    assert_eq!(session.handle(MS, Event::Released), [Action::Send(ToTarget::Commit)]);
    let ping = ToTarget::Ping(session.last_ping.0 + 1);
    assert_eq!(session.handle(Duration::from_secs(2), Event::Tick), [Action::Send(ping.clone())]);
    // The commit may have arrived, whatever became of the ping.
    let lost = Event::unsent(&ping, "lost".into());
    let ended = session.handle(Duration::from_secs(2), lost);
    assert_eq!(ended, [Action::Finish(Outcome::Unknown("lost".into()))]);
    // Of a commit that never left it is known.
    let mut session = passing(Settings::default());
    session.state = State::Committed;
    let unsent = Event::unsent(&ToTarget::Commit, "lost".into());
    assert_eq!(session.handle(MS, unsent), [Action::Resume]);
}
