//! Memory for a fleet of guests: a cgroup of its own with a limit, which is all that the kernel may take from it, and from it alone.
//!
//! From the kernel's Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/memory.rst for hosts whose memory controller is still
//! mounted there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long the kernel may take to let go of a cgroup whose processes have ended.
const REMOVE_LIMIT: Duration = Duration::from_secs(5);

/// Why there is no budget.
#[derive(Debug, thiserror::Error)]
#[error("no memory cgroup of its own: {0}")]
pub struct NoBudget(String);

/// The two versions of cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Its limit of memory, in bytes.
    fn limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }

    /// Memory that is used, in bytes.
    fn used(self) -> &'static str {
        match self {
            Self::One => "memory.usage_in_bytes",
            Self::Two => "memory.current",
        }
    }

    /// Where processes that were killed are counted, as `oom_kill N`.
    fn events(self) -> &'static str {
        match self {
            Self::One => "memory.oom_control",
            Self::Two => "memory.events",
        }
    }

    /// The path in a line of `/proc/PID/cgroup`, if the line is about this version's memory.
    fn path(self, line: &str) -> Option<&str> {
        match self {
            Self::One => {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next()?;
                fields.next().filter(|_| controllers.split(',').any(|name| name == "memory"))
            }
            Self::Two => line.strip_prefix("0::"),
        }
    }
}

/// A cgroup with a limit of memory and without swap. Removed when dropped; its processes must have ended.
#[derive(Debug)]
pub struct Budget {
    path: PathBuf,
    version: Version,
    /// Its list of processes.
    procs: File,
}

impl Budget {
    /// Makes one of `bytes` bytes under this process's own cgroup or beside it, and reads back that the limit is in place.
    ///
    /// # Errors
    /// If this host has no cgroup with memory, or this user must not make one.
    pub fn new(bytes: u64) -> Result<Self, NoBudget> {
        let read =
            |path: &str| fs::read_to_string(path).map_err(|error| NoBudget(format!("{path}: {error}")));
        let (mounts, own) = (read("/proc/self/mounts")?, read("/proc/self/cgroup")?);
        let mut whys = Vec::new();
        for version in [Version::Two, Version::One] {
            let parents = match parents(version, &mounts, &own) {
                Ok(parents) => parents,
                Err(why) => {
                    whys.push(why);
                    continue;
                }
            };
            for parent in parents {
                match Self::below(version, &parent, bytes) {
                    Ok(budget) => return Ok(budget),
                    Err(why) => whys.push(format!("{}: {why}", parent.display())),
                }
            }
        }
        Err(NoBudget(whys.join("; ")))
    }

