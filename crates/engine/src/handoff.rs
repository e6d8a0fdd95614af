//! Memory of a guest that moves to another process of the same host without being copied.
//!
//! # Order
//!
//! | source | target |
//! |---|---|
//! | runs the guest, passes the descriptors of its memory | |
//! | | checks and maps the memory, and reports this |
//! | pauses the guest, quiesces its devices, saves and sends the device state | |
//! | | loads the device state, and reports this |
//! | releases what only one process may hold, then sends the commit | |
//! | | starts the guest |
//! | never writes the memory again | |
//!
//! # Writers of the memory
//!
//! Both processes have the memory mapped from the second row on. Nevertheless at most one process
//! writes it at any time. The writers are the vCPUs and the devices, and they are allowed to run
//! exactly where the guest is allowed to run: on the source until the pause, and on the target from
//! the start on. The start follows the commit, and the commit follows the pause. If the handoff
//! fails before the commit, the source resumes the guest, whose memory no other process has
//! changed, and the target unmaps the memory. What the kernel writes when the target loads the
//! state of a vCPU (the time of the paravirtual clock) is written again when the vCPU runs.
//!
//! A guest whose owner is unknown after the commit differs from one that was moved by a copy: if it
//! ran on the target, the memory on the source is not that of the pause any more. The source must
//! then be resumed only if the guest never ran on the target.
//!
//! # Trust
//!
//! The peer is a process of the same user, or of root ([`passes_descriptors`]). Such a process can
//! also read and write this process's memory by other means. The checks below protect the target
//! from the mistakes of a peer: from a file that is too short, or that another process could
//! shorten, so that an access would raise SIGBUS.
//!
//! [`passes_descriptors`]: crate::channel::passes_descriptors

use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use vmferry_core::{
    DirtyTracker, Layout, NothingToProtect, PAGE_SIZE, PageSet, Protect, RegionFile, SourceVm, VmError,
};
use vmferry_wire::{LocalRegion, ToTarget};

/// Memory that the source shares, after all checks.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    regions: Vec<RegionFile>,
    described: Vec<LocalRegion>,
}

impl SharedMemory {
    /// Returns the memory of the guest of `vm`.
    pub(crate) fn of(vm: &mut dyn SourceVm) -> Result<Self, VmError> {
        let regions = vm.share_memory()?;
        let described = described(vm.memory().layout(), &regions)?;
        Ok(Self { regions, described })
    }

    /// Returns the message to the target, and the descriptors to attach to it.
    pub(crate) fn message(&self) -> (ToTarget, Vec<BorrowedFd<'_>>) {
        let descriptors = self.regions.iter().map(|shared| shared.file.as_fd()).collect();
        (ToTarget::LocalMemory { regions: self.described.clone() }, descriptors)
    }
}

/// Checks that `regions` are the regions of `layout`, and returns their descriptions for the target
/// in the same order.
fn described(layout: &Layout, regions: &[RegionFile]) -> Result<Vec<LocalRegion>, VmError> {
    let described = |shared: &RegionFile| {
        // `check` refuses a region that the layout does not have.
        let len = layout.region(shared.region).map_or(0, |own| own.len);
        LocalRegion { region: shared.region, len, offset: shared.offset }
    };
    let described: Vec<_> = regions.iter().map(described).collect();
    check(layout, &described)?;
    regions.iter().zip(&described).try_for_each(|(shared, described)| check_file(shared, described.len))?;
    Ok(described)
}

/// Returns the memory that a source has described as `regions` and passed as `descriptors`, after
/// all checks.
pub(crate) fn passed(
    layout: &Layout,
    regions: Vec<LocalRegion>,
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<RegionFile>, VmError> {
    check(layout, &regions)?;
    if descriptors.len() != regions.len() {
        let (came, wanted) = (descriptors.len(), regions.len());
        return Err(VmError::new(format!("{came} descriptors came for {wanted} memory regions")));
    }
    let shared = |(LocalRegion { region, len, offset }, file)| {
        let shared = RegionFile { region, file: Arc::new(file), offset };
        check_file(&shared, len).map(|()| shared)
    };
    regions.into_iter().zip(descriptors).map(shared).collect()
}

/// Checks that `regions` are all regions of `layout`, each once and with its length.
fn check(layout: &Layout, regions: &[LocalRegion]) -> Result<(), VmError> {
    let own = layout.regions();
    let fits = |region: &LocalRegion| {
        let once = regions.iter().filter(|other| other.region == region.region).count() == 1;
        once && own.iter().any(|own| own.id == region.region && own.len == region.len)
    };
    if regions.len() == own.len() && regions.iter().all(fits) {
        return Ok(());
    }
    Err(VmError::new(format!(
        "the shared memory has {} regions that are not the {} regions of the guest",
        regions.len(),
        own.len()
    )))
}

/// Checks that the file contains all `len` bytes of the region, and can never become shorter.
fn check_file(shared: &RegionFile, len: u64) -> Result<(), VmError> {
    let wrong =
        |why: String| VmError::new(format!("the memory of {} cannot be shared: {why}", shared.region));
    let stat = rustix::fs::fstat(&shared.file).map_err(|error| wrong(error.to_string()))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if !shared.offset.is_multiple_of(PAGE_SIZE) {
        return Err(wrong(format!(
            "it begins at byte {} of its file, which is no whole page",
            shared.offset
        )));
    }
    let end = shared.offset.checked_add(len);
    if end.is_none_or(|end| end > size) {
        return Err(wrong(format!("its file has {size} bytes, not {len} from {} on", shared.offset)));
    }
    // Only files that support seals answer: memfds, and no files that have a name.
    match rustix::fs::fcntl_get_seals(&shared.file) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => Ok(()),
        Ok(_) => Err(wrong("its memfd can be shrunk; seal it with F_SEAL_SHRINK".into())),
        Err(_) => Err(wrong("its file is not a memfd".into())),
    }
}

