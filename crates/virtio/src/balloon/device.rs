//! The balloon device.

use super::control::{BalloonControl, BalloonState, STOP};
use super::extension::{self, Extension, FEATURE_RANGES, RANGES_QUEUE};
use super::inflate::{self, Way};
use super::persist::BalloonSaved;
use super::{BalloonHost, BalloonOptions, feature, hint, report, stats};
use crate::device::{Device, Progress, QueueSpec, read_bytes};
use crate::queue::{Buffer, RingError, VirtQueue};
use crate::runs::Gather;
use crate::signals::Signals;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::GuestMemory;

/// Maximum number of entries of a queue.
const QUEUE_SIZE: u16 = 256;
const INFLATE_QUEUE: u16 = 0;
const DEFLATE_QUEUE: u16 = 1;
/// Index of the first queue that depends on features.
const FIRST_OPTIONAL: u16 = 2;
/// Index of the statistics queue. All numbering schemes of drivers agree on this index, because no
/// optional queue precedes it.
pub(super) const STATS_QUEUE: u16 = 2;

/// Offsets in the configuration (5.5.4). All fields are 32 bits wide.
mod config {
    pub(super) const ACTUAL: u64 = 4;
    pub(super) const POISON: u64 = 12;
}

/// Role of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Inflate,
    Deflate,
    Stats,
    Hint,
    Report,
    Ranges,
}

/// Optional queues in the specification's order, each with the feature that it depends on.
const OPTIONAL: [(u32, Role); 3] = [
    (feature::STATS, Role::Stats),
    (feature::FREE_PAGE_HINT, Role::Hint),
    (feature::REPORTING, Role::Report),
];

/// Roles of all queues.
///
/// The specification gives the queues the indices 0 to 4, whatever is negotiated. QEMU numbers the
/// queues whose features its *device offers*. This device offers all, so both schemes agree. Linux
/// numbers the queues whose features its *driver accepts*: a driver without statistics has hints at
/// 2 and reports at 3.
///
/// The two schemes differ only if a driver does not accept a feature. A driver that counts like
/// Linux then makes a queue ready whose feature it has not accepted under the numbers of the
/// specification. No other driver does this, so the device can tell the schemes apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Roles {
    optional: [Option<Role>; OPTIONAL.len()],
    ranges: bool,
}

impl Roles {
    pub(super) fn new(features: u128, ready: &[u16]) -> Self {
        let accepted = |bit: u32| features >> bit & 1 == 1;
        let by_number = OPTIONAL.map(|(bit, role)| accepted(bit).then_some(role));
        let counted =
            (FIRST_OPTIONAL..).zip(by_number).any(|(index, role)| role.is_none() && ready.contains(&index));
        let mut optional = by_number;
        if counted {
            let mut kept = by_number.into_iter().flatten();
            optional = std::array::from_fn(|_| kept.next());
        }
        Self { optional, ranges: accepted(FEATURE_RANGES) }
    }

    pub(super) fn of(&self, queue: u16) -> Option<Role> {
        match queue {
            INFLATE_QUEUE => Some(Role::Inflate),
            DEFLATE_QUEUE => Some(Role::Deflate),
            RANGES_QUEUE => self.ranges.then_some(Role::Ranges),
            _ => self.optional.get(usize::from(queue.checked_sub(FIRST_OPTIONAL)?)).copied().flatten(),
        }
    }
}

/// Virtio memory balloon.
#[derive(Debug)]
pub struct Balloon {
    pub(super) shared: Arc<BalloonState>,
    pub(super) roles: Roles,
    /// First descriptor of the statistics buffer that the device keeps.
    pub(super) held: Option<u16>,
    /// ID of the request for hints that the driver is answering.
    pub(super) stream: Option<u32>,
    pub(super) extension: Extension,
    buffer: Buffer,
    gather: Gather,
    bytes: Vec<u8>,
}

impl Balloon {
    /// Creates an empty balloon.
    #[must_use]
    pub fn new(options: BalloonOptions, host: Arc<dyn BalloonHost>, signals: Arc<Signals>) -> Self {
        let extension = Extension::new(options.extension);
        Self {
            shared: BalloonState::new(options, host, signals),
            roles: Roles::default(),
            held: None,
            stream: None,
            extension,
            buffer: Buffer::default(),
            gather: Gather::default(),
            bytes: Vec::new(),
        }
    }

