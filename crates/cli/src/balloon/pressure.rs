//! Memory pressure of the host: pressure stall information (Linux,
//! Documentation/accounting/psi.rst).

use anyhow::{Context, Result, anyhow};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Meter of the share of time in which at least one task waits for memory.
#[derive(Debug)]
pub(super) struct Pressure {
    /// Pressure file. It stays open because the thread that reads it may not open files.
    file: File,
    last: (Instant, u64),
}

impl Pressure {
    /// Opens the pressure file of this process's cgroup, whose limit may be lower than the host's
    /// memory, or else of the host.
    pub(super) fn open() -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok();
        let own = own.as_deref().and_then(cgroup_file);
        let host = PathBuf::from("/proc/pressure/memory");
        let opened = |path| File::open(path).ok().filter(|file| stalled(file).is_ok());
        let file = own.into_iter().chain([host]).find_map(opened);
        let file = file.context(
            "the memory pressure of this host is unknown: cannot read /proc/pressure/memory (Linux with CONFIG_PSI, and psi=1 \
             on its command line)",
        )?;
        let now = stalled(&file)?;
        Ok(Self { file, last: (Instant::now(), now) })
    }

    /// Returns the share since the last call, from 0 to 1.
    pub(super) fn share_since_last(&mut self) -> Result<f64> {
        let now = (Instant::now(), stalled(&self.file)?);
        let last = std::mem::replace(&mut self.last, now);
        Ok(share(now.1.saturating_sub(last.1), now.0.duration_since(last.0).as_secs_f64()))
    }
}

fn share(stalled_us: u64, seconds: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a share for a decision")]
    let stalled = stalled_us as f64 / 1e6;
    if seconds > 0.0 { (stalled / seconds).min(1.0) } else { 0.0 }
}

/// Returns the pressure file of the cgroup that `/proc/self/cgroup` names (version 2).
fn cgroup_file(text: &str) -> Option<PathBuf> {
    let group = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(group).join("memory.pressure"))
}

/// Returns the microseconds in which at least one task has waited for memory so far.
fn stalled(file: &File) -> Result<u64> {
    let mut bytes = [0; 512];
    let read = file.read_at(&mut bytes, 0)?;
    let text = String::from_utf8_lossy(&bytes[..read]);
    parse(&text).ok_or_else(|| anyhow!("this is not pressure stall information: {text:?}"))
}

fn parse(text: &str) -> Option<u64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_ascii_whitespace().find_map(|word| word.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_and_cgroup_of_the_kernels_text_are_parsed() {
        let text = "some avg10=0.12 avg60=0.00 avg300=0.00 total=81235\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(parse(text), Some(81235));
        for wrong in ["", "full avg10=0 total=3", "some avg10=0.1", "some total=x"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(
            cgroup_file("1:name=x:/y\n0::/user.slice/a\n"),
            Some("/sys/fs/cgroup/user.slice/a/memory.pressure".into())
        );
        assert_eq!(cgroup_file("1:memory:/x\n"), None);
    }

    #[test]
    fn share_refers_to_the_time_between_two_calls() {
        assert!((share(500_000, 1.0) - 0.5).abs() < 1e-9);
        assert!((share(9_000_000, 1.0) - 1.0).abs() < 1e-9);
        assert!(share(5, 0.0).abs() < 1e-9);
    }
}
