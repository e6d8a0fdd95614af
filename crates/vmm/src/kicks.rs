//! Notifications by drivers without an exit to this process: KVM writes an eventfd
//! (virt/kvm/api.rst, `KVM_IOEVENTFD`).
//!
//! A vCPU that notifies leaves the guest in either case. With an eventfd it returns at once, and a
//! thread of the device wakes, instead of the vCPU's thread doing the device's work. The content of
//! an eventfd is not part of the state: when a guest is resumed on any host, every queue is
//! checked.
//!
//! # Interrupts
//! Interrupts are sent by `KVM_IRQ_LINE` (see [`IrqLine`](crate::irq::IrqLine)), with two calls for
//! an edge, and not by an eventfd (`KVM_IRQFD`). For an input of the I/O APIC, which is all that
//! virtio-mmio devices have, KVM passes such an eventfd on in a kernel thread (only MSIs are
//! delivered at once). Measured: two calls take 1.6 to 1.9 us and no thread switch; an eventfd
//! takes 13 to 18 us and two switches.

use crate::kvm::Machine;
use kvm_ioctls::{Cap, IoEventAddress, Kvm};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd};
use std::sync::Arc;
use vmferry_virtio::mmio::NOTIFY;
use vmm_sys_util::eventfd::EventFd;

/// Returns true if KVM on this host supports such notifications.
pub(crate) fn offered(kvm: &Kvm) -> bool {
    kvm.check_extension(Cap::Ioeventfd)
}

/// Notifications by the driver of one device.
#[derive(Debug)]
pub(crate) struct Kicks {
    machine: Arc<Machine>,
    /// Guest-physical address of the notification register.
    address: u64,
}

impl Kicks {
    /// Returns the notifications of the device whose registers are at `window`.
    pub(crate) fn new(machine: &Arc<Machine>, window: u64) -> Self {
        Self { machine: Arc::clone(machine), address: window + NOTIFY }
    }

    /// Makes KVM write the eventfd `bell` whenever the driver notifies `queue`, for as long as the
    /// VM lives. The device's registers do not see these notifications any more. They still see
    /// accesses of another size, which are not notifications. Returns false if KVM refuses; the
    /// vCPU that notifies then calls the device as before.
    pub(crate) fn ring(&self, queue: u16, bell: BorrowedFd<'_>) -> bool {
        match self.register(queue, bell) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, queue, "KVM does not pass on the notifications of a device; the vCPUs do so instead");
                false
            }
        }
    }

    fn register(&self, queue: u16, bell: BorrowedFd<'_>) -> io::Result<()> {
        let bell = bell.try_clone_to_owned()?;
        // SAFETY: the descriptor was just created and has no other owner; KVM holds its own
        // reference to the open file.
        let bell = unsafe { EventFd::from_raw_fd(bell.into_raw_fd()) };
        let register = IoEventAddress::Mmio(self.address);
        let registered = self.machine.fd().register_ioevent(&bell, &register, u32::from(queue));
        registered.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}
