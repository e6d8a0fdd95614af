//! ACPI tables, by which a guest (every Linux distribution's kernel) finds its processors, its
//! devices and its off switch. ACPI specification 6.5.
//!
//! | table | content |
//! |---|---|
//! | RSDP, XSDT | addresses of the other tables |
//! | FADT | hardware-reduced; how to switch off and reset; no VGA, no CMOS clock, no keyboard controller |
//! | MADT | a local APIC for each vCPU, the I/O APIC, whose inputs are numbered like interrupts |
//! | DSDT | serial port, power button, VM generation ID, the event device for both, `LNRO0005` for each virtio-mmio device, and `\_S5` |
//!
//! # Why hardware-reduced
//! The full ACPI hardware (PM1 registers, PM timer, SCI) would mean registers to emulate and state
//! to migrate, for two functions: switching off, which the sleep control register does, and
//! resetting, which the reset register does. With hardware-reduced tables Linux also leaves PIC and
//! PIT alone, whose set-up and calibration cause most exits of a boot. It then uses the paravirtual
//! clock for time and the local APIC for ticks.

mod dsdt;
#[cfg(test)]
mod tests;

use crate::boot::{ACPI_TABLES, BootError};
use crate::bus::BusSlot;
use crate::memory::GuestRam;
use acpi_tables::Aml;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use vm_memory::{Bytes, GuestAddress};

/// Port of the sleep control register (4.8.3.7). The next port is the status register.
pub(crate) const SLEEP_CONTROL: u16 = 0x600;
/// Port of the sleep status register, which always reads as zero: a machine that sleeps does not
/// wake up.
pub(crate) const SLEEP_STATUS: u16 = 0x601;
/// Port of the reset register. PCs have their reset control register at this port, so a kernel
/// without ACPI finds it as well.
pub(crate) const RESET: u16 = 0xcf9;
/// Value to write to the reset register for a hard reset.
const RESET_VALUE: u8 = 0x6;
/// Bit of the reset register that triggers the reset.
const RESET_NOW: u8 = 1 << 2;

/// Sleep type of "soft off", as `\_S5` names it.
const SLEEP_TYPE_OFF: u8 = 5;
const SLEEP_ENABLE: u8 = 1 << 5;

/// Returns true if `value`, written to [`SLEEP_CONTROL`], switches the machine off.
pub(crate) fn switches_off(value: u8) -> bool {
    value & SLEEP_ENABLE != 0 && value >> 2 & 7 == SLEEP_TYPE_OFF
}

/// Returns true if `value`, written to [`RESET`], resets the machine.
pub(crate) fn resets(value: u8) -> bool {
    value & RESET_NOW != 0
}

const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
/// ID of the I/O APIC, as its ID register reads in KVM.
const IO_APIC_ID: u8 = 0;

const OEM: [u8; 6] = *b"VMFRRY";
const OEM_TABLE: [u8; 8] = *b"VMFERRY ";
const OEM_REVISION: u32 = 1;
/// Revision of the DSDT: with 64-bit integers.
const DSDT_REVISION: u8 = 2;

/// Bits of `IAPC_BOOT_ARCH` (5.2.9.3) for absent hardware. The keyboard controller is absent as
/// well, but its bit marks presence.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_CLOCK: u16 = 1 << 5;

/// Hardware that the tables describe.
#[derive(Debug, Clone)]
pub(crate) struct Platform {
    /// Number of vCPUs, 1 to 254. The APIC ID of a vCPU is its number.
    pub(crate) cpus: u32,
    /// Places of the virtio-mmio devices.
    pub(crate) devices: Vec<BusSlot>,
}

/// Writes the tables into `ram`. Returns the address of the RSDP.
///
/// # Errors
/// Returns [`BootError::Tables`] if they do not fit.
pub(crate) fn install(ram: &GuestRam, platform: &Platform) -> Result<u64, BootError> {
    let (start, end) = ACPI_TABLES;
    let tables = tables(platform, start);
    let (len, room) = (tables.len() as u64, end - start);
    if len > room {
        return Err(BootError::Tables { len, room });
    }
    let written = ram.map().write_slice(&tables, GuestAddress(start));
    written.map_err(|error| BootError::Invalid(error.to_string()))?;
    Ok(start)
}

/// Returns the bytes of all tables at address `start`, the RSDP first.
fn tables(platform: &Platform, start: u64) -> Vec<u8> {
    let mut bytes = vec![0; Rsdp::len()];
    let mut add = |table: &dyn Aml| {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let at = start + bytes.len() as u64;
        table.to_aml_bytes(&mut bytes);
        at
    };
    let dsdt = add(&dsdt(&platform.devices));
    let fadt = add(&fadt(dsdt));
    let madt = add(&madt(platform.cpus));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = add(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    bytes[..rsdp.len()].copy_from_slice(&rsdp);
    bytes
}

fn dsdt(devices: &[BusSlot]) -> Sdt {
    const HEADER: u32 = 36;
    let mut table = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&dsdt::definitions(devices));
    table
}

fn fadt(dsdt: u64) -> impl Aml {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut table = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::Headless)
        // These flags mean that fixed hardware has no such button.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    table.iapc_boot_arch = (NO_VGA | NO_CMOS_CLOCK).into();
    table.reset_reg = port(RESET);
    table.reset_value = RESET_VALUE;
    table.sleep_control_reg = port(SLEEP_CONTROL);
    table.sleep_status_reg = port(SLEEP_STATUS);
    table.finalize()
}

fn madt(cpus: u32) -> MADT {
    let mut table = MADT::new(OEM, OEM_TABLE, OEM_REVISION, LocalInterruptController::Address(LOCAL_APIC));
    for id in 0..u8::try_from(cpus).unwrap_or(u8::MAX) {
        table.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    // There are no overrides: KVM's I/O APIC has every interrupt at the input of its number, edge
    // triggered and active high as on a PC.
    table.add_structure(IoApic::new(IO_APIC_ID, IO_APIC, 0));
    table
}
