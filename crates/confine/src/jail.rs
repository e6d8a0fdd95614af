//! Jail: a separate root directory and a user other than root, for a process that root has started.
//!
//! The new root is an empty file system in memory, in a mount namespace of this process. It
//! disappears with the process, and the host sees only an empty folder. The files of the plan are
//! bound into the new root at their own paths, so that a path has the same meaning as on the
//! command line. Device nodes are created anew and belong to the new user, who therefore needs no
//! group to use them. No file in the jail can be executed, because the program is already in
//! memory.

use crate::capabilities::{self, KeptCapability};
use crate::files::{File, Use};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Gid, Uid};
use rustix::thread::UnshareFlags;
use std::ffi::{CString, OsString};
use std::fs::Metadata;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// Jail that a process enters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jail {
    /// Folder at which the new root is mounted. The folder must be empty and unused, and is created
    /// if it does not exist.
    pub folder: PathBuf,
    /// Id of the user that the process has in the jail. It must be neither 0 nor `u32::MAX`.
    pub uid: u32,
    /// Id of the only group that the process has in the jail. It must be neither 0 nor `u32::MAX`.
    pub gid: u32,
}

/// Error that entering a jail returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JailError {
    /// The process does not run as root.
    #[error("only root can make a jail; start this process as root, or without a jail")]
    NotRoot,
    /// The user or the group in the jail would be root: its number is 0, or `u32::MAX`, with which
    /// setresuid(2) changes nothing.
    #[error(
        "the user and the group in the jail must not be root, and 4294967295 is not an id; use those of a user who owns nothing else"
    )]
    StaysRoot,
    /// A path contains `..` and would therefore name another file in the jail.
    #[error(
        "the path {} contains '..', which would mean another file in the jail; write the path without '..'",
        .0.display()
    )]
    Upwards(PathBuf),
    /// An output file does not exist or cannot be opened. It is not created, because root must not
    /// create files in a folder of another user.
    #[error(
        "the output file {} must exist before the jail is made: {source}; create it, and give it to the user of the jail",
        .path.display()
    )]
    Output {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// A path leads over a link that a user other than root could have placed.
    #[error(
        "the path {} leads over a link that another user can have placed; name the file that the link leads to",
        .0.display()
    )]
    Link(PathBuf),
    /// A device is named by a path that a user other than root could have changed.
    #[error(
        "the device {} cannot be in the jail, because another user can have replaced it; name it by a path in /dev whose folders only \
         root can write (not in /dev/shm)",
        .0.display()
    )]
    Device(PathBuf),
    /// A system call failed.
    #[error("cannot enter the jail: cannot {what}")]
    Refused {
        /// Step that failed.
        what: String,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Returns a function for `map_err` that makes the error of the step `what` from its cause.
fn doing<E: Into<io::Error>>(what: impl FnOnce() -> String) -> impl FnOnce(E) -> JailError {
    move |error| JailError::Refused { what: what(), source: error.into() }
}

/// Mount options of the new root, which is small because it contains only mount points and device
/// nodes.
const ROOT: &std::ffi::CStr = c"mode=0755,size=4m,nr_inodes=4k";

impl Jail {
    /// Moves the process into the jail, which contains `files` and no other file of the host. The
    /// user of the jail has only the capabilities in `keep`. The process must have one thread.
    pub(crate) fn enter(&self, files: &[File], keep: &[KeptCapability]) -> Result<(), JailError> {
        self.check()?;
        let cwd = std::env::current_dir().map_err(doing(|| "tell the current folder".into()))?;
        let files = absolute(files)?;
        let root = self.mount()?;
        for file in &files {
            self.place(&root, file)?;
        }
        proc_in(&root)?;
        folders(&inside(&root, &cwd)).map_err(doing(|| format!("make {} in the jail", cwd.display())))?;
        change_root(&root, &cwd)?;
        self.become_user(keep)
    }

    /// Calls `work` with the file access of the jail's user and group. The kernel also disables the
    /// capabilities of root that concern files (capabilities(7), "Effect of user ID changes on
    /// capabilities").
    ///
    /// Use this function to open files before the process enters the jail. These files stay open
    /// in the jail. With the rights of root, they could be files that the user must not read.
    ///
    /// Only the calling thread gets this access, so the process must have one thread. The thread
    /// has no supplementary groups afterwards. The process is not dumpable until it enters the
    /// jail.
    ///
    /// # Errors
    /// Returns an error if the process does not run as root, if the user or the group of the jail
    /// is root, or if the kernel does not change the rights. `work` is not called then.
    pub fn as_user<T>(&self, work: impl FnOnce() -> T) -> Result<T, JailError> {
        self.check()?;
        let show = || format!("access files as user {} of group {}", self.uid, self.gid);
        let _before = FileAccess::take((self.uid, self.gid)).map_err(doing(show))?;
        Ok(work())
    }

    /// Checks that root makes the jail, and that the user and the group of the jail are not root.
    fn check(&self) -> Result<(), JailError> {
        if !rustix::process::geteuid().is_root() {
            return Err(JailError::NotRoot);
        }
        // For setresuid(2), the highest number means that the id does not change.
        if [self.uid, self.gid].iter().any(|id| matches!(*id, 0 | u32::MAX)) {
            return Err(JailError::StaysRoot);
        }
        Ok(())
    }

    /// Leaves the host's namespaces, and mounts the empty root. Returns its path.
    fn mount(&self) -> Result<PathBuf, JailError> {
        let show = || format!("mount a file system at {}", self.folder.display());
        folders(&self.folder).map_err(doing(show))?;
        let root = self.folder.canonicalize().map_err(doing(show))?;
        let apart = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
        // SAFETY: the flags do not unshare the descriptors, and the process has no other thread.
        unsafe { rustix::thread::unshare_unsafe(apart) }
            .map_err(doing(|| "leave the host's namespaces".into()))?;
        // From now on, the host does not see the mounts of this process.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).map_err(doing(|| "make its mounts private".into()))?;
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        rustix::mount::mount("vmferry", &root, "tmpfs", flags, ROOT).map_err(doing(show))?;
        Ok(root)
    }

    /// Places `file` under `root` at its own path. A file that does not exist is omitted.
    fn place(&self, root: &Path, file: &File) -> Result<(), JailError> {
        let show = || format!("place {} in the jail", file.path.display());
        let Some(source) = open_source(&file.path)? else { return Ok(()) };
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&source).map_err(doing(show))?.st_mode);
        let target = inside(root, &file.path);
        if let Some(parent) = target.parent() {
            folders(parent).map_err(doing(show))?;
        }
        if matches!(kind, FileType::CharacterDevice | FileType::BlockDevice) {
            // The new node belongs to the user of the jail, so it must be the device that root has
            // chosen.
            let meta = device(&file.path).ok_or_else(|| JailError::Device(file.path.clone()))?;
            let writes = if file.use_for == Use::ReadDevice { Mode::empty() } else { Mode::WUSR };
            rustix::fs::mknodat(CWD, &target, kind, Mode::RUSR | writes, meta.rdev()).map_err(doing(show))?;
            return std::os::unix::fs::chown(&target, Some(self.uid), Some(self.gid)).map_err(doing(show));
        }
        if kind == FileType::Directory {
            folders(&target).map_err(doing(show))?;
        } else {
            std::fs::File::options().create(true).append(true).open(&target).map_err(doing(show))?;
        }
        // The path could lead to another file now.
        let source = format!("/proc/self/fd/{}", source.as_raw_fd());
        rustix::mount::mount_bind_recursive(source, &target).map_err(doing(show))?;
        restrict_mounts(&target, file.use_for == Use::Read).map_err(doing(show))
    }

    fn become_user(&self, keep: &[KeptCapability]) -> Result<(), JailError> {
        let show = || format!("become user {} of group {}", self.uid, self.gid);
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        // rustix changes the credentials of the calling thread, which is the only one.
        rustix::thread::set_thread_groups(&[]).map_err(doing(show))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(doing(show))?;
        let refused =
            |why| doing(|| "give up the capabilities of root".into())(io::Error::other::<String>(why));
        capabilities::narrow(keep).map_err(refused)?;
        // Without this, the kernel would remove all capabilities when the user changes.
        rustix::thread::set_keep_capabilities(true).map_err(doing(show))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(doing(show))?;
        if all_ids().map_err(doing(show))? != ([self.uid; 3], [self.gid; 3]) {
            return Err(doing(show)(io::Error::other("the kernel has not changed every id")));
        }
        rustix::thread::set_keep_capabilities(false).map_err(doing(show))?;
        capabilities::give_up(keep).map_err(refused)?;
        // The kernel made root the owner of /proc/self when the user changed, but the process must
        // read its pagemap there.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable).map_err(doing(show))
    }
}

