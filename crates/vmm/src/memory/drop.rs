//! Giving pages back to the host while the guest runs.

use super::mapping::Behind;
use super::{GuestRam, MemoryError, RamRegion};
use crate::options::{Backing, DropWay};
use std::os::fd::{AsFd, BorrowedFd};
use vm_memory::{Bytes, GuestAddress};
use vmferry_core::{PAGE_BYTES, PAGE_SIZE, PageRun, RegionId};
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
    /// zeros after this returns true. Returns false if some pages were not dropped and keep their
    /// content, because the memory is shared with a branch. The caller must know that the guest
    /// does not need their content, and that no page can be missing or write-protected
    /// ([`PagingSlot::if_droppable`](vmferry_fault::PagingSlot::if_droppable)).
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
    pub(crate) fn drop_pages(&self, id: RegionId, run: PageRun, way: DropWay) -> Result<bool, DropError> {
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
            if matches!(ram.behind(), Behind::Private { .. }) {
                ram.renew()?;
                ram.marks().bitmap().set_range(0..region.pages());
                continue;
            }
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
    fn give_back(&self, run: PageRun, way: DropWay) -> Result<bool, SysError> {
        let start = self.host_address() + run.first.offset();
        let span = start..start + run.bytes();
        match (way, self.behind()) {
            (DropWay::Nothing, _) => {}
            // Punches a hole in the file, so that the pages are freed and not only this mapping of
            // them. A part of a huge page that is in use elsewhere at the moment is overwritten
            // with zeros instead, with the same result for the guest.
            (_, Behind::Shared(file)) => {
                memfd::erase(file.as_fd(), run.first.offset()..run.first.offset() + run.bytes())?;
            }
            (_, Behind::Private { file, offset }) => {
                return self.give_back_private(run, (file.as_fd(), offset));
            }
            // SAFETY: the caller checked that the run lies in the mapping, which is private and
            // anonymous as it has no file; this crate makes no references to guest bytes other than
            // to atomics.
            (DropWay::DontNeed, Behind::Anonymous) => unsafe { mapping::drop_pages(span) }?,
            // SAFETY: as above.
            (DropWay::Free, Behind::Anonymous) => unsafe { mapping::free_pages(span) }?,
        }
        Ok(true)
    }

    /// Drops the pages of `run` from a private mapping of `file`. The file belongs to other guests
    /// too, so it does not change.
    ///
    /// A dropped page has the content of the file. Therefore a page is dropped only where the file
    /// has zeros. Any other page keeps its content: with the content of the file, it would have an
    /// old content of the guest, and zeros would need as much memory as the page. Returns true if
    /// all pages were dropped.
    fn give_back_private(
        &self,
        run: PageRun,
        (file, offset): (BorrowedFd<'_>, u64),
    ) -> Result<bool, SysError> {
        let bytes = offset + run.first.offset()..offset + run.first.offset() + run.bytes();
        let (mut kept, mut page) = (Vec::new(), Box::new([0; PAGE_BYTES]));
        // The first access to a hole fills it with a page of zeros, which counts as data.
        memfd::data_ranges(file, bytes.clone(), |data| {
            for at in data.step_by(PAGE_BYTES) {
                let read = rustix::io::pread(file, &mut page[..], at);
                if !(read == Ok(PAGE_BYTES) && *page == [0; PAGE_BYTES]) {
                    kept.push(at);
                }
            }
        })?;
        let (address, mut at) = (|byte: u64| self.host_address() + (byte - offset), bytes.start);
        for end in kept.iter().copied().chain([bytes.end]) {
            if at < end {
                // SAFETY: the range lies in the mapping, which is private; this crate makes no
                // references to guest bytes other than to atomics.
                unsafe { mapping::drop_pages(address(at)..address(end)) }?;
            }
            at = end + PAGE_SIZE;
        }
        Ok(kept.is_empty())
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

            assert!(ram.drop_pages(RegionId(0), PageRun::from(5..7), DropWay::DontNeed).unwrap());
            ram.regions()[0].marks().bitmap().harvest(&mut marked);
            assert!(marked.runs().eq(std::iter::once(5..7)), "{backing}");
            let bytes: Vec<u8> =
                (4..8).map(|page| ram.map().read_obj(GuestAddress(page << 12)).unwrap()).collect();
            assert_eq!(bytes, [7, 0, 0, 7], "{backing}");
        }
    }

    /// Returns the first byte of each of the pages `4..8`.
    fn bytes(ram: &GuestRam) -> Vec<u8> {
        (4..8).map(|page| ram.map().read_obj(GuestAddress(page << 12)).unwrap()).collect()
    }

    fn branched() -> (GuestRam, Vec<vmferry_core::RegionFile>) {
        let mut options = VmOptions::new(8 << 20, 1);
        options.backing = Backing::Memfd;
        let ram = GuestRam::new(&options).unwrap();
        ram.map().write_slice(&[7; 2 * 4096], GuestAddress(0x4000)).unwrap();
        let vmferry_core::BranchMemory::Files { files, .. } = ram.branch_memory().unwrap() else { panic!() };
        drop(ram.adopt(&files).unwrap());
        (ram, files)
    }

    #[test]
    fn pages_of_a_branched_guest_are_dropped_without_a_change_of_the_file() {
        let (ram, files) = branched();
        ram.map().write_slice(&[8; 3 * 4096], GuestAddress(0x5000)).unwrap();
        assert_eq!(bytes(&ram), [7, 8, 8, 8]);
        // Page 5 has content in the file, pages 6 and 7 do not.
        assert!(!ram.drop_pages(RegionId(0), PageRun::from(5..7), DropWay::DontNeed).unwrap());
        assert_eq!(bytes(&ram), [7, 8, 0, 8]);
        assert!(ram.drop_pages(RegionId(0), PageRun::from(7..8), DropWay::Free).unwrap());
        assert_eq!(bytes(&ram), [7, 8, 0, 0]);
        let mut file = [0; 2];
        for (page, byte) in [4, 5].into_iter().zip(&mut file) {
            rustix::io::pread(&files[0].file, std::slice::from_mut(byte), page << 12).unwrap();
        }
        assert_eq!(file, [7, 7]);
    }

    #[test]
    fn memory_of_a_branched_guest_is_new_after_a_reset() {
        let (ram, files) = branched();
        ram.clear().unwrap();
        assert_eq!(bytes(&ram), [0; 4]);
        ram.map().write_slice(&[9], GuestAddress(0x4000)).unwrap();
        let mut byte = [0];
        rustix::io::pread(&files[0].file, &mut byte, 0x4000).unwrap();
        assert_eq!(byte, [7], "the branches keep their memory");
        assert!(matches!(ram.branch_memory().unwrap(), vmferry_core::BranchMemory::Files { .. }));
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
