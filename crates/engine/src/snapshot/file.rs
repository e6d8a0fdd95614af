//! File that is written under a temporary name.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use vmferry_wire::MigrationId;

/// File under a temporary name. The file is removed when the value is dropped, unless the file has
/// got its final name.
#[derive(Debug)]
pub(super) struct NewFile {
    file: File,
    /// Folder of the file, which must be synced after the file got its name.
    folder: File,
    partial: PathBuf,
    path: PathBuf,
    named: bool,
}

impl NewFile {
    /// Creates the temporary file in the folder of `path`. Fails if `path` exists, or if the folder
    /// cannot be opened.
    pub(super) fn create(path: &Path, id: MigrationId) -> io::Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(already_exists());
        }
        let mut name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
        name.push(format!(".partial-{id}"));
        let partial = path.with_file_name(name);
        let folder = File::open(folder(path)).map_err(|error| {
            let why =
                format!("its folder cannot be opened, so that its name might not reach the disk: {error}");
            io::Error::new(error.kind(), why)
        })?;
        // Readable by its owner only, because the file contains the memory of a guest.
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&partial)?;
        Ok(Self { file, folder, partial, path: path.to_owned(), named: false })
    }

    /// Returns the file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Waits until the content of the file has reached the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Gives the file its final name, without replacing another file, and waits until the name has
    /// reached the disk. If it does not, the file is removed.
    pub(super) fn name(&mut self) -> io::Result<()> {
        give_name(&self.partial, &self.path)?;
        self.named = true;
        match self.folder.sync_all() {
            // Some network file systems cannot sync a folder. The folder then has the entry
            // already.
            Err(error) if !cannot_sync(&error) => Err(self.removed(&error)),
            _ => Ok(()),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.named {
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

impl NewFile {
    /// Removes the file, because its name may not have reached the disk. Returns the error for the
    /// operator.
    fn removed(&self, why: &io::Error) -> io::Error {
        let left = match std::fs::remove_file(&self.path) {
            Ok(()) => String::new(),
            Err(error) => format!(
                "; the file could not be removed ({error}): do not restore it, because the guest has gone on"
            ),
        };
        io::Error::new(why.kind(), format!("its name may not have reached the disk: {why}{left}"))
    }
}

/// Returns true if `error` means that the file system does not sync folders at all.
fn cannot_sync(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTSUP | libc::ENOSYS))
}

fn already_exists() -> io::Error {
    let why =
        "the file exists already, and may be the only copy of a guest: move it away, or choose another name";
    io::Error::new(io::ErrorKind::AlreadyExists, why)
}

/// Renames a file without replacing another file.
fn give_name(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags};
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(already_exists()),
        // The file system does not support NOREPLACE.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if to.symlink_metadata().is_err() => {
            std::fs::rename(from, to)
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the folder of `path`.
pub(super) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
