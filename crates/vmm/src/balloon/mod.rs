//! The balloon of a VM: its device on the bus, its operations on guest memory, and the handle for
//! other threads.
//!
//! | module | content |
//! |---|---|
//! | `host` | pages that are given back, and the cases in which they are kept |
//! | `free`, `hints` | free pages that a migration need not send |
//! | `handle` | handle for other threads |
//! | `keeper` | thread that asks the guest for statistics |

mod free;
mod handle;
mod hints;
mod host;
mod keeper;
#[cfg(test)]
mod tests;

pub(crate) use free::BalloonFree;
pub use handle::{BalloonHandle, BalloonStatus, Hints};

pub(crate) use keeper::StatsThread;

use crate::memory::GuestRam;
use crate::state::{Saved, SectionKind, Sections, StateError};
use crate::virtio::{self, VirtioMmio};
use hints::HintBoard;
use host::RamHost;
use keeper::Cadence;
use std::sync::{Arc, Mutex, PoisonError};
use vmferry_engine::Section;
use vmferry_fault::PagingSlot;
use vmferry_virtio::balloon::{Balloon, BalloonAdditions, BalloonControl, BalloonOptions, BalloonSaved};
use vmferry_virtio::mmio::TransportSaved;
use vmferry_virtio::signals::Interrupt;

impl Saved for TransportSaved<BalloonSaved> {
    const NAME: &'static str = "virtio-balloon";
    const VERSION: u32 = 1;

    fn additions(&self, instance: u32) -> Result<Option<Section>, StateError> {
        let additions = self.device.additions;
        let wanted = additions != BalloonAdditions::default();
        wanted.then(|| ADDITIONS.section(instance, &additions)).transpose()
    }

    fn take_additions(&mut self, parts: &mut Sections<'_>, instance: u32) -> Result<(), StateError> {
        self.device.additions = parts.take_optional(ADDITIONS, instance)?.unwrap_or_default();
        Ok(())
    }
}

/// Section of the balloon's state that earlier versions do not know.
const ADDITIONS: SectionKind = SectionKind { name: "virtio-balloon-additions", version: 1 };

/// Balloon of a VM.
#[derive(Debug)]
pub(crate) struct VmBalloon {
    device: Arc<VirtioMmio<Balloon>>,
    control: BalloonControl,
    hints: Arc<HintBoard>,
    ram: Arc<GuestRam>,
    paging: Arc<PagingSlot>,
    /// True if the device offers the extension.
    extension: bool,
    /// Interval at which the keeper asks for statistics.
    cadence: Cadence,
    /// Target in pages before a squeeze, while a squeeze is in effect.
    before_squeeze: Mutex<Option<u32>>,
}

impl VmBalloon {
    pub(crate) fn new(
        ram: &Arc<GuestRam>,
        paging: &Arc<PagingSlot>,
        (way, extension): (crate::DropWay, bool),
        line: Box<dyn Interrupt>,
    ) -> Self {
        let hints = Arc::new(HintBoard::new(ram.layout()));
        let host = RamHost::new(Arc::clone(ram), Arc::clone(paging), way, Arc::clone(&hints));
        let options = BalloonOptions {
            layout: ram.layout().clone(),
            extension,
            ram: crate::boot::whole_pages(ram.layout()),
        };
        let (wiring, socket) = virtio::wire(line);
        let balloon = Balloon::new(options, Arc::new(host), wiring.signals);
        let control = balloon.control();
        let device = socket.plug(balloon, ram, 0);
        Self {
            device,
            control,
            hints,
            ram: Arc::clone(ram),
            paging: Arc::clone(paging),
            extension,
            cadence: Cadence::new(),
            before_squeeze: Mutex::new(None),
        }
    }

    /// Ends a squeeze, if one is in effect: the guest gets its earlier target back.
    pub(crate) fn end_squeeze(&self) {
        // The lock is held across the change, so that a squeeze does not begin in between.
        let mut before = self.before_squeeze.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pages) = before.take() {
            self.control.set_target(pages);
        }
    }

    /// Returns the device on the bus.
    pub(crate) fn device(&self) -> &Arc<VirtioMmio<Balloon>> {
        &self.device
    }

    /// Returns the property that source and target of a migration must have in common. A peer of an
    /// earlier version has the extension and reports `on`.
    pub(crate) fn description(&self) -> &'static str {
        if self.extension { "on" } else { "without-extension" }
    }

    /// Handles a vCPU's write to the hypercall's port. Several words are several calls.
    pub(crate) fn report(&self, data: &[u8]) {
        for page in data.as_chunks().0 {
            self.control.report(self.ram.map(), u32::from_le_bytes(*page));
        }
    }

    /// Asks the guest for new statistics, if it has any and they are due. Called in each tick while
    /// the guest runs, by a thread that must not sleep on a missing page: while pages are missing,
    /// nothing is asked. Pages can only become missing before a guest runs, so this check holds for
    /// the whole call. The lock that the check takes is not kept, because a vCPU takes it while
    /// holding the device's lock.
    fn refresh(&self) {
        if self.cadence.tick()
            && self.paging.if_complete(|| ()).is_some()
            && let Some(queue) = self.control.want_stats()
        {
            self.device.notify(queue);
        }
    }
}
