//! Paths for the files and sockets of one test.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a path in the folder for temporary files that no other call returns.
///
/// `what` becomes part of the name, for files that a test leaves behind.
pub fn temp_path(what: &str) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("vmferry-{what}-{}-{number}", std::process::id()))
}

/// Folder of one test. The folder and its content are removed when the value is dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Creates an empty folder.
    ///
    /// # Panics
    ///
    /// Panics if the folder cannot be created.
    #[expect(clippy::new_without_default, reason = "it creates something")]
    pub fn new() -> Self {
        let path = temp_path("folder");
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self(path)
    }

    /// Returns the path of this folder.
    pub fn root(&self) -> &Path {
        &self.0
    }

    /// Returns the path of the file `name` in this folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the same path as text, for a command line.
    pub fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }

    /// Returns the names of all files in this folder.
    ///
    /// # Panics
    ///
    /// Panics if the folder cannot be read, or if a name is not UTF-8.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("the folder");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_differ() {
        assert_ne!(temp_path("same"), temp_path("same"));
    }

    #[test]
    fn folder_is_removed_with_its_files() {
        let folder = Folder::new();
        let file = folder.file("file");
        std::fs::write(&file, "text").unwrap();
        assert_eq!(folder.names(), ["file"]);
        drop(folder);
        assert!(!file.exists());
    }
}
