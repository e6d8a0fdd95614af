//! Statistics for the host: the statistics queue (virtio 1.2, section 5.5.6.3).

use crate::carve::Carver;
use crate::pool::Pool;
use crate::virtio::{Mmio, Part, VirtQueue};
use core::sync::atomic::{AtomicU16, Ordering};
use vmferry_guest_abi::PAGE_SIZE;

/// Tags of the statistics of this guest: free, total and available memory.
const FREE: u16 = 4;
const TOTAL: u16 = 5;
const AVAILABLE: u16 = 6;

/// Number of 16-bit words of a statistic: a tag of 16 bits and a value of 64.
const WORDS: usize = 5;
const COUNT: usize = 3;
const BYTES: u32 = 30;
const _: () = assert!(BYTES as usize == 2 * WORDS * COUNT);

/// Queue of statistics. The device keeps the only buffer until it wants newer values.
#[derive(Debug)]
pub(super) struct StatsQueue {
    queue: VirtQueue,
    words: &'static [AtomicU16],
}

impl StatsQueue {
    pub(super) fn new(queue: VirtQueue, carver: &mut Carver) -> Self {
        Self { queue, words: carver.slice(64, WORDS * COUNT, |_| AtomicU16::new(0)) }
    }

    /// Gives the device new values if it has given the old ones back. `balloon` is the number of
    /// pages in the balloon.
    pub(super) fn turn(&mut self, device: Mmio, pool: &Pool, balloon: u64) {
        if !self.queue.reclaim() {
            return;
        }
        let pages = pool.with(|buddy| buddy.pages());
        let values =
            [(FREE, pages.free()), (TOTAL, pages.all - balloon), (AVAILABLE, pages.free() + pages.held)];
        for ((tag, pages), words) in values.into_iter().zip(self.words.chunks_exact(WORDS)) {
            let bytes = pages * PAGE_SIZE;
            words[0].store(tag, Ordering::Relaxed);
            for (part, word) in (0..).zip(&words[1..]) {
                #[expect(clippy::cast_possible_truncation, reason = "16 bits at a time")]
                word.store((bytes >> (16 * part)) as u16, Ordering::Relaxed);
            }
        }
        let gpa = self.words.as_ptr().addr() as u64;
        self.queue.add([Part { gpa, len: BYTES, write: false }].into_iter());
        device.notify(&self.queue);
    }
}
