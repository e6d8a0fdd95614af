//! Tests of KVM guests on huge pages of the host's pool (hugetlbfs), migrated by the real engine.

use crate::confined::kvm;
use crate::pool::Pool;
use crate::rig::{corrupt, empty, patient, stats, working};
use std::sync::Mutex;
use vmferry_engine::{
    Arrival, FillState, Listener, MigrateError, MigrationHandle, MigrationMode, MigrationState,
    PostcopyFigures, Report, Settings, TrackerKind, UrgentPath, Uri, migrate, receive, restore,
    restore_on_demand, save,
};
use vmferry_testkit::{Need, PATIENCE, print_line, skip, temp_path, wait};
use vmferry_testkit_peers::link::{Harm, Proxy, Rule};
use vmferry_testkit_peers::unix_uri;
use vmferry_vmm::{Backing, HUGE_PAGE_BYTES, Vm, VmOptions, largest_dirty_ring};
use vmferry_wire::Role;

const MEMORY: u64 = 64 << 20;
const CPUS: u32 = 2;
/// Workload that writes all over a part of memory, so that faults come from everywhere.
const WORKLOAD: &str = "uniform,ws=24M,rate=50k,fill=mix:30";

/// Reserves huge pages for this number of guests. Returns `None`, and the calling test is skipped,
/// where this host has no KVM or too few huge pages.
fn pool(guests: u64) -> Option<Pool> {
    if !kvm() {
        return None;
    }
    Pool::with(guests * MEMORY / HUGE_PAGE_BYTES).map_err(|why| skip(Need::HugePages, why)).ok()
}

fn options(backing: Backing) -> VmOptions {
    let mut options = VmOptions::new(MEMORY, CPUS);
    options.backing = backing;
    options
}

fn running(options: VmOptions) -> Vm {
    working(options, WORKLOAD, 4000)
}

fn moved(
    source: &mut Vm,
    target: VmOptions,
    kind: Option<TrackerKind>,
    settings: &Settings,
) -> (Report, Vm, Option<PostcopyFigures>) {
    let uri = unix_uri();
    let listener = Listener::bind(&uri, false).unwrap();
    moved_over((&uri, &listener), source, target, kind, settings)
}

fn moved_over(
    (uri, listener): (&Uri, &Listener),
    source: &mut Vm,
    target: VmOptions,
    kind: Option<TrackerKind>,
    settings: &Settings,
) -> (Report, Vm, Option<PostcopyFigures>) {
    let mut target = empty(target);
    let (arrival, figures) = (Arrival::new(PATIENCE), Mutex::new(None));
    let report = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let received = receive(&mut target, listener, &arrival).unwrap();
            if let Some(postcopy) = received.postcopy {
                let state = postcopy.finish(listener, &arrival);
                assert_eq!((state.state, state.left), (MigrationState::Completed, 0), "{state:?}");
                *figures.lock().unwrap() = Some(state.postcopy);
            }
        });
        let report = migrate(source, uri, kind, settings, &MigrationHandle::new()).unwrap();
        if report.state != MigrationState::Completed {
            arrival.abandon();
        }
        receiving.join().unwrap();
        report
    });
    assert_eq!(report.state, MigrationState::Completed, "{report:?}");
    (report, target, figures.into_inner().unwrap())
}

const BOTH_WAYS: [(Backing, Backing); 3] = [
    (Backing::Anonymous, Backing::HugePages),
    (Backing::HugePages, Backing::HugePages),
    (Backing::HugePages, Backing::Memfd),
];

#[test]
fn guest_migrates_to_and_from_huge_pages_with_every_tracker() {
    let Some(_pool) = pool(2) else { return };
    let rings = largest_dirty_ring().unwrap().is_some();
    if !rings {
        skip(Need::Kvm, "KVM on this host has no dirty rings");
    }
    let trackers = [TrackerKind::Log, TrackerKind::Wp, TrackerKind::Ring];
    for kind in trackers.into_iter().filter(|kind| rings || *kind != TrackerKind::Ring) {
        let of = |backing| {
            let mut options = options(backing);
            options.dirty_ring = (kind == TrackerKind::Ring).then_some(4096);
            options
        };
        let mut vm = running(of(Backing::Anonymous));
        for (_, to) in BOTH_WAYS {
            let settings = Settings { verify: true, max_bandwidth: Some(100 << 20), ..patient() };
            let (report, target, _) = moved(&mut vm, of(to), Some(kind), &settings);
            // Pages that the guest reported as free are not compared.
            assert_eq!(
                (report.verified_pages + report.skipped_pages, report.mismatched_pages),
                (MEMORY >> 12, 0)
            );
            assert_eq!(corrupt(&target), 0, "{kind} to {to}");
            vm = target;
        }
    }
}

