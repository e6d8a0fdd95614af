//! Tests of a KVM guest migrated by the real engine, also with a page that is withheld on purpose.

mod stalls;
mod throttled;

use crate::confined::kvm;
use crate::rig::{corrupt, empty, forward, patient, stats, working};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vmferry_baselines::Policy;
use vmferry_core::{PAGE_BYTES, PageSet, RegionId};
use vmferry_dirty::{HarvestSchedule, ReaperPolicy, Rings};
use vmferry_engine::{
    AutoConverge, DirtyTracker, FillState, GuestMemory, MachineConfig, Migratable, MigrateError,
    MigrationHandle, MigrationState, Protect, ReaperState, Report, RingFigures, Section, Settings, SourceVm,
    TrackerKind, VmError, restore, restore_on_demand, save,
};
use vmferry_testkit::{Need, PATIENCE, skip, temp_path, wait, wait_for};
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_vmm::{Vm, VmOptions, largest_dirty_ring};

const MEMORY: u64 = 64 << 20;
/// Workload that writes every page of the working set many times while the guest is migrated.
const WORKLOAD: &str = "sequential,ws=8M,rate=50k,fill=random";

/// Workload that leaves some pages unwritten during a pass, however long the pass takes.
const SLOW: &str = "uniform,ws=8M,rate=2k,fill=random";

fn running() -> Vm {
    running_with(VmOptions::new(MEMORY, 1))
}

fn running_with(options: VmOptions) -> Vm {
    running_work(options, WORKLOAD)
}

fn running_work(options: VmOptions, workload: &str) -> Vm {
    working(options, workload, 4000)
}

/// Source that hides the writes to one page of the working set.
struct Withholding {
    vm: Vm,
    /// Index of the page in region 0.
    page: Arc<AtomicU64>,
}

struct Hiding {
    tracker: Box<dyn DirtyTracker>,
    page: Arc<AtomicU64>,
    memory: Arc<dyn GuestMemory>,
}

impl Hiding {
    /// Returns the number that the guest stamped on this page and its count of writes, if the guest
    /// has written it at least twice.
    fn stamp(&self, page: u64) -> Option<(u64, u64)> {
        let window = self.memory.window(RegionId(0), (page..page + 1).into()).ok()?;
        let mut bytes = [0; PAGE_BYTES];
        window.copy_page(0, &mut bytes);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        (word(0) < 2048 && (2..1 << 20).contains(&word(8))).then(|| (word(0), word(8)))
    }

    /// Returns true if this is a page of the working set, whose pages are numbered consecutively. A
    /// block of the statistics page can look like one stamp by chance, but not like two neighbours.
    fn stamped(&self, page: u64) -> bool {
        let number = |page| self.stamp(page).map(|(number, _)| number);
        number(page).is_some_and(|own| number(page + 1) == Some(own + 1))
    }

    /// Chooses a page that the guest has written since it was sent, by the guest's own count. KVM's
    /// log is not enough, because KVM may call a page dirty that was only read. The page must not
    /// be dirty by now either: if it was written while it was sent, it would arrive damaged and be
    /// sent again whatever is withheld. Waits until there is such a page.
    fn choose(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        let mut since = PageSet::empty(self.memory.layout());
        let sent = dirty.region(RegionId(0)).unwrap();
        let clean = (0..sent.len() - 1).filter(|page| !sent.test(*page) && self.stamped(*page));
        let before: Vec<_> = clean.filter_map(|page| Some((page, self.stamp(page)?))).collect();
        if before.is_empty() {
            // The guest wrote all of its pages during this pass. The next pass is shorter.
            return Ok(());
        }
        let found = wait_for("a write to a page that was sent", || {
            self.tracker.harvest(&mut since).unwrap();
            let written = since.region(RegionId(0)).unwrap();
            let changed = |&&(page, stamp): &&(u64, (u64, u64))| {
                written.test(page) && self.stamp(page).is_some_and(|now| now > stamp)
            };
            before.iter().find(changed).map(|(page, _)| *page).ok_or("none was written")
        });
        self.page.store(found, Ordering::Relaxed);
        for (region, map) in since.iter() {
            dirty.region_mut(region).unwrap().union(map);
        }
        Ok(())
    }
}

impl DirtyTracker for Hiding {
    forward!(DirtyTracker);
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        self.tracker.harvest(dirty)?;
        if self.page.load(Ordering::Relaxed) == u64::MAX {
            self.choose(dirty)?;
        }
        let map = dirty.region_mut(RegionId(0)).unwrap();
        let page = self.page.load(Ordering::Relaxed);
        if page != u64::MAX {
            map.test_and_clear(page);
        }
        Ok(())
    }
}

