//! Slow disk: a cgroup whose processes read and write one block device at a limited rate.
//!
//! The kernel enforces the limit (blk-throttle), so the processes see a really slow disk.

use crate::cgroup::{Cgroup, Version, places};
use std::fs;
use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// Reason why a slow disk cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up a slow disk: {0}")]
pub struct NoSlowDisk(String);

/// Limit of a disk for the processes in a cgroup. It is removed on drop. The processes must have
/// ended by then.
#[derive(Debug)]
pub struct SlowDisk(Cgroup);

impl SlowDisk {
    /// Limits the disk that has `folder` to `bytes_per_s` bytes per second in each direction.
    ///
    /// # Errors
    ///
    /// Fails if `folder` is on no block device, if this host has no cgroup that limits it, or if
    /// the user may not create one.
    pub fn below(folder: &Path, bytes_per_s: u64) -> Result<Self, NoSlowDisk> {
        let disk = disk(folder).map_err(NoSlowDisk)?;
        places("io", |version, parent| Self::make(version, parent, &disk, bytes_per_s))
            .or_else(|of_io| {
                let make = |version, parent: &Path| Self::make(version, parent, &disk, bytes_per_s);
                places("blkio", make).map_err(|of_blkio| format!("{of_io}; {of_blkio}"))
            })
            .map_err(NoSlowDisk)
    }

    fn make(version: Version, parent: &Path, disk: &str, bytes_per_s: u64) -> Result<Self, String> {
        let group = Cgroup::make(parent, "disk")?;
        let limits = match version {
            Version::One => vec![
                ("blkio.throttle.read_bps_device", format!("{disk} {bytes_per_s}")),
                ("blkio.throttle.write_bps_device", format!("{disk} {bytes_per_s}")),
            ],
            Version::Two => vec![("io.max", format!("{disk} rbps={bytes_per_s} wbps={bytes_per_s}"))],
        };
        for (name, limit) in limits {
            let file = group.path().join(name);
            fs::write(&file, &limit).map_err(|error| format!("{name}: {error}"))?;
            let got = fs::read_to_string(&file).map_err(|error| format!("{name}: {error}"))?;
            if !got.contains(disk) || !got.contains(&bytes_per_s.to_string()) {
                return Err(format!("{name} is '{}' after '{limit}' was written", got.trim()));
            }
        }
        Ok(Self(group))
    }

    /// Makes a process that has yet to be started run in this cgroup from its first instruction on.
    ///
    /// # Errors
    ///
    /// Fails if this process is out of file descriptors.
    pub fn enter(&self, command: &mut Command) -> io::Result<()> {
        self.0.enter(command)
    }
}

/// Returns the device that has `folder`, as `MAJOR:MINOR`. For a partition this is the whole disk,
/// because only whole disks have limits.
fn disk(folder: &Path) -> Result<String, String> {
    let told = |error: io::Error| format!("{}: {error}", folder.display());
    let device = fs::metadata(folder).map_err(told)?.st_dev();
    let name = format!("{}:{}", libc::major(device), libc::minor(device));
    let at = fs::canonicalize(format!("/sys/dev/block/{name}"))
        .map_err(|_| format!("{} is on no block device ({name})", folder.display()))?;
    if !at.join("partition").exists() {
        return Ok(name);
    }
    let whole = at.parent().map(|disk| disk.join("dev")).ok_or("a partition without a disk")?;
    fs::read_to_string(&whole)
        .map(|name| name.trim().to_owned())
        .map_err(|error| format!("{}: {error}", whole.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_do_not_exceed_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let slow = match SlowDisk::below(folder.path(), 4 << 20) {
            Ok(slow) => slow,
            Err(why) => return vmferry_testkit::skip(vmferry_testkit::Need::Root, why),
        };
        let mut command = Command::new("dd");
        command.args(["if=/dev/zero", "bs=1M", "count=2", "conv=fsync", "status=none"]);
        command.arg(format!("of={}", folder.path().join("file").display()));
        slow.enter(&mut command).unwrap();
        let began = std::time::Instant::now();
        assert!(command.status().unwrap().success());
        // The time has no upper bound on any host. The kernel lets a burst of a tenth of a second
        // pass.
        assert!(began.elapsed() > std::time::Duration::from_millis(200));
        let path = slow.0.path().to_path_buf();
        drop(slow);
        assert!(!path.exists());
        assert!(disk(Path::new("/proc")).unwrap_err().contains("no block device"));
    }
}
