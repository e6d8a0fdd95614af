//! Tests that a busy host or a slow peer does not disturb the decision when to stop the guest.

use super::deferral::{LONGEST_BETWEEN, TRY_AGAIN};
use super::*;
use crate::source::Auto;
use crate::source::events::Pass;
use crate::source::settings::{AutoConverge, MigrationMode};
use std::time::Duration;
use vmferry_core::{RegionId, RunState, Section, StreamName};
use vmferry_wire::{RegionPage, Token};

const PAGES: u64 = 1 << 20;
const MS: Duration = Duration::from_millis(1);

/// Returns a session whose first pass began at 0 and is in progress.
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
    assert!(is_passing(&session));
    session
}

fn precopy(session: &Session) -> &Precopy {
    let State::Precopy(precopy) = &session.state else { panic!("{:?}", session.state) };
    precopy
}

fn is_passing(session: &Session) -> bool {
    let passing =
        precopy::Step::Passing { began: Duration::ZERO, sent: None, received: false, streamed: None };
    let State::Precopy(precopy) = &session.state else { return false };
    std::mem::discriminant(&precopy.step()) == std::mem::discriminant(&passing)
}

fn in_trial_pause(session: &Session) -> bool {
    matches!(&session.state, State::Precopy(precopy) if precopy.in_trial_pause())
}

fn is_waiting(session: &Session) -> bool {
    session.is_waiting()
}

/// Returns true if the guest is being stopped for a handover, or was.
fn hands_over(session: &Session) -> bool {
    matches!(&session.state, State::Stopping(stopping) if stopping.hands_over())
}

/// Moves the session to the point at which the guest runs on the target before its memory has
/// arrived.
fn run_in_postcopy(session: &mut Session, now: Duration) {
    let (state, _) = Postcopy::begin(&mut session.context, postcopy::History::begin(now));
    session.state = state;
}

/// Moves the session to the commit of a guest that has all of its memory on the target.
fn commit(session: &mut Session) {
    session.state = State::Committed(Committed::new(switchover::Kind::Complete));
}

/// Waits until the session checks a guest again whose I/O was busy. The guest has `dirty` pages to
/// send by then. Returns the actions that follow.
fn wake(session: &mut Session, now: &mut Duration, dirty: u64) -> Vec<Action> {
    loop {
        *now += 20 * MS;
        let asked = session.handle(*now, Event::Tick);
        if asked == [Action::Harvest] {
            return session.handle(*now, Event::Harvested { pages: dirty, writers: Vec::new() });
        }
        assert!(is_waiting(session), "{asked:?}");
    }
}

/// Performs one pass from `now`. Returns the actions that follow its harvest. If the session waits
/// for the guest instead, waits for the end of that.
fn pass(session: &mut Session, now: &mut Duration, bytes: u64, took: Duration, dirty: u64) -> Vec<Action> {
    pass_written_by(session, now, (bytes, took), dirty, &[])
}

/// Performs a pass like [`pass`], with the pages that each vCPU wrote.
fn pass_written_by(
    session: &mut Session,
    now: &mut Duration,
    (bytes, took): (u64, Duration),
    dirty: u64,
    writers: &[u64],
) -> Vec<Action> {
    if is_waiting(session) {
        return wake(session, now, dirty);
    }
    *now += took;
    session.handle(*now, Event::PassSent { bytes, listing: Duration::ZERO, held: Duration::ZERO });
    let received = ToSource::Received { pass: session.context.pass, mismatches: 0, runs: Vec::new() };
    assert_eq!(session.handle(*now, Event::Message(received)), [Action::Harvest]);
    *now += MS;
    session.handle(*now, Event::Harvested { pages: dirty, writers: writers.to_vec() })
}

const PAUSED: Event = Event::Paused { wanted: RunState::Running };
const LIVE: Pass = Pass::Dirty { first: false };

/// Trial pause with the usual limit as its time.
const TRIAL_PAUSE: Action = Action::TrialPause { within: Duration::from_millis(300) };

