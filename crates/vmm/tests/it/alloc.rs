//! Tests of the bare-metal guest's allocator and balloon driver with this VMM's balloon.

use crate::confined::kvm;
use crate::rig::boot_with;
use vmferry_core::PageSet;
use vmferry_guest_abi::{
    AllocSnapshot, GuestArgs, HintMode, InflateBy, Inflation, PAGE_SIZE, ReportMode, State,
};
use vmferry_testkit::{wait, wait_for};
use vmferry_vmm::{BalloonHandle, Captured, SerialSink, Vm, VmHandle, VmOptions};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 256 * MIB;

struct Guest {
    vm: Vm,
    handle: VmHandle,
    serial: Captured,
}

impl Guest {
    fn boot(workload: &str, change: impl FnOnce(&mut GuestArgs)) -> Self {
        let (sink, serial) = SerialSink::capture();
        let mut options = VmOptions::new(MEMORY, 2);
        options.serial = sink;
        let vm = boot_with(options, workload, change);
        Self { handle: vm.handle(), vm, serial }
    }

    fn wait(&self, what: &str, wanted: impl Fn(&AllocSnapshot) -> bool) -> AllocSnapshot {
        wait_for(what, || {
            let now = self.handle.alloc_stats();
            if let Ok(now) = &now
                && wanted(now)
            {
                return Ok(*now);
            }
            assert!(self.handle.exit().is_none(), "{what}: the guest ended: {}", self.serial.text());
            Err(Box::new((now.map(|now| (now.guest, now.cpus().to_vec())), self.serial.text())))
        })
    }

    /// Waits until the guest has written `writes` times more than now.
    fn wait_writes(&self, writes: u64) {
        let count = || self.handle.stats().map(|stats| stats.writes());
        let before = wait_for("the guest's report", count);
        wait("the guest's writes", || count().is_ok_and(|now| now >= before + writes));
    }

    fn verify(&self, request: u64) {
        assert!(self.handle.request_verify(request));
        let stats = wait_for("the guest's check of its memory", || match self.handle.stats() {
            Ok(stats) if stats.verified(request) => Ok(stats),
            _ => Err(self.serial.text()),
        });
        assert_eq!((stats.state, stats.corrupt()), (State::Running, 0), "{}", self.serial.text());
    }

    fn balloon(&self) -> BalloonHandle {
        self.handle.balloon().expect("a balloon")
    }

    fn empty_set(&self) -> PageSet {
        PageSet::empty(self.handle.ram().layout())
    }
}

#[test]
fn freed_memory_is_reported_in_every_mode() {
    if !kvm() {
        return;
    }
    for report in [ReportMode::Sync, ReportMode::Async, ReportMode::Hypercall, ReportMode::Off] {
        for frag in [0, 64] {
            let workload = format!("uniform,ws=4M,rate=1k,alloc=128M,rounds=3,frag={frag}");
            let mut guest = Guest::boot(&workload, |args| args.report = report);
            let reports = report != ReportMode::Off;
            let balloon = guest.balloon();
            let given = || balloon.status().figures.reported_pages * PAGE_SIZE;
            // vCPUs report what they did one after the other, and not when the device counts it.
            let end = guest.wait("rounds", AllocSnapshot::done).newest_us();
            let done = guest.wait("reports", |now| {
                now.guest.t_us > end
                    && (now.guest.unreported_pages == 0) == reports
                    && now.guest.isolated_pages == 0
                    && (!reports || given() == now.sum(|cpu| cpu.report_bytes))
            });
            let case = format!("{report}, frag={frag}: {:?} {:?}", done.guest, done.cpus());
            let dropped = given();
            // A late vCPU may use what the other one has freed, but at least half of the 128 MiB is
            // in use at some time.
            assert!(!reports || dropped >= 60 * MIB, "{case}");
            assert!(reports || dropped == 0, "{case}");
            assert_eq!(done.sum(|cpu| cpu.short_rounds), 0, "{case}");
            guest.verify(1);
            guest.vm.stop();
        }
    }
}

#[test]
fn memory_is_inflated_by_ranges_and_by_page_numbers() {
    if !kvm() {
        return;
    }
    for (by, requests) in
        [(InflateBy::Ranges, 1), (InflateBy::Pages(16_384), 2), (InflateBy::Pages(256), 128)]
    {
        let inflate = Some(Inflation { bytes: 128 * MIB, by });
        let mut guest = Guest::boot("idle,data=8M", |args| args.inflate = inflate);
        let now = guest.wait("inflation", |now| now.guest.inflate_us != 0);
        assert_eq!((now.guest.inflate_pages, now.guest.inflate_requests), (32_768, requests));
        let status = guest.balloon().status();
        assert_eq!(status.figures.inflated_pages, 32_768, "{status:?}");
        guest.verify(1);
        guest.vm.stop();
    }
}

