//! Migrations that succeed, migrations that are cancelled, and migrations whose VM fails.

use crate::rig::{between, between_with_handle, check_owner, move_well, quick, unix_uri};
use crate::toy::{Method, Options, Toy, Tracking, device_byte, page_text};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{PauseCosts, RegionId};
use vmferry_engine::{
    BulkLimit, Downtime, Listener, MigrationHandle, MigrationMode, MigrationState, OnTimeout, RunState,
    SenderFigures, Settings, SwitchoverBandwidth, Uri,
};
use vmferry_testkit::{PATIENCE, wait};

#[test]
fn busy_guest_moves_by_any_number_of_channels_and_any_socket() {
    let tcp = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    for (channels, uri) in [(1, unix_uri()), (2, tcp.clone()), (4, unix_uri()), (4, tcp)] {
        for tracking in [Tracking::Marks, Tracking::ByHand] {
            let verify = channels != 2;
            let settings = Settings { channels, verify, ..quick() };
            let (report, received) = move_well(Options { tracking, ..Options::default() }, &uri, &settings);
            assert_eq!(report.verified_pages, if verify { 1900 } else { 0 });
            assert_eq!(report.mismatched_pages, 0);
            assert!(report.passes.len() >= 2, "a loaded guest takes more than one pass");
            // 1200 + 700 pages, of which 600 + 600 were ever written.
            assert!(report.bytes.zero_pages >= 700, "untouched pages were sent: {:?}", report.bytes);
            assert!(received.pages >= 1200);
        }
    }
}

/// Moves a guest whose vCPUs wait for processors for this share of the time, by four channels that
/// adapt. The first pass takes most of a second, and is the only one before the switchover.
fn move_adapting(waits: Option<f64>) -> SenderFigures {
    let options = Options { waits, used: 1200, ..Options::default() };
    let settings = Settings {
        channels: 4,
        adapt_channels: true,
        max_bandwidth: Some(10_000_000),
        downtime_limit: Duration::from_secs(60),
        verify: true,
        ..quick()
    };
    let (report, _) = move_well(options, &unix_uri(), &settings);
    assert_eq!((report.verified_pages, report.mismatched_pages), (1900, 0));
    report.senders.unwrap()
}

#[test]
fn channels_stop_sending_while_vcpus_wait_for_processors() {
    let waiting = move_adapting(Some(2.0));
    // Two channels share processors with vCPUs if no processor of the host is idle.
    assert!(waiting.now <= 2 && waiting.least <= waiting.now, "{waiting:?}");
    assert!(waiting.vcpu_wait_us > 0, "{waiting:?}");
    let untold = move_adapting(None);
    assert_eq!((untold.least, untold.most, untold.changes), (untold.now, untold.now, 0), "{untold:?}");
    assert_eq!(untold.vcpu_wait_us, 0);
}

#[test]
fn channels_send_again_once_no_vcpu_waits() {
    // The first number depends on what else runs on the host. No processor may ever be idle.
    let calm = move_adapting(Some(0.0));
    assert!(calm.now >= 1 && calm.least <= calm.now && calm.now <= calm.most, "{calm:?}");
    assert!(calm.least == calm.most || calm.changes > 0, "{calm:?}");
    assert_eq!(calm.vcpu_wait_us, 0);
}

/// Returns the sum of the parts of the downtime.
fn explained(parts: &Downtime) -> f64 {
    parts.pause_ms
        + parts.send_state_ms
        + parts.last_harvest_ms
        + parts.list_pages_ms
        + parts.last_pages_ms
        + parts.target_prepare_ms
        + parts.device_state_ms
        + parts.commit_ms
        + parts.resume_ms
}

#[test]
fn parts_of_the_downtime_are_the_whole_downtime() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid, MigrationMode::Postcopy] {
        for verify in [false, true] {
            let options = Options { ballast: 3 << 20, demand_paging: true, ..Options::default() };
            let settings = Settings { mode, verify, ..quick() };
            let (report, _) = move_well(options, &unix_uri(), &settings);
            let (sum, whole) = (explained(&report.downtime), report.downtime_ms);
            // Each part begins at the end of the part before, however busy the host is.
            assert!((sum - whole).abs() < 1e-3, "{mode:?}: {sum} of {whole} ms: {:?}", report.downtime);
        }
    }
}

