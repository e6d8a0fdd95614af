//! The random number device.

use super::metrics::{Metrics, RngFigures, add};
use super::timer::Timer;
use super::{BURST, BYTES_PER_SECOND};
use crate::device::{Device, Progress, QueueSpec, Resume, Wiring};
use crate::queue::{Buffer, BufferError, PORTION, RingError, VirtQueue};
use crate::signals::Signals;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

const QUEUE: u16 = 0;
/// Maximum number of entries of the queue. Drivers keep one buffer in it.
const QUEUE_SIZE: u16 = 16;
/// Number of bytes that are requested from the kernel at once.
const CHUNK: usize = 4096;
/// Budget in bytes below which a driver waits, because few bytes at a time are not worth the work.
const LEAST: u64 = CHUNK as u64;
/// Budget in bytes at which a waiting driver is served again: a few wake-ups per second are enough.
const REFILL: u64 = BURST / 2;

/// Saved state of the device, which is empty: only the queue has state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngSaved {}

/// Budget that fills up with time: `0 <= left <= BURST` bytes.
#[derive(Debug)]
struct Budget {
    left: u64,
    at: Instant,
}

impl Budget {
    fn new(at: Instant) -> Self {
        Self { left: BURST, at }
    }

    /// Returns the budget at `now`, in bytes.
    fn left(&mut self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.at);
        let more = elapsed.as_nanos().saturating_mul(BYTES_PER_SECOND.into()) / 1_000_000_000;
        if more > 0 {
            // A remainder of less than a byte's time is lost, which makes the guest slightly
            // slower, never faster.
            self.left = BURST.min(self.left.saturating_add(u64::try_from(more).unwrap_or(BURST)));
            self.at = now;
        }
        self.left
    }

    fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// Virtio source of random numbers.
#[derive(Debug)]
pub struct Rng {
    signals: Arc<Signals>,
    timer: Timer,
    metrics: Arc<Metrics>,
    budget: Budget,
    quiescing: bool,
    buffer: Buffer,
}

impl Rng {
    /// Creates a device with a full budget.
    ///
    /// # Errors
    /// Returns an error if the host cannot create the device's thread.
    pub fn new(wiring: Wiring) -> io::Result<Self> {
        Ok(Self {
            signals: wiring.signals,
            timer: Timer::start(wiring.doorbell, QUEUE)?,
            metrics: Arc::default(),
            budget: Budget::new(Instant::now()),
            quiescing: false,
            buffer: Buffer::default(),
        })
    }

    /// Returns the counters.
    #[must_use]
    pub fn figures(&self) -> RngFigures {
        self.metrics.figures()
    }

    /// Serves buffers as long as there is a budget. Returns whether the ring has to be checked
    /// again right away.
    fn serve_some<M: GuestMemory>(
        &mut self,
        queue: &mut VirtQueue,
        memory: &M,
        used: &mut bool,
    ) -> Result<Progress, RingError> {
        for _ in 0..PORTION {
            let now = Instant::now();
            let left = self.budget.left(now);
            if left < LEAST {
                add(&self.metrics.waits, 1);
                self.timer.ring_at(now + Duration::from_nanos(REFILL * 1_000_000_000 / BYTES_PER_SECOND));
                return Ok(Progress::Done);
            }
            if !queue.pop(memory, &mut self.buffer)? {
                return queue.empty(memory);
            }
            let written = match fill(&self.buffer, memory, left) {
                Ok(written) => {
                    add(&self.metrics.buffers, 1);
                    add(&self.metrics.bytes, written);
                    written
                }
                Err(FillError::Buffer(error)) => {
                    tracing::debug!(%error, "cannot fill a guest's buffer for random numbers");
                    add(&self.metrics.malformed, 1);
                    0
                }
                Err(FillError::Host(error)) => {
                    tracing::warn!(%error, "the host cannot provide random numbers for the guest");
                    add(&self.metrics.host_errors, 1);
                    0
                }
            };
            // A malformed buffer also uses up budget. Otherwise it could be sent without limit.
            self.budget.spend(written.max(1));
            queue.give_back(memory, self.buffer.head(), u32::try_from(written).unwrap_or(u32::MAX))?;
            *used = true;
        }
        Ok(Progress::More)
    }
}

enum FillError {
    Buffer(BufferError),
    Host(io::Error),
}

/// Fills `bytes` with the kernel's system call, which returns fewer bytes when a signal arrives.
fn draw(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(drawn) => bytes = &mut bytes[drawn..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Fills `buffer` from its start with at most `most` bytes. Returns the number of bytes.
fn fill<M: GuestMemory>(buffer: &Buffer, memory: &M, most: u64) -> Result<u64, FillError> {
    if buffer.parts().iter().any(|part| !part.writable) {
        return Err(FillError::Buffer(BufferError::Direction));
    }
    let (mut bytes, mut left) = ([0; CHUNK], most);
    for part in buffer.parts() {
        let mut at = part.gpa;
        let mut missing = u64::from(part.len).min(left);
        while missing > 0 {
            let take = usize::try_from(missing).unwrap_or(CHUNK).min(CHUNK);
            let bytes = &mut bytes[..take];
            draw(bytes).map_err(FillError::Host)?;
            let outside = |_| FillError::Buffer(BufferError::Outside);
            memory.write_slice(bytes, GuestAddress(at)).map_err(outside)?;
            let take = take as u64;
            (at, missing, left) = (at.saturating_add(take), missing - take, left - take);
        }
    }
    Ok(most - left)
}

impl Device for Rng {
    type Saved = RngSaved;

    const ID: u32 = VIRTIO_ID_RNG;

    const QUEUES: &'static [QueueSpec] = &[QueueSpec { index: QUEUE, max_size: QUEUE_SIZE }];

    fn features(&self) -> u128 {
        0
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u128, _ready: &[u16]) {}

    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError> {
        if self.quiescing {
            // The timer rang late. The ring is checked when the guest runs again.
            return Ok(Progress::Done);
        }
        let mut used = false;
        let progress = self.serve_some(queue, memory, &mut used);
        if used && queue.wants_interrupt(memory)? {
            self.signals.used_buffer();
        }
        progress
    }

    fn quiesce(&mut self) -> bool {
        self.quiescing = true;
        true
    }

    fn resumed(&mut self, _how: Resume) -> Result<(), String> {
        self.quiescing = false;
        Ok(())
    }

    fn reset(&mut self) {}

    fn broken(&mut self, error: &RingError) {
        // Warns only once, because a guest could repeat the violation without limit.
        if self.metrics.broken.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(%error, "the guest's driver for random numbers broke the virtio rules; the device stops until the driver resets it");
        }
    }

    fn save(&self) -> RngSaved {
        RngSaved {}
    }

    fn load(&mut self, _saved: &RngSaved, _active: Option<(u128, &[QueueSpec])>) -> Result<bool, String> {
        Ok(false)
    }
}

#[cfg(test)]
pub(super) mod test_access {
    use super::*;

    impl Rng {
        pub(in crate::rng) fn shared_metrics(&self) -> Arc<Metrics> {
            Arc::clone(&self.metrics)
        }
    }
}
