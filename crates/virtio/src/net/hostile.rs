//! Network driver that follows arbitrary bytes, and a network that sends arbitrary frames. For the
//! fuzz target and for the tests.

use super::testing::{NetGuest, lock};
use super::{ETHERNET, FRAME_MAX, HEADER, RX, TX};
use crate::hostile::{Choices, moved};
use crate::testing::{AVAIL, NEXT, SIZE, WRITE, rings};
use std::sync::atomic::Ordering;
use std::time::Instant;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes, GuestAddress};

/// Maximum number of steps. Bytes after the last step are not used.
const STEPS: usize = 256;
/// Maximum number of frames that wait on the wire. The memory use of a run should be that of the
/// device, not of this network.
const WAITING: usize = 32;

/// Drives a network interface as `bytes` say.
///
/// # Panics
/// Panics if something is sent that is not a frame, if there is more work than a step can explain,
/// if saved state is not loaded, or if the device panics.
pub fn drive(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let mut guest = NetGuest::new();
    start(&mut guest, &mut choices);
    for _ in 0..STEPS {
        if choices.0.is_empty() {
            break;
        }
        step(&mut guest, &mut choices);
        for frame in lock(&guest.wire().sent).drain(..) {
            assert!((HEADER + ETHERNET..=FRAME_MAX).contains(&frame.len()), "{} bytes", frame.len());
        }
    }
}

/// Initializes the driver, with features and queues as chosen.
fn start(guest: &mut NetGuest, choices: &mut Choices<'_>) {
    let left_out = u32::from(choices.word());
    let queues = choices.byte();
    let offered = super::testing::ALL.into_iter().zip(0..);
    let mut bits: Vec<u32> = offered.filter(|(_, n)| left_out >> n & 1 == 0).map(|(bit, _)| bit).collect();
    // The event index and indirect descriptors are left out in some runs. The specification allows
    // both with any other feature.
    bits.retain(|bit| *bit != VIRTIO_RING_F_EVENT_IDX || queues & 8 == 0);
    bits.extend((queues & 16 == 0).then_some(28));
    bits.push(32);
    guest.driver.negotiate(&bits);
    for queue in [RX, TX, 2] {
        if queues >> queue & 1 == 0 {
            guest.driver.queue(queue);
        }
    }
    guest.driver.ok();
}

fn step(guest: &mut NetGuest, choices: &mut Choices<'_>) {
    match choices.byte() % 16 {
        0..5 => {
            let queue = u16::from(choices.byte() % 3);
            chain(guest, choices, queue);
            guest.driver.notify(queue);
        }
        5 | 6 => {
            let len = usize::from(choices.word()) % (FRAME_MAX + 10);
            // The host's network gives at least a header. All other bytes are equal, because a
            // pattern would take most of an instrumented run.
            let mut frame = vec![0; HEADER];
            frame.resize(HEADER + len, choices.byte());
            (frame[0], frame[1]) = (choices.byte() & 3, choices.byte() & 0x83);
            let coming = &mut *lock(&guest.wire().coming);
            if coming.len() < WAITING {
                coming.push_back(frame);
            }
        }
        7 | 8 => drop(guest.receive()),
        9 | 10 => drop(guest.transmit()),
        11 => {
            let at = choices.address();
            let len = usize::from(choices.byte() % 32);
            let bytes: Vec<u8> = (0..len).map(|_| choices.byte()).collect();
            let _ = guest.driver.memory.write_slice(&bytes, GuestAddress(at));
        }
        12 => {
            let (at, value) = (u32::from(choices.word() % 0x210), choices.long());
            guest.driver.set(at, value);
            guest.driver.get(at);
        }
        13 => host(guest, choices),
        14 => elsewhere(guest, choices),
        _ => start(guest, choices),
    }
}

/// Offers a chain of descriptors as chosen.
fn chain(guest: &mut NetGuest, choices: &mut Choices<'_>, queue: u16) {
    let wanted = if queue == RX { WRITE } else { 0 };
    for _ in 0..choices.byte() % 5 {
        let index = u16::from(choices.byte()) % SIZE;
        let flags = match choices.byte() {
            0..120 => wanted,
            120..200 => wanted | NEXT,
            200..220 => WRITE,
            220..245 => NEXT,
            other => u16::from(other - 245),
        };
        let (gpa, len, next) = (choices.address(), choices.length(), u16::from(choices.byte()) % (SIZE + 1));
        guest.driver.descriptor(queue, index, (gpa, len, flags, next));
    }
    let at = GuestAddress(rings(queue) + AVAIL + 2);
    let index: u16 = guest.driver.memory.read_obj(at).unwrap_or(0);
    let slot = GuestAddress(at.0 + 2 + 2 * u64::from(index % SIZE));
    let _ = guest.driver.memory.write_obj(u16::from(choices.byte()) % (SIZE + 1), slot);
    let _ = guest.driver.memory.write_obj(index.wrapping_add(1), at);
}

/// Performs an action of the host.
fn host(guest: &mut NetGuest, choices: &mut Choices<'_>) {
    match choices.byte() % 8 {
        0 => guest.sheltered = !guest.sheltered,
        1 => *lock(&guest.wire().room) = Some(u32::from(choices.byte() % 8)),
        2 => *lock(&guest.wire().room) = None,
        3 => guest.wire().gone.store(choices.byte() & 1 == 1, Ordering::Relaxed),
        4 => guest.control.unplugged(),
        5 => guest.control.halt(),
        6 => guest.driver.device.resumed(crate::device::Resume::Moved).expect("the device needs nothing"),
        _ => drop(guest.announcer.announce(Instant::now())),
    }
}

/// Continues on another device with the state as it was saved or damaged.
fn elsewhere(guest: &mut NetGuest, choices: &mut Choices<'_>) {
    let device = &guest.driver.device;
    let _ = device.quiesce(Instant::now());
    guest.receiver.park(device);
    guest.control.parked();
    assert!(device.quiesce(Instant::now()), "the interface has not parked");
    moved(&guest.driver, choices);
}

#[cfg(test)]
mod tests {
    #[test]
    fn noise_causes_no_panic_and_no_access_outside_memory() {
        crate::hostile::tests::noise(2000, super::drive);
    }
}
