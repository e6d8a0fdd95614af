//! Lines that a guest writes to its serial port.

use crate::stalls::HIST_BUCKETS;
use crate::worker::{Corrupt, Report, Worker};
use crate::{Every, Text};
use core::fmt;
use core::str::FromStr;

/// Line of a guest whose memory is filled and whose workload begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadyLine {
    /// Number of vCPUs.
    pub cpus: u64,
    /// Pages with content.
    pub data_pages: u64,
    /// Pages of the working set.
    pub ws_pages: u64,
    /// Frequency of the TSC in kHz.
    pub tsc_khz: u64,
    /// Guest clock in microseconds.
    pub t_us: u64,
}

/// Line of a guest. It is printed by [`Display`](fmt::Display) without the newline, and parsed by
/// [`FromStr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// `READY cpus=.. data_pages=.. ws_pages=.. tsc_khz=.. t_us=..`
    Ready(ReadyLine),
    /// `S cpu t_us writes stall_max_us stall_sum_us stalls`, every 100 ms. All values except the
    /// clock count since the vCPU's last `S` line.
    Stats {
        /// Index of the vCPU.
        cpu: u64,
        /// Guest clock in microseconds.
        t_us: u64,
        /// Number of writes.
        writes: u64,
        /// Longest stall in microseconds.
        stall_max_us: u64,
        /// Sum of the stalls in microseconds.
        stall_sum_us: u64,
        /// Number of stalls of 8 us and more.
        stalls: u64,
    },
    /// `H cpu b0 b1 .. b15`, every second. Histogram of the stalls since the vCPU's last `H` line,
    /// by length.
    Hist {
        /// Index of the vCPU.
        cpu: u64,
        /// Counts per bucket. See [`HIST_BUCKETS`].
        hist: [u64; HIST_BUCKETS],
    },
    /// `CORRUPT page=.. want=.. got=.. word=.. cpu=..`. The values of `want` and `got` are
    /// hexadecimal.
    Corrupt {
        /// Index of the vCPU.
        cpu: u64,
        /// Check that failed.
        corrupt: Corrupt,
    },
    /// `A cpu t_us rounds alloc_mib freed_mib reports reported_mib free_max_us`, every second while
    /// the guest allocates. Activity of a vCPU since start.
    Alloc {
        /// Index of the vCPU.
        cpu: u64,
        /// Guest clock in microseconds.
        t_us: u64,
        /// Number of completed rounds.
        rounds: u64,
        /// Allocated memory, in MiB.
        alloc_mib: u64,
        /// Freed memory, in MiB.
        freed_mib: u64,
        /// Number of reports sent.
        reports: u64,
        /// Reported memory, in MiB.
        reported_mib: u64,
        /// Duration of the longest free, in microseconds.
        free_max_us: u64,
    },
    /// `I pages requests alloc_us send_us total_us`. The inflation that the command line requested
    /// is done.
    Inflated {
        /// Number of pages given to the balloon.
        pages: u64,
        /// Number of requests.
        requests: u64,
        /// Time spent allocating, in microseconds.
        alloc_us: u64,
        /// Time spent sending, in microseconds.
        send_us: u64,
        /// Total time, in microseconds.
        total_us: u64,
    },
    /// `PANIC reason`. The guest has given up.
    Panic(Text),
}

/// Error of a line that cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineError {
    /// Text of the line.
    pub found: Text,
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is not a line of a guest of this version", self.found)
    }
}

impl core::error::Error for LineError {}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready(ReadyLine { cpus, data_pages, ws_pages, tsc_khz, t_us }) => write!(
                f,
                "READY cpus={cpus} data_pages={data_pages} ws_pages={ws_pages} tsc_khz={tsc_khz} t_us={t_us}"
            ),
            Self::Stats { cpu, t_us, writes, stall_max_us, stall_sum_us, stalls } => {
                write!(f, "S {cpu} {t_us} {writes} {stall_max_us} {stall_sum_us} {stalls}")
            }
            Self::Hist { cpu, hist } => {
                write!(f, "H {cpu}")?;
                hist.iter().try_for_each(|count| write!(f, " {count}"))
            }
            Self::Corrupt { cpu, corrupt: Corrupt { page, word, want, got } } => {
                write!(f, "CORRUPT page={page} want={want:#x} got={got:#x} word={word} cpu={cpu}")
            }
            Self::Alloc { cpu, t_us, rounds, alloc_mib, freed_mib, reports, reported_mib, free_max_us } => {
                let rest = [alloc_mib, freed_mib, reports, reported_mib, free_max_us];
                write!(f, "A {cpu} {t_us} {rounds}")?;
                rest.into_iter().try_for_each(|number| write!(f, " {number}"))
            }
            Self::Inflated { pages, requests, alloc_us, send_us, total_us } => {
                write!(f, "I {pages} {requests} {alloc_us} {send_us} {total_us}")
            }
            Self::Panic(reason) => write!(f, "PANIC {reason}"),
        }
    }
}

