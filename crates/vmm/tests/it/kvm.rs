//! Tests of real guests on real KVM: booting, pausing, and moving one by hand.

use crate::confined::kvm;
use crate::rig::boot;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageIndex, PageRun, PageSet};
use vmferry_engine::{DirtyTracker, GuestMemory, Migratable, SourceVm, TrackerKind};
use vmferry_guest_abi::{State, StatsSnapshot};
use vmferry_testkit::{PATIENCE, wait_for};
use vmferry_vmm::{Backing, Captured, Exit, SerialSink, Vm, VmHandle, VmOptions};

struct Guest {
    vm: Vm,
    handle: VmHandle,
    serial: Captured,
}

impl Guest {
    fn new(memory: u64, cpus: u32, change: impl FnOnce(&mut VmOptions)) -> Self {
        Self::with(memory, cpus, change, |options| Vm::new(options).expect("a VM"))
    }

    fn boot(memory: u64, cpus: u32, workload: &str, change: impl FnOnce(&mut VmOptions)) -> Self {
        Self::with(memory, cpus, change, |options| boot(options, workload))
    }

    fn with(
        memory: u64,
        cpus: u32,
        change: impl FnOnce(&mut VmOptions),
        start: impl FnOnce(VmOptions) -> Vm,
    ) -> Self {
        let (sink, serial) = SerialSink::capture();
        let mut options = VmOptions::new(memory, cpus);
        options.serial = sink;
        change(&mut options);
        let vm = start(options);
        Self { handle: vm.handle(), vm, serial }
    }

    /// Waits until the guest's report satisfies `wanted`.
    fn wait(&self, what: &str, wanted: impl Fn(&StatsSnapshot) -> bool) -> StatsSnapshot {
        wait_for(what, || {
            let stats = self.handle.stats();
            match stats {
                Ok(stats) if wanted(&stats) => return Ok(stats),
                _ => {}
            }
            let exit = self.handle.exit();
            assert!(exit.is_none(), "{what}: {} serial: {}", exit.unwrap(), self.serial.text());
            Err((stats.map(|stats| stats.state), self.serial.text()))
        })
    }

    /// Waits until the guest has written `writes` times more than now.
    fn wait_writes(&self, writes: u64) {
        let before = self.wait("the guest reports", |_| true).writes();
        self.wait("the guest writes", |stats| stats.writes() >= before + writes);
    }

    fn wait_running(&self) -> StatsSnapshot {
        self.wait("the guest fills its memory", |s| s.state == State::Running && s.writes() > 1000)
    }

    /// Waits until every vCPU has written, and has checked all its pages once more.
    fn wait_sweep(&self, cpus: u32) -> StatsSnapshot {
        let before = self.wait("the guest reports", |_| true);
        let sweeps: Vec<u64> = before.cpus().iter().map(|cpu| cpu.sweeps).collect();
        let stats = self.wait("every vCPU checks all its pages", |s| {
            s.cpus().iter().zip(&sweeps).all(|(cpu, before)| cpu.sweeps > before + 1)
        });
        assert_eq!(stats.cpus().len(), cpus as usize);
        stats
    }
}

#[test]
fn guest_boots_and_counts() {
    if !kvm() {
        return;
    }
    let started = Instant::now();
    let guest = Guest::boot(128 << 20, 2, "uniform,ws=8M,rate=20k", |_| {});
    let stats = guest.wait_running();
    println!("running after {:?}", started.elapsed());
    for note in guest.vm.notes() {
        println!("note: {note}");
    }
    let later = guest.wait("the guest counts on", |s| s.writes() > stats.writes() + 1000);
    assert_eq!(later.corrupt(), 0);
    assert_eq!(later.cpus().len(), 2);
}

