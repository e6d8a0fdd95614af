//! Tests of the VMM on the host's KVM: guests that boot, allocate, pause, are tracked, and are
//! migrated by the real engine.

mod alloc;
mod confined;
mod disks;
mod engine;
mod free_pages;
mod hugepages;
mod kvm;
mod lazy;
#[path = "../../../sys/tests/pool/mod.rs"]
mod pool;
mod rig;
mod trackers;