impl Migratable for Withholding {
    forward!(Migratable);
}

impl SourceVm for Withholding {
    forward!(SourceVm);
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        let (tracker, memory) = (self.vm.tracker(kind)?, self.vm.memory());
        Ok(Box::new(Hiding { tracker, page: Arc::clone(&self.page), memory }))
    }
    fn pause(&mut self) -> Result<(), VmError> {
        SourceVm::pause(&mut self.vm)
    }
    fn resume(&mut self) -> Result<(), VmError> {
        SourceVm::resume(&mut self.vm)
    }
}

/// Tracker whose harvest waits until the guest has dirtied some pages.
///
/// A guest that does not run on a starved host dirties nothing. It would converge although it has
/// to outrun its link.
struct Outrunning {
    tracker: Box<dyn DirtyTracker>,
    /// Number of pages that a harvest waits for; 0 while the guest is paused.
    least: Arc<AtomicU64>,
}

impl DirtyTracker for Outrunning {
    forward!(DirtyTracker);
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        let least = self.least.load(Ordering::Relaxed);
        wait_for("writes of the guest", || {
            self.tracker.harvest(dirty).unwrap();
            if dirty.count() >= least { Ok(()) } else { Err(dirty.count()) }
        });
        Ok(())
    }
    fn ring(&self) -> Option<RingFigures> {
        self.tracker.ring()
    }
}

/// Source whose guest outruns its link until the throttle has held it for some time.
struct UntilHeld {
    vm: Vm,
    /// Number of pages that each harvest finds.
    outruns: u64,
    least: Arc<AtomicU64>,
}

impl UntilHeld {
    fn new(vm: Vm, outruns: u64) -> Self {
        Self { vm, outruns, least: Arc::new(AtomicU64::new(outruns)) }
    }
}

impl Migratable for UntilHeld {
    forward!(Migratable);
}

impl SourceVm for UntilHeld {
    forward!(SourceVm);
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        let (tracker, least) = (self.vm.tracker(kind)?, Arc::clone(&self.least));
        Ok(Box::new(Outrunning { tracker, least }))
    }
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        SourceVm::throttle(&mut self.vm, shares)?;
        if shares[0] > NOTICEABLE {
            wait("holds of the guest", || self.vm.throttled()[0] > HELD);
            self.outruns = 0;
            self.least.store(0, Ordering::Relaxed);
        }
        Ok(())
    }
    fn throttled(&self) -> Vec<Duration> {
        SourceVm::throttled(&self.vm)
    }
    fn pause(&mut self) -> Result<(), VmError> {
        self.least.store(0, Ordering::Relaxed);
        SourceVm::pause(&mut self.vm)
    }
    fn resume(&mut self) -> Result<(), VmError> {
        self.least.store(self.outruns, Ordering::Relaxed);
        SourceVm::resume(&mut self.vm)
    }
}

/// Migrates `source` into a new VM with the engine, over a Unix socket.
fn moved(source: &mut dyn SourceVm, kind: TrackerKind, verify: bool) -> (Report, Vm) {
    moved_with(source, kind, verify, VmOptions::new(MEMORY, 1))
}

fn moved_with(
    source: &mut dyn SourceVm,
    kind: TrackerKind,
    verify: bool,
    options: VmOptions,
) -> (Report, Vm) {
    let mut target = empty(options);
    // Slow enough for several passes.
    let settings = Settings { verify, max_bandwidth: Some(80 << 20), ..patient() };
    let (report, came) =
        pair::moved(&unix_uri(), source, &mut target, Some(kind), &settings, &MigrationHandle::new());
    assert_eq!(came.is_ok(), report.state == MigrationState::Completed);
    (report, target)
}

#[test]
fn engine_migrates_a_running_guest_with_both_trackers() {
    if !kvm() {
        return;
    }
    let mut vm = running();
    for kind in [TrackerKind::Log, TrackerKind::Wp] {
        let (report, target) = moved(&mut vm, kind, true);
        assert_eq!(report.state, MigrationState::Completed, "{report:?}");
        // Pages that the guest reported as free are not compared.
        assert_eq!(
            (report.verified_pages + report.skipped_pages, report.mismatched_pages),
            (MEMORY >> 12, 0)
        );
        assert!(report.passes.len() >= 2, "the guest did not write during the migration: {report:?}");
        assert_eq!(corrupt(&target), 0);
        vm = target;
    }
}

