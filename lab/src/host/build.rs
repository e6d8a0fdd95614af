//! Build of static programs, because the machines have no libraries.

use super::parts;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, Stdio};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Package and name of each program.
const PROGRAMS: [(&str, &str); 3] =
    [("vmferry-cli", "vmferry"), ("vmferry-lab", "lab-agent"), ("vmferry-lab", "lab-guest")];

/// Folder of the built programs.
#[derive(Debug)]
pub(crate) struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Builds the programs in a separate folder, because their flags would invalidate the builds in
    /// another one each time.
    pub(crate) fn build() -> Result<Self> {
        let folder = parts::folder().join("build");
        let flags =
            format!("{} -Ctarget-feature=+crt-static", std::env::var("RUSTFLAGS").unwrap_or_default());
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "--locked", "--profile", "lab", "--target", TARGET])
            .args(PROGRAMS.iter().flat_map(|(package, program)| ["--package", package, "--bin", program]))
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

    /// Returns the path of a program.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the packages have these programs, because a host without the parts of the lab
    /// never builds them.
    #[test]
    fn every_program_is_in_its_package() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
        let told = Command::new(cargo).args(arguments).current_dir(parts::workspace()).output().unwrap();
        let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
        for (package, program) in PROGRAMS {
            let packages = told["packages"].as_array().unwrap();
            let found = packages.iter().find(|found| found["name"] == package).expect(package);
            let targets = found["targets"].as_array().unwrap();
            let named = |target: &&serde_json::Value| target["name"] == program && target["kind"][0] == "bin";
            assert!(targets.iter().any(|target| named(&target)), "{package} has no program {program}");
        }
    }
}
