//! Migration of a loaded guest for tests, and the conditions that must hold afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vmferry_engine::{
    Arrival, Listener, MigrateError, MigrationHandle, MigrationMode, MigrationState, PostcopyState,
    PostcopyWatch, ReceiveFailure, Report, Settings, TargetVm, Uri, migrate, receive,
};
use vmferry_guest_abi::{State, StatsSnapshot};
use vmferry_process::{ProcessGuest, ProcessHandle, ProcessOptions};
use vmferry_testkit::{Need, print_line, skip, wait, wait_for};
use vmferry_testkit_peers::link::{Proxy, Rule};

const MEMORY: u64 = 24 << 20;
/// Workload with 8 MiB of random content.
const LOAD: &str = "uniform,ws=6M,data=8M,rate=20k,fill=random";

pub(crate) fn options() -> ProcessOptions {
    ProcessOptions::new(MEMORY, 2)
}

/// Returns true if this host supports demand paging. If not, the calling test is skipped.
pub(crate) fn can_fault() -> bool {
    let possible = ProcessGuest::new_incoming(options()).unwrap().demand_paging();
    possible.map_err(|error| skip(Need::Uffd, error)).is_ok()
}

pub(crate) fn running() -> ProcessGuest {
    let mut guest = ProcessGuest::new(options(), LOAD.parse().unwrap()).unwrap();
    guest.start().unwrap();
    let handle = guest.handle();
    wait("the guest to fill its memory", || handle.stats().is_ok_and(|s| s.state >= State::Running));
    guest
}

fn stats(handle: &ProcessHandle) -> StatsSnapshot {
    wait_for("a report of the guest", || handle.stats())
}

pub(crate) fn writes(guest: &ProcessGuest) -> u64 {
    stats(&guest.handle()).writes()
}

/// Has the guest check all its pages. Returns the statistics after the check.
pub(crate) fn verified(handle: &ProcessHandle, request: u64) -> StatsSnapshot {
    wait("the guest's page of requests", || handle.request_verify(request));
    wait("the guest's check of all its pages", || stats(handle).verified(request));
    stats(handle)
}

/// Checks that the guest runs and that all its pages are as it left them.
pub(crate) fn whole(guest: &ProcessGuest, what: &str) {
    let handle = guest.handle();
    let before = stats(&handle).writes();
    wait("writes of the guest", || stats(&handle).writes() > before);
    let after = verified(&handle, 77);
    assert_eq!(after.corrupt(), 0, "{what}: {:?}", after.first_corrupt());
}

/// Checks that the guest does not run.
pub(crate) fn is_stopped(guest: &ProcessGuest, what: &str) {
    let before = writes(guest);
    // Gives a running thread the time to write. A thread that gets no processor in this time only
    // makes the test miss a defect.
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(writes(guest), before, "{what}: the guest runs");
}

/// Keeps a guest with missing pages until this process ends. Its threads sleep on: a missing page
/// must not read as zeros.
pub(crate) fn asleep(guest: ProcessGuest) {
    // Kept reachable, because unreachable memory would count as leaked.
    static ASLEEP: Mutex<Vec<ProcessGuest>> = Mutex::new(Vec::new());
    ASLEEP.lock().unwrap().push(guest);
}

/// Settings of a link that is slow enough for the harm to come in the middle, and with timeouts
/// that do not take a live peer for dead.
pub(crate) fn settings(mode: MigrationMode) -> Settings {
    Settings {
        mode,
        max_bandwidth: Some(24 << 20),
        peer_timeout: Duration::from_secs(120),
        reconnect_for: Duration::from_secs(120),
        ..Settings::default()
    }
}

/// Observations of a migration under way.
pub(crate) struct View<'a> {
    pub(crate) handle: &'a MigrationHandle,
    pub(crate) proxy: &'a Proxy,
    pub(crate) arrival: &'a Arrival,
    postcopy: &'a Mutex<Option<PostcopyWatch>>,
    finished: &'a dyn Fn() -> bool,
}

impl View<'_> {
    /// Returns the target's state, once the guest runs on the target.
    pub(crate) fn postcopy(&self) -> Option<PostcopyState> {
        self.postcopy.lock().unwrap().as_ref().map(PostcopyWatch::now)
    }

    pub(crate) fn finished(&self) -> bool {
        (self.finished)()
    }

    /// Waits until `done` returns true or the migration ends.
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        wait(what, || self.finished() || done());
    }
}

pub(crate) struct Moved {
    pub(crate) sent: Result<Report, MigrateError>,
    pub(crate) received: Result<PostcopyState, ReceiveFailure>,
    pub(crate) source: ProcessGuest,
    pub(crate) target: ProcessGuest,
    /// Number of times that harm was done.
    pub(crate) harmed: u32,
}

impl Moved {
    pub(crate) fn state(&self) -> MigrationState {
        self.sent.as_ref().map_or(MigrationState::Failed, |report| report.state)
    }

    pub(crate) fn error(&self) -> String {
        match &self.sent {
            Ok(report) => report.error.clone().unwrap_or_default(),
            Err(error) => error.to_string(),
        }
    }

