//! Memory for a fleet of guests: a cgroup of its own with a limit, which is all that the kernel may take from it, and from it alone.
//!
//! From the kernel's Documentation/admin-guide/cgroup-v2.rst.

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
#[error("no memory cgroup (v2) of its own: {0}")]
pub struct NoBudget(String);

/// A cgroup with a limit of memory and without swap. Removed when dropped; its processes must have ended.
#[derive(Debug)]
pub struct Budget {
    path: PathBuf,
    /// Its list of processes.
    procs: File,
}

impl Budget {
    /// Makes one of `bytes` bytes under this process's own cgroup or beside it, and reads back that the limit is in place.
    ///
    /// # Errors
    /// If this host has no cgroup v2 with memory, or this user must not make one.
    pub fn new(bytes: u64) -> Result<Self, NoBudget> {
        let read =
            |path: &str| fs::read_to_string(path).map_err(|error| NoBudget(format!("{path}: {error}")));
        let (mounts, own) = (read("/proc/self/mounts")?, read("/proc/self/cgroup")?);
        let mut whys = Vec::new();
        for parent in parents(&mounts, &own).map_err(NoBudget)? {
            match Self::below(&parent, bytes) {
                Ok(budget) => return Ok(budget),
                Err(why) => whys.push(format!("{}: {why}", parent.display())),
            }
        }
        Err(NoBudget(whys.join("; ")))
    }

    fn below(parent: &Path, bytes: u64) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let has = |file: &str| {
            let text = fs::read_to_string(parent.join(file)).map_err(|error| format!("{file}: {error}"))?;
            Ok::<_, String>(text.split_whitespace().any(|word| word == "memory"))
        };
        if !has("cgroup.controllers")? {
            return Err("memory is not among its controllers (cgroup v1 may have it)".into());
        }
        if !has("cgroup.subtree_control")? {
            return Err("it does not pass memory on to those below it (cgroup.subtree_control)".into());
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("vmferry-density-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("cannot make a cgroup: {error}"))?;
        Self::limited(&path, bytes).inspect_err(|_| {
            // Nothing runs in it yet.
            let _ = fs::remove_dir(&path);
        })
    }

    fn limited(path: &Path, bytes: u64) -> Result<Self, String> {
        set(path, "memory.max", &bytes.to_string())?;
        match set(path, "memory.swap.max", "0") {
            Err(_) if !has_swap() => {}
            other => other?,
        }
        // One guest is killed, not all of them.
        set(path, "memory.oom.group", "0")?;
        let procs = OpenOptions::new().write(true).open(path.join("cgroup.procs"));
        let procs = procs.map_err(|error| format!("cgroup.procs: {error}"))?;
        Ok(Self { path: path.into(), procs })
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
        if !own.lines().any(|line| line.starts_with("0::") && line.ends_with(&format!("/{name}"))) {
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
        let text = fs::read_to_string(self.path.join("memory.current"))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// How many of its processes the kernel killed because they needed more.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn kills(&self) -> io::Result<u64> {
        let events = fs::read_to_string(self.path.join("memory.events"))?;
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        kills.ok_or_else(|| io::Error::other("memory.events has no oom_kill"))
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
fn parents(mounts: &str, own: &str) -> Result<Vec<PathBuf>, String> {
    let mount = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then_some(place)
    });
    let mount = Path::new(mount.ok_or("no cgroup2 file system is mounted")?);
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.ok_or("this process is in no cgroup of version 2")?;
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
        let at = |own: &str| parents(mounts, own);
        assert_eq!(at("4:memory:/x\n0::/a/b\n"), Ok(vec!["/c/two/a/b".into(), "/c/two/a".into()]));
        // The root has nothing beside it.
        assert_eq!(at("0::/\n").unwrap(), [PathBuf::from("/c/two/")]);
        assert!(at("4:memory:/x\n").unwrap_err().contains("version 2"));
        assert!(at("0::/../a\n").unwrap_err().contains("namespace"));
        assert!(parents("proc /proc proc rw 0 0\n", "0::/\n").unwrap_err().contains("no cgroup2"));
    }

    #[test]
    fn where_no_limit_can_be_there_is_no_budget() {
        let folder = tempfile::tempdir().unwrap();
        let below = |controllers: &str, subtree: &str| {
            fs::write(folder.path().join("cgroup.controllers"), controllers).unwrap();
            fs::write(folder.path().join("cgroup.subtree_control"), subtree).unwrap();
            Budget::below(folder.path(), 1 << 30).unwrap_err()
        };
        assert!(below("cpu io\n", "\n").contains("cgroup v1 may have it"));
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
