//! Measures the cost of dirty tracking on this host.
//!
//! ```sh
//! cargo run --release -p vmferry-dirty --example cost -- log|ring|wp
//! cargo run --release -p vmferry-dirty --example cost -- trace | grep '^[0-9]' > crates/dirty/src/ring/sim/recorded.txt
//! ```

#[path = "../tests/it/memory.rs"]
#[expect(dead_code, reason = "the tests use the other items")]
mod memory;
#[path = "../tests/it/user_guest.rs"]
#[expect(dead_code, reason = "the tests use the other items")]
mod user_guest;

use kvm_ioctls::Kvm;
use memory::{Kind, Memory, random};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use user_guest::{FIRST, add_slot, guest, running};
use vmferry_baselines::Policy;
use vmferry_bitmap::Bitmap;
use vmferry_core::{DirtyTracker, Gpa, Layout, PageIndex, PageRun, PageSet, Region, RegionId};
use vmferry_dirty::{KvmLogTracker, RingTracker, WpTracker, touched};

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("log") => log(),
        Some("ring") => ring(),
        Some("wp") => wp(),
        Some("trace") => trace(),
        _ => {
            eprintln!("usage: cost log|ring|wp|trace");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Returns a layout of one region with all of `memory`.
fn layout(memory: &Memory) -> Layout {
    Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: memory.pages * 4096 }]).unwrap()
}

fn timed(what: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    what();
    begin.elapsed()
}

/// Measures harvesting and protecting 4 GiB with the dirty log. Takes some seconds.
fn log() {
    let vm = match Kvm::new().and_then(|kvm| kvm.create_vm()) {
        Ok(vm) => Arc::new(vm),
        Err(error) => return eprintln!("not run: /dev/kvm: {error}"),
    };
    let memory = Memory::new(Kind::Huge, 1 << 20);
    let slot = add_slot(&vm, 0, 0, &memory);
    let owner: Arc<dyn AsRawFd + Send + Sync> = vm;
    // SAFETY: the slot was added to this VM and stays.
    let mut tracker = unsafe { KvmLogTracker::new(owner, vec![slot]) }.unwrap();
    let mut set = PageSet::empty(&layout(&memory));
    let full = Bitmap::full(memory.pages);
    println!("4 GiB: start {:?}", timed(|| tracker.start().unwrap()));
    let harvest = timed(|| tracker.harvest(&mut set).unwrap());
    println!("  harvest {harvest:?}, {} pages", set.count());
    let protector = tracker.protector();
    for chunk in [64, 512, 2048, 8192] {
        tracker.stop().unwrap();
        tracker.start().unwrap();
        let (begin, mut worst) = (Instant::now(), Duration::ZERO);
        for first in (0..memory.pages).step_by(chunk) {
            let run = PageRun::new(PageIndex(first), chunk as u64);
            worst = worst.max(timed(|| protector.protect(RegionId(0), run, &full).unwrap()));
        }
        println!("  protect all by {chunk} pages: {:?}, worst {worst:?}", begin.elapsed());
    }
    println!("  stop {:?}", timed(|| tracker.stop().unwrap()));
}

/// Measures the time that a guest of two vCPUs loses under each policy, by sizes of rings and
/// working sets. Takes a minute or two.
fn ring() {
    start_and_stop();
    for (entries, set) in [(4096, 2048), (4096, 4096), (4096, 16384), (65536, 16384), (65536, 131_072)] {
        for policy in Policy::ALL {
            let memory = Memory::new(Kind::Small, FIRST + 2 * set);
            let Some(mut guest) = guest(&memory, entries, 2, set) else { return };
            running(&mut guest, |_| std::thread::sleep(Duration::from_secs(1)));
            let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(policy));
            tracker.start().unwrap();
            let begin = Instant::now();
            let (_, writes) = running(&mut guest, |_| std::thread::sleep(Duration::from_secs(4)));
            let (time, report) = (begin.elapsed().as_secs_f64(), tracker.report());
            let pages: u64 = report.vcpus.iter().map(|vcpu| vcpu.pages).sum();
            println!(
                "  ring {entries}, 2 x {set} pages, {policy:7}: {:8.2} M writes/s, {:6.0} full exits/s, stalled {:5.2} %, \
                 {:7.0} pages/s, {:4.0} looks/s, {:4.0} harvests/s, reaper {:5.2} %",
                writes as f64 / time / 1e6,
                report.full_exits() as f64 / time,
                report.stalled().as_secs_f64() / time * 50.0,
                pages as f64 / time,
                report.reaper.iterations as f64 / time,
                report.reaper.harvests as f64 / time,
                report.reaper.cpu.as_secs_f64() / time * 100.0,
            );
        }
    }
}

