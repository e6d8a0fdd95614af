//! ELF image of the bare-metal guest, built by this crate's build script.
//!
//! The image boots by PVH: in vmferry, or with `qemu-system-x86_64 -kernel FILE -append
//! "workload=idle"` once [`ELF`] is written to a file. [`GuestArgs`](vmferry_guest_abi::GuestArgs)
//! is the format of its command line.
#![forbid(unsafe_code)]

/// Content of the guest's file: a static x86-64 ELF executable with a PVH entry note.
pub const ELF: &[u8] = include_bytes!(env!("VMFERRY_GUEST_ELF"));
