//! Notifications of drivers without an exit to this process: KVM writes an eventfd (virt/kvm/api.rst, `KVM_IOEVENTFD`).
//!
//! A vCPU that notifies comes out of the guest either way, but goes back at once, and a device's thread wakes instead of this one's doing
//! the device's work. What is in an eventfd is no state: when a guest goes on, here or elsewhere, every queue is looked at.
//!
//! # And interrupts
//! They are sent by `KVM_IRQ_LINE` (see [`IrqLine`](crate::irq::IrqLine)), two calls for an edge, and not by an eventfd (`KVM_IRQFD`):
//! for an input of the I/O APIC, which is all that virtio-mmio devices have, KVM passes such an eventfd's news on in a kernel thread
//! (only MSIs go at once). Measured: two calls 1.6 to 1.9 us and no switch of threads; an eventfd 13 to 18 us and two switches.

use crate::kvm::Machine;
use kvm_ioctls::{Cap, IoEventAddress, Kvm};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd};
use std::sync::Arc;
use vmferry_virtio::mmio::NOTIFY;
use vmm_sys_util::eventfd::EventFd;

/// Whether KVM does that here.
pub(crate) fn offered(kvm: &Kvm) -> bool {
    kvm.check_extension(Cap::Ioeventfd)
}

/// The notifications of the driver of one device.
#[derive(Debug)]
pub(crate) struct Kicks {
    machine: Arc<Machine>,
    /// Of the register.
    address: u64,
}

impl Kicks {
    /// Those of the device whose registers are at `window`.
    pub(crate) fn new(machine: &Arc<Machine>, window: u64) -> Self {
        Self { machine: Arc::clone(machine), address: window + NOTIFY }
    }

    /// From now on `bell`, an eventfd, is written whenever the driver notifies `queue`, and the device's registers do not see it any
    /// more: but for accesses of another size, which are no notifications. For as long as the VM lives. Says whether that is so; if
    /// not, the vCPU that notifies comes to the device as before.
    pub(crate) fn ring(&self, queue: u16, bell: BorrowedFd<'_>) -> bool {
        match self.register(queue, bell) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, queue, "KVM does not pass a device's notifications on; its vCPUs do");
                false
            }
        }
    }

    fn register(&self, queue: u16, bell: BorrowedFd<'_>) -> io::Result<()> {
        let bell = bell.try_clone_to_owned()?;
        // SAFETY: a descriptor that was just made, and is nobody else's; KVM keeps what is behind it by itself.
        let bell = unsafe { EventFd::from_raw_fd(bell.into_raw_fd()) };
        let register = IoEventAddress::Mmio(self.address);
        let registered = self.machine.fd().register_ioevent(&bell, &register, u32::from(queue));
        registered.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}