impl FromStr for Line {
    type Err = LineError;

    fn from_str(line: &str) -> Result<Self, LineError> {
        let line = line.trim_end();
        parse(line).ok_or(LineError { found: Text::new(line) })
    }
}

fn parse(line: &str) -> Option<Line> {
    let (word, rest) = line.split_once(' ')?;
    let mut parts = rest.split(' ');
    let parsed = match word {
        "PANIC" => return Some(Line::Panic(Text::new(rest))),
        "READY" => Line::Ready(ReadyLine {
            cpus: keyed(&mut parts, "cpus")?,
            data_pages: keyed(&mut parts, "data_pages")?,
            ws_pages: keyed(&mut parts, "ws_pages")?,
            tsc_khz: keyed(&mut parts, "tsc_khz")?,
            t_us: keyed(&mut parts, "t_us")?,
        }),
        "S" => Line::Stats {
            cpu: number(parts.next()?)?,
            t_us: number(parts.next()?)?,
            writes: number(parts.next()?)?,
            stall_max_us: number(parts.next()?)?,
            stall_sum_us: number(parts.next()?)?,
            stalls: number(parts.next()?)?,
        },
        "H" => {
            let cpu = number(parts.next()?)?;
            let mut hist = [0; HIST_BUCKETS];
            for count in &mut hist {
                *count = number(parts.next()?)?;
            }
            Line::Hist { cpu, hist }
        }
        "A" => Line::Alloc {
            cpu: number(parts.next()?)?,
            t_us: number(parts.next()?)?,
            rounds: number(parts.next()?)?,
            alloc_mib: number(parts.next()?)?,
            freed_mib: number(parts.next()?)?,
            reports: number(parts.next()?)?,
            reported_mib: number(parts.next()?)?,
            free_max_us: number(parts.next()?)?,
        },
        "I" => Line::Inflated {
            pages: number(parts.next()?)?,
            requests: number(parts.next()?)?,
            alloc_us: number(parts.next()?)?,
            send_us: number(parts.next()?)?,
            total_us: number(parts.next()?)?,
        },
        "CORRUPT" => {
            let page = keyed(&mut parts, "page")?;
            let want = keyed(&mut parts, "want")?;
            let got = keyed(&mut parts, "got")?;
            let word = keyed(&mut parts, "word")?;
            Line::Corrupt { cpu: keyed(&mut parts, "cpu")?, corrupt: Corrupt { page, word, want, got } }
        }
        _ => return None,
    };
    parts.next().is_none().then_some(parsed)
}

fn number(text: &str) -> Option<u64> {
    if text.starts_with('+') {
        return None;
    }
    match text.strip_prefix("0x") {
        Some(hex) if !hex.starts_with('+') => u64::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None => text.parse().ok(),
    }
}

fn keyed<'a>(parts: &mut impl Iterator<Item = &'a str>, key: &str) -> Option<u64> {
    let (found, value) = parts.next()?.split_once('=')?;
    if found == key { number(value) } else { None }
}

/// Reporter of one vCPU, which creates `S` lines every 100 ms and `H` lines every second.
#[derive(Clone, Debug)]
pub struct SerialReporter {
    cpu: u64,
    stats: Every,
    hist: Every,
    last: Option<Report>,
    last_hist: [u64; HIST_BUCKETS],
}

const STATS_NS: u64 = 100_000_000;
const HIST_NS: u64 = 1_000_000_000;

impl SerialReporter {
    /// Returns the reporter of vCPU `cpu`, from `now_ns` on.
    #[must_use]
    pub fn new(cpu: u64, now_ns: u64) -> Self {
        let (stats, hist) = (Every::new(STATS_NS, now_ns), Every::new(HIST_NS, now_ns));
        Self { cpu, stats, hist, last: None, last_hist: [0; HIST_BUCKETS] }
    }

    /// Returns the lines that are due: none, the `S` line, or both.
    #[inline]
    pub fn poll(&mut self, worker: &mut Worker, now_ns: u64) -> [Option<Line>; 2] {
        if self.stats.due(now_ns) { self.lines(worker, now_ns) } else { [None, None] }
    }

