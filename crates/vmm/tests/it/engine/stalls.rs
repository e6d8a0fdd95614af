//! Tests that compare the time for which vCPUs do not run, as the host accounts for it, with the
//! guest's own clock: once for each cause.
//!
//! A guest's clock sees every gap in its loop, also gaps caused by other work on this host. Noise
//! therefore only adds to what the guest sees, and these bounds hold on a busy host as well:
//!
//! | cause | what the host counts | bound |
//! |---|---|---|
//! | full dirty ring, throttle | only time in which the vCPU is out of the guest | host <= guest |
//! | missing pages | the same, until the page is known to be placed | host <= guest and the time of placing |
//! | blackout, verification, trial pauses, busy I/O | also stopping and starting the vCPUs | time for which no vCPU ran <= guest, and <= host |
//!
//! The remaining difference, the residue, is printed. It consists of tracking faults, the host's
//! scheduler, and exits shorter than 8 us, which no guest counts.

use super::{MEMORY, running_work};
use crate::confined::kvm;
use crate::rig::{corrupt, empty, forward, patient, stats};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmferry_core::{PageIndex, PageRun, PageSet, RegionId};
use vmferry_engine::{
    AutoConverge, DemandPaging, DirtyTracker, Fault, GuestMemory, MachineConfig, Migratable, MigrationHandle,
    MigrationMode, MigrationState, OnTimeout, Placed, Report, RunState, Section, Settings, SourceVm,
    TargetVm, TrackerKind, VmError,
};
use vmferry_guest_abi::CpuSnapshot;
use vmferry_testkit::{Need, print_line, skip, wait};
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_vmm::{Vm, VmHandle, VmOptions, largest_dirty_ring};

/// Workload that dirties its 8 MiB repeatedly.
const WORKLOAD: &str = "sequential,ws=8M,rate=50k,fill=random";
/// Link rate in bytes per second, slow enough for several passes.
const LINK: u64 = 80 << 20;
/// Maximum ratio of the clocks of guest and host: the frequency that the guest is told is rounded,
/// and the host's clock is steered.
const CLOCKS: f64 = 1.002;
/// Maximum time that a migration may take from the guest's clock when it sets the counter, in us.
const CLOCK_STEP_US: f64 = 500.0;

/// Time for which certainly no vCPU ran.
#[derive(Default)]
struct Standstill {
    since: Option<Instant>,
    total: Duration,
}

impl Standstill {
    /// Records that all vCPUs have stopped.
    fn begins(watch: &Mutex<Self>) {
        watch.lock().unwrap().since.get_or_insert_with(Instant::now);
    }

    /// Records that the vCPUs are about to be started.
    fn ends(watch: &Mutex<Self>) {
        let mut watch = watch.lock().unwrap();
        if let Some(since) = watch.since.take() {
            watch.total += since.elapsed();
        }
    }
}

/// Source that records when its guest was paused, and whose I/O is busy at times.
struct Watched {
    vm: Vm,
    still: Arc<Mutex<Standstill>>,
    /// Durations for which busy I/O makes the next pauses fail.
    busy: VecDeque<Duration>,
}

impl Migratable for Watched {
    forward!(Migratable);
}

impl SourceVm for Watched {
    forward!(SourceVm);
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        self.vm.tracker(kind)
    }
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        SourceVm::throttle(&mut self.vm, shares)
    }
    fn throttled(&self) -> Vec<Duration> {
        SourceVm::throttled(&self.vm)
    }
    fn pause(&mut self) -> Result<(), VmError> {
        SourceVm::pause(&mut self.vm)?;
        Standstill::begins(&self.still);
        Ok(())
    }
    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        let Some(time) = self.busy.pop_front() else { return SourceVm::quiesce(&mut self.vm, within) };
        // Acts as a slow disk.
        std::thread::sleep(time);
        Err(VmError::busy("requests are under way"))
    }
    fn resume(&mut self) -> Result<(), VmError> {
        Standstill::ends(&self.still);
        SourceVm::resume(&mut self.vm)
    }
}

/// Memory that records how long pages are being placed. The vCPU that waits for a page is woken
/// within that time, and the engine reads the clock after it. The engine therefore counts at most
/// this time too much, for example where the host lets the vCPU run first.
#[derive(Debug)]
struct Placing {
    memory: Arc<dyn DemandPaging>,
    total_us: Arc<AtomicU64>,
}

impl Placing {
    fn timed<T>(&self, place: impl FnOnce(&dyn DemandPaging) -> T) -> T {
        let since = Instant::now();
        let placed = place(&*self.memory);
        self.total_us.fetch_add(u64::try_from(since.elapsed().as_micros()).unwrap(), Ordering::Relaxed);
        placed
    }
}

