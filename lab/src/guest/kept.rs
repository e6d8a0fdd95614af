//! File in a tmpfs that is not changed after its creation, with its checksum. Its pages are sent
//! once and must stay right.

use anyhow::{Context, Result};
use std::path::PathBuf;

const BYTES: usize = 8 << 20;
const PATH: &str = "/tmp/kept";

/// Unchanged file, and its checksum.
#[derive(Debug)]
pub(crate) struct Kept {
    path: PathBuf,
    sum: u64,
}

impl Kept {
    /// Writes the file.
    pub(crate) fn write() -> Result<Self> {
        Self::write_to(PATH.into(), BYTES)
    }

    fn write_to(path: PathBuf, size: usize) -> Result<Self> {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::with_capacity(size);
        while bytes.len() < size {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.extend_from_slice(&(random ^ random >> 29).to_le_bytes());
        }
        std::fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, sum: sum(&bytes) })
    }

    /// Returns whether the file still has its content.
    pub(crate) fn check(&self) -> bool {
        std::fs::read(&self.path).is_ok_and(|bytes| sum(&bytes) == self.sum)
    }
}

/// Returns the FNV-1a checksum with 64 bits, which depends on every byte and its position.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_byte_and_lost_end_are_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept");
        let kept = Kept::write_to(path.clone(), 64 << 10).unwrap();
        assert!(kept.check());
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[4097] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        assert!(!kept.check());
        std::fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(!kept.check());
    }
}