#[test]
fn guest_is_saved_to_a_file_and_restored() {
    if !kvm() {
        return;
    }
    let mut source = running();
    let path = temp_path("vmm-file");
    let report = save(&mut source, &path, &MigrationHandle::new()).unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{report:?}");
    let [mut target, mut paging] = [(); 2].map(|()| empty(VmOptions::new(MEMORY, 1)));
    let restored = restore(&mut target, &path);
    let comes = restore_on_demand(&mut paging, &path);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(restored.unwrap().pages, report.bytes.raw_pages);
    assert_eq!(corrupt(&target), 0);
    match comes {
        Ok(comes) => {
            let progress = comes.wait(PATIENCE);
            assert_eq!(progress.state, FillState::Completed, "{progress:?}");
            assert_eq!((progress.placed, progress.failed_pages), (report.bytes.raw_pages, 0));
            assert_eq!(corrupt(&paging), 0);
            println!("by demand paging: {progress:?}");
        }
        Err(MigrateError::NoDemandPaging { why }) => {
            skip(Need::Uffd, format!("restore by demand paging: {why}"))
        }
        Err(error) => panic!("{error}"),
    }
}

/// Uses dirty rings so small that they fill up repeatedly, under each policy.
#[test]
fn engine_migrates_a_guest_with_dirty_rings() {
    if !kvm() {
        return;
    }
    if largest_dirty_ring().unwrap().is_none() {
        return skip(Need::Kvm, "KVM on this host has no dirty rings");
    }
    let mut options = VmOptions::new(MEMORY, 1);
    options.dirty_ring = Some(256);
    let mut vm = running_with(options.clone());
    for policy in Policy::ALL {
        // A sequential guest fills its ring and waits for it. A busy host may let the guest write
        // little during one migration.
        wait("a migration during which the ring was full", || {
            vm.set_reaper(Arc::new(policy));
            // Signals arrive all the time while vCPUs empty their rings.
            vm.set_throttle(&[0.3]).unwrap();
            let (report, target) = moved_with(&mut vm, TrackerKind::Ring, true, options.clone());
            assert_eq!(report.state, MigrationState::Completed, "{report:?}");
            // Pages that the guest reported as free are not compared.
            assert_eq!(
                (report.verified_pages + report.skipped_pages, report.mismatched_pages),
                (MEMORY >> 12, 0)
            );
            let ring = report.ring.expect("figures of the rings");
            assert_eq!((ring.entries, ring.policy.as_str()), (256, policy.name()));
            assert!(ring.harvests >= ring.full_exits && ring.vcpus[0].pages > 0, "{ring:?}");
            assert_eq!(corrupt(&target), 0);
            vm = target;
            ring.full_exits > 0 && ring.full_stall_us > 0
        });
    }
}

/// Policy whose reaper thread panics at once.
#[derive(Debug)]
struct Panics;

impl ReaperPolicy for Panics {
    fn name(&self) -> &'static str {
        "panics"
    }

    fn begin(&self, _: &dyn Rings) -> Box<dyn HarvestSchedule> {
        panic!("planted")
    }
}

#[test]
fn guest_arrives_complete_although_the_reaper_failed() {
    if !kvm() {
        return;
    }
    if largest_dirty_ring().unwrap().is_none() {
        return skip(Need::Kvm, "KVM on this host has no dirty rings");
    }
    let mut options = VmOptions::new(MEMORY, 1);
    options.dirty_ring = Some(256);
    let mut vm = running_with(options.clone());
    wait("a migration during which the ring was full", || {
        vm.set_reaper(Arc::new(Panics));
        let (report, target) = moved_with(&mut vm, TrackerKind::Ring, true, options.clone());
        assert_eq!(report.state, MigrationState::Completed, "{report:?}");
        assert_eq!(report.mismatched_pages, 0);
        let ring = report.ring.expect("figures of the rings");
        let ReaperState::Failed(error) = &ring.reaper.state else { panic!("{ring:?}") };
        assert!(error.contains("planted"), "{error}");
        assert_eq!(corrupt(&target), 0);
        vm = target;
        ring.full_exits > 0
    });
}

/// Share from which a guest counts as throttled.
const NOTICEABLE: f64 = 0.1;
/// Least time for which a throttled guest was held.
const HELD: Duration = Duration::from_millis(20);

