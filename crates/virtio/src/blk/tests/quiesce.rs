//! Tests of requests under way: apart from the vCPU, quiesced, moved, and taken away.

use super::*;
use crate::device::Resume;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(50);

pub(super) fn soon() -> Instant {
    Instant::now() + vmferry_testkit::PATIENCE
}

impl DiskGuest {
    /// Offers request `number`, a write of `byte` to sector `number`.
    pub(super) fn write_of(&mut self, number: u64, byte: u8) {
        let at = DATA + 0x1000 * number;
        self.memory.write_slice(&[byte; 512], GuestAddress(at)).unwrap();
        let parts = [self.header(number, 1, number), (at, 512, 0), self.answer(number)];
        self.offer(0, &parts);
    }

    pub(super) fn sector(&self, number: u64) -> u8 {
        let number = usize::try_from(number).unwrap();
        let bytes = self.disk.bytes();
        let sector = &bytes[number * 512..][..512];
        assert!(sector.iter().all(|byte| *byte == sector[0]) || sector == &content()[number * 512..][..512]);
        sector[0]
    }

    pub(super) fn waiting(&self, count: usize) {
        until("requests at the gate", || self.disk.waiting.load(Ordering::Relaxed) == count);
    }
}

#[test]
fn notification_does_not_wait_for_the_disk() {
    let mut guest = DiskGuest::ready(&ALL);
    guest.disk.gate(false);
    for number in 0..4 {
        guest.write_of(number, 0x40);
        guest.notify(0);
    }
    // Two threads begin two requests.
    guest.waiting(2);
    assert_eq!((guest.used(0), guest.interrupts()), (0, 0));
    guest.disk.gate(true);
    guest.wait(4);
    assert!(guest.interrupts() > 0);
    for number in 0..4 {
        assert_eq!((guest.answered(number), guest.sector(number)), (OK, 0x40));
    }
}

#[test]
fn quiesced_disk_has_done_begun_requests_and_left_the_others_in_the_ring() {
    let mut guest = DiskGuest::ready(&ALL);
    guest.disk.gate(false);
    for number in 0..2 {
        guest.write_of(number, 1);
    }
    guest.notify(0);
    guest.waiting(2);
    assert!(!guest.device.quiesce(Instant::now() + SHORT), "two are at the gate");
    // A request that is offered after that is neither begun nor lost.
    guest.write_of(2, 2);
    guest.notify(0);
    guest.disk.gate(true);
    assert!(guest.device.quiesce(soon()));
    assert_eq!((guest.used(0), guest.answered(2)), (2, NONE));
    assert_ne!(guest.sector(2), 2);
    assert!(guest.device.quiesce(Instant::now()), "the disk stays quiesced");

    let (saved, disk) = (guest.device.save(), guest.disk.bytes());
    assert_eq!((saved.queues[0].next_avail, saved.queues[0].next_used), (2, 2));
    let there = guest.moved();
    assert_eq!(there.device.save(), saved);
    // Nothing happens on either side until one is resumed. On a busy host the test may miss a
    // defect.
    std::thread::sleep(SHORT);
    assert_eq!((guest.disk.bytes(), there.used(0)), (disk, 2));
    there.device.resumed(Resume::Moved).unwrap();
    there.work();
    there.wait(3);
    assert_eq!((there.answered(2), there.sector(2)), (OK, 2));
}

#[test]
fn guest_that_stays_continues_after_quiescing() {
    let mut guest = DiskGuest::ready(&ALL);
    for round in 0..20u8 {
        for number in 0..3 {
            guest.write_of(number, round);
        }
        guest.notify(0);
        assert!(guest.device.quiesce(soon()));
        let at_rest = guest.used(0);
        // A request that is begun while quiesced needs less time. On a busy host the test may miss
        // a defect.
        std::thread::sleep(Duration::from_micros(300));
        assert_eq!(guest.used(0), at_rest);
        guest.device.resumed(Resume::Again).unwrap();
        guest.work();
        guest.wait((u16::from(round) + 1) * 3);
        assert_eq!([0, 1, 2].map(|n| guest.sector(n)), [round; 3]);
    }
}

#[test]
fn reset_waits_for_begun_requests_and_drops_the_others() {
    let mut guest = DiskGuest::ready(&ALL);
    guest.disk.gate(false);
    for number in 0..4 {
        guest.write_of(number, 7);
    }
    guest.notify(0);
    guest.waiting(2);
    let (device, memory) = (std::sync::Arc::clone(&guest.device), guest.memory.clone());
    let reset = std::thread::spawn(move || device.write(&memory, 0x70, &[0; 4]));
    // A reset that does not wait needs less time. On a busy host the test may miss a defect.
    std::thread::sleep(SHORT);
    assert!(!reset.is_finished(), "the reset returned while a request may still write guest memory");
    guest.disk.gate(true);
    reset.join().unwrap();
    assert_eq!([0, 1, 2, 3].map(|number| guest.sector(number) == 7), [true, true, false, false]);
    guest.start(&ALL, &[0]);
    assert_eq!(guest.submit(0, 0, &[(DATA, 512, WRITE)]).0, OK);
    // Nothing of the old ring is given back into the new one. The used buffer is that of the
    // request above.
    assert_eq!((guest.used(0), guest.needs_reset()), (1, false));
}

