//! A VM, as other threads than its owner's see it.

use crate::balloon::BalloonHandle;
use crate::devices::Devices;
use crate::disk::DiskStatus;
use crate::kvm::Machine;
use crate::memory::GuestRam;
use crate::net::{NetStatus, VmNet};
use crate::stats;
use crate::vcpu::{Board, Exit};
use std::sync::Arc;
use std::time::Duration;
use vmferry_dirty::DirtyRings;
use vmferry_fault::LazySlot;
use vmferry_guest_abi::{AllocSnapshot, StatsError, StatsSnapshot};
use vmferry_virtio::blk::BlkFigures;

/// What all views of a VM share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) board: Arc<Board>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) machine: Arc<Machine>,
    pub(crate) lazy: Arc<LazySlot>,
    pub(crate) rings: Option<DirtyRings>,
}

impl Shared {
    fn cpus(&self) -> u32 {
        self.lazy.threads().vcpus()
    }
}

/// A view of a VM for threads other than its owner's: how its guest is doing, while the owner, or an engine that the
/// owner lent it to, runs and moves it.
#[derive(Debug, Clone)]
pub struct VmHandle(Arc<Shared>);

impl VmHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// The VM's balloon, if it has one.
    #[must_use]
    pub fn balloon(&self) -> Option<BalloonHandle> {
        self.0.devices.balloon().map(|balloon| BalloonHandle(Arc::clone(balloon)))
    }

    /// The VM's network interfaces.
    #[must_use]
    pub fn nets(&self) -> Vec<NetStatus> {
        self.0.devices.nets().iter().map(VmNet::status).collect()
    }

    /// How its disks are doing, in their order.
    #[must_use]
    pub fn disk_status(&self) -> Vec<DiskStatus> {
        self.0.devices.disks().iter().map(crate::disk::VmDisk::status).collect()
    }

    /// The dirty rings of its vCPUs, if it was made with them.
    #[must_use]
    pub fn rings(&self) -> Option<&DirtyRings> {
        self.0.rings.as_ref()
    }

    /// What its disks did, in their order.
    #[must_use]
    pub fn disks(&self) -> Vec<BlkFigures> {
        self.0.devices.disks().iter().map(crate::disk::VmDisk::figures).collect()
    }

    /// Waits until the guest has ended, and says how.
    #[must_use]
    pub fn wait_for_exit(&self) -> Exit {
        loop {
            if let Some(exit) = self.0.board.wait_exit(None) {
                return exit;
            }
        }
    }

    /// Waits until the guest has ended, or for `timeout`.
    #[must_use]
    pub fn wait_for_exit_timeout(&self, timeout: Duration) -> Option<Exit> {
        self.0.board.wait_exit(Some(timeout))
    }

    /// How the guest ended, if it did.
    #[must_use]
    pub fn exit(&self) -> Option<Exit> {
        self.0.board.exit()
    }

    /// What the guest reports of itself on its statistics page.
    ///
    /// # Errors
    /// If the guest has not written it yet, is none that does, or was stopped while it wrote; or if the page has not come
    /// yet: this never waits for one.
    pub fn stats(&self) -> std::result::Result<StatsSnapshot, StatsError> {
        stats::snapshot(self.0.machine.ram(), &self.0.lazy, self.0.cpus())
    }

    /// What the guest reports of its allocator and its balloon, if it has an allocator.
    ///
    /// # Errors
    /// As for [`stats`](Self::stats).
    pub fn alloc_stats(&self) -> std::result::Result<AllocSnapshot, StatsError> {
        stats::alloc_snapshot(self.0.machine.ram(), &self.0.lazy, self.0.cpus())
    }

    /// Asks the guest to check every page that it has; [`StatsSnapshot::verified`] with the same number says when it has.
    /// Does nothing to a guest that keeps no statistics page, or whose page has not come yet, and says so by `false`.
    pub fn request_verify(&self, request: u64) -> bool {
        stats::request_verify(self.0.machine.ram(), &self.0.lazy, request)
    }

    /// Presses the power button: a guest that listens to it shuts down. Says whether it does listen.
    ///
    /// # Errors
    /// If KVM refuses.
    pub fn press_power_button(&self) -> crate::Result<bool> {
        crate::power::press(&self.0.machine)
    }

    /// Queues input for the guest's serial port; says how many bytes were taken.
    #[must_use]
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        self.0.devices.serial_input(bytes)
    }

    /// Bytes of serial output that could not be written to the sink.
    #[must_use]
    pub fn serial_lost(&self) -> u64 {
        self.0.devices.serial_lost()
    }

    /// The guest's memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        self.0.machine.ram()
    }
}
