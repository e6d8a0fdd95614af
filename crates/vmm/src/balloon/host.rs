//! What happens to the pages that a guest gives back.

use super::hints::HintBoard;
use crate::memory::{DropError, GuestRam};
use crate::options::DropWay;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::PAGE_BYTES;
use vmferry_fault::LazySlot;
use vmferry_virtio::balloon::{BalloonHost, Dropped, HostError, Why};
use vmferry_virtio::runs::GuestRun;

/// The guest's RAM, as the balloon sees it.
///
/// # While pages are still to come
/// A guest that runs before its memory has come (postcopy, lazy restore) has pages that are registered as missing. To drop a page then
/// would make it missing once more: if it had come, nobody would send it again and whoever touches it would sleep for ever; if it had
/// not, it would come later and be what it was before the guest gave it away. So until all have come nothing is dropped: the pages stay
/// as they are, which a guest that reports or inflates must reckon with, and the device counts them as held. None is lost and none
/// comes back old: a page that the guest has written since is there, and what is there is never placed again.
///
/// [`LazySlot::settled`] keeps it so: a drop that has begun ends before pages can be missing, and one that has not does nothing.
///
/// During precopy nothing is held back; see [`GuestRam::drop_pages`]. Memory out of the host's pool of huge pages always is: it was set
/// aside for this guest.
#[derive(Debug)]
pub(super) struct RamHost {
    ram: Arc<GuestRam>,
    lazy: Arc<LazySlot>,
    way: DropWay,
    hints: Arc<HintBoard>,
}

impl RamHost {
    pub(super) fn new(ram: Arc<GuestRam>, lazy: Arc<LazySlot>, way: DropWay, hints: Arc<HintBoard>) -> Self {
        Self { ram, lazy, way, hints }
    }

    fn drop_all(&self, runs: &[GuestRun], way: DropWay) -> Result<Dropped, HostError> {
        if self.ram.reserved() {
            return Ok(Dropped::Held);
        }
        let each = |run: &GuestRun| self.ram.drop_pages(run.region, run.run, way);
        match self.lazy.settled(|| runs.iter().try_for_each(each)) {
            None => Ok(Dropped::Held),
            Some(Ok(())) => Ok(Dropped::Done),
            Some(Err(error)) => Err(Box::<DropError>::new(error)),
        }
    }

    /// Writes zeros; marks the pages, as every write of the VMM. Sleeps on pages that are still to come, as the guest itself would.
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
        // Whichever way they were dropped, if they were at all.
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
