//! Devices at the guest's ports.
//!
//! | port | device |
//! |---|---|
//! | 0x3f8 to 0x3ff | 16550 serial port, interrupt 4 |
//! | 0x64 | keyboard controller, of which only the reset line exists |
//! | 0x600, 0x601 | ACPI sleep control and status: switches the machine off |
//! | 0xcf9 | reset control, ACPI's reset register |
//! | 0xf4 | exit: a byte written to this port stops the VM with that code, as QEMU's isa-debug-exit does |
//! | 0xf6 | reports of free pages, for a guest that has agreed to them with its balloon |
//!
//! All other ports read as ones and ignore writes, as on an empty bus. PIC, IOAPIC, PIT and local
//! APICs are in the kernel. Devices at memory addresses are on the [bus](crate::bus).

use crate::acpi;
use crate::balloon::VmBalloon;
use crate::bus::{Bus, BusSlot};
use crate::disk::{self, VmDisk};
use crate::error::Result;
use crate::irq::IrqLine;
use crate::kicks::Kicks;
use crate::kvm::Machine;
use crate::net::VmNet;
use crate::options::{SerialSink, VmOptions};
use crate::rng;
use crate::state::SerialSaved;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vm_superio::serial::{Serial, SerialEvents};
use vmferry_fault::PagingSlot;

/// First port of the serial port.
pub(crate) const SERIAL: u16 = 0x3f8;
/// Number of the serial port's ports.
pub(crate) const SERIAL_PORTS: u8 = 8;
const SERIAL_END: u16 = SERIAL + SERIAL_PORTS as u16;
/// Interrupt of the serial port.
pub(crate) const SERIAL_IRQ: u32 = 4;
const KEYBOARD: u16 = 0x64;
/// Command of the keyboard controller that pulses the reset line.
const KEYBOARD_RESET: u8 = 0xfe;

/// Action that a write to a port requests of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Reset the machine.
    Reset,
    /// Switch the machine off.
    Off,
    /// Stop the machine with a code.
    Exit(u8),
}

/// Counter of the bytes that the sink did not accept.
#[derive(Debug, Default)]
pub(crate) struct LostBytes(AtomicU64);

impl SerialEvents for LostBytes {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn in_buffer_empty(&self) {}
}

type Uart = Serial<IrqLine, Arc<LostBytes>, SerialSink>;

/// Devices of a VM, which the vCPU threads share.
#[derive(Debug)]
pub(crate) struct Devices {
    serial: Mutex<Uart>,
    lost: Arc<LostBytes>,
    machine: Arc<Machine>,
    sink: SerialSink,
    bus: Bus,
    balloon: Option<Arc<VmBalloon>>,
    disks: Vec<VmDisk>,
    nets: Vec<VmNet>,
}

impl Devices {
    /// Returns the devices that `options` ask for. Their order on the bus is the same on every
    /// host: balloon, random numbers, disks, network interfaces.
    ///
    /// # Errors
    /// Returns an error if the host does not have what a device needs.
    pub(crate) fn new(
        machine: &Arc<Machine>,
        paging: &Arc<PagingSlot>,
        options: &VmOptions,
        passes_kicks: bool,
    ) -> Result<Self> {
        let mut bus = Bus::default();
        let line = |slot: BusSlot| Box::new(IrqLine { machine: Arc::clone(machine), gsi: slot.gsi });
        let kicks = |slot: BusSlot| passes_kicks.then(|| Kicks::new(machine, slot.address));
        let mut balloon = None;
        if options.balloon {
            bus.plug(|slot| {
                let made = Arc::new(VmBalloon::new(
                    machine.ram(),
                    paging,
                    (options.drop_way, options.balloon_extension),
                    line(slot),
                ));
                let device = Arc::clone(made.device());
                balloon = Some(made);
                Ok(device)
            })?;
        }
        if options.rng {
            bus.plug(|slot| rng::make(machine, line(slot)))?;
        }

        let mut disks = Vec::new();
        for (instance, disk) in (0..).zip(&options.disks) {
            bus.plug(|slot| {
                let made = VmDisk::new((machine, paging), disk, instance, (line(slot), kicks(slot)))?;
                let device = Arc::clone(made.device());
                disks.push(made);
                Ok(device)
            })?;
        }
        if !options.incoming {
            // A target gets its disks together with its guest.
            disk::take(&disks)?;
        }

        let mut nets = Vec::new();
        for (instance, net) in (0..).zip(&options.nets) {
            bus.plug(|slot| {
                let wires = (line(slot) as _, kicks(slot));
                let made = VmNet::new((machine.ram(), paging), net, instance, wires)?;
                let device = Arc::clone(made.device());
                nets.push(made);
                Ok(device)
            })?;
        }

        let lost = Arc::new(LostBytes::default());
        let sink = options.serial.clone();
        let serial_line = IrqLine { machine: Arc::clone(machine), gsi: SERIAL_IRQ };
        let serial = Serial::with_events(serial_line, Arc::clone(&lost), sink.clone());
        Ok(Self {
            serial: Mutex::new(serial),
            lost,
            machine: Arc::clone(machine),
            sink,
            bus,
            balloon,
            disks,
            nets,
        })
    }

