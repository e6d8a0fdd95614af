//! Registers of a virtio-mmio device.

use super::VirtQueue;
use crate::carve::Carver;
use crate::memory::pointer;
use core::sync::atomic::{Ordering, fence};
use vmferry_guest_abi::Windows;
use vmferry_guest_abi::balloon::VENDOR;

const MAGIC: u64 = 0x000;
const VERSION: u64 = 0x004;
const DEVICE_ID: u64 = 0x008;
const VENDOR_ID: u64 = 0x00c;
const DEVICE_FEATURES: u64 = 0x010;
const DEVICE_FEATURES_SEL: u64 = 0x014;
const DRIVER_FEATURES: u64 = 0x020;
const DRIVER_FEATURES_SEL: u64 = 0x024;
const QUEUE_SEL: u64 = 0x030;
const QUEUE_NUM_MAX: u64 = 0x034;
const QUEUE_NUM: u64 = 0x038;
const QUEUE_READY: u64 = 0x044;
const QUEUE_NOTIFY: u64 = 0x050;
const STATUS: u64 = 0x070;
const QUEUE_DESC: u64 = 0x080;
const QUEUE_DRIVER: u64 = 0x090;
const QUEUE_DEVICE: u64 = 0x0a0;
const CONFIG_GENERATION: u64 = 0x0fc;
const CONFIG: u64 = 0x100;

/// Magic number, "virt" in little-endian.
const MAGIC_VALUE: u32 = 0x7472_6976;
/// Version of the interface, the only one that this driver supports. Version 1 predates the
/// specification.
const MODERN: u32 = 2;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;

/// Feature bit 32: the device follows the specification.
pub(crate) const VERSION_1: u32 = 32;
/// First bit of the bank with the features of vmferry's extensions (docs/balloon-extension.md).
const EXTENSION: u32 = 96;

/// Address of the windows of QEMU's microvm when they are described in ACPI tables only: 24 at
/// most.
const MICROVM: u64 = 0xfeb0_0000;
const MICROVM_WINDOWS: u64 = 24;
const WINDOW: u64 = 0x200;

/// Number of reads of the status after a reset before the device is given up.
const RESET_READS: u32 = 10_000;

/// Registers of one device. Each access is an exit, which takes 46 us on the slowest measured
/// hosts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mmio {
    base: u64,
}

/// Returns the first device of a type: in the windows of the command line, or in microvm's if the
/// command line has none.
pub(crate) fn find(windows: &Windows, id: u32) -> Option<Mmio> {
    if windows.iter().next().is_some() {
        return windows.iter().map(|base| Mmio { base }).find(|device| device.is(id));
    }
    (0..MICROVM_WINDOWS)
        .map(|index| Mmio { base: MICROVM + index * WINDOW })
        // Without the first window there are no others.
        .take_while(|device| device.read(MAGIC) == MAGIC_VALUE)
        .find(|device| device.is(id))
}

impl Mmio {
    fn is(self, id: u32) -> bool {
        self.read(MAGIC) == MAGIC_VALUE && self.read(VERSION) == MODERN && self.read(DEVICE_ID) == id
    }

    fn read(self, register: u64) -> u32 {
        // SAFETY: the first 4 GiB are mapped, windows lie in them (`main` checks it), and no memory
        // that Rust knows of is at these addresses.
        unsafe { pointer::<u32>(self.base + register).read_volatile() }
    }

    fn write(self, register: u64, value: u32) {
        // Data for the device in memory is written before the device is notified.
        fence(Ordering::SeqCst);
        // SAFETY: as for `read`. The code that filled the queues is responsible for what the device
        // does to memory.
        unsafe { pointer::<u32>(self.base + register).write_volatile(value) }
    }

    fn write64(self, register: u64, value: u64) {
        let [low, high] = halves(value);
        self.write(register, low);
        self.write(register + 4, high);
    }

