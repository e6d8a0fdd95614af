//! Handling of pages that a guest gives back.

use super::hints::HintBoard;
use crate::memory::{DropError, GuestRam};
use crate::options::DropWay;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::PAGE_BYTES;
use vmferry_fault::PagingSlot;
use vmferry_virtio::balloon::{BalloonHost, Dropped, HostError, Why};
use vmferry_virtio::runs::GuestRun;

/// RAM of the guest, as the balloon's host.
///
/// # While pages are missing
/// A guest that runs before its memory has arrived (postcopy, restore by demand paging) has pages
/// that are registered as missing. Dropping a page would make it missing again. If the page had
/// arrived, the source would not send it again, and a thread that touches it would sleep for ever.
/// If it had not arrived, it would arrive later with the content from before the guest gave it up.
///
/// Therefore nothing is dropped until all pages have arrived. The pages keep their content, which a
/// guest that reports or inflates must expect, and the device counts them as held. No page is lost
/// and no page gets old content: a page that the guest has written since is present, and a present
/// page is never placed again.
///
/// [`PagingSlot::if_droppable`] ensures this: a drop that has begun ends before pages can be
/// missing, and a drop that has not begun does nothing.
///
/// # While a snapshot is written
/// The pages of a running guest are write-protected until the snapshot has their content. A dropped
/// page would lose the content that it had at the instant of the snapshot. Therefore nothing is
/// dropped until all pages were copied. `if_droppable` ensures this as well.
///
/// # While memory is shared
/// A guest that was branched, or that is a branch, keeps the pages that have content in the shared
/// file. See [`GuestRam::drop_pages`].
///
/// During precopy no drop is held back. See [`GuestRam::drop_pages`]. Memory from the host's pool
/// of huge pages is never dropped, because it is reserved for this guest.
#[derive(Debug)]
pub(super) struct RamHost {
    ram: Arc<GuestRam>,
    paging: Arc<PagingSlot>,
    way: DropWay,
    hints: Arc<HintBoard>,
}

impl RamHost {
    pub(super) fn new(
        ram: Arc<GuestRam>,
        paging: Arc<PagingSlot>,
        way: DropWay,
        hints: Arc<HintBoard>,
    ) -> Self {
        Self { ram, paging, way, hints }
    }

    fn drop_all(&self, runs: &[GuestRun], way: DropWay) -> Result<Dropped, HostError> {
        if self.ram.reserved() {
            return Ok(Dropped::Held);
        }
        // All runs are dropped, also after one of which pages were kept.
        let each = |all: bool, run: &GuestRun| {
            self.ram.drop_pages(run.region, run.run, way).map(|dropped| all && dropped)
        };
        match self.paging.if_droppable(|| runs.iter().try_fold(true, each)) {
            None | Some(Ok(false)) => Ok(Dropped::Held),
            Some(Ok(true)) => Ok(Dropped::Done),
            Some(Err(error)) => Err(Box::<DropError>::new(error)),
        }
    }

    /// Writes zeros and marks the pages, as every write of the VMM does. Sleeps on missing pages,
    /// as the guest itself would.
    fn overwrite(&self, run: &GuestRun) -> Result<(), HostError> {
        let region = self.ram.layout().region(run.region).ok_or("no such region")?;
        for page in run.run.range() {
            let at = GuestAddress(region.gpa.0 + (page << vmferry_core::PAGE_SHIFT));
            self.ram.map().write_slice(&[0; PAGE_BYTES], at)?;
        }
        Ok(())
    }
}

impl BalloonHost for RamHost {
    fn drop_pages(&self, _: Why, runs: &[GuestRun]) -> Result<Dropped, HostError> {
        self.drop_all(runs, self.way)
    }

    fn make_zeros(&self, runs: &[GuestRun]) -> Result<(), HostError> {
        // However the pages were dropped, if they were dropped at all.
        match self.drop_all(runs, DropWay::DontNeed)? {
            Dropped::Done => Ok(()),
            Dropped::Held => runs.iter().try_for_each(|run| self.overwrite(run)),
        }
    }

    fn hinted(&self, command: u32, runs: &[GuestRun]) {
        self.hints.add(command, runs);
    }

    fn hints_end(&self, command: u32) {
        self.hints.end(command);
    }
}
