//! VMs whose own code panics. The call that used them passes the panic on, or fails if a thread of
//! the engine made the call. No thread waits for ever.

use crate::rig::{between, between_with_handle, check_owner, quick, unix_uri};
use crate::toy::{Method, Options, Toy, Tracking};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::time::Duration;
use vmferry_engine::{
    Arrival, Listener, MigrationHandle, MigrationMode, MigrationState, PostcopyState, ReceiveFailure,
    Settings, migrate, receive,
};
use vmferry_testkit::{PATIENCE, wait};

/// Result of a migration in which a method panics.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The caller gets the panic.
    PassedOn,
    /// The migration failed, with this reason.
    Failed(String),
}

/// Moves a guest between VMs that `prepare` has changed. Returns the result, and whether the guest
/// continues to run on the source.
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
fn panic_on_the_callers_thread_reaches_the_caller() {
    for method in [Method::TrackerStart, Method::Harvest, Method::Pause, Method::Save] {
        assert_eq!(end(move |source, _| source.panics(method)).0, End::PassedOn, "{method:?}");
    }
    // To the source, this is a target that has disconnected.
    for method in [Method::Load, Method::Start] {
        assert_eq!(
            end(move |_, target| target.panics(method)),
            (End::PassedOn, method == Method::Load),
            "{method:?}"
        );
    }
}

#[test]
fn panic_on_a_channel_thread_fails_the_migration_and_the_guest_stays() {
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

/// A panic after the decision must not suppress the report that the guest runs on the target.
#[test]
fn panic_after_the_end_does_not_suppress_the_report() {
    let mut source = Toy::new(Options { tracking: Tracking::ByHand, ..Options::default() }, true);
    let mut target = source.target();
    source.panics(Method::TrackerStop);
    let watched = MigrationHandle::watched(|_| panic!("a clumsy watcher"));
    let ended = between_with_handle(&mut source, &mut target, &quick(), &watched);
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Completed));
    assert_eq!(source.called(Method::TrackerStop), 1);
}

/// Results of a postcopy on source and target. `Err` has the text of a panic.
struct PostcopyEnd {
    sent: Result<(MigrationState, String), String>,
    received: Result<Result<PostcopyState, ReceiveFailure>, String>,
    /// True if the guest continues to run: on the source, and on the target as far as it has its
    /// memory.
    runs: (bool, bool),
    /// True if the guest works on the target, and finds all of its memory.
    whole: bool,
}

fn panic_of<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a panic with words")
    })
}

/// Moves a guest by postcopy between VMs that `prepare` has changed. A guest that cannot continue
/// without help is abandoned.
fn move_by_postcopy(prepare: impl Fn(&Toy, &Toy) + Send + 'static) -> PostcopyEnd {
    move_by_postcopy_within(quick().peer_timeout, prepare)
}

/// Does the same as [`move_by_postcopy`] with this peer timeout.
fn move_by_postcopy_within(
    peer_timeout: Duration,
    prepare: impl Fn(&Toy, &Toy) + Send + 'static,
) -> PostcopyEnd {
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        let options =
            Options { demand_paging: true, write_pause: Duration::from_millis(2), ..Options::default() };
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
        let (arrival, handle) = (Arrival::new(settings.peer_timeout), MigrationHandle::new());
        let (sent, received) = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                panic_of(|| {
                    let postcopy = receive(&mut target, &listener, &arrival)?
                        .postcopy
                        .expect("it came before its memory");
                    Ok(postcopy.finish(&listener, &arrival))
                })
            });
            let sending = scope.spawn(|| {
                panic_of(|| migrate(&mut source, &uri, None, &settings, &handle)).map(|sent| {
                    let report = sent.expect("a report");
                    (report.state, report.error.unwrap_or_default())
                })
            });
            wait("the source's end", || {
                if handle.progress().awaits_recover {
                    handle.abandon();
                }
                sending.is_finished()
            });
            arrival.abandon();
            (sending.join().unwrap(), receiving.join().unwrap())
        });
        let runs = (source.running(), target.running());
        let there = matches!(&received, Ok(Ok(postcopy)) if postcopy.left == 0);
        let whole = there && target.works() && target.lost().is_empty();
        sender.send(PostcopyEnd { sent, received, runs, whole }).unwrap();
    });
    ended.recv_timeout(PATIENCE).expect("it never ends")
}

#[test]
fn source_does_not_guess_if_the_start_panics_on_the_target() {
    // The source receives nothing more, and must notice this.
    let silence = Duration::from_secs(5);
    let PostcopyEnd { sent, received, runs, .. } =
        move_by_postcopy_within(silence, |_, target| target.panics(Method::Start));
    assert!(received.unwrap_err().contains("a clumsy VM"));
    let (state, why) = sent.unwrap();
    assert_eq!((state, runs.0), (MigrationState::Unknown, false), "{why}");
}

#[test]
fn panic_before_the_handover_leaves_the_guest_on_the_source() {
    for method in [Method::Pause, Method::Save] {
        let PostcopyEnd { sent, received, runs, .. } =
            move_by_postcopy(move |source, _| source.panics(method));
        assert!(sent.unwrap_err().contains("a clumsy VM"));
        assert!(matches!(received, Ok(Err(_))), "{method:?}: {received:?}");
        assert!(!runs.1);
    }
}

#[test]
fn pages_lost_by_a_panic_stay_missing() {
    for (there, method) in [(false, Method::Window), (true, Method::Place)] {
        let PostcopyEnd { sent, received, runs, .. } = move_by_postcopy(move |source, target| {
            (if there { target } else { source }).panics(method);
        });
        let what = format!("{method:?}: {sent:?}, {received:?}");
        assert_eq!(runs, (false, true), "{what}");
        assert_eq!(sent.unwrap().0, MigrationState::Lost, "{what}");
        let postcopy = received.unwrap().unwrap();
        assert!(postcopy.left > 0 && postcopy.state == MigrationState::PostcopyPaused, "{what}");
        assert!(postcopy.why.is_some(), "{what}");
    }
}

/// No page is requested any more. All pages arrive in their order.
#[test]
fn panic_in_the_fault_threads_only_slows_the_guest() {
    let PostcopyEnd { sent, received, runs, whole } =
        move_by_postcopy(|_, target| target.panics(Method::NextFault));
    let what = format!("{sent:?}, {received:?}");
    assert_eq!(sent.unwrap().0, MigrationState::Completed, "{what}");
    assert_eq!(received.unwrap().unwrap().left, 0, "{what}");
    assert!(runs == (false, true) && whole, "{what}");
}
