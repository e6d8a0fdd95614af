//! Handle of a VM, for threads other than the machine's owner.

use crate::balloon::BalloonHandle;
use crate::devices::Devices;
use crate::disk::DiskStatus;
use crate::kvm::Machine;
use crate::memory::GuestRam;
use crate::net::{NetStatus, VmNet};
use crate::stats;
use crate::vcpu::{Exit, VcpuBoard};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use vmferry_dirty::DirtyRings;
use vmferry_fault::PagingSlot;
use vmferry_guest_abi::{AllocSnapshot, StatsError, StatsSnapshot};
use vmferry_virtio::blk::BlkFigures;

/// State that all handles of a VM share.
#[derive(Debug)]
pub(crate) struct VmContext {
    pub(crate) board: Arc<VcpuBoard>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) machine: Arc<Machine>,
    pub(crate) paging: Arc<PagingSlot>,
    pub(crate) rings: Option<DirtyRings>,
}

impl VmContext {
    fn cpus(&self) -> u32 {
        self.paging.threads().vcpus()
    }
}

/// Handle of a VM, for threads other than the machine's owner. It shows the state of the guest
/// while the owner runs the VM, or while the engine migrates it on behalf of the owner.
#[derive(Debug, Clone)]
pub struct VmHandle(Arc<VmContext>);

impl VmHandle {
    pub(crate) fn new(shared: Arc<VmContext>) -> Self {
        Self(shared)
    }

    /// Returns the handle of the VM's balloon, if it has one.
    #[must_use]
    pub fn balloon(&self) -> Option<BalloonHandle> {
        self.0.devices.balloon().map(|balloon| BalloonHandle(Arc::clone(balloon)))
    }

    /// Returns the status of the VM's network interfaces.
    #[must_use]
    pub fn nets(&self) -> Vec<NetStatus> {
        self.0.devices.nets().iter().map(VmNet::status).collect()
    }

    /// Returns the descriptors of the taps of the network interfaces that have one, in order, for a
    /// process that takes the guest over.
    #[must_use]
    pub fn taps(&self) -> Vec<BorrowedFd<'_>> {
        self.0.devices.nets().iter().filter_map(VmNet::tap).collect()
    }

    /// Returns the status of the VM's disks, in order.
    #[must_use]
    pub fn disk_status(&self) -> Vec<DiskStatus> {
        self.0.devices.disks().iter().map(crate::disk::VmDisk::status).collect()
    }

    /// Returns the dirty rings of the vCPUs, if the VM was created with them.
    #[must_use]
    pub fn rings(&self) -> Option<&DirtyRings> {
        self.0.rings.as_ref()
    }

    /// Returns the counters of the VM's disks, in order.
    #[must_use]
    pub fn disks(&self) -> Vec<BlkFigures> {
        self.0.devices.disks().iter().map(crate::disk::VmDisk::figures).collect()
    }

    /// Waits until the guest has ended, and returns the reason.
    #[must_use]
    pub fn wait_for_exit(&self) -> Exit {
        loop {
            if let Some(exit) = self.0.board.wait_exit(None) {
                return exit;
            }
        }
    }

    /// Waits until the guest has ended, but for at most `timeout`. Returns the reason for the end,
    /// or `None` if the guest has not ended.
    #[must_use]
    pub fn wait_for_exit_timeout(&self, timeout: Duration) -> Option<Exit> {
        self.0.board.wait_exit(Some(timeout))
    }

    /// Returns the reason for which the guest ended, or `None` if it has not ended.
    #[must_use]
    pub fn exit(&self) -> Option<Exit> {
        self.0.board.exit()
    }

    /// Returns the figures that the guest reports on its statistics page.
    ///
    /// # Errors
    /// Returns an error if the guest has not written the page yet, keeps no such page, or was
    /// stopped while it wrote, or if the page is missing. The call never waits for a missing page.
    pub fn stats(&self) -> std::result::Result<StatsSnapshot, StatsError> {
        stats::snapshot(self.0.machine.ram(), &self.0.paging, self.0.cpus())
    }

    /// Returns the figures that the guest reports about its allocator and its balloon, if it has an
    /// allocator.
    ///
    /// # Errors
    /// Returns an error in the cases of [`stats`](Self::stats).
    pub fn alloc_stats(&self) -> std::result::Result<AllocSnapshot, StatsError> {
        stats::alloc_snapshot(self.0.machine.ram(), &self.0.paging, self.0.cpus())
    }

    /// Asks the guest to check all of its pages. When the guest has done so,
    /// [`StatsSnapshot::verified`] returns true for the number `request`. Returns false if the
    /// guest keeps no statistics page, or if the page is missing.
    pub fn request_verify(&self, request: u64) -> bool {
        stats::request_verify(self.0.machine.ram(), &self.0.paging, request)
    }

    /// Presses the power button, which makes a guest with a driver for the button shut down.
    /// Returns true if the guest has such a driver.
    ///
    /// # Errors
    /// Returns an error if KVM refuses.
    pub fn press_power_button(&self) -> crate::Result<bool> {
        crate::power::press(&self.0.machine)
    }

    /// Queues input for the guest's serial port. Returns the number of bytes that were accepted.
    #[must_use]
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        self.0.devices.serial_input(bytes)
    }

    /// Returns the number of bytes of serial output that could not be written to the sink.
    #[must_use]
    pub fn serial_lost(&self) -> u64 {
        self.0.devices.serial_lost()
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        self.0.machine.ram()
    }
}