    /// Returns the handle for other threads.
    #[must_use]
    pub fn control(&self) -> BalloonControl {
        BalloonControl { shared: Arc::clone(&self.shared) }
    }
}

impl Device for Balloon {
    type Saved = BalloonSaved;

    const ID: u32 = VIRTIO_ID_BALLOON;

    const QUEUES: &'static [QueueSpec] = &{
        const fn queue(index: u16) -> QueueSpec {
            QueueSpec { index, max_size: QUEUE_SIZE }
        }
        [queue(0), queue(1), queue(2), queue(3), queue(4), queue(RANGES_QUEUE)]
    };

    fn features(&self) -> u128 {
        // MUST_TELL_HOST is not offered: a page that the guest uses before telling the host is
        // present when it is touched.
        [
            feature::STATS,
            feature::DEFLATE_ON_OOM,
            feature::FREE_PAGE_HINT,
            feature::PAGE_POISON,
            feature::REPORTING,
        ]
        .iter()
        .fold(self.extension.features(), |bits, bit| bits | 1 << bit)
    }

    fn has_queue(&self, index: u16) -> bool {
        self.extension.has_queue(index)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        if offset >= extension::CONFIG {
            self.extension.read_config(offset, data);
            return;
        }
        let shared = &self.shared;
        let fields = [&shared.target, &shared.actual, &shared.command, &shared.poison];
        let bytes = fields.map(|field| field.load(Ordering::Acquire).to_le_bytes()).concat();
        read_bytes(&bytes, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        match (offset, <[u8; 4]>::try_from(data)) {
            (config::ACTUAL, Ok(bytes)) => {
                self.shared.actual.store(u32::from_le_bytes(bytes), Ordering::Release);
            }
            (config::POISON, Ok(bytes)) => {
                self.shared.poison.store(u32::from_le_bytes(bytes), Ordering::Release);
            }
            (extension::CONFIG.., _) => self.extension.write_config(&self.shared, offset, data),
            _ => {}
        }
    }

    fn activate(&mut self, features: u128, ready: &[u16]) {
        self.roles = Roles::new(features, ready);
        self.shared.set_features(features);
        self.extension.publish(&self.shared);
        tracing::debug!(features, ?ready, "the guest's balloon driver is ready");
    }

    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError> {
        let Self { shared, held, stream, buffer, gather, bytes, .. } = self;
        let signals = &shared.signals;
        match self.roles.of(queue.index()) {
            Some(Role::Inflate) => queue.serve(memory, buffer, signals, |b| {
                inflate::numbers(shared, Way::In, (gather, bytes), b, memory);
            }),
            Some(Role::Deflate) => queue.serve(memory, buffer, signals, |b| {
                inflate::numbers(shared, Way::Out, (gather, bytes), b, memory);
            }),
            Some(Role::Ranges) => queue
                .serve(memory, buffer, signals, |b| extension::ranges(shared, (gather, bytes), b, memory)),
            Some(Role::Report) => queue.serve(memory, buffer, signals, |b| report::buffer(shared, gather, b)),
            Some(Role::Hint) => {
                queue.serve(memory, buffer, signals, |b| hint::buffer(shared, stream, gather, b, memory))
            }
            Some(Role::Stats) => stats::serve(shared, signals, (held, buffer, bytes), queue, memory),
            None => Ok(Progress::Done),
        }
    }

    fn reset(&mut self) {
        self.shared.set_features(0);
        self.shared.actual.store(0, Ordering::Release);
        self.shared.poison.store(0, Ordering::Release);
        // The next driver must not answer a request that was made to the previous driver.
        self.shared.command.store(STOP, Ordering::Release);
        self.shared.stats_wanted.store(false, Ordering::Release);
        self.shared.set_stats(stats::GuestStats::default());
        self.extension.reset(&self.shared);
        (self.roles, self.held) = (Roles::default(), None);
        if let Some(ended) = self.stream.take() {
            self.shared.host.hints_end(ended);
        }
    }

    fn broken(&mut self, error: &RingError) {
        // Warns only once, because a guest could repeat the violation without limit.
        if self.shared.metrics.broken.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(%error, "the guest's balloon driver broke the virtio rules; the balloon stops until the driver resets it");
        }
    }

    fn save(&self) -> BalloonSaved {
        BalloonSaved::of(self)
    }

    fn load(&mut self, saved: &BalloonSaved, active: Option<(u128, &[QueueSpec])>) -> Result<bool, String> {
        saved.load(self, active)
    }
}
