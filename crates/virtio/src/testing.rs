//! Guest for tests: memory with a hole, a driver that the test controls, and, for the balloon, a
//! host that checks its calls.

use crate::balloon::{
    Balloon, BalloonControl, BalloonHost, BalloonOptions, Dropped, HostError, Why, extension::WholePages,
};
use crate::device::{Device, Doorbell, Wiring};
use crate::mmio::MmioTransport;
use crate::runs::GuestRun;
use crate::signals::{Interrupt, Signals};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use virtio_bindings::virtio_mmio as register;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_core::{Gpa, Layout, PAGE_SHIFT, Region, RegionId};

pub(crate) type Memory = GuestMemoryMmap<()>;

/// Number of pages of the first region, which begins at address 0.
pub(crate) const LOW: u64 = 64;
/// First page number and number of pages of the second region.
pub(crate) const HIGH: (u64, u64) = (128, 32);

/// Number of entries of each queue that [`Guest::queue`] sets up.
pub(crate) const SIZE: u16 = 16;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) fn layout() -> Layout {
    let region = |id, first: u64, pages: u64| Region {
        id: RegionId(id),
        gpa: Gpa(first << PAGE_SHIFT),
        len: pages << PAGE_SHIFT,
    };
    Layout::new(vec![region(0, 0, LOW), region(1, HIGH.0, HIGH.1)]).expect("a layout")
}

#[derive(Debug, Default)]
pub(crate) struct Line(AtomicU32);

#[derive(Debug)]
struct Wire(Arc<Line>);

impl Interrupt for Wire {
    fn trigger(&self) -> io::Result<()> {
        self.0.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Call to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Drop(Why, Vec<(u32, std::ops::Range<u64>)>),
    Zeros(Vec<(u32, std::ops::Range<u64>)>),
    Hint(u32, Vec<(u32, std::ops::Range<u64>)>),
    End(u32),
}

/// Host that checks that all runs are in memory, in order and apart, and that zeros the pages that
/// it drops.
#[derive(Debug)]
pub(crate) struct Host {
    memory: Memory,
    pub(crate) calls: Mutex<Vec<Call>>,
    pub(crate) refuse: std::sync::atomic::AtomicBool,
}

impl Host {
    fn check(runs: &[GuestRun]) -> Vec<(u32, std::ops::Range<u64>)> {
        let layout = layout();
        assert!(!runs.is_empty());
        for run in runs {
            let region = layout.region(run.region).expect("a region of the guest");
            assert!(run.run.count > 0 && run.run.end() <= region.pages(), "{run:?}");
        }
        for pair in runs.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            assert!((a.region, a.run.end()) < (b.region, b.run.first.0), "{a:?} {b:?}");
        }
        runs.iter().map(|run| (run.region.0, run.run.range())).collect()
    }

    fn zero(&self, runs: &[GuestRun]) {
        for run in runs {
            let first = if run.region.0 == 0 { 0 } else { HIGH.0 };
            for page in run.run.range() {
                self.memory
                    .write_slice(&[0; 4096], GuestAddress((first + page) << PAGE_SHIFT))
                    .expect("memory");
            }
        }
    }

    fn note(&self, call: Call) {
        self.calls.lock().expect("no panic").push(call);
    }
}

impl BalloonHost for Host {
    fn drop_pages(&self, why: Why, runs: &[GuestRun]) -> Result<Dropped, HostError> {
        self.note(Call::Drop(why, Self::check(runs)));
        if self.refuse.load(Ordering::Relaxed) {
            return Err("no".into());
        }
        self.zero(runs);
        Ok(Dropped::Done)
    }

    fn make_zeros(&self, runs: &[GuestRun]) -> Result<(), HostError> {
        if !runs.is_empty() {
            self.note(Call::Zeros(Self::check(runs)));
            self.zero(runs);
        }
        Ok(())
    }

    fn hinted(&self, command: u32, runs: &[GuestRun]) {
        self.note(Call::Hint(command, Self::check(runs)));
    }

    fn hints_end(&self, command: u32) {
        self.note(Call::End(command));
    }
}

/// Driver and memory of a guest, and a device with its registers.
#[derive(Debug)]
pub(crate) struct Driver<D: Device + 'static> {
    pub(crate) memory: Memory,
    pub(crate) line: Arc<Line>,
    pub(crate) device: Arc<MmioTransport<D>>,
    /// Next descriptor and next ring index of each queue that was set up.
    next: std::collections::BTreeMap<u16, (u16, u16)>,
}

/// Guest with a balloon.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) host: Arc<Host>,
    pub(crate) control: BalloonControl,
    driver: Driver<Balloon>,
}

impl Deref for Guest {
    type Target = Driver<Balloon>;

    fn deref(&self) -> &Driver<Balloon> {
        &self.driver
    }
}

impl DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut Driver<Balloon> {
        &mut self.driver
    }
}

