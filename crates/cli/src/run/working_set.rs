//! Working set of a guest that runs from a snapshot: `--record` and `--prefetch` of `run`.

use crate::api::RunContext;
use crate::args::RunArgs;
use crate::guest::Machine;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmferry_engine::{SharedRestore, SharedSettings, WorkingSet, read_working_set, restore_shared_with};

/// Guest that runs from a snapshot which it shares, with the recording of its working set.
pub(super) struct SharedGuest {
    restore: SharedRestore,
    record: Option<Record>,
}

/// Recording that has not ended.
struct Record {
    path: PathBuf,
    /// File that was opened before the guest ran. It keeps its content until the recording ends.
    file: File,
    /// Time at which the recording ends by itself.
    until: Option<Instant>,
}

/// Checks that a recording to `path` replaces nothing but an earlier working set. Without the
/// check, a mistyped name could destroy a snapshot, which other guests may share.
pub(super) fn check_record(path: &Path) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|found| found.len() > 0) {
        read_working_set(path).with_context(|| {
            format!("--record: {} exists, and is not a working set; choose another name", path.display())
        })?;
    }
    Ok(())
}

impl Record {
    fn open(path: &Path, length: Option<Duration>) -> Result<Self> {
        // A working set tells what the guest does, so only this user can read it.
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.with_context(|| format!("cannot write the working set {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file, until: length.map(|length| Instant::now() + length) })
    }

    fn write(&self, set: &WorkingSet) -> Result<Value> {
        let bytes = set.encode();
        // A file that is written only in part has a wrong checksum.
        let write = || {
            self.file.write_all_at(&bytes, 0)?;
            self.file.set_len(bytes.len() as u64)?;
            self.file.sync_all()
        };
        write().with_context(|| format!("cannot write the working set {}", self.path.display()))?;
        Ok(json!({ "file": self.path, "pages": set.pages() }))
    }
}

impl SharedGuest {
    /// Starts the guest in the file at `path`.
    pub(super) fn start(
        path: &Path,
        args: &RunArgs,
        machine: &mut Machine,
        shared: &RunContext,
    ) -> Result<Self> {
        let record = args.record.as_deref().map(|to| Record::open(to, args.record_for)).transpose()?;
        let mut settings = SharedSettings::default();
        settings.prefetch = args.prefetch.as_deref().map(read_working_set).transpose()?;
        settings.record = record.is_some();
        let restore = restore_shared_with(machine.target(), path, settings)?;
        shared.set_received(serde_json::to_value(restore.received())?);
        if let Some(watch) = restore.watch_prefetch() {
            shared.set_prefetch(watch);
        }
        Ok(Self { restore, record })
    }

    /// Ends the recording if its time is over.
    pub(super) fn look(&mut self) {
        let over = |record: &Record| record.until.is_some_and(|until| Instant::now() >= until);
        if self.record.as_ref().is_some_and(over) {
            self.end_recording();
        }
    }

    /// Ends the recording, if there is one, and writes the working set. A failure is printed.
    pub(super) fn end_recording(&mut self) {
        if self.record.is_none() {
            return;
        }
        match self.finish() {
            Ok(_) => eprintln!("vmferry: the working set is written"),
            Err(error) => crate::output::print_message(&crate::advice::told(&error)),
        }
    }

    /// Ends the recording and writes the working set. Returns the answer for the client.
    ///
    /// # Errors
    /// If nothing is recorded, or the file cannot be written.
    pub(super) fn finish(&mut self) -> Result<Value> {
        let Some(record) = self.record.take() else {
            bail!("no working set is recorded, or its file has been written");
        };
        let set = self.restore.finish_recording()?.context("no working set is recorded")?;
        record.write(&set)
    }
}
