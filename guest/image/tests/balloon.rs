//! Tests of the guest's allocator and balloon driver with QEMU's balloon, as an independent
//! implementation.

mod rig;

use rig::{Guest, PATIENCE, accelerators, wait_for};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use vmferry_guest_abi::{
    ALLOC_STATS_GPA, AllocSnapshot, GuestArgs, HintMode, InflateBy, Inflation, Line, PAGE_SIZE, ReportMode,
    State, StatsSink,
};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 192 * MIB;
const ALLOC: u64 = 96 * MIB;

fn args(workload: &str) -> GuestArgs {
    // A microvm has no speaker port to measure the clock by. The clock does not matter in these
    // tests.
    let tsc_khz = Some(2_000_000);
    GuestArgs { stats: StatsSink::Page, tsc_khz, ..GuestArgs::new(workload.parse().unwrap()) }
}

fn boot(accelerator: &str, args: &GuestArgs) -> Guest {
    let machine = [
        "-machine",
        "microvm,pit=on,pic=on,rtc=on,memory-backend=ram",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-object",
        "iothread,id=io",
        "-device",
        "virtio-balloon-device,id=balloon,free-page-reporting=on,free-page-hint=on,iothread=io",
    ];
    Guest::boot(accelerator, args, MEMORY, &machine)
}

fn snapshot(guest: &Guest) -> AllocSnapshot {
    let load = |word: usize| {
        let mut bytes = [0; 8];
        guest.memory.read_exact_at(&mut bytes, ALLOC_STATS_GPA + 8 * word as u64).unwrap();
        u64::from_le_bytes(bytes)
    };
    wait_for("statistics", || AllocSnapshot::read(load))
}

fn wait(guest: &Guest, what: &str, done: impl Fn(&AllocSnapshot) -> bool) -> AllocSnapshot {
    wait_for(what, || {
        let now = snapshot(guest);
        if done(&now) { Ok(now) } else { Err(Box::new((now.guest, now.cpus().to_vec()))) }
    })
}

/// Waits until all rounds are done and the host has been told of all free memory. The returned
/// statistics of each vCPU contain all reports: the guest publishes each block at another moment.
fn wait_reported(guest: &Guest) -> AllocSnapshot {
    let done = wait(guest, "rounds", AllocSnapshot::done).newest_us();
    let reported = wait(guest, "reports", |now| now.guest.t_us > done && now.nothing_unreported()).guest.t_us;
    wait(guest, "statistics of all vCPUs", |now| now.cpus().iter().all(|cpu| cpu.t_us >= reported))
}

/// Returns the size of the memory that the host backs, in bytes.
fn resident(guest: &Guest) -> u64 {
    guest.memory.metadata().unwrap().blocks() * 512
}

/// Returns the memory that the host backs for a guest that has allocated nothing: image, tables,
/// and remains of the firmware.
fn base(accelerator: &str) -> u64 {
    let guest = boot(accelerator, &args("idle,data=4K"));
    wait(&guest, "the first report", |now| now.guest.pages != 0);
    resident(&guest)
}

/// Returns the size of the free memory that the host still backs, in bytes.
fn residue(guest: &Guest, now: &AllocSnapshot, base: u64) -> u64 {
    resident(guest).saturating_sub(base + (now.guest.pages - now.guest.free_pages) * PAGE_SIZE)
}