    fn below(version: Version, parent: &Path, bytes: u64) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let has = |file: &str| {
            let text = fs::read_to_string(parent.join(file)).map_err(|error| format!("{file}: {error}"))?;
            Ok::<_, String>(text.split_whitespace().any(|word| word == "memory"))
        };
        if version == Version::Two && !has("cgroup.controllers")? {
            return Err("memory is not among its controllers".into());
        }
        if version == Version::Two && !has("cgroup.subtree_control")? {
            return Err("it does not pass memory on to those below it (cgroup.subtree_control)".into());
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("vmferry-density-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("cannot make a cgroup: {error}"))?;
        Self::limited(version, &path, bytes).inspect_err(|_| {
            // Nothing runs in it yet.
            let _ = fs::remove_dir(&path);
        })
    }

    fn limited(version: Version, path: &Path, bytes: u64) -> Result<Self, String> {
        set(path, version.limit(), &bytes.to_string())?;
        // Of version 1: memory and swap together.
        let no_swap = match version {
            Version::One => set(path, "memory.memsw.limit_in_bytes", &bytes.to_string()),
            Version::Two => set(path, "memory.swap.max", "0"),
        };
        match no_swap {
            Err(_) if !has_swap() => {}
            other => other?,
        }
        if version == Version::Two {
            // One guest is killed, not all of them.
            set(path, "memory.oom.group", "0")?;
        }
        let procs = OpenOptions::new().write(true).open(path.join("cgroup.procs"));
        let procs = procs.map_err(|error| format!("cgroup.procs: {error}"))?;
        Ok(Self { path: path.into(), version, procs })
    }

    /// Lets a process that has yet to be started run in it, from its first instruction on.
    ///
    /// # Errors
    /// If this process is out of file descriptors.
    pub fn enter(&self, command: &mut Command) -> io::Result<()> {
        use std::os::unix::process::CommandExt;
        let procs = self.procs.try_clone()?;
        // 0 is the process that writes.
        let enter = move || (&procs).write_all(b"0");
        // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes one system call on a
        // descriptor that it owns; its error is a number, for which nothing is allocated.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// Sees that process `pid`, just started, is in it, and makes it the first that the kernel takes where all of the host runs out.
    ///
    /// # Errors
    /// If it is elsewhere: then it must not go on.
    pub fn adopt(&self, pid: u32) -> io::Result<()> {
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let mut paths = own.lines().filter_map(|line| self.version.path(line));
        if !paths.any(|path| path.ends_with(&format!("/{name}"))) {
            return Err(io::Error::other(format!(
                "process {pid} is not in the cgroup {name} with the limit"
            )));
        }
        fs::write(format!("/proc/{pid}/oom_score_adj"), "1000")
    }

    /// Memory that it uses, in bytes.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn used(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.path.join(self.version.used()))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// How many of its processes the kernel killed because they needed more.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn kills(&self) -> io::Result<u64> {
        let file = self.version.events();
        let events = fs::read_to_string(self.path.join(file))?;
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        kills.ok_or_else(|| io::Error::other(format!("{file} has no oom_kill")))
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        let deadline = Instant::now() + REMOVE_LIMIT;
        while fs::remove_dir(&self.path).is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
            if Instant::now() > deadline {
                // Whoever looks for it must be able to find it.
                eprintln!("vmferry: the cgroup {} could not be removed", self.path.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Writes a limit and reads it back. Never makes the file: where there is none, there is no limit.
fn set(path: &Path, name: &str, value: &str) -> Result<(), String> {
    let file = path.join(name);
    let tell = |error: io::Error| format!("{name}: {error}");
    OpenOptions::new()
        .write(true)
        .open(&file)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(tell)?;
    let got = fs::read_to_string(&file).map_err(tell)?;
    let rounded = |text: &str| text.trim().parse::<u64>().map(|bytes| bytes / 4096);
    match (rounded(value), rounded(&got)) {
        (Ok(want), Ok(got)) if want == got => Ok(()),
        _ => Err(format!("{name} is {} after {value} was written", got.trim())),
    }
}

fn has_swap() -> bool {
    // A line of titles, then one for each.
    fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

/// Where a cgroup may be made: below this process's own, or beside it.
fn parents(version: Version, mounts: &str, own: &str) -> Result<Vec<PathBuf>, String> {
    let mount = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let right = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
            Version::Two => kind == "cgroup2",
        };
        right.then_some(place)
    });
    let mount = Path::new(mount.ok_or(match version {
        Version::One => "no memory cgroups of version 1 are mounted",
        Version::Two => "no cgroup2 file system is mounted",
    })?);
    let own = own.lines().find_map(|line| version.path(line)?.strip_prefix('/'));
    let own = own.ok_or_else(|| {
        format!(
            "this process is in no memory cgroup of version {}",
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
    fn it_is_made_below_or_beside_this_process() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /c/memory cgroup rw,memory 0 0\ncg /c/two cgroup2 rw 0 0\n";
        let at = |own: &str| parents(Version::Two, mounts, own);
        assert_eq!(at("4:memory:/x\n0::/a/b\n"), Ok(vec!["/c/two/a/b".into(), "/c/two/a".into()]));
        // The root has nothing beside it.
        assert_eq!(at("0::/\n").unwrap(), [PathBuf::from("/c/two/")]);
        assert!(at("4:memory:/x\n").unwrap_err().contains("version 2"));
        assert!(at("0::/../a\n").unwrap_err().contains("namespace"));
        let nothing = |version| parents(version, "proc /proc proc rw 0 0\n", "0::/\n").unwrap_err();
        assert!(nothing(Version::Two).contains("no cgroup2") && nothing(Version::One).contains("version 1"));
        let one = |own: &str| parents(Version::One, mounts, own);
        assert_eq!(one("4:cpu,memory:/x\n0::/a/b\n"), Ok(vec!["/c/memory/x".into(), "/c/memory".into()]));
        assert!(one("4:cpu:/x\n0::/a/b\n").unwrap_err().contains("version 1"));
    }

    #[test]
    fn where_no_limit_can_be_there_is_no_budget() {
        let folder = tempfile::tempdir().unwrap();
        let below = |controllers: &str, subtree: &str| {
            fs::write(folder.path().join("cgroup.controllers"), controllers).unwrap();
            fs::write(folder.path().join("cgroup.subtree_control"), subtree).unwrap();
            Budget::below(Version::Two, folder.path(), 1 << 30).unwrap_err()
        };
        assert!(below("cpu io\n", "\n").contains("not among its controllers"));
        assert!(below("cpu memory\n", "cpu\n").contains("subtree_control"));
        // A folder, but no cgroup: it has no files of its own, and is removed again.
        assert!(below("memory\n", "memory\n").contains("memory.max"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_limit_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(set(folder.path(), "memory.max", "4096"), Ok(()));
        // Longer than what is written over it: as if another limit held.
        fs::write(folder.path().join("memory.max"), "123456789").unwrap();
        assert!(set(folder.path(), "memory.max", "4096").unwrap_err().contains("is 409656789"));
    }

    #[test]
    fn a_process_of_its_own_lives_in_it() {
        let budget = match Budget::new(64 << 20) {
            Ok(budget) => budget,
            Err(why) => {
                writeln!(io::stdout(), "cgroup: not run: {why}").unwrap();
                return;
            }
        };
        let mut command = Command::new("sleep");
        budget.enter(command.arg("60")).unwrap();
        let child = crate::child::Reaped::spawn(&mut command).unwrap();
        budget.adopt(child.id()).unwrap();
        assert!(budget.adopt(std::process::id()).is_err());
        assert!(budget.used().unwrap() > 0 && budget.kills().unwrap() == 0);
        let path = budget.path.clone();
        drop((child, budget));
        assert!(!path.exists());
    }
}
