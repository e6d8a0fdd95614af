//! Boots the guest under QEMU, without and with KVM, and takes pages away from it.
//!
//! Guest memory is a file that QEMU maps shared, so the test sees and changes it as a migration would. 24 of its 64 MiB lie
//! below 4 GiB, so that both of the guest's ways to map memory are used, without gigabytes.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmferry_guest_abi::{
    Fill, GuestArgs, Line, PAGE_WORDS, ReadyLine, STATS_GPA, State, StatsSink, StatsSnapshot, offset,
};
use vmferry_guest_image::ELF;

const MEMORY: u64 = 64 << 20;
const CPUS: u64 = 2;

/// For anything that a guest does: emulated CPUs on a busy machine are slow.
const PATIENCE: Duration = Duration::from_secs(60);

struct Guest {
    qemu: Child,
    lines: Receiver<String>,
    memory: File,
    ready: ReadyLine,
    folder: TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is gone afterwards.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Says something that `cargo test` shows even when the test passes: what is written to the handle itself is not captured.
fn say(what: &str) {
    std::io::stdout().write_all(format!("{what}\n").as_bytes()).unwrap();
}

/// The accelerators that this host has, and a word on each that it has not.
fn accelerators() -> Vec<&'static str> {
    if let Err(error) = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status() {
        say(&format!("QEMU: not run: qemu-system-x86_64: {error}"));
        say("KVM: not run: there is no QEMU to boot the guest with");
        return Vec::new();
    }
    say("QEMU: ran");
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => {
            say("KVM: ran");
            vec!["tcg", "kvm"]
        }
        Err(error) => {
            say(&format!("KVM: not run: /dev/kvm: {error}"));
            vec!["tcg"]
        }
    }
}

