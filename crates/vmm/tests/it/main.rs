//! The VMM on the host's KVM: guests that boot, allocate, pause, are tracked, and move by the real engine.

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
#[expect(dead_code, reason = "of what it can do to a link, one thing is done here")]
#[path = "../../../process/tests/it/proxy.rs"]
mod proxy;
mod trackers;
