//! The network interface (virtio 1.2, section 5.1).
//!
//! | module | content |
//! |---|---|
//! | `device` | features, configuration, the control queue |
//! | `rx` | frames to the guest |
//! | `tx` | frames from the guest |
//! | `announce` | announcement of the guest's new location |
//! | `metrics` | counters |
//! | `persist` | saved state |
//!
//! # Threads
//! [`Net`] is the device, which its transport owns. [`NetControl`] is the handle for other threads.
//! A thread of the VMM carries frames with [`Receiver`] and [`Transmitter`]. Both hold the
//! transport's lock only to take buffers out of the queues and to give them back. They hold no lock
//! while they wait for the host's network or for a missing page of a buffer, so that vCPUs can
//! access the registers meanwhile. A vCPU that notifies only wakes that thread
//! ([`FramePort::kicked`]).
//!
//! When the thread [parks](Receiver::park), it puts back the buffers that it has taken and not
//! used. Therefore saved state contains no buffers in flight.
//!
//! # Frames
//! A frame and its header move between the driver's buffers and the [`FramePort`] without a copy.
//! Checksums and segmentation are left to the host, or to the guest that receives the frame. This
//! module does not interpret frames.

mod announce;
mod device;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod metrics;
mod persist;
#[cfg(test)]
mod properties;
mod rx;
mod slices;
#[cfg(any(test, feature = "hostile"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use more of this module"))]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod tx;

pub use announce::{Announcer, announcement};
pub use device::{Net, NetControl};
pub use metrics::NetFigures;
pub use persist::NetSaved;
pub use rx::{Receiver, RxStep};
pub use tx::{Transmitter, TxStep};

use std::fmt::{self, Debug, Display};
use std::io;
use std::str::FromStr;
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Size of the header in front of each frame, in a driver's buffers and at the port, in bytes
/// (5.1.6).
pub const HEADER: usize = 12;

/// Size of an Ethernet header in bytes. Every frame has one.
const ETHERNET: usize = 14;

/// Maximum size of a header and its frame in bytes: 64 KiB of segments, which offloads split or
/// join, after an Ethernet header with two tags.
pub const FRAME_MAX: usize = HEADER + ETHERNET + 8 + 65535;

/// Size of the largest packet of standard Ethernet, in bytes.
pub const MTU: u16 = 1500;

/// Size of the smallest packet that a network interface must carry, in bytes (RFC 791).
const MTU_MIN: u16 = 68;

/// Index of the receive queue.
pub const RX: u16 = 0;
/// Index of the transmit queue.
pub const TX: u16 = 1;
/// Index of the control queue, which follows the only queue pair.
const CONTROL: u16 = 2;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mac([u8; 6]);

/// Error of a text, or of bytes, that are not the MAC address of a single interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a MAC address of an interface; give six bytes as in 52:54:00:12:34:56, of which the first is even (odd means a group) and not all are zero"
)]
pub struct BadMac(String);

impl Mac {
    /// Returns the address of an interface with these bytes.
    /// # Errors
    /// Returns an error if the address is a group address or all zeros.
    pub fn new(bytes: [u8; 6]) -> Result<Self, BadMac> {
        let mac = Self(bytes);
        if bytes[0] & 1 == 1 || bytes == [0; 6] { Err(BadMac(mac.to_string())) } else { Ok(mac) }
    }

    /// Returns a locally administered address that is made of 46 bits of `random`.
    #[must_use]
    pub fn local(random: [u8; 6]) -> Self {
        let mut bytes = random;
        bytes[0] = bytes[0] & 0xfc | 2;
        Self(bytes)
    }

    /// Returns the bytes in transmission order.
    #[must_use]
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = BadMac;

    fn from_str(text: &str) -> Result<Self, BadMac> {
        let bad = || BadMac(text.to_owned());
        let hex = |part: &str| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| hex(part)).ok_or_else(bad)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() {
            return Err(bad());
        }
        Self::new(bytes).map_err(|_| bad())
    }
}

/// Offloads that a driver accepts in received frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offloads {
    /// True if frames without a checksum are accepted.
    pub csum: bool,
    /// True if frames with several segments of TCP over IPv4 are accepted.
    pub tso4: bool,
    /// True if frames with several segments of TCP over IPv6 are accepted.
    pub tso6: bool,
    /// True if frames with several TCP segments may use explicit congestion notification.
    pub ecn: bool,
}

/// Result of receiving a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedFrame {
    /// Number of bytes that were written, header included.
    pub bytes: usize,
    /// True if the frame was longer and its end was lost.
    pub cut: bool,
}

/// Error with which a port does not send or receive a frame.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// No frame is waiting at present, or there is no room for a frame.
    #[error("not now")]
    NotNow,
    /// The port refuses this frame.
    #[error("a frame is refused")]
    Refused(#[source] io::Error),
    /// The host's interface no longer exists.
    #[error("the host's network interface is gone")]
    Gone(#[source] io::Error),
}

/// Host's end of the network interface. Each frame follows a header of [`HEADER`] bytes, of which
/// the port ignores the last two. No method waits for anything except memory.
pub trait FramePort: Send + Sync + Debug {
    /// Sends the frame that consists of `pieces`, in order.
    ///
    /// # Errors
    /// Returns a [`PortError`]. The frame was not sent then.
    fn send<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> Result<(), PortError>;

    /// Receives the next frame into `pieces`, in order. The caller marks the pages as dirty.
    ///
    /// # Errors
    /// Returns a [`PortError`]. Unless it is [`PortError::NotNow`], `pieces` may have been written
    /// to.
    fn receive<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> Result<ReceivedFrame, PortError>;

    /// Sets the offloads that received frames may use from now on.
    ///
    /// # Errors
    /// Returns an error if the host does not support these offloads.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;

    /// Drops all frames that wait to be received, because they arrived before the driver was ready.
    fn flush(&self);

    /// Wakes the thread that carries frames, because the driver or the owner of the device has work
    /// for it.
    fn kicked(&self);
}

/// Options of a network interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetOptions {
    /// MAC address of the interface, unless a loaded state contains another one.
    pub mac: Mac,
    /// Size of the largest packet that the host's end carries, in bytes. The device reports this
    /// value to the guest.
    pub mtu: u16,
}
