//! A VM's network interfaces: each at a tap of the host's, with a thread that carries its frames.
//!
//! | module | what |
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
use std::sync::Arc;
use vmferry_fault::LazySlot;
use vmferry_virtio::mmio::TransportSaved;
use vmferry_virtio::net::{Mac, Net, NetControl, NetFigures, NetSaved};
use vmferry_virtio::signals::Interrupt;

impl Saved for TransportSaved<NetSaved> {
    const NAME: &'static str = "virtio-net";
    const VERSION: u32 = 1;
}

/// How a network interface is doing.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetStatus {
    /// The host's tap by name.
    pub tap: String,
    /// The guest's address.
    pub mac: Mac,
    /// Whether the guest has a driver for it.
    pub driver: bool,
    /// What happened so far.
    pub figures: NetFigures,
    /// How often the thread that carries frames was woken.
    pub wakeups: u64,
}

/// A VM's network interface.
#[derive(Debug)]
pub(crate) struct VmNet {
    device: Arc<VirtioMmio<Net<TapPort>>>,
    control: NetControl<TapPort>,
    carrier: Carrier,
    /// The address that it was made with.
    mac: Mac,
}

impl VmNet {
    /// Number `instance` of the VM's, at the tap that `options` name.
    ///
    /// # Errors
    /// What is wrong with the tap.
    pub(crate) fn new(
        (ram, lazy): (&Arc<GuestRam>, &Arc<LazySlot>),
        options: &NetOptions,
        instance: u32,
        (line, kicks): (Box<dyn Interrupt>, Option<Kicks>),
    ) -> Result<Self> {
        let port = TapPort::open(&options.tap)?;
        let mtu = port.mtu()?;
        let mac = options.mac.map_or_else(random_mac, Ok)?;
        let (wiring, socket) = virtio::wire(line);
        let net = Net::new(vmferry_virtio::net::NetOptions { mac, mtu }, port, wiring.signals);
        let control = net.control();
        if let Some(kicks) = kicks {
            // One that is not passed on comes by way of the device to the same bell.
            for queue in [vmferry_virtio::net::RX, vmferry_virtio::net::TX] {
                kicks.ring(queue, control.port().bell());
            }
        }
        let device = socket.plug(net, ram, instance);
        let carrier = Carrier::start(Arc::clone(&device), control.clone(), Arc::clone(lazy))?;
        Ok(Self { device, control, carrier, mac })
    }

    /// What is on the bus.
    pub(crate) fn device(&self) -> &Arc<VirtioMmio<Net<TapPort>>> {
        &self.device
    }

    /// Has its thread begin nothing new; waits for nothing.
    pub(crate) fn halt(&self) {
        self.control.halt();
    }

    /// Gives the guest, which is a copy, the address that the interface was made with instead of its original's.
    pub(crate) fn renew_mac(&self) {
        self.control.renew_mac(self.mac);
    }

    pub(crate) fn status(&self) -> NetStatus {
        NetStatus {
            tap: self.control.port().name().to_owned(),
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

/// An address that nobody else has: the guest keeps it wherever it goes, as it is part of its state.
fn random_mac() -> Result<Mac> {
    let mut bytes = [0; 6];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::Options(format!("no random MAC address: {error}; give mac=")))?;
    Ok(Mac::local(bytes))
}