#[derive(Debug)]
struct Bell<D>(OnceLock<Weak<MmioTransport<D>>>, Memory);

impl<D: Device> Doorbell for Bell<D> {
    fn ring(&self, queue: u16) {
        if let Some(device) = self.0.get().and_then(Weak::upgrade) {
            device.notify(&self.1, queue);
        }
    }
}

/// Returns the address of the descriptors of queue `index`. The rings of the queue follow.
pub(crate) fn rings(index: u16) -> u64 {
    0x1000 + 0x1000 * u64::from(index.min(8))
}
pub(crate) const AVAIL: u64 = 0x400;
pub(crate) const USED: u64 = 0x800;

pub(crate) fn memory() -> Memory {
    let page = |n: u64| GuestAddress(n << PAGE_SHIFT);
    let bytes = |pages: u64| usize::try_from(pages << PAGE_SHIFT).expect("small");
    Memory::from_ranges(&[(page(0), bytes(LOW)), (page(HIGH.0), bytes(HIGH.1))]).expect("memory")
}

impl Guest {
    pub(crate) fn new() -> Self {
        Self::with_extension(true)
    }

    /// Returns a guest whose balloon offers the extension if `extension` is true.
    pub(crate) fn with_extension(extension: bool) -> Self {
        let memory = memory();
        let host = Arc::new(Host { memory: memory.clone(), calls: Mutex::default(), refuse: false.into() });
        // A hole within the first region, as below 1 MiB.
        let piece = |region, pages| WholePages { region: RegionId(region), pages };
        let ram = vec![piece(0, 0..30), piece(0, 40..LOW), piece(1, 0..HIGH.1)];
        let options = BalloonOptions { layout: layout(), extension, ram };
        let make = |wiring: Wiring| Balloon::new(options, Arc::clone(&host) as _, wiring.signals);
        let mut control = None;
        let driver = Driver::new(memory, |wiring| {
            let balloon = make(wiring);
            control = Some(balloon.control());
            balloon
        });
        Self { host, control: control.expect("was made"), driver }
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.host.calls.lock().expect("no panic"))
    }

    /// Returns a guest whose driver accepts VERSION_1 and `bits`, and sets up `queues`.
    pub(crate) fn ready(bits: &[u32], queues: &[u16]) -> Self {
        let mut guest = Self::new();
        guest.start(bits, queues);
        guest
    }

    /// Returns another guest of this kind, with this guest's memory and state.
    pub(crate) fn moved(&self) -> Self {
        let there = Self::new();
        self.move_to(&there);
        there
    }
}

