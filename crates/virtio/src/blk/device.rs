//! The block device.

use super::metrics::add;
use super::persist::BlkSaved;
use super::request::Limits;
use super::run::{MAX_RANGE_SECTORS, MAX_RANGES};
use super::work::{BlkWork, Done};
use super::{BlkOptions, QUEUE};
use crate::device::{Device, Progress, QueueSpec, Resume, Wiring, read_bytes};
use crate::queue::{Buffer, PORTION, RingError, VirtQueue};
use crate::signals::Signals;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_blk as spec;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vm_memory::GuestMemory;

/// Maximum number of queue entries, and of requests under way.
const QUEUE_SIZE: u16 = 256;
/// Maximum number of data segments of a request. A chain also has a header and a status byte, and
/// is not longer than the queue.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Size of a block, in bytes. A driver should not split blocks (5.2.5).
const BLOCK: u32 = 512;
/// Preferred unit of aligned writes, in blocks, as a power of two: a page of the host's page cache.
const PHYSICAL_EXPONENT: u8 = 3;

/// Offset of the cache mode in the configuration (5.2.4).
const WRITEBACK: usize = 32;
/// Size of the configuration in bytes, up to the fields for writing zeros.
const CONFIG: usize = 60;

/// Virtio block device.
#[derive(Debug)]
pub struct Blk {
    options: BlkOptions,
    work: Arc<BlkWork>,
    signals: Arc<Signals>,
    /// Features that the driver accepted; 0 while no driver is ready.
    features: u128,
    /// Cache mode that the driver chose, if it may choose.
    writeback: bool,
    buffer: Buffer,
    done: Vec<Done>,
}

impl Blk {
    /// Creates a disk with `options`. The caller must provide threads that [execute its
    /// requests](BlkWork::run).
    #[must_use]
    pub fn new(options: BlkOptions, wiring: Wiring) -> Self {
        Self {
            options,
            work: BlkWork::new(options.id, wiring.doorbell),
            signals: wiring.signals,
            features: 0,
            writeback: true,
            buffer: Buffer::default(),
            done: Vec::new(),
        }
    }

    /// Returns the state with which the disk's threads execute requests. Their work ends when the
    /// device is dropped.
    #[must_use]
    pub fn work(&self) -> Arc<BlkWork> {
        Arc::clone(&self.work)
    }

    fn has(&self, bit: u32) -> bool {
        self.features >> bit & 1 == 1
    }

    fn limits(&self) -> Limits {
        Limits {
            sectors: self.options.sectors,
            read_only: self.options.read_only,
            discard: self.has(spec::VIRTIO_BLK_F_DISCARD),
            zeroes: self.has(spec::VIRTIO_BLK_F_WRITE_ZEROES),
        }
    }

    /// Sets whether writes wait for stable storage (5.2.6.2). The driver's choice counts if the
    /// driver may choose. Otherwise writes wait unless the driver supports flushes.
    fn set_cache(&self) {
        let back = if self.has(spec::VIRTIO_BLK_F_CONFIG_WCE) {
            self.writeback
        } else {
            self.has(spec::VIRTIO_BLK_F_FLUSH)
        };
        self.work.write_through.store(!back, Ordering::Release);
    }

    fn config(&self) -> [u8; CONFIG] {
        let mut config = [0; CONFIG];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.options.sectors.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &BLOCK.to_le_bytes());
        put(24, &[PHYSICAL_EXPONENT, 0]);
        // Minimum and optimal size of a request, in blocks.
        put(26, &(1u16 << PHYSICAL_EXPONENT).to_le_bytes());
        put(28, &0u32.to_le_bytes());
        put(WRITEBACK, &[u8::from(self.writeback)]);
        put(34, &1u16.to_le_bytes());
        for at in [36, 48] {
            put(at, &MAX_RANGE_SECTORS.to_le_bytes());
        }
        for at in [40, 52] {
            put(at, &MAX_RANGES.to_le_bytes());
        }
        put(44, &(1u32 << PHYSICAL_EXPONENT).to_le_bytes());
        put(56, &[1]);
        config
    }

    /// Takes a portion of requests out of the ring. Sets `used` if buffers were given back as well.
    fn take<M: GuestMemory>(
        &mut self,
        queue: &mut VirtQueue,
        memory: &M,
        used: &mut bool,
    ) -> Result<Progress, RingError> {
        let limits = self.limits();
        for _ in 0..PORTION {
            // A driver may offer buffers again that it has not received back. Therefore the number
            // of requests under way is limited to the size of the queue. The ring is checked again
            // each time that a request is done.
            if self.work.held() >= usize::from(queue.size()) {
                return Ok(Progress::Done);
            }
            if !queue.pop(memory, &mut self.buffer)? {
                return if self.work.looks_again() { Ok(Progress::Done) } else { queue.empty(memory) };
            }
            let mut request = self.work.spare();
            match request.parse(&self.buffer, memory, &limits) {
                Ok(()) => self.work.push(request, limits),
                Err(error) => {
                    tracing::debug!(%error, "a disk request of the guest has no room for an answer");
                    add(&self.work.metrics.malformed, 1);
                    self.work.keep(request);
                    queue.give_back(memory, self.buffer.head(), 0)?;
                    *used = true;
                }
            }
        }
        Ok(Progress::More)
    }
}

