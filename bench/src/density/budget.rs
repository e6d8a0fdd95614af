//! Memory for a fleet of guests: a cgroup of its own with a limit, which is all that the kernel may take from it, and from it alone.
//!
//! From the kernel's Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/memory.rst for hosts whose memory controller is still
//! mounted there.

use crate::cgroup::{Cgroup, Version, places};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

/// Why there is no budget.
#[derive(Debug, thiserror::Error)]
#[error("no memory cgroup of its own: {0}")]
pub struct NoBudget(String);

/// What the files of the memory controller are called.
trait Memory {
    /// Its limit of memory, in bytes.
    fn limit(self) -> &'static str;
    /// Memory that is used, in bytes.
    fn used(self) -> &'static str;
    /// Where processes that were killed are counted, as `oom_kill N`.
    fn events(self) -> &'static str;
}

impl Memory for Version {
    fn limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }

    fn used(self) -> &'static str {
        match self {
            Self::One => "memory.usage_in_bytes",
            Self::Two => "memory.current",
        }
    }

    fn events(self) -> &'static str {
        match self {
            Self::One => "memory.oom_control",
            Self::Two => "memory.events",
        }
    }
}

/// A cgroup with a limit of memory and without swap. Removed when dropped; its processes must have ended.
#[derive(Debug)]
pub struct Budget {
    group: Cgroup,
    version: Version,
}

impl Budget {
    /// Makes one of `bytes` bytes under this process's own cgroup or beside it, and reads back that the limit is in place.
    ///
    /// # Errors
    /// If this host has no cgroup with memory, or this user must not make one.
    pub fn new(bytes: u64) -> Result<Self, NoBudget> {
        let below = |version, parent: &Path| Self::below(version, parent, bytes);
        places("memory", below).map_err(NoBudget)
    }

    fn below(version: Version, parent: &Path, bytes: u64) -> Result<Self, String> {
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
        let group = Cgroup::make(parent, "density")?;
        Self::limit(version, &group, bytes)?;
        Ok(Self { group, version })
    }

    fn limit(version: Version, group: &Cgroup, bytes: u64) -> Result<(), String> {
        let path = group.path();
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
        Ok(())
    }

    /// Lets a process that has yet to be started run in it, from its first instruction on.
    ///
    /// # Errors
    /// If this process is out of file descriptors.
    pub fn enter(&self, command: &mut Command) -> io::Result<()> {
        self.group.enter(command)
    }

    /// Sees that process `pid`, just started, is in it, and makes it the first that the kernel takes where all of the host runs out.
    ///
    /// # Errors
    /// If it is elsewhere: then it must not go on.
    pub fn adopt(&self, pid: u32) -> io::Result<()> {
        self.group.has(self.version, "memory", pid)?;
        fs::write(format!("/proc/{pid}/oom_score_adj"), "1000")
    }

    /// Leaves its processes no more than they use now and `more` bytes: what can be given back is, and who needs more is killed.
    ///
    /// # Errors
    /// If the kernel cannot, because too little of it can be given back.
    pub fn squeeze(&self, more: u64) -> io::Result<()> {
        let limit = (self.used()? + more).to_string();
        // Of version 1 memory and swap together are never less than memory alone.
        set(self.group.path(), self.version.limit(), &limit).map_err(io::Error::other)?;
        match (self.version, has_swap()) {
            (Version::One, true) => {
                set(self.group.path(), "memory.memsw.limit_in_bytes", &limit).map_err(io::Error::other)
            }
            _ => Ok(()),
        }
    }

    /// Memory that it uses, in bytes.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn used(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.group.path().join(self.version.used()))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// How many of its processes the kernel killed because they needed more.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn kills(&self) -> io::Result<u64> {
        let file = self.version.events();
        let events = fs::read_to_string(self.group.path().join(file))?;
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        kills.ok_or_else(|| io::Error::other(format!("{file} has no oom_kill")))
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(below("memory\n", "memory\n").contains("cgroup.procs"));
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
            Err(why) => return vmferry_testkit::skip(vmferry_testkit::Need::Root, why),
        };
        let mut command = Command::new("sleep");
        budget.enter(command.arg("60")).unwrap();
        let child = crate::child::Reaped::spawn(&mut command).unwrap();
        budget.adopt(child.id()).unwrap();
        assert!(budget.adopt(std::process::id()).is_err());
        assert!(budget.used().unwrap() > 0 && budget.kills().unwrap() == 0);
        budget.squeeze(1 << 20).unwrap();
        let path = budget.group.path().to_path_buf();
        drop((child, budget));
        assert!(!path.exists());
    }
}
