//! Data of the boot protocol (Xen's `arch-x86/hvm/start_info.h`): command line, memory map and
//! modules.
//!
//! The guest does not use the content of a module, such as an initrd. It leaves it in place, so a
//! host can fill memory with any content.
//!
//! The data may be anywhere in memory, so they are copied into the image before anything else is
//! written.

use vmferry_guest_abi::PAGE_SIZE;

/// Magic number of the start info, `XEN_HVM_START_MAGIC_VALUE`.
const MAGIC: u32 = 0x336e_c578;

/// First version of the structure with a memory map.
const VERSION_MEMMAP: u32 = 1;

/// Type of RAM in the memory map, `XEN_HVM_MEMMAP_TYPE_RAM`.
const RAM: u32 = 1;

/// Maximum number of ranges of RAM that the guest uses. Machines have two to four, and each module
/// splits one.
pub(crate) const MAX_RANGES: usize = 32;

/// Maximum number of modules. A host passes an initrd as the only one.
const MAX_MODULES: usize = 4;

/// Maximum number of entries of a memory map that are used.
const MAX_ENTRIES: u32 = 256;

const CMDLINE_MAX: usize = 1024;

#[repr(C)]
#[derive(Clone, Copy)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    modules_address: u64,
    cmdline_address: u64,
    rsdp_address: u64,
    memmap_address: u64,
    memmap_entries: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    address: u64,
    size: u64,
    kind: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Module {
    address: u64,
    size: u64,
    cmdline_address: u64,
    reserved: u64,
}

/// RAM from `start` to `end` (exclusive), in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RamRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Copy of the boot protocol's data.
#[derive(Clone, Debug)]
pub(crate) struct BootInfo {
    cmdline: [u8; CMDLINE_MAX],
    cmdline_len: usize,
    ranges: [RamRange; MAX_RANGES],
    range_count: usize,
    modules: [RamRange; MAX_MODULES],
    module_count: usize,
}

impl BootInfo {
    /// Copies command line, memory map, and the places of modules. Panics if there is no memory
    /// map, or if there are too many modules.
    ///
    /// # Safety
    /// `address` must be the value that the boot protocol left in EBX, and nothing that it may
    /// point to may have been written since.
    pub(crate) unsafe fn copy(address: u64) -> Self {
        let info: *const StartInfo = pointer(address);
        // SAFETY: the caller guarantees the address. The structure may be shorter in version 0, but
        // it is followed by memory.
        let info = unsafe { info.read_unaligned() };
        assert!(info.magic == MAGIC, "no PVH start info: magic {:#x} at {address:#x}", info.magic);
        assert!(
            info.version >= VERSION_MEMMAP && info.memmap_entries != 0,
            "the PVH start info (version {}) has no memory map",
            info.version
        );
        let mut boot = Self {
            cmdline: [0; CMDLINE_MAX],
            cmdline_len: 0,
            ranges: [RamRange::default(); MAX_RANGES],
            range_count: 0,
            modules: [RamRange::default(); MAX_MODULES],
            module_count: 0,
        };
        // SAFETY: the start info is valid, and so are its pointers.
        unsafe {
            boot.copy_cmdline(info.cmdline_address);
            boot.copy_map(info.memmap_address, info.memmap_entries);
            boot.copy_modules(info.modules_address, info.modules);
        }
        boot
    }

    /// Copies the command line.
    ///
    /// # Safety
    /// `address` must be that of a string that ends with 0, or 0.
    unsafe fn copy_cmdline(&mut self, address: u64) {
        if address == 0 {
            return;
        }
        let text: *const u8 = pointer(address);
        for byte in 0..CMDLINE_MAX {
            // SAFETY: the caller guarantees the string, and its end has not been passed.
            match unsafe { text.add(byte).read() } {
                0 => {
                    self.cmdline_len = byte;
                    return;
                }
                value => self.cmdline[byte] = value,
            }
        }
        panic!("the command line is longer than {CMDLINE_MAX} bytes");
    }

    /// Copies the memory map.
    ///
    /// # Safety
    /// `address` must be that of `entries` entries.
    unsafe fn copy_map(&mut self, address: u64, entries: u32) {
        let map: *const Entry = pointer(address);
        for index in 0..entries.min(MAX_ENTRIES) {
            // SAFETY: the caller guarantees the entries.
            let entry = unsafe { map.add(index as usize).read_unaligned() };
            if entry.kind == RAM && self.range_count < MAX_RANGES {
                self.ranges[self.range_count] =
                    RamRange { start: entry.address, end: entry.address.saturating_add(entry.size) };
                self.range_count += 1;
            }
        }
    }

    /// Copies the places of the modules. Hosts also list an empty module if there is no initrd.
    ///
    /// # Safety
    /// `address` must be that of `modules` entries.
    unsafe fn copy_modules(&mut self, address: u64, modules: u32) {
        let list: *const Module = pointer(address);
        for index in 0..modules as usize {
            // SAFETY: the caller guarantees the entries.
            let module = unsafe { list.add(index).read_unaligned() };
            if module.size == 0 {
                continue;
            }
            assert!(self.module_count < MAX_MODULES, "more than {MAX_MODULES} modules");
            let end = module.address.saturating_add(module.size);
            self.modules[self.module_count] = RamRange { start: module.address, end };
            self.module_count += 1;
        }
    }

    /// Returns the places of the modules, in the order of the list.
    pub(crate) fn modules(&self) -> &[RamRange] {
        &self.modules[..self.module_count]
    }

    /// Returns the command line. Panics if it is not UTF-8.
    pub(crate) fn cmdline(&self) -> &str {
        core::str::from_utf8(&self.cmdline[..self.cmdline_len]).expect("the command line is not UTF-8")
    }

    /// Returns the number of whole pages of RAM below `address`, in all of the map. A map of free
    /// pages has a bit for each.
    pub(crate) fn pages_below(&self, address: u64) -> u64 {
        let pages = |range: &RamRange| {
            let start = range.start.next_multiple_of(PAGE_SIZE);
            (range.end.min(address) / PAGE_SIZE).saturating_sub(start / PAGE_SIZE)
        };
        self.ranges().iter().map(pages).sum()
    }

    /// Returns the RAM in the order of the map.
    pub(crate) fn ranges(&self) -> &[RamRange] {
        &self.ranges[..self.range_count]
    }
}

/// Returns an identity-mapped physical address as a pointer.
fn pointer<T>(address: u64) -> *const T {
    core::ptr::with_exposed_provenance(usize::try_from(address).unwrap_or(0))
}
