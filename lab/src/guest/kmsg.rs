//! Error reports in the kernel's log.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// Texts of kernel messages about errors of processors, clocks, memory or disks.
const COMPLAINTS: [&str; 17] = [
    "lockup",
    "self-detected stall",
    "detected stalls",
    "rcu_sched kthread starved",
    "blocked for more than",
    "clocksource: timekeeping watchdog",
    "Marking clocksource",
    "TSC unstable",
    "Clock Unsynchronized",
    "clock skew",
    "BUG:",
    "WARNING:",
    "Call Trace:",
    "Oops",
    "I/O error",
    // A page with poison was changed after it had been freed (mm/page_poison.c).
    "pagealloc:",
    "EXT4-fs error",
];
/// Message that Linux prints at boot on every machine with several AMD processors and no invariant
/// TSC. Linux then keeps kvm-clock.
const HARMLESS: &str = "Marking TSC unstable due to TSCs unsynchronized";
/// Largest number of messages that are reported, because a kernel can produce very many.
const MOST: usize = 5;

/// Returns the first error reports in the kernel's log.
pub(crate) fn complaints() -> Result<Vec<String>> {
    let mut file = File::options()
        .read(true)
        .custom_flags(i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0))
        .open("/dev/kmsg")
        .context("cannot read /dev/kmsg")?;
    let mut found = Vec::new();
    let mut buffer = vec![0; 8192];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => found.extend(complaint(&String::from_utf8_lossy(&buffer[..length]))),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            // The kernel overwrote lines before they were read. The next read continues with the
            // oldest line.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {}
            Err(error) => return Err(error).context("cannot read /dev/kmsg"),
        }
        if found.len() == MOST {
            break;
        }
    }
    Ok(found)
}

/// Returns the text of a record of /dev/kmsg, `prio,seq,time,flags;text`, if it is an error report
/// (Documentation/ABI/testing/dev-kmsg).
fn complaint(record: &str) -> Option<String> {
    let text = record.split_once(';')?.1.lines().next()?;
    let complains = COMPLAINTS.iter().any(|word| text.contains(word)) && !text.contains(HARMLESS);
    complains.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_reports_are_told_from_other_messages() {
        assert_eq!(complaint("6,1,100,-;Linux version 6.1\n"), None);
        assert_eq!(
            complaint("2,9,100,-;watchdog: BUG: soft lockup - CPU#0 stuck\n SUBSYSTEM=x\n").as_deref(),
            Some("watchdog: BUG: soft lockup - CPU#0 stuck")
        );
        assert!(complaint("3,1,1,-;pagealloc: memory corruption").is_some());
        assert!(complaint("4,1,1,-;clocksource: Marking clocksource 'tsc' as unstable").is_some());
        assert_eq!(complaint("4,1,1,-;tsc: Marking TSC unstable due to TSCs unsynchronized"), None);
        assert_eq!(complaint("nothing"), None);
    }
}
