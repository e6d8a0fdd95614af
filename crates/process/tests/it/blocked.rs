//! Pages that are needed and do not come: by the loading of the state while its source is dead, and by a guest whose
//! keeper was dropped.

use crate::rig::{can_fault, given_up, options, running, settings, stands_still, whole};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PageRun};
use vmferry_engine::{
    Arrival, GuestMemory, LazyMemory, Listener, MachineConfig, Migratable, MigrateError, MigrationMode,
    MigrationState, Monitor, ReceiveFailure, Report, RunState, Section, Settings, TargetVm, Uri, VmError,
    migrate, receive,
};
use vmferry_process::ProcessGuest;
use vmferry_testkit::{PATIENCE, alone, say, wait};
use vmferry_testkit_peers::link::{Harm, Proxy, Rule};
use vmferry_testkit_peers::pair;
use vmferry_wire::Role;

/// A guest whose device state cannot be loaded without reading its memory, as a device that looks at its rings does.
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
    fn lazy_memory(&mut self) -> Result<Arc<dyn LazyMemory>, VmError> {
        self.guest.lazy_memory()
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.begun.store(true, Ordering::Release);
        let memory = self.guest.memory();
        let region = memory.layout().regions()[0];
        let mut page = [0; PAGE_BYTES];
        // The guest's last page: what is sent in order comes to it late.
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
    /// From the harm to both sides' end.
    took: Duration,
}

/// Moves a guest over a link that withholds what is asked for; `harm` is done when the loading waits for it.
fn blocked(settings: &Settings, harm: impl FnOnce(&Proxy)) -> Blocked {
    let mut source = running();
    let (begun, loaded) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let guest = ProcessGuest::new_incoming(options()).unwrap();
    let mut target = Touching { guest, begun: Arc::clone(&begun), loaded: Arc::clone(&loaded) };
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse::<Uri>().unwrap(), false).unwrap();
    let stall = |index| Rule::in_channel(Role::Urgent, index, true, 0, Harm::Stall);
    let proxy = Proxy::new(&listener.uri().unwrap(), (0..settings.urgent_channels).map(stall));
    let (arrival, monitor) = (Arrival::new(settings.peer_timeout), Monitor::new());
    let (sent, received, took) = std::thread::scope(|scope| {
        let receiving =
            scope.spawn(|| receive(&mut target, &listener, &arrival).map(|mut came| came.rest.take()));
        let sending = scope.spawn(|| migrate(&mut source, &proxy.uri(), None, settings, &monitor));
        let meanwhile = || {
            wait("the state to be loaded", || begun.load(Ordering::Acquire));
            wait("the page to be withheld", || proxy.harmed() > 0);
            // Time for a load that does not wait. One that gets no processor meanwhile is missed, and no more.
            std::thread::sleep(Duration::from_millis(100));
            assert!(!loaded.load(Ordering::Acquire), "the loading reads a page that has not come");
            let began = Instant::now();
            harm(&proxy);
            wait("the target's end", || receiving.is_finished());
            wait("the source's end", || sending.is_finished());
            began.elapsed()
        };
        let took = catch_unwind(AssertUnwindSafe(meanwhile)).unwrap_or_else(|panic| {
            given_up(&arrival, &monitor, &|| sending.is_finished());
            resume_unwind(panic);
        });
        (sending.join().unwrap(), receiving.join().unwrap().map(drop), took)
    });
    drop(proxy);
    Blocked { source, sent, received, took }
}

/// The target says why it has no guest, and the guest goes on where it was.
fn ended_well(what: &str, ended: &Blocked) {
    let why = ended.received.as_ref().unwrap_err().to_string();
    let sent = ended.sent.as_ref().map(|report| (report.state, report.error.clone()));
    say(format!("{what}: after {:?}: '{why}'; the source: {sent:?}", ended.took));
    assert!(why.contains("it has not run here") && why.contains("source"), "{what}: {why}");
    assert!(ended.took < PATIENCE, "{what}: {:?}", ended.took);
    let report = ended.sent.as_ref().unwrap();
    assert_eq!(report.state, MigrationState::Failed, "{what}: {:?}", report.error);
    whole(&ended.source, what);
}