    #[cold]
    fn lines(&mut self, worker: &mut Worker, now_ns: u64) -> [Option<Line>; 2] {
        let report = worker.report(now_ns);
        let last = self.last.replace(report);
        let since = |of: fn(&Report) -> u64| of(&report).wrapping_sub(last.as_ref().map_or(0, of));
        let stats = Line::Stats {
            cpu: self.cpu,
            t_us: report.t_us,
            writes: since(|report| report.writes),
            stall_max_us: report.window_max_us,
            stall_sum_us: since(|report| report.stall_sum_us),
            stalls: since(|report| report.stalls),
        };
        let hist = self.hist.due(now_ns).then(|| {
            let hist =
                core::array::from_fn(|bucket| report.hist[bucket].wrapping_sub(self.last_hist[bucket]));
            self.last_hist = report.hist;
            Line::Hist { cpu: self.cpu, hist }
        });
        [Some(stats), hist]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Workload};
    use proptest::prelude::*;
    use std::string::ToString;
    use std::vec::Vec;

    #[test]
    fn parses_what_it_prints() {
        let corrupt = Corrupt { page: 5, word: 1, want: 0x7f, got: u64::MAX };
        let ready = ReadyLine { cpus: 2, data_pages: 3, ws_pages: 4, tsc_khz: 5, t_us: 6 };
        let lines = [
            Line::Ready(ready),
            Line::Stats { cpu: 0, t_us: 1, writes: 2, stall_max_us: 3, stall_sum_us: 4, stalls: 5 },
            Line::Hist { cpu: 1, hist: core::array::from_fn(|bucket| bucket as u64) },
            Line::Corrupt { cpu: 1, corrupt },
            Line::Panic(Text::new("no memory map")),
            Line::Alloc {
                cpu: 1,
                t_us: 2,
                rounds: 3,
                alloc_mib: 4,
                freed_mib: 5,
                reports: 6,
                reported_mib: 7,
                free_max_us: 8,
            },
            Line::Inflated { pages: 1, requests: 2, alloc_us: 3, send_us: 4, total_us: 5 },
        ];
        for line in lines {
            assert_eq!(line.to_string().parse(), Ok(line));
            assert_eq!(std::format!("{line}\r\n").parse(), Ok(line));
        }
        assert_eq!(lines[1].to_string(), "S 0 1 2 3 4 5");
        assert_eq!(lines[5].to_string(), "A 1 2 3 4 5 6 7 8");
        assert_eq!(lines[3].to_string(), "CORRUPT page=5 want=0x7f got=0xffffffffffffffff word=1 cpu=1");
    }

    #[test]
    fn refuses_other_lines() {
        for line in
            ["", "S", "S 0 1 2 3 4", "S 0 1 2 3 4 5 6", "S 0 1 2 3 4 +5", "H 0 1", "SeaBIOS (version 1)"]
        {
            assert!(line.parse::<Line>().is_err(), "{line}");
        }
    }

    #[test]
    fn lines_are_due_on_time_and_count_since_the_previous_one() {
        let workload: Workload = "idle,data=64K,sweep=0".parse().unwrap();
        let layout = Layout::new(&workload, 100, 1).unwrap();
        let mut worker = Worker::new(&workload, &layout, 0);
        let mut reporter = SerialReporter::new(3, 0);
        let mut lines = Vec::new();
        for ms in 1..=1000 {
            worker.slept(0, if ms % 250 == 0 { 2_000_000 } else { 0 });
            lines.extend(reporter.poll(&mut worker, ms * 1_000_000).into_iter().flatten());
        }
        let stats: Vec<_> = lines.iter().filter(|line| matches!(line, Line::Stats { .. })).collect();
        assert_eq!(stats.len(), 10);
        let third = Line::Stats {
            cpu: 3,
            t_us: 300_000,
            writes: 0,
            stall_max_us: 2000,
            stall_sum_us: 2000,
            stalls: 1,
        };
        assert_eq!(*stats[2], third);
        assert!(matches!(stats[3], Line::Stats { stalls: 0, stall_sum_us: 0, .. }));
        let Some(Line::Hist { hist, .. }) = lines.last() else { panic!("no H line") };
        assert_eq!((hist[7], hist.iter().sum::<u64>()), (4, 4));
    }

    proptest! {
        #[test]
        fn any_line_is_parsed_or_refused(line in "[SH0-9x= A-Z]{0,80}") {
            let _ = line.parse::<Line>();
        }
    }
}
