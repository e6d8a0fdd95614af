//! The reference VMM: runs a guest on KVM and implements the engine's traits for it.
//!
//! | module | what |
//! |---|---|
//! | `options` | what a VM is to be like |
//! | `memory` | guest RAM: mappings, and marks for what the VMM itself writes |
//! | `boot` | kernel images and how a guest is entered |
//! | `acpi` | tables by which a guest finds out about its machine |
//! | `kvm` | opening KVM, an empty VM |
//! | `devices`, `power` | serial port, reset, exit port; power button |
//! | `generation` | the VM generation ID, which tells copies apart |
//! | `irq` | interrupt lines |
//! | `bus`, `virtio`, `kicks` | devices at memory addresses, and what is the same for all of them |
//! | `balloon`, `disk`, `rng` | those devices |
//! | `vcpu` | a thread for each vCPU: run, pause, save, load |
//! | `state` | saved state of devices as versioned sections |
//! | `vm`, `migrate` | the VM, and the engine's traits |
//!
//! What is in KVM is saved, loaded, tracked and paused by the crate `vmferry-kvm`.
//!
//! [`Vm`] is the whole of it; [`VmHandle`] is how other threads look at it while it runs or moves.

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
    Backing, Captured, CpuChoice, DiskOptions, DropWay, MAX_CPUS, MIN_MEMORY, NetOptions, SerialSink,
    VmOptions,
};
pub use state::StateError;
pub use vcpu::{Exit, VcpuFault};
pub use vm::Vm;
pub use vmferry_virtio::balloon::extension::MapError;
pub use vmferry_virtio::balloon::{AskError, BalloonFigures, GuestStats};
pub use vmferry_virtio::blk::BlkFigures;
pub use vmferry_virtio::net::{BadMac, Mac, NetFigures};
