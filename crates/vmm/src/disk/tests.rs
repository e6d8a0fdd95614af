//! Tests of disks with real files and real memory, and without KVM.

use super::DiskError;
use super::file::RawFile;
use crate::memory::GuestRam;
use crate::options::{Backing, DiskOptions, VmOptions};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, PageSet, RegionId};
use vmferry_engine::LazyMemory;
use vmferry_fault::{LazySlot, UffdMemory, UffdOptions};
use vmferry_testkit::{Need, PATIENCE, skip};
use vmferry_virtio::blk::Disk;

/// A file that is removed at the end.
struct Temp(PathBuf);

impl Temp {
    fn new(bytes: &[u8]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("vmferry-disk-{}-{number}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.0).unwrap()
    }

    fn open(&self, read_only: bool) -> RawFile {
        open(&self.0, read_only).unwrap()
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn open(path: &Path, read_only: bool) -> Result<RawFile, DiskError> {
    let mut options = DiskOptions::new(path);
    options.read_only = read_only;
    RawFile::open(&options, &Arc::new(LazySlot::new(1)))
}

fn ram() -> Arc<GuestRam> {
    let mut options = VmOptions::new(8 << 20, 1);
    (options.backing, options.huge_pages) = (Backing::Anonymous, false);
    Arc::new(GuestRam::new(&options).unwrap())
}

/// The memory at these addresses, of these lengths.
macro_rules! slices {
    ($ram:expr, $parts:expr) => {{
        let mut slices = Vec::new();
        for (gpa, len) in $parts {
            let found = $ram.map().get_slices(GuestAddress(gpa), len, Permissions::ReadWrite).unwrap();
            slices.extend(found.map(|slice| slice.unwrap()));
        }
        slices
    }};
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512 * 31 + at % 253).to_le_bytes()[0]).collect()
}

#[test]
fn bytes_go_straight_between_file_and_memory_in_any_pieces() {
    let (disk, ram) = (Temp::new(&pattern(4 << 20)), ram());
    let file = disk.open(false);
    assert!(file.take().unwrap() && !file.take().unwrap());
    assert_eq!(file.size(), 4 << 20);
    // More pieces than the kernel takes at once, of odd lengths.
    let mut parts: Vec<_> = (0..3000u64).map(|n| (n * 701, 701)).collect();
    let len = 3000 * 701 / 512 * 512;
    parts.truncate(len / 701 + 1);
    parts.last_mut().unwrap().1 = len % 701;
    file.read(1024, &slices!(ram, parts.clone())).unwrap();
    let mut read = vec![0; len];
    ram.map().read_slice(&mut read, GuestAddress(0)).unwrap();
    assert_eq!(read, pattern(4 << 20)[1024..][..len]);

    ram.map().write_slice(&[0xab; 8192], GuestAddress(0x40_0000)).unwrap();
    file.write(512, &slices!(ram, [(0x40_0000, 100), (0x40_1000, 0), (0x40_1ffc, 4), (0x40_0100, 408)]))
        .unwrap();
    file.flush().unwrap();
    let mut want = pattern(4 << 20);
    want[512..1024].fill(0xab);
    assert_eq!(disk.bytes(), want);
    // Beyond the end there is nothing to read; the device never asks for it.
    assert!(file.read(4 << 20, &slices!(ram, [(0, 512)])).is_err());
}

#[test]
fn ranges_read_as_zeros_on_whatever_file_system() {
    let disk = Temp::new(&pattern(1 << 20));
    let file = disk.open(false);
    file.take().unwrap();
    let mut want = pattern(1 << 20);
    for (offset, len, unmap) in
        [(512, 1024, false), (8192, 65536, true), (200_192, 150_016, false), (0, 0, true)]
    {
        file.write_zeroes(offset, len, unmap).unwrap();
        let (offset, len) = (usize::try_from(offset).unwrap(), usize::try_from(len).unwrap());
        want[offset..offset + len].fill(0);
        assert!(disk.bytes() == want, "{offset} {len} {unmap}");
    }
    file.discard(0, 0).unwrap();
    file.discard(512 << 10, 64 << 10).unwrap();
    let bytes = disk.bytes();
    assert_eq!((bytes.len(), &bytes[576 << 10..]), (1 << 20, &want[576 << 10..]));
}

/// What a disk needs of the host, on threads that are confined to what theirs is: its own, and a vCPU's that serves it at once.
#[test]
fn confined_threads_do_all_that_a_disk_does() {
    vmferry_confine::confine_threads().unwrap();
    for role in [vmferry_thread::Role::Disk, vmferry_thread::Role::Vcpu] {
        let (disk, ram) = (Temp::new(&pattern(1 << 20)), ram());
        let file = disk.open(false);
        file.take().unwrap();
        let work = move || {
            ram.map().write_slice(&[0xcd; 1024], GuestAddress(0)).unwrap();
            file.write(0, &slices!(ram, [(0, 1024)])).unwrap();
            file.write_at_once(1024, &slices!(ram, [(0, 512)]));
            file.read_at_once(0, &slices!(ram, [(4096, 512)]));
            file.read(512, &slices!(ram, [(8192, 512)])).unwrap();
            file.flush().unwrap();
            file.discard(256 << 10, 64 << 10).unwrap();
            file.write_zeroes(512 << 10, 4096, true).unwrap();
            file.write_zeroes(600 << 10, 4096, false).unwrap();
            let mut read = [0; 512];
            ram.map().read_slice(&mut read, GuestAddress(8192)).unwrap();
            assert_eq!(read, [0xcd; 512]);
        };
        vmferry_thread::spawn(role, "disk", work).unwrap().join().unwrap();
        assert_eq!(disk.bytes()[..1024], [0xcd; 1024]);
    }
}

#[test]
fn what_is_no_disk_is_an_error_that_says_so() {
    let error = |path: &Path| open(path, false).unwrap_err();
    let missing = error(Path::new("/nonexistent/disk.img"));
    assert!(matches!(missing, DiskError::Open { .. }), "{missing}");
    assert_eq!(missing.to_string(), "cannot open the disk /nonexistent/disk.img");
    assert!(matches!(error(Path::new("/dev/null")), DiskError::Kind { .. }));
    assert!(matches!(open(&std::env::temp_dir(), true).unwrap_err(), DiskError::Kind { .. }));
    for size in [0, 1, 511, 513, 1 << 20 | 256] {
        let disk = Temp::new(&vec![0; size]);
        let error = error(&disk.0).to_string();
        assert!(error.ends_with("it must have a multiple of 512, and some"), "{error}");
    }
    // A pipe is not waited for.
    let pipe = std::env::temp_dir().join(format!("vmferry-disk-pipe-{}", std::process::id()));
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let refused = open(&pipe, true);
    std::fs::remove_file(&pipe).unwrap();
    assert!(matches!(refused, Err(DiskError::Kind { .. })));
}

#[test]
fn a_disk_is_one_sides_at_a_time() {
    let (disk, ram) = (Temp::new(&pattern(1 << 16)), ram());
    let (here, there) = (disk.open(false), disk.open(false));
    // Waiting for its guest, a side has it open and does nothing to it.
    assert!(there.read(0, &slices!(ram, [(0, 512)])).is_err());
    assert!(there.write(0, &slices!(ram, [(0, 512)])).is_err());
    assert!(
        there.flush().is_err() && there.discard(0, 512).is_err() && there.write_zeroes(0, 512, true).is_err()
    );
    assert_eq!(disk.bytes(), pattern(1 << 16));

    here.take().unwrap();
    let error = there.take().unwrap_err();
    assert!(matches!(&error, DiskError::InUse { by, .. } if by == "another VM of this process"), "{error}");
    assert!(disk.open(true).take().is_err(), "not even to read it");
    // The handover, and back.
    here.sync().unwrap();
    here.give_up().unwrap();
    assert!(here.write(0, &slices!(ram, [(0, 512)])).is_err());
    there.take().unwrap();
    there.write(0, &slices!(ram, [(0, 512)])).unwrap();
    assert!(here.take().is_err());
    drop(there);
    here.take().unwrap();
    here.write(0, &slices!(ram, [(0, 512)])).unwrap();
}

#[test]
fn many_may_read_what_nobody_writes() {
    let disk = Temp::new(&pattern(1 << 16));
    let readers = [disk.open(true), disk.open(true)];
    readers.iter().for_each(|reader| assert!(reader.take().unwrap()));
    let writer = disk.open(false);
    assert!(matches!(writer.take(), Err(DiskError::InUse { .. })));
    readers.iter().for_each(|reader| reader.give_up().unwrap());
    writer.take().unwrap();
    let ram = ram();
    assert!(readers[0].write(0, &slices!(ram, [(0, 512)])).is_err());
}

#[test]
fn a_disk_that_has_changed_its_size_is_not_taken() {
    let disk = Temp::new(&pattern(1 << 16));
    let file = disk.open(false);
    File::options().write(true).open(&disk.0).unwrap().set_len(1 << 17).unwrap();
    let error = file.take().unwrap_err().to_string();
    assert!(error.contains("had 65536 bytes when it was opened, and has 131072 now"), "{error}");
    disk.open(false).take().unwrap();
}

const HELD: &str = "VMFERRY_TEST_HELD_DISK";

/// Not a test: what the other process of the next one does.
#[test]
fn hold_a_disk_for_another_process() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let file = open(Path::new(&path), false).unwrap();
    file.take().unwrap();
    writeln!(std::io::stdout(), "\nheld").unwrap();
    // Until it is killed, or its parent has ended.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn another_process_that_has_it_is_named_and_its_end_frees_it() {
    let disk = Temp::new(&pattern(1 << 16));
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "disk::tests::hold_a_disk_for_another_process", "--nocapture"])
        .env(HELD, &disk.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(other.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "held"), "it ended without holding the disk");
    let error = disk.open(false).take().unwrap_err().to_string();
    let ended = other.kill().and_then(|()| other.wait());
    assert!(error.contains(&format!("is in use by process {} (", other.id())), "{error}");
    ended.unwrap();
    assert!(disk.open(false).take().unwrap());
}

