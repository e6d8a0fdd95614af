//! Whether a vmferry did what its confinement forbids. It says so and goes on, so that a guest may well arrive all the same.

use anyhow::{Context, Result};
use std::path::Path;

/// What stands in the line that a forbidden system call leaves (`docs/confinement.md`).
const FORBIDDEN: &str = "which its confinement forbids";

/// The first such line in the files of a scenario's `folder`, with the file's name.
///
/// # Errors
/// If one of them cannot be read.
pub fn found(folder: &Path) -> Result<Option<String>> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .with_context(|| format!("cannot look into {}", folder.display()))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()?;
    paths.sort();
    for path in paths.iter().filter(|path| path.is_file()) {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8_lossy(&bytes);
        if let Some(line) = text.lines().find(|line| line.contains(FORBIDDEN)) {
            let name = path.file_name().unwrap_or_default().display();
            return Ok(Some(format!("{name}: {}", line.trim())));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_is_found_in_whichever_file_it_stands() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("guest1.errors"), "listening at tcp:127.0.0.1:7\n").unwrap();
        std::fs::write(folder.path().join("log.txt"), [b"\xff", b"passed\n".as_slice()].concat()).unwrap();
        assert_eq!(found(folder.path()).unwrap(), None);
        let line = "vmferry: thread 'disk-0' (disk) made system call 59 execve(0x7f, 0x7f, 0x0), which its confinement forbids: it fails.";
        std::fs::write(folder.path().join("target2.errors"), format!("x\n{line}\n")).unwrap();
        assert_eq!(
            found(folder.path()).unwrap().as_deref(),
            Some(format!("target2.errors: {line}").as_str())
        );
    }

    #[test]
    fn the_line_is_the_one_that_vmferry_writes() {
        assert!(include_str!("../../crates/confine/src/seccomp/violation.rs").contains(FORBIDDEN));
    }
}
