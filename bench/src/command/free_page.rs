//! vmferry's side of `vmferry-bench free-page`: guests whose free pages the host learns, and moves
//! that skip these pages.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::{Finished, no_kvm, program};
use crate::free_page::{
    self, AnswerWait, Claim, Drop, FreePageSource, Give, Given, Inflation, LearnSpec, Learned, LowMemory,
    LowSpec, MoveSpec, Moved, Options, OurError, OurRunner, Outcome, Way,
};
use crate::host::available_memory;
use crate::link::Link;
use crate::stalls::Channels;
use crate::warm::Warm;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Pair, Setup};
use vmferry_core::{Gpa, PageSet};
use vmferry_guest_abi::{AllocSnapshot, GuestArgs, HintMode, Inflation as Inflate, ReportMode, StatsSink};
use vmferry_vmm::{BalloonHandle, DropWay, HIGH_RAM_START, Vm, VmHandle, VmOptions};

/// Longest time that a guest may take for one step.
const LIMIT: Duration = Duration::from_secs(120);
/// Interval at which a busy guest's statistics are read.
const POLL: Duration = Duration::from_millis(2);
/// Interval at which new hints are taken.
const HINT_POLL: Duration = Duration::from_micros(200);
/// Time for which an idle guest is left alone before it is asked, so that it is asleep when the
/// question arrives.
const WARM_UP: Duration = Duration::from_millis(50);
/// Memory in bytes that a guest needs beyond what it touches: its image, page tables and reserves.
const BESIDE: u64 = 128 << 20;

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let available = available_memory();
    let mut options = if args.quick { Options::quick(available) } else { Options::full(available) };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("free-page: {what}");
    let Outcome { document, failures } = free_page::run(&options, &mut Ours, &mut progress);
    let (table, page) = (free_page::table(&document), free_page::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

/// Returns the result of `run`, or `Unavailable` if this host has no KVM.
fn on_kvm<T>(run: impl FnOnce() -> Result<T>) -> Result<T, OurError> {
    match no_kvm() {
        Some(why) => Err(OurError::Unavailable(why)),
        None => run().map_err(|error| OurError::Failed(error.into())),
    }
}

impl OurRunner for Ours {
    fn tsc_khz(&mut self) -> Option<u32> {
        Vm::new(VmOptions::new(16 << 20, 1)).ok().map(|vm| vm.tsc_khz())
    }

    fn learn(&mut self, spec: &LearnSpec, way: Way) -> Result<Learned, OurError> {
        on_kvm(|| match way {
            Way::Inflate(by, give) => inflate(spec, Inflate { bytes: spec.inflate, by }, give),
            Way::Hints => request_hints(spec),
            Way::Map => read(spec),
        })
    }

    fn give(&mut self, touched: u64, how: Drop) -> Result<Given, OurError> {
        on_kvm(|| give(touched, how))
    }

    fn migrate(&mut self, spec: &MoveSpec, source: FreePageSource) -> Result<Moved, OurError> {
        on_kvm(|| migrate(spec, source, AnswerWait { ms: 0 }, &Link::Loopback))
    }

    fn migrate_after(&mut self, spec: &MoveSpec, wait: AnswerWait, link: &Link) -> Result<Moved, OurError> {
        on_kvm(|| migrate(spec, FreePageSource::Hints, wait, link))
    }

    fn low(&mut self, spec: &LowSpec, claim: Claim) -> Result<LowMemory, OurError> {
        on_kvm(|| low(spec, claim))
    }
}

/// Guest in this process.
struct Guest {
    vm: Vm,
    handle: VmHandle,
    balloon: BalloonHandle,
}

impl Guest {
    fn boot(memory: u64, workload: &str, how: Drop, set: impl FnOnce(&mut GuestArgs)) -> Result<Self> {
        let mut options = VmOptions::new(memory, 1);
        options.huge_pages = how.huge;
        // The bench is the only reader of the statistics.
        options.stats_every = None;
        options.drop_way = match how.give {
            Give::DontNeed => DropWay::DontNeed,
            Give::Free => DropWay::Free,
            Give::Nothing => DropWay::Nothing,
        };
        let mut vm = Vm::new(options)?;
        let mut args = GuestArgs::new(workload.parse()?);
        (args.stats, args.cpus, args.tsc_khz) = (StatsSink::Page, Some(1), Some(vm.tsc_khz()));
        args.report = ReportMode::Off;
        set(&mut args);
        vm.load_kernel(vmferry_guest_image::ELF, &args.to_string())?;
        vm.start()?;
        let handle = vm.handle();
        let balloon = handle.balloon().context("this VM has no balloon")?;
        Ok(Self { vm, handle, balloon })
    }

    /// Waits until `done` accepts the guest's allocator statistics, and returns them.
    fn wait(&self, what: &str, done: impl Fn(&AllocSnapshot) -> bool) -> Result<AllocSnapshot> {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Ok(now) = self.handle.alloc_stats()
                && done(&now)
            {
                return Ok(now);
            }
            if let Some(exit) = self.handle.exit() {
                bail!("the guest ended before {what}: {exit}");
            }
            if Instant::now() > deadline {
                bail!("{what} did not happen within {LIMIT:?}");
            }
            std::thread::sleep(POLL);
        }
    }

    /// Boots a guest that has nothing to do, and waits until it is idle.
    fn idle(spec: &LearnSpec, hints: HintMode) -> Result<(Self, AllocSnapshot)> {
        let guest = Self::boot(spec.memory, "idle,data=4K", USUAL, |args| args.hints = hints)?;
        guest.wait("its first report", |now| now.guest.free_pages > 0)?;
        std::thread::sleep(WARM_UP);
        let now = guest.wait("its next report", |_| true)?;
        Ok((guest, now))
    }

    fn no_pages(&self) -> PageSet {
        PageSet::empty(self.vm.ram().layout())
    }

    /// Returns how many of `pages` lie above the MMIO hole.
    fn high(&self, pages: &PageSet) -> u64 {
        let regions = self.vm.ram().layout().regions().iter();
        let high = regions.filter(|region| region.gpa >= Gpa(HIGH_RAM_START));
        high.filter_map(|region| pages.region(region.id)).map(|map| map.count()).sum()
    }

    /// Compares the pages that were learned with those that the guest counted as free, less the
    /// `kept` ones.
    ///
    /// # Errors
    ///
    /// Fails if the counts differ by more than 1 percent.
    fn learned(
        &self,
        total: Duration,
        pages: &PageSet,
        before: &AllocSnapshot,
        kept: u64,
    ) -> Result<Learned> {
        let (count, free) = (pages.count(), before.guest.free_pages);
        if (count + kept).abs_diff(free) > free / 100 {
            bail!("the guest has {free} free pages, and named {count}");
        }
        let high_pages = Some(self.high(pages));
        Ok(Learned { total, pages: count, high_pages, free_pages: free, ..Learned::default() })
    }
}