#[test]
fn loaded_guest_runs_before_its_huge_pages_have_arrived() {
    let Some(_pool) = pool(2) else { return };
    let paths = [UrgentPath::Dedicated, UrgentPath::Interleaved, UrgentPath::Shared];
    for (mode, bandwidth) in [(MigrationMode::Postcopy, 60 << 20), (MigrationMode::Hybrid, 30 << 20)] {
        for (urgent, (from, to)) in paths.into_iter().zip(BOTH_WAYS) {
            let settings =
                Settings { mode, urgent, urgent_channels: 2, max_bandwidth: Some(bandwidth), ..patient() };
            let what = format!("{mode:?}, {urgent:?}, {from} to {to}");
            // A guest that does not run on a starved host before its pages have arrived requests
            // none. The migration is repeated until the guest has requested one. All other checks
            // apply to each migration.
            let asked = (0..8).any(|_| {
                let mut source = running(options(from));
                let before = stats(&source.handle()).map_or(0, |stats| stats.writes());
                let (_, target, figures) = moved(&mut source, options(to), None, &settings);
                let figures = figures.expect("the guest arrived before its memory");
                print_line(format!("{what}: {figures:?}"));
                assert_eq!(figures.duplicates, 0, "{what}");
                assert_eq!(corrupt(&target), 0, "{what}");
                let writes = || stats(&target.handle()).map_or(0, |stats| stats.writes());
                wait("writes of the guest", || writes() > before);
                figures.faults > 0
            });
            assert!(asked, "{what}: no page was requested");
        }
    }
}

/// The link is lost when parts of some huge pages have arrived. The rest arrives over the next
/// link, and nothing arrives twice.
#[test]
fn link_lost_in_the_middle_of_huge_pages_is_recovered() {
    let Some(_pool) = pool(2) else { return };
    let mut cut = 0;
    for (role, after) in [(Role::Urgent, 900_000), (Role::Urgent, 3_000_000), (Role::Bulk, 700_000)] {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), false).unwrap();
        let rule = Rule::in_channel(role, 0, true, after, Harm::CutAll);
        let proxy = Proxy::new(&listener.uri().unwrap(), [rule]);
        let settings = Settings {
            mode: MigrationMode::Postcopy,
            max_bandwidth: Some(16 << 20),
            reconnect_for: PATIENCE,
            ..patient()
        };
        let mut source = running(options(Backing::HugePages));
        let link = (&proxy.uri(), &listener);
        let (_, target, figures) =
            moved_over(link, &mut source, options(Backing::HugePages), None, &settings);
        assert_eq!(figures.expect("the guest arrived before its memory").duplicates, 0);
        assert_eq!(corrupt(&target), 0, "{role:?} after {after} bytes");
        print_line(format!("{role:?} cut after {after} bytes: {} times", proxy.harmed()));
        cut += proxy.harmed();
    }
    // The number of bytes in each direction depends on where the guest writes.
    assert!(cut > 0);
}

#[test]
fn restored_guest_runs_on_huge_pages() {
    let Some(_pool) = pool(2) else { return };
    for (from, to) in BOTH_WAYS {
        let mut source = running(options(from));
        let path = temp_path("huge-file");
        let report = save(&mut source, &path, &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{report:?}");
        drop(source);
        let (mut target, mut paging) = (empty(options(Backing::Anonymous)), empty(options(to)));
        let restored = restore(&mut target, &path);
        let comes = restore_on_demand(&mut paging, &path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(restored.unwrap().pages, report.bytes.raw_pages);
        assert_eq!(corrupt(&target), 0, "{from} to {to}");
        match comes {
            Ok(comes) => {
                let progress = comes.wait(PATIENCE);
                assert_eq!(progress.state, FillState::Completed, "{progress:?}");
                assert_eq!((progress.placed, progress.failed_pages), (report.bytes.raw_pages, 0));
                assert_eq!(corrupt(&paging), 0, "{from} to {to}");
                print_line(format!("by demand paging, {from} to {to}: {progress:?}"));
            }
            Err(MigrateError::NoDemandPaging { why }) => skip(Need::Uffd, format!("{from} to {to}: {why}")),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn too_few_huge_pages_are_reported_at_the_start() {
    let Some(_pool) = pool(1) else { return };
    let mut too_large = options(Backing::HugePages);
    // More memory than any host of the tests has.
    too_large.memory = 1 << 44;
    let error = Vm::new(too_large).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("8388608 huge pages") || text.contains("vm.nr_hugepages="), "{text}");
    let mut uneven = options(Backing::HugePages);
    uneven.memory = (16 << 20) + 4096;
    let text = Vm::new(uneven).unwrap_err().to_string();
    assert!(text.contains("a multiple of 2 MiB is needed"), "{text}");
}
