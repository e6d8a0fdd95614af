//! Disks of the children: copy-on-write copies of the parent's disks (`--disk-overlay`).
//!
//! The copy must belong to the instant of the branch. Therefore the process of the parent makes it
//! in the pause, into files of the first child that this command has opened and passed. The process
//! needs no right to open a file for this, and the pause does not wait for another process. The
//! files of the other children are copies of those of the first child, which this command makes
//! after the pause and before a child runs.

use super::files;
use crate::disk::{DiskArg, disk};
use crate::successor::SuccessorArguments;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Advice if a disk has no reflinks.
const NO_REFLINKS: &str =
    "place the disk on btrfs, or on XFS with reflinks, or take a snapshot of its volume";

/// Copy of a disk for one child.
#[derive(Debug)]
struct Copy {
    path: PathBuf,
    file: File,
}

/// Disk of the parent.
#[derive(Debug)]
struct ParentDisk {
    option: DiskArg,
    /// Copies for the children, in the order of the children. There are none of a read-only disk.
    copies: Vec<Copy>,
}

/// Disks of all children. Dropping the value removes the copies, unless [`keep`](Self::keep) was
/// called.
#[derive(Debug, Default)]
pub(super) struct Overlays {
    disks: Vec<ParentDisk>,
    kept: bool,
}

impl Overlays {
    /// Creates a file in `folder` for each of `count` children and each writable disk of the
    /// parent, which was started with the options `parent`.
    ///
    /// # Errors
    /// If a disk is not a regular file, or if a file exists or cannot be created.
    pub(super) fn create(parent: &SuccessorArguments, folder: &Path, count: u32) -> Result<Self> {
        let failed = || format!("cannot use --disk-overlay {}", folder.display());
        if !folder.is_dir() {
            // The disks of a guest may be confidential.
            std::fs::DirBuilder::new().mode(0o700).create(folder).with_context(failed)?;
        }
        let folder = folder.canonicalize().with_context(failed)?;
        let mut overlays = Self::default();
        for (number, value) in parent.values("disk").enumerate() {
            let text = value.to_str().context("the name of a disk is not UTF-8")?;
            let option = disk(text).map_err(anyhow::Error::msg)?;
            let path = parent.in_folder(option.path());
            overlays.disks.push(ParentDisk { option, copies: Vec::new() });
            if overlays.disks[number].option.is_read_only() {
                continue;
            }
            let len = regular(&path)?;
            for child in 0..count {
                let copy = Copy::create(folder.join(format!("{child}.disk{number}")), len)?;
                overlays.disks[number].copies.push(copy);
            }
        }
        let writable = overlays.of_the_first_child().count();
        ensure!(
            writable <= files::MOST,
            "{writable} disks are too many: at most {} are possible",
            files::MOST
        );
        Ok(overlays)
    }

    fn of_the_first_child(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.disks.iter().filter_map(|disk| disk.copies.first().map(|copy| copy.file.as_fd()))
    }

    /// Returns the number of files that [`pass`](Self::pass) passes.
    pub(super) fn count(&self) -> usize {
        self.of_the_first_child().count()
    }

    /// Passes the files of the first child to the process of the parent.
    pub(super) fn pass(&self, parent: BorrowedFd<'_>) -> Result<()> {
        let all: Vec<_> = self.of_the_first_child().collect();
        if all.is_empty() { Ok(()) } else { files::send(parent, &all) }
    }

    /// Copies the files of the first child, which have the content of the instant, to those of the
    /// other children.
    pub(super) fn spread(&self) -> Result<()> {
        for disk in &self.disks {
            let Some((first, others)) = disk.copies.split_first() else { continue };
            for other in others {
                rustix::fs::ioctl_ficlone(&other.file, &first.file)
                    .map_err(io::Error::from)
                    .with_context(|| format!("cannot copy the disk to {}", other.path.display()))?;
            }
        }
        Ok(())
    }

