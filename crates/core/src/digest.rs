//! Digests of pages.

use crate::{PAGE_BYTES, fold};
use crc_fast::{CrcAlgorithm, checksum};
use std::sync::LazyLock;

/// Digest of a page: the CRC-64/NVME of its bytes.
///
/// The digest detects corruption by the network, by a disk or by a defect in the program. It does
/// not protect against an attacker, who can change a page without changing the digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageDigest(pub u64);

/// Digest of a page of zeros.
pub static ZERO_PAGE: LazyLock<PageDigest> = LazyLock::new(|| PageDigest::of(&[0; PAGE_BYTES]));

/// True if this CPU can digest pages in place. Computed once.
static IN_PLACE: LazyLock<bool> = LazyLock::new(fold::available);

impl PageDigest {
    /// Returns the digest of the page at `from`, without a copy, or `None` if the CPU lacks the
    /// instructions for it. Prefetches the page at `next`, which may be any address.
    ///
    /// Each byte is read once. If the page is written during the call, the result is the digest of
    /// a mixture of old and new bytes.
    ///
    /// # Safety
    /// A page at `from` must be mapped readable.
    pub(crate) unsafe fn of_live(from: *const u8, next: *const u8) -> Option<Self> {
        if !*IN_PLACE {
            return None;
        }
        // SAFETY: folding is available (checked above), and the caller guarantees that the page is
        // mapped.
        let remainder = unsafe { fold::remainder(from, next) };
        // The CRC starts with all ones and inverts its result. The digest of a page of zeros
        // contains both, because the remainder of that page is zero.
        Some(Self(remainder ^ ZERO_PAGE.0))
    }

    /// Returns the digest of `page`, the bytes of a whole page.
    #[must_use]
    pub fn of(page: &[u8]) -> Self {
        Self(checksum(CrcAlgorithm::Crc64Nvme, page))
    }
}
