//! Split virtqueue (virtio 1.2, section 2.7), used by polling.

use super::Mmio;
use crate::carve::Carver;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Flag of the available ring: no interrupts, because nothing handles them.
const NO_INTERRUPT: u16 = 1;

/// Number of reads of the used ring before the device is notified again: a device that serves a
/// queue in portions may have stopped.
const PATIENCE: u32 = 100_000;
/// Maximum number of notifications. After that (minutes) the guest gives up.
const REMINDERS: u32 = 1_000_000;

/// Part of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Guest-physical address.
    pub(crate) gpa: u64,
    /// Length in bytes.
    pub(crate) len: u32,
    /// True if the device may write to the part; false if it may read it.
    pub(crate) write: bool,
}

/// Virtqueue. Descriptors are used cyclically, in the order of the buffers: `added - used <= size`.
/// The device must give buffers back in their order, which is checked.
#[derive(Debug)]
pub(crate) struct VirtQueue {
    index: u16,
    size: u16,
    /// Descriptors of two words each: address; length, flags and next.
    table: &'static [AtomicU64],
    /// Available ring: flags, index, and a descriptor for each entry.
    avail: &'static [AtomicU16],
    /// Used ring: flags and index in one word, and ID and length for each entry.
    used: &'static [AtomicU32],
    /// Number of buffers made available. The next field is the number of buffers given back.
    next_avail: u16,
    next_used: u16,
    /// Number of descriptors used. The next field is the number of descriptors that are free again.
    added: u16,
    freed: u16,
    /// Number of descriptors of each buffer in flight, by its index in the available ring.
    lens: &'static mut [u16],
}

impl VirtQueue {
    /// Returns the size in bytes of a queue of `size` entries, alignment included.
    pub(crate) const fn bytes(size: u64) -> u64 {
        32 * size + 64
    }

    /// Returns an empty queue. `size` must be a power of two.
    pub(crate) fn new(index: u16, size: u16, carver: &mut Carver) -> Self {
        let count = usize::from(size);
        let queue = Self {
            index,
            size,
            table: carver.slice(16, 2 * count, |_| AtomicU64::new(0)),
            avail: carver.slice(2, 2 + count, |_| AtomicU16::new(0)),
            used: carver.slice(4, 1 + 2 * count, |_| AtomicU32::new(0)),
            next_avail: 0,
            next_used: 0,
            added: 0,
            freed: 0,
            lens: carver.slice(2, count, |_| 0),
        };
        queue.avail[0].store(NO_INTERRUPT, Ordering::Relaxed);
        queue
    }

    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// Returns the number of entries.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Returns the addresses of descriptors, available ring and used ring.
    pub(crate) fn addresses(&self) -> [u64; 3] {
        [
            self.table.as_ptr().addr() as u64,
            self.avail.as_ptr().addr() as u64,
            self.used.as_ptr().addr() as u64,
        ]
    }

    /// Returns the number of free descriptors.
    pub(crate) fn room(&self) -> u16 {
        self.size - self.added.wrapping_sub(self.freed)
    }

    /// Adds one buffer. Panics if there is no room, or if it has no parts.
    pub(crate) fn add(&mut self, parts: impl ExactSizeIterator<Item = Part>) {
        let len = u16::try_from(parts.len()).unwrap_or(u16::MAX);
        assert!((1..=self.room()).contains(&len), "{len} descriptors with room for {}", self.room());
        let head = self.added % self.size;
        for (place, part) in (1..).zip(parts) {
            let at = self.added % self.size;
            self.added = self.added.wrapping_add(1);
            let more = if place < len { NEXT } else { 0 };
            let flags = more | if part.write { WRITE } else { 0 };
            let next = self.added % self.size;
            let word = u64::from(part.len) | u64::from(flags) << 32 | u64::from(next) << 48;
            self.table[2 * usize::from(at)].store(part.gpa, Ordering::Relaxed);
            self.table[2 * usize::from(at) + 1].store(word, Ordering::Relaxed);
        }
        let slot = usize::from(self.next_avail % self.size);
        self.lens[slot] = len;
        self.avail[2 + slot].store(head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        // A reader that sees the index also sees the entry.
        self.avail[1].store(self.next_avail, Ordering::Release);
    }

    /// Takes back what the device has given back. Returns true if the device has no buffers left.
    pub(crate) fn reclaim(&mut self) -> bool {
        let index = (self.used[0].load(Ordering::Acquire) >> 16) as u16;
        while self.next_used != index {
            let slot = usize::from(self.next_used % self.size);
            let id = self.used[1 + 2 * slot].load(Ordering::Relaxed);
            assert!(
                self.next_used != self.next_avail && id == u32::from(self.freed % self.size),
                "queue {}: the device gave back buffer {id}, not {}",
                self.index,
                self.freed % self.size
            );
            self.freed = self.freed.wrapping_add(self.lens[slot]);
            self.next_used = self.next_used.wrapping_add(1);
        }
        self.next_used == self.next_avail
    }

    /// Notifies the device, and waits until it has given everything back. The memory must keep its
    /// content until then, however long this takes. This therefore waits for minutes before the
    /// guest gives up.
    pub(crate) fn exchange(&mut self, device: Mmio) {
        for _ in 0..REMINDERS {
            device.notify(self);
            for _ in 0..PATIENCE {
                if self.reclaim() {
                    return;
                }
                core::hint::spin_loop();
            }
        }
        panic!("the virtio device does not answer in queue {}", self.index);
    }
}
