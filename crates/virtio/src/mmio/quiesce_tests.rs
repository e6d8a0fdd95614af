//! Tests of a device with a thread of its own that completes requests while the vCPUs run, is
//! quiesced, and resumes.

use super::*;
use crate::device::Progress;
use crate::queue::Buffer;
use crate::signals::Interrupt;
use crate::testing::{Memory, rings};
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use vm_memory::Bytes;

const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = vmferry_testkit::PATIENCE;

#[derive(Debug, Default)]
struct Line(AtomicU32);

impl Interrupt for Arc<Line> {
    fn trigger(&self) -> std::io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Device that gives its buffers to another thread, and back to the driver when they return.
#[derive(Debug)]
struct Slow {
    signals: Arc<Signals>,
    out: Sender<u16>,
    back: Receiver<u16>,
    away: u32,
    quiescing: bool,
    refuses: bool,
    buffer: Buffer,
}

impl Device for Slow {
    type Saved = ();
    const ID: u32 = 99;
    const QUEUES: &'static [QueueSpec] = &[QueueSpec { index: 0, max_size: 16 }];

    fn features(&self) -> u128 {
        0
    }
    fn read_config(&self, _: u64, _: &mut [u8]) {}
    fn write_config(&mut self, _: u64, _: &[u8]) {}
    fn activate(&mut self, _: u128, _: &[u16]) {}
    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError> {
        for head in self.back.try_iter() {
            queue.give_back(memory, head, 0)?;
            self.away -= 1;
            self.signals.used_buffer();
        }
        while !self.quiescing && queue.pop(memory, &mut self.buffer)? {
            self.out.send(self.buffer.head()).expect("the receiver exists");
            self.away += 1;
        }
        Ok(Progress::Done)
    }
    fn quiesce(&mut self) -> bool {
        self.quiescing = true;
        self.away == 0
    }
    fn resumed(&mut self, _: Resume) -> Result<(), String> {
        self.quiescing = self.refuses;
        if self.refuses { Err("no".to_owned()) } else { Ok(()) }
    }
    fn reset(&mut self) {}
    fn broken(&mut self, _: &RingError) {}
    fn save(&self) {}
    fn load(&mut self, (): &(), _: Option<(u128, &[QueueSpec])>) -> Result<bool, String> {
        Ok(false)
    }
}

struct Rig {
    device: MmioTransport<Slow>,
    memory: Memory,
    line: Arc<Line>,
    requests: Receiver<u16>,
    done: Sender<u16>,
    offered: u16,
}

impl Rig {
    /// Returns a device whose driver is ready.
    fn new(refuses: bool) -> Self {
        let line = Arc::new(Line::default());
        let signals = Signals::new(Box::new(Arc::clone(&line)));
        let ((out, requests), (done, back)) = (channel(), channel());
        let slow = Slow {
            signals: Arc::clone(&signals),
            out,
            back,
            away: 0,
            quiescing: false,
            refuses,
            buffer: Buffer::default(),
        };
        let memory = Memory::from_ranges(&[(GuestAddress(0), 64 << 12)]).unwrap();
        let device = MmioTransport::new(slow, signals);
        let rig = Self { device, memory, line, requests, done, offered: 0 };
        let at = u32::try_from(rings(0)).unwrap();
        for (register, value) in [
            (register::VIRTIO_MMIO_STATUS, 3),
            (register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1),
            (register::VIRTIO_MMIO_DRIVER_FEATURES, 1),
            (register::VIRTIO_MMIO_STATUS, 0xb),
            (register::VIRTIO_MMIO_QUEUE_NUM, 16),
            (register::VIRTIO_MMIO_QUEUE_DESC_LOW, at),
            (register::VIRTIO_MMIO_QUEUE_AVAIL_LOW, at + 0x400),
            (register::VIRTIO_MMIO_QUEUE_USED_LOW, at + 0x800),
            (register::VIRTIO_MMIO_QUEUE_READY, 1),
            (register::VIRTIO_MMIO_STATUS, 0xf),
        ] {
            rig.device.write(&rig.memory, register.into(), &u32::to_le_bytes(value));
        }
        rig
    }

    /// Offers the buffer whose descriptor has the next number, and notifies.
    fn offer(&mut self) {
        let write = |at: u64, bytes: &[u8]| {
            self.memory.write_slice(bytes, GuestAddress(rings(0) + at)).unwrap();
        };
        let head = self.offered;
        write(u64::from(head) * 16, &[0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        write(0x404 + u64::from(head) * 2, &head.to_le_bytes());
        self.offered += 1;
        write(0x402, &self.offered.to_le_bytes());
        self.device.write(&self.memory, register::VIRTIO_MMIO_QUEUE_NOTIFY.into(), &[0; 4]);
    }

    fn used(&self) -> u16 {
        self.memory.read_obj(GuestAddress(rings(0) + 0x802)).unwrap()
    }
}

#[test]
fn request_is_completed_by_the_thread_that_rings() {
    let mut rig = Rig::new(false);
    rig.offer();
    let head = rig.requests.recv_timeout(LONG).unwrap();
    assert_eq!((head, rig.used()), (0, 0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            rig.done.send(head).unwrap();
            rig.device.notify(&rig.memory, 0);
        });
    });
    assert_eq!((rig.used(), rig.line.0.load(Ordering::Relaxed)), (1, 1));
}

#[test]
fn device_quiesces_when_nothing_is_under_way_and_begins_nothing_until_resumed() {
    let mut rig = Rig::new(false);
    rig.offer();
    let head = rig.requests.recv_timeout(LONG).unwrap();
    assert!(!rig.device.quiesce(Instant::now() + SHORT), "a request is under way");
    rig.offer();
    assert!(rig.requests.try_recv().is_err(), "a request was begun while quiesced");
    std::thread::scope(|scope| {
        let rest = scope.spawn(|| rig.device.quiesce(Instant::now() + LONG));
        // The other thread then waits, unless this host is busy. The result is the same without the
        // wait.
        std::thread::sleep(SHORT);
        rig.done.send(head).unwrap();
        rig.device.notify(&rig.memory, 0);
        assert!(rest.join().unwrap());
    });
    assert_eq!(rig.used(), 1, "the saved state has the request that was under way");
    assert!(rig.requests.try_recv().is_err());
    rig.device.resumed(Resume::Again).unwrap();
    assert!(rig.device.due() && rig.device.work(&rig.memory));
    assert_eq!(
        rig.requests.recv_timeout(LONG),
        Ok(1),
        "a request that was offered while quiesced is begun after the resume"
    );
}

#[test]
fn device_that_cannot_resume_reports_it_and_stays_quiesced() {
    let mut rig = Rig::new(true);
    assert!(rig.device.quiesce(Instant::now() + LONG));
    rig.offer();
    assert_eq!(rig.device.resumed(Resume::Again), Err("no".to_owned()));
    assert!(!rig.device.due() && rig.requests.try_recv().is_err());
}