impl Guest {
    /// Boots the guest and waits until its memory is filled.
    fn boot(accelerator: &str, workload: &str, stats: StatsSink) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (elf, memory) = (folder.path().join("guest.elf"), folder.path().join("memory"));
        std::fs::write(&elf, ELF).unwrap();
        let args = GuestArgs {
            stats,
            cpus: Some(u32::try_from(CPUS).unwrap()),
            ..GuestArgs::new(workload.parse().unwrap())
        };
        let mut qemu = Command::new("qemu-system-x86_64")
            // Some hosts' KVM offers IA32_ARCH_CAPABILITIES and then refuses to set it, at which QEMU aborts.
            .args(["-accel", accelerator, "-cpu"])
            .arg(if accelerator == "kvm" { "host,-arch-capabilities" } else { "qemu64" })
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"])
            .args([
                "-smp",
                &CPUS.to_string(),
                "-m",
                "64M",
                "-machine",
                "pc,memory-backend=ram,max-ram-below-4g=24M",
            ])
            .arg("-object")
            .arg(format!("memory-backend-file,id=ram,size={MEMORY},share=on,mem-path={}", memory.display()))
            .arg("-kernel")
            .arg(elf)
            .args(["-append", &args.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(folder.path().join("qemu.log")).unwrap())
            .spawn()
            .unwrap();
        let output = BufReader::new(qemu.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        let open = || OpenOptions::new().read(true).write(true).open(&memory);
        let start = Instant::now();
        let memory = loop {
            match open() {
                Ok(file) => break file,
                Err(error) => assert!(start.elapsed() < PATIENCE, "QEMU made no memory file: {error}"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        let mut guest = Self { qemu, lines, memory, ready: ReadyLine::default(), folder };
        guest.ready = guest.until(|line| if let Line::Ready(ready) = line { Some(ready) } else { None });
        assert_eq!(guest.ready.cpus, CPUS);
        guest
    }

    /// Reads lines until one of them gives a result. Lines of firmware are skipped, and nobody panics.
    fn until<T>(&self, mut wanted: impl FnMut(Line) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            let left = PATIENCE.saturating_sub(start.elapsed());
            let text = self.lines.recv_timeout(left).unwrap_or_else(|error| {
                let log = std::fs::read_to_string(self.folder.path().join("qemu.log"));
                panic!("the line that was waited for did not come: {error}; QEMU says {log:?}")
            });
            let Ok(line) = text.parse() else { continue };
            assert!(!matches!(line, Line::Panic(_)), "{text}");
            if let Some(result) = wanted(line) {
                return result;
            }
        }
    }

    fn page(&self, address: u64) -> [u8; 4096] {
        let mut page = [0; 4096];
        self.memory.read_exact_at(&mut page, address).unwrap();
        page
    }

    /// Where page `page` of a workload with random content lies, recognised by the content that nobody writes to.
    fn find(&self, page: u64) -> u64 {
        let content: Vec<u8> =
            (2..PAGE_WORDS).flat_map(|word| Fill::Random.word(page, word).to_le_bytes()).collect();
        (0..MEMORY)
            .step_by(4096)
            .find(|address| self.page(*address)[16..] == content[..])
            .unwrap_or_else(|| panic!("page {page} is nowhere in memory"))
    }

    fn stats(&self) -> StatsSnapshot {
        let load = |word: usize| {
            let mut bytes = [0; 8];
            self.memory.read_exact_at(&mut bytes, STATS_GPA + 8 * word as u64).unwrap();
            u64::from_le_bytes(bytes)
        };
        // A vCPU that the host has stopped in the middle of an update is read again.
        let start = Instant::now();
        loop {
            match StatsSnapshot::read(load) {
                Ok(stats) => return stats,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has the guest check all its memory; what it then reports.
    fn verify(&self, request: u64) -> StatsSnapshot {
        self.memory
            .write_all_at(&request.to_le_bytes(), STATS_GPA + 8 * offset::VERIFY_REQUEST as u64)
            .unwrap();
        let start = Instant::now();
        loop {
            let stats = self.stats();
            if stats.verified(request) {
                return stats;
            }
            assert!(start.elapsed() < PATIENCE, "the guest did not check its memory: {stats:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn busy_and_idle_workloads_run_on_every_vcpu() {
    for accelerator in accelerators() {
        for workload in ["zipf:0.99,ws=8M,data=16M,rate=10k,fill=mix:30", "idle,data=16M"] {
            let guest = Guest::boot(accelerator, workload, StatsSink::Serial);
            let mut seen = [0; 2];
            guest.until(|line| match line {
                Line::Corrupt { .. } => panic!("{accelerator}: {line}"),
                Line::Stats { cpu, writes, .. } => {
                    assert_eq!(writes == 0, workload.starts_with("idle"), "{accelerator}: {line}");
                    seen[usize::try_from(cpu).unwrap()] += 1;
                    seen.iter().all(|lines| *lines >= 2).then_some(())
                }
                _ => None,
            });
        }
    }
}

#[test]
fn the_statistics_page_is_where_it_should_be() {
    for accelerator in accelerators() {
        let guest = Guest::boot(accelerator, "sequential,ws=8M,data=16M,rate=10k", StatsSink::Page);
        let (first, second) = (guest.verify(1), guest.verify(2));
        assert_eq!((first.state, first.data_pages, first.ws_pages), (State::Running, 4096, 2048));
        assert_eq!((first.cpus().len(), second.corrupt()), (2, 0));
        assert_eq!(first.ready_us, guest.ready.t_us);
        for (first, second) in first.cpus().iter().zip(second.cpus()) {
            assert!(
                second.t_us > first.t_us && second.reports > first.reports && second.writes > first.writes
            );
            assert!(second.sweeps >= 1 && second.checks >= first.checks + 2048, "{first:?} {second:?}");
        }
    }
}

#[test]
fn a_lost_page_is_found_by_the_guest_itself() {
    for accelerator in accelerators() {
        // One page of the working set and one that was only filled, one of each vCPU, below and above 4 GiB.
        for (workload, page) in [("uniform,ws=8M,data=16M,rate=10k", 7), ("idle,data=48M", 12_000)] {
            let guest = Guest::boot(accelerator, workload, StatsSink::Serial);
            guest.memory.write_all_at(&[0; 4096], guest.find(page)).unwrap();
            let found = guest.until(|line| match line {
                Line::Corrupt { corrupt, .. } => Some(corrupt),
                _ => None,
            });
            assert_eq!(found.page, page, "{accelerator}, {workload}");
            assert_eq!(guest.stats().state, State::Corrupt);
        }
    }
}

#[test]
fn an_old_version_of_a_page_is_found_by_the_guest_itself() {
    for accelerator in accelerators() {
        let guest = Guest::boot(accelerator, "uniform,ws=256K,data=8M,rate=10k", StatsSink::Page);
        let address = guest.find(3);
        let old = guest.page(address);
        let writes = guest.stats().writes();
        let start = Instant::now();
        // Every page of the working set is written about 30 times.
        while guest.stats().writes() < writes + 2000 {
            assert!(start.elapsed() < PATIENCE, "the guest does not write");
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(guest.verify(1).corrupt(), 0);
        guest.memory.write_all_at(&old, address).unwrap();
        let stats = guest.verify(2);
        assert_eq!(stats.state, State::Corrupt, "{accelerator}");
        assert_eq!(stats.first_corrupt().map(|corrupt| corrupt.page), Some(3), "{accelerator}");
    }
}
