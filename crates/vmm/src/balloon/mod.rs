//! The balloon of a VM: its device on the bus, what it does with memory, and the view of it for other threads.
//!
//! | module | what |
//! |---|---|
//! | `host` | pages given back, and when they are not |
//! | `free`, `hints` | free pages that a migration need not send |
//! | `handle` | the view for other threads |
//! | `keeper` | a thread that asks the guest for statistics |

mod free;
mod handle;
mod hints;
mod host;
mod keeper;
#[cfg(test)]
mod tests;

pub(crate) use free::BalloonFree;
pub use handle::{BalloonHandle, BalloonStatus, Hints};

pub(crate) use keeper::Keeper;

use crate::bus::MmioDevice;
use crate::memory::GuestRam;
use crate::state::{Saved, StateError};
use hints::HintBoard;
use host::RamHost;
use std::sync::Arc;
use vmferry_fault::LazySlot;
use vmferry_virtio::balloon::{Balloon, BalloonControl, BalloonOptions, BalloonSaved};
use vmferry_virtio::mmio::{MmioTransport, TransportSaved};
use vmferry_virtio::signals::{Interrupt, Signals};

/// The saved balloon, registers and queues included.
pub(crate) type BalloonSection = TransportSaved<BalloonSaved>;

impl Saved for BalloonSection {
    const NAME: &'static str = "virtio-balloon";
    const VERSION: u32 = 1;
}

/// A VM's balloon.
#[derive(Debug)]
pub(crate) struct VmBalloon {
    transport: MmioTransport<Balloon>,
    control: BalloonControl,
    hints: Arc<HintBoard>,
    ram: Arc<GuestRam>,
    lazy: Arc<LazySlot>,
}

impl VmBalloon {
    pub(crate) fn new(
        ram: &Arc<GuestRam>,
        lazy: &Arc<LazySlot>,
        way: crate::DropWay,
        line: Box<dyn Interrupt>,
    ) -> Self {
        let hints = Arc::new(HintBoard::new(ram.layout()));
        let host = RamHost::new(Arc::clone(ram), Arc::clone(lazy), way, Arc::clone(&hints));
        let options =
            BalloonOptions { layout: ram.layout().clone(), ram: crate::boot::whole_pages(ram.layout()) };
        let signals = Signals::new(line);
        let device = Balloon::new(options, Arc::new(host), Arc::clone(&signals));
        let control = device.control();
        let transport = MmioTransport::new(device, signals);
        Self { transport, control, hints, ram: Arc::clone(ram), lazy: Arc::clone(lazy) }
    }

    /// A vCPU writes to the port of the hypercall; several words are several calls.
    pub(crate) fn report(&self, data: &[u8]) {
        for page in data.as_chunks().0 {
            self.control.report(self.ram.map(), u32::from_le_bytes(*page));
        }
    }

    /// Asks the guest for new statistics, if it has any. Called while the guest runs, by a thread that must not sleep on a page that is
    /// still to come: while any is, nothing is asked. (Pages can only become missing before a guest runs, so this look holds for all of
    /// the call. The lock that it takes is not kept: a vCPU takes that one while it has the device's.)
    fn refresh(&self) {
        if self.lazy.settled(|| ()).is_some()
            && let Some(queue) = self.control.want_stats()
        {
            self.transport.notify(self.ram.map(), queue);
        }
    }

    pub(crate) fn save(&self) -> BalloonSection {
        self.transport.save()
    }

    /// Checks `saved` and takes it up.
    pub(crate) fn load(&self, saved: &BalloonSection) -> Result<(), StateError> {
        let loaded = self.transport.load(self.ram.map(), saved);
        loaded.map_err(|error| StateError::invalid::<BalloonSection>(0, error.to_string()))
    }
}

impl MmioDevice for VmBalloon {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.transport.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.transport.write(self.ram.map(), offset, data);
    }

    fn due(&self) -> bool {
        self.transport.due()
    }

    fn work(&self) -> bool {
        self.transport.work(self.ram.map())
    }

    fn resumed(&self) {
        self.transport.resumed();
    }
}