/// Settings of a VM with the default options.
const USUAL: Drop = Drop { give: Give::DontNeed, huge: true };

fn inflate(spec: &LearnSpec, inflate: Inflate, give: Give) -> Result<Learned> {
    let how = Drop { give, ..USUAL };
    let guest = Guest::boot(spec.memory, "idle,data=4K", how, |args| args.inflate = Some(inflate))?;
    let after = guest.wait("the end of the inflation", |now| now.guest.inflate_us != 0)?.guest;
    let wanted = inflate.bytes / 4096;
    let figures = guest.balloon.status().figures;
    if (after.inflate_pages, figures.inflated_pages) != (wanted, wanted) {
        bail!(
            "the guest gave {} of {wanted} pages, and {} arrived",
            after.inflate_pages,
            figures.inflated_pages
        );
    }
    let ns = Duration::from_nanos;
    let parts = Inflation {
        requests: after.inflate_requests,
        alloc: ns(after.inflate_alloc_ns),
        send: ns(after.inflate_send_ns),
        host: Some(ns(figures.inflate_ns)),
        madvise: Some(ns(figures.drop_ns)),
    };
    Ok(Learned {
        total: ns(after.inflate_ns),
        pages: wanted,
        free_pages: after.free_pages + wanted,
        inflation: Some(parts),
        ..Learned::default()
    })
}