    /// Resets the device and negotiates the features of `known` that it offers. Returns these
    /// features.
    pub(crate) fn negotiate(self, known: u128) -> u128 {
        self.write(STATUS, 0);
        let reset = (0..RESET_READS).any(|_| self.read(STATUS) == 0);
        assert!(reset, "the virtio device at {:#x} does not reset", self.base);
        self.write(STATUS, ACKNOWLEDGE);
        self.write(STATUS, ACKNOWLEDGE | DRIVER);
        // On a device of another vendor the bits of an extension have no meaning that this driver
        // knows.
        let own = self.read(VENDOR_ID) == VENDOR;
        let known = if own { known } else { known & ((1 << EXTENSION) - 1) };
        let features = self.offered() & known;
        for bank in (0..4).filter(|bank| *bank < 2 || features >> EXTENSION != 0) {
            self.write(DRIVER_FEATURES_SEL, bank);
            self.write(DRIVER_FEATURES, bank_of(features, bank));
        }
        self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        let agreed = self.read(STATUS) & FEATURES_OK != 0;
        assert!(agreed, "the virtio device at {:#x} refuses features {features:#x}", self.base);
        features
    }

    /// Returns the offered features. A device with two banks may show the second one in place of
    /// all others (QEMU does). The fourth bank therefore only counts if the third differs from the
    /// second: the second has bit 32 set, and bit 64 is not a known feature.
    fn offered(self) -> u128 {
        let banks: [u32; 4] = core::array::from_fn(|bank| {
            self.write(DEVICE_FEATURES_SEL, u32::try_from(bank).unwrap_or(0));
            self.read(DEVICE_FEATURES)
        });
        let count = if banks[2] == banks[1] { 2 } else { 4 };
        banks[..count].iter().rev().fold(0, |bits, bank| bits << 32 | u128::from(*bank))
    }

    /// Makes queue `index` ready, with at most `most` entries. Returns `None` if the device has no
    /// such queue.
    pub(crate) fn queue(self, index: u16, most: u16, carver: &mut Carver) -> Option<VirtQueue> {
        self.write(QUEUE_SEL, index.into());
        let size = u16::try_from(self.read(QUEUE_NUM_MAX)).unwrap_or(u16::MAX).min(most);
        if size == 0 {
            return None;
        }
        // Version 2 does not require a power of two, but it does no harm.
        let size = 1 << size.ilog2();
        let queue = VirtQueue::new(index, size, carver);
        self.write(QUEUE_NUM, size.into());
        let [table, driver, device] = queue.addresses();
        self.write64(QUEUE_DESC, table);
        self.write64(QUEUE_DRIVER, driver);
        self.write64(QUEUE_DEVICE, device);
        self.write(QUEUE_READY, 1);
        Some(queue)
    }

    /// Tells the device that the driver is ready.
    pub(crate) fn ready(self) {
        self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    /// Notifies the device of new buffers in a queue.
    pub(crate) fn notify(self, queue: &VirtQueue) {
        self.write(QUEUE_NOTIFY, queue.index().into());
    }

    /// Returns a number that changes when the configuration does.
    pub(crate) fn generation(self) -> u32 {
        self.read(CONFIG_GENERATION)
    }

    /// Returns a 32-bit field of the configuration.
    pub(crate) fn config(self, offset: u64) -> u32 {
        self.read(CONFIG + offset)
    }

    /// Writes a 32-bit field of the configuration.
    pub(crate) fn set_config(self, offset: u64, value: u32) {
        self.write(CONFIG + offset, value);
    }

    /// Writes a 64-bit field of the configuration, the low half first.
    pub(crate) fn set_config64(self, offset: u64, value: u64) {
        self.write64(CONFIG + offset, value);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "halves are what is wanted")]
fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

#[expect(clippy::cast_possible_truncation, reason = "a bank is what is wanted")]
fn bank_of(features: u128, bank: u32) -> u32 {
    (features >> (32 * bank)) as u32
}