#[test]
fn time_that_the_target_needs_is_predicted() {
    // Far above the rest of the downtime, and within the limit.
    let load = Duration::from_secs(20);
    let settings = Settings { downtime_limit: Duration::from_secs(60), ..quick() };
    let options = Options { expected_load: Some(load), ..Options::default() };
    let (report, _) = move_well(options, &unix_uri(), &settings);
    assert!(report.predicted_downtime_ms >= Some(20e3), "{:?}", report.predicted_downtime_ms);
    let (report, _) = move_well(Options::default(), &unix_uri(), &settings);
    assert!(report.predicted_downtime_ms < Some(20e3), "{:?}", report.predicted_downtime_ms);
}

#[test]
fn guest_that_declares_its_costs_is_paused_for_the_switchover_only() {
    let stop = Duration::from_secs(20);
    let declared = PauseCosts::Declared { stop, save: Duration::ZERO, state_bytes: 0 };
    let settings = Settings { downtime_limit: Duration::from_secs(60), ..quick() };
    let pauses = |pause_costs| {
        let mut source = Toy::new(Options { pause_costs, ..Options::default() }, true);
        let mut target = source.target();
        let count = source.counter();
        let ended = between(&mut source, &mut target, &settings);
        check_owner(&source, &target, &ended);
        let report = ended.sent.unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        (count(Method::Pause), report.trial_pauses, report.predicted_downtime_ms)
    };
    let (calls, trials, predicted) = pauses(declared);
    assert_eq!((calls, trials), (1, 0));
    assert!(predicted >= Some(20e3), "{predicted:?}");
    let (calls, trials, _) = pauses(PauseCosts::Measured);
    assert!(calls > 1 && trials > 0, "{calls} pauses, {trials} of them trials");
}

#[test]
fn guest_that_its_operator_has_paused_stays_paused_on_the_target() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid, MigrationMode::Postcopy] {
        let mut source = Toy::new(Options { paused: true, demand_paging: true, ..Options::default() }, true);
        source.halt();
        let mut target = source.target();
        let ended = between(&mut source, &mut target, &Settings { mode, ..quick() });
        assert_eq!(ended.state(), Some(MigrationState::Completed), "{mode}: {}", ended.error());
        assert!(ended.received.unwrap().paused, "{mode}");
        assert_eq!(target.started(), Some(RunState::Paused), "{mode}");
        assert!(!source.running() && !target.running() && !target.ran(), "{mode}: it runs");
        target.go();
        assert!(target.works(), "{mode}");
        assert_eq!((target.lost(), target.surprises()), (vec![], 0), "{mode}: the guest misses pages");
    }
}

#[test]
fn paused_guest_that_cannot_be_moved_stays_paused() {
    let mut source = Toy::new(Options { paused: true, ..Options::default() }, true);
    source.halt();
    let mut target = source.target();
    target.fail(Method::Load, 0);
    let ended = between(&mut source, &mut target, &quick());
    assert_eq!(ended.state(), Some(MigrationState::Failed), "{}", ended.error());
    assert!(source.called(Method::Resume) > 0, "the engine gives the guest back");
    assert!(!source.running() && !target.running(), "it runs");
}

#[test]
fn target_prepares_itself_with_the_state_of_the_trial_pause() {
    let steps = [Method::Prepare, Method::Load, Method::Start];
    let moved = |mode| {
        let mut source =
            Toy::new(Options { wants_trial: true, demand_paging: true, ..Options::default() }, true);
        let mut target = source.target();
        // The guest writes meanwhile, and its writes must not be lost.
        target.takes(Method::Prepare, Duration::from_millis(200));
        let ended = between(&mut source, &mut target, &Settings { mode, ..quick() });
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Completed), "{mode}: {}", ended.error());
        assert_eq!(target.lost(), [], "{mode}: the guest misses pages");
        target
    };
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
        let target = moved(mode);
        let mut called = target.calls();
        called.retain(|method| steps.contains(method));
        assert_eq!(called, steps, "{mode}");
        let names: Vec<_> = target.trial().unwrap().iter().map(|section| &*section.name).collect();
        assert_eq!(names, ["writes", "ledger", "free", "ledger", "free", "ballast"], "{mode}");
    }
    // A postcopy has no trial pause.
    assert_eq!(moved(MigrationMode::Postcopy).trial(), None);
}

