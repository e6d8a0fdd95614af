//! Host resources that a process uses.

use anyhow::{Context, Result};

/// Memory, mappings, descriptors and threads of a process at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sample {
    pub(super) rss_kib: u64,
    /// Peak of the resident memory in KiB.
    pub(super) peak_kib: u64,
    /// Size of the page tables in KiB.
    pub(super) page_tables_kib: u64,
    pub(super) descriptors: u64,
    pub(super) threads: u64,
    /// Number of mappings.
    pub(super) mappings: u64,
}

impl Sample {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/status");
        let status = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            number.with_context(|| format!("no {name} in {path}"))
        };
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
        Ok(Self {
            rss_kib: field("VmRSS:")?,
            peak_kib: field("VmHWM:")?,
            page_tables_kib: field("VmPTE:")?,
            descriptors,
            threads: field("Threads:")?,
            mappings: std::fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().count() as u64,
        })
    }
}
