//! End-to-end tests of the command: real processes, real sockets, and a guest that must be
//! unchanged after each migration.

mod arbiter;
#[path = "../../crates/engine/src/channel/tls/authority.rs"]
mod authority;
mod balloon;
mod branch;
mod check;
mod crowd;
mod dashboard;
mod encrypted;
mod ends;
mod etcd;
mod failures;
mod generate;
mod increments;
mod known;
mod moves;
mod passed;
mod plan;
#[path = "../../crates/sys/tests/pool/mod.rs"]
mod pool;
mod postcopy;
mod qmp;
mod sandbox;
mod snapshot;
mod support;
mod terminal;
mod threads;
mod upgrade;
mod usage;
mod watching;
