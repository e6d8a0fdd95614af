//! The bare-metal guest's ELF image, built by this crate's build script.
//!
//! The image boots by PVH: in vmferry, or with `qemu-system-x86_64 -kernel FILE -append "workload=idle"` once
//! [`ELF`] is written to a file. What its command line says is [`GuestArgs`](vmferry_guest_abi::GuestArgs).
#![forbid(unsafe_code)]

/// The guest: a static x86-64 ELF executable with a PVH entry note.
pub const ELF: &[u8] = include_bytes!(env!("VMFERRY_GUEST_ELF"));
