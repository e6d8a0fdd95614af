//! Free page hinting on demand (virtio 1.2, section 5.5.6.4).
//!
//! A walk takes free blocks out of the allocator, large ones first, until memory is low, and hints
//! each in a buffer of its own. The blocks stay out of the allocator until the host reports that it
//! is done with its hints, asks again, or an allocation needs them (which is counted, and happens
//! only without other memory). A new request begins with all blocks again, including those of the
//! previous request.
//!
//! A block must not be used while the host has yet to process its hint: the host could then drop a
//! page that is in use again. Unless the host itself says that it is done, blocks therefore come
//! back only after the device has given back all hints.

use crate::carve::Carver;
use crate::pool::Pool;
use crate::virtio::{Mmio, Part, VirtQueue};
use core::sync::atomic::{AtomicU32, Ordering};
use vmferry_guest_alloc::{Batch, PORTION, Taken};

/// Command: the host wants no more hints. The hinted blocks stay hinted.
pub(super) const STOP: u32 = 0;
/// Command: the host is done with its hints.
pub(super) const DONE: u32 = 1;

/// Number of commands whose IDs are remembered: a device that stopped processing the queue may find
/// old ones in it.
const COMMANDS: usize = 16;

/// Number of batches that are hinted before the vCPU gets to its other work.
const BATCHES: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    /// Blocks are being hinted.
    Walking,
    /// All blocks have been hinted. The device has some of them, and the end has to be reported.
    Ending,
}

/// Counters of walks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Walks {
    pub(super) id: u32,
    pub(super) count: u64,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) ns: u64,
    pub(super) last_ns: u64,
    pub(super) last_us: u64,
    /// Number of times that a walk waited because the queue was full.
    pub(super) full: u64,
}

/// Queue of hints.
#[derive(Debug)]
pub(super) struct HintQueue {
    queue: VirtQueue,
    /// Word that ends an answer, followed by the last commands that were answered.
    words: &'static [AtomicU32],
    next_word: usize,
    phase: Phase,
    /// Command that has to be obeyed.
    due: Option<u32>,
    /// True if the walk waits because the queue is full.
    full: bool,
    /// True if the command is in the queue.
    said: bool,
    began_ns: u64,
    walks: Walks,
}

impl HintQueue {
    pub(super) fn new(queue: VirtQueue, carver: &mut Carver) -> Self {
        let words = carver.slice(64, 1 + COMMANDS, |_| AtomicU32::new(STOP));
        Self {
            queue,
            words,
            next_word: 0,
            phase: Phase::Idle,
            due: None,
            full: false,
            said: false,
            began_ns: 0,
            walks: Walks::default(),
        }
    }

    pub(super) fn walks(&self) -> Walks {
        self.walks
    }

    /// Accepts another command of the host.
    pub(super) fn command(&mut self, command: u32, now_ns: u64) {
        (self.due, self.said, self.began_ns) = (Some(command), false, now_ns);
    }

    /// Returns true if the device has processed all hints. If not, none of the hinted blocks may be
    /// used.
    pub(super) fn all_processed(&mut self) -> bool {
        self.queue.reclaim()
    }

    /// Continues the work. Returns true if there was any.
    pub(super) fn turn(&mut self, device: Mmio, pool: &Pool, batch: &mut Batch<'_>) -> bool {
        if self.due.is_none() && self.phase == Phase::Idle {
            return false;
        }
        if let Some(command) = self.due {
            self.obey(device, pool, command);
        }
        for _ in 0..BATCHES {
            if self.phase != Phase::Walking || !self.walk(device, pool, batch) {
                break;
            }
        }
        if self.phase == Phase::Ending && self.queue.reclaim() {
            let end = pool.clock.ns(crate::cpu::tsc());
            let took = end.saturating_sub(self.began_ns);
            let walks = &mut self.walks;
            (walks.last_ns, walks.last_us) = (took, end / 1000);
            walks.ns += took;
            walks.count += 1;
            self.phase = Phase::Idle;
        }
        true
    }

    fn obey(&mut self, device: Mmio, pool: &Pool, command: u32) {
        match command {
            STOP if self.phase == Phase::Walking => self.phase = Phase::Idle,
            STOP => {}
            DONE => {
                self.phase = Phase::Idle;
                release_all(pool);
            }
            _ => {
                // Hints that the host left in the queue when it stopped the previous request come
                // before the command, so they do not belong to it. The command makes the device
                // give them back.
                if !self.said && self.queue.room() != 0 {
                    self.next_word = self.next_word % COMMANDS + 1;
                    self.words[self.next_word].store(command, Ordering::Relaxed);
                    self.send_word(self.next_word);
                    self.said = true;
                    device.notify(&self.queue);
                }
                if !self.queue.reclaim() {
                    return;
                }
                release_all(pool);
                self.phase = Phase::Walking;
                self.walks.id = command;
            }
        }
        self.due = None;
    }

    /// Adds a command to the queue.
    fn send_word(&mut self, word: usize) {
        let gpa = self.words.as_ptr().addr() as u64 + 4 * word as u64;
        self.queue.add([Part { gpa, len: 4, write: false }].into_iter());
    }

    /// Hints as many blocks as there is room for. Returns true if there is more to do now.
    fn walk(&mut self, device: Mmio, pool: &Pool, batch: &mut Batch<'_>) -> bool {
        self.queue.reclaim();
        let room = usize::from(self.queue.room());
        // One entry is reserved for the end.
        let Some(room) = room.checked_sub(1).filter(|room| *room != 0) else {
            self.walks.full += u64::from(!self.full);
            self.full = true;
            return false;
        };
        self.full = false;
        batch.begin(room);
        let taken = loop {
            if let Some(taken) = pool.with(|buddy| buddy.hold(PORTION, batch)) {
                break taken;
            }
        };
        for block in batch.blocks() {
            let gpa = pool.with(|buddy| buddy.spans().gpa(*block));
            self.walks.blocks += 1;
            self.walks.bytes += block.bytes();
            self.queue.add([super::part(gpa, block.bytes())].into_iter());
        }
        if taken != Taken::Full {
            self.send_word(0);
            self.phase = Phase::Ending;
        }
        device.notify(&self.queue);
        taken == Taken::Full
    }
}

fn release_all(pool: &Pool) {
    while pool.with(|buddy| buddy.release_held(PORTION)) {}
}