#[test]
fn single_slow_pong_does_not_delay_an_idle_guest() {
    let mut session = passing(Settings::default());
    let mut now = Duration::from_secs(2);
    let ping = session.handle(now, Event::Tick);
    assert_eq!(ping, [Action::Send(ToTarget::Ping(1))]);
    // The answer was queued behind 400 ms of pages.
    now += 400 * MS;
    session.handle(now, Event::Message(ToSource::Pong(1)));
    assert_eq!(session.context.link.round_trip, 400 * MS);
    let asked = pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    assert_eq!(asked, [TRIAL_PAUSE]);
    session.handle(now, trial_paused(MS));
    assert!(is_passing(&session), "3 x 400 ms do not fit 300");
    // The next pass is tiny and takes 2 ms, so a round trip takes no longer.
    assert_eq!(pass(&mut session, &mut now, 5 << 12, 2 * MS, 5), [Action::Pause]);
}

#[test]
fn round_trip_ends_when_the_answer_arrives_however_busy_the_driver_is() {
    let mut session = passing(Settings::default());
    let now = Duration::from_secs(2);
    assert_eq!(session.handle(now, Event::Tick), [Action::Send(ToTarget::Ping(1))]);
    session.pong(now + 3 * MS, 1);
    session.handle(now + 5000 * MS, Event::Tick);
    assert_eq!(session.context.link.round_trip, 3 * MS);
}

#[test]
fn single_slow_trial_pause_does_not_delay_an_idle_guest() {
    let mut session = passing(Settings::default());
    let mut now = Duration::ZERO;
    assert_eq!(pass(&mut session, &mut now, 4 << 30, 100 * MS, 5), [TRIAL_PAUSE]);
    session.handle(now, trial_paused(2000 * MS));
    let mut tries = 0;
    for _ in 0..1000 {
        match pass(&mut session, &mut now, 5 << 12, 2 * MS, 5)[..] {
            [Action::TrialPause { .. }] => {
                tries += 1;
                if session.handle(now, trial_paused(MS)) == [Action::Pause] {
                    assert_eq!(tries, 1);
                    assert!(now > TRY_AGAIN, "not at once: each stops the guest");
                    return;
                }
            }
            [Action::Pause] => panic!("2 s do not fit 300 ms"),
            _ => {}
        }
    }
    panic!("it was never tried again");
}

fn trial_paused(fixed: Duration) -> Event {
    stopped(fixed, Duration::ZERO)
}

/// Returns the result of a trial pause in which saving took no time.
fn stopped(fixed: Duration, quiesce: Duration) -> Event {
    Event::TrialPaused {
        stop: fixed,
        save: Duration::ZERO,
        quiesce,
        paused: fixed + quiesce,
        state_bytes: 0,
        trial: Some(Vec::new()),
    }
}

fn busy(paused: Duration) -> Event {
    Event::Busy { paused, why: "requests are under way".into() }
}

#[test]
fn guest_with_busy_io_runs_on_and_attempts_become_rarer() {
    let mut session = passing(Settings::default());
    let (mut now, mut stops) = (Duration::ZERO, Vec::new());
    assert_eq!(pass(&mut session, &mut now, 4 << 30, 100 * MS, 5), [TRIAL_PAUSE]);
    session.handle(now, busy(300 * MS));
    assert_eq!(session.verdict().unwrap().help, [Remedy::LessIo], "{:?}", session.verdict());
    assert!(session.busy().unwrap().contains("under way"));
    while now < Duration::from_secs(300) {
        match pass(&mut session, &mut now, 5 << 12, 20 * MS, 5)[..] {
            [Action::TrialPause { .. }] => {
                stops.push(now);
                let more = session.handle(now, busy(300 * MS));
                assert!(!more.contains(&Action::Pause), "{more:?}");
            }
            ref actions => assert!(!actions.contains(&Action::Pause), "{actions:?}"),
        }
    }
    assert!((10..20).contains(&stops.len()), "{stops:?}");
    let longest = stops.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(longest <= LONGEST_BETWEEN + 100 * MS, "{longest:?}");
    // Once its I/O is quiesced, the guest moves.
    loop {
        if let [Action::TrialPause { .. }] = pass(&mut session, &mut now, 5 << 12, 20 * MS, 5)[..] {
            assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
            return;
        }
        assert!(now < Duration::from_secs(400));
    }
}

