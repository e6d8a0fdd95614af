//! Disk for tests: a real file, a gate that holds requests back, threads, and a driver.

use super::{Blk, BlkFigures, BlkOptions, BlkWork, Disk, ID_BYTES, SECTOR};
use crate::testing::{Driver, Memory, WRITE, memory};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

pub(crate) const SECTORS: u64 = 64;
/// Address at which [`DiskGuest::header`] puts headers. The next constant is the address of the
/// answers.
pub(crate) const HEADER: u64 = 0x1_0000;
pub(crate) const ANSWER: u64 = 0x1_1000;
pub(crate) const DATA: u64 = 0x2_0000;
/// Value of a status byte that was not written.
pub(crate) const NONE: u8 = 0xee;

/// Returns a file without a name that contains `bytes`.
pub(crate) fn file(bytes: &[u8]) -> File {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("vmferry-blk-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a temporary file");
    std::fs::remove_file(&path).expect("the file exists");
    file.write_all_at(bytes, 0).expect("room");
    file
}

/// Operations of the file that cannot be seen in its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskCall {
    Flush,
    Discard(u64, u64),
    Zeroes(u64, u64, bool),
}

#[derive(Debug)]
pub(crate) struct FileDisk {
    file: File,
    pub(crate) calls: Mutex<Vec<DiskCall>>,
    pub(crate) fail: AtomicBool,
    /// True if no operation has to wait for storage.
    pub(crate) cached: AtomicBool,
    /// True if an operation that must not wait passes the gate, and then has to wait for storage.
    pub(crate) undecided: AtomicBool,
    open: Mutex<bool>,
    opened: Condvar,
    /// Number of requests that wait at the gate.
    pub(crate) waiting: AtomicUsize,
}

impl FileDisk {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(SECTORS * SECTOR).expect("small")];
        self.file.read_exact_at(&mut bytes, 0).expect("the file has its full size");
        bytes
    }

    pub(crate) fn gate(&self, open: bool) {
        *self.open.lock().expect("no panic") = open;
        self.opened.notify_all();
    }

    pub(crate) fn calls(&self) -> Vec<DiskCall> {
        std::mem::take(&mut self.calls.lock().expect("no panic"))
    }

    fn pass(&self) -> io::Result<()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.lock().expect("no panic");
        while !*open {
            open = self.opened.wait(open).expect("no panic");
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        if self.fail.load(Ordering::Relaxed) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn note(&self, call: DiskCall) -> io::Result<()> {
        self.calls.lock().expect("no panic").push(call);
        self.pass()
    }
}

