//! A guest moved into a file, and out of it again.
//!
//! The file holds what a migration sends after the pause, one after the other: a [`Hello`] that names it, the setup, the
//! pages as frames up to a barrier, the device state. It is written under a temporary name and takes its own only when all
//! of it has reached the disk, so a file of that name is always whole; until then the source can resume.

use crate::channel::{IoBuf, Pacer};
use crate::monitor::{MigrationState, Monitor};
use crate::report::{Bytes, Downtime, PassReport, Report};
use crate::source::sender::{FrameSink, Sender, SenderError, Shared};
use crate::target::receiver::{Arrivals, FrameSource, ReceiveError, Receiver};
use crate::target::{ReceiveFailure, Received};
use crate::vm::{NothingToProtect, SourceVm, TargetVm, VmError};
use crate::{MigrateError, random};
use serde::{Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_memory::PageSet;
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, FEATURES, HELLO_BYTES, Hello, MAX_STATE_BYTES, MigrationId, Mode,
    Refusal, RefusalCode, Role, Section, ToTarget, Token, VERSION_MAX, VERSION_MIN, WireError,
    decode_control, encode_control, negotiate,
};

/// A file that frames are written to; stops when the migration is cancelled.
struct FileSink<'a> {
    file: &'a File,
    monitor: &'a Monitor,
}

impl FrameSink for FileSink<'_> {
    fn put(&mut self, bufs: &mut [IoBuf<'_>]) -> Result<(), SenderError> {
        if self.monitor.cancelled() {
            return Err(SenderError::Stopped);
        }
        IoBuf::write_all(bufs, self.file).map_err(SenderError::File)
    }
}

impl FrameSource for &File {
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        IoBuf::read_all(bufs, self)
    }
}

/// The temporary file; removed unless it was given its name.
struct Partial {
    path: PathBuf,
    named: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.named {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Moves the guest of `vm` into the file at `path`: it stops, and its memory and state are written. When this returns
/// with [`MigrationState::Completed`], the guest is in the file and must not run here any more; with any other, it runs
/// here again.
///
/// # Errors
/// If nothing was begun, because the file cannot be made.
pub fn save(vm: &mut dyn SourceVm, path: &Path, monitor: &Monitor) -> Result<Report, MigrateError> {
    let began = Instant::now();
    let uri = format!("file:{}", path.display());
    let failed = |source| MigrateError::File { uri: uri.clone(), source };
    let mut name = path.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidFilename.into()))?.to_owned();
    name.push(format!(".partial-{}", std::process::id()));
    let mut partial = Partial { path: path.with_file_name(name), named: false };
    // Readable by its owner only: it is somebody's memory.
    let file =
        File::options().write(true).create_new(true).mode(0o600).open(&partial.path).map_err(failed)?;
    let migration = MigrationId(random()?);
    monitor.update(|progress| progress.state = MigrationState::Switchover);
    let pause = Instant::now();
    let written = write(vm, &file, migration, monitor).and_then(|timings| {
        file.sync_all().map_err(Stop::File)?;
        std::fs::rename(&partial.path, path).map_err(Stop::File)?;
        partial.named = true;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // A directory that cannot be synced (some network file systems) still has the entry.
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(timings)
    });
    let (mut report, state) = match written {
        Ok(report) => (report, MigrationState::Completed),
        Err(stop) => {
            let resumed = vm.resume();
            let mut why = stop.to_string();
            if let Err(error) = resumed {
                why = format!("{why}; and the guest could not be resumed: {error}");
            }
            let state = if matches!(stop, Stop::Cancelled) {
                MigrationState::Cancelled
            } else {
                MigrationState::Failed
            };
            (Report { error: Some(why), ..Report::default() }, state)
        }
    };
    let total = ms(began.elapsed());
    report.state = state;
    report.outcome = crate::report::word(state);
    (report.id, report.mode, report.tracker) = (migration.to_string(), "file".into(), "none".into());
    (report.total_ms, report.downtime_ms) = (total, ms(pause.elapsed()));
    monitor.update(|progress| progress.state = state);
    Ok(report)
}

