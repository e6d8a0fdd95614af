//! Messages of fixed size from the target to the source, on urgent and probe channels.

use crate::{Fields, WireError, crc};
use vmferry_core::{PageIndex, RegionId};

/// Length of a [`Request`] in bytes.
pub const REQUEST_BYTES: usize = 32;

/// Maximum number of pages that a request may ask for in advance, in addition to the first page.
pub const MAX_AHEAD: u16 = 256;

const MAGIC: u32 = u32::from_le_bytes(*b"VMFr");

/// Message from the target to the source, on an urgent channel or on the probe channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Request for a page that a thread on the target waits for.
    Page {
        /// Region of the page.
        region: RegionId,
        /// Index of the page.
        page: PageIndex,
        /// Number of pages after `page` that are likely to be needed next, at most [`MAX_AHEAD`].
        /// The source never sends them before a page that a thread waits for.
        ahead: u16,
        /// True if the page arrived with a digest mismatch, so that the source must send the page
        /// again.
        again: bool,
    },
    /// Echo of a probe.
    Echo {
        /// Number of the probe.
        number: u64,
        /// Time from the arrival of the probe on the target until this answer, in nanoseconds. The
        /// time of arrival is that in the kernel, if it is known. The rest of the round-trip time
        /// was spent on the link.
        held_ns: u32,
    },
}

impl Request {
    /// Encodes the request.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let (kind, ahead, region, value) = match *self {
            Self::Page { region, page, ahead, again } => (u8::from(again), ahead, region.0, page.0),
            Self::Echo { number, held_ns } => (2, 0, held_ns, number),
        };
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = kind;
        bytes[6..8].copy_from_slice(&ahead.to_le_bytes());
        bytes[8..12].copy_from_slice(&region.to_le_bytes());
        bytes[16..24].copy_from_slice(&value.to_le_bytes());
        let sum = crc(&bytes[..REQUEST_BYTES - 8]);
        bytes[REQUEST_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a request. The caller must check that the page exists.
    ///
    /// # Errors
    /// Returns an error if the bytes are damaged, are not a request, or have a value that the
    /// protocol does not allow.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let field = |what, value: u64, allowed| WireError::Field { what, value, allowed };
        let magic = fields.u32();
        if magic != MAGIC {
            return Err(field("request's magic", magic.into(), "the protocol's"));
        }
        let (body, sum) = bytes.split_at(REQUEST_BYTES - 8);
        if sum != crc(body).to_le_bytes() {
            return Err(WireError::Damaged { what: "request" });
        }
        let (kind, _, ahead) = (fields.u8(), fields.u8(), fields.u16());
        let (third, _, value) = (fields.u32(), fields.u32(), fields.u64());
        if ahead > MAX_AHEAD {
            return Err(field("pages asked for ahead", ahead.into(), "up to 256"));
        }
        match kind {
            0 | 1 => {
                let (region, page) = (RegionId(third), PageIndex(value));
                Ok(Self::Page { region, page, ahead, again: kind == 1 })
            }
            2 => Ok(Self::Echo { number: value, held_ns: third }),
            other => Err(field("request kind", other.into(), "0 to 2")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_decode_as_encoded(region: u32, page: u64, ahead in 0..=MAX_AHEAD, again: bool, held_ns: u32) {
            let page_number = page;
            let page = Request::Page { region: RegionId(region), page: PageIndex(page), ahead, again };
            prop_assert_eq!(Request::decode(&page.encode()), Ok(page));
            let echo = Request::Echo { number: page_number, held_ns };
            prop_assert_eq!(Request::decode(&echo.encode()), Ok(echo));
        }

        #[test]
        fn a_damaged_bit_is_found(at in 0usize..REQUEST_BYTES * 8) {
            let mut bytes = Request::Echo { number: 7, held_ns: 9 }.encode();
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert!(Request::decode(&bytes).is_err());
        }
    }

    #[test]
    fn too_many_pages_ahead_are_refused() {
        let page = |ahead| Request::Page { region: RegionId(0), page: PageIndex(0), ahead, again: false };
        assert!(Request::decode(&page(MAX_AHEAD).encode()).is_ok());
        assert!(matches!(Request::decode(&page(MAX_AHEAD + 1).encode()), Err(WireError::Field { .. })));
    }
}
