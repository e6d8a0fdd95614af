//! Test of a guest with one vCPU that writes much and one that writes little, migrated by the real
//! engine (`auto-converge=writers`).

use super::{MEMORY, Outrunning};
use crate::confined::kvm;
use crate::rig::{boot, corrupt, empty, forward, patient, stats};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmferry_engine::{
    AutoConverge, DirtyTracker, GuestMemory, MachineConfig, Migratable, MigrationHandle, MigrationState,
    Report, Section, Settings, SourceVm, TrackerKind, VmError,
};
use vmferry_guest_abi::{CpuSnapshot, StatsSnapshot};
use vmferry_testkit::{Need, print_line, skip, wait, wait_for};
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_vmm::{Vm, VmHandle, VmOptions, largest_dirty_ring};

const CPUS: u32 = 2;
/// Number of writes per second of vCPU 0, which go to the same 4 MiB.
const HEAVY: u64 = 50_000;
/// Factor by which vCPU 1 writes less.
const SKEW: u64 = 250;
/// Link rate in bytes per second. The heavy vCPU dirties its 4 MiB faster than this link carries
/// them, also on a host that gives it a tenth of a processor. The light one dirties 0.8 MB per
/// second, less than half of what a throttled guest may dirty (half of this rate).
const LINK: u64 = 8 << 20;
/// Share from which the heavy vCPU counts as throttled.
const THROTTLED: f64 = 0.5;

/// Time of the guest that is measured while it is throttled, in us.
const MEASURED_US: u64 = 2_000_000;

/// Source that records what its guest had done whenever the throttle changed or the guest was
/// paused.
struct Noting {
    vm: Vm,
    /// Number of pages that each harvest of the running guest finds and waits for.
    outruns: u64,
    least: Arc<AtomicU64>,
    notes: Arc<Mutex<Vec<Note>>>,
}

#[derive(Clone)]
struct Note {
    /// Shares that applied from then on.
    shares: Vec<f64>,
    /// Report of the guest up to then.
    stats: StatsSnapshot,
    /// Time for which the host had held the light vCPU.
    light_held: Duration,
}

impl Noting {
    fn note(&mut self, shares: &[f64]) {
        let stats = wait_for("a report of the guest", || self.vm.handle().stats());
        let light_held = SourceVm::throttled(&self.vm).get(1).copied().unwrap_or_default();
        let note = Note { shares: shares.to_vec(), stats, light_held };
        self.notes.lock().unwrap().push(note);
    }
}

/// Returns what each vCPU did in all periods in which the first one was throttled and the other was
/// not, and how long the host held the other one in these periods.
///
/// On a host that gives the link hardly any time, the light vCPU may outrun the link as well, and
/// be throttled. A hold that begins then can end in the next period, which is therefore left out.
fn throttled(notes: &[Note]) -> ([Work; 2], Duration) {
    let (mut work, mut light_held) = ([Work::default(); 2], Duration::ZERO);
    let mut light_was_throttled = false;
    for (from, to) in notes.iter().zip(notes.iter().skip(1)) {
        let [heavy, light] = from.shares[..] else { continue };
        if heavy >= THROTTLED && light == 0.0 && !light_was_throttled {
            work.iter_mut().enumerate().for_each(|(cpu, work)| work.add(&from.stats, &to.stats, cpu));
            light_held += to.light_held - from.light_held;
        }
        light_was_throttled = light > 0.0;
    }
    (work, light_held)
}

/// Returns true if the guest was throttled for the measured time, and the host let the light vCPU
/// run for some of it.
fn measured(notes: &Mutex<Vec<Note>>, handle: &VmHandle) -> bool {
    let mut notes = notes.lock().unwrap().clone();
    let (Some(last), Some(stats)) = (notes.last(), stats(handle)) else { return false };
    notes.push(Note { shares: Vec::new(), stats, light_held: last.light_held });
    let ([heavy, light], _) = throttled(&notes);
    heavy.us >= MEASURED_US && light.running_us() >= MEASURED_US / 4
}

impl Migratable for Noting {
    forward!(Migratable);
}

impl SourceVm for Noting {
    forward!(SourceVm);
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        self.least.store(self.outruns, Ordering::Relaxed);
        let (tracker, least) = (self.vm.tracker(kind)?, Arc::clone(&self.least));
        Ok(Box::new(Outrunning { tracker, least }))
    }
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        self.note(shares);
        SourceVm::throttle(&mut self.vm, shares)
    }
    fn throttled(&self) -> Vec<Duration> {
        SourceVm::throttled(&self.vm)
    }
    fn pause(&mut self) -> Result<(), VmError> {
        let shares = self.notes.lock().unwrap().last().map(|note| note.shares.clone()).unwrap_or_default();
        self.note(&shares);
        self.least.store(0, Ordering::Relaxed);
        SourceVm::pause(&mut self.vm)
    }
    fn resume(&mut self) -> Result<(), VmError> {
        self.least.store(self.outruns, Ordering::Relaxed);
        SourceVm::resume(&mut self.vm)
    }
}

/// Work of a vCPU, by its own clock.
#[derive(Debug, Default, Clone, Copy)]
struct Work {
    writes: u64,
    us: u64,
    /// Part of `us` in which the vCPU could not run.
    stalled_us: u64,
}

impl Work {
    fn add(&mut self, from: &StatsSnapshot, to: &StatsSnapshot, cpu: usize) {
        let since = |value: fn(&CpuSnapshot) -> u64| value(&to.cpus()[cpu]) - value(&from.cpus()[cpu]);
        self.writes += since(|cpu| cpu.writes);
        self.us += since(|cpu| cpu.t_us);
        self.stalled_us += since(|cpu| cpu.stall_sum_us);
    }

