//! Tests of a disk whose notifications arrive on a thread of its own.

use super::quiesce::soon;
use super::*;
use crate::device::Resume;
use crate::testing::{AVAIL, USED};
use std::sync::Arc;
use std::time::Duration;

/// Returns the ring index at which the driver is asked to notify (2.7.10).
fn wants_notification_at(guest: &DiskGuest) -> u16 {
    guest.memory.read_obj(GuestAddress(rings(0) + USED + 4 + 8 * u64::from(SIZE))).unwrap()
}

const EVENT_IDX: u32 = 29;

#[test]
fn cached_requests_are_done_at_once_and_given_back_together() {
    let mut guest = DiskGuest::attended(&[&ALL[..], &[EVENT_IDX]].concat(), true);
    let before = guest.interrupts();
    for number in 0..5 {
        guest.write_of(number, 0x33);
    }
    // The driver wants an interrupt for the fifth buffer.
    guest.memory.write_obj(4u16, GuestAddress(rings(0) + AVAIL + 4 + 2 * u64::from(SIZE))).unwrap();
    guest.kick();
    guest.wait(5);
    until("the interrupt", || guest.interrupts() == before + 1);
    until("the request for a notification", || wants_notification_at(&guest) == 5);
    assert_eq!((0..5).map(|n| guest.sector(n)).collect::<Vec<_>>(), [0x33; 5]);
    assert_eq!((guest.figures().at_once, guest.figures().writes), (5, 5));
    assert_eq!(guest.interrupts(), before + 1);
}

#[test]
fn requests_that_wait_go_to_other_threads_and_delay_no_other_request() {
    let mut guest = DiskGuest::attended(&ALL, false);
    guest.disk.gate(false);
    guest.write_of(0, 1);
    guest.write_of(1, 1);
    guest.kick();
    guest.waiting(2);
    // Both threads are at the gate. The attendant is not.
    guest.write_of(2, 1);
    guest.kick();
    until("the third request under way", || guest.work.held() == 3);
    guest.disk.gate(true);
    guest.wait(3);
    assert_eq!([0, 1, 2].map(|n| guest.sector(n)), [1; 3]);
    assert_eq!(guest.figures().at_once, 0);
    // A flush always needs a wait, and so does a write for a driver without flushes.
    guest.disk.cached.store(true, std::sync::atomic::Ordering::Relaxed);
    let flush = [guest.header(3, spec::VIRTIO_BLK_T_FLUSH, 0), guest.answer(3)];
    guest.offer(0, &flush);
    guest.kick();
    guest.wait(4);
    assert_eq!((guest.answered(3), guest.figures().at_once, guest.figures().flushes), (OK, 0, 1));
    guest.start(&[], &[0]);
    guest.write_of(4, 9);
    guest.kick();
    guest.wait(1);
    assert_eq!((guest.sector(4), guest.figures().at_once), (9, 0));
    assert!(guest.disk.calls().contains(&DiskCall::Flush));
}

#[test]
fn driver_gets_the_status_of_a_request_done_at_once() {
    let mut guest = DiskGuest::attended(&ALL, true);
    let read = [guest.header(0, spec::VIRTIO_BLK_T_IN, 7), (DATA, 1024, WRITE), guest.answer(0)];
    guest.offer(0, &read);
    guest.kick();
    guest.wait(1);
    assert_eq!((guest.answered(0), guest.used_len(0, 0)), (OK, 1025));
    assert_eq!(guest.data(DATA, 1024), content()[7 * 512..9 * 512]);
    // A request that the file refuses is tried again by a thread, which reports the error.
    guest.disk.fail.store(true, std::sync::atomic::Ordering::Relaxed);
    guest.write_of(1, 1);
    guest.kick();
    guest.wait(2);
    assert_eq!((guest.answered(1), guest.figures().io_errors), (IO_ERROR, 1));
}

/// Notifications that have not been received when the guest is stopped are not lost. Neither the
/// source nor the target needs them.
#[test]
fn guest_stopped_with_a_pending_notification_loses_no_request() {
    for cached in [false, true] {
        let mut guest = DiskGuest::attended(&ALL, cached);
        for round in 0..100u8 {
            for number in 0..3 {
                guest.write_of(number, round);
            }
            guest.kick();
            assert!(guest.device.quiesce(soon()));
            let at_rest = guest.used(0);
            if round % 10 == 0 {
                // A request that is begun while quiesced needs less time. On a busy host the test
                // may miss a defect.
                std::thread::sleep(Duration::from_micros(300));
            }
            assert_eq!(guest.used(0), at_rest, "a request was begun while quiesced");
            // In some rounds the bell is rung only after the guest runs again.
            guest.device.resumed(Resume::Again).unwrap();
            guest.work();
            guest.wait((u16::from(round) + 1) * 3);
            assert_eq!([0, 1, 2].map(|n| guest.sector(n)), [round; 3]);
        }
        guest.write_of(0, 0xff);
        assert!(guest.device.quiesce(soon()));
        guest.kick();
        // As above.
        std::thread::sleep(Duration::from_millis(5));
        assert_ne!(guest.sector(0), 0xff, "the request was begun while quiesced");
        let there = guest.moved();
        there.device.resumed(Resume::Moved).unwrap();
        there.work();
        there.wait(301);
        assert_eq!(there.sector(0), 0xff);
    }
}

/// The attendant tries a request, and hands it to another thread during the reset.
#[test]
fn reset_drops_a_request_that_is_handed_over_meanwhile() {
    let mut guest = DiskGuest::attended(&ALL, false);
    guest.disk.undecided.store(true, std::sync::atomic::Ordering::Relaxed);
    guest.disk.gate(false);
    guest.write_of(0, 7);
    guest.kick();
    guest.waiting(1);
    let work = Arc::clone(&guest.work);
    let reset = std::thread::spawn(move || work.forget());
    // The reset waits for the request.
    std::thread::sleep(Duration::from_millis(50));
    assert!(!reset.is_finished());
    guest.disk.gate(true);
    until("the reset", || reset.is_finished());
    assert_eq!(guest.work.held(), 0, "the request is forgotten");
    assert_eq!(guest.sector(0), 0, "the request was executed after the reset");
    reset.join().unwrap();
}

#[test]
fn attendant_survives_a_busy_driver_and_resets() {
    let mut guest = DiskGuest::attended(&ALL, true);
    for round in 0..50u16 {
        for number in 0..4 {
            guest.write_of(number, round.to_le_bytes()[0]);
            guest.kick();
        }
        if round % 3 == 0 {
            // A reset at any state of the requests.
            guest.start(&ALL, &[0]);
        } else {
            let given = if round % 3 == 1 { 4 } else { 8 };
            guest.wait(given);
        }
    }
    assert!(!guest.needs_reset());
}
