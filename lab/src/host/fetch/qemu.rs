//! QEMU that is new enough, from the backports of this machine's Debian release, unpacked with all
//! of its libraries.
//!
//! apt-get runs in a separate folder, with separate sources and no installed packages. Therefore it
//! downloads everything that QEMU needs, including the C library, and installs nothing.

use super::{run, unpack};
use crate::host::parts::QEMU;
use anyhow::{Context, Result, ensure};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Folder beside the wrapper in which QEMU is unpacked.
const ROOT: &str = "qemu-root";
/// Script that runs QEMU with its own loader, libraries and firmware.
const WRAPPER: &str = r#"#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/qemu-root
libraries=$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu
for folder in "$root/lib/x86_64-linux-gnu" "$root/usr/lib/x86_64-linux-gnu"; do
    loader=$folder/ld-linux-x86-64.so.2
    [ ! -e "$loader" ] || break
done
exec "$loader" --library-path "$libraries" "$root/usr/bin/qemu-system-x86_64" \
    -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
"#;
/// File with the keys of Debian's archives.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Fetches QEMU into the folder `lab`.
pub(super) fn fetch(lab: &Path) -> Result<()> {
    let work = lab.join("packages/qemu");
    let _ = std::fs::remove_dir_all(&work);
    for folder in ["lists/partial", "archives/partial"] {
        std::fs::create_dir_all(work.join(folder))?;
    }
    let targets = Command::new("apt-get")
        .args(["indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages"])
        .stdin(Stdio::null())
        .output()
        .context("cannot run apt-get")?;
    let targets = String::from_utf8_lossy(&targets.stdout).into_owned();
    let (uri, codename) = archive(&targets).context(
        "apt's sources name no Debian archive: install qemu-system-x86 of version 10.0 or newer by hand",
    )?;
    println!("fetching qemu-system-x86 and its libraries from {codename}-backports");
    std::fs::write(work.join("sources.list"), sources(uri, codename, Path::new(KEYRING).exists()))?;
    std::fs::write(work.join("status"), "")?;
    std::fs::write(work.join("apt.conf"), configuration(&work))?;
    let apt = |arguments: &[&str]| {
        run(Command::new("apt-get").arg("-q").args(arguments).env("APT_CONFIG", work.join("apt.conf")))
    };
    apt(&["update"])?;
    let backports = format!("{codename}-backports");
    apt(&["--yes", "--download-only", "--target-release", &backports, "install", "qemu-system-x86"])?;
    let root = lab.join(ROOT);
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root)?;
    let mut count = 0;
    for file in std::fs::read_dir(work.join("archives"))? {
        let file = file?.path();
        if file.extension().is_some_and(|extension| extension == "deb") {
            unpack(&file, &root)?;
            count += 1;
        }
    }
    ensure!(count > 0, "apt-get downloaded no package of QEMU");
    std::fs::remove_dir_all(&work)?;
    let wrapper = lab.join(QEMU);
    std::fs::write(&wrapper, WRAPPER)?;
    std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Returns the archive of this machine's release, and the release's name: the first source whose
/// suite does not extend another suite.
fn archive(targets: &str) -> Option<(&str, &str)> {
    targets.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (uri, codename, component) = (words.next()?, words.next()?, words.next()?);
        (component == "main" && !codename.contains('-')).then_some((uri, codename))
    })
}

fn sources(uri: &str, codename: &str, keyring: bool) -> String {
    let signed = if keyring { format!("[signed-by={KEYRING}] ") } else { String::new() };
    format!("deb {signed}{uri} {codename} main\ndeb {signed}{uri} {codename}-backports main\n")
}

fn configuration(work: &Path) -> String {
    let folder = work.display();
    format!(
        "Dir::Etc::sourcelist \"{folder}/sources.list\";\nDir::Etc::sourceparts \"/dev/null\";\n\
         Dir::State::lists \"{folder}/lists\";\nDir::State::status \"{folder}/status\";\n\
         Dir::Cache::archives \"{folder}/archives\";\nDir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\n\
         APT::Install-Recommends \"false\";\nAPT::Sandbox::User \"\";\nDebug::NoLocking \"true\";\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_is_that_of_the_release_and_not_of_its_updates() {
        let targets = "https://deb.nodesource.com/node_20.x nodistro-x main\n\
                       http://deb.debian.org/debian-security/ bookworm-security main\n\
                       http://deb.debian.org/debian/ bookworm contrib\nhttp://deb.debian.org/debian/ bookworm main\n";
        assert_eq!(archive(targets), Some(("http://deb.debian.org/debian/", "bookworm")));
        assert_eq!(archive(""), None);
        let text = sources("http://a/", "bookworm", false);
        assert_eq!(text, "deb http://a/ bookworm main\ndeb http://a/ bookworm-backports main\n");
    }
}
