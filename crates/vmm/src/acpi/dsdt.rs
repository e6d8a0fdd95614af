//! Definitions of the DSDT (Differentiated System Description Table), in AML.

use super::SLEEP_TYPE_OFF;
use crate::bus::BusSlot;
use crate::devices::{SERIAL, SERIAL_IRQ, SERIAL_PORTS};
use crate::{generation, power};
use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, Device, EISAName, Else, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify, Package,
    Path, ResourceTemplate, Scope,
};
use vmferry_virtio::mmio::WINDOW;

/// Hardware ID of a virtio-mmio device in Linux's driver and in QEMU.
const VIRTIO_MMIO: &str = "LNRO0005";
/// Hardware ID of a 16550 serial port.
const SERIAL_PORT: &str = "PNP0501";
/// Hardware ID of a control method power button (4.8.2.2.1.2), followed by the button's name and
/// the value of the notification that it was pressed.
const POWER_BUTTON: &str = "PNP0C0C";
const BUTTON: &str = "PWRB";
const PRESSED: u8 = 0x80;
/// Hardware ID of a VM generation ID, by which Linux's driver (drivers/virt/vmgenid.c) finds it,
/// followed by Microsoft's compatible ID for other guests.
const GENERATION_ID: &str = "VMGENCTR";
const GENERATION_ID_COMPATIBLE: &str = "VM_Gen_Counter";
/// Name of the VM generation ID's device, followed by the value of the notification that the ID has
/// changed.
const GENERATION: &str = "VGEN";
const CHANGED: u8 = 0x80;
/// Hardware ID of a generic event device (5.6.9).
const EVENT_DEVICE: &str = "ACPI0013";

/// Returns all definitions.
pub(super) fn definitions(devices: &[BusSlot]) -> Vec<u8> {
    let mut children = vec![serial_port(), power_button(), generation_id(), events()];
    children.extend((0..).zip(devices).map(|(number, slot)| virtio_mmio(number, *slot)));
    let children = children.iter().map(|child| child as &dyn Aml).collect();
    let mut bytes = Vec::new();
    Scope::new(Path::new("_SB_"), children).to_aml_bytes(&mut bytes);
    let off = Package::new(vec![&SLEEP_TYPE_OFF, &0u8, &0u8, &0u8]);
    Name::new(Path::new("_S5_"), &off).to_aml_bytes(&mut bytes);
    bytes
}

/// Encoded AML.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

fn device(name: &str, children: Vec<&dyn Aml>) -> Raw {
    let mut bytes = Vec::new();
    Device::new(Path::new(name), children).to_aml_bytes(&mut bytes);
    Raw(bytes)
}

/// Returns an interrupt that only one device uses: edge triggered, active high.
fn interrupt(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

fn serial_port() -> Raw {
    let ports = IO::new(SERIAL, SERIAL, 1, SERIAL_PORTS);
    let line = interrupt(SERIAL_IRQ);
    device(
        "COM1",
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new(SERIAL_PORT)),
            &Name::new(Path::new("_UID"), &0u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&ports, &line])),
        ],
    )
}

fn power_button() -> Raw {
    device(
        BUTTON,
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new(POWER_BUTTON)),
            &Name::new(Path::new("_UID"), &0u8),
        ],
    )
}

fn generation_id() -> Raw {
    let [low, high] = generation::halves();
    device(
        GENERATION,
        vec![
            &Name::new(Path::new("_HID"), &GENERATION_ID),
            &Name::new(Path::new("_CID"), &GENERATION_ID_COMPATIBLE),
            &Name::new(Path::new("_DDN"), &GENERATION_ID_COMPATIBLE),
            &Name::new(Path::new("ADDR"), &Package::new(vec![&low, &high])),
        ],
    )
}

/// Returns the event device, which has an interrupt for each event: the power button and the VM
/// generation ID.
fn events() -> Raw {
    let lines = [interrupt(power::LINE), interrupt(generation::LINE)];
    let (button, pressed) = (Path::new(BUTTON), PRESSED);
    let button = Notify::new(&button, &pressed);
    let (id, changed) = (Path::new(GENERATION), CHANGED);
    let id = Notify::new(&id, &changed);
    // The method's argument is the number of the interrupt.
    let is_id = Equal::new(&Arg(0), &generation::LINE);
    let (id, button) = (If::new(&is_id, vec![&id]), Else::new(vec![&button]));
    device(
        "EVTS",
        vec![
            &Name::new(Path::new("_HID"), &EVENT_DEVICE),
            &Name::new(Path::new("_UID"), &0u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&lines[0], &lines[1]])),
            &Method::new(Path::new("_EVT"), 1, true, vec![&id, &button]),
        ],
    )
}

fn virtio_mmio(number: u8, slot: BusSlot) -> Raw {
    let fits = |number: u64| u32::try_from(number).unwrap_or(0);
    let window = Memory32Fixed::new(true, fits(slot.address), fits(WINDOW));
    let line = interrupt(slot.gsi);
    device(
        &format!("VR{number:02}"),
        vec![
            &Name::new(Path::new("_HID"), &VIRTIO_MMIO),
            &Name::new(Path::new("_UID"), &number),
            // The device's memory accesses are coherent with the processors' caches.
            &Name::new(Path::new("_CCA"), &1u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&window, &line])),
        ],
    )
}
