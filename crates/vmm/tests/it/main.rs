//! The VMM on the host's KVM: guests that boot, allocate, pause, are tracked, and move by the real engine.

mod alloc;
mod confined;
mod disks;
mod engine;
mod free_pages;
#[path = "../../../process/tests/it/gate.rs"]
mod gate;
mod hugepages;
mod kvm;
mod lazy;
#[path = "../../../sys/tests/pool/mod.rs"]
mod pool;
#[expect(dead_code, reason = "of what it can do to a link, one thing is done here")]
#[path = "../../../process/tests/it/proxy.rs"]
mod proxy;
mod trackers;

use vmferry_engine::Settings;
use vmferry_testkit::PATIENCE;

/// Settings with a peer timeout that only a hang reaches.
///
/// A thread of a starved host can stand still for longer than the default timeout.
fn patient() -> Settings {
    Settings { peer_timeout: PATIENCE, ..Settings::default() }
}
