//! What happened.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, NetFigures, "What a network interface did since it was made; a reset by the driver changes nothing in it.";
    /// Frames that the guest got.
    rx_frames,
    /// Bytes in them, without headers.
    rx_bytes,
    /// Frames that were copied on their way to the guest, because it had few buffers or its memory was still coming.
    rx_copied,
    /// Frames for the guest that were longer than what it can take.
    rx_too_long,
    /// Frames for the guest that it did not agree to take.
    rx_unwanted,
    /// Frames for the guest that were given up because it had no room for too long.
    rx_given_up,
    /// Times that there was no room for a frame.
    rx_full,
    /// Receive buffers that made no sense.
    rx_malformed,
    /// Frames that the guest sent.
    tx_frames,
    /// Bytes in them, without headers.
    tx_bytes,
    /// Frames of the guest that the host's network did not take.
    tx_refused,
    /// Times that the host's network had no room.
    tx_busy,
    /// Transmit buffers that made no sense.
    tx_malformed,
    /// Commands on the control queue.
    commands,
    /// Those that made no sense.
    commands_malformed,
    /// Times that the guest was asked to announce itself.
    announce_asked,
    /// Times that it said it did.
    announce_done,
    /// Rings that could not be followed.
    broken,
}
