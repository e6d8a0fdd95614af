//! Memory budget of a fleet of guests: a cgroup with a memory limit.
//!
//! When the fleet exceeds the limit, the kernel reclaims memory from this cgroup or kills processes
//! in it, and no others.
//!
//! Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/memory.rst for
//! hosts that still mount the memory controller there.

use crate::cgroup::{Cgroup, Version, places};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

/// Reason why a budget cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot create a memory cgroup: {0}")]
pub struct NoBudget(String);

/// Names of the files of the memory controller.
trait Memory {
    /// Returns the name of the file with the memory limit in bytes.
    fn limit(self) -> &'static str;
    /// Returns the name of the file with the used memory in bytes.
    fn used(self) -> &'static str;
    /// Returns the name of the file with the count of killed processes, in a line `oom_kill N`.
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

/// Cgroup with a memory limit and without swap, removed on drop. Its processes must have ended by
/// then.
#[derive(Debug)]
pub struct Budget {
    group: Cgroup,
    version: Version,
}

impl Budget {
    /// Creates a budget of `bytes` bytes below this process's own cgroup or its parent, and
    /// verifies the limit.
    ///
    /// # Errors
    ///
    /// Fails if this host has no cgroups with a memory controller, or the user may not create one.
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
            return Err("the memory controller is not among its controllers".into());
        }
        if version == Version::Two && !has("cgroup.subtree_control")? {
            return Err(
                "the memory controller is not enabled for its children (cgroup.subtree_control)".into()
            );
        }
        let group = Cgroup::make(parent, "density")?;
        Self::limit(version, &group, bytes)?;
        Ok(Self { group, version })
    }

    fn limit(version: Version, group: &Cgroup, bytes: u64) -> Result<(), String> {
        let path = group.path();
        set(path, version.limit(), &bytes.to_string())?;
        // In version 1 this file limits memory and swap together.
        let no_swap = match version {
            Version::One => set(path, "memory.memsw.limit_in_bytes", &bytes.to_string()),
            Version::Two => set(path, "memory.swap.max", "0"),
        };
        match no_swap {
            Err(_) if !has_swap() => {}
            other => other?,
        }
        if version == Version::Two {
            // The kernel must kill one guest, not all of them.
            set(path, "memory.oom.group", "0")?;
        }
        Ok(())
    }

    /// Makes a process that has yet to be started run in this cgroup from its first instruction on.
    ///
    /// # Errors
    ///
    /// Fails if this process is out of file descriptors.
    pub fn enter(&self, command: &mut Command) -> io::Result<()> {
        self.group.enter(command)
    }

    /// Checks that the new process `pid` is in this cgroup, and makes it the first that the kernel
    /// kills when the whole host runs out of memory.
    ///
    /// # Errors
    ///
    /// Fails if the process is in another cgroup. The caller must then stop the process.
    pub fn adopt(&self, pid: u32) -> io::Result<()> {
        self.group.has(self.version, "memory", pid)?;
        fs::write(format!("/proc/{pid}/oom_score_adj"), "1000")
    }

    /// Lowers the limit to the memory that is used now plus `more` bytes. The kernel reclaims
    /// memory, and kills a process that needs more.
    ///
    /// # Errors
    ///
    /// Fails if the kernel cannot reclaim enough memory to set the limit.
    pub fn squeeze(&self, more: u64) -> io::Result<()> {
        let limit = (self.used()? + more).to_string();
        // In version 1 the limit of memory and swap together must not be below the limit of memory
        // alone.
        set(self.group.path(), self.version.limit(), &limit).map_err(io::Error::other)?;
        match (self.version, has_swap()) {
            (Version::One, true) => {
                set(self.group.path(), "memory.memsw.limit_in_bytes", &limit).map_err(io::Error::other)
            }
            _ => Ok(()),
        }
    }

    /// Returns the memory that the cgroup uses, in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the file of the kernel cannot be read.
    pub fn used(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.group.path().join(self.version.used()))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// Returns how many processes of the cgroup the kernel killed because of the limit.
    ///
    /// # Errors
    ///
    /// Fails if the file of the kernel cannot be read or has no count.
    pub fn kills(&self) -> io::Result<u64> {
        let file = self.version.events();
        let events = fs::read_to_string(self.group.path().join(file))?;
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        kills.ok_or_else(|| io::Error::other(format!("{file} has no oom_kill")))
    }
}

/// Writes a limit and reads it back. Never creates the file: a missing file means that the kernel
/// has no such limit.
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
    // The file has a header line and then one line for each swap area.
    fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_budget_without_a_usable_memory_controller() {
        let folder = tempfile::tempdir().unwrap();
        let below = |controllers: &str, subtree: &str| {
            fs::write(folder.path().join("cgroup.controllers"), controllers).unwrap();
            fs::write(folder.path().join("cgroup.subtree_control"), subtree).unwrap();
            Budget::below(Version::Two, folder.path(), 1 << 30).unwrap_err()
        };
        assert!(below("cpu io\n", "\n").contains("not among its controllers"));
        assert!(below("cpu memory\n", "cpu\n").contains("subtree_control"));
        // A plain folder is not a cgroup: it has no control files, and the new folder is removed
        // again.
        assert!(below("memory\n", "memory\n").contains("cgroup.procs"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn limit_that_does_not_hold_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(set(folder.path(), "memory.max", "4096"), Ok(()));
        // The old text is longer than the new one, so the file reads as another limit.
        fs::write(folder.path().join("memory.max"), "123456789").unwrap();
        assert!(set(folder.path(), "memory.max", "4096").unwrap_err().contains("is 409656789"));
    }

    #[test]
    fn budget_holds_a_process_and_is_removed_on_drop() {
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
