//! Guest under QEMU whose memory is a file that QEMU maps shared. A test reads and changes it as a
//! migration would.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::allow_attributes,
    reason = "each test uses a part"
)]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Instant;
use tempfile::TempDir;
use vmferry_guest_abi::{Fill, GuestArgs, Line, PAGE_WORDS, ReadyLine, STATS_GPA, StatsSnapshot, offset};
use vmferry_guest_image::ELF;
use vmferry_testkit::{Need, skip};
pub use vmferry_testkit::{PATIENCE, wait, wait_for};

pub const CPUS: u64 = 2;

pub struct Guest {
    qemu: Child,
    lines: Receiver<String>,
    pub memory: File,
    bytes: u64,
    pub ready: ReadyLine,
    pub folder: TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // QEMU may have ended by itself. In any case it is gone afterwards.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Returns the accelerators of this host. The calling test is skipped for each that is missing.
pub fn accelerators() -> Vec<&'static str> {
    if let Err(error) = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status() {
        skip(Need::Qemu, format!("qemu-system-x86_64: {error}"));
        return Vec::new();
    }
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => vec!["tcg", "kvm"],
        Err(error) => {
            skip(Need::Kvm, format!("/dev/kvm: {error}"));
            vec!["tcg"]
        }
    }
}

impl Guest {
    /// Boots the guest in `bytes` bytes of memory and waits until its share of it is filled.
    /// `machine` gives the remaining options of QEMU, which must use the memory backend `ram`.
    pub fn boot(accelerator: &str, args: &GuestArgs, bytes: u64, machine: &[&str]) -> Self {
        // In memory, if possible: file systems on disks free punched-out ranges only after some
        // time.
        let place = Path::new("/dev/shm");
        let folder = tempfile::tempdir_in(place);
        let folder = folder.or_else(|_| tempfile::tempdir()).unwrap();
        let (elf, memory) = (folder.path().join("guest.elf"), folder.path().join("memory"));
        std::fs::write(&elf, ELF).unwrap();
        let args = GuestArgs { cpus: Some(u32::try_from(CPUS).unwrap()), ..*args };
        let mut qemu = Command::new("qemu-system-x86_64")
            // Some hosts' KVM offers IA32_ARCH_CAPABILITIES and then refuses to set it, at which
            // QEMU aborts.
            .args(["-accel", accelerator, "-cpu"])
            .arg(if accelerator == "kvm" { "host,-arch-capabilities" } else { "qemu64" })
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"])
            .args(["-smp", &CPUS.to_string(), "-m", &format!("{}M", bytes >> 20)])
            .arg("-object")
            .arg(format!("memory-backend-file,id=ram,size={bytes},share=on,mem-path={}", memory.display()))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", folder.path().join("qmp").display()))
            .arg("-kernel")
            .arg(elf)
            .args(["-append", &args.to_string()])
            .args(machine)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(folder.path().join("qemu.log")).unwrap())
            .spawn()
            .unwrap();
        let output = BufReader::new(qemu.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        let open = || OpenOptions::new().read(true).write(true).open(&memory);
        let memory = wait_for("QEMU's memory file", open);
        let mut guest = Self { qemu, lines, memory, bytes, ready: ReadyLine::default(), folder };
        guest.ready = guest.until(|line| if let Line::Ready(ready) = line { Some(ready) } else { None });
        assert_eq!(guest.ready.cpus, CPUS);
        guest
    }

    /// Reads lines until one of them gives a result. Lines of firmware are skipped. A panic of the
    /// guest fails the test.
    pub fn until<T>(&self, mut wanted: impl FnMut(Line) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            let left = PATIENCE.saturating_sub(start.elapsed());
            let text = self.lines.recv_timeout(left).unwrap_or_else(|error| {
                let log = std::fs::read_to_string(self.folder.path().join("qemu.log"));
                panic!("the expected line did not arrive: {error}; output of QEMU: {log:?}")
            });
            let Ok(line) = text.parse() else { continue };
            assert!(!matches!(line, Line::Panic(_)), "{text}");
            if let Some(result) = wanted(line) {
                return result;
            }
        }
    }

    pub fn page(&self, address: u64) -> [u8; 4096] {
        let mut page = [0; 4096];
        self.memory.read_exact_at(&mut page, address).unwrap();
        page
    }

    /// Returns the address of page `page` of a workload with random content, recognized by content
    /// that the guest never writes to.
    pub fn find(&self, page: u64) -> u64 {
        let content: Vec<u8> =
            (2..PAGE_WORDS).flat_map(|word| Fill::Random.word(page, word).to_le_bytes()).collect();
        (0..self.bytes)
            .step_by(4096)
            .find(|address| self.page(*address)[16..] == content[..])
            .unwrap_or_else(|| panic!("page {page} is not in memory"))
    }

    pub fn stats(&self) -> StatsSnapshot {
        let load = |word: usize| {
            let mut bytes = [0; 8];
            self.memory.read_exact_at(&mut bytes, STATS_GPA + 8 * word as u64).unwrap();
            u64::from_le_bytes(bytes)
        };
        // If the host has stopped a vCPU in the middle of an update, the statistics are read again.
        wait_for("statistics", || StatsSnapshot::read(load))
    }

    /// Has the guest check all its memory. Returns the report after the check.
    pub fn verify(&self, request: u64) -> StatsSnapshot {
        self.memory
            .write_all_at(&request.to_le_bytes(), STATS_GPA + 8 * offset::VERIFY_REQUEST as u64)
            .unwrap();
        wait_for("the guest's check of its memory", || {
            let stats = self.stats();
            if stats.verified(request) { Ok(stats) } else { Err(Box::new(stats)) }
        })
    }
}
