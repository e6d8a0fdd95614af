//! Option `--have`: files with pages that the source need not send.

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use vmferry_engine::KnownPages;

/// Open files, which the process can still read after it has confined itself.
pub(crate) struct KnownFiles(Vec<(String, File)>);

/// Opens the files of `paths`, and the regular files in the folders of `paths`.
///
/// # Errors
/// If a path of the command line cannot be opened, is neither a file nor a folder, or a folder
/// contains more files than can be used.
pub(crate) fn open(paths: &[PathBuf]) -> Result<KnownFiles> {
    let mut files = Vec::new();
    for path in paths {
        let named = || format!("--have {}", path.display());
        if path.is_dir() {
            open_folder(path, &mut files).with_context(named)?;
        } else {
            files.push(open_file(path).with_context(named)?);
        }
        if files.len() > KnownPages::MAX_FILES {
            bail!("--have: more than {} files; name fewer files or folders", KnownPages::MAX_FILES);
        }
    }
    Ok(KnownFiles(files))
}

fn open_file(path: &Path) -> Result<(String, File)> {
    // Opening a named pipe would otherwise wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
    if !file.metadata()?.is_file() {
        bail!("it is neither a regular file nor a folder");
    }
    Ok((path.display().to_string(), file))
}

/// Opens the regular files in a folder, in the order of their names. Files that cannot be opened
/// are left out with a warning, because a folder may contain files of other users.
fn open_folder(folder: &Path, files: &mut Vec<(String, File)>) -> Result<()> {
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<std::io::Result<Vec<_>>>()?;
    paths.sort_unstable();
    for path in paths.iter().filter(|path| path.is_file()) {
        if files.len() > KnownPages::MAX_FILES {
            return Ok(());
        }
        match open_file(path) {
            Ok(file) => files.push(file),
            Err(error) => tracing::warn!("{} is not used for --have: {error:#}", path.display()),
        }
    }
    Ok(())
}

impl KnownFiles {
    /// Reads the files. Returns `None` if the option is not given.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn index(self, paths: &[PathBuf]) -> Result<Option<Arc<KnownPages>>> {
        let Self(files) = self;
        if paths.is_empty() {
            return Ok(None);
        }
        let (count, began) = (files.len(), Instant::now());
        let known = KnownPages::index(files).context("--have")?;
        eprintln!(
            "vmferry: {} pages are known from {count} {}, after {} ms",
            known.pages(),
            if count == 1 { "file" } else { "files" },
            began.elapsed().as_millis()
        );
        if known.is_truncated() {
            eprintln!("vmferry: the files have more pages than can be used; name fewer files");
        }
        Ok(Some(Arc::new(known)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use vmferry_confine::Jail;
    use vmferry_testkit::{Folder, Need, alone, skip};

    fn names(paths: &[PathBuf]) -> Vec<String> {
        let KnownFiles(files) = open(paths).unwrap();
        files
            .into_iter()
            .map(|(name, _)| Path::new(&name).file_name().unwrap().display().to_string())
            .collect()
    }

    #[test]
    fn folder_stands_for_the_regular_files_in_it() {
        let folder = Folder::new();
        for name in ["b", "a", "c"] {
            std::fs::write(folder.file(name), [1; 5000]).unwrap();
        }
        std::fs::create_dir(folder.file("deeper")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, folder.file("pipe"), rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(names(&[folder.root().into()]), ["a", "b", "c"]);
        assert_eq!(names(&[folder.file("c"), folder.root().into()]), ["c", "a", "b", "c"]);
        let error = |path: PathBuf| format!("{:#}", open(&[path]).err().unwrap());
        let pipe = error(folder.file("pipe"));
        assert!(pipe.contains("pipe: it is neither a regular file nor a folder"), "{pipe}");
        let missing = error(folder.file("missing"));
        assert!(missing.contains("--have") && missing.contains("No such file"), "{missing}");
        let known = open(&[folder.file("a")]).unwrap().index(&[folder.file("a")]).unwrap().unwrap();
        assert_eq!(known.pages(), 1);
    }

    #[test]
    fn only_files_that_the_user_of_the_jail_can_read_are_opened() {
        if !rustix::process::geteuid().is_root() {
            return skip(Need::Root, "the test needs root to open files as another user");
        }
        // The rights of the process change, which other tests must not notice.
        if !alone("have::tests::only_files_that_the_user_of_the_jail_can_read_are_opened") {
            return;
        }
        let folder = Folder::new();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(folder.root(), 0o755);
        for (name, mode) in [("open", 0o644), ("secret", 0o600)] {
            std::fs::write(folder.file(name), [1; 5000]).unwrap();
            set(&folder.file(name), mode);
        }
        let jail = Jail { folder: folder.file("jail"), uid: 64_001, gid: 64_001 };
        symlink(folder.file("secret"), folder.file("link")).unwrap();
        assert_eq!(jail.as_user(|| names(&[folder.root().into()])).unwrap(), ["open"]);
        let error = jail.as_user(|| open(&[folder.file("secret")]).err()).unwrap();
        let error = format!("{:#}", error.expect("an error"));
        assert!(error.contains("--have") && error.contains("Permission denied"), "{error}");
        assert_eq!(names(&[folder.root().into()]), ["link", "open", "secret"]);
    }
}
