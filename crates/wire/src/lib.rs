//! Bytes to messages of the migration protocol, and back. No sockets.
#![forbid(unsafe_code)]

mod machine;

pub use machine::{MachineConfig, Section};