impl<D: Device + 'static> Driver<D> {
    /// Returns the device that `make` creates, before its driver starts.
    pub(crate) fn new(memory: Memory, make: impl FnOnce(Wiring) -> D) -> Self {
        let line = Arc::new(Line::default());
        let signals = Signals::new(Box::new(Wire(Arc::clone(&line))));
        let bell = Arc::new(Bell(OnceLock::new(), memory.clone()));
        let wiring = Wiring { signals: Arc::clone(&signals), doorbell: Arc::clone(&bell) as _ };
        let device = Arc::new(MmioTransport::new(make(wiring), signals));
        bell.0.set(Arc::downgrade(&device)).expect("set once");
        Self { memory, line, device, next: Default::default() }
    }

    pub(crate) fn set(&self, at: u32, value: u32) {
        self.device.write(&self.memory, at.into(), &value.to_le_bytes());
    }

    pub(crate) fn get(&self, at: u32) -> u32 {
        let mut bytes = [0; 4];
        self.device.read(at.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn config(&self, offset: u32) -> u32 {
        self.get(register::VIRTIO_MMIO_CONFIG + offset)
    }

    pub(crate) fn interrupts(&self) -> u32 {
        self.line.0.load(Ordering::Relaxed)
    }

    /// Negotiates up to FEATURES_OK, with the device features of `bits`. Returns true if the device
    /// accepted them.
    pub(crate) fn negotiate(&mut self, bits: &[u32]) -> bool {
        self.next.clear();
        self.set(register::VIRTIO_MMIO_STATUS, 0);
        self.set(register::VIRTIO_MMIO_STATUS, 3);
        for select in 0..4 {
            let in_bank =
                bits.iter().filter(|bit| **bit / 32 == select).fold(0, |bank, bit| bank | 1 << (bit % 32));
            self.set(register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.set(register::VIRTIO_MMIO_DRIVER_FEATURES, in_bank);
        }
        self.set(register::VIRTIO_MMIO_STATUS, 0xb);
        self.get(register::VIRTIO_MMIO_STATUS) & 8 != 0
    }

    pub(crate) fn queue(&mut self, index: u16) {
        let at = u32::try_from(rings(index)).expect("low");
        self.set(register::VIRTIO_MMIO_QUEUE_SEL, index.into());
        self.set(register::VIRTIO_MMIO_QUEUE_NUM, SIZE.into());
        for (low, address) in [
            (register::VIRTIO_MMIO_QUEUE_DESC_LOW, at),
            (register::VIRTIO_MMIO_QUEUE_AVAIL_LOW, at + 0x400),
            (register::VIRTIO_MMIO_QUEUE_USED_LOW, at + 0x800),
        ] {
            self.set(low, address);
            self.set(low + 4, 0);
        }
        self.memory.write_slice(&[0; 0x1000], GuestAddress(rings(index))).expect("memory");
        self.set(register::VIRTIO_MMIO_QUEUE_READY, 1);
        self.next.insert(index, (0, 0));
    }

    pub(crate) fn ok(&self) {
        self.set(register::VIRTIO_MMIO_STATUS, 0xf);
        self.work();
    }

    /// Starts a driver that accepts VERSION_1 and `bits`, and sets up `queues`.
    pub(crate) fn start(&mut self, bits: &[u32], queues: &[u16]) {
        assert!(self.negotiate(&[&[32], bits].concat()));
        queues.iter().for_each(|queue| self.queue(*queue));
        self.ok();
    }

    /// Does what a vCPU's thread does before it runs on. The work is bounded, because a hostile
    /// guest can keep the thread busy.
    pub(crate) fn work(&self) {
        for _ in 0..8 {
            if !self.device.due() || !self.device.work(&self.memory) {
                break;
            }
        }
    }

    pub(crate) fn notify(&self, queue: u16) {
        self.set(register::VIRTIO_MMIO_QUEUE_NOTIFY, queue.into());
        self.work();
    }

    pub(crate) fn descriptor(&self, queue: u16, index: u16, (gpa, len, flags, next): (u64, u32, u16, u16)) {
        let at = GuestAddress(rings(queue) + 16 * u64::from(index));
        let bytes =
            [&gpa.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.memory.write_slice(&bytes, at).expect("memory");
    }

    /// Offers the chain at descriptor `head`.
    pub(crate) fn offer_chain(&mut self, queue: u16, head: u16) {
        let (_, place) = self.next.get_mut(&queue).expect("a queue that was set up");
        let at = rings(queue) + AVAIL;
        let slot = GuestAddress(at + 4 + 2 * u64::from(*place % SIZE));
        self.memory.write_obj(head, slot).expect("memory");
        *place = place.wrapping_add(1);
        self.memory.write_obj(*place, GuestAddress(at + 2)).expect("memory");
    }

    /// Offers a buffer of `parts` (address, length, flags without NEXT).
    pub(crate) fn offer(&mut self, queue: u16, parts: &[(u64, u32, u16)]) {
        let (head, _) = self.next[&queue];
        for (n, (gpa, len, flags)) in (0u16..).zip(parts) {
            let index = (head + n) % SIZE;
            let last = usize::from(n) + 1 == parts.len();
            let next = if last { 0 } else { NEXT };
            self.descriptor(queue, index, (*gpa, *len, flags | next, (index + 1) % SIZE));
        }
        let count = u16::try_from(parts.len()).expect("few");
        self.next.get_mut(&queue).expect("a queue").0 = (head + count) % SIZE;
        self.offer_chain(queue, head);
    }

    pub(crate) fn send(&mut self, queue: u16, parts: &[(u64, u32, u16)]) {
        self.offer(queue, parts);
        self.notify(queue);
    }

    /// Continues with the descriptors and rings of `other`, whose memory and state were moved to
    /// this guest.
    pub(crate) fn adopt(&mut self, other: &Self) {
        self.next.clone_from(&other.next);
    }

    /// Moves memory and state to `there`, another guest of this kind.
    pub(crate) fn move_to(&self, there: &Self) {
        for page in (0..LOW).chain(HIGH.0..HIGH.0 + HIGH.1) {
            let (mut bytes, at) = ([0; 4096], GuestAddress(page << PAGE_SHIFT));
            self.memory.read_slice(&mut bytes, at).expect("memory");
            there.memory.write_slice(&bytes, at).expect("memory");
        }
        there.device.load(&there.memory, &self.device.save()).expect("state as it was saved");
    }

    /// Returns the number of buffers that the device has given back.
    pub(crate) fn used(&self, queue: u16) -> u16 {
        self.memory.read_obj(GuestAddress(rings(queue) + USED + 2)).expect("memory")
    }

    /// Returns the length that came with buffer number `place`.
    pub(crate) fn used_len(&self, queue: u16, place: u16) -> u32 {
        let at = rings(queue) + USED + 4 + 8 * u64::from(place % SIZE);
        self.memory.read_obj(GuestAddress(at + 4)).expect("memory")
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.get(register::VIRTIO_MMIO_STATUS) & 64 != 0
    }

    /// Writes `bytes` to page 20, which nothing else uses, and returns the part for them.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> (u64, u32, u16) {
        self.memory.write_slice(bytes, GuestAddress(0x14000)).expect("memory");
        (0x14000, u32::try_from(bytes.len()).expect("short"), 0)
    }
}
