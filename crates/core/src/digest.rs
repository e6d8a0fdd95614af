//! Digests of pages.

use crate::{PAGE_BYTES, fold};
use crc_fast::{CrcAlgorithm, checksum};
use std::sync::LazyLock;

/// The digest of a page: CRC-64/NVME of its bytes. It finds what a network, a disk or a defect of ours does to a page;
/// it is no defence against an attacker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageDigest(pub u64);

/// The digest of a page of zeros.
pub static ZERO_PAGE: LazyLock<PageDigest> = LazyLock::new(|| PageDigest::of(&[0; PAGE_BYTES]));

/// Whether pages are digested in place; asked once.
static IN_PLACE: LazyLock<bool> = LazyLock::new(fold::available);

impl PageDigest {
    /// The digest of the page at `from`, without a copy; `None` where the CPU lacks the instructions for it. The page
    /// at `next`, which may be anything, is asked for meanwhile.
    ///
    /// Each byte is read once. Of a page that is written meanwhile it is the digest of some mixture of old and new.
    ///
    /// # Safety
    /// A page at `from` is mapped readable.
    pub(crate) unsafe fn of_live(from: *const u8, next: *const u8) -> Option<Self> {
        if !*IN_PLACE {
            return None;
        }
        // SAFETY: folding is available; the caller vouches for the page.
        let remainder = unsafe { fold::remainder(from, next) };
        // The CRC begins and ends with all ones, which a page of zeros shows: its own remainder is zero.
        Some(Self(remainder ^ ZERO_PAGE.0))
    }

    /// The digest of `page`.
    #[must_use]
    pub fn of(page: &[u8]) -> Self {
        Self(checksum(CrcAlgorithm::Crc64Nvme, page))
    }
}
