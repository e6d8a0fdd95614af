//! VMs whose own code panics: the call that drove them passes that on, or fails where a thread of the engine's drove them; and nobody waits
//! for ever.

use crate::rig::{attempt, check_owner, unix_uri};
use crate::toy::{Method, Options, Toy, Tracking};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::time::Duration;
use vmferry_engine::{Listener, MigrationState, Monitor, Settings};

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
        let listener = Listener::bind(&unix_uri(), false).unwrap();
        let uri = listener.uri().unwrap();
        let settings = Settings { peer_timeout: Duration::from_secs(1), ..Settings::default() };
        let moved = catch_unwind(AssertUnwindSafe(|| {
            attempt(&mut source, &mut target, &listener, &uri, &settings, &Monitor::new())
        }));
        let end = moved.map_or(End::PassedOn, |ended| {
            check_owner(&source, &target, &ended);
            assert_eq!(ended.state(), Some(MigrationState::Failed));
            End::Failed(ended.error())
        });
        assert!(!target.ran());
        sender.send((end, source.works())).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(60)).expect("it never ends, or what must hold does not")
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
