//! Digests of pages.

use crate::{PAGE_BYTES, fold};
use crc_fast::{CrcAlgorithm, checksum};
use std::sync::LazyLock;

/// The digest of a page: CRC-64/NVME of its bytes. It finds what a network, a disk or a defect of ours does to a page;
/// it is no defence against somebody who means to deceive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageDigest(pub u64);

/// The digest of a page of zeros.
pub static ZERO_PAGE: LazyLock<PageDigest> = LazyLock::new(|| PageDigest::of(&[0; PAGE_BYTES]));

/// What a page's digest and that of the 64 bytes it folds onto differ in: the register's start value, which stands
/// 4032 bytes further from the end in one than in the other.
static FOLD_DIFFERENCE: LazyLock<Option<u64>> = LazyLock::new(|| {
    let of_zeros = PageDigest::of(&[0; fold::FOLDED_BYTES]).0 ^ ZERO_PAGE.0;
    fold::available().then_some(of_zeros)
});

impl PageDigest {
    /// The digest of the page at `from`, without a copy; `None` where the CPU lacks the instructions for it.
    ///
    /// Each byte is read once. Of a page that is written meanwhile it is the digest of some mixture of old and new.
    ///
    /// # Safety
    /// A page at `from` is mapped readable.
    pub(crate) unsafe fn of_live(from: *const u8) -> Option<Self> {
        let difference = (*FOLD_DIFFERENCE)?;
        // SAFETY: there is a difference only if folding is available; the caller vouches for the page.
        let folded = unsafe { fold::fold_page(from) };
        Some(Self(Self::of(&folded).0 ^ difference))
    }

    /// The digest of `page`.
    #[must_use]
    pub fn of(page: &[u8]) -> Self {
        Self(checksum(CrcAlgorithm::Crc64Nvme, page))
    }
}