impl DemandPaging for Placing {
    fn shards(&self) -> usize {
        self.memory.shards()
    }
    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize {
        self.memory.shard_of(region, page)
    }
    fn unit_pages(&self, region: RegionId) -> u64 {
        self.memory.unit_pages(region)
    }
    fn begin(&self, missing: &PageSet) -> Result<(), VmError> {
        self.memory.begin(missing)
    }
    fn next_fault(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError> {
        self.memory.next_fault(shard, within)
    }
    fn interrupt(&self) {
        self.memory.interrupt();
    }
    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError> {
        self.timed(|memory| memory.place(region, run, bytes))
    }
    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError> {
        self.timed(|memory| memory.place_zeros(region, run))
    }
    fn wake(&self, region: RegionId, page: PageIndex) -> Result<(), VmError> {
        self.timed(|memory| memory.wake(region, page))
    }
    fn end(&self) -> Result<(), VmError> {
        self.memory.end()
    }
}

/// Target that records when its guest is started.
struct Started {
    vm: Vm,
    still: Arc<Mutex<Standstill>>,
    placing_us: Arc<AtomicU64>,
}

impl Migratable for Started {
    fn config(&self) -> MachineConfig {
        self.vm.config()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.vm.memory()
    }
}

impl TargetVm for Started {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        let total_us = Arc::clone(&self.placing_us);
        self.vm.demand_paging().map(|memory| Arc::new(Placing { memory, total_us }) as Arc<dyn DemandPaging>)
    }
    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        TargetVm::load(&mut self.vm, sections)
    }
    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        Standstill::ends(&self.still);
        TargetVm::start(&mut self.vm, state)
    }
}

/// Report of a migration, and what both sides count for the only vCPU's stalls, in microseconds.
struct Account {
    report: Report,
    /// Sum of the stalls that the guest saw from before the migration until after it, in us.
    seen: f64,
    still: f64,
    /// Maximum time that the host may have counted too much, in us.
    excess: f64,
}

impl Account {
    /// Returns what the host counted while the vCPU was out of the guest, in us.
    fn counted(&self) -> f64 {
        let ring = self.report.ring.as_ref().map_or(0, |ring| ring.vcpus[0].full_stall_us);
        let held = self.report.throttle.as_ref().map_or(0.0, |throttle| throttle.held_ms[0]);
        let faults = self.report.postcopy.as_ref().map_or(0, |postcopy| postcopy.vcpus[0].blocked_us);
        (ring + faults) as f64 + held * 1e3
    }

    /// Returns what the host reports for stopping the guest, in us.
    fn paused(&self) -> f64 {
        let report = &self.report;
        (report.downtime_ms + report.verify_ms + report.deferred_ms + report.trial_pause_ms) * 1e3
    }

    /// Checks the bounds, and prints the residue of `cause`, for which the host counted `host`
    /// microseconds.
    fn judge(&self, cause: &str, host: f64) {
        let Self { report, seen, still, excess } = self;
        assert_eq!(report.state, MigrationState::Completed, "{report:?}");
        assert!(host > 0.0, "{cause} did not happen: {report:?}");
        let (counted, paused) = (self.counted(), self.paused());
        let residue = seen - counted - paused;
        print_line(format!(
            "{{\"cause\": \"{cause}\", \"host_us\": {host:.0}, \"counted_us\": {counted:.0}, \"paused_us\": {paused:.0}, \
             \"still_us\": {still:.0}, \"guest_us\": {seen:.0}, \"stall_residue_us\": {residue:.0}}}"
        ));
        assert!(
            counted + still <= seen * CLOCKS + CLOCK_STEP_US + excess,
            "{cause}: the host accounts for {counted:.0} us and {still:.0} us without any vCPU, of which {excess:.0} may be too much, and the \
             guest saw {seen:.0}: {report:?}"
        );
        assert!(
            *still <= paused + CLOCK_STEP_US,
            "{cause}: no vCPU ran for {still:.0} us, and the report says {paused:.0}: {report:?}"
        );
    }
}

/// Returns the vCPU's block with all stalls up to now: the vCPU has reported twice since the call.
fn fresh(handle: &VmHandle) -> CpuSnapshot {
    let mut first = None;
    let mut last = CpuSnapshot::default();
    wait("two reports of the guest", || {
        let Some(now) = stats(handle) else { return false };
        last = now.cpus()[0];
        last.reports >= *first.get_or_insert(last.reports) + 2
    });
    last
}

/// Returns options of a VM without a balloon: the guest does not count the time in which it is
/// outside for its own I/O.
fn watched_options(ring: Option<u32>) -> VmOptions {
    let mut options = VmOptions::new(MEMORY, 1);
    (options.balloon, options.dirty_ring) = (false, ring);
    options
}