#[test]
fn switchover_that_finds_busy_io_returns_to_passes() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
        let mut session = passing(Settings { mode, ..Settings::default() });
        let mut now = Duration::ZERO;
        pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
        assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
        let [Action::Save { within }] = session.handle(now, PAUSED)[..] else { panic!("it is saved") };
        assert!(within <= 300 * MS && within > 290 * MS, "5 pages leave nearly all of the limit: {within:?}");
        assert_eq!(session.handle(now + within, busy(within)), [Action::RunOn]);
        now += within;
        let more = session.handle(now, Event::Resumed);
        assert!(
            matches!(more[..], [Action::Send(ToTarget::Pass { .. }), Action::SendPass { .. }]),
            "{more:?}"
        );
        assert_eq!((session.phase(), session.deferrals()), (Phase::Precopy, 1));
        // The next attempt comes later, and is a trial pause.
        let again = loop {
            match &pass(&mut session, &mut now, 5 << 12, 2 * MS, 5)[..] {
                [Action::TrialPause { .. }] => break now,
                actions => assert!(!actions.contains(&Action::Pause), "{actions:?}"),
            }
        };
        assert!(again > within + TRY_AGAIN);
        assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
    }
}

fn is_a_pass(actions: &[Action]) -> bool {
    matches!(actions, [Action::Send(ToTarget::Pass { .. }), Action::SendPass { .. }])
}

#[test]
fn pages_written_during_a_wait_are_sent_first_and_not_judged() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
        let auto_converge = AutoConverge::All;
        let mut session = passing(Settings { mode, auto_converge, ..Settings::default() });
        let mut now = Duration::ZERO;
        assert_eq!(pass(&mut session, &mut now, 1 << 30, 1000 * MS, 5), [TRIAL_PAUSE]);
        session.handle(now, busy(300 * MS));
        assert!(is_waiting(&session));
        let earlier = now;
        // 320 MiB, which take a third of a second.
        let asked = wake(&mut session, &mut now, 320 << 8);
        assert!(is_a_pass(&asked), "{mode}: {asked:?}");
        assert!(
            precopy(&session).waited() > now.saturating_sub(earlier) - 100 * MS,
            "{:?}",
            precopy(&session)
        );
        // The guest is then stopped for a trial pause, and can move at once, even if the pass
        // leaves more than the first one did.
        assert_eq!(pass(&mut session, &mut now, 320 << 20, 320 * MS, 2000), [TRIAL_PAUSE], "{mode}");
        assert_eq!(
            session.handle(now, trial_paused(MS)).last(),
            Some(&Action::SendPass { number: 2, pass: LIVE })
        );
        assert!(!precopy(&session).slows() && session.course().is_empty() && precopy(&session).stuck() == 0);
        assert_eq!(pass(&mut session, &mut now, 8 << 20, 8 * MS, 200), [Action::Pause], "{mode}");
        assert!(!hands_over(&session), "{mode}: it converges");
    }
}

#[test]
fn guest_is_not_throttled_while_the_source_waits_for_its_io() {
    let settings = Settings { auto_converge: AutoConverge::All, ..Settings::default() };
    let mut session = passing(settings);
    let mut now = Duration::ZERO;
    assert_eq!(pass(&mut session, &mut now, 1 << 30, 1000 * MS, 1 << 18), [TRIAL_PAUSE]);
    let slowed = session.handle(now, trial_paused(MS));
    assert!(matches!(slowed[0], Action::Throttle(ref shares) if shares[0] > 0.4), "{slowed:?}");
    // The guest now dirties at half of the link's bandwidth.
    let mut passes = [1u64 << 17, 1 << 16, 60_000, 60_000].into_iter();
    let paused = passes.find(|left| {
        pass(&mut session, &mut now, left << 13, u32::try_from(left >> 7).unwrap() * MS, *left)
            == [Action::Pause]
    });
    assert_eq!((paused, passes.next()), (Some(60_000), None));
    session.handle(now, PAUSED);
    session.handle(now, busy(60 * MS));
    session.handle(now, Event::Resumed);
    assert!(precopy(&session).slows());
    // For a throttled guest, any amount that fits the limit is little enough.
    assert_eq!(pass(&mut session, &mut now, 60_000 << 13, 468 * MS, 60_000), [TRIAL_PAUSE]);
    assert_eq!(session.handle(now, busy(300 * MS)), [Action::Throttle(vec![0.0])]);
    assert!(is_waiting(&session));
    let asked = wake(&mut session, &mut now, 1 << 18);
    assert!(is_a_pass(&asked), "{asked:?}");
}

