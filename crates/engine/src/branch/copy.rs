//! Copy of a running guest's memory into new files, for the second and each later branch.

use super::{BranchError, host};
use crate::snapshot::pio;
use crate::vm::protect_run;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    BranchMemory, DirtyTracker, GuestMemory, PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, Protect,
    Region, RegionFile, SourceVm, VmError,
};

/// Number of pages that are copied from an old file at a time. They fit into a second-level cache.
const PIECE_PAGES: usize = 128;
/// Number of dirty pages below which another pass would hardly shorten the pause. Copying them
/// takes about 2 ms.
const FEW_PAGES: u64 = 1024;
/// Maximum number of passes after the first. A guest that writes faster than memory is copied never
/// has few dirty pages.
const MOST_PASSES: u32 = 6;

/// Files that receive the memory of a guest, and the tracker that finds the pages to copy again.
pub(super) struct MemoryCopy {
    memory: Arc<dyn GuestMemory>,
    tracker: Box<dyn DirtyTracker>,
    protect: Arc<dyn Protect>,
    files: Vec<(Region, File)>,
    dirty: PageSet,
    copied: u64,
}

impl MemoryCopy {
    /// Copies all memory of the running guest, and then the pages that the guest has written
    /// meanwhile.
    ///
    /// The pages that the guest has not written since its last branch are copied from the old
    /// files. Reading them through the guest's memory would map each of them, and the pause would
    /// be longer by the time that unmapping takes.
    pub(super) fn start(vm: &mut dyn SourceVm) -> Result<Self, BranchError> {
        let memory = vm.memory();
        let create = |region: &Region| new_file(region.len).map(|file| (*region, file));
        let files = memory.layout().regions().iter().map(create).collect::<io::Result<_>>();
        let files = files.map_err(host("a file for the guest's memory"))?;
        let mut tracker = vm.tracker(None).map_err(BranchError::Refused)?;
        tracker.start().map_err(BranchError::Refused)?;
        let (protect, dirty) = (tracker.protector(), PageSet::empty(memory.layout()));
        let mut copy = Self { memory, tracker, protect, files, dirty, copied: 0 };
        match copy.first_pass(vm).and_then(|()| copy.passes()) {
            Ok(()) => Ok(copy),
            Err(error) => {
                copy.end();
                Err(error)
            }
        }
    }

    /// Copies every page that may have content. All pages are protected first, so that a harvest
    /// finds a later write.
    fn first_pass(&mut self, vm: &mut dyn SourceVm) -> Result<(), BranchError> {
        if self.protect.is_useful() {
            for (region, _) in &self.files {
                let all = Bitmap::full(region.pages());
                let run = PageRun::from(0..region.pages());
                protect_run(&*self.protect, region.id, run, &all).map_err(BranchError::Refused)?;
            }
        }
        let (old, written) = match vm.prepare_branch().map_err(BranchError::Refused)? {
            BranchMemory::Changed { files, written } => (files, written),
            BranchMemory::Files { .. } => (Vec::new(), PageSet::full(self.memory.layout())),
        };
        for (region, file) in &self.files {
            if let Some(old) = old.iter().find(|old| old.region == region.id) {
                let Some(written) = written.region(region.id) else { continue };
                self.copied += copy_file(old, (*region, file), written)?;
            }
        }
        self.copied += self.copy_through(&written)?;
        Ok(())
    }

    /// Copies the pages of `pages` from the guest's memory.
    fn copy_through(&self, pages: &PageSet) -> Result<u64, BranchError> {
        let mut copied = 0;
        for (region, file) in &self.files {
            if let Some(pages) = pages.region(region.id) {
                copied += copy_pages(&*self.memory, (*region, file), pages)?;
            }
        }
        Ok(copied)
    }

    fn passes(&mut self) -> Result<(), BranchError> {
        for _ in 0..MOST_PASSES {
            self.harvest()?;
            if self.dirty.count() <= FEW_PAGES {
                break;
            }
            self.copy_dirty()?;
        }
        Ok(())
    }

    fn harvest(&mut self) -> Result<(), BranchError> {
        self.tracker.harvest(&mut self.dirty).map_err(BranchError::Refused)
    }

