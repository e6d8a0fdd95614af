//! VMs whose own code panics: the call that drove them passes that on, or fails where a thread of the engine's drove them; and nobody waits
//! for ever.

use crate::rig::{between, check_owner, monitored, quick, unix_uri};
use crate::toy::{Method, Options, Toy, Tracking};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::time::Duration;
use vmferry_engine::{
    Arrival, Listener, MigrationMode, MigrationState, Monitor, ReceiveFailure, RestState, Settings, migrate,
    receive,
};
use vmferry_testkit::{PATIENCE, wait};

/// How it ends if a method of one side panics.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The caller has the panic.
    PassedOn,
    /// It failed, and why.
    Failed(String),
}

/// Moves a guest between VMs that are `prepare`d; how that ended, and whether the guest goes on at its source.
fn end(prepare: impl Fn(&Toy, &Toy) + Send + 'static) -> (End, bool) {
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        let mut source = Toy::new(Options { tracking: Tracking::ByHand, ..Options::default() }, true);
        let mut target = source.target();
        prepare(&source, &target);
        let settings = quick();
        let moved = catch_unwind(AssertUnwindSafe(|| between(&mut source, &mut target, &settings)));
        let end = moved.map_or(End::PassedOn, |ended| {
            check_owner(&source, &target, &ended);
            assert_eq!(ended.state(), Some(MigrationState::Failed));
            End::Failed(ended.error())
        });
        assert!(!target.ran());
        sender.send((end, source.works())).unwrap();
    });
    ended.recv_timeout(PATIENCE).expect("it never ends, or what must hold does not")
}

#[test]
fn a_panic_on_the_callers_thread_is_the_callers() {
    for method in [Method::TrackerStart, Method::Harvest, Method::Pause, Method::Save] {
        assert_eq!(end(move |source, _| source.panics(method)).0, End::PassedOn, "{method:?}");
    }
    // The source hears of it as of any target that is gone.
    for method in [Method::Load, Method::Start] {
        assert_eq!(
            end(move |_, target| target.panics(method)),
            (End::PassedOn, method == Method::Load),
            "{method:?}"
        );
    }
}

#[test]
fn a_panic_on_a_channels_thread_is_a_failure_and_the_guest_goes_on() {
    for method in [Method::Window, Method::Touched, Method::Protect] {
        let (End::Failed(why), true) = end(move |source, _| source.panics(method)) else {
            panic!("{method:?}");
        };
        assert!(why.contains("panicked") && why.contains("a clumsy VM"), "{method:?}: {why}");
    }
    let (End::Failed(why), true) = end(|_, target| target.panics(Method::Window)) else {
        panic!("Window there")
    };
    assert!(why.contains("a clumsy VM"), "{why}");
}

/// Whoever is told that the guest runs there must hear that, whatever becomes of what is undone here.
#[test]
fn a_panic_after_the_end_does_not_take_the_report() {
    let mut source = Toy::new(Options { tracking: Tracking::ByHand, ..Options::default() }, true);
    let mut target = source.target();
    source.panics(Method::TrackerStop);
    let watched = Monitor::watched(|_| panic!("a clumsy watcher"));
    let ended = monitored(&mut source, &mut target, &quick(), &watched);
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Completed));
    assert_eq!(source.called(Method::TrackerStop), 1);
}

/// How a move by postcopy ended on each side; `Err` is a panic, in its words.
struct Lazily {
    sent: Result<(MigrationState, String), String>,
    received: Result<Result<RestState, ReceiveFailure>, String>,
    /// Whether the guest goes on: here, and there as far as it has its memory.
    runs: (bool, bool),
    /// Whether it works there, and finds all of its memory.
    whole: bool,
}

fn panic_of<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a panic with words")
    })
}

/// Moves a guest whose memory follows it, between VMs that are `prepare`d. Whoever looks after it gives it up when it cannot go on by itself.
fn lazily(prepare: impl Fn(&Toy, &Toy) + Send + 'static) -> Lazily {
    lazily_within(quick().peer_timeout, prepare)
}

