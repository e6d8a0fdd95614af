//! Driver of the memory balloon (virtio 1.2, section 5.5), and of vmferry's extension of it
//! (docs/balloon-extension.md).
//!
//! The first vCPU serves the balloon in [`Service`]: it polls the configuration, inflates and
//! deflates, and answers requests for hints. Reports come from the vCPUs that free memory
//! (`pool.rs`), and any vCPU that runs out of memory takes pages back.

mod hints;
mod inflate;
mod numbers;
mod service;

pub(crate) use service::Service;

use crate::carve::Carver;
use crate::lock::SpinLock;
use crate::virtio::{Mmio, Part, VERSION_1, VirtQueue};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use hints::HintQueue;
use inflate::Inflatable;
use vmferry_guest_abi::balloon::{
    FEATURE_FREE_MAP, FEATURE_HYPERCALL, FEATURE_RANGES, RANGES_QUEUE, free_map,
};
use vmferry_guest_abi::{GuestArgs, HintMode, InflateBy, ReportMode};

/// Device ID of a balloon.
pub(crate) const DEVICE_ID: u32 = 5;

const MUST_TELL_HOST: u32 = 0;
const STATS: u32 = 1;
const DEFLATE_ON_OOM: u32 = 2;
const FREE_PAGE_HINT: u32 = 3;
const REPORTING: u32 = 5;

/// Features that this driver knows. The driver accepts all of them that are offered, used or not.
/// The queues that exist are then the ones that are offered, and their numbers are the same for
/// devices that count offered features, accepted features, or as in the specification.
///
/// Page poison is not included, because it has no queue. A driver that accepts it, with any value,
/// declares that the guest relies on the content of its free pages, and a migration must then send
/// them.
const KNOWN: u128 = 1 << MUST_TELL_HOST
    | 1 << STATS
    | 1 << DEFLATE_ON_OOM
    | 1 << FREE_PAGE_HINT
    | 1 << REPORTING
    | 1 << VERSION_1
    | 1 << FEATURE_RANGES
    | 1 << FEATURE_FREE_MAP
    | 1 << FEATURE_HYPERCALL;

/// Offsets of the configuration's fields, in bytes.
mod config {
    pub(super) const TARGET: u64 = 0;
    pub(super) const ACTUAL: u64 = 4;
    pub(super) const COMMAND: u64 = 8;
}

/// Maximum number of entries of a queue that are used.
const QUEUE_SIZE: u16 = 512;
/// Number of queues: inflate, deflate, statistics, hints, reports, ranges.
const QUEUES: u64 = 6;

/// Size of the tables that a driver needs, in bytes.
pub(crate) const TABLE_BYTES: u64 =
    QUEUES * VirtQueue::bytes(QUEUE_SIZE as u64) + inflate::BUFFER_BYTES + 2 * 4096;

/// Memory balloon.
#[derive(Debug)]
pub(crate) struct Balloon {
    device: Mmio,
    features: u128,
    hint_mode: HintMode,
    /// True while a vCPU is reporting.
    claimed: AtomicBool,
    reports: Option<SpinLock<VirtQueue>>,
    pages: SpinLock<Inflatable>,
    hints: SpinLock<Option<HintQueue>>,
    stats: SpinLock<Option<numbers::StatsQueue>>,
    /// Number of pages in the balloon.
    actual: AtomicU32,
    /// Number of times that hinted pages were taken back.
    releases: AtomicU64,
    /// Number of pages that allocations took out of the balloon.
    taken_back: AtomicU64,
    /// Map of free pages: address, number of bits, time that it took to create (ns), and time of
    /// publication (us).
    map: [AtomicU64; 4],
}

