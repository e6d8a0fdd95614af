//! Driver that follows arbitrary bytes, for the fuzz target and for the tests, which run it on
//! seeded noise.

use crate::device::{Device, Resume};
use crate::mmio::TransportSaved;
use crate::testing::{Call, Driver, Guest, HIGH, LOW, NEXT, SIZE, WRITE, layout, rings};
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::PageSet;
use vmferry_guest_abi::balloon::RANGES_QUEUE;

/// Maximum number of steps. Bytes after the last step are not used.
pub(crate) const STEPS: usize = 256;
/// Maximum number of calls to the host for one step: a portion of each queue, for the notification
/// and each round of work. A buffer of hints causes at most one call for each of its parts.
const CALLS: usize = 9 * 6 * 64 * 17;

/// Bytes that are used up as choices. When none are left, the choices are zeros.
pub(crate) struct Choices<'a>(pub(crate) &'a [u8]);

impl Choices<'_> {
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn long(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// Returns an address, most often in memory, often at a page boundary.
    pub(crate) fn address(&mut self) -> u64 {
        let page = u64::from(self.byte()) << 12;
        match self.byte() {
            0..160 => page,
            low @ 160..230 => page + 16 * u64::from(low - 160),
            230..250 => page + u64::from(self.word()),
            _ => u64::from(self.long()) << 32 | u64::from(self.long()),
        }
    }

    pub(crate) fn length(&mut self) -> u32 {
        match self.byte() {
            0..100 => 0x1000,
            pages @ 100..180 => u32::from(pages - 99) << 12,
            180..250 => self.word().into(),
            _ => self.long(),
        }
    }

    fn queue(&mut self) -> u16 {
        [0, 1, 2, 3, 4, RANGES_QUEUE][usize::from(self.byte()) % 6]
    }
}

/// Drives a balloon as `bytes` say.
///
/// # Panics
/// Panics if the host is called with memory that does not exist (checked by `testing`) or more
/// often than a step can explain, if saved state is not loaded, or if the device panics.
pub fn drive(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let mut guest = Guest::new();
    start(&mut guest, &mut choices);
    for _ in 0..STEPS {
        if choices.0.is_empty() {
            break;
        }
        step(&mut guest, &mut choices);
        let calls = guest.calls();
        assert!(calls.len() <= CALLS, "{} calls in one step", calls.len());
        for call in calls {
            let (Call::Drop(_, runs) | Call::Zeros(runs) | Call::Hint(_, runs)) = call else { continue };
            let pages: u64 = runs.iter().map(|(_, run)| run.end - run.start).sum();
            assert!(pages <= LOW + HIGH.1, "a call contains a page twice");
        }
    }
}

/// Initializes the driver, with features and queues as chosen.
fn start(guest: &mut Guest, choices: &mut Choices<'_>) {
    let wanted = choices.byte();
    let own = choices.byte();
    let mut bits: Vec<u32> = (1..6).filter(|bit| wanted >> bit & 1 == 0).collect();
    bits.extend((0..3).filter(|bit| own >> bit & 1 == 0).map(|bit| 96 + bit));
    bits.extend([28, 29].into_iter().filter(|bit| own >> (bit - 24) & 1 == 1));
    bits.push(32);
    guest.negotiate(&bits);
    let queues = choices.byte();
    for (n, queue) in [0, 1, 2, 3, 4, RANGES_QUEUE].into_iter().enumerate() {
        if queues >> n & 1 == 0 {
            guest.queue(queue);
        }
    }
    guest.ok();
}

fn step(guest: &mut Guest, choices: &mut Choices<'_>) {
    match choices.byte() % 16 {
        0..4 => {
            let queue = choices.queue();
            chain(guest, choices, queue);
            guest.notify(queue);
        }
        4 | 5 => scribble(guest, choices),
        6 => numbers(guest, choices),
        7 => {
            let queue = choices.queue();
            guest.notify(queue);
        }
        8 | 9 => registers(guest, choices),
        10 => host(guest, choices),
        11 => {
            let page = choices.byte();
            guest.control.report(&guest.memory, page.into());
        }
        12 => {
            let map = u64::from(choices.byte()) << 12;
            guest.device.write(&guest.memory, 0x140, &86u64.to_le_bytes());
            guest.device.write(&guest.memory, 0x148, &map.to_le_bytes());
            let _ = guest.control.read_map(&guest.memory, &mut PageSet::empty(&layout()));
        }
        13 => elsewhere(guest, choices),
        14 => start(guest, choices),
        _ => guest.work(),
    }
}

/// Writes some bytes to an address in the guest's memory.
pub(crate) fn scribble<D: Device + 'static>(guest: &Driver<D>, choices: &mut Choices<'_>) {
    let at = choices.address();
    let bytes: Vec<u8> = (0..choices.byte() % 32).map(|_| choices.byte()).collect();
    let _ = guest.memory.write_slice(&bytes, GuestAddress(at));
}

/// Accesses a register, in the correct width or any other.
pub(crate) fn registers<D: Device + 'static>(guest: &Driver<D>, choices: &mut Choices<'_>) {
    let at = choices.word() % 0x210;
    if choices.byte() & 1 == 0 {
        guest.set(at.into(), choices.long());
        guest.get(at.into());
        return;
    }
    let mut bytes: Vec<u8> = (0..choices.byte() % 12).map(|_| choices.byte()).collect();
    guest.device.write(&guest.memory, at.into(), &bytes);
    guest.device.read(at.into(), &mut bytes);
}