/// Returns the session of a guest that dirties almost nothing, and whose stop always has these
/// costs. Also returns the time and the actions of each attempt.
fn always(settings: Settings, costs: (Duration, Duration)) -> (Session, Vec<(Duration, Vec<Action>)>) {
    let (mut session, mut now, mut seen) = (passing(settings), Duration::ZERO, Vec::new());
    pass(&mut session, &mut now, 1 << 30, 1000 * MS, 5);
    for _ in 0..50 {
        assert!(in_trial_pause(&session));
        let asked = session.handle(now, stopped(costs.0, costs.1));
        let ends = asked.contains(&Action::Pause);
        seen.push((now, asked));
        if ends || now > Duration::from_secs(600) {
            break;
        }
        while !in_trial_pause(&session) {
            pass(&mut session, &mut now, 5 << 12, 2 * MS, 5);
        }
    }
    (session, seen)
}

#[test]
fn hybrid_does_not_wait_for_a_stop_that_always_takes_too_long() {
    let limit = 50 * MS;
    for costs in [(MS, 100 * MS), (60 * MS, Duration::ZERO)] {
        let hybrid = Settings { mode: MigrationMode::Hybrid, downtime_limit: limit, ..Settings::default() };
        let (session, seen) = always(hybrid, costs);
        assert!(hands_over(&session) && seen.len() == 1, "{seen:?}");
        let auto = Some(Auto { postcopy: true, throttle: AutoConverge::Off, expected: None });
        let (session, seen) = always(Settings { auto, downtime_limit: limit, ..Settings::default() }, costs);
        assert!(hands_over(&session) && seen.len() == 1, "{seen:?}");
        assert!(session.course()[0].why.contains("with nothing to send"), "{:?}", session.course());
        // Otherwise the session waits, and the intervals between attempts grow.
        let (session, seen) = always(Settings { downtime_limit: limit, ..Settings::default() }, costs);
        assert!(is_waiting(&session) && seen.len() < 40, "{}", seen.len());
    }
}

#[test]
fn io_time_is_measured_again_if_only_io_prevents_the_switchover() {
    let mut session = passing(Settings::default());
    let mut now = Duration::from_secs(2);
    session.handle(now, Event::Tick);
    now += 50 * MS;
    session.handle(now, Event::Message(ToSource::Pong(1)));
    pass(&mut session, &mut now, 1 << 30, 1000 * MS, 5);
    // A flush of 200 ms, and three round trips of 50 ms: 351 ms.
    session.handle(now, stopped(MS, 200 * MS));
    assert!(is_waiting(&session), "passes would only cost it faults");
    assert!(session.busy().is_none() && precopy(&session).waits_for_io(&session.context));
    assert_eq!(wake(&mut session, &mut now, 5), [TRIAL_PAUSE]);
    assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
}

#[test]
fn attempts_become_rarer_if_io_is_busy_at_each_switchover() {
    let mut session = passing(Settings::default());
    let (mut now, mut stops) = (Duration::ZERO, Vec::new());
    pass(&mut session, &mut now, 1 << 30, 1000 * MS, 5);
    while now < Duration::from_secs(300) {
        // In a trial pause the I/O is quiesced.
        assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
        session.handle(now, PAUSED);
        now += 298 * MS;
        session.handle(now, busy(298 * MS));
        session.handle(now, Event::Resumed);
        stops.push(now);
        while !in_trial_pause(&session) {
            pass(&mut session, &mut now, 5 << 12, 2 * MS, 5);
        }
    }
    assert!(stops.len() < 20, "{stops:?}");
}

#[test]
fn long_limit_does_not_pause_a_guest_for_most_of_its_time() {
    let limit = Duration::from_secs(10);
    let mut session = passing(Settings { downtime_limit: limit, ..Settings::default() });
    let (mut now, mut stood) = (Duration::ZERO, Duration::ZERO);
    while now < Duration::from_secs(300) {
        if let [Action::TrialPause { .. }] = pass(&mut session, &mut now, 4 << 30, 100 * MS, 5)[..] {
            (now, stood) = (now + limit, stood + limit);
            session.handle(now, busy(limit));
        }
    }
    assert!(stood * 4 <= now && stood >= limit * 3, "{stood:?} of {now:?}");
    assert_eq!(session.deferred_time(), stood);
}

