//! Tests of the random number device.

use super::*;
use crate::device::Resume;
use crate::testing::{Driver, WRITE, memory};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_mmio as register;
use vm_memory::{Bytes, GuestAddress};

const DATA: u64 = 0x2_0000;

fn ready() -> (Driver<Rng>, Arc<metrics::Metrics>) {
    let mut shared = None;
    let mut guest = Driver::new(memory(), |wiring| {
        let rng = Rng::new(wiring).expect("a thread");
        shared = Some(rng.shared_metrics());
        rng
    });
    guest.start(&[], &[0]);
    (guest, shared.expect("was made"))
}

fn data(guest: &Driver<Rng>, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    guest.memory.read_slice(&mut bytes, GuestAddress(at)).expect("memory");
    bytes
}

#[test]
fn buffers_are_filled_and_memory_around_them_is_unchanged() {
    let (mut guest, metrics) = ready();
    assert_eq!(guest.get(register::VIRTIO_MMIO_DEVICE_ID), 4);
    guest.send(0, &[(DATA + 8, 64, WRITE), (DATA + 0x1000, 5000, WRITE)]);
    assert_eq!((guest.used(0), guest.used_len(0, 0), guest.interrupts()), (1, 5064, 1));
    let first = data(&guest, DATA, 80);
    assert_eq!((&first[..8], &first[72..]), (&[0; 8][..], &[0; 8][..]));
    // The probability of zeros is one in 2^512.
    assert_ne!(first[8..72], [0; 64]);
    let second = data(&guest, DATA + 0x1000, 5008);
    assert_eq!(second[5000..], [0; 8]);
    assert_ne!(second[4900..5000], [0; 100]);
    assert_ne!(first[8..72], second[..64]);
    assert_eq!(metrics.figures(), {
        let mut f = RngFigures::default();
        (f.buffers, f.bytes) = (1, 5064);
        f
    });
}

#[test]
fn malformed_buffers_are_given_back() {
    let (mut guest, metrics) = ready();
    for parts in [vec![(DATA, 64, 0)], vec![(0x5_0000, 64, WRITE)], vec![(DATA, 64, 0), (DATA, 64, WRITE)]] {
        guest.send(0, &parts);
    }
    assert_eq!((guest.used(0), metrics.malformed.load(Relaxed)), (3, 3));
    assert!(!guest.needs_reset());
    guest.send(0, &[(DATA, 16, WRITE)]);
    assert_eq!(guest.used_len(0, 3), 16);
}

#[test]
fn guest_gets_no_more_than_its_budget() {
    let (mut guest, metrics) = ready();
    let began = Instant::now();
    // With 32 KiB each, the third buffer has to wait for new budget.
    let mut got = 0;
    for n in 0..6u16 {
        guest.send(0, &[(DATA, 32 << 10, WRITE)]);
        vmferry_testkit::wait("the timer's bell", || guest.used(0) > n);
        let len = guest.used_len(0, n);
        assert!(len > 0, "an empty buffer");
        got += u64::from(len);
    }
    let elapsed = began.elapsed();
    let most =
        BURST + u64::try_from(elapsed.as_nanos() * u128::from(BYTES_PER_SECOND) / 1_000_000_000).unwrap();
    assert!(got <= most, "{got} bytes in {elapsed:?}");
    assert!(got > BURST, "more than the first burst: {got}");
    assert!(metrics.waits.load(Relaxed) > 0);
}

#[test]
fn nothing_is_drawn_between_quiesce_and_resume() {
    let (mut guest, metrics) = ready();
    guest.send(0, &[(DATA, 60 << 10, WRITE)]);
    guest.send(0, &[(DATA, 32 << 10, WRITE)]);
    while metrics.waits.load(Relaxed) == 0 {
        guest.send(0, &[(DATA, 32 << 10, WRITE)]);
    }
    guest.offer(0, &[(DATA, 32 << 10, WRITE)]);
    assert!(guest.device.quiesce(Instant::now() + vmferry_testkit::PATIENCE));
    let (saved, used) = (guest.device.save(), guest.used(0));
    // The timer would ring within this time. On a busy host the test may miss a defect.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!((guest.device.save(), guest.used(0)), (saved, used));
    guest.device.resumed(Resume::Again).unwrap();
    guest.work();
    assert!(guest.used(0) > used);
}
