//! What a Linux guest of the lab tells of itself on its console.

use serde::{Deserialize, Serialize};

/// What such a line begins with.
pub const MARK: &str = "LAB-TOLD ";

/// One report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// Seconds since the guest booted, by its own clock.
    pub uptime_s: f64,
    /// Seconds since 1970, by its own clock.
    pub realtime_s: f64,
    /// How often its clocks were looked at: every 10 ms, if it could.
    pub ticks: u64,
    /// How often its monotonic clock had gone back.
    pub backwards: u64,
    /// The longest time between two looks since the last report for which everything was checked, in milliseconds.
    pub gap_ms: f64,
    /// The most by which its real time and its monotonic time have parted, in milliseconds.
    pub step_ms: f64,
    /// Processors that are on.
    pub cpus: u64,
    /// Whether everything was checked for this report, not just what is cheap.
    pub whole: bool,
    /// Pages that are written all the time.
    pub stress_pages: u64,
    /// How often one was.
    pub stress_writes: u64,
    /// How often one was not as it had been written.
    pub stress_wrong: u64,
    /// Whether the file that is kept is as it was.
    pub kept_good: Option<bool>,
    /// Records that were written to the disk and flushed.
    pub records: Option<u64>,
    /// Writes that failed.
    pub record_errors: u64,
    /// Flushed records that are not there.
    pub records_lost: Option<u64>,
    /// Lines that were sent back on TCP connections.
    pub echoes: u64,
    /// What its kernel complained of.
    pub complaints: Vec<String>,
}

impl Told {
    /// The report in a line of the console, if it is one. What stands before it in the line is another's.
    #[must_use]
    pub fn in_line(line: &str) -> Option<Self> {
        serde_json::from_str(line[line.find(MARK)? + MARK.len()..].trim_end()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_found_in_its_line() {
        let told = Told { ticks: 7, complaints: vec!["a \"b\"".into()], ..Told::default() };
        let line = format!("~ # {MARK}{}\r\n", serde_json::to_string(&told).unwrap());
        assert_eq!(Told::in_line(&line), Some(told));
        assert_eq!(Told::in_line("LAB-TOLD {\"ticks\":"), None);
        assert_eq!(Told::in_line("hello"), None);
    }
}
