//! Tests of disks with real files and real memory, without KVM.

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
use vmferry_engine::DemandPaging;
use vmferry_fault::{PagingSlot, UffdMemory, UffdOptions};
use vmferry_testkit::{Need, PATIENCE, skip};
use vmferry_virtio::blk::Disk;

/// File that is removed when dropped.
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
    RawFile::open(&options, &Arc::new(PagingSlot::new(1)))
}

fn ram() -> Arc<GuestRam> {
    let mut options = VmOptions::new(8 << 20, 1);
    (options.backing, options.huge_pages) = (Backing::Anonymous, false);
    Arc::new(GuestRam::new(&options).unwrap())
}

/// Slices of the memory at these addresses, with these lengths.
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
fn file_reads_and_writes_guest_memory_in_pieces_of_any_size() {
    let (disk, ram) = (Temp::new(&pattern(4 << 20)), ram());
    let file = disk.open(false);
    assert!(file.take().unwrap() && !file.take().unwrap());
    assert_eq!(file.size(), 4 << 20);
    // More pieces than the kernel accepts at once, of odd lengths.
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
    // Beyond the end there is nothing to read. The device never asks for it.
    assert!(file.read(4 << 20, &slices!(ram, [(0, 512)])).is_err());
}

#[test]
fn ranges_read_as_zeros_on_any_file_system() {
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

/// A disk's operations on threads that are confined as in production: the disk's own threads, and a
/// vCPU's thread that serves a request at once.
#[test]
fn confined_threads_can_do_all_disk_operations() {
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
fn path_that_is_not_a_disk_is_refused_with_a_clear_error() {
    let error = |path: &Path| open(path, false).unwrap_err();
    let missing = error(Path::new("/nonexistent/disk.img"));
    assert!(matches!(missing, DiskError::Open { .. }), "{missing}");
    assert_eq!(missing.to_string(), "cannot open the disk /nonexistent/disk.img");
    assert!(matches!(error(Path::new("/dev/null")), DiskError::Kind { .. }));
    assert!(matches!(open(&std::env::temp_dir(), true).unwrap_err(), DiskError::Kind { .. }));
    for size in [0, 1, 511, 513, 1 << 20 | 256] {
        let disk = Temp::new(&vec![0; size]);
        let error = error(&disk.0).to_string();
        assert!(error.ends_with("the size must be a multiple of 512 and not 0"), "{error}");
    }
    // Opening a pipe must not wait for its other end.
    let pipe = std::env::temp_dir().join(format!("vmferry-disk-pipe-{}", std::process::id()));
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let refused = open(&pipe, true);
    std::fs::remove_file(&pipe).unwrap();
    assert!(matches!(refused, Err(DiskError::Kind { .. })));
}

#[test]
fn disk_belongs_to_one_side_at_a_time() {
    let (disk, ram) = (Temp::new(&pattern(1 << 16)), ram());
    let (here, there) = (disk.open(false), disk.open(false));
    // A target that waits for its guest has the file open and does not use it.
    assert!(there.read(0, &slices!(ram, [(0, 512)])).is_err());
    assert!(there.write(0, &slices!(ram, [(0, 512)])).is_err());
    assert!(
        there.flush().is_err() && there.discard(0, 512).is_err() && there.write_zeroes(0, 512, true).is_err()
    );
    assert_eq!(disk.bytes(), pattern(1 << 16));

    here.take().unwrap();
    let error = there.take().unwrap_err();
    assert!(matches!(&error, DiskError::InUse { by, .. } if by == "another VM of this process"), "{error}");
    assert!(disk.open(true).take().is_err(), "a reader got the lock");
    // The handover, and back again.
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
fn read_only_disk_has_several_readers() {
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
fn disk_that_changed_its_size_is_not_taken() {
    let disk = Temp::new(&pattern(1 << 16));
    let file = disk.open(false);
    File::options().write(true).open(&disk.0).unwrap().set_len(1 << 17).unwrap();
    let error = file.take().unwrap_err().to_string();
    assert!(error.contains("had 65536 bytes when it was opened, and has 131072 now"), "{error}");
    disk.open(false).take().unwrap();
}

const HELD: &str = "VMFERRY_TEST_HELD_DISK";

/// Helper process of the next test, which holds a disk. Not a test by itself.
#[test]
fn hold_a_disk_for_another_process() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let file = open(Path::new(&path), false).unwrap();
    file.take().unwrap();
    writeln!(std::io::stdout(), "\nheld").unwrap();
    // Runs until it is killed or its parent has ended.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn process_that_holds_a_disk_is_named_and_its_end_frees_the_disk() {
    let disk = Temp::new(&pattern(1 << 16));
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "disk::tests::hold_a_disk_for_another_process", "--nocapture"])
        .env(HELD, &disk.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(other.stdout.take().unwrap()).lines();
    assert!(
        lines.map_while(Result::ok).any(|line| line == "held"),
        "the process ended without holding the disk"
    );
    let error = disk.open(false).take().unwrap_err().to_string();
    let ended = other.kill().and_then(|()| other.wait());
    assert!(error.contains(&format!("is in use by process {} (", other.id())), "{error}");
    ended.unwrap();
    assert!(disk.open(false).take().unwrap());
}

/// Waits until a thread sleeps on page 8.
fn wait_for_fault(memory: &UffdMemory) {
    let shard = memory.shard_of(RegionId(0), PageIndex(8));
    let fault = memory.next_fault(shard, PATIENCE).unwrap().expect("a fault");
    assert_eq!(fault.page, PageIndex(8));
}

/// Returns memory of which page 8 is missing.
fn missing(ram: &Arc<GuestRam>, paging: &PagingSlot) -> Option<Arc<UffdMemory>> {
    let made = paging.get_or_make(|threads| {
        let options = UffdOptions::new(threads);
        let regions = ram.regions().iter().map(|ram| ram.paged().unwrap()).collect();
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
fn requests_sleep_on_missing_pages_and_write_what_arrives() {
    let (disk, ram, paging) = (Temp::new(&pattern(1 << 16)), ram(), Arc::new(PagingSlot::new(1)));
    ram.map().write_slice(&[5; 4 * PAGE_BYTES], GuestAddress(0x7000)).unwrap();
    let Some(memory) = missing(&ram, &paging) else { return };
    let file = RawFile::open(&DiskOptions::new(&disk.0), &paging).unwrap();
    file.take().unwrap();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write(512, &slices!(ram, [(0x7f00, 512)])));
        wait_for_fault(&memory);
        assert!(!write.is_finished() && disk.bytes() == pattern(1 << 16));
        // Other requests continue meanwhile, because the sleeping thread holds no lock of the file.
        file.write(4096, &slices!(ram, [(0x7000, 512)])).unwrap();
        memory.place(RegionId(0), PageRun::from(8..9), &[6; PAGE_BYTES]).unwrap();
        write.join().unwrap().unwrap();
    });
    let bytes = disk.bytes();
    assert_eq!((&bytes[512..768], &bytes[768..1024]), (&[5; 256][..], &[6; 256][..]));
    memory.end().unwrap();
}

#[test]
fn abandoned_guest_writes_no_zeros_for_missing_pages() {
    let (disk, ram, paging) = (Temp::new(&pattern(1 << 16)), ram(), Arc::new(PagingSlot::new(1)));
    ram.map().write_slice(&[5; 4 * PAGE_BYTES], GuestAddress(0x7000)).unwrap();
    let Some(memory) = missing(&ram, &paging) else { return };
    let file = RawFile::open(&DiskOptions::new(&disk.0), &paging).unwrap();
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

/// Loop device over a file, released when dropped.
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
fn block_device_works_as_a_disk() {
    let below = Temp::new(&pattern(1 << 20));
    let Some(device) = Loop::on(&below.0) else { return };
    let (ram, path) = (ram(), Path::new(&device.0));
    let file = open(path, false).unwrap();
    assert_eq!(file.size(), 1 << 20);
    file.take().unwrap();
    // Another VM does not get the device.
    assert!(matches!(open(path, false).unwrap().take(), Err(DiskError::InUse { .. })));
    file.read(4096, &slices!(ram, [(0, 8192)])).unwrap();
    let mut read = vec![0; 8192];
    ram.map().read_slice(&mut read, GuestAddress(0)).unwrap();
    assert_eq!(read, pattern(1 << 20)[4096..][..8192]);
    // The data that was read is now in the host's page cache, so no wait is needed.
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

/// File system with little room, unmounted when dropped.
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
fn lost_writes_prevent_a_migration_until_the_guest_was_told() {
    let Some(narrow) = Narrow::new(1 << 20) else { return };
    let below = narrow.0.join("sparse.img");
    File::create(&below).unwrap().set_len(8 << 20).unwrap();
    let Some(device) = Loop::on(&below) else { return };
    let (ram, file) = (ram(), open(Path::new(&device.0), false).unwrap());
    file.take().unwrap();
    let lose = || {
        // The host's page cache has room, but the storage below does not.
        for at in 0..4 {
            file.write(at << 20, &slices!(ram, [(0, 1 << 20)])).unwrap();
        }
    };
    lose();
    let error = file.sync().unwrap_err();
    assert!(matches!(error, DiskError::Flush { .. }), "{error}");
    // The kernel has reported the loss once, and would not report it again.
    let error = file.sync().unwrap_err();
    assert!(
        matches!(&error, DiskError::Flush { source, .. } if source.to_string().contains("an earlier flush failed")),
        "{error}"
    );
    assert!(file.flush().is_err(), "the guest is told");
    assert!(file.last_error().unwrap().starts_with("flushing: "));
    file.sync().unwrap();
    // The other order: the guest's flush comes first.
    lose();
    assert!(file.flush().is_err());
    assert!(file.sync().is_err());
    file.flush().unwrap();
    file.sync().unwrap();
}

#[test]
fn host_errors_are_reported_as_clear_messages() {
    let full = Path::new("/dev/full");
    let ram = ram();
    // A device that is always full, as a disk. A VM could not be given this device, but a full file
    // system answers in the same way.
    let disk = Temp::new(&[0; 4096]);
    let file = disk.open(false).on(File::options().read(true).write(true).open(full).unwrap());
    assert!(file.write(0, &slices!(ram, [(0, 512)])).is_err());
    let words = file.last_error().unwrap();
    assert!(
        words.starts_with("writing: no room left on the storage") && words.contains("os error 28"),
        "{words}"
    );
}

#[test]
fn uncached_data_and_missing_pages_are_not_read_at_once() {
    let (disk, ram) = (Temp::new(&pattern(1 << 16)), ram());
    let file = disk.open(false);
    assert!(!file.read_at_once(0, &slices!(ram, [(0, 512)])), "this VM does not hold the disk");
    file.take().unwrap();
    // Beyond the end there is less than was requested.
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
    assert!(!file.read_at_once(0, &slices!(ram, [(0, 512)])), "the guest was ended");
}