/// Opens the file at `path` for a bind mount. Returns `None` if it does not exist.
///
/// Root follows only links that root has placed. The user of the jail may own a folder on the path.
/// With a link there, that user could place any file of the host in the jail.
fn open_source(path: &Path) -> Result<Option<OwnedFd>, JailError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let Some(real) = without_links(path)? else { return Ok(None) };
    match rustix::fs::openat2(CWD, &real, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Another user has just replaced a part of the path by a link.
        Err(Errno::LOOP) => Err(JailError::Link(path.into())),
        // Linux before 5.6, or a container that forbids the call.
        Err(Errno::NOSYS | Errno::PERM) => Ok(rustix::fs::open(&real, flags, Mode::empty()).ok()),
        opened => Ok(opened.ok()),
    }
}

/// Returns `path` with its links replaced by what they lead to, or `None` if a link cannot be
/// followed.
fn without_links(path: &Path) -> Result<Option<PathBuf>, JailError> {
    /// Largest number of links on a path, as in Linux (path_resolution(7)).
    const MOST: u32 = 40;
    let refused = || JailError::Link(path.into());
    let mut rest: Vec<OsString> = parts(path);
    let (mut real, mut links) = (PathBuf::from("/"), 0);
    while let Some(part) = rest.pop() {
        if part == ".." {
            real.pop();
            continue;
        }
        let Ok(link) = std::fs::read_link(real.join(&part)) else {
            real.push(part);
            continue;
        };
        links += 1;
        if !only_root_writes(&real) {
            return Err(refused());
        }
        if links > MOST {
            return Ok(None);
        }
        if link.is_absolute() {
            real = PathBuf::from("/");
        }
        rest.extend(parts(&link));
    }
    Ok(Some(real))
}

