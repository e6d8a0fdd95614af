//! Kernel command line of the bare-metal guest, by which a host configures it.

use crate::balloon::{MAX_ORDER, REPORT_FROM};
use crate::{HintMode, Inflation, ReportMode, Text, Windows, Workload, WorkloadError};
use core::fmt;
use core::str::FromStr;

/// Destination of a guest's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatsSink {
    /// Statistics page, every 10 ms.
    Page,
    /// Lines on the serial port, every 100 ms and every second.
    Serial,
}

/// Command line of the guest: `workload=SPEC stats=page|serial cpus=N tsc_khz=N`, in any order,
/// separated by spaces. Options of the balloon: `report=off|sync|async|hypercall report_from=ORDER
/// hints=off|demand|incremental inflate=SIZE,by=256|16384|ranges`.
///
/// The value is printed by [`Display`](fmt::Display) and parsed by [`FromStr`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuestArgs {
    /// Workload. Default: `idle`.
    pub workload: Workload,
    /// Destination of reports. Default: the serial port.
    pub stats: StatsSink,
    /// Number of vCPUs to start. The guest panics if one does not respond. Default: those that
    /// respond within 100 ms.
    pub cpus: Option<u32>,
    /// Frequency of the TSC in kHz. Default: the value from CPUID, or a measurement against the
    /// PIT.
    pub tsc_khz: Option<u32>,
    /// Method of giving freed memory back, if there is a balloon. Default: synchronously.
    pub report: ReportMode,
    /// Least order of a freed block that is reported at once, 0 to 10. Smaller blocks are reported
    /// once they have merged, or have been idle for some milliseconds. Default:
    /// [`REPORT_FROM`](crate::balloon::REPORT_FROM).
    pub report_from: u32,
    /// Method of reporting free memory, if there is a balloon. Default: on demand.
    pub hints: HintMode,
    /// Memory that is given to the balloon once after boot. Default: none.
    pub inflate: Option<Inflation>,
    /// Windows of the machine's virtio devices.
    pub windows: Windows,
}

impl GuestArgs {
    /// Returns arguments with every option at its default.
    #[must_use]
    pub fn new(workload: Workload) -> Self {
        Self {
            workload,
            stats: StatsSink::Serial,
            cpus: None,
            tsc_khz: None,
            report: ReportMode::default(),
            report_from: REPORT_FROM,
            hints: HintMode::default(),
            inflate: None,
            windows: Windows::default(),
        }
    }
}

/// Reason for which a command line was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmdlineError {
    /// The workload is invalid.
    Workload(WorkloadError),
    /// A value is invalid.
    Value {
        /// Name of the option.
        key: &'static str,
        /// Value that was found.
        found: Text,
        /// Description of the accepted values.
        accepted: &'static str,
    },
    /// The option does not exist.
    Unknown {
        /// Text that was found.
        found: Text,
    },
}

const OPTIONS: &str = "workload=, stats=, cpus=, tsc_khz=, report=, report_from=, hints= or inflate=";

// The command line's help text says 64 as well.
const _: () = assert!(crate::MAX_CPUS == 64);

impl fmt::Display for CmdlineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Workload(error) => error.fmt(f),
            Self::Value { key, found, accepted } => {
                write!(f, "command line: {key}={found} cannot be used; use {accepted}")
            }
            Self::Unknown { found } => {
                write!(f, "command line: '{found}' is unknown; use {OPTIONS}")
            }
        }
    }
}

impl core::error::Error for CmdlineError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Workload(error) => Some(error),
            _ => None,
        }
    }
}

impl FromStr for GuestArgs {
    type Err = CmdlineError;

    fn from_str(line: &str) -> Result<Self, CmdlineError> {
        let mut args = Self::new(Workload::new(crate::Pattern::Idle));
        for word in line.split_ascii_whitespace() {
            let (key, value) =
                word.split_once('=').ok_or(CmdlineError::Unknown { found: Text::new(word) })?;
            match key {
                "workload" => args.workload = value.parse().map_err(CmdlineError::Workload)?,
                "stats" if value == "page" => args.stats = StatsSink::Page,
                "stats" if value == "serial" => args.stats = StatsSink::Serial,
                "stats" => return Err(bad("stats", value, "page or serial")),
                "cpus" => {
                    let cpus = value.parse().ok().filter(|cpus| (1..=64).contains(cpus));
                    args.cpus = Some(cpus.ok_or(bad("cpus", value, "1 to 64"))?);
                }
                "tsc_khz" => {
                    let khz = value.parse().ok().filter(|khz| *khz >= 1000);
                    args.tsc_khz =
                        Some(khz.ok_or(bad("tsc_khz", value, "a number of kHz, at least 1000"))?);
                }
                _ => args.take_balloon(key, value, word)?,
            }
        }
        Ok(args)
    }
}

