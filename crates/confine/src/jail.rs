//! A root directory of its own, and a user who is not root, for a process that was started as root.
//!
//! The new root is an empty file system in memory, in a mount namespace of this process's own: nothing of it is to be cleaned up, and the
//! host sees an empty folder. What the process was told of is bound into it at the same paths, so no path means something else than on the
//! command line; devices are made anew for the new user, who needs to be in no group for that. Nothing is executed: the program is in
//! memory already.

use crate::files::{File, Use};
use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Gid, Uid};
use rustix::thread::UnshareFlags;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// The jail that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jail {
    /// Where the new root is mounted: a folder, empty and of no other use. It is made if it is not there.
    pub folder: PathBuf,
    /// Who the process is then: not root.
    pub uid: u32,
    /// And its one group.
    pub gid: u32,
}

/// Why there is no jail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JailError {
    /// Only root can make one.
    #[error(
        "--jail: only root can make a jail; start vmferry as root, or leave --jail: an ordinary user's process is confined without it"
    )]
    NotRoot,
    /// That would be none.
    #[error(
        "--jail: the user in the jail must not be root: say --uid and --gid of somebody who has nothing else"
    )]
    StaysRoot,
    /// A path that means something else in there.
    #[error("--jail: the path {} goes upwards; write it without '..'", .0.display())]
    Upwards(PathBuf),
    /// A file that is to be written and that root does not make for somebody else.
    #[error("--jail: {} must be there, and be written by the jail's user: make it, and give it to that user", .path.display())]
    Output {
        /// Which.
        path: PathBuf,
        /// Why it cannot be used.
        #[source]
        source: io::Error,
    },
    /// A device by another name.
    #[error(
        "--jail: {} is a device: name it by a path in /dev all of whose folders only root can write (not in /dev/shm), so that nobody else \
         can have put something else there",
        .0.display()
    )]
    Device(PathBuf),
    /// A system call failed.
    #[error("--jail: cannot {what}")]
    Refused {
        /// What was to be done.
        what: String,
        /// Why it could not.
        #[source]
        source: io::Error,
    },
}

/// Something that is done on the way, for errors.
fn doing<E: Into<io::Error>>(what: impl FnOnce() -> String) -> impl FnOnce(E) -> JailError {
    move |error| JailError::Refused { what: what(), source: error.into() }
}

/// Small: nothing but mount points and nodes of devices is in it.
const ROOT: &std::ffi::CStr = c"mode=0755,size=4m,nr_inodes=4k";

impl Jail {
    /// Moves the process, which must have one thread, into the jail, with `files` and nothing else of the host's.
    pub(crate) fn enter(&self, files: &[File]) -> Result<(), JailError> {
        if !rustix::process::geteuid().is_root() {
            return Err(JailError::NotRoot);
        }
        if self.uid == 0 || self.gid == 0 {
            return Err(JailError::StaysRoot);
        }
        let cwd = std::env::current_dir().map_err(doing(|| "tell the current folder".into()))?;
        let files = absolute(files)?;
        let root = self.mount()?;
        for file in &files {
            self.place(&root, file)?;
        }
        proc_in(&root)?;
        folders(&inside(&root, &cwd)).map_err(doing(|| format!("make {} in the jail", cwd.display())))?;
        change_root(&root, &cwd)?;
        self.become_user()
    }

    /// Makes the empty root.
    fn mount(&self) -> Result<PathBuf, JailError> {
        let show = || format!("mount a file system at {}", self.folder.display());
        folders(&self.folder).map_err(doing(show))?;
        let root = self.folder.canonicalize().map_err(doing(show))?;
        let apart = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
        // SAFETY: descriptors are not unshared, and no thread but this one is there.
        unsafe { rustix::thread::unshare_unsafe(apart) }
            .map_err(doing(|| "leave the host's namespaces".into()))?;
        // What is mounted from here on, the host does not see.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).map_err(doing(|| "keep its mounts to itself".into()))?;
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        rustix::mount::mount("vmferry", &root, "tmpfs", flags, ROOT).map_err(doing(show))?;
        Ok(root)
    }

    /// Brings `file` to where it is outside, under `root`. What is not there is left out.
    fn place(&self, root: &Path, file: &File) -> Result<(), JailError> {
        let show = || format!("bring {} into the jail", file.path.display());
        let Ok(meta) = std::fs::metadata(&file.path) else { return Ok(()) };
        let target = inside(root, &file.path);
        if let Some(parent) = target.parent() {
            folders(parent).map_err(doing(show))?;
        }
        let kind = meta.file_type();
        if kind.is_char_device() || kind.is_block_device() {
            // It becomes the user's, so it must be what root means.
            let meta = device(&file.path).ok_or_else(|| JailError::Device(file.path.clone()))?;
            let kind = if kind.is_block_device() { FileType::BlockDevice } else { FileType::CharacterDevice };
            let writes = if file.use_for == Use::ReadDevice { Mode::empty() } else { Mode::WUSR };
            rustix::fs::mknodat(CWD, &target, kind, Mode::RUSR | writes, meta.rdev()).map_err(doing(show))?;
            return std::os::unix::fs::chown(&target, Some(self.uid), Some(self.gid)).map_err(doing(show));
        }
        if meta.is_dir() {
            folders(&target).map_err(doing(show))?;
        } else {
            std::fs::File::options().create(true).append(true).open(&target).map_err(doing(show))?;
        }
        rustix::mount::mount_bind_recursive(&file.path, &target).map_err(doing(show))?;
        let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        if file.use_for == Use::Read {
            flags |= MountFlags::RDONLY;
        }
        rustix::mount::mount_remount(&target, flags, c"").map_err(doing(show))
    }