/// Returns the names on `path`, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.collect()
}

/// Returns true if only root can write to `folder` and to the folders above it.
fn only_root_writes(folder: &Path) -> bool {
    let roots = |meta: Metadata| meta.uid() == 0 && meta.mode() & 0o022 == 0;
    folder.ancestors().all(|folder| std::fs::metadata(folder).is_ok_and(roots))
}

/// Returns the real, effective and saved user ids and group ids of the calling thread.
fn all_ids() -> io::Result<([u32; 3], [u32; 3])> {
    let (mut users, mut groups) = ([0_u32; 3], [0_u32; 3]);
    let ([ruid, euid, suid], [rgid, egid, sgid]) = (&mut users, &mut groups);
    // SAFETY: each call writes three numbers, to which the references give exclusive access.
    let failed = unsafe { libc::getresuid(ruid, euid, suid) != 0 || libc::getresgid(rgid, egid, sgid) != 0 };
    if failed { Err(io::Error::last_os_error()) } else { Ok((users, groups)) }
}

/// User id and group id with which the calling thread accessed files before it took other ones. The
/// thread gets the former ids back when this value is dropped.
struct FileAccess((u32, u32));

impl FileAccess {
    /// Lets the calling thread access files with the user id and the group id in `ids` only.
    fn take(ids: (u32, u32)) -> io::Result<Self> {
        rustix::thread::set_thread_groups(&[])?;
        let before = Self(set_file_ids(ids));
        // The calls do not report an error, but return the ids in force. An invalid id changes
        // nothing.
        if set_file_ids((u32::MAX, u32::MAX)) != ids || capabilities::reach_all_files() {
            return Err(io::Error::other("the kernel leaves the rights of root in force"));
        }
        Ok(before)
    }
}

impl Drop for FileAccess {
    fn drop(&mut self) {
        set_file_ids(self.0);
    }
}