impl GuestArgs {
    fn take_balloon(&mut self, key: &str, value: &str, word: &str) -> Result<(), CmdlineError> {
        match key {
            "report" => {
                self.report = ReportMode::parse(value).ok_or(bad("report", value, ReportMode::ACCEPTED))?;
            }
            "report_from" => {
                let order = value.parse().ok().filter(|order| *order <= MAX_ORDER);
                self.report_from = order.ok_or(bad("report_from", value, "0 to 10"))?;
            }
            "hints" => self.hints = HintMode::parse(value).ok_or(bad("hints", value, HintMode::ACCEPTED))?,
            "inflate" => {
                let inflation = Inflation::parse(value).ok_or(bad("inflate", value, Inflation::ACCEPTED))?;
                self.inflate = Some(inflation);
            }
            "virtio_mmio.device" => {
                if !self.windows.add(value) {
                    return Err(bad("virtio_mmio.device", value, "SIZE@0xADDR:IRQ"));
                }
            }
            _ => return Err(CmdlineError::Unknown { found: Text::new(word) }),
        }
        Ok(())
    }
}

fn bad(key: &'static str, found: &str, accepted: &'static str) -> CmdlineError {
    CmdlineError::Value { key, found: Text::new(found), accepted }
}

impl fmt::Display for GuestArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = match self.stats {
            StatsSink::Page => "page",
            StatsSink::Serial => "serial",
        };
        write!(f, "workload={} stats={stats}", self.workload)?;
        if let Some(cpus) = self.cpus {
            write!(f, " cpus={cpus}")?;
        }
        if let Some(khz) = self.tsc_khz {
            write!(f, " tsc_khz={khz}")?;
        }
        if self.report != ReportMode::default() {
            write!(f, " report={}", self.report)?;
        }
        if self.report_from != REPORT_FROM {
            write!(f, " report_from={}", self.report_from)?;
        }
        if self.hints != HintMode::default() {
            write!(f, " hints={}", self.hints)?;
        }
        if let Some(inflate) = self.inflate {
            write!(f, " inflate={inflate}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    #[test]
    fn parses_what_it_prints() {
        for line in [
            "workload=idle stats=serial",
            "workload=uniform,ws=256M,rate=100k stats=page cpus=2 tsc_khz=2000000",
            "workload=zipf:0.99,fill=mix:30 stats=serial cpus=64",
            "workload=idle,alloc=4G,rounds=1 stats=page report=async hints=incremental inflate=7G,by=ranges",
            "workload=idle stats=page report=hypercall report_from=0 hints=off inflate=64M,by=16384",
        ] {
            assert_eq!(line.parse::<GuestArgs>().unwrap().to_string(), line);
        }
        assert_eq!("".parse::<GuestArgs>().unwrap().to_string(), "workload=idle stats=serial");
    }

    #[test]
    fn device_windows_are_taken_from_the_command_line() {
        let line =
            "virtio_mmio.device=512@0xfeb00e00:12 stats=page virtio_mmio.device=4K@4096:5:1 report=sync";
        let args: GuestArgs = line.parse().unwrap();
        assert!(args.windows.iter().eq([0xfeb0_0e00, 4096]));
        assert_eq!(args.to_string(), "workload=idle stats=page");
        let many = "virtio_mmio.device=512@0x1000:5 ".repeat(crate::MAX_WINDOWS + 1);
        assert_eq!(many.parse::<GuestArgs>().unwrap().windows.iter().count(), crate::MAX_WINDOWS);
    }

    #[test]
    fn refuses_with_the_reason() {
        for (line, reason) in [
            ("workload=busy", "is no pattern"),
            ("stats=disk", "stats=disk cannot be used; use page or serial"),
            ("cpus=0", "1 to 64"),
            ("cpus=65", "1 to 64"),
            ("tsc_khz=2GHz", "a number of kHz"),
            ("report=maybe", "use off, sync, async or hypercall"),
            ("report_from=11", "0 to 10"),
            ("hints=yes", "use off, demand or incremental"),
            ("inflate=1G,by=4", "SIZE,by=ranges"),
            ("virtio_mmio.device=512@0xzz:5", "SIZE@0xADDR:IRQ"),
            ("virtio_mmio.device=512@0x1000", "SIZE@0xADDR:IRQ"),
            ("virtio_mmio.device=512@0x0:5", "SIZE@0xADDR:IRQ"),
            ("quiet", "'quiet' is unknown"),
            ("root=/dev/vda", "'root=/dev/vda' is unknown"),
        ] {
            let error = line.parse::<GuestArgs>().unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_parsed_or_refused(line in "\\PC{0,100}") {
            let _ = line.parse::<GuestArgs>();
        }
    }
}
