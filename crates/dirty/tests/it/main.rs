//! Tests of the trackers with the host's own memory, page tables and KVM.

// The guests of `log`, `ring` and `signals` are x86-64 machine code.
#[cfg(target_arch = "x86_64")]
mod log;
mod memory;
#[path = "../../../sys/tests/pool/mod.rs"]
mod pool;
#[cfg(target_arch = "x86_64")]
mod ring;
#[cfg(target_arch = "x86_64")]
mod signals;
#[cfg(target_arch = "x86_64")]
mod user_guest;
mod wp;