/// Asks for hints on demand, and measures from the question to the last hint.
fn request_hints(spec: &LearnSpec) -> Result<Learned> {
    let (guest, before) = Guest::idle(spec, HintMode::Demand)?;
    let start = Instant::now();
    let mut pages = guest.no_pages();
    let question = guest.balloon.request_hints()?;
    loop {
        let hints = guest.balloon.take_hints(question, &mut pages).context("the question was closed")?;
        if hints.ended {
            break;
        }
        if start.elapsed() > LIMIT {
            bail!("the hints did not end within {LIMIT:?}");
        }
        std::thread::sleep(HINT_POLL);
    }
    let total = start.elapsed();
    guest.balloon.end_hints();
    // The guest isolates the pages that it names, and keeps some for itself.
    let learned = guest.learned(total, &pages, &before, before.guest.low_pages)?;
    let walk = guest.wait("its report of the walk", |now| now.guest.hint_walks > 0)?.guest.hint_last_ns;
    Ok(Learned { walk: Some(Duration::from_nanos(walk)), ..learned })
}

/// Reads the map of free pages, and measures from the request to a complete set of pages.
fn read(spec: &LearnSpec) -> Result<Learned> {
    let (guest, before) = Guest::idle(spec, HintMode::Incremental)?;
    let start = Instant::now();
    let mut pages = guest.no_pages();
    guest.balloon.read_map(&mut pages)?;
    let total = start.elapsed();
    guest.learned(total, &pages, &before, 0)
}

fn give(touched: u64, how: Drop) -> Result<Given> {
    let memory = (touched / 8 * 9 + BESIDE).next_multiple_of(2 << 20);
    let workload = format!("idle,data=4K,alloc={touched},rounds=1");
    let guest = Guest::boot(memory, &workload, how, |_| {})?;
    guest.wait("the end of its allocations", AllocSnapshot::done)?;
    let pages = touched / 4096;
    let before = resident()?;
    guest.balloon.set_target(memory - touched);
    guest.wait("the inflation", |now| now.guest.balloon_pages == pages)?;
    let figures = guest.balloon.status().figures;
    let returned = before.saturating_sub(resident()?);
    Ok(Given { pages, madvise: Duration::from_nanos(figures.drop_ns), returned })
}

/// Returns the resident memory of this process in bytes, without lazily freed pages.
fn resident() -> Result<u64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let field = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    // Pages that were dropped with MADV_FREE stay resident until the host needs them, but the guest
    // no longer has them.
    let (rss, free) = (field("Rss:").context("no Rss")?, field("LazyFree:").unwrap_or(0));
    Ok((rss - free.min(rss)) << 10)
}

fn migrate(spec: &MoveSpec, source: FreePageSource, wait: AnswerWait, link: &Link) -> Result<Moved> {
    let stop = AtomicBool::new(false);
    let hints = match source {
        FreePageSource::Off => "off",
        FreePageSource::Hints => "demand",
        FreePageSource::Map => "incremental",
    };
    let setup = Setup {
        // Free page reporting is off, so that the guest keeps all memory that it ever touched.
        guest_args: format!("report=off hints={hints}"),
        environment: link,
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload())
    };
    let mut pair = Pair::start(&setup, &stop)?;
    let freed = freed(&mut pair)?;
    let warm = Warm::hold(spec.memory);
    std::thread::sleep(WARM_UP);
    let free_pages = match (source, wait.ms) {
        (FreePageSource::Off, _) => "off".into(),
        (_, 0) => "on".into(),
        (_, ms) => format!("wait={ms}"),
    };
    let request = MigrateRequest {
        channels: Channels::Count(1),
        timeout_ms: Some(120_000),
        free_pages,
        insecure: true,
        ..MigrateRequest::to(&pair.uri)
    };
    drop(warm);
    pair.migrate(&request)?;
    let report = super::quietly(&mut pair.source)?;
    check(&mut pair, &stop)?;
    let time = |value: &Value| value.as_f64().map(|ms| Duration::from_secs_f64(ms / 1e3));
    let skipped = report["bytes"]["free_pages_skipped"].as_u64();
    if source != FreePageSource::Off && skipped == Some(0) {
        bail!("no page was skipped: {}", report["free_pages"]);
    }
    let mut result = super::postcopy::result(&report)?;
    result.passes = report["passes"].as_array().map(|passes| passes.len() as u64);
    let free = &report["free_pages"];
    Ok(Moved {
        result,
        first_page: time(&report["setup_ms"]),
        skipped_pages: skipped,
        freed,
        waited: time(&free["waited_ms"]),
        first_answer: time(&free["first_answer_ms"]),
    })
}

