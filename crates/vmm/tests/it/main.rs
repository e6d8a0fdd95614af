//! Tests of the VMM on the host's KVM: guests that boot, allocate, pause, are tracked, and are
//! migrated by the real engine.

mod alloc;
mod branch;
mod confined;
mod demand_paging;
mod disks;
mod engine;
mod free_pages;
mod hugepages;
mod kvm;
#[path = "../../../sys/tests/pool/mod.rs"]
mod pool;
mod prealloc;
mod rig;
mod trackers;
