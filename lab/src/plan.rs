//! What the host asks the agent to do: a JSON file in the folder that both see.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// A run of the lab, as the agent sees it: all paths are the agent's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Which scenarios, in their order.
    pub scenarios: Vec<String>,
    /// Where results and logs go; the host reads them there.
    pub results: PathBuf,
    /// The static vmferry.
    pub vmferry: PathBuf,
    /// The kernel that Linux guests boot.
    pub kernel: PathBuf,
    /// The same kernel as an ELF file.
    pub vmlinux: PathBuf,
    /// Their initramfs.
    pub initrd: PathBuf,
    /// An empty file system for a guest's disk, if one could be made.
    pub disk: Option<PathBuf>,
    /// A block device with the same that takes hardly half a megabyte a second, if there is one.
    pub slow_disk: Option<PathBuf>,
    /// What checks a file system, if it is there.
    pub fsck: Option<PathBuf>,
    /// Where the other machine's agent listens, if there is one.
    pub peer: Option<SocketAddr>,
    /// Whether KVM is emulated here: then times say little, and every wait is long.
    pub emulated: bool,
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// If the file cannot be read, or is no plan.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).with_context(|| format!("cannot read the plan {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is no plan of the lab", path.display()))
    }

    /// Writes it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write the plan {}", path.display()))
    }

    /// Where one scenario leaves what it has to show.
    #[must_use]
    pub fn folder(&self, scenario: &str) -> PathBuf {
        self.results.join(scenario)
    }
}
