//! Parts of the lab: unpacked by `cargo xtask lab fetch`, or installed.

use super::modules::Modules;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

/// Modules that the kernel of the outer machine must have.
pub(crate) const OUTER_MODULES: [&str; 9] =
    ["virtio_pci", "9p", "9pnet_virtio", "kvm_amd", "virtio_net", "virtio_blk", "tun", "bridge", "loop"];
/// Modules that a Linux guest under vmferry needs.
pub(crate) const GUEST_MODULES: [&str; 7] =
    ["virtio_mmio", "virtio_balloon", "virtio_blk", "virtio_net", "ext4", "button", "evdev"];

/// Oldest QEMU that the lab can use. QEMU 7.2 does not intercept a guest's XSETBV. The guest then
/// changes the XCR0 of the outer kernel, and the guest's kernel finds contradictory sizes of its
/// FPU state.
const LEAST_QEMU: (u32, u32) = (10, 0);

/// Name of the script in the lab's folder that runs a fetched QEMU.
pub(crate) const QEMU: &str = "qemu";

/// Program that creates a guest's file system.
pub(crate) const MKFS: &str = "mkfs.ext4";

/// Options of a kernel that free page reporting needs in a guest.
const REPORTING: [&str; 2] = ["CONFIG_PAGE_REPORTING", "CONFIG_VIRTIO_BALLOON"];
/// Option of a kernel that can fill free pages with a value, and check it.
const POISONING: &str = "CONFIG_PAGE_POISONING";

/// Kernel and its modules.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    pub(crate) modules: Modules,
    /// Text of the kernel's configuration. `None` if the package has none.
    pub(crate) config: Option<String>,
}

impl Kernel {
    /// Returns whether an option is built in or a module. An option is unknown, and assumed to be
    /// there, if the configuration is.
    fn has(&self, option: &str) -> bool {
        let value = |config: &String| {
            config
                .lines()
                .any(|line| line.strip_prefix(option).is_some_and(|value| value == "=y" || value == "=m"))
        };
        self.config.as_ref().is_none_or(value)
    }

    /// Returns the options for free page reporting that the kernel was built without.
    pub(crate) fn reporting_lacks(&self) -> Vec<String> {
        REPORTING.iter().filter(|option| !self.has(option)).map(|option| (*option).to_owned()).collect()
    }

    /// Returns whether the kernel is known to have page poisoning.
    fn poisons(&self) -> bool {
        self.config.is_some() && self.has(POISONING)
    }
}

/// Parts that were found. `missing` returns the other ones, and how to get them.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) qemu: Option<PathBuf>,
    /// Version of an installed QEMU that is too old.
    pub(crate) old_qemu: Option<(u32, u32)>,
    pub(crate) busybox: Option<PathBuf>,
    /// Program that checks a guest's file system.
    pub(crate) fsck: Option<PathBuf>,
    /// Kernel of the emulated machine.
    pub(crate) outer: Option<Rc<Kernel>>,
    /// Kernel of Linux guests.
    pub(crate) guest: Option<Rc<Kernel>>,
    /// Kernel of Linux guests with page poisoning, or the reason why there is none.
    pub(crate) poisoning: Option<Result<Rc<Kernel>, String>>,
}

/// Returns the lab's folder beside the build.
pub(crate) fn folder() -> PathBuf {
    workspace().join("target/lab")
}

/// Returns the root of the repository.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// Returns the path of a program, from PATH and the folders for administrators.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Not every user has the folders for administrators in PATH.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

impl Parts {
    /// Searches for all parts.
    pub(crate) fn find() -> Self {
        let fetched = folder().join("root");
        let mut kernels = kernels(&fetched);
        if kernels.is_empty() {
            kernels = self::kernels(Path::new("/"));
        }
        // Cloud kernels are preferred for guests, because most guests run them. Any other kernel
        // boots as well.
        kernels.sort_by_key(|kernel| kernel.version.contains("cloud"));
        let kernels: Vec<_> = kernels.into_iter().map(Rc::new).collect();
        let guest = kernels.iter().rfind(|kernel| lacks(kernel, &GUEST_MODULES).is_none()).cloned();
        let outer = kernels.iter().find(|kernel| lacks(kernel, &OUTER_MODULES).is_none()).cloned();
        let poisoning = Some(poisoning(&kernels));
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
        Self { qemu: found.filter(|_| old_qemu.is_none()), old_qemu, busybox, fsck, outer, guest, poisoning }
    }