impl Balloon {
    /// Starts the device. Returns `None` if the command line uses nothing that the device offers.
    /// Panics if the command line needs something that the device does not offer.
    pub(crate) fn new(device: Mmio, args: &GuestArgs, carver: &mut Carver) -> Option<Self> {
        let features = device.negotiate(KNOWN);
        let has = |bit: u32| features >> bit & 1 == 1;
        assert!(
            args.report != ReportMode::Hypercall || has(FEATURE_HYPERCALL),
            "report=hypercall: this machine's balloon has no hypercall; use sync"
        );
        let by_ranges = args.inflate.is_some_and(|inflate| inflate.by == InflateBy::Ranges);
        assert!(
            !by_ranges || has(FEATURE_RANGES),
            "inflate=..,by=ranges: this machine's balloon does not support ranges"
        );
        let mut queue = |index: u16| device.queue(index, QUEUE_SIZE, carver);
        let (inflate, deflate) = (queue(0), queue(1));
        let stats = has(STATS).then(|| queue(2)).flatten();
        let hints = has(FREE_PAGE_HINT).then(|| queue(3)).flatten();
        let reports = has(REPORTING).then(|| queue(3 + u16::from(has(FREE_PAGE_HINT)))).flatten();
        let ranges = has(FEATURE_RANGES).then(|| queue(RANGES_QUEUE)).flatten();
        let (Some(inflate), Some(deflate)) = (inflate, deflate) else {
            panic!("the balloon has no queues to inflate and deflate");
        };
        let answers = args.hints == HintMode::Demand;
        let balloon = Self {
            device,
            features,
            hint_mode: args.hints,
            claimed: AtomicBool::new(false),
            reports: reports.map(SpinLock::new),
            pages: SpinLock::new(Inflatable::new([inflate, deflate], ranges, carver)),
            hints: SpinLock::new(hints.filter(|_| answers).map(|queue| HintQueue::new(queue, carver))),
            stats: SpinLock::new(stats.map(|queue| numbers::StatsQueue::new(queue, carver))),
            actual: AtomicU32::new(0),
            releases: AtomicU64::new(0),
            taken_back: AtomicU64::new(0),
            map: Default::default(),
        };
        device.ready();
        Some(balloon)
    }

    fn has(&self, bit: u32) -> bool {
        self.features >> bit & 1 == 1
    }

    /// Returns true if blocks can be reported.
    pub(crate) fn reports(&self) -> bool {
        self.reports.is_some() || self.has(FEATURE_HYPERCALL)
    }

    /// Returns true if a map of free pages is wanted and the host supports it.
    pub(crate) fn keeps_map(&self) -> bool {
        self.hint_mode == HintMode::Incremental && self.has(FEATURE_FREE_MAP)
    }

    /// Tells the host of the map at `gpa` with `pages` bits. Creating the map took `made.0`
    /// nanoseconds and ended at `made.1` us.
    pub(crate) fn publish_map(&self, gpa: u64, pages: u64, made: (u64, u64)) {
        self.device.set_config64(free_map::PAGES, pages);
        self.device.set_config64(free_map::GPA, gpa);
        for (slot, value) in self.map.iter().zip([gpa, pages, made.0, made.1]) {
            slot.store(value, Ordering::Relaxed);
        }
    }

    /// Claims the queue of reports for one vCPU. Returns false if another vCPU has it.
    pub(crate) fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::Acquire)
    }

    /// Releases the queue of reports.
    pub(crate) fn unclaim(&self) {
        self.claimed.store(false, Ordering::Release);
    }

    /// Returns the number of blocks of one report, which is the number of descriptors of the queue.
    pub(crate) fn report_most(&self) -> usize {
        self.reports.as_ref().map_or(1, |queue| usize::from(queue.lock().size()))
    }

    /// Reports blocks, given by address and bytes, in one buffer. Waits until the host has dropped
    /// them.
    pub(crate) fn report(&self, blocks: impl ExactSizeIterator<Item = (u64, u64)>) {
        if let Some(queue) = &self.reports {
            let mut queue = queue.lock();
            queue.add(blocks.map(|(gpa, bytes)| part(gpa, bytes)));
            queue.exchange(self.device);
        }
    }

    /// Calls `release` if hinted pages may be taken back, because the device has processed all of
    /// them. No further page is hinted meanwhile. Returns whether they may; `None` if this is
    /// unknown at the moment.
    pub(crate) fn if_hints_processed(&self, release: impl FnOnce()) -> Option<bool> {
        let mut hints = self.hints.try_lock()?;
        let processed = hints.as_mut().is_none_or(HintQueue::all_processed);
        if processed {
            release();
        }
        Some(processed)
    }

    /// Counts that hinted pages were taken back.
    pub(crate) fn released(&self) {
        self.releases.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the part for free memory, which the device may write.
fn part(gpa: u64, bytes: u64) -> Part {
    // A block has at most 4 MiB.
    Part { gpa, len: u32::try_from(bytes).unwrap_or(0), write: true }
}