#[test]
fn balloon_follows_its_target() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot("uniform,ws=4M,rate=1k,alloc=16M", |_| {});
    guest.wait("the first report", |now| now.guest.pages != 0);
    for target in [100 * MIB, 250 * MIB, MEMORY] {
        guest.balloon().set_target(target);
        guest.wait("the balloon", |now| now.guest.balloon_pages == (MEMORY - target) / PAGE_SIZE);
    }
    guest.verify(1);
    guest.vm.stop();
}

#[test]
fn memory_that_a_guest_needs_is_taken_back_and_counted() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot("uniform,ws=4M,rate=1k,alloc=128M", |_| {});
    let before = guest.wait("the first round", |now| now.sum(|cpu| cpu.rounds) > 0);
    assert_eq!((before.guest.inflate_short, before.guest.taken_back_pages), (0, 0));
    // The rounds and the balloon together need 320 of 256 MiB.
    guest.balloon().set_target(64 * MIB);
    wait("a request that is not met", || guest.balloon().status().unmet.is_some());
    let now = guest.wait("a shortage", |now| {
        now.guest.inflate_short > 0 && now.guest.taken_back_pages > 0 && now.sum(|cpu| cpu.waits_balloon) > 0
    });
    let counted = guest.balloon().status().figures.taken_back_pages;
    assert!(counted >= now.guest.taken_back_pages, "{counted}: {:?}", now.guest);
    guest.balloon().set_target(MEMORY);
    guest.wait("an empty balloon", |now| now.guest.balloon_pages == 0);
    assert_eq!(guest.balloon().status().unmet, None);
    let counted = guest.balloon().status().figures;
    assert!(counted.deflated_pages > counted.taken_back_pages, "{counted:?}");

    // A question keeps nearly all free pages back, and the next round needs them.
    guest.balloon().request_hints().unwrap();
    guest.wait("a wait for pages that are kept back", |now| {
        now.sum(|cpu| cpu.waits_held) > 0 && now.guest.hint_releases > 0
    });
    guest.balloon().end_hints();
    guest.verify(1);
    guest.vm.stop();
}

/// Waits until all rounds are done and the host has been told of all free memory. The guest
/// publishes its own block and the one of each vCPU at another moment.
fn wait_reported(guest: &Guest) -> AllocSnapshot {
    let done = guest.wait("rounds", AllocSnapshot::done).newest_us();
    guest.wait("reports", |now| now.guest.t_us > done && now.nothing_unreported())
}

#[test]
fn map_contains_the_free_pages() {
    if !kvm() {
        return;
    }
    let workload = "uniform,ws=4M,rate=1k,alloc=32M,rounds=1,frag=2";
    let mut guest = Guest::boot(workload, |args| args.hints = HintMode::Incremental);
    let done = wait_reported(&guest);
    assert!(guest.balloon().keeps_map());
    let mut free = guest.empty_set();
    let count = guest.balloon().read_map(&mut free).unwrap();
    assert_eq!(count, done.guest.free_pages);
    // Half of the allocated memory is kept.
    assert_eq!(done.guest.pages - count, 32 * MIB / PAGE_SIZE / 2);
    guest.verify(1);
    guest.vm.stop();
}

#[test]
fn free_pages_are_hinted_on_demand() {
    if !kvm() {
        return;
    }
    let mut guest = Guest::boot("uniform,ws=4M,rate=1k,alloc=32M,rounds=1,frag=64", |_| {});
    let done = wait_reported(&guest);
    let mut sizes = Vec::new();
    for walk in 1..=3 {
        let command = guest.balloon().request_hints().unwrap();
        let mut hinted = guest.empty_set();
        wait_for("the end of the hints", || {
            let hints = guest.balloon().take_hints(command, &mut hinted).expect("the request");
            if hints.ended { Ok(()) } else { Err(Box::new(guest.handle.alloc_stats().map(|s| s.guest))) }
        });
        let now = guest.wait("the walk", |now| now.guest.hint_walks == walk);
        assert_eq!(u64::from(command), now.guest.hint_id);
        // All free pages but those that are reserved for the guest itself.
        assert!(hinted.count() + now.guest.low_pages + 1024 >= done.guest.free_pages, "{:?}", now.guest);
        assert_eq!(hinted.count(), now.guest.held_pages);
        sizes.push(now.guest.held_pages);
        println!("walk {walk}: {} pages in {} us", hinted.count(), now.guest.hint_last_ns / 1000);
        if walk == 2 {
            guest.balloon().end_hints();
            guest.wait("the end", |now| now.guest.held_pages == 0);
        } else {
            guest.balloon().stop_hints();
            // The guest checks its balloon between writes.
            guest.wait_writes(50);
            assert_eq!(guest.handle.alloc_stats().unwrap().guest.held_pages, hinted.count());
        }
    }
    assert!(sizes.windows(2).all(|pair| pair[0] == pair[1]), "{sizes:?}");
    guest.verify(1);
    guest.vm.stop();
}
