//! Tests that read the tables back as a guest does: from the RSDP on, with lengths and checksums.

use super::*;
use crate::options::VmOptions;
use vmferry_testkit::{Need, skip};

/// Guest memory as a guest reads it.
struct Memory(GuestRam);

impl Memory {
    fn new(platform: &Platform) -> Self {
        let ram = GuestRam::new(&VmOptions::new(8 << 20, 1)).unwrap();
        assert_eq!(install(&ram, platform), Ok(0xe_0000));
        Self(ram)
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.map().read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    fn u32(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.bytes(at, 4).try_into().unwrap())
    }

    fn u64(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes(at, 8).try_into().unwrap())
    }

    /// Returns the table at `at` after checking its checksum and signature.
    fn table(&self, at: u64, signature: &[u8]) -> Vec<u8> {
        let table = self.bytes(at, self.u32(at + 4) as usize);
        assert_eq!(&table[..4], signature);
        assert_eq!(sum(&table), 0, "the checksum of {}", String::from_utf8_lossy(signature));
        assert!(at >= ACPI_TABLES.0 && at + table.len() as u64 <= ACPI_TABLES.1);
        assert!(at.is_multiple_of(16));
        table
    }

    /// Returns FADT and MADT.
    fn roots(&self) -> (Vec<u8>, Vec<u8>) {
        let rsdp = self.bytes(0xe_0000, 36);
        assert_eq!(&rsdp[..8], b"RSD PTR ");
        assert_eq!((sum(&rsdp[..20]), sum(&rsdp), rsdp[15]), (0, 0, 2));
        let at = u64::from_le_bytes(rsdp[24..32].try_into().unwrap());
        let xsdt = self.table(at, b"XSDT");
        assert_eq!(xsdt.len(), 36 + 2 * 8);
        (self.table(self.u64(at + 36), b"FACP"), self.table(self.u64(at + 44), b"APIC"))
    }

    fn dsdt(&self) -> Vec<u8> {
        let (fadt, _) = self.roots();
        self.table(u64::from_le_bytes(fadt[140..148].try_into().unwrap()), b"DSDT")
    }
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn platform(cpus: u32, devices: u32) -> Platform {
    let slot = |n: u32| BusSlot { address: 0xd000_0000 + u64::from(n) * 0x1000, gsi: 16 + n };
    Platform { cpus, devices: (0..devices).map(slot).collect() }
}

fn count(bytes: &[u8], what: &[u8]) -> usize {
    bytes.windows(what.len()).filter(|window| *window == what).count()
}

#[test]
fn fadt_describes_switch_off_and_reset() {
    let (fadt, _) = Memory::new(&platform(1, 0)).roots();
    assert_eq!(fadt.len(), 276);
    let u32_at = |at: usize| u32::from_le_bytes(fadt[at..at + 4].try_into().unwrap());
    // HW_REDUCED_ACPI and RESET_REG_SUP, and no SCI.
    assert_eq!(u32_at(112) & (1 << 20 | 1 << 10), 1 << 20 | 1 << 10);
    // Generic addresses: space 1 (ports), 8 bits, byte access, port.
    let register = |at: usize| {
        assert_eq!(fadt[at..at + 4], [1, 8, 0, 1]);
        u64::from_le_bytes(fadt[at + 4..at + 12].try_into().unwrap())
    };
    assert_eq!([register(116), register(244), register(256)], [0xcf9, 0x600, 0x601]);
    assert!(resets(fadt[128]));
    // No VGA, no CMOS clock, no 8042.
    assert_eq!(u16::from_le_bytes([fadt[109], fadt[110]]), 1 << 2 | 1 << 5);
}

#[test]
fn only_soft_off_with_enable_bit_switches_off() {
    // Linux writes the sleep type of \_S5 shifted left by 2, and the enable bit.
    assert!(switches_off(5 << 2 | 1 << 5));
    for other in [0, 5 << 2, 1 << 5, 4 << 2 | 1 << 5, 1 << 7] {
        assert!(!switches_off(other), "{other:#x}");
    }
    // A kernel that resets by this port first writes 2, then 6.
    assert!(!resets(2) && resets(6) && resets(0xe));
}

#[test]
fn madt_lists_every_processor_and_the_io_apic() {
    for cpus in [1, 2, 254] {
        let (_, madt) = Memory::new(&platform(cpus, 0)).roots();
        assert_eq!(madt[36..40], 0xfee0_0000u32.to_le_bytes());
        let mut at = 44;
        for id in 0..u8::try_from(cpus).unwrap() {
            assert_eq!(madt[at..at + 8], [0, 8, id, id, 1, 0, 0, 0]);
            at += 8;
        }
        assert_eq!(madt[at..at + 4], [1, 12, 0, 0]);
        assert_eq!(madt[at + 4..at + 8], 0xfec0_0000u32.to_le_bytes());
        assert_eq!((at + 12, &madt[at + 8..]), (madt.len(), &[0; 4][..]));
    }
}