#[test]
fn busy_guest_pauses_quickly_and_resumes() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot(128 << 20, 2, "uniform,ws=16M,rate=0", |_| {});
    guest.wait_running();
    let mut taken = Vec::new();
    for _ in 0..50 {
        guest.wait_writes(1);
        let start = Instant::now();
        guest.vm.pause().unwrap();
        taken.push(start.elapsed());
        let frozen = guest.handle.stats().map(|s| s.writes());
        // A running guest writes every few microseconds. A busy host can only hide a defect, and
        // the test passes then.
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(guest.handle.stats().map(|s| s.writes()), frozen, "a paused guest wrote");
        guest.vm.resume().unwrap();
    }
    taken.sort();
    println!("pause: median {:?}, worst {:?}", taken[taken.len() / 2], taken[taken.len() - 1]);
    // Benchmarks measure these times. In this test a pause whose kick is lost fails with
    // `Error::Unresponsive`.
    assert_eq!(guest.wait_sweep(2).corrupt(), 0);
}

#[test]
fn saving_changes_nothing_for_the_guest() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot(128 << 20, 2, "uniform,ws=8M,rate=50k", |_| {});
    guest.wait_running();
    for _ in 0..20 {
        guest.vm.pause().unwrap();
        let start = Instant::now();
        let sections = guest.vm.save_state().unwrap();
        let took = start.elapsed();
        let bytes: usize = sections.iter().map(|s| s.payload.len()).sum();
        println!("{bytes} bytes of state saved in {took:?}");
        guest.vm.resume().unwrap();
        guest.wait_writes(200);
    }
    assert_eq!(guest.wait_sweep(2).corrupt(), 0);
}

/// Copies all memory of `from` to `to`, both paused.
fn copy_memory(from: &Vm, to: &Vm) {
    let mut page = [0; 4096];
    for ram in from.ram().regions() {
        let (id, run) = (ram.region().id, ram.region().run());
        let (from, to) = (from.ram().window(id, run).unwrap(), to.ram().window(id, run).unwrap());
        for index in 0..from.pages() {
            if !from.copy_page(index, &mut page) {
                to.write_page(index, &page);
            }
        }
    }
}

/// Moves a guest by hand `moves` times and lets it check all its memory.
fn move_by_hand(memory: u64, cpus: u32, workload: &str, backing: Backing, moves: u32) {
    let mut guest = Guest::boot(memory, cpus, workload, |options| options.backing = backing);
    let mut writes = guest.wait_running().writes();
    for _ in 0..moves {
        guest.vm.pause().unwrap();
        let saved = guest.vm.save_state().unwrap();
        let mut target = Guest::new(memory, cpus, |options| {
            options.backing = backing;
            options.incoming = true;
        });
        assert_eq!(guest.vm.config().difference(&target.vm.config()), None);
        copy_memory(&guest.vm, &target.vm);
        guest.vm.stop();
        let start = Instant::now();
        target.vm.load_state(&saved).unwrap();
        println!("state loaded in {:?}", start.elapsed());
        target.vm.start().unwrap();
        guest = target;
        let stats = guest.wait("writes of the guest", |s| s.writes() > writes + 1000);
        assert_eq!(stats.corrupt(), 0, "{:?}", stats.cpus()[0].first_corrupt);
        writes = stats.writes();
    }
    assert_eq!(guest.wait_sweep(cpus).corrupt(), 0);
}

#[test]
fn guest_continues_in_another_vm() {
    if kvm() {
        move_by_hand(128 << 20, 2, "uniform,ws=8M,rate=50k", Backing::Anonymous, 3);
    }
}

#[test]
fn guest_in_a_memfd_continues_in_another_vm() {
    if kvm() {
        move_by_hand(64 << 20, 1, "sequential,ws=4M,rate=50k", Backing::Memfd, 2);
    }
}