#[test]
fn urgent_migration_makes_no_trial_pause() {
    let mut session = passing(Settings::default());
    let mut now = Duration::ZERO;
    pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    session.handle(now, busy(300 * MS));
    session.context.urgency = Urgency::Switch;
    now += Duration::from_secs(60);
    assert_eq!(session.handle(now, Event::Tick), [Action::Harvest]);
    let asked = session.handle(now, Event::Harvested { pages: 1 << 20, writers: Vec::new() });
    assert!(is_a_pass(&asked), "a stopped guest need not wait for these: {asked:?}");
    assert_eq!(pass(&mut session, &mut now, 4 << 30, 1000 * MS, 5), [Action::Pause]);
}

#[test]
fn limit_shorter_than_a_flush_does_not_prevent_a_hybrid_migration() {
    for (mode, patience) in [(MigrationMode::Precopy, 0), (MigrationMode::Hybrid, 300)] {
        let mut session = passing(Settings { mode, downtime_limit: Duration::ZERO, ..Settings::default() });
        let mut now = Duration::ZERO;
        let asked = pass(&mut session, &mut now, 4 << 30, 100 * MS, 100_000);
        assert_eq!(asked, [Action::TrialPause { within: patience * MS }], "{mode}");
        session.handle(now, trial_paused(20 * MS));
        let asked = pass(&mut session, &mut now, 400 << 20, 100 * MS, 100_000);
        assert_eq!(asked == [Action::Pause], mode == MigrationMode::Hybrid, "{asked:?}");
        if mode == MigrationMode::Hybrid {
            assert_eq!(session.handle(now, PAUSED), [Action::Save { within: 300 * MS }]);
        }
    }
}

#[test]
fn urgent_migration_waits_for_io_as_long_as_the_vm_does() {
    let mut session = passing(Settings::default());
    let mut now = Duration::ZERO;
    pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    session.handle(now, trial_paused(MS));
    session.context.urgency = Urgency::Switch;
    assert_eq!(session.handle(now, PAUSED), [Action::Save { within: Duration::MAX }]);
    let ended = session.handle(now, busy(10_000 * MS));
    assert!(matches!(ended[..], [Action::Resume, Action::Send(ToTarget::Cancel(_))]), "{ended:?}");
}

