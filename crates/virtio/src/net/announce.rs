//! Telling the network where a guest is now.
//!
//! After a move the switches on the way still send frames for the guest to where it was, until they see one from it. A guest whose driver
//! has `VIRTIO_NET_F_GUEST_ANNOUNCE` is asked to send some, from all its addresses; for those without, and because a guest takes its time,
//! the VMM itself sends one in its name. As a frame can be lost and a switch's port may only just be coming up, both happen several times,
//! with growing pauses: what QEMU documents for its own (`announce-self`: five rounds, 50 ms at first, 100 ms more each time), but the first
//! at once.

use super::device::{NetControl, lock};
use super::{FramePort, HEADER, Mac, PortError};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vm_memory::VolatileSlice;

/// Least bytes of an Ethernet frame without its checksum.
const SHORTEST: usize = 60;
/// Reverse ARP, which no host answers unless it is a server for it (RFC 903).
const RARP: u16 = 0x8035;

/// From each announcement to the next.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(250),
    Duration::from_millis(350),
    Duration::from_millis(450),
];

/// A frame to everybody from `mac` that asks for its own address, behind a header without offloads.
#[must_use]
pub fn announcement(mac: Mac) -> [u8; HEADER + SHORTEST] {
    let mac = mac.bytes();
    // Ethernet and IPv4 addresses of 6 and 4 bytes; operation 3 is a request.
    let (kinds, none) = ([0, 1, 8, 0, 6, 4, 0, 3], [0; 4]);
    let packet = [&kinds[..], &mac, &none, &mac, &none].concat();
    let bytes = [&[0xff; 6][..], &mac, &RARP.to_be_bytes(), &packet].concat();
    let mut frame = [0; HEADER + SHORTEST];
    frame[HEADER..HEADER + bytes.len()].copy_from_slice(&bytes);
    frame
}

/// Whether announcements are due.
#[derive(Debug, Default)]
pub(super) struct Announce(Mutex<Option<(usize, Instant)>>);

impl Announce {
    /// The first is due now.
    pub(super) fn begin(&self) {
        *lock(&self.0) = Some((0, Instant::now()));
    }
}

/// Sends the announcements of one network interface when they are due.
#[derive(Debug)]
pub struct Announcer<P>(NetControl<P>);

impl<P: FramePort> Announcer<P> {
    /// For the device of `control`.
    #[must_use]
    pub fn new(control: NetControl<P>) -> Self {
        Self(control)
    }

    /// Sends what is due at `now`; says when the next is.
    pub fn announce(&self, now: Instant) -> Option<Instant> {
        let shared = self.0.shared();
        let (round, at) = (*lock(&shared.announce.0))?;
        if now < at {
            return Some(at);
        }
        let mut frame = announcement(self.0.mac());
        match shared.port.send(&[VolatileSlice::from(&mut frame[..])]) {
            Ok(()) | Err(PortError::NotNow) => {}
            Err(error) => tracing::debug!(%error, "the guest could not be announced"),
        }
        // The first time it was asked when it was told to run.
        if round > 0 {
            shared.ask_announce();
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
    fn it_is_a_reverse_arp_request_as_the_rfc_has_it() {
        let frame = announcement(Mac([0x52, 0x54, 0, 1, 2, 3]));
        let (header, frame) = frame.split_at(HEADER);
        assert_eq!(header, [0; 12]);
        assert_eq!(
            frame[..42],
            [
                255, 255, 255, 255, 255, 255, 0x52, 0x54, 0, 1, 2, 3, 0x80,
                0x35, // to all, from the guest
                0, 1, 8, 0, 6, 4, 0, 3, // what kind
                0x52, 0x54, 0, 1, 2, 3, 0, 0, 0, 0, // the sender
                0x52, 0x54, 0, 1, 2, 3, 0, 0, 0, 0, // whose address is asked for
            ]
        );
        assert!(frame.len() == 60 && frame[42..].iter().all(|byte| *byte == 0));
    }
}
