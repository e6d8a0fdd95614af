//! Static programs: the machines have no libraries.

use super::parts;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, Stdio};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Where the programs are.
#[derive(Debug)]
pub(crate) struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Builds them, in a folder of their own: other flags would throw away what is built elsewhere, again and again.
    pub(crate) fn build() -> Result<Self> {
        let folder = parts::folder().join("build");
        let flags =
            format!("{} -Ctarget-feature=+crt-static", std::env::var("RUSTFLAGS").unwrap_or_default());
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "--locked", "--profile", "lab", "--target", TARGET])
            .args(["--package", "vmferry", "--package", "vmferry-lab"])
            .args(["--bin", "vmferry", "--bin", "lab-agent", "--bin", "lab-guest"])
            .arg("--target-dir")
            .arg(&folder)
            .env("RUSTFLAGS", flags.trim())
            .current_dir(parts::workspace())
            .stdin(Stdio::null())
            .status()
            .context("cannot run cargo")?;
        if !status.success() {
            bail!("cargo cannot build the static programs ({status})");
        }
        Ok(Self { folder: folder.join(TARGET).join("lab") })
    }

    /// One of them.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
