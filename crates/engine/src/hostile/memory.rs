//! Guest memory between guard pages: a write outside the memory ends the process.

use crate::mapped::MappedMemory;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;
use vmferry_core::{
    DemandPaging, Fault, Gpa, GuestMemory, Layout, PAGE_BYTES, PAGE_SHIFT, PageIndex, PageRun, PageSet,
    Placed, Region, RegionId, VmError, Window,
};

/// Mapping between two inaccessible pages.
#[derive(Debug)]
struct Guarded {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range. Its bytes are accessed by raw addresses only.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    fn new(len: usize) -> Self {
        let len = len + 2 * PAGE_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, whose address no other code has.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert!(start != libc::MAP_FAILED, "mapping {len} bytes: {}", std::io::Error::last_os_error());
        let mapping = Self { start: NonNull::new(start.cast()).expect("not at 0"), len };
        let (inner, inner_len) = (mapping.inner(), len - 2 * PAGE_BYTES);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is in the mapping that was just created.
        let opened = unsafe { libc::mprotect(inner.as_ptr().cast(), inner_len, access) };
        assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
        mapping
    }

    fn inner(&self) -> NonNull<u8> {
        // SAFETY: the mapping is at least two pages long.
        unsafe { self.start.add(PAGE_BYTES) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`. Windows on it borrow its owner.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[derive(Debug, Default)]
struct Faults {
    begun: bool,
    ended: bool,
    interrupted: bool,
    there: HashSet<(u32, u64)>,
}

/// Memory that can be written directly and placed page by page.
#[derive(Debug)]
pub(super) struct Memory {
    mapped: MappedMemory,
    faults: Mutex<Faults>,
    changed: Condvar,
    // Declared after `mapped`, which points into the mappings, so that they are dropped later.
    _mappings: Vec<Guarded>,
}

/// Returns regions with these numbers and numbers of pages, one behind the other with gaps in
/// between.
pub(super) fn layout(regions: &[(u32, u64)]) -> Vec<Region> {
    let region = |(at, (id, pages)): (u64, &(u32, u64))| Region {
        id: RegionId(*id),
        gpa: Gpa(at << 32),
        len: pages << PAGE_SHIFT,
    };
    (0..).zip(regions).map(region).collect()
}

impl Memory {
    pub(super) fn new(regions: &[Region]) -> Self {
        let mappings: Vec<_> =
            regions.iter().map(|region| Guarded::new(usize::try_from(region.len).expect("small"))).collect();
        let starts: Vec<_> = regions.iter().copied().zip(mappings.iter().map(Guarded::inner)).collect();
        // SAFETY: the mappings are as long as their regions and live as long as this value. They
        // are accessed by address only.
        let mapped = unsafe { MappedMemory::new(&starts) }.expect("a layout");
        Self { mapped, faults: Mutex::default(), changed: Condvar::new(), _mappings: mappings }
    }

    fn place_content(&self, region: RegionId, run: PageRun, bytes: Option<&[u8]>) -> Result<Placed, VmError> {
        let window = self.mapped.window(region, run)?;
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(faults.begun && !faults.ended, "placed before the beginning or after the end");
        let mut placed = Placed::default();
        for (at, page) in run.range().enumerate() {
            if !faults.there.insert((region.0, page)) {
                placed.already_present += 1;
                continue;
            }
            placed.pages += 1;
            let zeros = [0; PAGE_BYTES];
            let content = bytes.map_or(&zeros[..], |bytes| &bytes[at * PAGE_BYTES..][..PAGE_BYTES]);
            window.write_page(at, content.try_into().expect("a page"));
        }
        Ok(placed)
    }
}

impl GuestMemory for Memory {
    fn layout(&self) -> &Layout {
        self.mapped.layout()
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        self.mapped.window(region, run)
    }

    fn populate(&self, region: RegionId, run: PageRun) -> bool {
        assert!(self.mapped.window(region, run).is_ok(), "{run} of {region} is not in guest memory");
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!faults.begun, "populated after demand paging had begun");
        true
    }
}

impl DemandPaging for Memory {
    fn shards(&self) -> usize {
        1
    }

    fn shard_of(&self, _: RegionId, _: PageIndex) -> usize {
        0
    }

    fn begin(&self, _: &PageSet) -> Result<(), VmError> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).begun = true;
        Ok(())
    }

    /// No thread touches the memory, so there are no faults: the tests check how pages arrive.
    fn next_fault(&self, _: usize, within: Duration) -> Result<Option<Fault>, VmError> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |faults: &mut Faults| !faults.interrupted;
        let waited = self.changed.wait_timeout_while(faults, within, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.interrupted = false;
        Ok(None)
    }

    fn interrupt(&self) {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).interrupted = true;
        self.changed.notify_all();
    }

    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError> {
        assert_eq!(bytes.len() as u64, run.bytes(), "a run and its bytes");
        self.place_content(region, run, Some(bytes))
    }

    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError> {
        self.place_content(region, run, None)
    }

    fn wake(&self, _: RegionId, _: PageIndex) -> Result<(), VmError> {
        Ok(())
    }

    fn end(&self) -> Result<(), VmError> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        Ok(())
    }
}
