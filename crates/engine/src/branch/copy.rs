//! Copy of a running guest's memory into new files, for the second and each later branch.

use super::{BranchError, host};
use crate::snapshot::pio;
use crate::vm::protect_run;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    BranchRegion, DirtyTracker, GuestMemory, PageRun, PageSet, Protect, Region, SourceVm, VmError,
};

/// Number of pages that are protected and searched for content at a time: 64 MiB.
const PART_PAGES: u64 = 16384;
/// Number of dirty pages below which another pass would hardly shorten the pause. Copying them takes
/// about 2 ms.
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
    pub(super) fn start(vm: &mut dyn SourceVm) -> Result<Self, BranchError> {
        let memory = vm.memory();
        let create = |region: &Region| new_file(region.len).map(|file| (*region, file));
        let files = memory.layout().regions().iter().map(create).collect::<io::Result<_>>();
        let files = files.map_err(host("a file for the guest's memory"))?;
        let mut tracker = vm.tracker(None).map_err(BranchError::Refused)?;
        tracker.start().map_err(BranchError::Refused)?;
        let (protect, dirty) = (tracker.protector(), PageSet::empty(memory.layout()));
        let mut copy = Self { memory, tracker, protect, files, dirty, copied: 0 };
        match copy.first_pass().and_then(|()| copy.passes()) {
            Ok(()) => Ok(copy),
            Err(error) => {
                copy.end();
                Err(error)
            }
        }
    }

    /// Copies every page that may have content. A page is protected before it is examined, so that a
    /// harvest finds a later write.
    fn first_pass(&mut self) -> Result<(), BranchError> {
        for position in 0..self.files.len() {
            let region = self.files[position].0;
            let all = Bitmap::full(region.pages());
            let mut touched = Bitmap::new(region.pages());
            let mut first = 0;
            while first < region.pages() {
                let part = PageRun::from(first..region.pages().min(first + PART_PAGES));
                if self.protect.is_useful() {
                    protect_run(&*self.protect, region.id, part, &all).map_err(BranchError::Refused)?;
                }
                self.memory.touched(region.id, part, &mut touched).map_err(BranchError::Refused)?;
                first = part.end();
            }
            self.copied += copy_pages(&*self.memory, &self.files[position], &touched)?;
        }
        Ok(())
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
        for (region, file) in &self.files {
            let Some(dirty) = self.dirty.region(region.id) else { continue };
            if self.protect.is_useful() {
                for run in dirty.runs().map(PageRun::from) {
                    protect_run(&*self.protect, region.id, run, dirty).map_err(BranchError::Refused)?;
                }
            }
            self.copied += copy_pages(&*self.memory, &(*region, file), dirty)?;
        }
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
    pub(super) fn complete(&mut self) -> Result<Vec<BranchRegion>, BranchError> {
        self.harvest()?;
        self.copy_dirty()?;
        let region = |(region, file): &(Region, File)| {
            let file = Arc::new(OwnedFd::from(file.try_clone()?));
            Ok(BranchRegion { id: region.id, file, offset: 0 })
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

/// Writes the pages that are set in `pages` to the file of their region. Returns their number.
fn copy_pages<F: std::borrow::Borrow<File>>(
    memory: &dyn GuestMemory,
    (region, file): &(Region, F),
    pages: &Bitmap,
) -> Result<u64, BranchError> {
    let mut copied = 0;
    for run in pages.runs().map(PageRun::from) {
        let window = memory.window(region.id, run).map_err(BranchError::Refused)?;
        pio::write_at(file.borrow(), window, run.first.offset()).map_err(|error| {
            BranchError::Refused(VmError::new(format!("its memory cannot be copied: {error}")))
        })?;
        copied += run.count;
    }
    Ok(copied)
}