/// Time for which the guest keeps named pages back before the host asks again.
const HELD: Duration = Duration::from_millis(20);

/// Runs a guest that is short of memory. `claim` lasts from its boot to the end of its rounds.
fn low(spec: &LowSpec, claim: Claim) -> Result<LowMemory> {
    let guest = Guest::boot(spec.memory, &spec.workload(), USUAL, |args| {
        args.hints = if claim == Claim::Question { HintMode::Demand } else { HintMode::Off };
        args.report = if claim == Claim::Reports { ReportMode::Sync } else { ReportMode::Off };
    })?;
    match claim {
        Claim::None | Claim::Reports => {}
        Claim::Balloon => guest.balloon.set_target(spec.memory / 2),
        Claim::Question => {
            guest.wait("its driver", |_| guest.balloon.gives_hints())?;
            let limit = Instant::now() + LIMIT;
            while !guest.handle.alloc_stats().is_ok_and(|now| now.done()) && Instant::now() < limit {
                guest.balloon.request_hints()?;
                std::thread::sleep(HELD);
            }
            guest.balloon.end_hints();
        }
    }
    let now = guest.wait("the end of its rounds", AllocSnapshot::done)?;
    let corrupt = guest.handle.stats()?.corrupt();
    if corrupt > 0 {
        bail!("the guest found {corrupt} damaged pages");
    }
    let ns = Duration::from_nanos;
    Ok(LowMemory {
        work: ns(now.sum(|cpu| cpu.alloc_ns + cpu.touch_ns + cpu.check_ns + cpu.free_ns)),
        waits_reported: now.sum(|cpu| cpu.waits_reported),
        waits_held: now.sum(|cpu| cpu.waits_held),
        waits_balloon: now.sum(|cpu| cpu.waits_balloon),
        wait: ns(now.sum(|cpu| cpu.wait_ns)),
        wait_max: ns(now.cpus().iter().map(|cpu| cpu.wait_max_ns).max().unwrap_or(0)),
        failed: now.sum(|cpu| cpu.failed),
        failed_held: now.sum(|cpu| cpu.failed_held),
        short_rounds: now.sum(|cpu| cpu.short_rounds),
        inflate_short: now.guest.inflate_short,
        taken_back_pages: guest.balloon.status().figures.taken_back_pages,
        hint_releases: now.guest.hint_releases,
        missed: now.sum(|cpu| cpu.missed),
        hint_full: now.guest.hint_full,
        deferred: now.sum(|cpu| cpu.deferred),
    })
}

/// Waits until the guest has freed what it allocates, and returns the freed bytes.
fn freed(pair: &mut Pair) -> Result<u64> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let alloc = pair.source.client.call("alloc", json!({}))?;
        if alloc["done"] == true {
            let vcpus = alloc["vcpus"].as_array().into_iter().flatten();
            return Ok(vcpus.filter_map(|vcpu| vcpu["freed_bytes"].as_u64()).sum());
        }
        if Instant::now() > deadline {
            bail!("the guest did not free its memory within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Asks the guest at the target to verify all pages that it uses.
///
/// # Errors
///
/// Fails if the guest finds a damaged page.
fn check(pair: &mut Pair, stop: &AtomicBool) -> Result<()> {
    pair.target.client.call("verify-guest", json!({ "request": 1 }))?;
    let after = pair.target.wait("the guest checking its pages", LIMIT, stop, |status| {
        let guest = &status["vm"]["guest"];
        (guest["verify_done"].as_u64()? == 1 || guest["corrupt"].as_u64()? > 0).then(|| guest.clone())
    })?;
    if after["corrupt"].as_u64() != Some(0) {
        bail!("the guest found damaged pages after the move: {after}");
    }
    Ok(())
}
