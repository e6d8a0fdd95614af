//! Announcement of a guest's new location to the network.
//!
//! After a migration, switches still send frames for the guest to its old host, until they see a
//! frame from the guest. If the guest's driver has `VIRTIO_NET_F_GUEST_ANNOUNCE`, the device asks
//! it to send frames from all of its addresses. The VMM also sends a frame in the guest's name
//! itself, because other drivers cannot be asked, and because a guest may respond late.
//!
//! A frame can be lost, or a port of a switch may not be up yet. Therefore both announcements are
//! repeated with growing pauses, which are those that QEMU documents for its `announce-self`: five
//! rounds, 50 ms at first, and 100 ms more each time. Unlike in QEMU, the first announcement is
//! made at once.

use super::device::{NetControl, lock};
use super::{FramePort, HEADER, Mac, PortError};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;

/// Minimum size of an Ethernet frame without its checksum, in bytes.
const SHORTEST: usize = 60;
/// EtherType of reverse ARP, which only a RARP server answers (RFC 903).
const RARP: u16 = 0x8035;

/// Pauses between announcements.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(250),
    Duration::from_millis(350),
    Duration::from_millis(450),
];

/// Returns a broadcast frame (RARP) from `mac` that asks for its own address. The frame follows a
/// header without offloads.
#[must_use]
pub fn announcement(mac: Mac) -> [u8; HEADER + SHORTEST] {
    let mac = mac.bytes();
    // Ethernet and IPv4 addresses of 6 and 4 bytes. Operation 3 is a request.
    let (kinds, none) = ([0, 1, 8, 0, 6, 4, 0, 3], [0; 4]);
    let packet = [&kinds[..], &mac, &none, &mac, &none].concat();
    let bytes = [&[0xff; 6][..], &mac, &RARP.to_be_bytes(), &packet].concat();
    let mut frame = [0; HEADER + SHORTEST];
    frame[HEADER..HEADER + bytes.len()].copy_from_slice(&bytes);
    frame
}

/// Round and time of the next announcement, if one is due later.
#[derive(Debug, Default)]
pub(super) struct Announce(Mutex<Option<(usize, Instant)>>);

impl Announce {
    /// Makes the first announcement due now.
    pub(super) fn begin(&self) {
        *lock(&self.0) = Some((0, Instant::now()));
    }
}

/// Sender of the announcements of one network interface.
#[derive(Debug)]
pub struct Announcer<P>(NetControl<P>);

impl<P: FramePort> Announcer<P> {
    /// Returns the announcer for the device of `control`.
    #[must_use]
    pub fn new(control: NetControl<P>) -> Self {
        Self(control)
    }

    /// Sends the announcement that is due at `now`. Returns the time of the next one.
    pub fn announce(&self, now: Instant) -> Option<Instant> {
        let shared = self.0.shared();
        let (round, at) = (*lock(&shared.announce.0))?;
        if now < at {
            return Some(at);
        }
        let mut frame = announcement(self.0.mac());
        match shared.port.send(&[VolatileSlice::from(&mut frame[..])]) {
            Ok(()) | Err(PortError::NotNow) => {}
            Err(error) => tracing::debug!(%error, "cannot announce the guest on the network"),
        }
        // The driver was asked for the first announcement when the guest was resumed.
        if round > 0 {
            shared.request_announce();
        }
        let next = PAUSES.get(round).map(|pause| (round + 1, now + *pause));
        *lock(&shared.announce.0) = next;
        next.map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcement_is_a_reverse_arp_request_of_rfc_903() {
        let frame = announcement(Mac([0x52, 0x54, 0, 1, 2, 3]));
        let (header, frame) = frame.split_at(HEADER);
        assert_eq!(header, [0; 12]);
        assert_eq!(
            frame[..42],
            [
                255, 255, 255, 255, 255, 255, 0x52, 0x54, 0, 1, 2, 3, 0x80,
                0x35, // broadcast, from the guest
                0, 1, 8, 0, 6, 4, 0, 3, // types and operation
                0x52, 0x54, 0, 1, 2, 3, 0, 0, 0, 0, // the sender
                0x52, 0x54, 0, 1, 2, 3, 0, 0, 0, 0, // address that is asked for
            ]
        );
        assert!(frame.len() == 60 && frame[42..].iter().all(|byte| *byte == 0));
    }
}
