//! Byte streams between source and target: connecting, listening, sending and receiving.
//! Unencrypted streams need no copy of the bytes in user space.

// Input from a peer or the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::indexing_slicing
    )
)]

mod acceptor;
mod carried;
mod carrier;
mod connect;
mod connector;
mod control;
mod descriptors;
mod greeting;
mod iobuf;
mod listen;
mod pacer;
mod passed;
mod raw;
mod reach;
mod stream;
pub mod tcp;
#[cfg(feature = "tls")]
#[cfg_attr(
    not(test),
    expect(
        clippy::indexing_slicing,
        reason = "positions in buffers of its own, which `session/hostile.rs` drives with any bytes"
    )
)]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;
mod uri;

pub use acceptor::Accept;
#[cfg(feature = "hostile")]
pub use carrier::drive_lanes;
pub(crate) use connect::Dialer;
pub use connector::{Attempt, ChannelCounts, Connect, Connected};
pub(crate) use control::{read_message, read_message_within, send_message};
pub(crate) use descriptors::{passes_descriptors, read_message_with, send_message_with};
pub(crate) use iobuf::IoBuf;
pub use listen::Listener;
pub(crate) use listen::{Greeted, TargetFeatures, accept, answer};
pub(crate) use pacer::Pacer;
pub use passed::Sockets;
#[cfg(test)]
pub(crate) use stream::test_pair;
pub(crate) use stream::{SendError, Stream};
#[cfg(not(feature = "tls"))]
pub(crate) use tls::Tls;
#[cfg(feature = "hostile")]
pub use tls::drive_tls;
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsError};
pub use uri::{Uri, UriError};
