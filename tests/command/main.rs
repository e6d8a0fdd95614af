//! The command end to end: real processes, real sockets, and a guest that must be the same afterwards.

#[path = "../../crates/engine/src/channel/tls/authority.rs"]
mod authority;
mod balloon;
mod check;
mod encrypted;
mod ends;
mod failures;
mod generate;
mod moves;
mod plan;
mod postcopy;
mod qmp;
mod support;
mod terminal;
mod usage;
mod watching;