/// Waits until a thread sleeps on page 8.
fn wait_for_fault(memory: &UffdMemory) {
    let stripe = memory.stripe_of(RegionId(0), PageIndex(8));
    let fault = memory.next_fault(stripe, PATIENCE).unwrap().expect("a fault");
    assert_eq!(fault.page, PageIndex(8));
}

/// Page 8 has not come yet.
fn missing(ram: &Arc<GuestRam>, lazy: &LazySlot) -> Option<Arc<UffdMemory>> {
    let made = lazy.get_or_make(|threads| {
        let options = UffdOptions::new(threads);
        let regions = ram.regions().iter().map(crate::memory::RamRegion::lazy).collect();
        // SAFETY: the RAM owns its mappings; no references to guest bytes are made here.
        unsafe { UffdMemory::new(regions, Arc::clone(ram) as _, &options) }
    });
    match made {
        Ok(memory) => {
            let mut missing = PageSet::empty(ram.layout());
            missing.region_mut(RegionId(0)).unwrap().set(8);
            memory.begin(&missing).unwrap();
            Some(memory)
        }
        Err(error) => {
            skip(Need::Uffd, error);
            None
        }
    }
}

#[test]
fn requests_sleep_on_pages_that_are_to_come_and_write_what_comes() {
    let (disk, ram, lazy) = (Temp::new(&pattern(1 << 16)), ram(), Arc::new(LazySlot::new(1)));
    ram.map().write_slice(&[5; 4 * PAGE_BYTES], GuestAddress(0x7000)).unwrap();
    let Some(memory) = missing(&ram, &lazy) else { return };
    let file = RawFile::open(&DiskOptions::new(&disk.0), &lazy).unwrap();
    file.take().unwrap();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write(512, &slices!(ram, [(0x7f00, 512)])));
        wait_for_fault(&memory);
        assert!(!write.is_finished() && disk.bytes() == pattern(1 << 16));
        // Others go on meanwhile: the sleeper has no lock of the file's.
        file.write(4096, &slices!(ram, [(0x7000, 512)])).unwrap();
        memory.place(RegionId(0), PageRun::from(8..9), &[6; PAGE_BYTES]).unwrap();
        write.join().unwrap().unwrap();
    });
    let bytes = disk.bytes();
    assert_eq!((&bytes[512..768], &bytes[768..1024]), (&[5; 256][..], &[6; 256][..]));
    memory.end().unwrap();
}