    /// Returns the arguments of child `index`, with its own disks.
    pub(super) fn with_disks(&self, arguments: SuccessorArguments, index: usize) -> SuccessorArguments {
        if self.count() == 0 {
            return arguments;
        }
        let option = |disk: &ParentDisk| match disk.copies.get(index) {
            Some(copy) => copy.path.clone().into_os_string(),
            None => disk.option.text(),
        };
        self.disks
            .iter()
            .fold(arguments.without("disk"), |arguments, disk| arguments.with("disk", option(disk)))
    }

    /// Keeps the files, because the children run.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Overlays {
    fn drop(&mut self) {
        let copies = self.disks.iter().flat_map(|disk| &disk.copies).filter(|_| !self.kept);
        for copy in copies {
            let _ = std::fs::remove_file(&copy.path);
        }
    }
}

impl Copy {
    /// Creates the file at `path` with `len` bytes. A child checks the size of its disk when it
    /// starts.
    fn create(path: PathBuf, len: u64) -> Result<Self> {
        let failed = || format!("cannot create {} for the disk of a child", path.display());
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = match file {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                bail!("{} exists and is not replaced; remove it, or choose another folder", path.display())
            }
            file => file.with_context(failed)?,
        };
        let copy = Self { path: path.clone(), file };
        if let Err(error) = copy.file.set_len(len) {
            let _ = std::fs::remove_file(&path);
            return Err(error).with_context(failed);
        }
        Ok(copy)
    }
}

/// Returns the length of the disk at `path`, which must be a regular file.
fn regular(path: &Path) -> Result<u64> {
    let meta = std::fs::metadata(path).with_context(|| format!("cannot find the disk {}", path.display()))?;
    ensure!(
        meta.is_file(),
        "the disk {} is not a regular file, so it has no copy-on-write copy; {NO_REFLINKS}",
        path.display()
    );
    Ok(meta.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::successor::StartArguments;
    use vmferry_testkit::Folder;

    fn parent(line: &str) -> SuccessorArguments {
        SuccessorArguments::from_start(&StartArguments::of_words(line.split(' '))).unwrap()
    }

    #[test]
    fn each_child_has_its_own_files_and_shares_read_only_disks() {
        let folder = Folder::new();
        let disk = folder.path("root.img");
        std::fs::write(&disk, [7; 8192]).unwrap();
        let parent = parent(&format!("run --disk /a,readonly --disk {disk} --cpus 2"));
        let dir = folder.file("copies");
        let overlays = Overlays::create(&parent, &dir, 2).unwrap();
        assert_eq!(overlays.count(), 1);
        let copy = |child| dir.join(format!("{child}.disk1"));
        assert_eq!(std::fs::metadata(copy(1)).unwrap().len(), 8192);
        let words: Vec<_> = overlays.with_disks(parent.clone(), 1).words();
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let own = format!("--disk={}", copy(1).canonicalize().unwrap().display());
        assert_eq!(words, ["run", "--cpus=2", "--disk=/a,readonly", &own]);
        let error = Overlays::create(&parent, &dir, 2).unwrap_err().to_string();
        assert!(error.contains("0.disk1 exists and is not replaced"), "{error}");
        assert!(copy(0).exists(), "the refused command removes no file of another");
        drop(overlays);
        assert!(!copy(0).exists() && !copy(1).exists());
        let overlays = Overlays::create(&parent, &dir, 1).unwrap();
        overlays.keep();
        assert!(copy(0).exists());
    }

    #[test]
    fn disks_that_are_no_files_are_refused_with_advice() {
        let folder = Folder::new();
        let dir = folder.file("copies");
        let error = Overlays::create(&parent("run --disk /dev/null"), &dir, 1).unwrap_err().to_string();
        assert!(error.contains("/dev/null is not a regular file") && error.contains("btrfs"), "{error}");
        let none = Overlays::create(&parent("run --cpus 1"), &dir, 3).unwrap();
        assert_eq!(none.count(), 0);
        assert_eq!(none.with_disks(parent("run --cpus 1"), 0), parent("run --cpus 1"));
    }
}