/// A guest that dirties more than the link carries does not converge unless it is throttled.
#[test]
fn guest_is_throttled_until_it_converges() {
    if !kvm() {
        return;
    }
    // The first must not converge for several passes. The second may take as long as this host
    // needs.
    for (auto_converge, state, timeout) in [
        (AutoConverge::Off, MigrationState::Cancelled, Duration::from_secs(2)),
        (AutoConverge::All, MigrationState::Completed, PATIENCE),
    ] {
        // Five times what the downtime limit allows.
        let vm = running_work(VmOptions::new(MEMORY, 1), "sequential,ws=2M,rate=12k,fill=random");
        let mut source = UntilHeld::new(vm, 256);
        let mut target = empty(VmOptions::new(MEMORY, 1));
        // The guest writes all of its 512 pages again within 43 ms. The link needs 500 ms for them,
        // and 50 ms are allowed: 51 pages. The guest is throttled from 4 % of its rate on, and
        // therefore also on a host that is busy with other work. The throttle can slow the full
        // rate to half of the link: it leaves the guest 4 % of its time, and 3 % is the minimum for
        // a guest.
        let settings = Settings {
            auto_converge,
            max_bandwidth: Some(4 << 20),
            downtime_limit: Duration::from_millis(50),
            timeout: Some(timeout),
            ..patient()
        };
        let (report, came) =
            pair::moved(&unix_uri(), &mut source, &mut target, None, &settings, &MigrationHandle::new());
        assert_eq!(came.is_ok(), report.state == MigrationState::Completed);
        assert_eq!(report.state, state, "{report:?}");
        match (auto_converge, report.throttle) {
            (AutoConverge::Off, None) => {
                assert_eq!(source.throttled(), [Duration::ZERO]);
                let before = stats(&source.vm.handle()).unwrap().writes();
                wait("writes of the guest", || stats(&source.vm.handle()).unwrap().writes() > before + 1000);
            }
            (AutoConverge::All, Some(throttle)) => {
                let held = Duration::from_secs_f64(throttle.held_ms[0] / 1e3);
                assert!(throttle.highest_share > NOTICEABLE && held > HELD, "{throttle:?}");
                assert_eq!(corrupt(&target), 0);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn held_vcpu_pauses_at_once_and_runs_freely_afterwards() {
    if !kvm() {
        return;
    }
    let mut vm = running();
    vm.set_throttle(&[0.9]).unwrap();
    // Most of these pauses find the vCPU held. `Board`'s own test shows that a pause ends the hold.
    wait("holds of 300 ms in all", || {
        vm.pause().unwrap();
        vm.resume().unwrap();
        vm.throttled()[0] >= Duration::from_millis(300)
    });
    vm.set_throttle(&[0.0]).unwrap();
    let work = || {
        let writes = stats(&vm.handle()).unwrap().writes();
        wait("the guest's work", || {
            stats(&vm.handle()).is_some_and(|stats| stats.writes() > writes + 10_000)
        });
    };
    // The current hold is counted when it ends, which is before the guest works again.
    work();
    let held = vm.throttled()[0];
    work();
    assert_eq!(vm.throttled()[0], held, "the vCPU is still held");
}

#[test]
fn verification_names_a_withheld_page_and_the_guest_stays() {
    if !kvm() {
        return;
    }
    let page = Arc::new(AtomicU64::new(u64::MAX));
    let mut source =
        Withholding { vm: running_work(VmOptions::new(MEMORY, 1), SLOW), page: Arc::clone(&page) };
    let (report, _) = moved(&mut source, TrackerKind::Log, true);
    let page = page.load(Ordering::Relaxed);
    assert_ne!(page, u64::MAX, "no page of the working set was withheld");
    assert_eq!((report.state, report.mismatched_pages), (MigrationState::Failed, 1), "{report:?}");
    assert!(
        report.error.as_ref().is_some_and(|why| why.contains(&format!("region 0 page {page:#x}"))),
        "{report:?}"
    );
    let handle = source.vm.handle();
    let before = stats(&handle).unwrap().writes();
    wait("writes of the guest on the source", || stats(&handle).is_some_and(|stats| stats.writes() > before));
    assert_eq!(corrupt(&source.vm), 0);
}

#[test]
fn guest_detects_a_withheld_page() {
    if !kvm() {
        return;
    }
    let page = Arc::new(AtomicU64::new(u64::MAX));
    let mut source =
        Withholding { vm: running_work(VmOptions::new(MEMORY, 1), SLOW), page: Arc::clone(&page) };
    let (report, target) = moved(&mut source, TrackerKind::Log, false);
    assert_eq!(report.state, MigrationState::Completed, "{report:?}");
    assert_ne!(page.load(Ordering::Relaxed), u64::MAX, "no page of the working set was withheld");
    assert!(corrupt(&target) > 0, "the guest did not detect the withheld page");
}