#[test]
fn idle_guest_continues_in_another_vm() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot(64 << 20, 2, "idle,data=8M", |_| {});
    guest.wait("the guest idles", |s| s.state == State::Running);
    guest.vm.pause().unwrap();
    let saved = guest.vm.save_state().unwrap();
    let mut target = Guest::new(64 << 20, 2, |options| options.incoming = true);
    copy_memory(&guest.vm, &target.vm);
    guest.vm.stop();
    target.vm.load_state(&saved).unwrap();
    target.vm.start().unwrap();
    assert_eq!(target.wait_sweep(2).corrupt(), 0);
}

#[test]
fn guest_detects_a_page_that_was_not_moved() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot(64 << 20, 1, "uniform,ws=4M,rate=50k", |_| {});
    guest.wait_running();
    guest.vm.pause().unwrap();
    let saved = guest.vm.save_state().unwrap();
    let mut target = Guest::new(64 << 20, 1, |options| options.incoming = true);
    copy_memory(&guest.vm, &target.vm);
    // Each page of content begins with its number. The page between 99 and 101 is the guest's page
    // 100.
    let ram = guest.vm.ram().regions()[0].region();
    let window = target.vm.ram().window(ram.id, ram.run()).unwrap();
    let starts_with = |index: usize, number: u64| {
        let mut page = [0; 4096];
        window.copy_page(index, &mut page);
        page[..8] == number.to_le_bytes()
    };
    let found =
        (1..window.pages() - 1).find(|i| (0..3).all(|near| starts_with(i - 1 + near, 99 + near as u64)));
    window.slice(found.expect("the guest's page 100"), 1).zero();
    target.vm.load_state(&saved).unwrap();
    target.vm.start().unwrap();
    let stats = target.wait("the guest notices", |s| s.corrupt() > 0);
    assert_eq!(stats.cpus()[0].first_corrupt.unwrap().page, 100);
}

#[test]
fn guest_with_memory_on_both_sides_of_the_hole_runs() {
    if !kvm() {
        return;
    }
    // Shows that a guest with two memory slots boots and runs. Its working set lies below the hole:
    // filling more than 3 GiB to reach the upper slot would take too long for a test.
    let guest = Guest::boot((3 << 30) + (64 << 20), 1, "uniform,ws=4M,rate=10k", |_| {});
    assert_eq!(guest.wait_running().corrupt(), 0);
    assert_eq!(guest.vm.ram().regions().len(), 2);
}

#[test]
fn guest_that_panics_reports_the_reason_and_ends() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::new(64 << 20, 2, |_| {});
    guest.vm.load_kernel(vmferry_guest_image::ELF, "nonsense").unwrap();
    guest.vm.start().unwrap();
    let exit = guest.handle.wait_for_exit_timeout(PATIENCE);
    assert_eq!(exit, Some(Exit::PoweredOff(vmferry_guest_abi::PANIC_EXIT)), "{}", guest.serial.text());
    assert!(guest.serial.text().contains("PANIC"), "{}", guest.serial.text());
    // The other vCPU was told, and no vCPU runs on.
    guest.vm.pause().unwrap();
    assert!(guest.vm.resume().is_err() && guest.vm.save_state().is_err());
    guest.vm.stop();
}

/// Copies the pages of `set` from `from` to `to` while the guest may run. Each page is protected
/// before it is read. Returns the number of pages.
fn send(tracker: &dyn DirtyTracker, set: &PageSet, from: &Vm, to: &Vm) -> u64 {
    let protector = tracker.protector();
    let (mut page, mut sent) = ([0; 4096], 0);
    for (id, pages) in set.iter() {
        let ram = from.ram().region(id).unwrap().region();
        let target = to.ram().window(id, ram.run()).unwrap();
        let step = protector.chunk_pages();
        for first in (0..ram.pages()).step_by(usize::try_from(step).unwrap()) {
            let chunk = PageRun::from(first..(first + step).min(ram.pages()));
            protector.protect(id, chunk, pages).unwrap();
            for index in pages.runs_in(chunk.range()).flatten() {
                let one = from.ram().window(id, PageRun::new(PageIndex(index), 1)).unwrap();
                one.copy_page(0, &mut page);
                target.write_page(usize::try_from(index).unwrap(), &page);
                sent += 1;
            }
        }
    }
    sent
}

