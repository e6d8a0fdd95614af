//! Report of a Linux guest of the lab on its console.

use serde::{Deserialize, Serialize};

/// Start of a line with a report.
pub const MARK: &str = "LAB-TOLD ";

/// Report of a guest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestReport {
    /// Seconds since the guest booted, by its own clock.
    pub uptime_s: f64,
    /// Seconds since 1970, by its own clock.
    pub realtime_s: f64,
    /// Number of reads of the clocks. The guest reads them every 10 ms if it gets a processor.
    pub ticks: u64,
    /// Number of steps back of the monotonic clock.
    pub backwards: u64,
    /// Longest time between two reads since the last report with all checks, in milliseconds.
    pub gap_ms: f64,
    /// Largest divergence of real time and monotonic time, in milliseconds.
    pub step_ms: f64,
    /// Number of processors that are online.
    pub cpus: u64,
    /// Set if all checks were run for this report, and not only the cheap ones.
    pub whole: bool,
    /// Number of pages that are written all the time.
    pub stress_pages: u64,
    /// Number of writes of a page.
    pub stress_writes: u64,
    /// Number of checks that found a page with wrong content.
    pub stress_wrong: u64,
    /// Set if the kept file is unchanged. `None` if it was not checked.
    pub kept_good: Option<bool>,
    /// Number of records that were written to the disk and flushed. `None` without a disk.
    pub records: Option<u64>,
    /// Number of failed writes of records.
    pub record_errors: u64,
    /// Number of flushed records that are missing or damaged. `None` if they were not checked.
    pub records_lost: Option<u64>,
    /// Number of lines that were echoed on TCP connections.
    pub echoes: u64,
    /// Error reports of the guest's kernel.
    pub complaints: Vec<String>,
}

impl GuestReport {
    /// Returns the report in a line of the console, if there is one. Other text may come before it
    /// in the line.
    #[must_use]
    pub fn in_line(line: &str) -> Option<Self> {
        serde_json::from_str(line[line.find(MARK)? + MARK.len()..].trim_end()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_found_in_a_line() {
        let report = GuestReport { ticks: 7, complaints: vec!["a \"b\"".into()], ..GuestReport::default() };
        let line = format!("~ # {MARK}{}\r\n", serde_json::to_string(&report).unwrap());
        assert_eq!(GuestReport::in_line(&line), Some(report));
        assert_eq!(GuestReport::in_line("LAB-TOLD {\"ticks\":"), None);
        assert_eq!(GuestReport::in_line("hello"), None);
    }
}
