//! Cgroups for child processes that may use only a part of the host's resources.
//!
//! Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst, and
//! Documentation/admin-guide/cgroup-v1 for hosts that still mount controllers there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest time for which removal of a cgroup whose processes have ended is retried.
const REMOVE_LIMIT: Duration = Duration::from_secs(5);

/// Version of the cgroup interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    One,
    Two,
}

impl Version {
    /// Returns the path in a line of `/proc/PID/cgroup` if the line is about this version's
    /// `controller`.
    fn path<'a>(self, controller: &str, line: &'a str) -> Option<&'a str> {
        match self {
            Self::One => {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next()?;
                fields.next().filter(|_| controllers.split(',').any(|name| name == controller))
            }
            Self::Two => line.strip_prefix("0::"),
        }
    }
}

/// Cgroup that is created without limits and removed on drop. Its processes must have ended by
/// then.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    /// The cgroup's `cgroup.procs` file, opened for writing.
    procs: File,
}

/// Calls `make` for each cgroup that may be a parent of a new one, and returns its first success.
///
/// # Errors
///
/// Returns the reasons why each parent or version of cgroups was unusable.
pub(crate) fn places<T>(
    controller: &str,
    make: impl Fn(Version, &Path) -> Result<T, String>,
) -> Result<T, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let (mounts, own) = (read("/proc/self/mounts")?, read("/proc/self/cgroup")?);
    let mut whys = Vec::new();
    for version in [Version::Two, Version::One] {
        let parents = match parents(version, controller, &mounts, &own) {
            Ok(parents) => parents,
            Err(why) => {
                whys.push(why);
                continue;
            }
        };
        for parent in parents {
            match make(version, &parent) {
                Ok(made) => return Ok(made),
                Err(why) => whys.push(format!("{}: {why}", parent.display())),
            }
        }
    }
    Err(whys.join("; "))
}

impl Cgroup {
    /// Creates a cgroup below `parent`. Its name contains `what`.
    pub(crate) fn make(parent: &Path, what: &str) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("vmferry-{what}-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("cannot make a cgroup: {error}"))?;
        match OpenOptions::new().write(true).open(path.join("cgroup.procs")) {
            Ok(procs) => Ok(Self { path, procs }),
            Err(error) => {
                // Nothing runs in the new cgroup yet, so it can be removed.
                let _ = fs::remove_dir(&path);
                Err(format!("cgroup.procs: {error}"))
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a process that has yet to be started run in this cgroup from its first instruction on.
    pub(crate) fn enter(&self, command: &mut Command) -> io::Result<()> {
        use std::os::unix::process::CommandExt;
        let procs = self.procs.try_clone()?;
        // A write of 0 moves the process that writes.
        let enter = move || (&procs).write_all(b"0");
        // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes
        // one system call on a descriptor that it owns. Its error is a number, for which nothing is
        // allocated.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// Returns `Ok` if process `pid` is in this cgroup.
    ///
    /// # Errors
    ///
    /// Fails if the process is in another cgroup or its list of cgroups cannot be read.
    pub(crate) fn has(&self, version: Version, controller: &str, pid: u32) -> io::Result<()> {
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let mut paths = own.lines().filter_map(|line| version.path(controller, line));
        if paths.any(|path| path.ends_with(&format!("/{name}"))) {
            return Ok(());
        }
        Err(io::Error::other(format!("process {pid} is not in the cgroup {name} with the limit")))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + REMOVE_LIMIT;
        while fs::remove_dir(&self.path).is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
            if Instant::now() > deadline {
                // The operator needs the path to remove the cgroup by hand.
                eprintln!("vmferry: the cgroup {} could not be removed", self.path.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns the cgroups that may be the parent of a new one: the one of this process, then its
/// parent.
fn parents(version: Version, controller: &str, mounts: &str, own: &str) -> Result<Vec<PathBuf>, String> {
    let mount = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let right = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|option| option == controller),
            Version::Two => kind == "cgroup2",
        };
        right.then_some(place)
    });
    let mount = Path::new(mount.ok_or_else(|| match version {
        Version::One => format!("no {controller} cgroups of version 1 are mounted"),
        Version::Two => "no cgroup2 file system is mounted".into(),
    })?);
    let own = own.lines().find_map(|line| version.path(controller, line)?.strip_prefix('/'));
    let own = own.ok_or_else(|| {
        format!(
            "this process is in no {controller} cgroup of version {}",
            match version {
                Version::One => 1,
                Version::Two => 2,
            }
        )
    })?;
    if own.split('/').any(|part| part == "..") {
        return Err("this process's cgroup is not in this cgroup namespace".into());
    }
    let own = mount.join(own);
    let beside = own.parent().filter(|parent| parent.starts_with(mount)).map(Path::to_path_buf);
    Ok([own].into_iter().chain(beside).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_the_own_cgroup_and_its_parent() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /c/memory cgroup rw,memory 0 0\ncg /c/two cgroup2 rw 0 0\n";
        let at = |own: &str| parents(Version::Two, "memory", mounts, own);
        assert_eq!(at("4:memory:/x\n0::/a/b\n"), Ok(vec!["/c/two/a/b".into(), "/c/two/a".into()]));
        // The root cgroup has no parent.
        assert_eq!(at("0::/\n").unwrap(), [PathBuf::from("/c/two/")]);
        assert!(at("4:memory:/x\n").unwrap_err().contains("version 2"));
        assert!(at("0::/../a\n").unwrap_err().contains("namespace"));
        let nothing = |version| parents(version, "memory", "proc /proc proc rw 0 0\n", "0::/\n").unwrap_err();
        assert!(nothing(Version::Two).contains("no cgroup2") && nothing(Version::One).contains("version 1"));
        let one = |own: &str| parents(Version::One, "memory", mounts, own);
        assert_eq!(one("4:cpu,memory:/x\n0::/a/b\n"), Ok(vec!["/c/memory/x".into(), "/c/memory".into()]));
        assert!(one("4:cpu:/x\n0::/a/b\n").unwrap_err().contains("version 1"));
    }
}