#[test]
fn abandoned_device_quiesces() {
    type GiveUp = fn(&DiskGuest);
    let ways: [(&str, GiveUp); 3] = [
        ("the queue is switched off", |guest| {
            guest.set(register::VIRTIO_MMIO_QUEUE_SEL, 0);
            guest.set(register::VIRTIO_MMIO_QUEUE_READY, 0);
        }),
        ("the driver has failed", |guest| guest.set(register::VIRTIO_MMIO_STATUS, 0x80 | 0xf)),
        ("the ring is broken", |guest| {
            guest.descriptor(0, 9, (DATA, 16, NEXT, 9));
            let place: u16 = guest.memory.read_obj(GuestAddress(rings(0) + 0x402)).unwrap();
            guest.memory.write_obj(9u16, GuestAddress(rings(0) + 0x404 + 2 * u64::from(place))).unwrap();
            guest.memory.write_obj(place + 1, GuestAddress(rings(0) + 0x402)).unwrap();
            guest.notify(0);
            assert!(guest.needs_reset());
        }),
    ];
    for (name, give_up) in ways {
        let mut guest = DiskGuest::ready(&ALL);
        guest.disk.gate(false);
        guest.write_of(0, 9);
        guest.write_of(1, 9);
        guest.notify(0);
        guest.waiting(2);
        // Switching a queue off waits until nothing uses it any more.
        let disk = std::sync::Arc::clone(&guest.disk);
        let later = std::thread::spawn(move || {
            // `give_up` then waits for the gate, unless this host is busy. The result is the same
            // without the wait.
            std::thread::sleep(SHORT);
            disk.gate(true);
        });
        give_up(&guest);
        assert!(guest.device.quiesce(soon()), "{name}");
        assert_eq!(guest.used(0), 0, "{name}");
        later.join().unwrap();
        guest.device.resumed(Resume::Again).unwrap();
        guest.start(&ALL, &[0]);
        assert_eq!(guest.submit(0, 0, &[(DATA, 512, WRITE)]).0, OK, "{name}");
    }
}

#[test]
fn device_takes_no_more_requests_than_the_queue_has_entries() {
    // The same buffer is offered again and again, as fast as it is taken. The driver controls both
    // rings.
    let mut guest = DiskGuest::ready(&ALL);
    guest.disk.gate(false);
    guest.write_of(0, 3);
    for _ in 1..2 * SIZE {
        guest.notify(0);
        guest.offer_chain(0, 0);
    }
    guest.notify(0);
    assert_eq!(guest.work.held(), usize::from(SIZE));
    guest.disk.gate(true);
    guest.wait(2 * SIZE);
    assert!(!guest.needs_reset());
}

#[test]
fn state_of_another_disk_is_refused_and_changes_nothing() {
    let guest = DiskGuest::ready(&ALL);
    let good = guest.device.save();
    type Harm = fn(&mut BlkSaved);
    let harms: [(&str, Harm); 3] = [
        ("65 sectors", |saved| saved.sectors += 1),
        ("read-only", |saved| saved.read_only = true),
        ("called ?isk7", |saved| saved.id[0] = b'?'),
    ];
    for (words, harm) in harms {
        let mut bad = good.clone();
        harm(&mut bad.device);
        let other = DiskGuest::new(options(false), 1);
        let before = other.device.save();
        let error = other.device.load(&other.memory, &bad).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("64 sectors, writable, called disk7"), "{error}");
        assert_eq!(other.device.save(), before);
        other.device.load(&other.memory, &good).unwrap();
    }
}

/// Bell that is rung by a thread which then sleeps in the ring, as on a missing page.
#[test]
fn pause_and_resume_do_not_wait_for_a_thread_that_sleeps_in_the_ring() {
    use crate::device::{Device, Progress, QueueSpec};
    use crate::queue::{RingError, VirtQueue};
    use crate::testing::{Driver, memory};
    use std::sync::{Arc, Barrier, mpsc};
    use vm_memory::GuestMemory;

    #[derive(Debug)]
    struct Sleeper(Arc<Barrier>, mpsc::Sender<Resume>);
    impl Device for Sleeper {
        type Saved = ();
        const ID: u32 = 99;
        const QUEUES: &'static [QueueSpec] = &[QueueSpec { index: 0, max_size: 16 }];
        fn features(&self) -> u128 {
            0
        }
        fn read_config(&self, _: u64, _: &mut [u8]) {}
        fn write_config(&mut self, _: u64, _: &[u8]) {}
        fn activate(&mut self, _: u128, _: &[u16]) {}
        fn serve<M: GuestMemory>(
            &mut self,
            queue: &mut VirtQueue,
            memory: &M,
        ) -> Result<Progress, RingError> {
            if queue.pop(memory, &mut crate::queue::Buffer::default())? {
                self.0.wait();
                self.0.wait();
            }
            Ok(Progress::Done)
        }
        fn resumed(&mut self, how: Resume) -> Result<(), String> {
            self.1.send(how).map_err(|error| error.to_string())
        }
        fn reset(&mut self) {}
        fn broken(&mut self, _: &RingError) {}
        fn save(&self) {}
        fn load(&mut self, (): &(), _: Option<(u128, &[QueueSpec])>) -> Result<bool, String> {
            Ok(false)
        }
    }

    let (barrier, (sender, told)) = (Arc::new(Barrier::new(2)), mpsc::channel());
    let mut guest = Driver::new(memory(), |_| Sleeper(Arc::clone(&barrier), sender));
    guest.start(&[], &[0]);
    guest.offer(0, &[(DATA, 16, 0)]);
    let (device, memory) = (Arc::clone(&guest.device), guest.memory.clone());
    let sleeper = std::thread::spawn(move || device.notify(&memory, 0));
    barrier.wait();
    assert!(!guest.device.quiesce(Instant::now() + SHORT));
    guest.device.resumed(Resume::Again).unwrap();
    assert!(told.try_recv().is_err());
    assert!(guest.device.due() && !guest.device.work(&guest.memory), "another thread serves the device");
    barrier.wait();
    sleeper.join().unwrap();
    assert_eq!(told.recv_timeout(vmferry_testkit::PATIENCE).unwrap(), Resume::Again);
    assert!(!guest.device.due());
}