#[test]
fn a_guest_that_is_given_up_writes_no_zeros_for_pages_that_never_came() {
    let (disk, ram, lazy) = (Temp::new(&pattern(1 << 16)), ram(), Arc::new(LazySlot::new(1)));
    ram.map().write_slice(&[5; 4 * PAGE_BYTES], GuestAddress(0x7000)).unwrap();
    let Some(memory) = missing(&ram, &lazy) else { return };
    let file = RawFile::open(&DiskOptions::new(&disk.0), &lazy).unwrap();
    file.take().unwrap();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write(512, &slices!(ram, [(0x7f00, 512)])));
        wait_for_fault(&memory);
        assert!(!write.is_finished());
        file.abandon();
        memory.end().unwrap();
        write.join().unwrap().unwrap_err();
    });
    assert_eq!(disk.bytes(), pattern(1 << 16));
}

/// A loop device over a file of `len` bytes, released at the end; `None` where one cannot be had.
struct Loop(String);

impl Loop {
    fn on(file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let device = output.ok().filter(|output| output.status.success());
        let Some(device) = device else {
            skip(Need::Root, "no loop device: needs root, losetup and the loop driver");
            return None;
        };
        Some(Self(String::from_utf8(device.stdout).unwrap().trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_a_disk_with_its_own_size_and_ranges() {
    let below = Temp::new(&pattern(1 << 20));
    let Some(device) = Loop::on(&below.0) else { return };
    let (ram, path) = (ram(), Path::new(&device.0));
    let file = open(path, false).unwrap();
    assert_eq!(file.size(), 1 << 20);
    file.take().unwrap();
    // Somebody else does not get it.
    assert!(matches!(open(path, false).unwrap().take(), Err(DiskError::InUse { .. })));
    file.read(4096, &slices!(ram, [(0, 8192)])).unwrap();
    let mut read = vec![0; 8192];
    ram.map().read_slice(&mut read, GuestAddress(0)).unwrap();
    assert_eq!(read, pattern(1 << 20)[4096..][..8192]);
    // What was read is in the cache of the host now: no waiting.
    assert!(file.read_at_once(4096, &slices!(ram, [(0x10_0000, 8192)])));
    let mut again = vec![0; 8192];
    ram.map().read_slice(&mut again, GuestAddress(0x10_0000)).unwrap();
    assert_eq!(again, read);

    ram.map().write_slice(&[0xcd; 4096], GuestAddress(0)).unwrap();
    file.write(8192, &slices!(ram, [(0, 4096)])).unwrap();
    file.write_zeroes(65536, 4096, true).unwrap();
    file.write_zeroes(65536 + 8192, 512, false).unwrap();
    file.discard(512 << 10, 64 << 10).unwrap();
    file.flush().unwrap();
    file.give_up().unwrap();
    let mut want = pattern(1 << 20);
    want[8192..12288].fill(0xcd);
    want[65536..69632].fill(0);
    want[73728..74240].fill(0);
    let is = below.bytes();
    assert!(is[..512 << 10] == want[..512 << 10] && is[576 << 10..] == want[576 << 10..]);
    assert_eq!(file.last_error(), None);
}

/// A file system with room for little, until this is dropped.
struct Narrow(PathBuf);

impl Narrow {
    fn new(bytes: u64) -> Option<Self> {
        let folder = std::env::temp_dir().join(format!("vmferry-narrow-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let narrow = Self(folder);
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "vmferry-narrow"]).arg(&narrow.0);
        let mounted = mount.output().is_ok_and(|output| output.status.success());
        if !mounted {
            skip(Need::Root, "no file system can be mounted");
        }
        mounted.then_some(narrow)
    }
}

impl Drop for Narrow {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).stderr(std::process::Stdio::null()).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn writes_that_are_lost_are_told_to_the_guest_and_keep_it_from_moving_until_then() {
    let Some(narrow) = Narrow::new(1 << 20) else { return };
    let below = narrow.0.join("sparse.img");
    File::create(&below).unwrap().set_len(8 << 20).unwrap();
    let Some(device) = Loop::on(&below) else { return };
    let (ram, file) = (ram(), open(Path::new(&device.0), false).unwrap());
    file.take().unwrap();
    let lose = || {
        // The host's page cache has room; what is below has not.
        for at in 0..4 {
            file.write(at << 20, &slices!(ram, [(0, 1 << 20)])).unwrap();
        }
    };
    lose();
    let error = file.sync().unwrap_err();
    assert!(matches!(error, DiskError::Flush { .. }), "{error}");
    // The kernel has said it once, and would not again.
    let error = file.sync().unwrap_err();
    assert!(
        matches!(&error, DiskError::Flush { source, .. } if source.to_string().contains("before")),
        "{error}"
    );
    assert!(file.flush().is_err(), "the guest is told");
    assert!(file.last_error().unwrap().starts_with("flushing: "));
    file.sync().unwrap();
    // The other way round.
    lose();
    assert!(file.flush().is_err());
    assert!(file.sync().is_err());
    file.flush().unwrap();
    file.sync().unwrap();
}

#[test]
fn what_the_host_refuses_is_told_in_words() {
    let full = Path::new("/dev/full");
    let ram = ram();
    // A device that is always full, as a disk: not one that a VM could be given, but what a full file system answers.
    let disk = Temp::new(&[0; 4096]);
    let file = disk.open(false).on(File::options().read(true).write(true).open(full).unwrap());
    assert!(file.write(0, &slices!(ram, [(0, 512)])).is_err());
    let words = file.last_error().unwrap();
    assert!(
        words.starts_with("writing: there is no room left for it") && words.contains("os error 28"),
        "{words}"
    );
}

#[test]
fn what_is_not_cached_or_still_to_come_is_not_done_at_once() {
    let (disk, ram) = (Temp::new(&pattern(1 << 16)), ram());
    let file = disk.open(false);
    assert!(!file.read_at_once(0, &slices!(ram, [(0, 512)])), "the disk is not this side's");
    file.take().unwrap();
    // Beyond its end there is less than was asked for.
    assert!(!file.read_at_once((1 << 16) - 512, &slices!(ram, [(0, 1024)])));
    file.read(0, &slices!(ram, [(0, 4096)])).unwrap();
    let at_once = file.read_at_once(0, &slices!(ram, [(0x1000, 4000), (0x3000, 96)]));
    if !at_once {
        skip(Need::Kernel, "this file system does not read without waiting (RWF_NOWAIT)");
    } else {
        let mut read = [0; 4000];
        ram.map().read_slice(&mut read, GuestAddress(0x1000)).unwrap();
        assert_eq!(read, pattern(1 << 16)[..4000]);
    }
    file.abandon();
    assert!(!file.read_at_once(0, &slices!(ram, [(0, 512)])), "the guest is over");
}
