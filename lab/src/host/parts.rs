//! What the lab is made of, and where it is found: unpacked by `cargo xtask lab fetch`, or installed.

use super::modules::Modules;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

/// Modules without which a kernel cannot be the outer machine's.
pub(crate) const OUTER_MODULES: [&str; 9] =
    ["virtio_pci", "9p", "9pnet_virtio", "kvm_amd", "virtio_net", "virtio_blk", "tun", "bridge", "loop"];
/// Modules that a Linux guest under vmferry needs.
pub(crate) const GUEST_MODULES: [&str; 7] =
    ["virtio_mmio", "virtio_balloon", "virtio_blk", "virtio_net", "ext4", "button", "evdev"];

/// The oldest QEMU that will do. With 7.2 a guest's XSETBV is not intercepted: it changes the XCR0 of the outer kernel, and the
/// guest's kernel finds sizes of its FPU state that contradict each other.
const LEAST_QEMU: (u32, u32) = (10, 0);

/// In the lab's folder: runs a QEMU that was fetched.
pub(crate) const QEMU: &str = "qemu";

/// What makes a guest's file system.
pub(crate) const MKFS: &str = "mkfs.ext4";

/// A kernel and its modules.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    pub(crate) modules: Modules,
}

/// Everything, as far as it is there; `missing` says what is not, and how to get it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) qemu: Option<PathBuf>,
    /// The version of a QEMU that is there, but too old.
    pub(crate) old_qemu: Option<(u32, u32)>,
    pub(crate) busybox: Option<PathBuf>,
    /// What checks a guest's file system.
    pub(crate) fsck: Option<PathBuf>,
    /// What the emulated machine boots.
    pub(crate) outer: Option<Rc<Kernel>>,
    /// What Linux guests boot.
    pub(crate) guest: Option<Rc<Kernel>>,
}

/// The lab's own folder beside the build.
pub(crate) fn folder() -> PathBuf {
    workspace().join("target/lab")
}

/// The repository's root.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// Where in the PATH a program is.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Programs for administrators are not in everybody's PATH.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

impl Parts {
    /// Looks for everything.
    pub(crate) fn find() -> Self {
        let fetched = folder().join("root");
        let mut kernels = kernels(&fetched);
        if kernels.is_empty() {
            kernels = self::kernels(Path::new("/"));
        }
        // People's guests are cloud kernels, where there is one; any other boots as well.
        kernels.sort_by_key(|kernel| kernel.version.contains("cloud"));
        let kernels: Vec<_> = kernels.into_iter().map(Rc::new).collect();
        let guest = kernels.iter().rfind(|kernel| lacks(kernel, &GUEST_MODULES).is_none()).cloned();
        let outer = kernels.iter().find(|kernel| lacks(kernel, &OUTER_MODULES).is_none()).cloned();
        let busybox = [fetched.join("bin/busybox"), fetched.join("usr/bin/busybox")]
            .into_iter()
            .chain(tool("busybox"))
            .find(|file| is_static(file));
        let fsck = [fetched.join("sbin/e2fsck.static"), fetched.join("usr/sbin/e2fsck.static")]
            .into_iter()
            .chain(tool("e2fsck.static"))
            .find(|file| is_static(file));
        let fetched = Some(folder().join(QEMU)).filter(|file| file.is_file());
        let found = fetched.or_else(|| tool("qemu-system-x86_64"));
        let version = found.as_deref().and_then(version);
        let old_qemu = version.filter(|version| *version < LEAST_QEMU);
        Self { qemu: found.filter(|_| old_qemu.is_none()), old_qemu, busybox, fsck, outer, guest }
    }

