//! Missing pages that never arrive: while the device state loads and the source is dead, and for a
//! guest whose demand-paging memory was dropped.

use crate::rig::{can_fault, given_up, is_stopped, options, running, settings, whole};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PageRun};
use vmferry_engine::{
    Arrival, DemandPaging, GuestMemory, Listener, MachineConfig, Migratable, MigrateError, MigrationHandle,
    MigrationMode, MigrationState, ReceiveFailure, Report, RunState, Section, Settings, TargetVm, Uri,
    VmError, migrate, receive,
};
use vmferry_process::ProcessGuest;
use vmferry_testkit::{PATIENCE, alone, print_line, wait};
use vmferry_testkit_peers::link::{Harm, Proxy, Rule};
use vmferry_testkit_peers::pair;
use vmferry_wire::Role;

/// Guest whose device state can only be loaded by reading guest memory, like a device that reads
/// its rings.
struct Touching {
    guest: ProcessGuest,
    begun: Arc<AtomicBool>,
    loaded: Arc<AtomicBool>,
}

impl Migratable for Touching {
    fn config(&self) -> MachineConfig {
        self.guest.config()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.guest.memory()
    }
}

impl TargetVm for Touching {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        self.guest.demand_paging()
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.begun.store(true, Ordering::Release);
        let memory = self.guest.memory();
        let region = memory.layout().regions()[0];
        let mut page = [0; PAGE_BYTES];
        // The guest's last page: a source that sends in order sends it late.
        let last = region.pages() - 1;
        memory.window(region.id, PageRun::from(last..last + 1))?.copy_page(0, &mut page);
        self.loaded.store(true, Ordering::Release);
        self.guest.load(sections)
    }

    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        TargetVm::start(&mut self.guest, state)
    }
}

struct Blocked {
    source: ProcessGuest,
    sent: Result<Report, MigrateError>,
    received: Result<(), ReceiveFailure>,
    /// Time from the harm until both sides have ended.
    took: Duration,
}

/// Migrates a guest over a link that withholds requested pages. Calls `harm` while the load waits
/// for such a page.
fn blocked(settings: &Settings, harm: impl FnOnce(&Proxy)) -> Blocked {
    let mut source = running();
    let (begun, loaded) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let guest = ProcessGuest::new_incoming(options()).unwrap();
    let mut target = Touching { guest, begun: Arc::clone(&begun), loaded: Arc::clone(&loaded) };
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse::<Uri>().unwrap(), false).unwrap();
    let stall = |index| Rule::in_channel(Role::Urgent, index, true, 0, Harm::Stall);
    let proxy = Proxy::new(&listener.uri().unwrap(), (0..settings.urgent_channels).map(stall));
    let (arrival, handle) = (Arrival::new(settings.peer_timeout), MigrationHandle::new());
    let (sent, received, took) = std::thread::scope(|scope| {
        let receiving =
            scope.spawn(|| receive(&mut target, &listener, &arrival).map(|mut came| came.postcopy.take()));
        let sending = scope.spawn(|| migrate(&mut source, &proxy.uri(), None, settings, &handle));
        let meanwhile = || {
            wait("the state to be loaded", || begun.load(Ordering::Acquire));
            wait("the page to be withheld", || proxy.harmed() > 0);
            // Gives a load that does not wait the time to finish. A thread that gets no processor
            // in this time only makes the test miss a defect.
            std::thread::sleep(Duration::from_millis(100));
            assert!(!loaded.load(Ordering::Acquire), "the load finished without a missing page");
            let began = Instant::now();
            harm(&proxy);
            wait("the target's end", || receiving.is_finished());
            wait("the source's end", || sending.is_finished());
            began.elapsed()
        };
        let took = catch_unwind(AssertUnwindSafe(meanwhile)).unwrap_or_else(|panic| {
            given_up(&arrival, &handle, &|| sending.is_finished());
            resume_unwind(panic);
        });
        (sending.join().unwrap(), receiving.join().unwrap().map(drop), took)
    });
    drop(proxy);
    Blocked { source, sent, received, took }
}

/// Checks that the target says why it has no guest, and that the guest continues on the source.
fn ended_well(what: &str, ended: &Blocked) {
    let why = ended.received.as_ref().unwrap_err().to_string();
    let sent = ended.sent.as_ref().map(|report| (report.state, report.error.clone()));
    print_line(format!("{what}: after {:?}: '{why}'; the source: {sent:?}", ended.took));
    assert!(why.contains("it has not run on the target") && why.contains("source"), "{what}: {why}");
    assert!(ended.took < PATIENCE, "{what}: {:?}", ended.took);
    let report = ended.sent.as_ref().unwrap();
    assert_eq!(report.state, MigrationState::Failed, "{what}: {:?}", report.error);
    whole(&ended.source, what);
}