/// Tracker of a migration that sends no pages. It is never started.
pub(crate) struct Untracked;

impl DirtyTracker for Untracked {
    fn start(&mut self) -> Result<(), VmError> {
        Err(VmError::new("a handoff tracks no pages"))
    }

    fn harvest(&mut self, _: &mut PageSet) -> Result<(), VmError> {
        Err(VmError::new("a handoff tracks no pages"))
    }

    fn protector(&self) -> Arc<dyn Protect> {
        Arc::new(NothingToProtect)
    }

    fn stop(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::fs::File;
    use vmferry_core::{Gpa, Region, RegionId};

    fn layout() -> Layout {
        let region = |id, gpa| Region { id: RegionId(id), gpa: Gpa(gpa), len: 1 << 20 };
        Layout::new(vec![region(0, 0), region(3, 4 << 30)]).unwrap()
    }

    fn file(len: u64, seals: SealFlags) -> OwnedFd {
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    fn sealed(len: u64) -> OwnedFd {
        file(len, SealFlags::SHRINK | SealFlags::GROW)
    }

    fn region(id: u32, len: u64, offset: u64) -> LocalRegion {
        LocalRegion { region: RegionId(id), len, offset }
    }

    fn refused(regions: Vec<LocalRegion>, files: Vec<OwnedFd>) -> String {
        passed(&layout(), regions, files).unwrap_err().to_string()
    }

    #[test]
    fn memory_is_taken_as_the_source_describes_it() {
        let regions = vec![region(3, 1 << 20, 4096), region(0, 1 << 20, 0)];
        let shared =
            passed(&layout(), regions.clone(), vec![sealed((1 << 20) + 4096), sealed(1 << 20)]).unwrap();
        assert_eq!(shared.iter().map(|shared| shared.region.0).collect::<Vec<_>>(), [3, 0]);
        assert_eq!(described(&layout(), &shared).unwrap(), regions);
    }

    #[test]
    fn regions_of_another_guest_are_refused() {
        let whole = 1 << 20;
        for wrong in [
            vec![],
            vec![region(0, whole, 0)],
            vec![region(0, whole, 0), region(0, whole, 0)],
            vec![region(0, whole, 0), region(1, whole, 0)],
            vec![region(0, whole, 0), region(3, whole - 4096, 0)],
            vec![region(0, whole, 0), region(3, whole, 0), region(3, whole, 0)],
        ] {
            let files = wrong.iter().map(|_| sealed(1 << 20)).collect();
            let error = refused(wrong, files);
            assert!(error.contains("are not the 2 regions"), "{error}");
        }
        let error = refused(vec![region(0, whole, 0), region(3, whole, 0)], vec![sealed(1 << 20)]);
        assert!(error.contains("1 descriptors came for 2"), "{error}");
    }

    #[test]
    fn file_that_could_fault_is_refused() {
        let whole = 1 << 20;
        let with = |second: OwnedFd, offset| {
            refused(vec![region(0, whole, 0), region(3, whole, offset)], vec![sealed(whole), second])
        };
        for (file, offset, says) in [
            (sealed(whole - 4096), 0, "its file has 1044480 bytes"),
            (sealed(whole), 4096, "not 1048576 from 4096 on"),
            (sealed(whole * 2), 100, "begins at byte 100"),
            (sealed(whole), u64::MAX - 4095, "its file has"),
            (file(whole, SealFlags::GROW), 0, "seal it with F_SEAL_SHRINK"),
            (File::open("/dev/zero").unwrap().into(), 0, "its file has 0 bytes"),
        ] {
            let error = with(file, offset);
            assert!(error.contains("region 3") && error.contains(says), "{error}");
        }
        let path = std::env::temp_dir().join(format!("vmferry-handoff-{}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let error = with(File::open(&path).unwrap().into(), 0);
        std::fs::remove_file(&path).unwrap();
        // Files of tmpfs have seals too, and none is set.
        assert!(error.contains("not a memfd") || error.contains("F_SEAL_SHRINK"), "{error}");
    }
}
