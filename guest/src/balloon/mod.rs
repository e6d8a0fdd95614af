//! Driver of the memory balloon (virtio 1.2, section 5.5), and of vmferry's extension of it
//! (docs/balloon-extension.md).
//!
//! The first vCPU serves it: it polls the configuration, inflates and deflates, and answers requests for hints, in [`Service`]. Reports
//! come from the vCPUs that free (`pool.rs`), and any vCPU that runs out of memory takes pages back.

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

/// The balloon's device id.
pub(crate) const DEVICE_ID: u32 = 5;

const MUST_TELL_HOST: u32 = 0;
const STATS: u32 = 1;
const DEFLATE_ON_OOM: u32 = 2;
const FREE_PAGE_HINT: u32 = 3;
const REPORTING: u32 = 5;

/// All that this driver knows. It accepts whatever of these is offered, used or not: then the queues that exist are those that are
/// offered, and have the same numbers for devices that count by what they offer, by what is accepted, or by the specification.
/// But not page poison, which has no queue: a driver that accepts it, with whatever value, says that the guest relies on what is in
/// its free pages, and a migration must then send them.
const KNOWN: u128 = 1 << MUST_TELL_HOST
    | 1 << STATS
    | 1 << DEFLATE_ON_OOM
    | 1 << FREE_PAGE_HINT
    | 1 << REPORTING
    | 1 << VERSION_1
    | 1 << FEATURE_RANGES
    | 1 << FEATURE_FREE_MAP
    | 1 << FEATURE_HYPERCALL;

/// Fields of the configuration, in bytes.
mod config {
    pub(super) const TARGET: u64 = 0;
    pub(super) const ACTUAL: u64 = 4;
    pub(super) const COMMAND: u64 = 8;
}

/// Most entries of a queue that are used.
const QUEUE_SIZE: u16 = 512;
/// Inflate, deflate, statistics, hints, reports, ranges.
const QUEUES: u64 = 6;

/// Bytes of tables that a driver needs.
pub(crate) const TABLE_BYTES: u64 =
    QUEUES * VirtQueue::bytes(QUEUE_SIZE as u64) + inflate::BUFFER_BYTES + 2 * 4096;

/// The balloon.
#[derive(Debug)]
pub(crate) struct Balloon {
    device: Mmio,
    features: u128,
    hint_mode: HintMode,
    /// Whether some vCPU is reporting.
    claimed: AtomicBool,
    reports: Option<SpinLock<VirtQueue>>,
    pages: SpinLock<Inflatable>,
    hints: SpinLock<Option<HintQueue>>,
    stats: SpinLock<Option<numbers::StatsQueue>>,
    /// Pages in the balloon.
    actual: AtomicU32,
    /// Times that hinted pages were taken back.
    releases: AtomicU64,
    /// Address, bits, time of making (ns), time (us) of the map of free pages.
    map: [AtomicU64; 4],
}

impl Balloon {
    /// Starts the device. `None` if the command line wants nothing of it that it offers; panics if it wants what it does not offer.
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
            "inflate=..,by=ranges: this machine's balloon takes no ranges"
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
            map: Default::default(),
        };
        device.ready();
        Some(balloon)
    }

    fn has(&self, bit: u32) -> bool {
        self.features >> bit & 1 == 1
    }

    /// Whether blocks can be reported.
    pub(crate) fn reports(&self) -> bool {
        self.reports.is_some() || self.has(FEATURE_HYPERCALL)
    }

    /// Whether a map of free pages is wanted, and known to the host.
    pub(crate) fn keeps_map(&self) -> bool {
        self.hint_mode == HintMode::Incremental && self.has(FEATURE_FREE_MAP)
    }

    /// Tells the host of the map at `gpa` with `pages` bits. It took `made.0` nanoseconds to make, and was done at `made.1` us.
    pub(crate) fn publish_map(&self, gpa: u64, pages: u64, made: (u64, u64)) {
        self.device.set_config64(free_map::PAGES, pages);
        self.device.set_config64(free_map::GPA, gpa);
        for (slot, value) in self.map.iter().zip([gpa, pages, made.0, made.1]) {
            slot.store(value, Ordering::Relaxed);
        }
    }

    /// Takes the queue of reports for one vCPU; `false` if another has it.
    pub(crate) fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::Acquire)
    }

    /// Gives it back.
    pub(crate) fn unclaim(&self) {
        self.claimed.store(false, Ordering::Release);
    }

    /// Blocks that one report holds: descriptors of a queue.
    pub(crate) fn report_most(&self) -> usize {
        self.reports.as_ref().map_or(1, |queue| usize::from(queue.lock().size()))
    }

    /// Reports blocks, given by address and bytes, in one buffer, and waits until the host has dropped them.
    pub(crate) fn report(&self, blocks: impl ExactSizeIterator<Item = (u64, u64)>) {
        if let Some(queue) = &self.reports {
            let mut queue = queue.lock();
            queue.add(blocks.map(|(gpa, bytes)| part(gpa, bytes)));
            queue.exchange(self.device);
        }
    }

    /// Whether hinted pages may be taken back: the device has looked at all of them. `None` if that cannot be said now.
    pub(crate) fn hints_settled(&self) -> Option<bool> {
        self.hints.try_lock().map(|mut hints| hints.as_mut().is_none_or(HintQueue::settled))
    }

    /// Counts that hinted pages were taken back.
    pub(crate) fn released(&self) {
        self.releases.fetch_add(1, Ordering::Relaxed);
    }
}

/// Free memory: for the device to write, as far as it may be said to.
fn part(gpa: u64, bytes: u64) -> Part {
    // A block has 4 MiB at most.
    Part { gpa, len: u32::try_from(bytes).unwrap_or(0), write: true }
}
