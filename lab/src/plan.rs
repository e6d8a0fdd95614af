//! Request of the host to the agent: a JSON file in the shared folder.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Kernel with page poisoning (`CONFIG_PAGE_POISONING`), which fills pages when they are freed and
/// checks them when they are allocated.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Poisoning {
    /// The lab has such a kernel.
    Kernel {
        /// Version of the kernel.
        version: String,
        /// Kernel that Linux guests boot.
        kernel: PathBuf,
        /// Initramfs with the modules of this kernel.
        initrd: PathBuf,
    },
    /// No kernel of the lab can poison pages.
    None {
        /// Names of the kernels, and the missing option.
        why: String,
    },
}

/// Run of the lab. All paths are those of the agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Names of the scenarios, in the order in which they run.
    pub scenarios: Vec<String>,
    /// Folder for results and logs, which the host reads.
    pub results: PathBuf,
    /// Path of the static vmferry.
    pub vmferry: PathBuf,
    /// Kernel that Linux guests boot.
    pub kernel: PathBuf,
    /// Options for free page reporting that this kernel was built without, by its configuration.
    pub kernel_lacks: Vec<String>,
    /// Kernel with page poisoning, which need not be the same one.
    pub poisoning: Poisoning,
    /// The same kernel as `kernel`, as an ELF file.
    pub vmlinux: PathBuf,
    /// Initramfs of Linux guests.
    pub initrd: PathBuf,
    /// Empty file system for a guest's disk, if there is one.
    pub disk: Option<PathBuf>,
    /// Block device with an empty file system that writes less than half a megabyte per second, if
    /// there is one.
    pub slow_disk: Option<PathBuf>,
    /// Program that checks a file system, if there is one.
    pub fsck: Option<PathBuf>,
    /// Address of the other machine's agent, if there is one.
    pub peer: Option<SocketAddr>,
    /// Set if KVM is emulated. Times then mean little, and every wait is long.
    pub emulated: bool,
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or is not a plan.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).with_context(|| format!("cannot read the plan {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is not a plan of the lab", path.display()))
    }

    /// Writes the plan.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write the plan {}", path.display()))
    }

    /// Returns the folder for the files of one scenario.
    #[must_use]
    pub fn folder(&self, scenario: &str) -> PathBuf {
        self.results.join(scenario)
    }
}
