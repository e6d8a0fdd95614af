//! Disk driver that follows arbitrary bytes, for the fuzz target and for the tests, which run it on
//! seeded noise.

use super::testing::{DATA, DiskGuest, SECTORS, content, options, until};
use super::{BlkOptions, SECTOR};
use crate::device::Resume;
use crate::hostile::{Choices, STEPS, chain, moved};
use crate::testing::{NEXT, SIZE, WRITE, rings};
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress};

/// Types of the requests.
const KINDS: [u32; 8] = [0, 1, 1, 4, 8, 11, 13, 99];

/// Drives a disk as `bytes` say.
///
/// # Panics
/// Panics if the device panics, if anything is written that no request allows (a read-only disk is
/// never written, and no disk beyond its end), if the disk does not quiesce, or if saved state is
/// not loaded.
pub fn drive(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let read_only = choices.byte() & 1 == 1;
    let options = BlkOptions { sectors: SECTORS, ..options(read_only) };
    let mut guest = DiskGuest::new(options, 2);
    start(&mut guest, &mut choices);
    for _ in 0..STEPS {
        if choices.0.is_empty() {
            break;
        }
        step(&mut guest, &mut choices);
        assert!(guest.work.held() <= 256, "more under way than the queue can have");
    }
    // The disk quiesces whatever the driver did.
    until("rest", || guest.device.quiesce(Instant::now()));
    let disk = guest.disk.bytes();
    assert_eq!(disk.len() as u64, SECTORS * SECTOR);
    assert!(!read_only || disk == content(), "a read-only disk was written");
}

/// Initializes the driver, with features and a queue as chosen.
fn start(guest: &mut DiskGuest, choices: &mut Choices<'_>) {
    let wanted = choices.word();
    let bits: Vec<u32> = [2, 5, 6, 9, 10, 11, 13, 14, 28, 29]
        .into_iter()
        .enumerate()
        .filter(|(n, _)| wanted >> n & 1 == 0)
        .map(|(_, bit)| bit)
        .chain([32])
        .collect();
    if !guest.negotiate(&bits) {
        guest.negotiate(&[32, 9]);
    }
    if choices.byte() < 240 {
        guest.queue(0);
    }
    guest.ok();
}

fn step(guest: &mut DiskGuest, choices: &mut Choices<'_>) {
    match choices.byte() % 16 {
        0..6 => request(guest, choices),
        6 | 7 => {
            chain(guest, choices, 0);
            guest.notify(0);
        }
        8 => {
            let at = choices.address();
            let len = usize::from(choices.byte() % 32);
            let bytes: Vec<u8> = (0..len).map(|_| choices.byte()).collect();
            let _ = guest.memory.write_slice(&bytes, GuestAddress(at));
        }
        9 => {
            let (at, value) = (u32::from(choices.word() % 0x210), choices.long());
            guest.set(at, value);
            guest.get(at);
        }
        10 => {
            let (at, len) = (u64::from(choices.word() % 0x210), usize::from(choices.byte() % 12));
            let mut bytes: Vec<u8> = (0..len).map(|_| choices.byte()).collect();
            guest.device.write(&guest.memory, at, &bytes);
            guest.device.read(at, &mut bytes);
        }
        11 => {
            let fail = choices.byte() & 3 == 0;
            guest.disk.fail.store(fail, std::sync::atomic::Ordering::Relaxed);
        }
        12 => elsewhere(guest, choices),
        13 => start(guest, choices),
        14 => {
            let _ = guest.device.quiesce(Instant::now());
            guest.device.resumed(Resume::Again).expect("a disk resumes");
            guest.work();
        }
        _ => guest.work(),
    }
}

/// Offers a request that is often well-formed.
fn request(guest: &mut DiskGuest, choices: &mut Choices<'_>) {
    let kind = KINDS[usize::from(choices.byte()) % KINDS.len()];
    let sector = match choices.byte() {
        0..200 => u64::from(choices.byte()) % (SECTORS + 2),
        _ => u64::from(choices.long()) << 32 | u64::from(choices.long()),
    };
    let number = u64::from(choices.byte()) % 16;
    let into = matches!(kind, 0 | 8);
    let mut parts = vec![guest.header(number, kind, sector)];
    for _ in 0..choices.byte() % 4 {
        let at =
            if choices.byte() < 200 { DATA + 512 * u64::from(choices.byte()) } else { choices.address() };
        let len = match choices.byte() {
            0..180 => 512,
            180..220 => 16,
            _ => choices.length(),
        };
        let wrong = choices.byte() < 10;
        parts.push((at, len, if into != wrong { WRITE } else { 0 }));
    }
    parts.push(guest.answer(number));
    // Written directly, because the queue may not exist.
    let first = u16::from(choices.byte()) % SIZE;
    for (n, (gpa, len, flags)) in (0u16..).zip(&parts) {
        let more = if usize::from(n) + 1 < parts.len() { NEXT } else { 0 };
        guest.descriptor(0, (first + n) % SIZE, (*gpa, *len, flags | more, (first + n + 1) % SIZE));
    }
    let at = GuestAddress(rings(0) + crate::testing::AVAIL + 2);
    let index: u16 = guest.memory.read_obj(at).unwrap_or(0);
    let _ = guest.memory.write_obj(first, GuestAddress(at.0 + 2 + 2 * u64::from(index % SIZE)));
    let _ = guest.memory.write_obj(index.wrapping_add(1), at);
    guest.notify(0);
}

/// Quiesces the device and continues on another device, with the state as it was saved or damaged.
fn elsewhere(guest: &mut DiskGuest, choices: &mut Choices<'_>) {
    until("rest", || guest.device.quiesce(Instant::now()));
    moved(guest, choices);
    guest.work();
}

#[cfg(test)]
mod tests {
    /// Runs noise for some seconds. (The fuzz target finds more, because it sees which code it
    /// reaches.)
    #[test]
    fn noise_causes_no_panic_and_no_forbidden_write() {
        crate::hostile::tests::noise(300, super::drive);
    }
}
