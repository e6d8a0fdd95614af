//! Initramfs files of the outer machine and of a Linux guest in it.

use super::cpio::Archive;
use super::modules::Module;
use super::parts::{GUEST_MODULES, Kernel, OUTER_MODULES};
use anyhow::{Context, Result};
use std::path::Path;

/// Returns the initramfs of the outer machine: busybox, the required modules, and the first
/// program.
pub(crate) fn outer(kernel: &Kernel, busybox: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::root();
    add_busybox(&mut archive, busybox)?;
    add_modules(&mut archive, &kernel.modules.load(&OUTER_MODULES)?);
    archive.file("init", include_bytes!("outer-init.sh"));
    Ok(archive.finish())
}

/// Returns the initramfs of a Linux guest: busybox, the drivers of vmferry's devices, and
/// `lab-guest`.
pub(crate) fn guest(kernel: &Kernel, busybox: &Path, lab_guest: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::root();
    add_busybox(&mut archive, busybox)?;
    add_modules(&mut archive, &kernel.modules.load(&GUEST_MODULES)?);
    let bytes = std::fs::read(lab_guest).with_context(|| format!("cannot read {}", lab_guest.display()))?;
    archive.file("bin/lab-guest", &bytes);
    archive.file("init", include_bytes!("guest-init.sh"));
    Ok(archive.finish())
}

fn add_busybox(archive: &mut Archive, busybox: &Path) -> Result<()> {
    let bytes = std::fs::read(busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    archive.file("bin/busybox", &bytes);
    archive.link("bin/sh", "busybox");
    Ok(())
}

/// Adds modules to the archive, and their order in `modules/order`.
fn add_modules(archive: &mut Archive, modules: &[Module]) {
    let mut order = String::new();
    for module in modules {
        archive.file(&format!("modules/{}.ko", module.name), &module.bytes);
        order.push_str(&module.name);
        order.push('\n');
    }
    archive.file("modules/order", order.as_bytes());
}