#[test]
fn paused_guest_resumes_if_the_target_receives_the_last_pages_slowly() {
    for (verify, switch, patient) in [(false, false, false), (true, false, false), (false, true, true)] {
        let settings = Settings { verify, ..Settings::default() };
        let limit = settings.downtime_limit + settings.peer_timeout * 3;
        let mut session = passing(settings);
        let mut now = Duration::ZERO;
        pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
        assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
        if switch {
            session.context.urgency = Urgency::Switch;
        }
        session.handle(now, PAUSED);
        session.handle(now, Event::Saved { sections: Vec::new() });
        session.handle(now, Event::Harvested { pages: 5, writers: Vec::new() });
        let stopped = now;
        // The target answers every ping.
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

/// Returns the throttle that follows a pass of 100 ms at 400 MiB/s in which a guest dirtied the
/// same amount again.
fn throttled(auto_converge: AutoConverge, writers: &[u64]) -> Option<Vec<f64>> {
    let mut session = passing(Settings { auto_converge, downtime_limit: 20 * MS, ..Settings::default() });
    let mut now = Duration::ZERO;
    let pages = (40 << 20) / 4096;
    let asked = pass_written_by(&mut session, &mut now, (40 << 20, 100 * MS), pages, writers);
    assert_eq!(asked, [Action::TrialPause { within: 20 * MS }]);
    let asked = session.handle(now, trial_paused(MS));
    asked
        .into_iter()
        .find_map(|action| if let Action::Throttle(shares) = action { Some(shares) } else { None })
}

#[test]
fn guest_is_throttled_to_the_link_and_only_busy_writers_on_request() {
    let near = |got: Option<Vec<f64>>, want: &[f64]| {
        let got = got.expect("a throttle");
        let same = got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() < 0.01);
        assert!(same, "{got:?} and not {want:?}");
    };
    assert_eq!(throttled(AutoConverge::Off, &[9, 1]), None);
    // The guest dirties at the bandwidth of the link, and half of that is allowed.
    near(throttled(AutoConverge::All, &[9, 1]), &[0.5]);
    near(throttled(AutoConverge::Writers, &[]), &[0.5]);
    near(throttled(AutoConverge::Writers, &[1, 1]), &[0.5, 0.5]);
    // 5 of 10 parts may be dirtied. The modest vCPU needs one, so four are left for the nine parts
    // of the other.
    near(throttled(AutoConverge::Writers, &[9, 1]), &[1.0 - 4.0 / 9.0, 0.0]);
}

#[test]
fn link_that_was_cut_on_request_is_opened_on_request_only() {
    let mut session = passing(Settings { mode: MigrationMode::Hybrid, ..Settings::default() });
    assert_eq!(session.handle(MS, Event::Pause), [], "not before the guest runs there");
    run_in_postcopy(&mut session, MS);
    assert_eq!(session.handle(2 * MS, Event::Pause), [Action::Disconnect]);
    assert_eq!(session.interrupted().map(|(waiting, _)| waiting), Some(true));
    for seconds in 1..100 {
        assert_eq!(session.handle(Duration::from_secs(seconds), Event::Tick), []);
    }
    let again = session.handle(Duration::from_secs(100), Event::Recover);
    assert_eq!(again, [Action::Reconnect { after: Duration::ZERO }]);
}

/// Returns for how long the session tries to reconnect if the link of a guest that runs on the
/// target is lost immediately after each reconnect. `lacks` returns the number of missing pages for
/// each attempt.
fn tried_for(lacks: impl Fn(u64) -> u64) -> Duration {
    let mut session = passing(Settings { mode: MigrationMode::Hybrid, ..Settings::default() });
    run_in_postcopy(&mut session, MS);
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
            [Action::SendRemaining { .. }]
        ));
        session.handle(now, Event::LocalFailure(Refusal::new(RefusalCode::Other, "memory cannot be read")));
    }
    assert!(u128::from(attempts) < now.as_millis() / 20, "{attempts} attempts in {now:?}");
    now
}

#[test]
fn links_without_progress_are_not_reopened_for_ever() {
    let tried = tried_for(|_| 100);
    let patience = Settings::default().reconnect_for;
    assert!((patience..patience + Duration::from_secs(5)).contains(&tried), "{tried:?}");
    // The session continues as long as pages arrive.
    assert_eq!(tried_for(|attempt| (1 << 40) - attempt).as_secs(), 3600);
}

#[test]
fn source_pings_a_target_that_waits_for_its_arbiter() {
    let mut session = passing(Settings::default());
    commit(&mut session);
    let ping = ToTarget::Ping(session.context.link.last_ping.0 + 1);
    assert_eq!(session.handle(Duration::from_secs(2), Event::Tick), [Action::Send(ping.clone())]);
    // The commit may have arrived, even if the ping was not sent.
    let lost = Event::unsent(&ping, "lost".into());
    let ended = session.handle(Duration::from_secs(2), lost);
    assert_eq!(ended, [Action::Finish(Outcome::Unknown("lost".into()))]);
    // A commit that was not sent is known not to have arrived.
    let mut session = passing(Settings::default());
    commit(&mut session);
    let unsent = Event::unsent(&ToTarget::Commit, "lost".into());
    assert_eq!(session.handle(MS, unsent), [Action::Resume]);
}

