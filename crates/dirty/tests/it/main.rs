//! The trackers against the host's own memory, page tables and KVM.

mod log;
mod memory;
#[path = "../../../sys/tests/pool/mod.rs"]
mod pool;
mod ring;
mod signals;
mod user_guest;
mod wp;