#[test]
fn device_state_larger_than_sections_is_streamed() {
    // More than the limit of all sections together.
    const LEAST: u64 = 80 << 20;
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid, MigrationMode::Postcopy] {
        let stream = Some((LEAST, 10_000));
        let mut source = Toy::new(Options { stream, demand_paging: true, ..Options::default() }, true);
        let mut target = source.target();
        let ended = between(&mut source, &mut target, &Settings { mode, ..quick() });
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Completed), "{mode}: {}", ended.error());
        let came = target.device().expect("the stream has ended");
        assert!(came.len() as u64 >= LEAST, "{mode}: {} bytes", came.len());
        assert!(came.iter().zip(0..).all(|(byte, at)| *byte == device_byte(at)), "{mode}: other bytes");
    }
}

#[test]
fn guest_stays_if_its_device_state_is_refused() {
    let mut source = Toy::new(Options { stream: Some((9, 0)), ..Options::default() }, true);
    let mut target = source.target();
    target.fail(Method::Stream, 0);
    let ended = between(&mut source, &mut target, &quick());
    check_owner(&source, &target, &ended);
    assert!(ended.error().contains("injected failure of Stream"), "{}", ended.error());
}

#[test]
fn guest_stays_if_the_target_cannot_prepare_itself() {
    let mut source = Toy::new(Options { wants_trial: true, ..Options::default() }, true);
    let mut target = source.target();
    target.fail(Method::Prepare, 0);
    let ended = between(&mut source, &mut target, &quick());
    check_owner(&source, &target, &ended);
    assert!(ended.error().contains("could not prepare itself for the guest"), "{}", ended.error());
}

/// A slow call is reported in the right part of the downtime.
#[test]
fn slow_calls_are_reported_in_their_part_of_the_downtime() {
    const SLOW: Duration = Duration::from_millis(200);
    let check = |method, part: fn(&Downtime) -> f64| {
        let mut source = Toy::new(Options::default(), true);
        let mut target = source.target();
        let there = matches!(method, Method::Load | Method::Start);
        (if there { &target } else { &source }).takes(method, SLOW);
        let settings = Settings { downtime_limit: PATIENCE, ..quick() };
        let ended = between(&mut source, &mut target, &settings);
        check_owner(&source, &target, &ended);
        let report = ended.sent.unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{method:?}: {:?}", report.error);
        assert!(part(&report.downtime) >= 199.0, "{method:?}: {:?}", report.downtime);
        assert!((explained(&report.downtime) - report.downtime_ms).abs() < 1e-3, "{report:?}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| check(Method::Pause, |parts| parts.pause_ms));
        scope.spawn(|| check(Method::Harvest, |parts| parts.last_harvest_ms));
        scope.spawn(|| check(Method::Save, |parts| parts.device_state_ms));
        scope.spawn(|| check(Method::Load, |parts| parts.device_state_ms));
        scope.spawn(|| check(Method::Start, |parts| parts.resume_ms));
    });
}

/// The parts of the report must add up to its sums.
#[test]
fn report_adds_up() {
    for verify in [false, true] {
        let settings = Settings { verify, ..quick() };
        let (report, _) =
            move_well(Options { ballast: 3 << 20, ..Options::default() }, &unix_uri(), &settings);
        assert!(
            report.downtime_ms + report.verify_ms + report.setup_ms <= report.total_ms + 1.0,
            "{report:?}"
        );
        assert!(report.enable_tracking_ms.is_some_and(|ms| ms <= report.setup_ms), "{report:?}");
        assert_eq!(report.verify_ms > 0.0, verify);
        let passes: u64 = report.passes.iter().map(|pass| pass.wire_bytes).sum();
        assert!(
            passes <= report.bytes.wire && report.bytes.raw_pages * 4096 < report.bytes.wire,
            "{report:?}"
        );
        // A tracker cannot have been in the kernel for longer than its harvest took.
        let harvested: Vec<_> = report.passes.iter().filter(|pass| pass.harvest_ms > 0.0).collect();
        assert!(!harvested.is_empty(), "{report:?}");
        for pass in harvested {
            let (kernel, walk) = (pass.harvest_kernel_ms.unwrap(), pass.harvest_walk_ms.unwrap());
            assert!(
                kernel > 0.0 && walk >= 0.0 && (kernel + walk - pass.harvest_ms).abs() < 1e-6,
                "{pass:?}"
            );
        }
    }
}