#[test]
fn loading_device_state_fails_when_its_pages_cannot_arrive() {
    if !can_fault() {
        return;
    }
    // Detection by silence takes longer than this test.
    let patient = Settings { peer_timeout: PATIENCE * 2, ..settings(MigrationMode::Postcopy) };
    let dead = blocked(&patient, |proxy| {
        proxy.close(true);
        proxy.cut(|_| true);
    });
    ended_well("a source that died", &dead);
    // One dead channel is enough: its pages cannot arrive over another channel before the guest
    // runs.
    let part = blocked(&patient, |proxy| proxy.cut(|role| role == Role::Urgent));
    ended_well("an urgent channel that died", &part);
    // A source that answers but does not send the page is given some time.
    let settings = Settings { peer_timeout: Duration::from_secs(4), ..patient };
    let silent = blocked(&settings, |_| {});
    ended_well("a page that is withheld", &silent);
}

#[test]
fn device_state_is_loaded_when_its_pages_arrive() {
    if !can_fault() {
        return;
    }
    let mut source = running();
    let mut target = Touching {
        guest: ProcessGuest::new_incoming(options()).unwrap(),
        begun: Arc::default(),
        loaded: Arc::default(),
    };
    let tcp = "tcp:127.0.0.1:0".parse::<Uri>().unwrap();
    let settings = settings(MigrationMode::Postcopy);
    let (sent, came) = pair::moved(&tcp, &mut source, &mut target, None, &settings, &MigrationHandle::new());
    let postcopy = came.unwrap().expect("pages are missing");
    assert_eq!(sent.state, MigrationState::Completed);
    assert_eq!((postcopy.state, postcopy.left), (MigrationState::Completed, 0));
    whole(&target.guest, "loaded with its pages");
}

/// Returns the number of threads of this process whose name starts with `prefix`.
fn threads(prefix: &str) -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // A thread that ends meanwhile has no name.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with(prefix)).count()
}

/// Ends a source that waits for the operator's decision, also if a test fails meanwhile.
struct Abandoned<'a>(&'a MigrationHandle);

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// Receives a guest and calls `with` on the state that serves its missing pages.
fn kept(
    settings: &Settings,
    with: impl FnOnce(vmferry_engine::PostcopyReceiver, &MigrationHandle),
) -> (Report, [ProcessGuest; 2]) {
    let (mut source, mut target) = (running(), ProcessGuest::new_incoming(options()).unwrap());
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse::<Uri>().unwrap(), false).unwrap();
    let (arrival, handle) = (Arrival::new(settings.peer_timeout), MigrationHandle::new());
    let uri = listener.uri().unwrap();
    let report = std::thread::scope(|scope| {
        let sending = scope.spawn(|| migrate(&mut source, &uri, None, settings, &handle).unwrap());
        let abandoned = Abandoned(&handle);
        with(
            receive(&mut target, &listener, &arrival).unwrap().postcopy.expect("pages are missing"),
            &handle,
        );
        // No connection is accepted any more, so the source cannot recover the link.
        drop(listener);
        wait("the loss", || handle.progress().awaits_recover || sending.is_finished());
        drop(abandoned);
        sending.join().unwrap()
    });
    (report, [source, target])
}

#[test]
fn dropped_rest_fills_no_missing_page_and_leaves_no_thread() {
    if !can_fault() || !alone("blocked::dropped_rest_fills_no_missing_page_and_leaves_no_thread") {
        return;
    }
    let settings = Settings {
        max_bandwidth: Some(1 << 20),
        reconnect_for: Duration::ZERO,
        // The source is told of the loss. Detection by silence would take longer than this test.
        peer_timeout: PATIENCE * 2,
        ..settings(MigrationMode::Postcopy)
    };
    let mut seen = None;
    let (report, [source, target]) = kept(&settings, |postcopy, handle| {
        let watch = postcopy.watch();
        drop(postcopy);
        // A joined thread stays listed for a moment.
        wait("the threads of the target to end", || threads("target-") == 0);
        let left = watch.now().left;
        wait("the source to detect the loss", || handle.progress().state == MigrationState::PostcopyPaused);
        // Pages that would arrive later than this on a busy host only make the test miss a defect.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(watch.now().left, left, "a page arrived");
        seen = Some(left);
    });
    assert!(seen.is_some_and(|left| left > 0), "{seen:?}");
    assert_eq!(report.state, MigrationState::Lost, "{:?}", report.error);
    is_stopped(&source, "dropped");
    // The guest's threads sleep on pages that never arrive. The guest can be ended all the same.
    drop(target);
}

/// All pages are present, also zero pages that were never sent.
#[test]
fn receiver_dropped_after_the_last_page_leaves_a_complete_guest() {
    if !can_fault() || !alone("blocked::receiver_dropped_after_the_last_page_leaves_a_complete_guest") {
        return;
    }
    let settings = Settings { reconnect_for: Duration::ZERO, ..settings(MigrationMode::Postcopy) };
    let (report, [source, target]) = kept(&settings, |postcopy, _| {
        let watch = postcopy.watch();
        wait("all pages", || watch.now().left == 0);
        drop(postcopy);
    });
    assert_eq!(
        report.state,
        MigrationState::Lost,
        "the source was not told that all pages arrived: {:?}",
        report.error
    );
    wait("the threads of the target to end", || threads("target-") == 0);
    is_stopped(&source, "dropped at the end");
    whole(&target, "dropped at the end");
}
