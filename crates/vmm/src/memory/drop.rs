//! Giving pages back to the host while the guest runs.

use super::{GuestRam, MemoryError, RamRegion};
use crate::options::{Backing, DropWay};
use std::os::fd::AsFd;
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::{PageRun, RegionId};
use vmferry_sys::{SysError, mapping, memfd};

/// Error that giving back pages returns.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DropError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("cannot give pages of {region} back to the host")]
    Host {
        region: RegionId,
        #[source]
        source: SysError,
    },
}

impl GuestRam {
    /// Returns true if the host has reserved all of the memory for this guest. Such pages are not
    /// given back, because the reservation would be lost, and a guest that touches one while the
    /// pool is empty is killed.
    pub(crate) fn reserved(&self) -> bool {
        self.regions().iter().any(|ram| ram.backing() == Backing::HugePages)
    }

    /// Gives the pages of `run` back to the host. If `way` is [`DropWay::DontNeed`], they read as
    /// zeros after this returns. The caller must know that the guest does not need their content,
    /// and that no page can be missing or
    /// write-protected ([`PagingSlot::if_droppable`](vmferry_fault::PagingSlot::if_droppable)).
    ///
    /// # Dropped, then marked
    /// For a migration, a drop is a write of zeros that KVM does not see (hazards.md 4). Therefore
    /// the page is marked as for a write, and *after* the drop, because a harvest takes the mark
    /// first and the page is read later:
    /// - If the harvest takes the mark, the page that is read has been dropped, and the target gets
    ///   zeros.
    /// - If the drop comes after the read, so does its mark, and a later harvest has the page sent
    ///   again.
    ///
    /// In the reverse order, a harvest between mark and drop would take the mark, send the old
    /// content, and leave the drop without a mark. The source would have zeros and the target an
    /// old page.
    ///
    /// There is always a later harvest. Drops happen on vCPU threads, in the exit that requested
    /// them. The last harvest is made when all vCPUs are paused, so it does not overlap with such
    /// an exit.
    ///
    /// A page that the guest writes between drop and mark is marked needlessly. It is in KVM's log
    /// as well, because the dropped page was mapped again for that write.
    pub(crate) fn drop_pages(&self, id: RegionId, run: PageRun, way: DropWay) -> Result<(), DropError> {
        let not_ram = || MemoryError::NotRam { what: format!("{id}, {run}") };
        let ram = self.region(id).filter(|ram| run.end() <= ram.region().pages()).ok_or_else(not_ram)?;
        let dropped = ram.give_back(run, way);
        // Also after an error: some pages may have been dropped.
        ram.marks().bitmap().set_range(run.range());
        dropped.map_err(|source| DropError::Host { region: id, source })
    }
}

impl GuestRam {
    /// Makes all memory zeros, for a guest that starts anew. The memory is given back to the host,
    /// unless it is reserved.
    pub(crate) fn clear(&self) -> Result<(), DropError> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        for ram in self.regions() {
            let (id, region) = (ram.region().id, ram.region());
            if !self.reserved() {
                self.drop_pages(id, PageRun::from(0..region.pages()), DropWay::DontNeed)?;
                continue;
            }
            for at in (0..region.len).step_by(ZEROS.len()) {
                let len = usize::try_from(region.len - at).unwrap_or(ZEROS.len()).min(ZEROS.len());
                let written = self.map().write_slice(&ZEROS[..len], GuestAddress(region.gpa.0 + at));
                written.map_err(|error| MemoryError::NotRam { what: error.to_string() })?;
            }
        }
        Ok(())
    }
}

impl RamRegion {
    fn give_back(&self, run: PageRun, way: DropWay) -> Result<(), SysError> {
        let start = self.host_address() + run.first.offset();
        let span = start..start + run.bytes();
        match (way, self.file()) {
            (DropWay::Nothing, _) => Ok(()),
            // Punches a hole in the file, so that the pages are freed and not only this mapping of
            // them. A part of a huge page that is in use elsewhere at the moment is overwritten
            // with zeros instead, with the same result for the guest.
            (_, Some(file)) => {
                memfd::erase(file.as_fd(), run.first.offset()..run.first.offset() + run.bytes())
            }
            // SAFETY: the caller checked that the run lies in the mapping, which is private and
            // anonymous as it has no file; this crate makes no references to guest bytes other than
            // to atomics.
            (DropWay::DontNeed, None) => unsafe { mapping::drop_pages(span) },
            // SAFETY: as above.
            (DropWay::Free, None) => unsafe { mapping::free_pages(span) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::VmOptions;
    use vmferry_bitmap::Bitmap;

    #[test]
    fn dropped_pages_read_as_zeros_and_are_marked() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let mut options = VmOptions::new(8 << 20, 1);
            options.backing = backing;
            let ram = GuestRam::new(&options).unwrap();
            ram.map().write_slice(&[7; 4 * 4096], GuestAddress(0x4000)).unwrap();
            let mut marked = Bitmap::new(2048);
            ram.regions()[0].marks().bitmap().harvest(&mut marked);
            marked.clear_all();

            ram.drop_pages(RegionId(0), PageRun::from(5..7), DropWay::DontNeed).unwrap();
            ram.regions()[0].marks().bitmap().harvest(&mut marked);
            assert!(marked.runs().eq(std::iter::once(5..7)), "{backing}");
            let bytes: Vec<u8> =
                (4..8).map(|page| ram.map().read_obj(GuestAddress(page << 12)).unwrap()).collect();
            assert_eq!(bytes, [7, 0, 0, 7], "{backing}");
        }
    }

    #[test]
    fn pages_outside_memory_are_not_dropped() {
        let ram = GuestRam::new(&VmOptions::new(8 << 20, 1)).unwrap();
        for (region, run) in [(0, 2047..2049), (1, 0..1), (0, u64::MAX - 1..u64::MAX)] {
            let dropped = ram.drop_pages(RegionId(region), PageRun::from(run), DropWay::DontNeed);
            assert!(matches!(dropped, Err(DropError::Memory(_))));
        }
    }
}