#[test]
fn freed_memory_goes_back_to_the_host() {
    for accelerator in accelerators() {
        let base = base(accelerator);
        for (report, frag) in
            [(ReportMode::Sync, 0), (ReportMode::Sync, 64), (ReportMode::Async, 0), (ReportMode::Async, 64)]
        {
            let workload = format!("idle,alloc={}M,rounds=2,frag={frag}", ALLOC / MIB);
            let guest = boot(accelerator, &GuestArgs { report, ..args(&workload) });
            let done = wait_reported(&guest);
            let case = format!("{accelerator}, {report}, frag={frag}: {:?}", done.guest);
            let kept = 2 * ALLOC.checked_div(frag).unwrap_or(0);
            let freed = done.sum(|cpu| cpu.freed_bytes);
            let told = done.sum(|cpu| cpu.report_bytes);
            // A late vCPU may use what the other one has freed, but at least half of the memory is
            // in use at some time.
            assert!(freed >= 2 * ALLOC - kept && told >= ALLOC / 2 - kept, "{case}: {freed} {told}");
            let left = residue(&guest, &done, base);
            assert!(left * 100 <= ALLOC, "{case}: {left} bytes left");
            // With `sync`, each vCPU reports what it notices to be free, and that contains what the
            // other one has freed next to it. So one vCPU may report all large blocks. The first
            // vCPU reports what is left over. With `async`, only the last one reports.
            let [first, last] = [0, 1].map(|cpu| done.cpus()[cpu].reports);
            let expected = match report {
                ReportMode::Sync => first > 0 || last > 0 && frag == 0,
                _ => first == 0 && last > 0,
            };
            assert!(expected, "{case}: {first} {last} reports");
            let stats = guest.verify(1);
            assert_eq!((stats.state, stats.corrupt()), (State::Running, 0), "{case}");
        }
    }
}

#[test]
fn freed_memory_stays_backed_without_reports() {
    for accelerator in accelerators() {
        let workload = format!("idle,alloc={}M,rounds=1", ALLOC / MIB);
        let guest = boot(accelerator, &GuestArgs { report: ReportMode::Off, ..args(&workload) });
        let done = wait(&guest, "rounds", AllocSnapshot::done);
        // A vCPU that runs after the other one uses what that one has freed. Half of it is left
        // then, except for what the guest still uses. With reports hardly anything is left.
        assert!(residue(&guest, &done, 0) * 100 > 25 * ALLOC, "{}", residue(&guest, &done, 0));
        assert_eq!(done.sum(|cpu| cpu.reports), 0);
    }
}

#[test]
fn page_that_the_host_loses_is_detected() {
    for accelerator in accelerators() {
        let guest = boot(accelerator, &args("idle,alloc=8M,rounds=1,frag=2"));
        wait_reported(&guest);
        let stamp = |address: &u64| {
            let address = *address;
            let page = guest.page(address);
            let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
            word(0) == address / PAGE_SIZE && word(8) != 0
        };
        // Once the host has dropped the others, only the kept pages, one in two, still have their
        // number in the first word. The guest's reports do not show when this is the case, because
        // they are of several moments.
        let kept = wait_for("only kept pages", || {
            let stamped: Vec<_> = (MIB..MEMORY).step_by(4096).filter(stamp).collect();
            if stamped.len() as u64 == 8 * MIB / PAGE_SIZE / 2 { Ok(stamped[0]) } else { Err(stamped.len()) }
        });
        assert_eq!(guest.verify(1).corrupt(), 0);
        guest.memory.write_all_at(&[0; 4096], kept).unwrap();
        let stats = guest.verify(2);
        assert_eq!((stats.state, stats.corrupt()), (State::Corrupt, 1), "{accelerator}");
        let found = stats.first_corrupt().unwrap().page;
        assert_eq!(found, vmferry_guest_abi::ALLOC_PAGE + kept / PAGE_SIZE);
    }
}

#[test]
fn memory_is_inflated_by_page_numbers() {
    for accelerator in accelerators() {
        for (pages, requests) in [(256, 64), (16_384, 1)] {
            let inflate = Some(Inflation { bytes: 64 * MIB, by: InflateBy::Pages(pages) });
            let guest = boot(accelerator, &GuestArgs { inflate, ..args("idle,data=8M") });
            let line = guest.until(|line| match line {
                Line::Inflated { pages, requests, .. } => Some((pages, requests)),
                _ => None,
            });
            assert_eq!(line, (16_384, requests), "{accelerator}");
            let now = wait(&guest, "inflation", |now| now.guest.inflate_us != 0);
            assert_eq!((now.guest.inflate_pages, now.guest.balloon_pages), (16_384, 16_384));
            assert!(now.guest.inflate_send_ns + now.guest.inflate_alloc_ns <= now.guest.inflate_ns);
            // The memory stays in the balloon although the host has not requested it, while the
            // guest checks all of its memory.
            assert_eq!(guest.verify(1).corrupt(), 0);
            assert_eq!(snapshot(&guest).guest.balloon_pages, 16_384);
        }
    }
}