#[test]
fn dsdt_lists_every_device_with_its_place() {
    for devices in [0, 1, 12] {
        let dsdt = Memory::new(&platform(2, devices)).dsdt();
        assert_eq!(count(&dsdt, b"LNRO0005\0"), devices as usize);
        for slot in platform(2, devices).devices {
            // Memory32Fixed: 9 bytes, writable, address, length. Extended interrupt: 6 bytes, edge
            // and consumer, one interrupt, its number.
            let window = [
                &[0x86, 9, 0, 1][..],
                &u32::try_from(slot.address).unwrap().to_le_bytes(),
                &512u32.to_le_bytes(),
            ];
            let line = [&[0x89, 6, 0, 3, 1][..], &slot.gsi.to_le_bytes()];
            assert_eq!(count(&dsdt, &[window.concat(), line.concat()].concat()), 1, "{slot:x?}");
        }
        // The serial port: PNP0501, eight ports at 0x3f8, interrupt 4.
        assert_eq!(count(&dsdt, &[0x0c, 0x41, 0xd0, 0x05, 0x01]), 1);
        assert_eq!(count(&dsdt, &[0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8, 0x89, 6, 0, 3, 1, 4, 0, 0, 0]), 1);
        // The power button, its interrupt, and the method that notifies it: Notify (PWRB, 0x80).
        assert_eq!(count(&dsdt, &[0x0c, 0x41, 0xd0, 0x0c, 0x0c]), 1);
        assert_eq!(count(&dsdt, b"ACPI0013\0"), 1);
        let lines = [0x89, 6, 0, 3, 1, 6, 0, 0, 0, 0x89, 6, 0, 3, 1, 7, 0, 0, 0];
        assert_eq!(count(&dsdt, &lines), 1);
        // If (Arg0 == 7) { Notify (VGEN, 0x80) } Else { Notify (PWRB, 0x80) }
        let which = b"_EVT\x09\xa0\x0c\x93\x68\x0a\x07\x86VGEN\x0a\x80\xa1\x08\x86PWRB\x0a\x80";
        assert_eq!(count(&dsdt, which), 1);
        // The device of the ID, and its address as two halves: Name (ADDR, Package (2) {0xfe010,
        // 0})
        assert_eq!(count(&dsdt, b"\x08_HID\x0dVMGENCTR\0\x08_CID\x0dVM_Gen_Counter\0"), 1);
        assert_eq!(count(&dsdt, b"\x08ADDR\x12\x08\x02\x0c\x10\xe0\x0f\x00\x00"), 1);
        // Name (_S5, Package (4) {5, 0, 0, 0})
        assert_eq!(count(&dsdt, b"\x08_S5_\x12\x07\x04\x0a\x05\0\0\0"), 1);
    }
}

/// Linux has the same interpreter (ACPICA).
#[test]
fn acpica_runs_the_definitions_and_notifies_the_device_of_each_event() {
    let folder = std::env::temp_dir().join(format!("vmferry-acpica-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("dsdt.aml"), Memory::new(&platform(2, 12)).dsdt()).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let run = std::process::Command::new(program).args(arguments).current_dir(&folder).output();
        run.map(|run| String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned())
    };
    let execute = |what: &str| run("acpiexec", &["-b", what, "dsdt.aml"]);
    for (what, expected) in [
        ("execute \\_SB.EVTS._EVT 6", "Notify on [PWRB]"),
        ("execute \\_SB.EVTS._EVT 7", "Notify on [VGEN]"),
        ("evaluate \\_SB.VGEN._HID", "\"VMGENCTR\""),
        ("evaluate \\_SB.VGEN._CID", "\"VM_GEN_COUNTER\""),
        ("evaluate \\_SB.VGEN.ADDR", "[Integer] = 00000000000FE010\n    [Integer] = 0000000000000000"),
    ] {
        match execute(what) {
            Ok(said) => assert!(said.contains(expected), "{what}: {said}"),
            Err(error) => return skip(Need::Program, format!("acpiexec (acpica-tools): {error}")),
        }
    }
    run("iasl", &["-d", "dsdt.aml"]).unwrap();
    // 6035: Linux's driver looks for VMGENCTR, which the specification does not allow as an ACPI
    // ID.
    let compiled = run("iasl", &["-vw", "6035", "-p", "again", "dsdt.dsl"]).unwrap();
    assert!(compiled.contains(" 0 Errors"), "{compiled}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn largest_tables_fit() {
    let tables = tables(&platform(crate::MAX_CPUS, 12), ACPI_TABLES.0);
    assert!((tables.len() as u64) < (ACPI_TABLES.1 - ACPI_TABLES.0) / 4, "{}", tables.len());
}
