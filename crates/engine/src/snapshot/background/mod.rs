//! Snapshots of a running guest: the guest is paused only to save its device state, and its memory
//! of that instant is written while it runs on.
//!
//! # Steps
//! 1. While the guest runs, all memory that it has touched is write-protected ([`arming`]). A page
//!    that the guest writes meanwhile is unprotected and recorded, and protected again in the next
//!    round, until few such pages are left.
//! 2. The guest is paused. Its device state is saved, which may write guest memory. Then the
//!    recorded pages are protected. This is the instant of the snapshot. The time of the pause
//!    depends on the number of recorded pages, not on the size of the memory.
//! 3. The guest runs on. Writers copy and unprotect one block after another and write the copies to
//!    the file ([`writer`]). If the guest writes a page before its block was copied, a fault thread
//!    first copies the page into a buffer ([`copies`]).
//! 4. When all blocks are written, write protection ends. The file is completed, synced to the
//!    disk, compared with the copies if this was requested, and gets its final name.
//!
//! A failure, or a cancel, in any step lifts all protection. The guest runs on, and the file is
//! removed.

mod arming;
mod copies;
mod since;
mod verify;
mod writer;

use super::file::NewFile;
use super::image::{Identity, Image, ImageFigures};
use super::ms;
use super::save::refuse_streams;
use super::shares::{MOST_THREADS, on_threads};
use super::write::Stop;
use crate::channel::Pacer;
use crate::demand::{again_after_panics, still_arrives};
use crate::handle::{MigrationHandle, MigrationState};
use crate::report::{Bytes, Downtime, MigrationKind, PassReport, Report, SnapshotFigures};
use crate::sync::RwLock;
use crate::vm::{caught, warn_if_panics_abort};
use crate::{MigrateError, random};
use arming::{Arming, Round, Written};
use copies::{Copies, Live};
use since::Since;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    Fault, GuestMemory, PAGE_BYTES, PageRun, Region, Section, SourceVm, VmError, WriteProtection,
};
use vmferry_wire::{MigrationId, SnapshotMap, TableKind, encode_machine, encode_state};
use writer::Writer;

/// Smallest buffer, in bytes: 1 MiB. With less, nearly every write to a protected page would wait
/// for the file.
const LEAST_BUFFER: u64 = 1 << 20;
/// Number of pages that may be left for the pause. To protect them takes well below a millisecond.
const FEW_PAGES: u64 = 2048;
/// Maximum number of rounds in which memory is armed while the guest runs. A guest that writes
/// faster than its pages are protected gains nothing by further rounds.
const MOST_ROUNDS: u32 = 12;
/// Time for which a pause waits for the guest's I/O. If the I/O takes longer, the guest is resumed,
/// and paused again later.
const QUIESCE: Duration = Duration::from_millis(100);
/// Delay before the guest is paused again.
const BETWEEN: Duration = Duration::from_millis(200);
/// Number of attempts with the limit [`QUIESCE`]. The last attempt waits for as long as the VMM
/// considers reasonable.
const ATTEMPTS: u32 = 10;
/// Interval at which a sleeping fault thread checks whether it must end, or whether the snapshot
/// was cancelled.
const LOOK: Duration = Duration::from_millis(250);
/// Delay before a fault thread reads faults again, after the host has returned an error.
const AGAIN: Duration = Duration::from_millis(100);
/// Number of attempts to end write protection. As long as it has not ended, threads may sleep.
const END_ATTEMPTS: u32 = 50;

/// Returns the number of writers: one for every two processors. The others are left to the guest,
/// which runs while the file is written. On two processors, a guest kept 0.42 of its speed beside
/// two writers. A low priority is not used: on a busy host, it made a snapshot take five times as
/// long, during which the guest faults.
fn writers() -> usize {
    (std::thread::available_parallelism().map_or(1, std::num::NonZero::get) / 2).clamp(1, MOST_THREADS)
}

/// Function that is called while the guest is paused.
pub struct PauseHook(Box<dyn Fn() -> Result<(), VmError> + Send + Sync>);