/// Connection to QEMU's monitor.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn new(guest: &Guest) -> Self {
        let stream = UnixStream::connect(guest.folder.path().join("qmp")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut monitor = Self(BufReader::new(stream));
        monitor.execute(r#"{"execute": "qmp_capabilities"}"#);
        monitor
    }

    fn execute(&mut self, command: &str) -> String {
        self.0.get_mut().write_all(command.as_bytes()).unwrap();
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() != 0, "the monitor has closed the connection");
            assert!(!line.starts_with(r#"{"error""#), "{command}: {line}");
            if line.starts_with(r#"{"return""#) {
                return line;
            }
        }
    }
}

#[test]
fn balloon_follows_the_hosts_target() {
    for accelerator in accelerators() {
        let guest = boot(accelerator, &args("uniform,ws=4M,rate=1k,alloc=16M"));
        let mut monitor = Monitor::new(&guest);
        for target in [MEMORY - 100 * MIB, MEMORY - 10 * MIB] {
            monitor.execute(&format!(r#"{{"execute": "balloon", "arguments": {{"value": {target}}}}}"#));
            let pages = (MEMORY - target) / PAGE_SIZE;
            wait(&guest, "inflation", |now| now.guest.balloon_pages == pages);
            rig::wait("what QEMU is told", || {
                monitor.execute(r#"{"execute": "query-balloon"}"#).contains(&target.to_string())
            });
        }
        assert_eq!(guest.verify(1).corrupt(), 0, "{accelerator}");
    }
}

#[test]
fn free_pages_are_hinted_during_a_migration() {
    for accelerator in accelerators() {
        for (workload, hints) in [
            ("idle,data=4M", HintMode::Demand),
            ("uniform,ws=4M,rate=1k,alloc=100M", HintMode::Demand),
            ("idle,data=4M", HintMode::Off),
        ] {
            let guest = boot(accelerator, &GuestArgs { hints, ..args(workload) });
            wait(&guest, "the first report", |now| now.guest.pages != 0);
            let mut monitor = Monitor::new(&guest);
            // So slow that the migration does not end before a starved host has let the guest name
            // its free pages.
            monitor
                .execute(r#"{"execute": "migrate-set-parameters", "arguments": {"max-bandwidth": 65536}}"#);
            monitor.execute(r#"{"execute": "migrate", "arguments": {"uri": "exec:cat > /dev/null"}}"#);
            if hints == HintMode::Demand {
                wait(&guest, "hints", |now| now.guest.hint_bytes > 50 * MIB && now.guest.hint_id > 1);
            }
            // A guest that allocates as fast as it can may dirty more than QEMU sends by itself.
            // The migration only has to end; its speed does not matter.
            let quick = r#"{"max-bandwidth": 1073741824, "downtime-limit": 20000}"#;
            monitor.execute(&format!(r#"{{"execute": "migrate-set-parameters", "arguments": {quick}}}"#));
            rig::wait("the end of the migration", || {
                monitor.execute(r#"{"execute": "query-migrate"}"#).contains(r#""status": "completed""#)
            });
            // QEMU reports the end before it lets the guest continue.
            rig::wait("the state after a migration", || {
                monitor.execute(r#"{"execute": "query-status"}"#).contains(r#""status": "postmigrate""#)
            });
            // The guest has not really moved: it continues, and all memory is present.
            monitor.execute(r#"{"execute": "cont"}"#);
            let now = wait(&guest, "the end of the hints", |now| now.guest.held_pages == 0);
            let told = now.guest.hint_bytes;
            let case = format!("{accelerator}, {workload}: {:?}", now.guest);
            if hints == HintMode::Demand {
                assert!(told > 50 * MIB && now.guest.hint_id > 1, "{case}");
            } else {
                assert_eq!((told, now.guest.hint_id), (0, 0), "{case}");
            }
            assert_eq!(guest.verify(1).corrupt(), 0, "{accelerator}, {workload}");
        }
    }
}
