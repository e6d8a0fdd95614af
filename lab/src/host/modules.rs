//! Modules of a kernel, without the files that depmod creates, because packages that were only
//! unpacked have none.
//!
//! Each module has its dependencies in its `.modinfo` section (`depends=a,b`). `modules.builtin`
//! lists the modules that are built into the kernel.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Modules of one kernel.
#[derive(Debug)]
pub(crate) struct Modules {
    folder: PathBuf,
    files: BTreeMap<String, PathBuf>,
    builtin: Vec<String>,
}

/// Module that is ready to be loaded.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

impl Modules {
    /// Opens the modules in `folder`, which is `/lib/modules/VERSION` of some root.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        collect(&folder.join("kernel"), &mut files)
            .with_context(|| format!("cannot read the modules in {}", folder.display()))?;
        let builtin = std::fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
        let builtin = builtin.lines().filter_map(|line| name_of(Path::new(line))).collect();
        Ok(Self { folder: folder.to_owned(), files, builtin })
    }

    /// Returns whether the module exists, or the kernel has it built in.
    pub(crate) fn has(&self, name: &str) -> bool {
        let name = name.replace('-', "_");
        self.files.contains_key(&name) || self.builtin.contains(&name)
    }

    /// Returns `wanted` and all their dependencies, in an order in which they can be loaded.
    pub(crate) fn load(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut loaded = Vec::new();
        for name in wanted {
            self.add(&name.replace('-', "_"), &mut loaded, 0)?;
        }
        Ok(loaded)
    }

    fn add(&self, name: &str, loaded: &mut Vec<Module>, depth: usize) -> Result<()> {
        // No real chain of dependencies is this long, so a longer one is a cycle.
        const DEEPEST: usize = 32;
        if self.builtin.iter().any(|known| known == name) || loaded.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            bail!("the kernel of {} has no module {name}", self.folder.display());
        };
        if depth > DEEPEST {
            bail!("the modules in {} have a dependency cycle ({name})", self.folder.display());
        }
        let bytes = read(path)?;
        for needed in depends(&bytes) {
            self.add(&needed, loaded, depth + 1)?;
        }
        loaded.push(Module { name: name.to_owned(), bytes });
        Ok(())
    }
}

fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            collect(&path, files)?;
        } else if let Some(name) = name_of(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// Returns the name of a module: `kvm_amd` for `.../kvm-amd.ko.xz`.
fn name_of(path: &Path) -> Option<String> {
    let (name, rest) = path.file_name()?.to_str()?.split_once('.')?;
    rest.starts_with("ko").then(|| name.replace('-', "_"))
}

/// Returns the unpacked bytes of a module, because busybox's insmod loads no other form.
fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let unpacker = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(bytes),
    };
    unpack(unpacker, &bytes).with_context(|| format!("cannot unpack {}", path.display()))
}

/// Returns the output of `program -dc` for `bytes`.
pub(crate) fn unpack(program: &str, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new(program)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let mut input = child.stdin.take().context("it has no input")?;
    let output = std::thread::scope(|scope| {
        // A program that stops reading reports the reason itself, so the error of the write is
        // ignored.
        scope.spawn(move || drop(input.write_all(bytes)));
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Returns the dependencies that a module names.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[start + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rig(modules: &[(&str, &str)], builtin: &str) -> (tempfile::TempDir, Modules) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("kernel/drivers")).unwrap();
        for (name, needs) in modules {
            let text = format!("\x7fELF\0license=GPL\0depends={needs}\0name={name}\0");
            std::fs::write(folder.path().join(format!("kernel/drivers/{name}.ko")), text).unwrap();
        }
        std::fs::write(folder.path().join("modules.builtin"), builtin).unwrap();
        let modules = Modules::open(folder.path()).unwrap();
        (folder, modules)
    }

    #[test]
    fn dependencies_come_before_the_module_and_once() {
        let (_folder, modules) = rig(
            &[("kvm-amd", "kvm,ccp"), ("kvm", "irqbypass"), ("ccp", ""), ("irqbypass", "")],
            "kernel/virtio/virtio.ko\n",
        );
        let names: Vec<_> = modules
            .load(&["virtio", "kvm-amd", "ccp"])
            .unwrap()
            .into_iter()
            .map(|module| module.name)
            .collect();
        assert_eq!(names, ["irqbypass", "kvm", "ccp", "kvm_amd"]);
        assert!(modules.has("virtio") && modules.has("kvm-amd") && !modules.has("9p"));
    }

    #[test]
    fn missing_modules_and_dependency_cycles_are_errors() {
        let (_folder, modules) = rig(&[("a", "b"), ("b", "a"), ("c", "d")], "");
        assert!(modules.load(&["a"]).unwrap_err().to_string().contains("cycle"));
        assert!(modules.load(&["c"]).unwrap_err().to_string().contains("no module d"));
    }
}
