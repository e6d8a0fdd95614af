//! Byte streams between the two sides: connecting, listening, and moving bytes without copying them.

mod connect;
mod control;
mod listen;
mod pacer;
mod stream;
pub mod tcp;
mod uri;

pub(crate) use connect::connect;
pub(crate) use control::{read_message, send_message};
pub use listen::Listener;
pub(crate) use listen::{Incoming, answer};
pub(crate) use pacer::Pacer;
#[cfg(test)]
pub(crate) use stream::test_pair;
pub(crate) use stream::{IoBuf, SendError, Stream};
pub use uri::{Uri, UriError};