#[test]
fn bandwidth_cap_is_kept() {
    // 1200 pages with content are 4.9 MB: half a second at 10 MB/s.
    let settings = Settings { max_bandwidth: Some(10_000_000), ..quick() };
    let options = Options { write_pause: Duration::from_millis(20), ..Options::default() };
    let (report, _) = move_well(options, &unix_uri(), &settings);
    let took = (report.total_ms - report.setup_ms) / 1e3;
    let rate = report.bytes.wire as f64 / took;
    assert!(rate < 11_000_000.0, "{rate} bytes/s");
    // A busy host is slower, but hardly by that factor.
    assert!(rate > 200_000.0, "{rate} bytes/s is far below the cap");
}

/// The cap holds while the guest is paused, unless the switchover has a limit of its own.
#[test]
fn switchover_keeps_the_cap_or_has_its_own() {
    let last_pages = |options, cap, switchover_bandwidth, timeout| {
        // The guest dirties faster than the cap allows, so that much is left for the switchover.
        let settings = Settings {
            max_bandwidth: Some(cap),
            switchover_bandwidth,
            downtime_limit: Duration::from_millis(1),
            timeout: Some(Duration::from_millis(timeout)),
            on_timeout: OnTimeout::Switch,
            ..quick()
        };
        let (report, _) = move_well(options, &unix_uri(), &settings);
        let pass = report.passes.last().unwrap();
        assert!(pass.wire_bytes > 500_000, "{report:?}");
        pass.wire_bytes as f64 / report.downtime.last_pages_ms * 1e3
    };
    std::thread::scope(|scope| {
        // A burst of 10 ms is not limited, nor are the first slots of each channel.
        scope.spawn(|| {
            let kept = last_pages(Options::default(), 8_000_000, None, 900);
            assert!(kept < 12_000_000.0, "{kept} bytes/s");
        });
        scope.spawn(|| {
            let at_most = Some(SwitchoverBandwidth::AtMost(2_000_000));
            let lower = last_pages(Options::default(), 8_000_000, at_most, 900);
            assert!(lower < 4_000_000.0, "{lower} bytes/s");
        });
        // The cap is so low that even a busy host is faster.
        scope.spawn(|| {
            let small = Options { pages: vec![300, 100], used: 150, ..Options::default() };
            let free = last_pages(small, 200_000, Some(SwitchoverBandwidth::Unlimited), 2000);
            assert!(free > 400_000.0, "{free} bytes/s");
        });
    });
}

#[test]
fn timeout_cancels_or_switches() {
    // The guest dirties faster than the cap allows, and the downtime limit is unreachable: without
    // a timeout this migration would never end.
    let endless = Settings {
        max_bandwidth: Some(4_000_000),
        downtime_limit: Duration::from_millis(1),
        timeout: Some(Duration::from_millis(300)),
        ..quick()
    };
    let (report, _) = move_well(
        Options::default(),
        &unix_uri(),
        &Settings { on_timeout: OnTimeout::Switch, ..endless.clone() },
    );
    assert!(report.total_ms >= 300.0);
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let ended = between(&mut source, &mut target, &endless);
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Cancelled));
    assert!(ended.error().contains("not done within 300ms"), "{}", ended.error());
    assert!(source.works());
}

/// A cancel at any moment leaves the guest on source or target. If the guest is on the source, the
/// next attempt succeeds.
#[test]
fn cancel_at_any_moment_leaves_one_guest_that_can_be_moved_again() {
    let mut cancelled = 0;
    for round in 0..20u64 {
        let mut source = Toy::new(Options { pages: vec![1200, 300], ..Options::default() }, true);
        let mut target = source.target();
        // 900 pages have content, 3.7 MB. The cancels are spread over these and the pages that are
        // written meanwhile.
        let settings = Settings { max_bandwidth: Some(80_000_000), verify: round % 2 == 0, ..quick() };
        let (handle, done) = (MigrationHandle::new(), AtomicBool::new(false));
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                let sent = || handle.progress().wire_bytes >= round * 250_000;
                wait("so many bytes", || sent() || done.load(Ordering::Relaxed));
                handle.cancel();
            });
            let ended = between_with_handle(&mut source, &mut target, &settings, &handle);
            done.store(true, Ordering::Relaxed);
            ended
        });
        check_owner(&source, &target, &ended);
        if ended.state() == Some(MigrationState::Completed) {
            continue;
        }
        assert_eq!(ended.state(), Some(MigrationState::Cancelled), "{}", ended.error());
        cancelled += 1;
        assert!(source.works());
        drop(target);
        let mut target = source.target();
        let again = between(&mut source, &mut target, &quick());
        check_owner(&source, &target, &again);
        assert_eq!(again.state(), Some(MigrationState::Completed), "{}", again.error());
        assert_eq!(target.lost(), []);
    }
    assert!(cancelled >= 5, "only {cancelled} of 20 were cancelled in time");
}