    /// Checks that the guest arrived completely, each page once.
    pub(crate) fn completed(&self, what: &str) -> &Report {
        let report = self.sent.as_ref().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(report.state, MigrationState::Completed, "{what}: {:?}", report.error);
        let postcopy = self.received.as_ref().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(postcopy.state, MigrationState::Completed, "{what}: {postcopy:?}");
        assert_eq!(postcopy.left, 0, "{what}");
        assert_eq!(postcopy.postcopy.duplicates, 0, "{what}: {postcopy:?}");
        whole(&self.target, what);
        is_stopped(&self.source, what);
        report
    }

    /// Checks that the guest stayed on the source and that no part of it ran on the target.
    pub(crate) fn stayed(&self, what: &str) {
        assert_eq!(self.state(), MigrationState::Failed, "{what}: {}", self.error());
        assert!(self.received.is_err(), "{what}: the target reports that the guest arrived");
        whole(&self.source, what);
    }

    /// Checks that there is one complete guest, or none and the state says so.
    pub(crate) fn one_guest(&self, what: &str) {
        match self.state() {
            MigrationState::Completed => drop(self.completed(what)),
            MigrationState::Failed => self.stayed(what),
            MigrationState::Unknown | MigrationState::Lost => is_stopped(&self.source, what),
            other => panic!("{what}: {other:?} is no end"),
        }
    }
}

/// Receives the guest and the pages that follow it.
pub(crate) fn take(
    target: &mut ProcessGuest,
    listener: &Listener,
    arrival: &Arrival,
    watch: &Mutex<Option<PostcopyWatch>>,
) -> Result<PostcopyState, ReceiveFailure> {
    let postcopy = receive(target, listener, arrival)?.postcopy.expect("the guest arrived before its memory");
    *watch.lock().unwrap() = Some(postcopy.watch());
    Ok(postcopy.finish(listener, arrival))
}

/// Guard that stops a target when it is dropped.
struct Stopped<'a>(&'a Arrival);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// Abandons a migration that does not end, so that the test ends.
pub(crate) fn given_up(arrival: &Arrival, handle: &MigrationHandle, finished: &dyn Fn() -> bool) {
    wait("the end of what was given up", || {
        arrival.abandon();
        handle.cancel();
        handle.abandon();
        finished()
    });
}

/// Migrates a loaded guest over a link with these `rules`. Calls `meanwhile`, which may observe the
/// migration and act on it.
pub(crate) fn go(settings: &Settings, rules: Vec<Rule>, meanwhile: impl FnOnce(&View<'_>)) -> Moved {
    let (mut source, mut target) = (running(), ProcessGuest::new_incoming(options()).unwrap());
    let anywhere = "tcp:127.0.0.1:0".parse::<Uri>().unwrap();
    // Both sides are one host, so they share one certificate.
    let listener = match settings.tls.clone() {
        Some(tls) => Listener::bind_encrypted(&anywhere, tls).unwrap(),
        None => Listener::bind(&anywhere, false).unwrap(),
    };
    let proxy = Proxy::new(&listener.uri().unwrap(), rules);
    let (arrival, handle) = (Arrival::new(settings.peer_timeout), MigrationHandle::new());
    let (watch, uri) = (Mutex::default(), proxy.uri());
    let (sent, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| take(&mut target, &listener, &arrival, &watch));
        let sending = scope.spawn(|| migrate(&mut source, &uri, None, settings, &handle));
        let finished = || sending.is_finished();
        let view =
            View { handle: &handle, proxy: &proxy, arrival: &arrival, postcopy: &watch, finished: &finished };
        let to_the_end = || {
            meanwhile(&view);
            // On a busy host the pace of the bulk channels falls so low that megabytes take
            // minutes. Only progress is checked.
            while !finished() {
                let sent = handle.progress().wire_bytes;
                wait("the source's end, or bytes", || finished() || handle.progress().wire_bytes > sent);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(to_the_end)) {
            print_line(format!("at the failure: {settings:?} {:?} {:?}", handle.progress(), view.postcopy()));
            given_up(&arrival, &handle, &finished);
            resume_unwind(panic);
        }
        let sent = sending.join().unwrap();
        // A target that keeps waiting is told to stop in any case.
        let stopped = Stopped(&arrival);
        // A target whose source ended before the last acknowledgement keeps waiting, although it
        // has all pages.
        let postcopy = || watch.lock().unwrap().as_ref().map(PostcopyWatch::now);
        let complete = || postcopy().is_some_and(|postcopy| postcopy.state == MigrationState::Completed);
        let begin = Instant::now();
        let ended = || match sent.as_ref().map(|report| report.state) {
            Ok(MigrationState::Completed) => false,
            // A target without a source, or one that never received a guest, keeps waiting.
            Ok(MigrationState::Lost) | Err(_) => true,
            Ok(_) => begin.elapsed() > settings.peer_timeout * 2,
        };
        wait("the target's end", || receiving.is_finished() || complete() || ended());
        drop(stopped);
        (sent, receiving.join().unwrap())
    });
    let harmed = proxy.harmed();
    drop(proxy);
    Moved { sent, received, source, target, harmed }
}