/// The same between sides that bear silence for `peer_timeout`.
fn lazily_within(peer_timeout: Duration, prepare: impl Fn(&Toy, &Toy) + Send + 'static) -> Lazily {
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        let options = Options { lazy: true, rest: Duration::from_millis(2), ..Options::default() };
        let mut source = Toy::new(options, true);
        let mut target = source.target();
        prepare(&source, &target);
        let listener = Listener::bind(&unix_uri(), false).unwrap();
        let uri = listener.uri().unwrap();
        let settings = Settings {
            mode: MigrationMode::Postcopy,
            peer_timeout,
            reconnect_for: Duration::from_millis(300),
            ..Settings::default()
        };
        let (arrival, monitor) = (Arrival::new(settings.peer_timeout), Monitor::new());
        let (sent, received) = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                panic_of(|| {
                    let rest =
                        receive(&mut target, &listener, &arrival)?.rest.expect("it came before its memory");
                    Ok(rest.finish(&listener, &arrival))
                })
            });
            let sending = scope.spawn(|| {
                panic_of(|| migrate(&mut source, &uri, None, &settings, &monitor)).map(|sent| {
                    let report = sent.expect("a report");
                    (report.state, report.error.unwrap_or_default())
                })
            });
            wait("the source's end", || {
                if monitor.progress().awaits_recover {
                    monitor.abandon();
                }
                sending.is_finished()
            });
            arrival.abandon();
            (sending.join().unwrap(), receiving.join().unwrap())
        });
        let runs = (source.running(), target.running());
        let there = matches!(&received, Ok(Ok(rest)) if rest.left == 0);
        let whole = there && target.works() && target.lost().is_empty();
        sender.send(Lazily { sent, received, runs, whole }).unwrap();
    });
    ended.recv_timeout(PATIENCE).expect("it never ends")
}

#[test]
fn a_guest_whose_start_panics_runs_nowhere_and_its_source_does_not_guess() {
    // The source hears nothing more, and is to find that out.
    let silence = Duration::from_secs(5);
    let Lazily { sent, received, runs, .. } =
        lazily_within(silence, |_, target| target.panics(Method::Start));
    assert!(received.unwrap_err().contains("a clumsy VM"));
    let (state, why) = sent.unwrap();
    assert_eq!((state, runs.0), (MigrationState::Unknown, false), "{why}");
}

#[test]
fn before_the_handover_of_a_postcopy_a_panic_leaves_the_guest_where_it_is() {
    for method in [Method::Pause, Method::Save] {
        let Lazily { sent, received, runs, .. } = lazily(move |source, _| source.panics(method));
        assert!(sent.unwrap_err().contains("a clumsy VM"));
        assert!(matches!(received, Ok(Err(_))), "{method:?}: {received:?}");
        assert!(!runs.1);
    }
}

#[test]
fn memory_that_cannot_follow_for_a_panic_is_missing_and_never_made_up() {
    for (there, method) in [(false, Method::Window), (true, Method::Place)] {
        let Lazily { sent, received, runs, .. } = lazily(move |source, target| {
            (if there { target } else { source }).panics(method);
        });
        let what = format!("{method:?}: {sent:?}, {received:?}");
        assert_eq!(runs, (false, true), "{what}");
        assert_eq!(sent.unwrap().0, MigrationState::Lost, "{what}");
        let rest = received.unwrap().unwrap();
        assert!(rest.left > 0 && rest.state == MigrationState::PostcopyPaused, "{what}");
        assert!(rest.why.is_some(), "{what}");
    }
}

/// Nobody asks for what the guest waits for any more; all of it comes in its turn.
#[test]
fn faults_that_nobody_hears_of_for_a_panic_make_a_guest_slow_and_no_more() {
    let Lazily { sent, received, runs, whole } = lazily(|_, target| target.panics(Method::NextFault));
    let what = format!("{sent:?}, {received:?}");
    assert_eq!(sent.unwrap().0, MigrationState::Completed, "{what}");
    assert_eq!(received.unwrap().unwrap().left, 0, "{what}");
    assert!(runs == (false, true) && whole, "{what}");
}