#[test]
fn message_of_a_failed_verification_names_at_most_sixteen_pages() {
    let mut session = passing(Settings { verify: true, ..Settings::default() });
    let mut now = Duration::ZERO;
    pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
    let received = |pass| Event::Message(ToSource::Received { pass, mismatches: 0, runs: Vec::new() });
    let sent = || Event::PassSent { bytes: 0, listing: Duration::ZERO, held: Duration::ZERO };
    let samples: Vec<_> = (0..65_536).map(|page| RegionPage { region: RegionId(0), page }).collect();
    for event in [
        PAUSED,
        Event::Saved { sections: Vec::new() },
        Event::Harvested { pages: 5, writers: Vec::new() },
        sent(),
        received(1),
        Event::Comparing { pages: PAGES },
        sent(),
        received(2),
    ] {
        session.handle(now, event);
    }
    let verified = ToSource::Verified { pages: PAGES, mismatched: 70_000, samples };
    let ended = session.handle(now, Event::Message(verified));
    let [Action::Resume, Action::Send(ToTarget::Cancel(why))] = &ended[..] else { panic!("{ended:?}") };
    assert_eq!(why.detail.matches(" page 0x").count(), 16, "{}", why.detail);
    assert!(why.detail.ends_with("page 0xf, and 69984 more"), "{}", why.detail);
}

/// Returns the predicted downtime with nothing to send, in milliseconds, after a pass whose pages
/// took `listing` to list, and the trial pause `event`. `load_us` is the time that the target has
/// announced, if any.
fn predicted_ms(load_us: Option<u64>, listing: Duration, event: Event) -> u128 {
    let mut session = passing(Settings::default());
    if let Some(load_us) = load_us {
        assert_eq!(session.handle(Duration::ZERO, Event::Message(ToSource::Costs { load_us })), []);
    }
    let now = 1000 * MS;
    session.handle(now, Event::PassSent { bytes: 100 << 20, listing, held: Duration::ZERO });
    let received = ToSource::Received { pass: 0, mismatches: 0, runs: Vec::new() };
    session.handle(now, Event::Message(received));
    assert_eq!(session.handle(now, Event::Harvested { pages: 0, writers: Vec::new() }), [TRIAL_PAUSE]);
    let asked = session.handle(now, event);
    let predicted = session.predicted_downtime().unwrap();
    assert_eq!(asked == [Action::Pause], predicted <= 300 * MS, "{predicted:?}: {asked:?}");
    predicted.as_millis()
}

#[test]
fn every_known_part_of_the_downtime_is_predicted_and_counts_against_the_limit() {
    let saved = |save, state_bytes| Event::TrialPaused {
        stop: 10 * MS + save,
        save,
        quiesce: Duration::ZERO,
        paused: Duration::ZERO,
        state_bytes,
        trial: None,
    };
    let zero = Duration::ZERO;
    // Loading is assumed to take as long as saving, until the target announces another time.
    assert_eq!(predicted_ms(None, zero, saved(7 * MS, 0)), 24);
    assert_eq!(predicted_ms(Some(0), zero, saved(7 * MS, 0)), 17);
    assert_eq!(predicted_ms(Some(100_000), zero, saved(7 * MS, 0)), 117);
    assert_eq!(predicted_ms(Some(300_000), zero, saved(7 * MS, 0)), 317);
    assert!(predicted_ms(Some(u64::MAX), zero, saved(7 * MS, 0)) > 1 << 50);
    // The bandwidth of the link is 100 MiB per second.
    assert_eq!(predicted_ms(None, zero, saved(zero, 20 << 20)), 210);
    assert_eq!(predicted_ms(None, zero, saved(zero, 40 << 20)), 410);
    assert_eq!(predicted_ms(None, 50 * MS, saved(zero, 0)), 60);
    assert_eq!(predicted_ms(None, 350 * MS, saved(zero, 0)), 360);
}

fn section() -> Section {
    Section { name: "vcpu".into(), instance: 0, version: 1, payload: vec![7] }
}

/// Returns a session that has sent the state of its trial pause to a target that asked for it.
fn preparing(now: &mut Duration) -> Session {
    let mut session = passing(Settings::default());
    assert_eq!(session.handle(*now, Event::Message(ToSource::WantsTrial)), []);
    assert_eq!(pass(&mut session, now, 4 << 30, 100 * MS, 5), [TRIAL_PAUSE]);
    let mut tried = trial_paused(MS);
    if let Event::TrialPaused { trial, .. } = &mut tried {
        *trial = Some(vec![section()]);
    }
    let told = [ToTarget::TrialSection(section()), ToTarget::TrialEnd { sections: 1 }];
    assert_eq!(session.handle(*now, tried), told.map(Action::Send));
    session
}

