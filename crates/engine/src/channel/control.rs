//! Control messages on a stream.

use super::stream::{SendError, Stream};
use serde::{Serialize, de::DeserializeOwned};
use std::io;
use std::time::Duration;
use vmferry_wire::{CONTROL_HEADER_BYTES, ControlHeader, decode_control, encode_control};

/// Sends one message, and fails after the time `within`, because a peer that reads the message byte
/// by byte must not keep the guest stopped.
pub(crate) fn send_message<M: Serialize>(
    stream: &Stream,
    message: &M,
    within: Duration,
) -> Result<(), SendError> {
    let bytes = encode_control(message)
        .map_err(|error| SendError { nothing_left: true, error: io::Error::other(error) })?;
    stream.send_bytes_within(&bytes, within)
}

/// Receives one message.
pub(crate) fn read_message<M: DeserializeOwned>(stream: &Stream) -> io::Result<M> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    stream.receive_bytes(&mut header)?;
    let header = ControlHeader::decode(&header).map_err(io::Error::other)?;
    let mut body = vec![0; header.len];
    stream.receive_bytes(&mut body)?;
    decode_control(header, &body).map_err(io::Error::other)
}
