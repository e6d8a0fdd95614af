//! Guest memory for the usual case in which every region is mapped in this process.

use std::ptr::NonNull;
use vmferry_core::{GuestMemory, Layout, LayoutError, PageRun, Region, RegionId, VmError, Window};

/// [`GuestMemory`] over mappings of this process.
///
/// Every page is reported as touched. If you know which pages the guest has touched, wrap this type
/// and implement [`GuestMemory::touched`].
#[derive(Debug)]
pub struct MappedMemory {
    layout: Layout,
    /// Addresses of the regions of `layout`, in its order.
    starts: Vec<NonNull<u8>>,
}

// SAFETY: the mappings are accessed by address only, through `Window`s, which any thread may use
// (promise of the caller of `new`).
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Returns the memory that consists of `regions`, each with the address at which it is mapped.
    ///
    /// # Safety
    /// For as long as the returned value lives:
    ///
    /// - Each region must be mapped for its whole length, readable and writable, at a page
    ///   boundary.
    /// - This process must access the bytes of the regions through raw pointers or atomics only.
    ///
    /// # Errors
    /// If the regions do not form a valid [`Layout`], for example because they overlap.
    pub unsafe fn new(regions: &[(Region, NonNull<u8>)]) -> Result<Self, LayoutError> {
        let layout = Layout::new(regions.iter().map(|(region, _)| *region).collect())?;
        let start =
            |region: &Region| regions.iter().find(|(own, _)| own.id == region.id).map(|(_, start)| *start);
        let starts = layout.regions().iter().filter_map(start).collect();
        Ok(Self { layout, starts })
    }

    /// Returns the address and the length of `run`, or `None` if its pages do not exist.
    fn locate(&self, id: RegionId, run: PageRun) -> Option<(NonNull<u8>, usize)> {
        let position = self.layout.position(id)?;
        let inside = run.end() <= self.layout.regions()[position].pages();
        let (offset, len) = (usize::try_from(run.first.offset()).ok()?, usize::try_from(run.bytes()).ok()?);
        // SAFETY: `run` is within the region, which is mapped from `starts[position]` on for its
        // whole length.
        inside.then(|| (unsafe { self.starts[position].add(offset) }, len))
    }
}

impl GuestMemory for MappedMemory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        let (start, len) =
            self.locate(region, run).ok_or_else(|| VmError::new(format!("{region} has no {run}")))?;
        // SAFETY: `locate` stays inside a mapping, which the caller of `new` keeps for as long as
        // `self` lives.
        Ok(unsafe { Window::new(start, len) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;
    use vmferry_core::{Gpa, PAGE_BYTES, PageIndex};

    #[repr(align(4096))]
    struct Pages<const N: usize>(UnsafeCell<[[u8; PAGE_BYTES]; N]>);

    impl<const N: usize> Pages<N> {
        fn region(&self, id: u32, gpa: u64) -> (Region, NonNull<u8>) {
            let region = Region { id: RegionId(id), gpa: Gpa(gpa), len: size_of::<Self>() as u64 };
            (region, NonNull::new(self.0.get().cast()).unwrap())
        }
    }

    #[test]
    fn windows_map_their_region_and_reject_runs_beyond_its_end() {
        let zeros = || UnsafeCell::new([[0; PAGE_BYTES]; 3]);
        let (low, high) = (Pages::<3>(zeros()), Pages::<3>(zeros()));
        // The order differs from the order of the addresses.
        let regions = [high.region(1, 1 << 20), low.region(0, 0)];
        // SAFETY: both outlive `memory`, and are accessed through it alone.
        let memory = unsafe { MappedMemory::new(&regions) }.unwrap();
        let run = |first, count| PageRun { first: PageIndex(first), count };
        for (id, value) in [(0, 7), (1, 8)] {
            let window = memory.window(RegionId(id), run(1, 2)).unwrap();
            window.write_page(1, &[value; PAGE_BYTES]);
            let mut page = [0; PAGE_BYTES];
            assert!(!memory.window(RegionId(id), run(2, 1)).unwrap().copy_page(0, &mut page));
            assert_eq!(page, [value; PAGE_BYTES]);
            assert!(memory.window(RegionId(id), run(2, 2)).is_err(), "beyond the end");
        }
        assert!(memory.window(RegionId(2), run(0, 1)).is_err());
        drop(memory);
        assert_eq!((high.0.into_inner()[2][9], low.0.into_inner()[2][9]), (8, 7));
    }
}
