//! Digests of pages.

use crate::PAGE_BYTES;
use crc_fast::{CrcAlgorithm, checksum};
use std::sync::LazyLock;

/// The digest of a page: CRC-64/NVME of its bytes. It finds what a network, a disk or a defect of ours does to a page;
/// it is no defence against somebody who means to deceive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageDigest(pub u64);

/// The digest of a page of zeros.
pub static ZERO_PAGE: LazyLock<PageDigest> = LazyLock::new(|| PageDigest::of(&[0; PAGE_BYTES]));

impl PageDigest {
    /// The digest of `page`.
    #[must_use]
    pub fn of(page: &[u8]) -> Self {
        Self(checksum(CrcAlgorithm::Crc64Nvme, page))
    }
}