    fn become_user(&self) -> Result<(), JailError> {
        let show = || format!("become user {} of group {}", self.uid, self.gid);
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        // Of the calling thread, as the kernel has it: there is no other.
        rustix::thread::set_thread_groups(&[]).map_err(doing(show))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(doing(show))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(doing(show))?;
        // The change of user has made /proc/self root's, and the process must read its own page map there.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable).map_err(doing(show))
    }
}

/// What a device in /dev is, if nobody but root can have said so: neither by a link nor by anything on the way.
fn device(path: &Path) -> Option<Metadata> {
    let real = path.canonicalize().ok()?;
    let roots = |path: &Path| {
        let mut folders = path.ancestors().skip(1);
        path.starts_with("/dev")
            && folders.all(|folder| {
                std::fs::metadata(folder).is_ok_and(|meta| meta.uid() == 0 && meta.mode() & 0o022 == 0)
            })
    };
    (roots(path) && roots(&real)).then(|| std::fs::metadata(&real).ok()).flatten()
}

/// All but what lies in folders that are there anyway, with absolute paths, outer ones first.
fn absolute(files: &[File]) -> Result<Vec<File>, JailError> {
    let mut all = Vec::new();
    for file in files {
        let path =
            std::path::absolute(&file.path).map_err(doing(|| format!("find {}", file.path.display())))?;
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(JailError::Upwards(file.path.clone()));
        }
        all.push(File { path, use_for: file.use_for });
    }
    // Of what is there twice, that with which more can be done.
    all.sort_by(|a, b| a.path.cmp(&b.path).then(b.use_for.cmp(&a.use_for)));
    let mut placed: Vec<File> = Vec::new();
    for file in all {
        // There is one /proc, and it is not the host's.
        let there = file.path.starts_with("/proc")
            || placed.iter().any(|other| {
                other.path == file.path
                    || other.path.is_dir()
                        && (matches!(other.use_for, Use::Folder | Use::Sockets) || file.use_for == Use::Read)
                        && file.path.starts_with(&other.path)
            });
        if !there {
            placed.push(file);
        }
    }
    Ok(placed)
}

fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn folders(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Processes of other users are not to be seen. A kernel before 5.8 has one set of such options for all, which are not ours to change.
fn proc_in(root: &Path) -> Result<(), JailError> {
    let target = root.join("proc");
    folders(&target).map_err(doing(|| "make /proc in the jail".into()))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount("proc", &target, "proc", flags, c"hidepid=invisible")
        .or_else(|_| rustix::mount::mount_bind("/proc", &target))
        .map_err(doing(|| "mount /proc in the jail".into()))
}

/// Makes `root` the root, and `cwd` in it the current folder; the old root is gone.
fn change_root(root: &Path, cwd: &Path) -> Result<(), JailError> {
    let show = || "change the root".to_owned();
    std::env::set_current_dir(root).map_err(doing(show))?;
    // pivot_root(2): the old root comes to lie over the new one, and goes.
    rustix::process::pivot_root(".", ".").map_err(doing(show))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(doing(show))?;
    let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount_remount("/", flags, c"").map_err(doing(show))?;
    std::env::set_current_dir(cwd).map_err(doing(show))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_a_folder_that_is_there_is_not_brought_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let files = [
            File::new(path("disk"), Use::Write),
            File::new(folder.path(), Use::Folder),
            File::new("/etc/hosts", Use::Read),
            File::new("/etc/hosts", Use::Read),
            File::new("/proc", Use::Read),
        ];
        let mut wanted = vec![File::new("/etc/hosts", Use::Read), File::new(folder.path(), Use::Folder)];
        wanted.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(absolute(&files).unwrap(), wanted);
        let error = absolute(&[File::new("a/../b", Use::Read)]).unwrap_err();
        assert!(error.to_string().contains("'..'"), "{error}");
    }

    #[test]
    fn a_device_is_one_that_root_has_named() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("disk");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let jail = Jail { folder: folder.path().into(), uid: 5, gid: 5 };
        let error = jail.place(folder.path(), &File::new(&link, Use::Device)).unwrap_err();
        assert!(matches!(error, JailError::Device(_)), "{error}");
        // Anybody can write to that folder.
        let shared = tempfile::Builder::new().prefix("vmferry-jail").tempdir_in("/dev/shm").unwrap();
        let link = shared.path().join("disk");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(device(&link).is_none() && device(Path::new("/dev/null")).is_some());
        let error = jail.place(folder.path(), &File::new(&link, Use::Device)).unwrap_err();
        assert!(matches!(error, JailError::Device(_)), "{error}");
    }

    #[test]
    fn nobody_stays_root_in_it() {
        let jail = Jail { folder: "/nonexistent/jail".into(), uid: 0, gid: 5 };
        let error = jail.enter(&[]).unwrap_err();
        let root = rustix::process::geteuid().is_root();
        assert!(matches!(error, JailError::StaysRoot) == root && matches!(error, JailError::NotRoot) != root);
    }
}