fn account(ring: Option<u32>, settings: &Settings, busy: &[Duration]) -> Account {
    let options = watched_options(ring);
    let still = Arc::<Mutex<Standstill>>::default();
    let vm = running_work(options.clone(), WORKLOAD);
    let mut source = Watched { vm, still: Arc::clone(&still), busy: busy.iter().copied().collect() };
    let placing_us = Arc::<AtomicU64>::default();
    let mut target =
        Started { vm: empty(options), still: Arc::clone(&still), placing_us: Arc::clone(&placing_us) };
    let before = fresh(&source.vm.handle());
    let (report, came) =
        pair::moved(&unix_uri(), &mut source, &mut target, None, settings, &MigrationHandle::new());
    let _ = came.unwrap();
    let after = fresh(&target.vm.handle());
    assert_eq!(corrupt(&target.vm), 0);
    let still = still.lock().unwrap().total.as_secs_f64() * 1e6;
    let excess = placing_us.load(Ordering::Relaxed) as f64;
    Account { report, seen: (after.stall_sum_us - before.stall_sum_us) as f64, still, excess }
}

fn settings() -> Settings {
    Settings { max_bandwidth: Some(LINK), ..patient() }
}

#[test]
fn full_rings_are_accounted_for() {
    if !kvm() {
        return;
    }
    if largest_dirty_ring().unwrap().is_none() {
        return skip(Need::Kvm, "no dirty rings");
    }
    // On a host that hardly lets the guest run, the reaper may empty the ring first.
    let full = |_| {
        let account = account(Some(256), &settings(), &[]);
        account.report.ring.as_ref().is_some_and(|ring| ring.full_stall_us > 0).then_some(account)
    };
    let account = (0..8).find_map(full).expect("a guest fills 256 entries in 5 ms");
    let ring = account.report.ring.as_ref().unwrap();
    account.judge("ring_full", ring.full_stall_us as f64);
}

#[test]
fn throttling_is_accounted_for() {
    if !kvm() {
        return;
    }
    // A fifth of the usual link: the guest dirties more, also on a host that gives it a tenth of a
    // processor.
    let settings = Settings {
        auto_converge: AutoConverge::All,
        max_bandwidth: Some(LINK / 5),
        downtime_limit: Duration::from_micros(1),
        timeout: Some(Duration::from_secs(3)),
        on_timeout: OnTimeout::Switch,
        ..settings()
    };
    let held = |account: &Account| account.report.throttle.as_ref().map_or(0.0, |all| all.held_ms[0]);
    // A guest that does not run on a starved host is not held. The migration is repeated until
    // there is a hold to account for, and the account of that migration decides.
    let account = (0..8).map(|_| account(None, &settings, &[])).find(|account| held(account) > 0.0);
    let account = account.expect("a guest that outruns its link is held");
    account.judge("throttle", held(&account) * 1e3);
}

#[test]
fn blackout_trial_pauses_and_verification_are_accounted_for() {
    if !kvm() {
        return;
    }
    let account = account(None, &Settings { verify: true, ..settings() }, &[]);
    let report = &account.report;
    assert!(report.trial_pauses > 0 && report.trial_pause_ms > 0.0, "{report:?}");
    account.judge("trial_pause", report.trial_pause_ms * 1e3);
    account.judge("verify", report.verify_ms * 1e3);
    account.judge("blackout", report.downtime_ms * 1e3);
}

#[test]
fn pauses_with_busy_io_are_accounted_for() {
    if !kvm() {
        return;
    }
    let account = account(None, &settings(), &[Duration::from_millis(30); 2]);
    assert_eq!(account.report.deferrals, 2, "{:?}", account.report);
    assert!(account.still >= 60_000.0, "{}", account.still);
    account.judge("put_off", account.report.deferred_ms * 1e3);
}

#[test]
fn missing_pages_are_accounted_for() {
    if !kvm() {
        return;
    }
    if let Err(error) = Vm::new(VmOptions::new(MEMORY, 1)).unwrap().demand_paging() {
        return skip(Need::Uffd, error);
    }
    let settings = Settings { mode: MigrationMode::Postcopy, max_bandwidth: Some(LINK / 5), ..settings() };
    let blocked = |account: &Account| {
        account.report.postcopy.as_ref().map_or(0, |postcopy| postcopy.vcpus[0].blocked_us)
    };
    // A guest that does not run on a starved host before its pages have arrived waits for none. The
    // migration is repeated until there is a wait to account for, and the account of that migration
    // decides.
    let account = (0..8).map(|_| account(None, &settings, &[])).find(|account| blocked(account) > 0);
    let account = account.expect("a guest that writes all over its memory waits for pages");
    account.judge("missing_page", blocked(&account) as f64);
}