    /// What is not there: a line each for people.
    pub(crate) fn missing(&self) -> Vec<String> {
        const FETCH: &str = "`cargo xtask lab fetch` gets it without installing anything";
        let mut missing = Vec::new();
        if self.qemu.is_none() {
            let (major, minor) = LEAST_QEMU;
            let what = self.old_qemu.map_or_else(String::new, |(old, of)| {
                format!(" (here is {old}.{of}, whose virtualization lacks what guests need)")
            });
            missing.push(format!(
                "qemu-system-x86_64 of version {major}.{minor} or newer{what}: {FETCH}, or `apt-get install qemu-system-x86`"
            ));
        }
        if self.busybox.is_none() {
            missing.push(format!("a static busybox: {FETCH}, or `apt-get install busybox-static`"));
        }
        if self.fsck.is_none() {
            missing.push(format!("a static e2fsck: {FETCH}, or `apt-get install e2fsck-static`"));
        }
        if tool(MKFS).is_none() {
            missing.push(format!("{MKFS}: `apt-get install e2fsprogs`"));
        }
        if self.outer.is_none() {
            missing.push(format!(
                "a kernel that can be read, with the modules {} (Debian's linux-image-amd64): {FETCH}",
                OUTER_MODULES.join(", ")
            ));
        }
        if self.guest.is_none() {
            missing.push(format!(
                "a kernel for guests, with the modules {} (Debian's linux-image-cloud-amd64): {FETCH}",
                GUEST_MODULES.join(", ")
            ));
        }
        missing
    }
}

/// The version of a QEMU.
fn version(qemu: &Path) -> Option<(u32, u32)> {
    let output = Command::new(qemu).arg("--version").stdin(Stdio::null()).output().ok()?;
    version_in(&String::from_utf8_lossy(&output.stdout))
}

/// The version in what `--version` says.
fn version_in(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.strip_prefix("QEMU emulator version ")?.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The first of `modules` that `kernel` lacks.
fn lacks<'a>(kernel: &Kernel, modules: &[&'a str]) -> Option<&'a str> {
    modules.iter().copied().find(|module| !kernel.modules.has(module))
}

/// The kernels in `root` that can be read and whose modules are there.
fn kernels(root: &Path) -> Vec<Kernel> {
    let Ok(entries) = std::fs::read_dir(root.join("boot")) else { return Vec::new() };
    let mut images: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    images.sort();
    images.into_iter().filter_map(|image| kernel(root, image)).collect()
}

fn kernel(root: &Path, image: PathBuf) -> Option<Kernel> {
    let version = image.file_name().and_then(OsStr::to_str)?.strip_prefix("vmlinuz-")?.to_owned();
    std::fs::File::open(&image).ok()?;
    let folders = [root.join("lib/modules"), root.join("usr/lib/modules")];
    let modules = folders.iter().find_map(|folder| Modules::open(&folder.join(&version)).ok())?;
    Some(Kernel { version, image, modules })
}

/// Whether the program needs no interpreter: in an initramfs there is none.
fn is_static(file: &Path) -> bool {
    const INTERPRETER: &[u8] = b"/ld-";
    let Ok(bytes) = std::fs::read(file) else { return false };
    // The path of the interpreter stands at the start of the file, behind the program headers.
    let head = &bytes[..bytes.len().min(4096)];
    bytes.starts_with(b"\x7fELF") && !head.windows(INTERPRETER.len()).any(|window| window == INTERPRETER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_a_program_and_this_source_is_not_static() {
        assert!(!is_static(Path::new(file!())));
        assert!(!is_static(Path::new("/nowhere")));
    }

    #[test]
    fn what_is_missing_is_said_with_the_way_to_get_it() {
        let missing = Parts::default().missing();
        assert!(missing.len() >= 5);
        assert!(missing.iter().all(|line| line.contains("apt-get") || line.contains("fetch")), "{missing:?}");
    }

    #[test]
    fn a_qemu_that_is_too_old_is_missing_and_named() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c)";
        assert_eq!(version_in(debian), Some((7, 2)));
        assert_eq!(version_in("QEMU emulator version 11.1.50"), Some((11, 1)));
        assert_eq!(version_in("something else"), None);
        assert!((7, 2) < LEAST_QEMU && LEAST_QEMU <= (10, 0));
        let parts = Parts { old_qemu: Some((7, 2)), ..Parts::default() };
        assert!(parts.missing()[0].contains("here is 7.2"), "{:?}", parts.missing());
    }

    #[test]
    fn kernels_without_modules_are_none() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("boot")).unwrap();
        std::fs::write(root.path().join("boot/vmlinuz-1.0"), b"x").unwrap();
        assert!(kernels(root.path()).is_empty());
        std::fs::create_dir_all(root.path().join("lib/modules/1.0/kernel")).unwrap();
        assert_eq!(kernels(root.path()).len(), 1);
    }
}
