//! Control socket that speaks QMP, the JSON protocol with which tools control QEMU.
//!
//! The implementation follows QEMU's protocol specification (docs/interop/qmp-spec) and reference
//! manual. Its answers were compared with those of QEMU.
//!
//! | module | content |
//! |---|---|
//! | `framer` | splits bytes into texts of JSON objects, with hard limits |
//! | `json` | parses texts into values, and refuses duplicate names |
//! | `message` | parses texts into requests, and writes answers, errors, events and the greeting as lines |
//! | `session` | holds the conversation with one client, as a state machine without sockets, threads or clocks |
//! | `events` | sends events to all clients |
//! | `server` | serves the socket, with one thread that never waits for a client, and one thread for the commands of each client |
//! | `client` | implements the client side of the protocol |
//!
//! This crate does not know the commands of a VMM. A [`Machine`] describes and executes them.

#![forbid(unsafe_code)]

mod client;
mod events;
mod framer;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod json;
mod machine;
mod message;
mod server;
mod session;

pub use client::{Client, ClientError};
pub use events::Events;
pub use machine::{Answer, Arguments, Command, Machine};
pub use message::{ErrorClass, Event, QmpError, Version};
pub use server::{Server, ServerError};
pub use session::{Call, End, Limits, Session, Ticket};
