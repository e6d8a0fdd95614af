//! Detection of system calls that vmferry's confinement forbids. vmferry logs such a call and
//! continues, so the guest may still arrive.

use anyhow::{Context, Result};
use std::path::Path;

/// Text in the line that vmferry logs for a forbidden system call (`docs/confinement.md`).
const FORBIDDEN: &str = "which its confinement forbids";

/// Returns the first such line in the files of a scenario's `folder`, with the file's name.
///
/// # Errors
///
/// Fails if a file cannot be read.
pub fn found(folder: &Path) -> Result<Option<String>> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
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
    fn violation_is_found_in_any_file() {
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
    fn expected_text_is_the_one_that_vmferry_logs() {
        assert!(include_str!("../../crates/confine/src/seccomp/violation.rs").contains(FORBIDDEN));
    }
}
