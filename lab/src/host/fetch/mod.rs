//! `cargo xtask lab fetch`: kernels, a busybox, and a QEMU where there is none that will do, unpacked beside the build, not installed.
//!
//! A kernel package that is installed becomes the machine's next boot; the lab only wants its files. `apt-get download` gets them
//! from wherever this machine gets its packages, and checks their signatures.

mod qemu;

use super::parts::{self, Parts};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// The packages whose newest version is fetched; kernels by the name that always means the newest.
const PACKAGES: [&str; 4] =
    ["linux-image-amd64", "linux-image-cloud-amd64", "busybox-static", "e2fsck-static"];

/// Fetches what the lab boots.
pub(crate) fn fetch() -> Result<bool> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
        if parts::tool(tool).is_none() {
            bail!(
                "{tool} is not here: `fetch` needs a Debian machine. Elsewhere put a kernel with its modules into /boot and \
                 /lib/modules, and a static busybox into the PATH"
            );
        }
    }
    let lab = parts::folder();
    let (downloads, root) = (lab.join("packages"), lab.join("root"));
    std::fs::create_dir_all(&downloads)?;
    // Those of an older kernel would be taken for today's.
    if root.exists() {
        std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    }
    std::fs::create_dir_all(&root)?;
    for package in PACKAGES {
        let package = newest(package)?;
        println!("fetching {package}");
        let folder = downloads.join(&package);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        run(Command::new("apt-get").args(["-q", "download", &package]).current_dir(&folder))?;
        for file in std::fs::read_dir(&folder)? {
            unpack(&file?.path(), &root)?;
        }
        std::fs::remove_dir_all(&folder)?;
    }
    if Parts::find().qemu.is_none() {
        qemu::fetch(&lab)?;
    }
    println!("all is in {}; `cargo xtask lab check` says whether anything is missing", lab.display());
    Ok(true)
}

/// The package that does it: one that `package` depends on, where that is a name for the newest kernel only.
fn newest(package: &str) -> Result<String> {
    let output = Command::new("apt-cache")
        .args(["depends", "--no-recommends", "--no-suggests", package])
        .stdin(Stdio::null())
        .output()
        .context("cannot run apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!(
            "there is no package {package} ({}); try `apt-get update`",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(behind(&text).unwrap_or(package).to_owned())
}

/// The kernel that `apt-cache depends` names.
fn behind(depends: &str) -> Option<&str> {
    depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
}

fn unpack(package: &Path, root: &Path) -> Result<()> {
    run(Command::new("dpkg-deb").arg("-x").arg(package).arg(root))
}

fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot run {name}"))?;
    if !status.success() {
        bail!("{name} failed ({status})");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_name_is_found_behind_its_newest() {
        let text = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n";
        assert_eq!(behind(text), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(behind("busybox-static\n  Conflicts: busybox\n"), None);
    }
}
