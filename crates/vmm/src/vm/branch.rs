//! Branches of a VM: other VMs that continue from one instant of its guest and share its memory.

use super::{Stage, Vm};
use crate::disk;
use crate::error::{Error, Result};
use std::fs::File;
use std::os::fd::OwnedFd;
use vmferry_core::{BranchMemory, RegionFile, RetiredMemory};

impl Vm {
    /// Sets the files that become copies of the disks that the guest can write to, in the order of
    /// the disks, at each branch from now on. An empty list means that there are no such files.
    ///
    /// The files must be regular files that are open for writing, on the file systems of the disks.
    /// [`prepare_branch`](Self::prepare_branch) checks this. Close the files when the branch has
    /// ended, because a later branch would change their content.
    pub fn set_disk_copies(&mut self, copies: Vec<OwnedFd>) {
        self.disk_copies = copies.into_iter().map(File::from).collect();
    }

    /// Checks that the guest can be branched, and returns the files that hold its memory. The guest
    /// may run. KVM's page-table entries are removed, so that
    /// [`adopt_memory`](Self::adopt_memory) takes less time while the guest is paused.
    ///
    /// If there are [files for copies](Self::set_disk_copies) of the disks, the disks are copied
    /// for a trial. The trial shows whether the file system has reflinks. It also writes out cached
    /// data, so that the copy in the pause takes less time.
    ///
    /// # Errors
    /// Returns [`Error::SharedDisk`] if the guest can write to a disk, and there are no files for
    /// copies. Returns [`Error::Disk`] if a disk cannot be copied, and [`Error::Memory`] if the
    /// memory of the guest is not a memfd.
    pub fn prepare_branch(&self) -> Result<BranchMemory> {
        self.expect("branch the guest", &[Stage::Running, Stage::Paused])?;
        let disks = self.shared.devices.disks();
        let writable: Vec<_> = disks.iter().filter(|disk| !disk.is_read_only()).collect();
        if let (Some(disk), true) = (writable.first(), self.disk_copies.is_empty()) {
            return Err(Error::SharedDisk { path: disk.status().path });
        }
        if writable.len() != self.disk_copies.len() {
            let (disks, files) = (writable.len(), self.disk_copies.len());
            let why = format!("there are {files} files for copies of {disks} disks");
            return Err(Error::Device { name: "virtio-blk", why });
        }
        disk::copy(disks, &self.disk_copies)?;
        Ok(self.ram().branch_memory()?)
    }

    /// Copies the disks that the guest can write to into the [files](Self::set_disk_copies) for
    /// this purpose. The guest must be paused, and its devices [quiesced](Self::quiesce).
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if the guest runs, and [`Error::Disk`] if a disk cannot be
    /// copied.
    pub fn copy_disks(&self) -> Result<()> {
        self.expect("copy the guest's disks", &[Stage::Paused])?;
        Ok(disk::copy(self.shared.devices.disks(), &self.disk_copies)?)
    }

    /// Replaces the guest's memory by private mappings of `regions`, and returns the old mappings.
    /// No vCPU may run.
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if the guest runs, and [`Error::Memory`] if the memory cannot
    /// be mapped. The guest can be resumed in each case.
    pub fn adopt_memory(&mut self, regions: &[RegionFile]) -> Result<RetiredMemory> {
        self.expect("share the guest's memory", &[Stage::Empty, Stage::Ready, Stage::Paused])?;
        Ok(self.ram().adopt(regions)?)
    }
}