/// Sets the user id and the group id for the file access of the calling thread (setfsuid(2)).
/// Returns the previous ids.
fn set_file_ids((uid, gid): (u32, u32)) -> (u32, u32) {
    // SAFETY: the calls take numbers, not memory, and change only the calling thread.
    let (uid, gid) = unsafe { (libc::setfsuid(uid), libc::setfsgid(gid)) };
    (uid.cast_unsigned(), gid.cast_unsigned())
}

/// Returns the metadata of a device in /dev, if no user other than root can have replaced it: no
/// other user may write to a folder on the path, or on the path to which a link leads.
fn device(path: &Path) -> Option<Metadata> {
    let real = path.canonicalize().ok()?;
    let roots = |path: &Path| path.starts_with("/dev") && path.parent().is_some_and(only_root_writes);
    (roots(path) && roots(&real)).then(|| std::fs::metadata(&real).ok()).flatten()
}

/// Returns the files with absolute paths, sorted so that a folder precedes its files, and without
/// those that lie in a folder that is placed anyway.
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
    // If a path has two entries, the one that permits more comes first.
    all.sort_by(|a, b| a.path.cmp(&b.path).then(b.use_for.cmp(&a.use_for)));
    let mut placed: Vec<File> = Vec::new();
    for file in all {
        // The jail has its own /proc.
        let placed_already = file.path.starts_with("/proc")
            || placed.iter().any(|other| {
                other.path == file.path
                    || other.path.is_dir()
                        && (matches!(other.use_for, Use::Folder | Use::Sockets) || file.use_for == Use::Read)
                        && file.path.starts_with(&other.path)
            });
        if !placed_already {
            placed.push(file);
        }
    }
    Ok(placed)
}

/// Forbids devices, set-user-id bits and execution on the mount at `path` and on all mounts below
/// it, and writing if `read_only` is true.
///
/// Linux before 5.12 can change only one mount at a time. On such a kernel, only the mount at
/// `path` is restricted.
fn restrict_mounts(path: &Path, read_only: bool) -> io::Result<()> {
    let mut set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    if read_only {
        set |= libc::MOUNT_ATTR_RDONLY;
        flags |= MountFlags::RDONLY;
    }
    match set_on_all_mounts(path, set) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            rustix::mount::mount_remount(path, flags, c"").map_err(io::Error::from)
        }
        done => done,
    }
}

/// Sets the attributes `set` on the mount at `path` and on all mounts below it (mount_setattr(2)).
fn set_on_all_mounts(path: &Path, set: u64) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let attributes = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the kernel only reads the name, which ends with a null byte, and the attributes,
    // whose size it is told. Both live until the call returns.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            name.as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn folders(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Mounts /proc in the jail, without the processes of other users. Kernels before 5.8 share one set
/// of options between all mounts of /proc. These options must not change, so on such a kernel the
/// host's /proc is bound instead, with the processes of other users.
fn proc_in(root: &Path) -> Result<(), JailError> {
    let target = root.join("proc");
    folders(&target).map_err(doing(|| "make /proc in the jail".into()))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount("proc", &target, "proc", flags, c"hidepid=invisible")
        .map_err(io::Error::from)
        .or_else(|_| {
            rustix::mount::mount_bind("/proc", &target)?;
            restrict_mounts(&target, true)
        })
        .map_err(doing(|| "mount /proc in the jail".into()))
}