impl PauseHook {
    /// Returns a hook that calls `hook`.
    #[must_use]
    pub fn new(hook: impl Fn() -> Result<(), VmError> + Send + Sync + 'static) -> Self {
        Self(Box::new(hook))
    }
}

impl std::fmt::Debug for PauseHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PauseHook")
    }
}

/// Settings of a background snapshot.
#[derive(Debug)]
#[non_exhaustive]
pub struct SnapshotSettings {
    /// Memory for copies of pages that the guest writes before they are in the file, in bytes. The
    /// default is 64 MiB, and the least is 1 MiB. If the buffer is full, the thread that writes
    /// such a page waits until a writer has copied the page. The writers have one buffer of 2 MiB
    /// each, which are not counted.
    pub buffer: u64,
    /// Limit for the bytes that are written per second. `None` for no limit.
    pub max_bandwidth: Option<u64>,
    /// True to read the file back, and to compare it with the digests of the copies, before the
    /// file gets its name.
    pub verify: bool,
    /// Snapshot that the file is based on: only pages that differ from it are written, and a
    /// restore reads the others from it. The base and the file must be in one folder, and the base
    /// must be kept for as long as the file. The base can be any snapshot of a guest with the same
    /// machine, and can be an increment itself. `None` for a complete file.
    ///
    /// A page counts as equal only if its bytes are, so the base is read.
    pub since: Option<PathBuf>,
    /// Function that is called while the guest is paused, after its device state was saved. At that
    /// moment, the operator can take a snapshot of the guest's disks that belongs to the snapshot
    /// of its memory. The guest is paused until the function returns. If the function fails, so
    /// does the snapshot, and the guest runs on.
    pub in_pause: Option<PauseHook>,
}

impl Default for SnapshotSettings {
    fn default() -> Self {
        Self { buffer: 64 << 20, max_bandwidth: None, verify: false, since: None, in_pause: None }
    }
}

/// Writes a snapshot of the guest of `vm` to the file at `path`, and lets the guest run meanwhile.
///
/// The file has the state of one instant. The guest is paused at that instant, for the time that it
/// takes to save the device state. The time of the pause does not depend on the size of the memory.
/// The file is a copy of the guest like that of [`save_copy`](crate::save_copy), and is restored in
/// the same way.
///
/// While the file is written, a thread that writes a page for the first time waits until this page
/// was copied. See [`SnapshotSettings::buffer`]. The VM must support
/// [`SourceVm::write_protection`].
///
/// The function blocks the calling thread until the file is complete. It calls the methods of `vm`
/// only on that thread. Whether or not the snapshot succeeds, the guest runs on, unless resuming it
/// failed ([`Report::resume_failed`]).
///
/// # Errors
/// If the snapshot could not begin: the VM or the host cannot protect memory, the file exists
/// already or cannot be created, pages of the guest are still arriving, the VM has device state
/// that can only be sent as a stream, or the settings are out of range. The guest is not affected.
/// An existing file is never replaced.
pub fn snapshot_background(
    vm: &mut dyn SourceVm,
    path: &Path,
    settings: &SnapshotSettings,
    handle: &MigrationHandle,
) -> Result<Report, MigrateError> {
    let began = Instant::now();
    warn_if_panics_abort();
    check(settings)?;
    let memory = vm.memory();
    if still_arrives(&memory) {
        return Err(MigrateError::StillArriving);
    }
    refuse_streams(vm)?;
    let since = settings.since.as_deref().map(|base| Since::open(base, path, vm)).transpose()?;
    let protection = vm.write_protection().map_err(MigrateError::Vm)?;
    let id = MigrationId(random()?);
    let known = Report { id: id.to_string(), kind: MigrationKind::File, ..Report::default() };
    handle.begin(began, known);
    let failed = |source| MigrateError::File { uri: super::uri(path), source };
    let mut file = NewFile::create(path, id).map_err(failed)?;
    // If the file system does not allow a file of this length, the error is found here.
    file.file().set_len(SnapshotMap::new(memory.layout(), 0, 0).len).map_err(failed)?;
    let snapshot = Snapshot {
        regions: memory.layout().regions().to_vec(),
        written: Written::new(memory.layout().regions()),
        copies: Copies::new(memory.layout().regions().iter().map(Region::pages), settings.buffer),
        pacer: Pacer::new(settings.max_bandwidth),
        phase: RwLock::new(Phase::Arming),
        ended: AtomicBool::new(false),
        failure: Mutex::new(None),
        since,
        memory,
        protection,
        handle,
    };
    let mut course = Course::default();
    let taken = match snapshot.take(vm, &mut file, (id, settings), &mut course) {
        // A cancel ends the steps with errors of their own.
        Err(_) if handle.cancelled() => Err(Stop::Cancelled),
        taken => taken,
    };
    Ok(report(&snapshot, (id, settings), course, taken, began))
}