impl Disk for FileDisk {
    fn read<B: BitmapSlice>(&self, mut offset: u64, into: &[VolatileSlice<'_, B>]) -> io::Result<()> {
        self.pass()?;
        for slice in into {
            let mut bytes = vec![0; slice.len()];
            self.file.read_exact_at(&mut bytes, offset)?;
            slice.copy_from(&bytes);
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    fn write<B: BitmapSlice>(&self, mut offset: u64, from: &[VolatileSlice<'_, B>]) -> io::Result<()> {
        self.pass()?;
        for slice in from {
            let mut bytes = vec![0; slice.len()];
            slice.copy_to(&mut bytes);
            self.file.write_all_at(&bytes, offset)?;
            offset += bytes.len() as u64;
        }
        assert!(offset <= SECTORS * SECTOR, "beyond the end");
        Ok(())
    }

    fn read_at_once<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> bool {
        self.cached.load(Ordering::Relaxed) && self.read(offset, into).is_ok()
    }

    fn write_at_once<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> bool {
        if self.undecided.load(Ordering::Relaxed) {
            return self.pass().is_err();
        }
        self.cached.load(Ordering::Relaxed) && self.write(offset, from).is_ok()
    }

    fn flush(&self) -> io::Result<()> {
        self.note(DiskCall::Flush)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        assert!(offset + len <= SECTORS * SECTOR, "beyond the end");
        self.note(DiskCall::Discard(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.note(DiskCall::Zeroes(offset, len, unmap))?;
        assert!(offset + len <= SECTORS * SECTOR, "beyond the end");
        self.file.write_all_at(&vec![0; usize::try_from(len).expect("small")], offset)
    }
}

/// Guest with a disk.
#[derive(Debug)]
pub(crate) struct DiskGuest {
    pub(crate) disk: Arc<FileDisk>,
    pub(crate) work: Arc<BlkWork>,
    threads: Vec<JoinHandle<()>>,
    /// Bell of the attendant, if there is one.
    bell: Option<Sender<()>>,
    driver: Driver<Blk>,
}

impl Deref for DiskGuest {
    type Target = Driver<Blk>;

    fn deref(&self) -> &Driver<Blk> {
        &self.driver
    }
}

impl DerefMut for DiskGuest {
    fn deref_mut(&mut self) -> &mut Driver<Blk> {
        &mut self.driver
    }
}

impl Drop for DiskGuest {
    fn drop(&mut self) {
        self.disk.gate(true);
        self.work.end();
        self.bell = None;
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a thread of the disk panicked");
        }
    }
}

pub(crate) fn options(read_only: bool) -> BlkOptions {
    let mut id = [0; ID_BYTES];
    id[..5].copy_from_slice(b"disk7");
    BlkOptions { sectors: SECTORS, read_only, id }
}

/// Returns a disk's content: each sector is filled according to its number and the position in it.
pub(crate) fn content() -> Vec<u8> {
    (0..SECTORS * SECTOR).map(|at| (at / SECTOR * 7 + at % 251).to_le_bytes()[0]).collect()
}

impl DiskGuest {
    /// Returns a guest whose disk has [`content`], before its driver starts.
    pub(crate) fn new(options: BlkOptions, threads: usize) -> Self {
        let disk = Arc::new(FileDisk {
            file: file(&content()),
            calls: Mutex::default(),
            fail: false.into(),
            cached: false.into(),
            undecided: false.into(),
            open: Mutex::new(true),
            opened: Condvar::new(),
            waiting: 0.into(),
        });
        Self::on(disk, options, threads)
    }

    /// Returns a guest on an existing disk.
    pub(crate) fn on(disk: Arc<FileDisk>, options: BlkOptions, threads: usize) -> Self {
        let memory = memory();
        let mut work = None;
        let driver = Driver::new(memory.clone(), |wiring| {
            let device = Blk::new(options, wiring);
            work = Some(device.work());
            device
        });
        let work = work.expect("was made");
        let spawn = |_| {
            let (work, memory, disk): (_, Memory, _) = (Arc::clone(&work), memory.clone(), Arc::clone(&disk));
            std::thread::spawn(move || work.run(&memory, &*disk))
        };
        Self { threads: (0..threads).map(spawn).collect(), bell: None, disk, work, driver }
    }

    /// Returns a guest whose driver accepts `bits`.
    pub(crate) fn ready(bits: &[u32]) -> Self {
        let mut guest = Self::new(options(false), 2);
        guest.start(bits, &[0]);
        guest
    }

    /// Returns a ready guest with a thread that is told of notifications by [`kick`](Self::kick).
    pub(crate) fn attended(bits: &[u32], cached: bool) -> Self {
        let mut guest = Self::new(options(false), 2);
        guest.disk.cached.store(cached, Ordering::Relaxed);
        let (bell, kicks) = channel();
        let (work, memory, disk) = (Arc::clone(&guest.work), guest.memory.clone(), Arc::clone(&guest.disk));
        let attend = move || {
            work.attend(&memory, &*disk, || {
                // Notifications that come meanwhile count as one, as on an eventfd.
                let _ = kicks.recv();
                while kicks.try_recv().is_ok() {}
            });
        };
        guest.threads.push(std::thread::spawn(attend));
        guest.bell = Some(bell);
        guest.start(bits, &[0]);
        guest
    }

    /// Does what KVM does when the driver notifies.
    pub(crate) fn kick(&self) {
        self.bell.as_ref().expect("an attendant").send(()).expect("the attendant waits");
    }

    /// Returns a guest with the same state on the same file.
    pub(crate) fn moved(&self) -> Self {
        let there = Self::on(Arc::clone(&self.disk), options(false), 2);
        self.move_to(&there);
        there
    }

    /// Writes the header of request `number`, and returns its part.
    pub(crate) fn header(&self, number: u64, kind: u32, sector: u64) -> (u64, u32, u16) {
        let at = HEADER + 16 * number;
        let bytes = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.memory.write_slice(&bytes, GuestAddress(at)).expect("memory");
        (at, 16, 0)
    }

    /// Returns the part for the status of request `number`.
    pub(crate) fn answer(&self, number: u64) -> (u64, u32, u16) {
        self.memory.write_obj(NONE, GuestAddress(ANSWER + number)).expect("memory");
        (ANSWER + number, 1, WRITE)
    }

    pub(crate) fn answered(&self, number: u64) -> u8 {
        self.memory.read_obj(GuestAddress(ANSWER + number)).expect("memory")
    }

    /// Waits until `count` buffers have been given back.
    pub(crate) fn wait(&self, count: u16) {
        until("buffers given back", || self.used(0) == count);
    }

    pub(crate) fn figures(&self) -> BlkFigures {
        self.work.figures()
    }

    pub(crate) fn data(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).expect("memory");
        bytes
    }

    /// Sends one request with `data` and waits for it. Returns the status and the length in the
    /// used ring.
    pub(crate) fn submit(&mut self, kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u8, u32) {
        let parts = [&[self.header(0, kind, sector)], data, &[self.answer(0)]].concat();
        self.submit_raw(&parts)
    }

    pub(crate) fn submit_raw(&mut self, parts: &[(u64, u32, u16)]) -> (u8, u32) {
        let before = self.used(0);
        self.send(0, parts);
        self.wait(before.wrapping_add(1));
        (self.answered(0), self.used_len(0, before))
    }
}

/// Waits until `done` returns true. Feature `hostile` has no development dependencies, and so no
/// `vmferry_testkit::wait`; the limit is the same.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
