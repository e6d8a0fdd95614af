//! The network interface (virtio 1.2, section 5.1).
//!
//! | module | what |
//! |---|---|
//! | `device` | features, configuration, the control queue |
//! | `rx` | frames to the guest |
//! | `tx` | frames of the guest |
//! | `announce` | telling neighbours where the guest is now |
//! | `metrics` | what happened |
//! | `persist` | saved state |
//!
//! # Who does the work
//! [`Net`] is the device, which its transport owns; [`NetControl`] is what other threads have of it. Frames are carried by a thread of
//! the VMM's with [`Receiver`] and [`Transmitter`], which go through the transport's lock to take buffers out of the queues and to give
//! them back, and hold none while they wait for the host's network or for a page of guest memory that is still to come: vCPUs get at
//! the registers meanwhile. A vCPU that notifies only wakes that thread ([`FramePort::kicked`]).
//!
//! What the thread has taken and not used it puts back when it [parks](Receiver::park), so saved state has no buffers in flight.
//!
//! # Frames
//! A frame goes from the driver's buffers to the [`FramePort`] and back without a copy, behind the header that the driver made or
//! gets: checksums and segmentation are the host's or the next guest's business. Frames are not interpreted here.

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
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use more of it"))]
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

/// Bytes of the header in front of each frame, in a driver's buffers and at the port (5.1.6).
pub const HEADER: usize = 12;

/// Bytes of an Ethernet header, without which there is no frame.
const ETHERNET: usize = 14;

/// Most bytes of a header and its frame: 64 KiB of segments, which offloads cut or join, behind an Ethernet header with two tags.
pub const FRAME_MAX: usize = HEADER + ETHERNET + 8 + 65535;

/// Largest packet of Ethernet as everybody has it.
pub const MTU: u16 = 1500;

/// Smallest packet that a network interface must carry (RFC 791).
const MTU_MIN: u16 = 68;

/// The driver's receive queue.
pub const RX: u16 = 0;
/// Its transmit queue.
pub const TX: u16 = 1;
/// Its control queue: the next after one pair, as there is one pair only.
const CONTROL: u16 = 2;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mac([u8; 6]);

/// Text or bytes that are not the address of one interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no MAC address of an interface: six bytes as in 52:54:00:12:34:56, the first one even (odd is for groups), not all zeros"
)]
pub struct BadMac(String);

impl Mac {
    /// # Errors
    /// If it is a group's, or nobody's.
    pub fn new(bytes: [u8; 6]) -> Result<Self, BadMac> {
        let mac = Self(bytes);
        if bytes[0] & 1 == 1 || bytes == [0; 6] { Err(BadMac(mac.to_string())) } else { Ok(mac) }
    }

    /// One that nobody has assigned ("locally administered"), of `random` bytes: 46 bits of them count.
    #[must_use]
    pub fn local(random: [u8; 6]) -> Self {
        let mut bytes = random;
        bytes[0] = bytes[0] & 0xfc | 2;
        Self(bytes)
    }

    /// Its bytes, in the order in which they are sent.
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

/// Frames that a driver takes before they are whole, as it said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Without a checksum.
    pub csum: bool,
    /// Several segments of TCP over IPv4 in one.
    pub tso4: bool,
    /// Likewise over IPv6.
    pub tso6: bool,
    /// Such segments with congestion notification.
    pub ecn: bool,
}

/// A frame that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Got {
    /// Bytes that were written, header included.
    pub bytes: usize,
    /// There were more, which are lost.
    pub cut: bool,
}

/// Why the port did not take or give a frame.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// Not now: no frame is there, or no room.
    #[error("not now")]
    NotNow,
    /// Not this one.
    #[error("a frame is refused")]
    Refused(#[source] io::Error),
    /// Never again.
    #[error("the host's network interface is gone")]
    Gone(#[source] io::Error),
}

/// The host's side of the wire. Frames have a header of [`HEADER`] bytes in front, of which the port leaves the last two alone. None of
/// the methods waits for anything but memory.
pub trait FramePort: Send + Sync + Debug {
    /// Sends a frame that lies in `pieces`, one after the other.
    ///
    /// # Errors
    /// [`PortError`]; the frame was not sent then.
    fn send<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> Result<(), PortError>;

    /// Receives the next frame into `pieces`, one after the other. Marks nothing as written.
    ///
    /// # Errors
    /// [`PortError`]; `pieces` may have been written to unless it is [`PortError::NotNow`].
    fn receive<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> Result<Got, PortError>;

    /// From now on frames may come with these offloads, and no others.
    ///
    /// # Errors
    /// If the host does not have them.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;

    /// Loses all frames that wait to be received: they came before there was anybody.
    fn flush(&self);

    /// The driver, or whoever controls the device, has something for the thread that carries frames.
    fn kicked(&self);
}

/// What a network interface is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetOptions {
    /// Its address, until another one is loaded.
    pub mac: Mac,
    /// The largest packet that the host's side carries, in bytes; the guest is told.
    pub mtu: u16,
}
