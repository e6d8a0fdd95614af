//! Work on the blocks of a file by several threads.

use crate::vm::caught;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use vmferry_core::VmError;
use vmferry_wire::RegionOffsets;

/// Maximum number of threads that read or write one file. More threads would only wait for the disk
/// or for memory.
pub(super) const MOST_THREADS: usize = 4;

pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MOST_THREADS)
}

/// Blocks of all regions, which threads take in order.
#[derive(Debug)]
pub(super) struct Shares {
    /// Number of the next share, counted over all regions.
    next: AtomicU64,
    /// Number of blocks of a share.
    blocks: u64,
}

impl Shares {
    /// Returns shares of `blocks` consecutive blocks. At the end of a region, a share has fewer.
    pub(super) fn new(blocks: u64) -> Self {
        assert!(blocks > 0, "a share has blocks");
        Self { next: AtomicU64::new(0), blocks }
    }

    /// Takes the next share: the position of its region in `places`, and its blocks.
    pub(super) fn take(&self, places: &[RegionOffsets]) -> Option<(usize, Range<u64>)> {
        let mut share = self.next.fetch_add(1, Ordering::Relaxed);
        for (position, place) in places.iter().enumerate() {
            let shares = place.blocks().div_ceil(self.blocks);
            if share < shares {
                let first = share * self.blocks;
                return Some((position, first..(first + self.blocks).min(place.blocks())));
            }
            share -= shares;
        }
        None
    }
}

/// Calls `work` on `count` threads, including the calling thread, and waits for all of them.
/// Returns the first error. When a call fails, `stop` is called, and should make the others end.
pub(super) fn on_threads<E: From<VmError> + Send>(
    count: usize,
    name: &str,
    stop: impl Fn() + Sync,
    work: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    let first = Mutex::new(None);
    let work = || {
        if let Err(error) = caught(&work) {
            // Later errors are consequences of the first.
            first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            stop();
        }
    };
    std::thread::scope(|scope| {
        for number in 1..count {
            // If a thread cannot be started, the work only takes longer, because this thread works,
            // too.
            let name = format!("{name}-{number}");
            let _ = vmferry_thread::spawn_scoped(vmferry_thread::Role::Snapshot, name, scope, work);
        }
        work();
    });
    first.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
