//! Hostile targets: whatever they send or do not send, the guest continues on the source.

use crate::toy::{Method, Options, Toy};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use vmferry_core::RegionId;
use vmferry_engine::{MigrationHandle, MigrationState, OnTimeout, Report, Settings, migrate};
use vmferry_testkit::PATIENCE;
use vmferry_testkit_peers::peer::{Listener, Target};
use vmferry_testkit_peers::until_hung_up;
use vmferry_wire::{
    HelloReply, MAX_CONTROL_BYTES, Refusal, RefusalCode, RegionPage, RegionRun, ToSource, ToTarget,
    encode_control,
};

/// Peer timeout of the source in tests of silence.
const SILENCE: Duration = Duration::from_secs(3);

/// Migrates to a target that runs `script`. The source uses `settings`.
fn run_against(settings: Settings, script: impl FnOnce(&mut Target<'_>) + Send) -> (Report, Toy) {
    run_script(Toy::new(Options::default(), true), settings, script)
}

/// Migrates the guest of `source` to a target that runs `script`.
fn run_script(
    mut source: Toy,
    settings: Settings,
    script: impl FnOnce(&mut Target<'_>) + Send,
) -> (Report, Toy) {
    let listener = Listener::unix();
    let uri = listener.uri().clone();
    let settings = Settings { channels: 1, ..settings };
    let report = std::thread::scope(|scope| {
        scope.spawn(move || script(&mut Target::accept_control(&listener)));
        migrate(&mut source, &uri, None, &settings, &MigrationHandle::new()).unwrap()
    });
    (report, source)
}

fn patient() -> Settings {
    Settings { peer_timeout: PATIENCE, ..Settings::default() }
}

fn impatient() -> Settings {
    Settings { peer_timeout: SILENCE, ..Settings::default() }
}

type Script<'a> = Box<dyn FnOnce(&mut Target<'_>) + Send + 'a>;

/// Checks that the source detects all of these targets. They run in parallel, because most of them
/// only let time pass.
fn all_seen_through(cases: Vec<(&str, Script<'_>)>) {
    std::thread::scope(|scope| {
        for (what, script) in cases {
            scope.spawn(move || seen_through(what, impatient(), script));
        }
    });
}

/// Checks that the source detects such a target: the guest continues on the source.
fn seen_through(what: &str, settings: Settings, script: impl FnOnce(&mut Target<'_>) + Send) {
    let (report, source) = run_against(settings, script);
    let error = report.error.unwrap_or_default();
    assert_eq!(report.state, MigrationState::Failed, "{what}: {error}");
    assert!(error.contains(what), "wanted '{what}', got '{error}'");
    assert!(source.works(), "{what}");
    assert_eq!(source.lost(), []);
    assert_eq!(source.called(Method::TrackerStop), source.called(Method::TrackerStart), "{what}");
}

fn run(first: u64, count: u64) -> RegionRun {
    RegionRun { region: RegionId(0), first, count }
}

#[test]
fn nonexistent_pages_are_not_sent_again() {
    let elsewhere = RegionRun { region: RegionId(77), ..run(0, 1) };
    for name in [run(1200, 1), run(0, 1201), run(u64::MAX, u64::MAX), run(5, u64::MAX), elsewhere] {
        seen_through("which does not exist", patient(), |liar| {
            let pass = liar.until_the_last_pass();
            liar.received(pass, 1, vec![name]);
            liar.listen();
        });
    }
    seen_through("with a digest mismatch and did not name them", patient(), |liar| {
        let pass = liar.until_the_last_pass();
        liar.received(pass, u64::MAX, vec![]);
        liar.listen();
    });
}

#[test]
fn endless_digest_mismatches_fail_the_migration() {
    seen_through("keep arriving with a digest mismatch", patient(), |liar| {
        let mut pass = liar.until_the_last_pass();
        loop {
            liar.received(pass, 1, vec![run(3, 1)]);
            match liar.swallow_pass() {
                Some(next) => pass = next,
                None => break,
            }
        }
        liar.listen();
    });
}

#[test]
fn false_verification_results_are_rejected() {
    let verified = |pages, mismatched, samples| ToSource::Verified { pages, mismatched, samples };
    let samples = vec![RegionPage { region: RegionId(9), page: u64::MAX }];
    let cases = [
        ("compared 0 of 1900 pages", verified(0, 0, vec![])),
        ("compared 1899 of 1900 pages", verified(1899, 0, vec![])),
        ("18446744073709551615 of 1 pages differ", verified(1, u64::MAX, samples)),
    ];
    for (what, lie) in cases {
        seen_through(what, Settings { verify: true, ..patient() }, |liar| {
            let pass = liar.until_the_last_pass();
            liar.received(pass, 0, vec![]);
            while !matches!(liar.receive(), Some(ToTarget::Verify { .. })) {}
            let pass = liar.swallow_pass().unwrap();
            liar.received(pass, 0, vec![]);
            liar.send(&lie);
            liar.listen();
        });
    }
}

#[test]
fn messages_out_of_order_fail_the_migration() {
    let running = || ToSource::Running { start_us: 0, cpu_us: 0 };
    seen_through("Running, which is not allowed at this point", patient(), |liar| {
        liar.send(&running());
        liar.listen();
    });
    seen_through("Running, which is not allowed at this point", patient(), |liar| {
        liar.until_load();
        liar.send(&running());
        liar.listen();
    });
    seen_through("Returned, which is not allowed at this point", patient(), |liar| {
        liar.accept(1);
        liar.send(&ToSource::Returned(Refusal::new(RefusalCode::Other, "x")));
        liar.listen();
    });
    seen_through("Received, which is not allowed at this point", patient(), |liar| {
        liar.accept(1);
        liar.received(7, 0, vec![]);
        liar.listen();
    });
    seen_through("magic", patient(), |liar| {
        liar.accept(1);
        liar.control.write_all(&[0x55; 64]).unwrap();
        liar.listen();
    });
    seen_through("too tired", patient(), |liar| {
        liar.until_load();
        liar.send(&ToSource::Failed(Refusal::new(RefusalCode::Other, "too tired")));
        liar.listen();
    });
}

#[test]
fn silence_of_the_target_fails_the_migration_at_every_step() {
    let silent = |liar: &mut Target<'_>| {
        // Reads, so that only its messages are missing.
        let _ = liar.control.set_read_timeout(Some(PATIENCE));
        while matches!(liar.control.read(&mut [0; 4096]), Ok(1..)) {}
    };
    let what = "nothing was heard of the target";
    all_seen_through(vec![
        (what, Box::new(silent)),
        (
            what,
            Box::new(move |liar| {
                liar.accept(1);
                silent(liar);
            }),
        ),
        (
            what,
            Box::new(move |liar| {
                liar.until_load();
                silent(liar);
            }),
        ),
        // This target neither reads nor sends.
        (
            what,
            Box::new(|liar| {
                liar.accept(1);
                until_hung_up(&liar.control);
            }),
        ),
    ]);
}

/// Replies without feature bits, like those of the first versions.
#[test]
fn target_that_would_start_a_paused_guest_does_not_get_it() {
    let source = Toy::new(Options { paused: true, ..Options::default() }, true);
    source.halt();
    let (report, source) = run_script(source, patient(), |target| {
        target.accept(1);
        loop {
            match target.receive() {
                Some(ToTarget::Pass { .. }) => {
                    let pass = target.swallow_pass().unwrap();
                    target.received(pass, 0, vec![]);
                }
                Some(ToTarget::Cancel(_)) => break,
                other => panic!("{other:?}"),
            }
        }
        target.listen();
    });
    assert_eq!(report.state, MigrationState::Failed);
    let error = report.error.unwrap();
    assert!(error.contains("the guest is paused") && error.contains("update the target"), "{error}");
    assert!(!source.running(), "the operator's pause ends with the migration");
}

#[test]
fn target_that_only_answers_pings_is_given_up() {
    all_seen_through(vec![
        ("has not accepted the guest", Box::new(|liar| liar.listen())),
        (
            "has not received the pages",
            Box::new(|liar| {
                liar.accept(1);
                liar.swallow_pass();
                liar.listen();
            }),
        ),
        (
            "has not received the pages",
            Box::new(|liar| {
                liar.until_the_last_pass();
                liar.listen();
            }),
        ),
        (
            "has not loaded the device state",
            Box::new(|liar| {
                liar.until_load();
                liar.listen();
            }),
        ),
    ]);
}

/// A target that sends without pause must not prevent the source from checking its timeout.
#[test]
fn flood_of_messages_does_not_suppress_the_timeout() {
    let settings =
        Settings { timeout: Some(Duration::from_secs(3)), on_timeout: OnTimeout::Cancel, ..patient() };
    let began = Instant::now();
    let (report, source) = run_against(settings, |liar| {
        liar.accept(1);
        let pongs = encode_control(&ToSource::Pong(u64::MAX)).unwrap().repeat(500);
        // A source that does not check its timeout sees the end of this loop, which is not a
        // cancel.
        while began.elapsed() < PATIENCE && liar.control.write_all(&pongs).is_ok() {}
    });
    assert_eq!(report.state, MigrationState::Cancelled, "{:?}", report.error);
    assert!(source.works());
}

/// After the commit the source does not guess. Only the target's message that the guest never ran
/// gives the guest back.
#[test]
fn silence_after_the_commit_is_unknown_and_returned_gives_the_guest_back() {
    let commit = |liar: &mut Target<'_>| {
        liar.until_load();
        liar.send(&ToSource::Ready { load_us: 1 });
        assert_eq!(liar.receive(), Some(ToTarget::Commit));
    };
    let lost: [(&str, Script<'_>); 4] = [
        ("closed the connection", Box::new(commit)),
        (
            "nothing was heard",
            Box::new(move |liar| {
                commit(liar);
                // The target gets pings and does not answer.
                while matches!(liar.control.read(&mut [0; 64]), Ok(1..)) {}
            }),
        ),
        (
            "has not said whether it runs",
            Box::new(move |liar| {
                commit(liar);
                let pong = encode_control(&ToSource::Pong(1)).unwrap();
                while liar.control.write_all(&pong).is_ok() {
                    // Often enough, so that the source never finds the target silent.
                    std::thread::sleep(SILENCE / 100);
                }
            }),
        ),
        (
            "answered the commit with",
            Box::new(move |liar| {
                commit(liar);
                liar.received(0, 0, vec![]);
                liar.listen();
            }),
        ),
    ];
    std::thread::scope(|scope| {
        for (what, script) in lost {
            scope.spawn(move || {
                let (report, source) = run_against(impatient(), script);
                assert_eq!(report.state, MigrationState::Unknown, "{what}: {:?}", report.error);
                assert!(report.error.as_ref().unwrap().contains(what), "{what}: {:?}", report.error);
                assert!(!source.running(), "{what}: it was resumed");
            });
        }
    });
    let (report, source) = run_against(patient(), |liar| {
        commit(liar);
        liar.send(&ToSource::Returned(Refusal::new(RefusalCode::State, "no vCPU would start")));
        liar.listen();
    });
    assert_eq!(report.state, MigrationState::Failed);
    assert!(report.error.unwrap().contains("no vCPU would start") && source.works());
}

/// The longest message that the protocol allows, as an error text: the text is truncated to a
/// readable length.
#[test]
fn endless_reason_is_truncated() {
    let (report, source) = run_against(patient(), |liar| {
        let detail = "\u{1b}[2Jno\n".repeat((MAX_CONTROL_BYTES - 100) / 7);
        liar.send(&ToSource::Failed(Refusal::new(RefusalCode::Other, detail)));
        liar.listen();
    });
    let error = report.error.unwrap();
    assert!(error.len() < 5000, "{} bytes", error.len());
    assert!(!error.contains('\u{1b}') && !error.contains('\n'), "it can move a terminal's cursor");
    assert!(source.works());
}

/// Answers of programs that are not targets.
#[test]
fn other_programs_are_distinguished_from_targets() {
    let refuse = |reply: Vec<u8>| {
        let mut source = Toy::new(Options::default(), true);
        let listener = Listener::unix();
        // A peer that sends nothing is given up after its timeout.
        let settings = if reply.is_empty() { impatient() } else { patient() };
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = listener.connection();
                let _ = stream.write_all(&reply);
                let _ = stream.read_to_end(&mut Vec::new());
            });
            migrate(&mut source, listener.uri(), None, &settings, &MigrationHandle::new())
                .unwrap_err()
                .to_string()
        });
        assert!(source.works() && source.called(Method::TrackerStart) == 0);
        error
    };
    let web = refuse(b"HTTP/1.1 400 Bad Request\r\n".repeat(5));
    assert!(web.contains("does not speak the vmferry protocol"), "{web}");
    let mute = refuse(vec![]);
    assert!(mute.contains("did not answer the greeting"), "{mute}");
    let migration = vmferry_wire::MigrationId([0; 16]);
    let other = HelloReply { refused: None, version: 1, features: 0, migration };
    let other = refuse(other.encode().to_vec());
    assert!(other.contains("the hello of another migration"), "{other}");
}
