//! Path of the executable `vmferry` that is measured.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

/// Executable named by `--vmferry`.
static NAMED: OnceLock<PathBuf> = OnceLock::new();
/// Executable that all benches of this process start.
static FOUND: OnceLock<PathBuf> = OnceLock::new();

/// Makes `path` the executable of all benches. Must be called before [`vmferry`], and only once.
pub(super) fn name(path: &Path) {
    let _ = NAMED.set(path.to_owned());
}

/// Returns the executable that benches start: the one that `--vmferry` names, or the one in the
/// folder of this executable.
///
/// # Errors
///
/// Fails if there is no such file.
pub(super) fn vmferry() -> Result<&'static Path> {
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    let path = match NAMED.get() {
        Some(named) => {
            if !named.is_file() {
                bail!("--vmferry {}: there is no such file", named.display());
            }
            // A path without a folder would be looked up in PATH.
            named.canonicalize().with_context(|| format!("--vmferry {}", named.display()))?
        }
        None => beside(&std::env::current_exe().context("cannot find this executable")?)?,
    };
    Ok(FOUND.get_or_init(|| path))
}

/// Returns the `vmferry` in the folder of `own`, where Cargo puts both.
fn beside(own: &Path) -> Result<PathBuf> {
    let path = own.with_file_name("vmferry");
    let build =
        format!("cargo build{} -p vmferry-cli", if cfg!(debug_assertions) { "" } else { " --release" });
    if !path.is_file() {
        bail!(
            "benches start processes of the command vmferry, and there is none at {}: build it ({build}), or name one with \
             --vmferry PATH",
            path.display()
        );
    }
    // Cargo builds only the package that is run, so a change of the engine leaves the other
    // executable as it was.
    let built =
        |path: &Path| path.metadata().and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    if built(&path) < built(own) {
        eprintln!(
            "vmferry-bench: {} was built before this executable; if its sources have changed since, build it again ({build})",
            path.display()
        );
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_executable_is_reported_with_the_build_command() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("vmferry-bench");
        let said = beside(&own).unwrap_err().to_string();
        assert!(said.contains("-p vmferry-cli") && said.contains("--vmferry PATH"), "{said}");
        std::fs::write(folder.path().join("vmferry"), "").unwrap();
        assert_eq!(beside(&own).unwrap(), folder.path().join("vmferry"));
    }
}
