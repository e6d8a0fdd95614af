//! Network interfaces of a VM. Each uses a tap of the host, and has a thread that carries its
//! frames.
//!
//! | module | content |
//! |---|---|
//! | `port` | the tap |
//! | `carrier` | the thread |

mod carrier;
mod port;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::kicks::Kicks;
use crate::memory::GuestRam;
use crate::options::NetOptions;
use crate::state::Saved;
use crate::virtio::{self, VirtioMmio};
use carrier::Carrier;
use port::TapPort;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use vmferry_fault::PagingSlot;
use vmferry_virtio::mmio::TransportSaved;
use vmferry_virtio::net::{Mac, Net, NetControl, NetFigures, NetSaved};
use vmferry_virtio::signals::Interrupt;

impl Saved for TransportSaved<NetSaved> {
    const NAME: &'static str = "virtio-net";
    const VERSION: u32 = 1;
}

/// Status of a network interface.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetStatus {
    /// Name of the host's tap, or `None` if the interface has no tap.
    pub tap: Option<String>,
    /// MAC address of the guest.
    pub mac: Mac,
    /// True if the guest has a driver for the interface.
    pub driver: bool,
    /// Counters of the interface.
    pub figures: NetFigures,
    /// Number of times that the thread that carries frames was woken.
    pub wakeups: u64,
}

/// Network interface of a VM.
#[derive(Debug)]
pub(crate) struct VmNet {
    device: Arc<VirtioMmio<Net<TapPort>>>,
    control: NetControl<TapPort>,
    carrier: Carrier,
    /// Address that the interface was created with.
    mac: Mac,
}

impl VmNet {
    /// Returns network interface number `instance` of the VM, at the tap that `options` name.
    ///
    /// # Errors
    /// Returns an error if the tap cannot be used.
    pub(crate) fn new(
        (ram, paging): (&Arc<GuestRam>, &Arc<PagingSlot>),
        options: &NetOptions,
        instance: u32,
        (line, kicks): (Box<dyn Interrupt>, Option<Kicks>),
    ) -> Result<Self> {
        let port = TapPort::open(options)?;
        let mtu = port.mtu()?;
        let mac = options.mac.map_or_else(random_mac, Ok)?;
        let (wiring, socket) = virtio::wire(line);
        let net = Net::new(vmferry_virtio::net::NetOptions { mac, mtu }, port, wiring.signals);
        let control = net.control();
        if let Some(kicks) = kicks {
            // A notification that KVM does not pass on rings the same bell through the device.
            for queue in [vmferry_virtio::net::RX, vmferry_virtio::net::TX] {
                kicks.ring(queue, control.port().bell());
            }
        }
        let device = socket.plug(net, ram, instance);
        let carrier = Carrier::start(Arc::clone(&device), control.clone(), Arc::clone(paging))?;
        Ok(Self { device, control, carrier, mac })
    }

    /// Returns the device on the bus.
    pub(crate) fn device(&self) -> &Arc<VirtioMmio<Net<TapPort>>> {
        &self.device
    }

    /// Makes the thread begin nothing new. Does not wait.
    pub(crate) fn halt(&self) {
        self.control.halt();
    }

    /// Gives a guest that is a copy the address that the interface was created with, instead of its
    /// original's.
    pub(crate) fn renew_mac(&self) {
        self.control.renew_mac(self.mac);
    }

    /// Returns the descriptor of the tap, if there is one.
    pub(crate) fn tap(&self) -> Option<BorrowedFd<'_>> {
        self.control.port().frames()
    }

    pub(crate) fn status(&self) -> NetStatus {
        NetStatus {
            tap: self.control.port().name().map(str::to_owned),
            mac: self.control.mac(),
            driver: self.control.driver(),
            figures: self.control.figures(),
            wakeups: self.carrier.wakeups(),
        }
    }
}

fn no_thread(source: std::io::Error) -> Error {
    Error::DeviceThread { name: <TransportSaved<NetSaved> as Saved>::NAME, source }
}

/// Returns a random address. The guest keeps it on every host, because it is part of its state.
fn random_mac() -> Result<Mac> {
    let mut bytes = [0; 6];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::RandomMac(error.into()))?;
    Ok(Mac::local(bytes))
}