#[test]
fn failure_of_the_source_is_named_and_leaves_the_guest_running() {
    let cases = [
        (Method::Tracker, 0, "Tracker"),
        (Method::TrackerStart, 0, "starting to track dirty pages failed"),
        (Method::Harvest, 0, "harvesting dirty pages failed"),
        (Method::Harvest, 1, "harvesting dirty pages failed"),
        (Method::Protect, 0, "reading guest memory failed"),
        (Method::Protect, 3, "reading guest memory failed"),
        (Method::Window, 5, "reading guest memory failed"),
        (Method::Touched, 0, "reading guest memory failed"),
        (Method::Pause, 0, "the trial pause failed"),
        (Method::Pause, 1, "pausing the guest failed"),
        (Method::Save, 0, "the trial pause failed"),
        (Method::Save, 1, "saving the device state failed"),
        (Method::Resume, 0, "the trial pause failed"),
    ];
    for (method, after, text) in cases {
        let mut source = Toy::new(Options { tracking: Tracking::ByHand, ..Options::default() }, true);
        let mut target = source.target();
        source.fail(method, after);
        // One trial pause suffices, however long a pause takes on a busy host.
        let settings = Settings { downtime_limit: PATIENCE, ..quick() };
        let ended = between(&mut source, &mut target, &settings);
        assert!(!source.failure_left(), "{method:?} was not called {after} times before");
        check_owner(&source, &target, &ended);
        let error = ended.error();
        assert_ne!(ended.state(), Some(MigrationState::Completed), "{method:?}");
        assert!(
            error.contains(text) && error.contains(&format!("{method:?}")),
            "{method:?} {after}: {error}"
        );
        assert!(source.works());
        if ended.sent.is_ok() {
            assert_eq!(
                source.called(Method::TrackerStop),
                usize::from(source.called(Method::TrackerStart) > 0)
            );
            assert!(ended.received.unwrap_err().to_string().contains(&format!("{method:?}")), "{method:?}");
        }
    }
}

#[test]
fn failure_of_the_target_is_named_on_source_and_target() {
    for (method, text) in
        [(Method::Window, "memory"), (Method::Load, "device state"), (Method::Start, "started")]
    {
        let mut source = Toy::new(Options::default(), true);
        let mut target = source.target();
        target.fail(method, 0);
        let ended = between(&mut source, &mut target, &quick());
        assert!(!target.failure_left());
        check_owner(&source, &target, &ended);
        let (here, there) = (ended.error(), ended.received.as_ref().unwrap_err().to_string());
        for error in [&here, &there] {
            assert!(error.contains(text) && error.contains(&format!("{method:?}")), "{method:?}: {error}");
        }
        assert!(there.contains("has not run on the target"), "{there}");
        assert!(source.works());
    }
}

/// A tracker that cannot stop costs speed, not the guest. A guest that cannot be resumed is
/// reported as such.
#[test]
fn failures_after_the_end_are_reported_and_change_nothing() {
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    source.fail(Method::TrackerStop, 0);
    let ended = between(&mut source, &mut target, &quick());
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Completed));

    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    target.fail(Method::Load, 0);
    source.fail(Method::Resume, 1);
    // One trial pause suffices, however long a pause takes on a busy host. The second resume is the
    // one after the failure.
    let settings = Settings { downtime_limit: PATIENCE, ..quick() };
    let ended = between(&mut source, &mut target, &settings);
    assert_eq!(ended.state(), Some(MigrationState::Failed));
    let error = ended.error();
    assert!(error.contains("failure of Load") && error.contains("failure of Resume"), "{error}");
    assert!(ended.sent.is_ok_and(|report| report.resume_failed));
    assert!(!source.running() && !target.ran());
}