    fn copy_dirty(&mut self) -> Result<(), BranchError> {
        if self.protect.is_useful() {
            for (region, dirty) in self.dirty.iter() {
                for run in dirty.runs().map(PageRun::from) {
                    protect_run(&*self.protect, region, run, dirty).map_err(BranchError::Refused)?;
                }
            }
        }
        self.copied += self.copy_through(&self.dirty)?;
        self.dirty.clear();
        Ok(())
    }

    /// Copies what the guest has written since the last pass, while it runs.
    pub(super) fn follow(&mut self) -> Result<(), BranchError> {
        self.harvest()?;
        self.copy_dirty()?;
        self.passes()
    }

    /// Copies the last pages. The guest is paused. Afterwards the files have the content of its
    /// memory.
    pub(super) fn complete(&mut self) -> Result<Vec<RegionFile>, BranchError> {
        self.harvest()?;
        self.copy_dirty()?;
        let region = |(region, file): &(Region, File)| {
            let file = Arc::new(OwnedFd::from(file.try_clone()?));
            Ok(RegionFile { region: region.id, file, offset: 0 })
        };
        self.files
            .iter()
            .map(region)
            .collect::<io::Result<_>>()
            .map_err(host("a file for the guest's memory"))
    }

    /// Ends tracking. Returns the number of copied pages.
    pub(super) fn end(mut self) -> u64 {
        if let Err(error) = self.tracker.stop() {
            tracing::warn!("dirty tracking for a branch could not be stopped: {error}");
        }
        self.copied
    }
}

/// Creates a memfd of `len` bytes.
fn new_file(len: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("vmferry-branch", flags)?);
    file.set_len(len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// Writes the pages of the guest's memory that are set in `pages` to the file of their region.
/// Returns their number.
fn copy_pages(
    memory: &dyn GuestMemory,
    (region, file): (Region, &File),
    pages: &Bitmap,
) -> Result<u64, BranchError> {
    let mut copied = 0;
    for run in pages.runs().map(PageRun::from) {
        let window = memory.window(region.id, run).map_err(BranchError::Refused)?;
        pio::write_at(file, window, run.first.offset()).map_err(not_copied)?;
        copied += run.count;
    }
    Ok(copied)
}

fn not_copied(error: io::Error) -> BranchError {
    BranchError::Refused(VmError::new(format!("its memory cannot be copied: {error}")))
}

/// Copies the pages of the old file `from` that have content and are not set in `written`. Returns
/// their number.
fn copy_file(from: &RegionFile, (region, to): (Region, &File), written: &Bitmap) -> Result<u64, BranchError> {
    let mut buffer = vec![0; PIECE_PAGES * PAGE_BYTES];
    let old = File::from(from.file.try_clone().map_err(not_copied)?);
    let (mut at, mut copied) = (0, 0);
    // `lseek` reports the ranges of the file that have content.
    while let Some(data) = next_data(&old, from.offset, at..region.len).map_err(not_copied)? {
        at = data.end;
        let (mut page, end) = (data.start >> PAGE_SHIFT, data.end >> PAGE_SHIFT);
        while page < end {
            let clean = (page..end).take(PIECE_PAGES).take_while(|page| !written.test(*page)).count();
            if clean > 0 {
                let (bytes, offset) = (&mut buffer[..clean * PAGE_BYTES], page << PAGE_SHIFT);
                old.read_exact_at(bytes, from.offset + offset).map_err(not_copied)?;
                to.write_all_at(bytes, offset).map_err(not_copied)?;
            }
            copied += clean as u64;
            page += (clean as u64).max(1);
        }
    }
    Ok(copied)
}

/// Returns the first range with content in `within`, which is counted from `offset` on, in whole
/// pages.
fn next_data(file: &File, offset: u64, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
    use rustix::fs::SeekFrom;
    if within.is_empty() {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset + within.start)) {
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        start => (start? - offset) & !(PAGE_SIZE - 1),
    };
    if start >= within.end {
        return Ok(None);
    }
    let end = rustix::fs::seek(file, SeekFrom::Hole(offset + start))? - offset;
    Ok(Some(start.max(within.start)..end.next_multiple_of(PAGE_SIZE).min(within.end)))
}