    fn serial(&self) -> MutexGuard<'_, Uart> {
        // A panic while the lock was held leaves complete register values. At worst a byte is lost.
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a guest's write of `data` to `port`. Several bytes are several writes of one byte.
    pub(crate) fn write_port(&self, port: u16, data: &[u8]) -> Option<Request> {
        match (port, data.first()) {
            (SERIAL..SERIAL_END, _) => {
                let register = (port - SERIAL).to_le_bytes()[0];
                let mut serial = self.serial();
                for byte in data {
                    if let Err(error) = serial.write(register, *byte) {
                        tracing::debug!(%error, "serial output lost");
                    }
                }
                None
            }
            (KEYBOARD, Some(&KEYBOARD_RESET)) => Some(Request::Reset),
            (acpi::RESET, Some(value)) if acpi::resets(*value) => Some(Request::Reset),
            (acpi::SLEEP_CONTROL, Some(value)) if acpi::switches_off(*value) => Some(Request::Off),
            (vmferry_guest_abi::DEBUG_EXIT_PORT, Some(&code)) => Some(Request::Exit(code)),
            (vmferry_guest_abi::balloon::REPORT_PORT, _) => {
                if let Some(balloon) = &self.balloon {
                    balloon.report(data);
                }
                None
            }
            _ => None,
        }
    }

    /// Handles a guest's read of `port`.
    pub(crate) fn read_port(&self, port: u16, data: &mut [u8]) {
        match port {
            SERIAL..SERIAL_END => {
                let register = (port - SERIAL).to_le_bytes()[0];
                let mut serial = self.serial();
                data.iter_mut().for_each(|byte| *byte = serial.read(register));
            }
            // No output is waiting and the input was taken: the controller is idle.
            KEYBOARD => data.fill(0),
            acpi::SLEEP_CONTROL | acpi::SLEEP_STATUS | acpi::RESET => data.fill(0),
            _ => data.fill(0xff),
        }
    }

    /// Returns the devices at memory addresses.
    pub(crate) fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Returns the network interfaces.
    pub(crate) fn nets(&self) -> &[VmNet] {
        &self.nets
    }

    /// Returns the balloon, if there is one.
    pub(crate) fn balloon(&self) -> Option<&Arc<VmBalloon>> {
        self.balloon.as_ref()
    }

    /// Returns the disks, in order.
    pub(crate) fn disks(&self) -> &[VmDisk] {
        &self.disks
    }

    /// Queues input for the guest's serial port. Returns the number of bytes that were accepted.
    pub(crate) fn serial_input(&self, bytes: &[u8]) -> usize {
        let mut serial = self.serial();
        let take = bytes.len().min(serial.fifo_capacity());
        if take == 0 { 0 } else { serial.enqueue_raw_bytes(&bytes[..take]).unwrap_or(0) }
    }

    /// Returns the number of bytes of serial output that the sink did not accept.
    pub(crate) fn serial_lost(&self) -> u64 {
        self.lost.0.load(Ordering::Relaxed)
    }

    pub(crate) fn save_serial(&self) -> SerialSaved {
        SerialSaved(self.serial().state())
    }

    /// Loads the serial port. This may pulse its interrupt, so the interrupt controllers must be
    /// loaded afterwards.
    pub(crate) fn load_serial(&self, saved: &SerialSaved) -> std::result::Result<(), String> {
        let line = IrqLine { machine: Arc::clone(&self.machine), gsi: SERIAL_IRQ };
        let loaded = Serial::from_state(&saved.0, line, Arc::clone(&self.lost), self.sink.clone());
        *self.serial() = loaded.map_err(|error| error.to_string())?;
        Ok(())
    }
}