/// Performs a minimal live migration, with the tracker that the VM gives to the engine.
fn move_live(kind: TrackerKind, cpus: u32, huge_pages: bool) {
    let (memory, workload) = (128 << 20, "uniform,ws=16M,rate=20k");
    let mut guest = Guest::boot(memory, cpus, workload, |options| options.huge_pages = huge_pages);
    let before = guest.wait_running().writes();
    let mut target = Guest::new(memory, cpus, |options| options.incoming = true);
    let layout = guest.vm.ram().layout().clone();
    let mut tracker = SourceVm::tracker(&mut guest.vm, Some(kind)).unwrap();
    assert_eq!(tracker.kind(), kind);
    tracker.start().unwrap();

    // The first pass sends the touched pages. They are queried after they were protected.
    let mut set = PageSet::full(&layout);
    for (id, pages) in PageSet::full(&layout).iter() {
        let run = layout.region(id).unwrap().run();
        let step = usize::try_from(tracker.protector().chunk_pages()).unwrap();
        for first in run.range().step_by(step) {
            let chunk = PageRun::from(first..(first + step as u64).min(run.end()));
            tracker.protector().protect(id, chunk, pages).unwrap();
        }
        let mut touched = Bitmap::new(pages.len());
        GuestMemory::touched(guest.vm.ram().as_ref(), id, run, &mut touched).unwrap();
        *set.region_mut(id).unwrap() = touched;
    }
    let mut counts = Vec::new();
    for _ in 0..4 {
        counts.push(send(&*tracker, &set, &guest.vm, &target.vm));
        set.clear();
        guest.wait_writes(200);
        tracker.harvest(&mut set).unwrap();
    }
    counts.push(send(&*tracker, &set, &guest.vm, &target.vm));
    set.clear();
    guest.vm.pause().unwrap();
    let saved = guest.vm.save_state().unwrap();
    tracker.harvest(&mut set).unwrap();
    counts.push(send(&*tracker, &set, &guest.vm, &target.vm));
    tracker.stop().unwrap();
    println!("{kind}: pages sent by pass: {counts:?} of {}", layout.pages());
    assert!(counts[0] >= 4096 && counts[1..].iter().all(|n| *n < counts[0]), "{counts:?}");

    compare_memory(&guest.vm, &target.vm);
    target.vm.load_state(&saved).unwrap();
    target.vm.start().unwrap();
    guest.vm.stop();
    assert!(target.wait_sweep(cpus).writes() > before);
    assert_eq!(target.handle.stats().unwrap().corrupt(), 0);
}

/// Checks that every page has the same content in both VMs, whose vCPUs are paused.
fn compare_memory(a: &Vm, b: &Vm) {
    let mut scratch = [0; 4096];
    for ram in a.ram().regions() {
        let (id, run) = (ram.region().id, ram.region().run());
        let (left, right) = (a.ram().window(id, run).unwrap(), b.ram().window(id, run).unwrap());
        for index in 0..left.pages() {
            let (want, got) = (left.digest(index, &mut scratch), right.digest(index, &mut scratch));
            assert_eq!(want, got, "{id}, page {index:#x}");
        }
    }
}

#[test]
fn running_guest_is_moved_with_the_log() {
    if kvm() {
        move_live(TrackerKind::Log, 2, true);
    }
}

#[test]
fn running_guest_is_moved_with_write_protection() {
    if kvm() {
        move_live(TrackerKind::Wp, 2, false);
    }
}

#[test]
fn running_guest_on_huge_pages_is_moved_with_write_protection() {
    if kvm() {
        move_live(TrackerKind::Wp, 1, true);
    }
}