fn check(settings: &SnapshotSettings) -> Result<(), MigrateError> {
    if settings.buffer < LEAST_BUFFER {
        let why =
            format!("a snapshot needs a buffer of at least {LEAST_BUFFER} bytes, not {}", settings.buffer);
        return Err(MigrateError::Settings(why));
    }
    if settings.max_bandwidth == Some(0) {
        return Err(MigrateError::Settings("a bandwidth limit of 0 writes nothing".to_owned()));
    }
    Ok(())
}

/// Treatment of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A fault lifts the protection, and its unit is recorded.
    Arming,
    /// A fault copies the unit, because the instant of the snapshot has passed.
    Copying,
}

/// Times and amounts of the steps, as far as they were reached.
#[derive(Debug, Default)]
struct Course {
    armed: Option<Instant>,
    rounds: u64,
    arming_faults: u64,
    last: Round,
    protect: Duration,
    hook: Duration,
    pause: Duration,
    state: Duration,
    downtime: Duration,
    deferrals: u64,
    deferred: Duration,
    write: Duration,
    sync: Duration,
    verify: Duration,
    verified: u64,
    image: Option<ImageFigures>,
    resume_failed: Option<VmError>,
}

/// Snapshot that is being taken. The owner of the VM, the fault threads and the writers share it.
struct Snapshot<'a> {
    memory: Arc<dyn GuestMemory>,
    protection: Arc<dyn WriteProtection>,
    regions: Vec<Region>,
    written: Written,
    copies: Copies,
    pacer: Pacer,
    /// Fault threads hold the lock for reading while they serve a fault.
    phase: RwLock<Phase>,
    /// True once the fault threads must end.
    ended: AtomicBool,
    /// First failure of a fault thread.
    failure: Mutex<Option<VmError>>,
    /// Base, if the file is an increment.
    since: Option<Since>,
    handle: &'a MigrationHandle,
}

/// Ends write protection and the fault threads when it is dropped, also after a panic.
struct Protected<'a>(&'a Snapshot<'a>);