    /// Returns a line of text for each missing part.
    pub(crate) fn missing(&self) -> Vec<String> {
        const FETCH: &str = "`cargo xtask lab fetch` gets it without installing anything";
        let mut missing = Vec::new();
        if self.qemu.is_none() {
            let (major, minor) = LEAST_QEMU;
            let what = self.old_qemu.map_or_else(String::new, |(old, of)| {
                format!(" (version {old}.{of} is installed, and its virtualization is incomplete)")
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
                "a readable kernel image with the modules {} (Debian's linux-image-amd64): {FETCH}",
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

/// Returns a kernel for guests that can poison pages, or the reason why there is none.
fn poisoning(kernels: &[Rc<Kernel>]) -> Result<Rc<Kernel>, String> {
    let found = kernels.iter().find(|kernel| kernel.poisons() && lacks(kernel, &GUEST_MODULES).is_none());
    found.cloned().ok_or_else(|| {
        let versions: Vec<_> = kernels.iter().map(|kernel| kernel.version.as_str()).collect();
        format!(
            "page_poison=1 has no effect: of the kernels ({}), none was built with {POISONING} and the modules of a guest",
            versions.join(", ")
        )
    })
}

/// Returns the version of a QEMU.
fn version(qemu: &Path) -> Option<(u32, u32)> {
    let output = Command::new(qemu).arg("--version").stdin(Stdio::null()).output().ok()?;
    version_in(&String::from_utf8_lossy(&output.stdout))
}

/// Returns the version in the output of `--version`.
fn version_in(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.strip_prefix("QEMU emulator version ")?.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the first of `modules` that is missing in `kernel`.
fn lacks<'a>(kernel: &Kernel, modules: &[&'a str]) -> Option<&'a str> {
    modules.iter().copied().find(|module| !kernel.modules.has(module))
}

/// Returns the kernels in `root` that are readable and have their modules.
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
    let config = std::fs::read_to_string(root.join("boot").join(format!("config-{version}"))).ok();
    Some(Kernel { version, image, modules, config })
}

/// Returns whether the program needs no interpreter. An initramfs has none.
fn is_static(file: &Path) -> bool {
    const INTERPRETER: &[u8] = b"/ld-";
    let Ok(bytes) = std::fs::read(file) else { return false };
    // The path of the interpreter is near the start of the file, after the program headers.
    let head = &bytes[..bytes.len().min(4096)];
    bytes.starts_with(b"\x7fELF") && !head.windows(INTERPRETER.len()).any(|window| window == INTERPRETER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_and_missing_file_are_not_static_programs() {
        assert!(!is_static(Path::new(file!())));
        assert!(!is_static(Path::new("/nowhere")));
    }

    #[test]
    fn missing_parts_are_listed_with_the_way_to_get_them() {
        let missing = Parts::default().missing();
        assert!(missing.len() >= 5);
        assert!(missing.iter().all(|line| line.contains("apt-get") || line.contains("fetch")), "{missing:?}");
    }

    #[test]
    fn old_qemu_is_missing_with_its_version() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c)";
        assert_eq!(version_in(debian), Some((7, 2)));
        assert_eq!(version_in("QEMU emulator version 11.1.50"), Some((11, 1)));
        assert_eq!(version_in("something else"), None);
        assert!((7, 2) < LEAST_QEMU && LEAST_QEMU <= (10, 0));
        let parts = Parts { old_qemu: Some((7, 2)), ..Parts::default() };
        assert!(parts.missing()[0].contains("version 7.2"), "{:?}", parts.missing());
    }

    #[test]
    fn kernels_without_modules_are_not_found() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("boot")).unwrap();
        std::fs::write(root.path().join("boot/vmlinuz-1.0"), b"x").unwrap();
        assert!(kernels(root.path()).is_empty());
        std::fs::create_dir_all(root.path().join("lib/modules/1.0/kernel")).unwrap();
        assert_eq!(kernels(root.path()).len(), 1);
    }

    #[test]
    fn missing_options_of_a_kernel_are_named() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("boot")).unwrap();
        std::fs::create_dir_all(root.path().join("lib/modules/1.0/kernel")).unwrap();
        std::fs::write(root.path().join("boot/vmlinuz-1.0"), b"x").unwrap();
        let with = |config: &str| {
            std::fs::write(root.path().join("boot/config-1.0"), config).unwrap();
            kernels(root.path()).remove(0)
        };
        let kernel = with("CONFIG_PAGE_REPORTING=y\nCONFIG_VIRTIO_BALLOON=m\nCONFIG_PAGE_POISONING=y\n");
        assert!(kernel.reporting_lacks().is_empty() && kernel.poisons());
        let kernel = with("# CONFIG_PAGE_REPORTING is not set\nCONFIG_VIRTIO_BALLOON=m\n");
        assert_eq!(kernel.reporting_lacks(), ["CONFIG_PAGE_REPORTING"]);
        let why = poisoning(&[Rc::new(kernel)]).unwrap_err();
        assert!(why.contains("1.0") && why.contains(POISONING), "{why}");
    }
}