#[test]
fn a_state_whose_pages_cannot_come_is_given_up() {
    if !can_fault() {
        return;
    }
    // What is found out by silence takes longer than this test.
    let patient = Settings { peer_timeout: PATIENCE * 2, ..settings(MigrationMode::Postcopy) };
    let dead = blocked(&patient, |proxy| {
        proxy.close(true);
        proxy.cut(|_| true);
    });
    ended_well("a source that died", &dead);
    // One channel is enough: what it carried cannot come over another before the guest runs.
    let part = blocked(&patient, |proxy| proxy.cut(|role| role == Role::Urgent));
    ended_well("an urgent channel that died", &part);
    // A source that is there, answers, and does not bring the page is given a while.
    let settings = Settings { peer_timeout: Duration::from_secs(4), ..patient };
    let silent = blocked(&settings, |_| {});
    ended_well("a page that is withheld", &silent);
}

#[test]
fn a_state_whose_pages_come_is_loaded() {
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
    let (sent, came) = pair::moved(&tcp, &mut source, &mut target, None, &settings, &Monitor::new());
    let rest = came.unwrap().expect("pages are lacking");
    assert_eq!(sent.state, MigrationState::Completed);
    assert_eq!((rest.state, rest.left), (MigrationState::Completed, 0));
    whole(&target.guest, "loaded with its pages");
}

/// Threads of this process by their names' beginning.
fn threads(prefix: &str) -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // One that ends meanwhile has none.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with(prefix)).count()
}

/// Lets a source end that waits for somebody to say how it goes on, also if a test fails meanwhile.
struct Abandoned<'a>(&'a Monitor);

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// Receives a guest and does `with` to what keeps house for it.
fn kept(
    settings: &Settings,
    with: impl FnOnce(vmferry_engine::Rest, &Monitor),
) -> (Report, [ProcessGuest; 2]) {
    let (mut source, mut target) = (running(), ProcessGuest::new_incoming(options()).unwrap());
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse::<Uri>().unwrap(), false).unwrap();
    let (arrival, monitor) = (Arrival::new(settings.peer_timeout), Monitor::new());
    let uri = listener.uri().unwrap();
    let report = std::thread::scope(|scope| {
        let sending = scope.spawn(|| migrate(&mut source, &uri, None, settings, &monitor).unwrap());
        let abandoned = Abandoned(&monitor);
        with(receive(&mut target, &listener, &arrival).unwrap().rest.expect("pages are lacking"), &monitor);
        // Nobody takes the link up: there is no house any more.
        drop(listener);
        wait("the loss", || monitor.progress().awaits_recover || sending.is_finished());
        drop(abandoned);
        sending.join().unwrap()
    });
    (report, [source, target])
}

#[test]
fn a_rest_that_is_dropped_makes_nothing_up_and_leaves_no_thread() {
    if !can_fault() || !alone("blocked::a_rest_that_is_dropped_makes_nothing_up_and_leaves_no_thread") {
        return;
    }
    let settings = Settings {
        max_bandwidth: Some(1 << 20),
        reconnect_for: Duration::ZERO,
        // It is told of the loss. Finding it out takes longer than this test.
        peer_timeout: PATIENCE * 2,
        ..settings(MigrationMode::Postcopy)
    };
    let mut seen = None;
    let (report, [source, target]) = kept(&settings, |rest, monitor| {
        let watch = rest.watch();
        drop(rest);
        // One that has been joined is listed for a moment longer.
        wait("its threads to end", || threads("target-") == 0);
        let left = watch.now().left;
        wait("the source to see it", || monitor.progress().state == MigrationState::PostcopyPaused);
        // What would come later on a busy host is missed, and no more.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(watch.now().left, left, "nothing comes");
        seen = Some(left);
    });
    assert!(seen.is_some_and(|left| left > 0), "{seen:?}");
    assert_eq!(report.state, MigrationState::Lost, "{:?}", report.error);
    stands_still(&source, "dropped");
    // Its threads sleep on pages that do not come; it can be ended all the same.
    drop(target);
}

/// All pages are there, also those that nobody sent because they are zero.
#[test]
fn a_rest_that_is_dropped_when_nothing_is_lacking_leaves_a_whole_guest() {
    if !can_fault() || !alone("blocked::a_rest_that_is_dropped_when_nothing_is_lacking_leaves_a_whole_guest")
    {
        return;
    }
    let settings = Settings { reconnect_for: Duration::ZERO, ..settings(MigrationMode::Postcopy) };
    let (report, [source, target]) = kept(&settings, |rest, _| {
        let watch = rest.watch();
        wait("all pages", || watch.now().left == 0);
        drop(rest);
    });
    assert_eq!(report.state, MigrationState::Lost, "nobody said that all is there: {:?}", report.error);
    wait("its threads to end", || threads("target-") == 0);
    stands_still(&source, "dropped at the end");
    whole(&target, "dropped at the end");
}
