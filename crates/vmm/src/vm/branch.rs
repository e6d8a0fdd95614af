//! Branches of a VM: other VMs that continue from one instant of its guest and share its memory.

use super::{Stage, Vm};
use crate::error::{Error, Result};
use vmferry_core::{BranchMemory, RegionFile, RetiredMemory};

impl Vm {
    /// Checks that the guest can be branched, and returns the files that hold its memory. The guest
    /// may run. KVM's page-table entries are removed, so that
    /// [`adopt_memory`](Self::adopt_memory) takes less time while the guest is paused.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the guest can write to a disk, which its branches would share.
    /// Returns [`Error::Memory`] if its memory is not a memfd.
    pub fn prepare_branch(&self) -> Result<BranchMemory> {
        self.expect("branch the guest", &[Stage::Running, Stage::Paused])?;
        if let Some(disk) = self.shared.devices.disks().iter().find(|disk| !disk.status().read_only) {
            return Err(Error::Device {
                name: "virtio-blk",
                why: format!(
                    "the guest can write to {}, which its branches would share; only a guest whose disks are read-only can be branched",
                    disk.status().path.display()
                ),
            });
        }
        Ok(self.ram().branch_memory()?)
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
