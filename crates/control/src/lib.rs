//! The control socket: QMP, the protocol that tools for virtual machines speak.
//!
//! Written from QEMU's protocol specification (docs/interop/qmp-spec) and its reference manual, and compared with what QEMU answers.
//!
//! | module | what |
//! |---|---|
//! | `framer` | bytes -> texts of JSON objects, with hard limits |
//! | `json` | texts -> values, each name once |
//! | `message` | texts -> requests; answers, errors, events and the greeting -> lines |
//! | `session` | one client's conversation as a state machine without sockets, threads or clocks |
//! | `events` | from whoever has something to tell to all clients |
//! | `server` | the socket: one thread that never waits for a client, and one for each client's commands |
//! | `client` | the asking side |
//!
//! What the commands do is not known here: a [`Machine`] executes them.

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