/// Measures the time to protect 4 GiB at once, which the dirty log can do in steps.
fn start_and_stop() {
    let memory = Memory::new(Kind::Huge, 1 << 20);
    (0..memory.pages).for_each(|page| memory.write(page, 1));
    let set = 1 << ((memory.pages - FIRST) / 2).ilog2();
    let Some(mut guest) = guest(&memory, 65536, 1, set) else { return };
    running(&mut guest, |_| std::thread::sleep(Duration::from_secs(8)));
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(Policy::Fixed));
    for _ in 0..2 {
        let started = timed(|| tracker.start().unwrap());
        let ((harvest, pages), _) = running(&mut guest, |_| {
            let mut dirty = PageSet::empty(&layout(&memory));
            std::thread::sleep(Duration::from_millis(200));
            (timed(|| tracker.harvest(&mut dirty).unwrap()), dirty.count())
        });
        let stopped = timed(|| tracker.stop().unwrap());
        println!("4 GiB: start {started:?}, harvest of {pages} pages {harvest:?}, stop {stopped:?}");
    }
}

/// Measures write protection of 1 GiB of each kind of memory. Takes some seconds.
fn wp() {
    if let Err(error) = WpTracker::available() {
        return eprintln!("not run: write protection: {error}");
    }
    for kind in [Kind::Small, Kind::Huge, Kind::Memfd] {
        let memory = Memory::new(kind, 1 << 18);
        (0..memory.pages).for_each(|page| memory.write(page, 1));
        let mut tracker = WpTracker::new(vec![memory.region(0)]).unwrap();
        let mut set = PageSet::empty(&layout(&memory));
        println!("{kind:?}, 1 GiB: start {:?}", timed(|| tracker.start().unwrap()));
        println!("  harvest of nothing {:?}", timed(|| tracker.harvest(&mut set).unwrap()));
        let mut seed = 3;
        for name in ["first", "second"] {
            let write = timed(|| {
                (0..20_000).for_each(|_| memory.write(random(&mut seed) % memory.pages, 2));
            });
            let harvest = timed(|| tracker.harvest(&mut set).unwrap());
            println!("  {name} 20000 random writes {write:?}, their harvest {harvest:?}");
        }
        (0..memory.pages).for_each(|page| memory.write(page, 3));
        println!("  harvest of all pages {:?}", timed(|| tracker.harvest(&mut set).unwrap()));
        let mut map = Bitmap::new(memory.pages);
        let run = PageRun::from(0..memory.pages);
        println!("  touched {:?}", timed(|| touched(&memory.region(0), run, &mut map).unwrap()));
        println!("  stop {:?}", timed(|| tracker.stop().unwrap()));
    }
}

/// Prints the pages that each of two vCPUs dirties in every 20 ms, with changing working sets: the
/// input of the simulated reapers.
fn trace() {
    let memory = Memory::new(Kind::Small, FIRST + 2 * 32768);
    let Some(mut guest) = guest(&memory, 65536, 2, 32768) else { return };
    let layout = guest.layout.clone();
    let mut tracker = RingTracker::with_policy(&guest.rings, Arc::new(Policy::Fixed));
    tracker.start().unwrap();
    let mut seen = [0; 2];
    // Working sets of the two vCPUs, in pages. `None`: the vCPUs do not write.
    for sets in [Some([32768, 1024]), Some([4096, 4096]), None, Some([256, 32768]), Some([16384, 64]), None] {
        for (vcpu, set) in guest.vcpus.iter().zip(sets.into_iter().flatten()) {
            let mut regs = vcpu.get_regs().unwrap();
            regs.r8 = set - 1;
            vcpu.set_regs(&regs).unwrap();
        }
        let mut record = |_: &[AtomicU64]| {
            for _ in 0..40 {
                std::thread::sleep(Duration::from_millis(20));
                tracker.harvest(&mut PageSet::empty(&layout)).unwrap();
                let pages: Vec<u64> = tracker.report().vcpus.iter().map(|vcpu| vcpu.pages).collect();
                println!("{} {}", pages[0] - seen[0], pages[1] - seen[1]);
                seen.copy_from_slice(&pages);
            }
        };
        match sets {
            Some(_) => running(&mut guest, record).0,
            None => record(&[]),
        }
    }
}
