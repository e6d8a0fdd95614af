//! Counters of a network interface.

use crate::figures::figures;

pub(super) use crate::figures::add;

figures! {
    Metrics, NetFigures, "Activity of a network interface since it was created. A reset by the driver does not change the counters.";
    /// Frames that the guest received.
    rx_frames,
    /// Bytes in received frames, without headers.
    rx_bytes,
    /// Frames that were copied on the way to the guest, because it had few buffers or pages of its
    /// memory were missing.
    rx_copied,
    /// Frames to the guest that were dropped because they exceed what the guest can accept.
    rx_too_long,
    /// Frames to the guest that were dropped because the driver did not agree to their offloads.
    rx_unwanted,
    /// Frames to the guest that were dropped because the guest had no room for too long.
    rx_given_up,
    /// Number of times that a frame found no room.
    rx_full,
    /// Malformed receive buffers.
    rx_malformed,
    /// Frames that the guest sent.
    tx_frames,
    /// Bytes in sent frames, without headers.
    tx_bytes,
    /// Frames from the guest that the host's network refused.
    tx_refused,
    /// Number of times that the host's network had no room.
    tx_busy,
    /// Malformed transmit buffers.
    tx_malformed,
    /// Commands on the control queue.
    commands,
    /// Malformed commands on the control queue.
    commands_malformed,
    /// Number of times that the guest was asked to announce itself.
    announce_asked,
    /// Number of times that the guest confirmed an announcement.
    announce_done,
    /// Invalid rings.
    broken,
}
