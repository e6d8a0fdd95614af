//! Control messages on a stream.

use super::stream::{SendError, Stream};
use crate::clock::Clock;
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
    read_with(|bytes| stream.receive_bytes(bytes))
}

/// Receives one message, and fails after the time `within`, even if the peer sends the message byte
/// by byte. Changes the receive timeout.
pub(crate) fn read_message_within<M: DeserializeOwned>(stream: &Stream, within: Duration) -> io::Result<M> {
    let clock = Clock::start();
    read_with(|bytes| stream.receive_bytes_within(bytes, clock.until(within).unwrap_or_default()))
}

fn read_with<M: DeserializeOwned>(fill: impl Fn(&mut [u8]) -> io::Result<()>) -> io::Result<M> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    fill(&mut header)?;
    let header = ControlHeader::decode(&header).map_err(io::Error::other)?;
    let mut body = vec![0; header.len];
    fill(&mut body)?;
    decode_control(header, &body).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::test_pair;
    use vmferry_wire::ToTarget;

    #[test]
    fn message_that_comes_byte_by_byte_times_out() {
        let (here, there) = test_pair();
        let message = encode_control(&ToTarget::Description(vec![7; 1000])).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // The delay is at least this long, so that the message does not arrive in time.
                for byte in message.chunks(1) {
                    if there.send_bytes_within(byte, Duration::from_secs(9)).is_err() {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            let read = read_message_within::<ToTarget>(&here, Duration::from_millis(300));
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
            drop(here);
        });
    }
}