impl Device for Blk {
    type Saved = BlkSaved;

    const ID: u32 = VIRTIO_ID_BLOCK;

    const QUEUES: &'static [QueueSpec] = &[QueueSpec { index: QUEUE, max_size: QUEUE_SIZE }];

    fn features(&self) -> u128 {
        let always = [
            spec::VIRTIO_BLK_F_SEG_MAX,
            spec::VIRTIO_BLK_F_BLK_SIZE,
            spec::VIRTIO_BLK_F_FLUSH,
            spec::VIRTIO_BLK_F_TOPOLOGY,
            spec::VIRTIO_BLK_F_CONFIG_WCE,
        ];
        let writable = [spec::VIRTIO_BLK_F_DISCARD, spec::VIRTIO_BLK_F_WRITE_ZEROES];
        let own = if self.options.read_only { &[spec::VIRTIO_BLK_F_RO][..] } else { &writable };
        always.iter().chain(own).fold(0, |bits, bit| bits | 1 << bit)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_bytes(&self.config(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let ([mode], true) = (data, offset == WRITEBACK as u64) {
            self.writeback = *mode != 0;
            self.set_cache();
        }
    }

    fn activate(&mut self, features: u128, _ready: &[u16]) {
        self.features = features;
        self.set_cache();
        tracing::debug!(features, "the guest's disk driver is ready");
    }

    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError> {
        let go_on = self.work.collect(&mut self.done);
        let mut used = !self.done.is_empty();
        for done in self.done.drain(..) {
            queue.give_back(memory, done.head, done.written)?;
        }
        let progress = if go_on { self.take(queue, memory, &mut used) } else { Ok(Progress::Done) };
        if used && queue.wants_interrupt(memory)? {
            self.signals.used_buffer();
        }
        progress
    }

    fn quiesce(&mut self) -> bool {
        self.work.quiesce()
    }

    fn resumed(&mut self, _how: Resume) -> Result<(), String> {
        self.work.resume();
        Ok(())
    }

    fn taken_away(&mut self, _queue: u16) {
        self.work.forget();
    }

    fn reset(&mut self) {
        self.work.forget();
        (self.features, self.writeback) = (0, true);
        self.set_cache();
    }

    fn broken(&mut self, error: &RingError) {
        // Warns only once, because a guest could repeat the violation without limit.
        if self.work.metrics.broken.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(%error, "the guest's disk driver broke the virtio rules; the disk stops until the driver resets it");
        }
    }

    fn save(&self) -> BlkSaved {
        let BlkOptions { sectors, read_only, id } = self.options;
        BlkSaved { sectors, read_only, id, writeback: self.writeback }
    }

    fn load(&mut self, saved: &BlkSaved, active: Option<(u128, &[QueueSpec])>) -> Result<bool, String> {
        let BlkSaved { sectors, read_only, id, writeback } = *saved;
        let here = self.options;
        if (BlkOptions { sectors, read_only, id }) != here {
            let name = |id: [u8; super::ID_BYTES]| {
                String::from_utf8_lossy(&id).trim_end_matches('\0').escape_debug().to_string()
            };
            let words = |sectors, read_only, id| {
                let mode = if read_only { "read-only" } else { "writable" };
                format!("{sectors} sectors, {mode}, called {}", name(id))
            };
            return Err(format!(
                "the guest's disk ({}) differs from this one ({})",
                words(sectors, read_only, id),
                words(here.sectors, here.read_only, here.id)
            ));
        }
        self.work.forget();
        (self.features, self.writeback) = (active.map_or(0, |(features, _)| features), writeback);
        self.set_cache();
        Ok(false)
    }
}

impl Drop for Blk {
    fn drop(&mut self) {
        self.work.end();
    }
}
