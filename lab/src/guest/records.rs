//! Records on a disk. A record counts only after `fdatasync` has confirmed it.

use super::kept::sum;
use anyhow::{Context, Result};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmferry_lab::guest_report::GuestReport;

/// Bytes of a record. It is neither a sector nor a page, so that records cross the boundaries of
/// both.
const RECORD: usize = 1000;
/// Pause between two records, so that the disk is busy but does not fill up quickly.
const REST: Duration = Duration::from_millis(5);
/// Largest number of records, because the disk is small.
const MOST: u64 = 20_000;

#[derive(Debug, Default)]
struct State {
    lasting: AtomicU64,
    failed: AtomicU64,
    stop: AtomicBool,
    stopped: AtomicBool,
}

/// Writer of records.
#[derive(Debug)]
pub(crate) struct Records {
    path: PathBuf,
    state: Arc<State>,
}

impl Records {
    /// Creates the file and starts the writer.
    pub(crate) fn start(path: &str) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {path}"))?;
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::Builder::new().name("records".into()).spawn(move || write(file, &shared))?;
        Ok(Self { path: path.into(), state })
    }

    /// Stops the writer, and waits for its last record.
    pub(crate) fn stop(&self) {
        self.state.stop.store(true, Ordering::Release);
        while !self.state.stopped.load(Ordering::Acquire) {
            std::thread::sleep(REST);
        }
    }

    pub(crate) fn fill(&self, report: &mut GuestReport, whole: bool) {
        let lasting = self.state.lasting.load(Ordering::Acquire);
        report.records = Some(lasting);
        report.record_errors = self.state.failed.load(Ordering::Acquire);
        if whole {
            report.records_lost = Some(lost(&self.path, lasting));
        }
    }
}

fn write(mut file: File, state: &State) {
    for number in 0..MOST {
        if state.stop.load(Ordering::Acquire) {
            break;
        }
        match file.write_all(&record(number)).and_then(|()| file.sync_data()) {
            Ok(()) => state.lasting.store(number + 1, Ordering::Release),
            Err(error) => {
                println!("LAB-WRONG record {number}: {error}");
                state.failed.fetch_add(1, Ordering::AcqRel);
                break;
            }
        }
        std::thread::sleep(REST);
    }
    state.stopped.store(true, Ordering::Release);
}

/// Returns record `number`: its number, bytes derived from the number, and a checksum of both.
fn record(number: u64) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    let mut value = number;
    for byte in &mut bytes[8..RECORD - 8] {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = value.to_be_bytes()[0];
    }
    let check = sum(&bytes[..RECORD - 8]);
    bytes[RECORD - 8..].copy_from_slice(&check.to_le_bytes());
    bytes
}

/// Returns how many of the first `count` records are missing or damaged. The kernel's page cache is
/// dropped first if that is allowed, so that the records are read from the disk.
pub(crate) fn lost(path: &Path, count: u64) -> u64 {
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "1");
    absent(path, count)
}

/// Returns how many of the first `count` records are missing or damaged in the file.
fn absent(path: &Path, count: u64) -> u64 {
    let Ok(file) = File::open(path) else { return count };
    let mut file = std::io::BufReader::new(file);
    let mut bytes = [0; RECORD];
    (0..count).filter(|number| file.read_exact(&mut bytes).is_err() || bytes != record(*number)).count()
        as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_damaged_records_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records");
        let mut bytes: Vec<u8> = (0..5).flat_map(record).collect();
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(absent(&path, 5), 0);
        assert_eq!(absent(&path, 7), 2);
        bytes[2500] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(absent(&path, 5), 1);
        assert_eq!(absent(Path::new("/nowhere"), 3), 3);
    }
}