/// The writes to one page are hidden from the engine on purpose. Verification and guest must find
/// exactly that page.
#[test]
fn lost_page_is_found_by_verification_and_by_the_guest() {
    let lose = Some((1, 41));
    let options = Options { lose, ..Options::default() };
    let mut source = Toy::new(options.clone(), true);
    let mut target = source.target();
    let settings = Settings { verify: true, ..quick() };
    let ended = between(&mut source, &mut target, &settings);
    check_owner(&source, &target, &ended);
    let name = page_text(RegionId(3), 41);
    assert!(
        ended.error().contains(&format!("1 of 1900 pages differ between source and target: {name}")),
        "{}",
        ended.error()
    );
    let report = ended.sent.as_ref().unwrap();
    assert_eq!((report.state, report.mismatched_pages), (MigrationState::Failed, 1));
    drop((source, target));

    let mut source = Toy::new(options, true);
    let mut target = source.target();
    let ended = between(&mut source, &mut target, &quick());
    assert_eq!(ended.state(), Some(MigrationState::Completed));
    assert_eq!(target.arrived_equal(), Some(false));
    target.halt();
    // The guest has written since. Pages that it has not written again are still wrong.
    assert!(target.lost().iter().all(|page| *page == (RegionId(3), 41)), "{:?}", target.lost());
}

#[test]
fn different_machines_are_refused_and_the_target_waits_on() {
    let mut source = Toy::new(Options { vcpus: 4, ..Options::default() }, true);
    let mut right = Toy::new(Options::default(), true);
    let mut target = right.target();
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = vmferry_engine::Arrival::new(quick().peer_timeout);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| vmferry_engine::receive(&mut target, &listener, &arrival));
        let refused =
            vmferry_engine::migrate(&mut source, &uri, None, &quick(), &MigrationHandle::new()).unwrap();
        let error = refused.error.unwrap();
        assert_eq!(refused.state, MigrationState::Failed);
        assert!(
            error.contains("vCPUs: the guest has 4, the target has 2")
                && error.contains("the machines differ"),
            "{error}"
        );
        assert!(!receiving.is_finished() && source.works());
        let report =
            vmferry_engine::migrate(&mut right, &uri, None, &quick(), &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        let _ = receiving.join().unwrap().unwrap();
    });
    assert_eq!(target.lost(), []);
}

#[test]
fn migration_that_cannot_begin_reports_the_reason_at_once() {
    let mut source = Toy::new(Options::default(), true);
    let mut fails = |uri: &Uri, settings: &Settings| {
        let began = Instant::now();
        let error =
            vmferry_engine::migrate(&mut source, uri, None, settings, &MigrationHandle::new()).unwrap_err();
        assert!(began.elapsed() < PATIENCE, "{error}");
        error.to_string()
    };
    // A source that waited for its peer would wait longer than this test.
    let quick = || Settings { peer_timeout: PATIENCE * 2, ..quick() };
    let unanswered = fails(&unix_uri(), &quick());
    assert!(
        unanswered.contains("cannot connect")
            && unanswered.contains("check that the target waits for a guest"),
        "{unanswered}"
    );
    let far = fails(&Uri::Tcp { host: "192.0.2.1".into(), port: 9 }, &quick());
    assert!(far.contains("permit plain connections"), "{far}");
    let none = fails(&unix_uri(), &Settings { channels: 0, ..quick() });
    assert!(none.contains("1 to 64"), "{none}");
    let still = fails(&unix_uri(), &Settings { max_bandwidth: Some(0), ..quick() });
    assert!(still.contains("the bandwidth limit is 0"), "{still}");
    let stuck = Settings { switchover_bandwidth: Some(SwitchoverBandwidth::AtMost(0)), ..quick() };
    assert!(fails(&unix_uri(), &stuck).contains("the bandwidth limit is 0"));
    let never = Settings { pace: BulkLimit::Rate(0), ..quick() };
    assert!(fails(&unix_uri(), &never).contains("the rate limit of postcopy is 0"));
    let hasty = fails(&unix_uri(), &Settings { peer_timeout: Duration::ZERO, ..quick() });
    assert!(hasty.contains("the peer timeout is 0"), "{hasty}");
    assert!(source.works());
}

/// A section that is larger than a message is the fault of the source, and the link is not blamed.
#[test]
fn device_state_that_is_too_large_is_named() {
    let mut source = Toy::new(Options { ballast: 5 << 20, ..Options::default() }, true);
    let mut target = source.target();
    let ended = between(&mut source, &mut target, &quick());
    check_owner(&source, &target, &ended);
    let error = ended.error();
    assert!(error.contains("ballast") && error.contains("4095 KiB") && !error.contains("link"), "{error}");
    assert_eq!(source.called(Method::Pause), 1, "it was only stopped to see");
}
