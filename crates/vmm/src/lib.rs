//! The reference VMM, which runs a guest on KVM and implements the engine's traits for it.
//!
//! | module | content |
//! |---|---|
//! | `options` | options of a VM |
//! | `memory` | guest RAM: mappings, and marks for pages that the VMM itself writes |
//! | `boot` | loading of kernel images, and the state in which a guest starts |
//! | `acpi` | tables that describe the machine to the guest |
//! | `kvm` | opening of KVM, and creation of an empty VM |
//! | `devices`, `power` | serial port, reset, exit port; power button |
//! | `generation` | the VM generation ID, which distinguishes copies |
//! | `irq` | interrupt lines |
//! | `bus`, `virtio`, `kicks` | devices at memory addresses, and their common parts |
//! | `balloon`, `disk`, `net`, `rng` | the balloon, disks, network interfaces and random numbers |
//! | `vcpu` | a thread for each vCPU, which runs, pauses, saves and loads it |
//! | `state` | saved state of devices as versioned sections |
//! | `vm`, `migrate` | the VM, and its implementation of the engine's traits |
//!
//! The crate `vmferry-kvm` saves and loads the state in KVM, tracks dirty pages with KVM, and
//! pauses vCPUs.
//!
//! [`Vm`] is the VM itself, which one thread owns. [`VmHandle`] is its handle for other threads,
//! while the VM runs or is migrated.

mod acpi;
mod balloon;
mod boot;
mod bus;
mod devices;
mod disk;
mod error;
mod generation;
mod handle;
#[cfg(feature = "hostile")]
pub mod hostile;
mod irq;
mod kicks;
#[cfg(test)]
mod kicks_tests;
mod kvm;
mod memory;
mod migrate;
mod net;
mod options;
mod power;
mod rng;
mod state;
mod stats;
mod vcpu;
mod virtio;
mod vm;
#[cfg(test)]
mod vm_tests;

pub use balloon::{BalloonHandle, BalloonStatus, Hints};
pub use boot::{BootError, Kernel, MAX_CMDLINE};
pub use disk::{DiskError, DiskStatus};
pub use error::{Error, Result};
pub use handle::VmHandle;
pub use kvm::{largest_dirty_ring, open_kvm, passes_kicks};
pub use memory::{
    Advice, GuestRam, HIGH_RAM_START, HUGE_PAGE_BYTES, HugePagePool, LOW_RAM_END, MemoryError, RamRegion,
    WriteMarks, layout_for,
};
pub use net::NetStatus;
pub use options::{
    Backing, Captured, CpuChoice, DiskOptions, DropWay, MAX_CPUS, MIN_MEMORY, NetOptions, OpenTap, Prealloc,
    SerialSink, VmOptions,
};
pub use state::StateError;
pub use vcpu::{Exit, VcpuFault};
pub use vm::Vm;
pub use vmferry_kvm::Error as SetupError;
pub use vmferry_virtio::balloon::extension::MapError;
pub use vmferry_virtio::balloon::{BalloonFigures, GuestStats, HintError};
pub use vmferry_virtio::blk::BlkFigures;
pub use vmferry_virtio::net::{BadMac, Mac, NetFigures};