/// Why writing stopped.
#[derive(Debug, thiserror::Error)]
enum Stop {
    #[error("cancelled on request")]
    Cancelled,
    #[error("the file could not be written: {0}; the guest goes on here")]
    File(io::Error),
    #[error("{0}")]
    Vm(#[from] VmError),
    #[error("{0}")]
    Wire(#[from] WireError),
}

impl From<SenderError> for Stop {
    fn from(error: SenderError) -> Self {
        match error {
            SenderError::Stopped => Self::Cancelled,
            SenderError::File(error) => Self::File(error),
            SenderError::Link(failed, _) => Self::File(failed.error),
            SenderError::Vm(error) => Self::Vm(error),
        }
    }
}

fn write(
    vm: &mut dyn SourceVm,
    file: &File,
    migration: MigrationId,
    monitor: &Monitor,
) -> Result<Report, Stop> {
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: FEATURES,
        migration,
        role: Role::Control,
        index: 0,
        token: Token::NONE,
    };
    let mut out = file;
    out.write_all(&hello.encode()).map_err(Stop::File)?;
    let (machine, mode) = (vm.config(), Mode::Precopy);
    put(file, &ToTarget::Setup { machine, mode, bulk_channels: 1, urgent_channels: 0, probe: false })?;
    let pausing = Instant::now();
    vm.pause()?;
    let paused = Instant::now();
    let sections = vm.save()?;
    let saved = Instant::now();
    let memory = vm.memory();
    let set = PageSet::full(memory.layout());
    monitor.begin_pass(0, set.count());
    let (pacer, stop) = (Pacer::new(None), AtomicBool::new(false));
    let (memory, counters) = (&*memory, &monitor.counters);
    let shared =
        Shared { memory, protect: &NothingToProtect, pacer: &pacer, counters, stop: &stop, channels: 1 };
    Sender::new(shared, FileSink { file, monitor }, 0).send_pass(0, &set, true)?;
    let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
    for section in sections {
        put(file, &ToTarget::Section(section))?;
    }
    put(file, &ToTarget::StateEnd { sections: count })?;
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let pages = ms(saved.elapsed());
    let wire = load(&counters.wire_bytes);
    Ok(Report {
        downtime: Downtime {
            pause_ms: ms(paused - pausing),
            device_state_ms: ms(saved - paused),
            last_pages_ms: pages,
            ..Downtime::default()
        },
        bytes: Bytes {
            wire,
            raw_pages: load(&counters.raw_pages),
            zero_pages: load(&counters.zero_pages) + load(&counters.untouched),
            ..Bytes::default()
        },
        passes: vec![PassReport { pages: set.count(), wire_bytes: wire, ms: pages, ..PassReport::default() }],
        throughput_mbps: if pages > 0.0 { wire as f64 * 8e-3 / pages } else { 0.0 },
        ..Report::default()
    })
}

fn put<M: Serialize>(mut file: &File, message: &M) -> Result<(), Stop> {
    file.write_all(&encode_control(message)?).map_err(Stop::File)
}

/// Takes the guest in the file at `path` into `vm` and runs it.
///
/// # Errors
/// If the file is not a whole guest that fits this machine: the guest has not run, the file is as it was.
pub fn restore(vm: &mut dyn TargetVm, path: &Path) -> Result<Received, ReceiveFailure> {
    let uri = format!("file:{}", path.display());
    let file = File::open(path).map_err(|source| MigrateError::File { uri: uri.clone(), source })?;
    let broken =
        |why: String| ReceiveFailure::Failed(Refusal::new(RefusalCode::Memory, format!("{uri}: {why}")));
    let (id, pages, sections) = read(vm, &file).map_err(|error| match error {
        ReceiveError::Link(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            broken("the file ends in the middle of the guest".into())
        }
        error => broken(error.to_string()),
    })?;
    let began = Instant::now();
    vm.load(&sections).map_err(|error| broken(error.to_string()))?;
    let load_ms = ms(began.elapsed());
    vm.start().map_err(|error| broken(error.to_string()))?;
    Ok(Received {
        id,
        source: uri,
        pages,
        load_ms,
        cpu_ms: crate::monitor::thread_cpu_us() as f64 / 1e3,
        rest: None,
    })
}

fn read(vm: &mut dyn TargetVm, file: &File) -> Result<(String, u64, Vec<Section>), ReceiveError> {
    let mut hello = [0; HELLO_BYTES];
    (&*file).read_exact(&mut hello)?;
    let hello = Hello::decode(&hello)?;
    let field = |what, value, allowed| ReceiveError::Wire(WireError::Field { what, value, allowed });
    negotiate(&hello)
        .map_err(|_| field("version", hello.version_min.into(), "one that this vmferry reads"))?;
    let ToTarget::Setup { machine, .. } = get(file)? else {
        return Err(field("first message", 0, "the machine's description"));
    };
    if let Some(difference) = vm.config().difference(&machine) {
        let text = format!("the machines differ: {difference} (here = this machine, there = the file's)");
        return Err(ReceiveError::Vm(VmError::new(text)));
    }
    let memory = vm.memory();
    let arrivals = Arrivals::new(&*memory);
    Receiver::new(&*memory, &arrivals, file).receive()?;
    let (damaged, runs) = arrivals.suspects();
    if let Some(first) = runs.first() {
        let text = format!(
            "{damaged} pages are damaged, the first is page {:#x} of {}; the file cannot be used",
            first.first, first.region
        );
        return Err(ReceiveError::Vm(VmError::new(text)));
    }
    let (mut sections, mut bytes) = (Vec::new(), 0);
    loop {
        match get(file)? {
            ToTarget::Section(section) => {
                bytes += section.name.len() + section.payload.len();
                if bytes > MAX_STATE_BYTES {
                    return Err(field("bytes of device state", bytes as u64, "64 MiB"));
                }
                sections.push(section);
            }
            ToTarget::StateEnd { sections: count } if usize::try_from(count) == Ok(sections.len()) => {
                return Ok((hello.migration.to_string(), arrivals.pages(), sections));
            }
            _ => return Err(field("message in the device state", sections.len() as u64, "all its sections")),
        }
    }
}

fn get<M: DeserializeOwned>(mut file: &File) -> Result<M, ReceiveError> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    file.read_exact(&mut header)?;
    let header = ControlHeader::decode(&header)?;
    let mut body = vec![0; header.len];
    file.read_exact(&mut body)?;
    Ok(decode_control(header, &body)?)
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