/// Continues on a new device with the state of a quiesced one, as it was saved or damaged.
///
/// # Panics
/// Panics if the undamaged state is not loaded, or if the device cannot resume.
pub(crate) fn moved<D: Device + 'static>(guest: &Driver<D>, choices: &mut Choices<'_>) {
    let mut bytes = postcard::to_stdvec(&guest.device.save()).expect("state is serialized");
    let harm = choices.byte();
    if harm >= 128 {
        for _ in 0..harm % 4 {
            let at = usize::from(choices.word()) % bytes.len();
            bytes[at] = choices.byte();
        }
    }
    let loaded = postcard::from_bytes::<TransportSaved<_>>(&bytes).ok();
    let loaded = loaded.map(|saved| guest.device.load(&guest.memory, &saved));
    assert!(harm >= 128 || matches!(loaded, Some(Ok(()))), "what was saved is loaded: {loaded:?}");
    guest.device.resumed(Resume::Moved).expect("the device needs nothing");
}

/// Offers a chain of descriptors as chosen.
pub(crate) fn chain<D: Device + 'static>(guest: &Driver<D>, choices: &mut Choices<'_>, queue: u16) {
    let entries = choices.byte() % 5;
    for _ in 0..entries {
        let index = u16::from(choices.byte()) % SIZE;
        let flags = match choices.byte() {
            0..90 => WRITE,
            90..150 => 0,
            150..200 => WRITE | NEXT,
            200..245 => NEXT,
            other => u16::from(other - 245),
        };
        let (gpa, len, next) = (choices.address(), choices.length(), u16::from(choices.byte()) % (SIZE + 1));
        guest.descriptor(queue, index, (gpa, len, flags, next));
    }
    // The ring is written also where the device has no such queue.
    let at = GuestAddress(rings(queue) + crate::testing::AVAIL + 2);
    let index: u16 = guest.memory.read_obj(at).unwrap_or(0);
    let slot = GuestAddress(at.0 + 2 + 2 * u64::from(index % SIZE));
    let _ = guest.memory.write_obj(u16::from(choices.byte()) % (SIZE + 1), slot);
    let _ = guest.memory.write_obj(index.wrapping_add(1), at);
}

/// Offers page numbers or ranges that are often valid.
fn numbers(guest: &mut Guest, choices: &mut Choices<'_>) {
    let queue = [0, 1, RANGES_QUEUE][usize::from(choices.byte()) % 3];
    let count = choices.byte() % 12;
    let mut bytes = Vec::new();
    if queue == RANGES_QUEUE {
        bytes.extend(u32::from(choices.byte() % 4).to_le_bytes());
        bytes.extend(u32::from(count).to_le_bytes());
        for _ in 0..count {
            bytes.extend(choices.address().to_le_bytes());
            bytes.extend(u64::from(choices.length()).to_le_bytes());
        }
    } else {
        for _ in 0..count {
            bytes.extend(u32::from(choices.byte()).to_le_bytes());
        }
    }
    let (gpa, len, flags) = guest.bytes(&bytes);
    guest.descriptor(queue, 0, (gpa, len, flags, 0));
    let at = GuestAddress(rings(queue) + crate::testing::AVAIL + 2);
    let index: u16 = guest.memory.read_obj(at).unwrap_or(0);
    let _ = guest.memory.write_obj(0u16, GuestAddress(at.0 + 2 + 2 * u64::from(index % SIZE)));
    let _ = guest.memory.write_obj(index.wrapping_add(1), at);
    guest.notify(queue);
}

/// Performs an action of the host.
fn host(guest: &mut Guest, choices: &mut Choices<'_>) {
    match choices.byte() % 8 {
        0 => guest.control.set_target(choices.long()),
        1 => {
            let _ = guest.control.request_hints();
        }
        2 => guest.control.stop(),
        3 => guest.control.done(),
        4 => {
            let queue = guest.control.want_stats().unwrap_or(2);
            guest.device.notify(&guest.memory, queue);
        }
        5 => guest.device.resumed(crate::device::Resume::Moved).expect("a balloon needs nothing"),
        6 => guest.control.set_reporting(choices.byte() & 1 == 1),
        _ => guest.host.refuse.store(choices.byte() & 1 == 1, std::sync::atomic::Ordering::Relaxed),
    }
}

/// Continues on another device with the state as it was saved or damaged.
fn elsewhere(guest: &mut Guest, choices: &mut Choices<'_>) {
    moved(guest, choices);
    guest.work();
}

#[cfg(test)]
pub(crate) mod tests {
    /// The fuzz target finds more, because it sees which code it reaches.
    #[test]
    fn noise_causes_no_panic_and_no_access_outside_memory() {
        noise(2000, super::drive);
    }

    /// Calls `drive` with the same `seeds` kinds of noise in every run. A run takes about a second.
    pub(crate) fn noise(seeds: u32, drive: impl Fn(&[u8])) {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for seed in 0..seeds {
            let mut bytes = vec![0; 900];
            for byte in &mut bytes {
                // Xorshift.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                *byte = state.to_le_bytes()[5];
            }
            // The first bytes leave out features and queues. Most drivers leave out none.
            if seed % 4 != 0 {
                bytes[..3].fill(0);
            }
            drive(&bytes);
        }
    }
}