#[test]
fn guest_is_not_stopped_before_the_target_has_prepared_itself() {
    let mut now = Duration::ZERO;
    let mut session = preparing(&mut now);
    now += 800 * MS;
    assert_eq!(session.handle(now, Event::Tick), []);
    // The target has measured the time for loading.
    assert_eq!(session.handle(now, Event::Message(ToSource::Costs { load_us: 90_000 })), []);
    assert_eq!(session.handle(now, Event::Message(ToSource::Prepared)), [Action::Harvest]);
    // The guest wrote meanwhile, so these pages are sent first.
    let sent = session.handle(now, Event::Harvested { pages: PAGES, writers: Vec::new() });
    let begun = ToTarget::Pass { pass: 1, pages: PAGES };
    assert_eq!(sent, [Action::Send(begun), Action::SendPass { number: 1, pass: LIVE }]);
    // One trial pause suffices, and the target gets no second state.
    assert_eq!(pass(&mut session, &mut now, 2 << 30, 50 * MS, 5), [Action::Pause]);
    let predicted = session.predicted_downtime().unwrap();
    assert!(predicted >= 91 * MS, "{predicted:?}");
}

#[test]
fn guest_stays_if_the_target_does_not_prepare_itself() {
    let mut now = Duration::ZERO;
    let mut session = preparing(&mut now);
    now += session.patience() + MS;
    let ended = session.handle(now, Event::Tick);
    let [Action::Resume, Action::Send(ToTarget::Cancel(why))] = &ended[..] else { panic!("{ended:?}") };
    assert!(why.detail.contains("has not prepared its VM"), "{}", why.detail);
}

#[test]
fn target_learns_of_the_operators_pause_before_it_loads() {
    let mut session = passing(Settings::default());
    let mut now = Duration::ZERO;
    pass(&mut session, &mut now, 4 << 30, 100 * MS, 5);
    assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
    session.handle(now, Event::Paused { wanted: RunState::Paused });
    let sent = session.handle(now, Event::Saved { sections: vec![section()] });
    let told = [
        ToTarget::Final { pass: 1 },
        ToTarget::StaysPaused,
        ToTarget::Section(section()),
        ToTarget::StateEnd { sections: 1 },
    ];
    assert_eq!(sent[..4], told.map(Action::Send));
    assert_eq!(sent[4..], [Action::Harvest]);
}

#[test]
fn device_state_is_streamed_beside_passes_and_ends_before_the_load() {
    let name = StreamName { name: "device".into(), instance: 0, version: 1 };
    let mut session = passing(Settings::default()).streaming(vec![name]);
    // Like a session that had its streams from the start.
    session.state = Precopy::begin(&session.context, Duration::ZERO).0;
    let mut now = 100 * MS;
    let (bytes, listing) = (10 << 20, Duration::ZERO);
    let received = |pass| Event::Message(ToSource::Received { pass, mismatches: 0, runs: Vec::new() });
    assert_eq!(session.handle(now, Event::PassSent { bytes, listing, held: Duration::ZERO }), []);
    assert_eq!(session.handle(now, received(0)), []);
    now += 100 * MS;
    // The pass and the state took 200 ms for 20 MiB.
    let streamed = Event::StateStreamed { bytes, left: 5 << 20 };
    assert_eq!(session.handle(now, streamed.clone()), [Action::Harvest]);
    assert_eq!(session.handle(now, Event::Harvested { pages: 0, writers: Vec::new() }), [TRIAL_PAUSE]);
    assert_eq!(session.handle(now, trial_paused(MS)), [Action::Pause]);
    // The 5 MiB that are left take 50 ms.
    let predicted = session.predicted_downtime().unwrap();
    assert!(predicted >= 50 * MS && predicted < 60 * MS, "{predicted:?}");
    session.handle(now, PAUSED);
    let sent = session.handle(now, Event::Saved { sections: Vec::new() });
    assert_eq!(sent[2..], [Action::StreamState, Action::Harvest]);
    session.handle(now, Event::Harvested { pages: 0, writers: Vec::new() });
    session.handle(now, Event::PassSent { bytes: 0, listing, held: Duration::ZERO });
    // All pages have arrived, but the state has not.
    assert_eq!(session.handle(now, received(1)), []);
    assert_eq!(session.handle(now, streamed), [Action::Send(ToTarget::Load)]);
}