impl Drop for Protected<'_> {
    fn drop(&mut self) {
        self.0.copies.stop();
        for attempt in 1..=END_ATTEMPTS {
            match self.0.protection.end() {
                Ok(()) => break,
                Err(error) if attempt == END_ATTEMPTS => {
                    tracing::error!(
                        "the write protection of the guest's memory cannot be lifted ({error}): a thread that writes a protected page \
                         sleeps for ever; end the guest"
                    );
                }
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
        self.0.ended.store(true, Ordering::Release);
        self.0.protection.interrupt();
    }
}

impl<'a> Snapshot<'a> {
    /// Takes the snapshot. Afterwards the guest runs, no page is protected, and the file has its
    /// name if the result is a success.
    fn take(
        &self,
        vm: &mut dyn SourceVm,
        file: &mut NewFile,
        (id, settings): (MigrationId, &SnapshotSettings),
        course: &mut Course,
    ) -> Result<(), Stop> {
        let layout = self.memory.layout();
        let machine = encode_machine(&vm.config())?;
        self.handle.begin_pass(0, layout.pages());
        let image = std::thread::scope(|scope| {
            let protected = Protected(self);
            self.protection.begin()?;
            for shard in 0..self.protection.shards() {
                let serve = move || again_after_panics(|| self.serve(shard));
                let name = format!("snapfault-{shard}");
                vmferry_thread::spawn_scoped(vmferry_thread::Role::Fault, name, scope, serve)
                    .map_err(|error| VmError::new(format!("the host refused a thread: {error}")))?;
            }
            let (sections, guarded) = self.freeze(vm, settings, course)?;
            let writing = Instant::now();
            let image = Image::new(file.file(), layout, machine, encode_state(&sections)?);
            self.write(&image, &guarded)?;
            course.write = writing.elapsed();
            drop(protected);
            Ok::<_, Stop>(image)
        })?;
        if let Some(error) = self.failure() {
            return Err(error.into());
        }
        let sums = settings.verify.then(|| image.sums());
        let base = self.since.as_ref().map(|since| since.base().clone());
        let kind = if base.is_some() { TableKind::Increment } else { TableKind::Complete };
        course.image = Some(image.finish(layout, Identity { id, copy: true, base })?);
        let syncing = Instant::now();
        file.sync().map_err(Stop::File)?;
        course.sync = syncing.elapsed();
        if let Some(sums) = sums {
            let verifying = Instant::now();
            course.verified = verify::verify(file.file(), &sums, kind, self.handle)?;
            course.verify = verifying.elapsed();
        }
        if self.handle.cancelled() {
            return Err(Stop::Cancelled);
        }
        self.since.as_ref().map_or(Ok(()), Since::check).map_err(Stop::File)?;
        file.name().map_err(Stop::File)
    }

    /// Arms the memory, pauses the guest, saves its state, and resumes it. Returns the state, and
    /// the guarded blocks of each region.
    fn freeze(
        &self,
        vm: &mut dyn SourceVm,
        settings: &SnapshotSettings,
        course: &mut Course,
    ) -> Result<(Vec<Section>, Vec<Bitmap>), Stop> {
        let mut arming = Arming::new(&*self.memory, &*self.protection, &self.written);
        for attempt in 1..=ATTEMPTS {
            self.arm(&mut arming, course)?;
            let within = if attempt == ATTEMPTS { Duration::MAX } else { QUIESCE };
            self.handle.update(|progress| progress.state = MigrationState::Switchover);
            let pausing = Instant::now();
            let saved = pause_and_save(vm, within, course);
            let closed = match saved {
                Err(error) if error.is_busy() && within < Duration::MAX => {
                    self.resume(vm, course)?;
                    (course.deferrals, course.deferred) =
                        (course.deferrals + 1, course.deferred + pausing.elapsed());
                    self.handle.update(|progress| {
                        progress.state = MigrationState::Setup;
                        progress.busy = Some(error.to_string());
                    });
                    self.wait_a_moment();
                    continue;
                }
                Err(error) => Err(error),
                Ok(sections) => self.close(arming, settings, course).map(|guarded| (sections, guarded)),
            };
            let resumed = self.resume(vm, course);
            course.downtime = pausing.elapsed();
            resumed?;
            let closed = closed?;
            self.handle.update(|progress| {
                progress.state = MigrationState::Precopy;
                progress.busy = None;
            });
            return Ok(closed);
        }
        Err(VmError::new("the guest's I/O did not quiesce").into())
    }

    /// Protects memory until few written pages are left.
    fn arm(&self, arming: &mut Arming<'_>, course: &mut Course) -> Result<(), Stop> {
        let mut before = u64::MAX;
        for number in 1..=MOST_ROUNDS {
            if self.handle.cancelled() {
                return Err(Stop::Cancelled);
            }
            if let Some(error) = self.failure() {
                return Err(error.into());
            }
            let round = arming.round(|| self.handle.cancelled())?;
            course.rounds += 1;
            let pages = round.pages();
            // The first round protects all memory, and says nothing about the guest's writes.
            let shrinks = number <= 2 || pages <= before - before / 4;
            if number > 1 && (pages <= FEW_PAGES || !shrinks) {
                break;
            }
            before = pages;
        }
        course.armed = Some(Instant::now());
        course.arming_faults = self.written.faults();
        Ok(())
    }

    /// Completes the instant of the snapshot, while the guest is paused: protects the pages that
    /// are left. From the return on, each fault copies its unit.
    fn close(
        &self,
        arming: Arming<'_>,
        settings: &SnapshotSettings,
        course: &mut Course,
    ) -> Result<Vec<Bitmap>, VmError> {
        let began = Instant::now();
        // No thread serves a fault while this lock is held. A thread that writes memory waits
        // meanwhile, so this function must not write guest memory.
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        let (round, guarded) = arming.close()?;
        *phase = Phase::Copying;
        drop(phase);
        (course.last, course.protect) = (round, began.elapsed());
        if let Some(PauseHook(hook)) = &settings.in_pause {
            let began = Instant::now();
            let called = caught(hook);
            course.hook = began.elapsed();
            called?;
        }
        Ok(guarded)
    }

    fn resume(&self, vm: &mut dyn SourceVm, course: &mut Course) -> Result<(), Stop> {
        caught(|| vm.resume()).map_err(|error| {
            let why = error.to_string();
            course.resume_failed = Some(error);
            VmError::new(format!("the guest could not be resumed: {why}")).into()
        })
    }

    fn wait_a_moment(&self) {
        let began = Instant::now();
        while began.elapsed() < BETWEEN && !self.handle.cancelled() {
            std::thread::sleep(BETWEEN / 20);
        }
    }

    /// Serves the faults of `shard` until write protection has ended.
    fn serve(&self, shard: usize) {
        vmferry_thread::scheduling::prefer_latency();
        while !self.ended.load(Ordering::Acquire) {
            // A writer may be in a call of a disk that does not answer. The guest must not wait for
            // that writer after a cancel.
            if self.handle.cancelled() && !self.copies.stopped() {
                self.fail(VmError::new("cancelled on request"));
            }
            match self.protection.next_write(shard, LOOK) {
                Ok(None) => {}
                Ok(Some(fault)) => {
                    // Once the copies are stopped, the snapshot has all pages or has failed
                    // already, and memory is no longer registered.
                    if let Err(error) = self.fault(fault)
                        && !self.copies.stopped()
                    {
                        self.fail(error);
                    }
                }
                Err(error) => {
                    tracing::error!("writes of the guest cannot be read: {error}; trying again");
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    fn fault(&self, fault: Fault) -> Result<(), VmError> {
        let position = self.regions.iter().position(|region| region.id == fault.region);
        let page = fault.page.0;
        let Some(position) = position.filter(|at| page < self.regions[*at].pages()) else {
            return Err(VmError::new(format!(
                "a fault on page {page} of {}, which does not exist",
                fault.region
            )));
        };
        // Held while the fault is served: see `close`.
        let phase = self.phase.read().unwrap_or_else(PoisonError::into_inner);
        match *phase {
            Phase::Arming => self.written.fault(&*self.protection, (position, &self.regions[position]), page),
            Phase::Copying => self.copies.fault(self, position, page),
        }
    }

    /// Gives the snapshot up after a failure of a fault thread. The thread that caused the fault
    /// must not sleep on, so all protection is lifted.
    fn fail(&self, error: VmError) {
        // Stopped first: from the end of the protection on, copies are not of the instant.
        self.copies.stop();
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        if let Err(error) = self.protection.end() {
            tracing::error!("the write protection of the guest's memory cannot be lifted: {error}");
        }
    }

    fn failure(&self) -> Option<VmError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().map(|error| VmError::new(error.to_string()))
    }

    /// Writes all blocks, with several threads.
    fn write(&self, image: &Image<'_>, guarded: &[Bitmap]) -> Result<(), Stop> {
        let stopped = on_threads(
            writers(),
            "snapshot",
            || self.copies.stop(),
            || {
                let done = Writer::new(self, image, guarded).work();
                self.handle.counters.add_thread_cpu();
                done
            },
        );
        // The failure of a fault thread is the reason for which the writers have stopped.
        self.failure().map_or(stopped, |failure| Err(failure.into()))
    }

    /// Copies the pages of `run` to `to`.
    fn copy_live(&self, position: usize, run: PageRun, to: &mut [u8]) -> Result<(), VmError> {
        let window = self.memory.window(self.regions[position].id, run)?;
        for (page, to) in to.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().enumerate() {
            let _ = window.copy_page(page, to);
        }
        Ok(())
    }

    fn unprotect_live(&self, position: usize, run: PageRun) -> Result<(), VmError> {
        self.protection.unprotect(self.regions[position].id, run)
    }
}

impl Live for Snapshot<'_> {
    fn copy(&self, position: usize, run: PageRun, to: &mut [u8]) -> Result<(), VmError> {
        self.copy_live(position, run, to)
    }

    fn unprotect(&self, position: usize, run: PageRun) -> Result<(), VmError> {
        self.unprotect_live(position, run)
    }
}

fn pause_and_save(
    vm: &mut dyn SourceVm,
    within: Duration,
    course: &mut Course,
) -> Result<Vec<Section>, VmError> {
    let began = Instant::now();
    caught(|| vm.pause())?;
    course.pause = began.elapsed();
    let sections = caught(|| crate::vm::save(vm, within))?;
    course.state = began.elapsed().saturating_sub(course.pause);
    Ok(sections)
}

fn report(
    snapshot: &Snapshot<'_>,
    (id, settings): (MigrationId, &SnapshotSettings),
    course: Course,
    taken: Result<(), Stop>,
    began: Instant,
) -> Report {
    let state = match &taken {
        _ if course.resume_failed.is_some() => MigrationState::Failed,
        Ok(()) => MigrationState::Completed,
        Err(Stop::Cancelled) => MigrationState::Cancelled,
        Err(_) => MigrationState::Failed,
    };
    let pages = snapshot.memory.layout().pages();
    let image = course.image.filter(|_| taken.is_ok());
    let raw_pages = image.map_or(0, |image| image.raw_pages);
    let bytes = image.map_or(0, |image| image.bytes);
    let wrote = ms(course.write);
    let report = Report {
        state,
        outcome: crate::report::word(state),
        error: taken.err().map(|stop| stop.to_string()),
        resume_failed: course.resume_failed.is_some(),
        id: id.to_string(),
        kind: MigrationKind::File,
        total_ms: ms(began.elapsed()),
        downtime_ms: ms(course.downtime),
        setup_ms: course.armed.map_or(0.0, |armed| ms(armed - began)),
        downtime: Downtime {
            pause_ms: ms(course.pause),
            device_state_ms: ms(course.state),
            last_harvest_ms: ms(course.protect),
            resume_ms: ms(course
                .downtime
                .saturating_sub(course.pause + course.state + course.protect + course.hook)),
            ..Downtime::default()
        },
        bytes: Bytes {
            wire: bytes,
            raw_pages,
            zero_pages: image.map_or(0, |image| pages - image.contents),
            ..Bytes::default()
        },
        passes: vec![PassReport { pages, wire_bytes: bytes, ms: wrote, ..PassReport::default() }],
        throughput_mbps: if wrote > 0.0 { bytes as f64 * 8e-3 / wrote } else { 0.0 },
        deferrals: course.deferrals,
        deferred_ms: ms(course.deferred),
        verified_pages: course.verified,
        verify_ms: ms(course.verify),
        snapshot: Some(figures(snapshot, settings, &course)),
        ..Report::default()
    };
    snapshot.handle.update(|progress| progress.state = state);
    report
}

fn figures(snapshot: &Snapshot<'_>, settings: &SnapshotSettings, course: &Course) -> SnapshotFigures {
    let copies = snapshot.copies.figures();
    SnapshotFigures {
        base: snapshot.since.as_ref().map(|since| since.base().name.to_string()),
        base_pages: course.image.map_or(0, |image| image.contents - image.raw_pages),
        arming_rounds: course.rounds,
        arming_faults: course.arming_faults,
        last_pages: course.last.pages(),
        hook_ms: ms(course.hook),
        faults: copies.faults,
        copied_pages: copies.pages,
        waits: copies.waits,
        wait_ms: ms(copies.waited),
        longest_wait_ms: ms(copies.longest_wait),
        buffer_bytes: settings.buffer,
        buffer_peak_bytes: copies.peak_bytes,
        sync_ms: ms(course.sync),
    }
}
