//! Serial line of the guest, which moves from the source's file to the target's with the guest.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use vmferry_guest_abi::{GuestArgs, Line, StatsSink};

use super::QemuSpec;
use super::error::QemuError;
use super::timeline::Timeline;

/// Longest line in bytes that is kept. Longer input without a line end is firmware output or
/// damage.
const LINE_LIMIT: usize = 4096;

/// Bytes that one call may read, so that a guest that floods its line cannot block the bench.
const READ_LIMIT: u64 = 1 << 20;

/// Returns the guest's command line. The workload is checked before any guest boots.
pub(super) fn cmdline(spec: &QemuSpec) -> Result<String, QemuError> {
    let more = spec.balloon.as_ref().map_or("", |balloon| balloon.guest_args.as_str());
    let line = format!("workload={} {more}", spec.workload);
    let args: GuestArgs = line.parse().map_err(|e| QemuError::Usage(format!("{line}: {e}")))?;
    Ok(GuestArgs { stats: StatsSink::Serial, ..args }.to_string())
}

/// Reader of both ends of the line as one.
///
/// A line that the migration cut in two is joined again, because the source's guest has stopped
/// before the target's guest writes.
#[derive(Debug)]
pub(crate) struct Serial {
    /// Ends of the source and of the target.
    ends: [End; 2],
    /// Beginning of an incomplete line.
    partial: Vec<u8>,
    last: String,
    ready: bool,
    inflated: Option<Line>,
    /// Rounds of allocations that the first vCPU has finished.
    rounds: u64,
    timeline: Timeline,
}

#[derive(Debug)]
struct End {
    path: PathBuf,
    file: Option<File>,
}

impl Serial {
    /// Creates a reader of the files that QEMU writes the line to, of the source and of the target.
    pub(crate) fn new(paths: [PathBuf; 2]) -> Self {
        Serial {
            ends: paths.map(|path| End { path, file: None }),
            partial: Vec::new(),
            last: String::new(),
            ready: false,
            inflated: None,
            rounds: 0,
            timeline: Timeline::default(),
        }
    }

    /// Returns whether the guest has filled its memory.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Returns the guest's report of its inflation, once the inflation is complete.
    pub(crate) fn inflated(&self) -> Option<Line> {
        self.inflated
    }

    /// Returns the rounds of allocations that the guest's first vCPU has finished.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Returns the guest's reports so far.
    pub(crate) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Returns the last line, for messages.
    pub(crate) fn last_words(&self) -> String {
        format!("the guest's last line: {:?}", self.last)
    }

    /// Reads what the guest has written since the last call.
    ///
    /// # Errors
    ///
    /// Fails with [`QemuError::Guest`] if the guest found damage or gave up, and if a file cannot
    /// be read.
    pub(crate) fn read(&mut self) -> Result<(), QemuError> {
        let now = Instant::now();
        for index in 0..self.ends.len() {
            let mut bytes = Vec::new();
            self.ends[index].read(&mut bytes).map_err(QemuError::io("read the guest's serial line"))?;
            for byte in bytes {
                self.take(byte, now)?;
            }
        }
        Ok(())
    }

    fn take(&mut self, byte: u8, now: Instant) -> Result<(), QemuError> {
        if byte != b'\n' {
            if self.partial.len() < LINE_LIMIT {
                self.partial.push(byte);
            }
            return Ok(());
        }
        let line = String::from_utf8_lossy(&self.partial).trim().to_owned();
        self.partial.clear();
        // The firmware also writes to this line. A line that does not parse is kept for messages
        // only.
        let parsed = line.parse();
        self.last = line;
        match parsed {
            Ok(Line::Ready(_)) => self.ready = true,
            Ok(Line::Stats { cpu, writes, stall_max_us, .. }) => {
                self.timeline.add(cpu, now, writes, Duration::from_micros(stall_max_us));
            }
            Ok(Line::Corrupt { .. } | Line::Panic(_)) => return Err(QemuError::Guest(self.last.clone())),
            Ok(line @ Line::Inflated { .. }) => self.inflated = Some(line),
            Ok(Line::Alloc { cpu: 0, rounds, .. }) => self.rounds = rounds,
            Ok(Line::Hist { .. } | Line::Alloc { .. }) | Err(_) => {}
        }
        Ok(())
    }
}

impl End {
    /// Appends the new bytes of the file. A file that does not exist yet has none.
    fn read(&mut self, bytes: &mut Vec<u8>) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => match File::open(&self.path) {
                Ok(file) => self.file.insert(file),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(e),
            },
        };
        file.take(READ_LIMIT).read_to_end(bytes).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write;

    fn append(path: &PathBuf, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn line_cut_by_the_migration_is_joined() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| folder.path().join(name));
        let mut serial = Serial::new(paths.clone());
        serial.read().unwrap();
        assert!(!serial.is_ready());
        append(
            &paths[0],
            "SeaBIOS (version x)\r\nREADY cpus=1 data_pages=2 ws_pages=3 tsc_khz=4 t_us=5\r\nS 0 100 10",
        );
        serial.read().unwrap();
        assert!(serial.is_ready());
        let before = Instant::now();
        assert!(!serial.timeline().reaches(before));
        append(&paths[1], "00 7 8 9\r\n");
        serial.read().unwrap();
        assert!(serial.timeline().reaches(before));
        assert_eq!(serial.timeline().stall_max(before, Instant::now()), Some(Duration::from_micros(7)));
        assert!(serial.last_words().contains("S 0 100 1000 7 8 9"));
    }

    #[test]
    fn damage_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| folder.path().join(name));
        append(&paths[1], "CORRUPT page=5 want=0x1 got=0x2 word=0 cpu=0\n");
        let error = Serial::new(paths).read().unwrap_err();
        assert!(matches!(&error, QemuError::Guest(line) if line.contains("page=5")), "{error}");
    }

    #[test]
    fn invalid_workload_is_rejected_before_boot() {
        let spec = |workload: &str| QemuSpec { workload: workload.into(), ..QemuSpec::default() };
        assert!(cmdline(&spec("uniform,ws=16M")).unwrap().contains("stats=serial"));
        assert!(matches!(cmdline(&spec("nonsense")), Err(QemuError::Usage(_))));
    }
}