    fn per_second(self) -> f64 {
        self.writes as f64 * 1e6 / self.us as f64
    }

    /// Returns the time in which the vCPU could run, in us.
    fn running_us(self) -> u64 {
        self.us.saturating_sub(self.stalled_us)
    }

    /// Returns the number of writes per second of the time in which the vCPU could run.
    fn per_running_second(self) -> f64 {
        self.writes as f64 * 1e6 / self.running_us() as f64
    }
}

/// Returns options of a VM without a balloon: the guest does not count the time in which it is
/// outside for its own I/O.
fn options() -> VmOptions {
    let mut options = VmOptions::new(MEMORY, CPUS);
    (options.balloon, options.dirty_ring) = (false, Some(4096));
    options
}

fn running() -> Vm {
    // Without a sweep, because KVM also calls a page dirty that was only read if it was part of a
    // huge page until then.
    let workload = format!("sequential,ws=8M,rate={HEAVY},skew={SKEW},sweep=0,fill=random");
    let vm = boot(options(), &workload);
    let handle = vm.handle();
    wait("the guest's work", || {
        stats(&handle).is_some_and(|stats| stats.cpus().iter().all(|cpu| cpu.writes > 100))
    });
    vm
}

/// Returns what the vCPUs do in half a second without a migration.
fn at_full_speed(handle: &VmHandle) -> [Work; 2] {
    let before = stats(handle).unwrap();
    let mut work = [Work::default(); 2];
    wait("half a second of the guest", || {
        let Some(now) = stats(handle) else { return false };
        work = [Work::default(); 2];
        work.iter_mut().enumerate().for_each(|(cpu, work)| work.add(&before, &now, cpu));
        work.iter().all(|work| work.us > 500_000)
    });
    work
}

/// Migrates the guest to a new VM. Calls `watch` meanwhile.
fn attempt(
    source: &mut Noting,
    settings: &Settings,
    watch: impl FnOnce(&MigrationHandle) + Send,
) -> (Report, Option<Vm>) {
    let (mut target, migration) = (empty(options()), MigrationHandle::new());
    let (report, came) = std::thread::scope(|scope| {
        scope.spawn(|| watch(&migration));
        pair::moved(&unix_uri(), source, &mut target, Some(TrackerKind::Ring), settings, &migration)
    });
    (report, came.ok().map(|_| target))
}

/// Checks bounds that other work on this host cannot break: it makes vCPUs slower and gives them
/// less time, but holds none and writes nothing.
#[test]
fn light_vcpu_keeps_its_speed_while_the_heavy_one_is_throttled() {
    if !kvm() {
        return;
    }
    if largest_dirty_ring().unwrap().is_none() {
        return skip(Need::Kvm, "no dirty rings, which tell vCPUs apart");
    }
    let notes = Arc::<Mutex<Vec<Note>>>::default();
    // The pages that the link carries in 30 ms: also a guest that has 3 % of its time dirties that
    // much while its pages are sent.
    let (outruns, least) = (64, Arc::default());
    let mut source = Noting { vm: running(), outruns, least, notes: Arc::clone(&notes) };
    let handle = source.vm.handle();
    let before = at_full_speed(&handle);
    let settings = Settings {
        auto_converge: AutoConverge::Writers,
        max_bandwidth: Some(LINK),
        // Never reached, because the cancel ends the migration.
        downtime_limit: Duration::from_millis(1),
        ..patient()
    };
    // The guest writes too much for the link until it has been throttled for long enough.
    let (report, _) = attempt(&mut source, &settings, |migration| {
        wait("the measured time", || measured(&notes, &handle));
        migration.cancel();
    });
    assert_eq!(report.state, MigrationState::Cancelled, "{report:?}");
    let throttle = report.throttle.expect("the guest outran its link and was throttled");
    let ([heavy, light], light_held) = throttled(&notes.lock().unwrap());
    // The guest continues on the source, and migrates over a link that is fast enough.
    source.outruns = 0;
    let (report, target) = attempt(&mut source, &patient(), |_| ());
    assert_eq!(report.state, MigrationState::Completed, "{report:?}");
    assert_eq!(corrupt(&target.unwrap()), 0);

    let kept = |work: Work, cpu: usize| work.per_second() / before[cpu].per_second();
    print_line(format!(
        "writers: the heavy vCPU kept {:.2} of its speed, the light one {:.2}; {heavy:?}, {light:?}, {throttle:?}",
        kept(heavy, 0),
        kept(light, 1)
    ));
    assert!(heavy.us >= MEASURED_US, "the heavy vCPU was throttled for {heavy:?} only: {throttle:?}");
    // The host held the heavy vCPU and never the light one. The heavy vCPU is held for at least as
    // long as it runs. The bound is far below that: on a starved host the thread that brings the
    // vCPU out of the guest may be late, and the time in which the host runs neither does not
    // count.
    let (held, ran) = (throttle.held_ms[0] * 1e3, heavy.running_us());
    assert!(held * 20.0 > ran as f64, "held for {held:.0} us, and it ran for {ran} us: {throttle:?}");
    assert_eq!(light_held, Duration::ZERO, "the light vCPU was held: {throttle:?}");
    // The guest's own counts and clock.
    assert!(heavy.per_second() < HEAVY as f64 / 2.0, "the heavy vCPU kept its speed: {heavy:?}");
    let wanted = (HEAVY / SKEW) as f64;
    let wrote = light.per_running_second();
    assert!(wrote >= 0.9 * wanted, "the light vCPU wrote {wrote:.0} of {wanted:.0} a second: {light:?}");
}
