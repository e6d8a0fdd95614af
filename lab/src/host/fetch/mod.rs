//! `cargo xtask lab fetch`: kernels, a busybox, an e2fsck, and a QEMU if the installed one is
//! missing or too old. They are unpacked beside the build and not installed.
//!
//! An installed kernel package would become the machine's next boot, but the lab only needs its
//! files. `apt-get download` gets the packages from the sources of this machine, and checks their
//! signatures.

mod qemu;

use super::parts::{self, Parts};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// Packages whose newest version is fetched. The names of the kernels always mean the newest one.
const PACKAGES: [&str; 4] =
    ["linux-image-amd64", "linux-image-cloud-amd64", "busybox-static", "e2fsck-static"];

/// Fetches the files that the lab boots.
pub(crate) fn fetch() -> Result<bool> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
        if parts::tool(tool).is_none() {
            bail!(
                "{tool} is not installed: `fetch` needs a Debian machine; elsewhere put a kernel with its modules into /boot and \
                 /lib/modules, and a static busybox into the PATH"
            );
        }
    }
    let lab = parts::folder();
    let (downloads, root) = (lab.join("packages"), lab.join("root"));
    std::fs::create_dir_all(&downloads)?;
    // Files of an older kernel would be taken for those of the new one.
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
    println!("all files are in {}; `cargo xtask lab check` shows whether anything is missing", lab.display());
    Ok(true)
}

/// Returns the package with the files: `package` itself, or the kernel that it depends on if it is
/// only a name for the newest one.
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
    Ok(kernel_of(&text).unwrap_or(package).to_owned())
}

/// Returns the kernel that `apt-cache depends` names.
fn kernel_of(depends: &str) -> Option<&str> {
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
    fn kernel_package_is_found_in_the_dependencies() {
        let text = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n";
        assert_eq!(kernel_of(text), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(kernel_of("busybox-static\n  Conflicts: busybox\n"), None);
    }
}