/// Makes `root` the root directory, and `cwd` in it the current folder. The old root is unmounted.
fn change_root(root: &Path, cwd: &Path) -> Result<(), JailError> {
    let show = || "change the root".to_owned();
    std::env::set_current_dir(root).map_err(doing(show))?;
    // See pivot_root(2): the call stacks the old root on the new one, and the old root is then
    // unmounted.
    rustix::process::pivot_root(".", ".").map_err(doing(show))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(doing(show))?;
    let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount_remount("/", flags, c"").map_err(doing(show))?;
    std::env::set_current_dir(cwd).map_err(doing(show))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::{Need, skip};

    /// Mounts a file system below another one, binds both at a new place, and makes them read-only
    /// there. Returns the outcome of writing to the lower one. Only this thread sees the mounts.
    fn write_below_a_bound_folder(folder: &Path) -> io::Result<io::Result<()>> {
        // SAFETY: the flag does not unshare the descriptors.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        for path in [folder.join("from"), folder.join("from/below")] {
            std::fs::create_dir(&path)?;
            rustix::mount::mount("vmferry", &path, "tmpfs", MountFlags::empty(), ROOT)?;
        }
        let to = folder.join("to");
        std::fs::create_dir(&to)?;
        rustix::mount::mount_bind_recursive(folder.join("from"), &to)?;
        std::fs::write(to.join("below/first"), "")?;
        // A kernel without the call fails here with ENOSYS.
        set_on_all_mounts(&to, 0)?;
        restrict_mounts(&to, true)?;
        Ok(std::fs::write(to.join("below/second"), ""))
    }

    #[test]
    fn mounts_below_a_bound_folder_are_restricted_too() {
        if !rustix::process::geteuid().is_root() {
            return skip(Need::Root, "the test needs root to mount file systems");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let outcome = std::thread::spawn(move || write_below_a_bound_folder(&path)).join().unwrap();
        match outcome {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
                skip(Need::Kernel, format!("mounts cannot be restricted recursively: {error}"));
            }
            outcome => {
                let refused = outcome.unwrap().unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem, "{refused}");
            }
        }
    }

    #[test]
    fn files_in_a_placed_folder_are_not_placed_again() {
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
    fn jail_accepts_only_devices_that_root_has_named() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("disk");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let jail = Jail { folder: folder.path().into(), uid: 5, gid: 5 };
        let error = jail.place(folder.path(), &File::new(&link, Use::Device)).unwrap_err();
        assert!(matches!(error, JailError::Link(_)), "{error}");
        // Every user can write to this folder.
        let shared = tempfile::Builder::new().prefix("vmferry-jail").tempdir_in("/dev/shm").unwrap();
        let link = shared.path().join("disk");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(device(&link).is_none() && device(Path::new("/dev/null")).is_some());
        let error = jail.place(folder.path(), &File::new(&link, Use::Device)).unwrap_err();
        assert!(matches!(error, JailError::Link(_)), "{error}");
    }

    #[test]
    fn root_follows_only_its_own_links() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        let path = |name: &str| real.join(name);
        std::fs::create_dir(path("inner")).unwrap();
        std::fs::write(path("inner/file"), "").unwrap();
        std::os::unix::fs::symlink("inner", path("link")).unwrap();
        for refused in ["link", "link/file", "link/../inner/file"] {
            let error = without_links(&path(refused)).unwrap_err();
            assert!(matches!(error, JailError::Link(_)), "{refused}: {error}");
        }
        assert_eq!(without_links(&path("inner/file")).unwrap(), Some(path("inner/file")));
        assert!(open_source(&path("inner/file")).unwrap().is_some());
        assert!(open_source(&path("missing")).unwrap().is_none());
        // On most hosts, /bin and the shell are links.
        let shell = Path::new("/bin/sh");
        assert_eq!(without_links(shell).unwrap(), shell.canonicalize().ok());
    }

    #[test]
    fn jail_refuses_root_as_its_user() {
        let root = rustix::process::geteuid().is_root();
        for (uid, gid) in [(0, 5), (5, 0), (u32::MAX, 5), (5, u32::MAX)] {
            let jail = Jail { folder: "/nonexistent/jail".into(), uid, gid };
            let errors = [jail.enter(&[], &[]).unwrap_err(), jail.as_user(|| ()).unwrap_err()];
            for error in errors {
                assert_eq!(matches!(error, JailError::StaysRoot), root, "{uid} {gid}: {error}");
                assert_eq!(matches!(error, JailError::NotRoot), !root, "{uid} {gid}: {error}");
            }
        }
    }

    #[test]
    fn all_ids_are_those_of_the_process() {
        let (users, groups) = all_ids().unwrap();
        assert_eq!(users[..2], [rustix::process::getuid(), rustix::process::geteuid()].map(Uid::as_raw));
        assert_eq!(groups[..2], [rustix::process::getgid(), rustix::process::getegid()].map(Gid::as_raw));
    }
}
