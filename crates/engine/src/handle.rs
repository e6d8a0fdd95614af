//! Migration handle: shows the progress of a running migration, and passes the operator's requests
//! to the migration.

use crate::plan::{CourseChange, Verdict};
use crate::report::{
    Bytes, CodecFigures, DeltaCacheFigures, EncodingFigures, FreePagesFigures, KnownPagesFigures,
    PaceFigures, Report, SenderFigures,
};
use crate::source::Settings;
use crate::wake::Wakers;
use socket2::SockRef;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmferry_codec::SentFigures;
use vmferry_core::{PAGE_BYTES, PAGE_SIZE};
use vmferry_wire::{Encoding, Segment};

/// Counters that the channel threads increase once per frame.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) wire_bytes: AtomicU64,
    /// Bytes sent by each bulk channel, also counted in `wire_bytes`.
    channels: [AtomicU64; Settings::MAX_CHANNELS as usize],
    pub(crate) raw_pages: AtomicU64,
    pub(crate) zero_pages: AtomicU64,
    pub(crate) untouched: AtomicU64,
    /// Pages skipped as free. A page that was skipped several times counts several times.
    pub(crate) free: AtomicU64,
    pub(crate) cpu_us: AtomicU64,
    pub(crate) encodings: Encodings,
    pub(crate) hashes: HashCounters,
}

/// Counters of pages that were sent as hashes.
#[derive(Debug, Default)]
pub(crate) struct HashCounters {
    pages: AtomicU64,
    bytes: AtomicU64,
    unknown: AtomicU64,
    cpu_ns: AtomicU64,
}

impl HashCounters {
    /// Counts a frame of `bytes` bytes with the hashes of `pages` pages, which took `cpu`.
    pub(crate) fn sent(&self, pages: usize, bytes: usize, cpu: Duration) {
        self.pages.fetch_add(pages as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.cpu_ns.fetch_add(u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Counts pages that the target does not know. They are sent with their content.
    pub(crate) fn unknown(&self, pages: u64) {
        self.unknown.fetch_add(pages, Ordering::Relaxed);
    }

    /// Returns the number of pages that need not be sent, unless the target has not answered yet.
    fn done(&self) -> u64 {
        let unknown = self.unknown.load(Ordering::Relaxed);
        self.pages.load(Ordering::Relaxed).saturating_sub(unknown)
    }

    /// Returns the figures, or `None` if no hash was sent.
    pub(crate) fn figures(&self) -> Option<KnownPagesFigures> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (hashes, known) = (load(&self.pages), self.done());
        (hashes > 0).then(|| KnownPagesFigures {
            hashes,
            known,
            known_bytes: known * PAGE_BYTES as u64,
            unknown: load(&self.unknown),
            wire_bytes: load(&self.bytes),
            cpu_ms: load(&self.cpu_ns) as f64 / 1e6,
        })
    }
}

/// Counters of encoded pages.
#[derive(Debug, Default)]
pub(crate) struct Encodings {
    pub(crate) lz4: EncodingCounters,
    pub(crate) zstd: EncodingCounters,
    pub(crate) delta: EncodingCounters,
    /// Bytes by which frames with encoded pages were shorter than the same frames without encoding.
    saved: AtomicU64,
    /// Caches of all channels. `None` if the source sends no deltas.
    caches: Mutex<Option<DeltaCaches>>,
}

/// Figures of the caches of versions, for all channels together.
#[derive(Debug, Default)]
struct DeltaCaches {
    done: SentFigures,
    memory: u64,
    limit: u64,
}

/// Counters of the pages of one encoding.
#[derive(Debug, Default)]
pub(crate) struct EncodingCounters {
    pages: AtomicU64,
    bytes: AtomicU64,
    /// CPU time of the encoding in ns, which includes pages that did not become smaller.
    cpu_ns: AtomicU64,
}

impl EncodingCounters {
    pub(crate) fn add_cpu(&self, cpu: Duration) {
        self.cpu_ns.fetch_add(u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn figures(&self) -> EncodingFigures {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let pages = load(&self.pages);
        EncodingFigures {
            pages,
            raw_bytes: pages * PAGE_SIZE,
            bytes: load(&self.bytes),
            cpu_ms: load(&self.cpu_ns) as f64 / 1e6,
        }
    }
}

impl Encodings {
    /// Counts the segments of a frame.
    pub(crate) fn count(&self, segments: &[Segment]) {
        for segment in segments {
            let counters = match segment.encoding {
                // Hashes have counters of their own.
                Encoding::Raw | Encoding::Hash => continue,
                Encoding::Lz4 => &self.lz4,
                Encoding::Zstd => &self.zstd,
                Encoding::Delta => &self.delta,
            };
            counters.pages.fetch_add(segment.pages as u64, Ordering::Relaxed);
            counters.bytes.fetch_add(segment.bytes as u64, Ordering::Relaxed);
            let saved = segment.pages * PAGE_BYTES - segment.bytes;
            self.saved.fetch_add(saved as u64, Ordering::Relaxed);
        }
    }

    /// Returns the bytes that encoded pages have saved.
    pub(crate) fn saved(&self) -> u64 {
        self.saved.load(Ordering::Relaxed)
    }

    /// Begins to count the work of caches that may hold `limit` bytes together. `None` means that
    /// the source sends no deltas.
    pub(crate) fn begin_caches(&self, limit: Option<u64>) {
        *self.caches() = limit.map(|limit| DeltaCaches { limit, ..DeltaCaches::default() });
    }

    /// Counts what the cache of a channel has `done`, and by how many bytes it has grown.
    pub(crate) fn count_cache(&self, done: SentFigures, growth: usize) {
        if let Some(caches) = &mut *self.caches() {
            caches.done += done;
            caches.memory += growth as u64;
        }
    }

    /// Returns the figures of the caches, or `None` if the source sends no deltas.
    pub(crate) fn delta_cache(&self) -> Option<DeltaCacheFigures> {
        let caches = self.caches();
        caches.as_ref().map(|caches| DeltaCacheFigures::of(caches.done, caches.memory, caches.limit))
    }

    fn caches(&self) -> std::sync::MutexGuard<'_, Option<DeltaCaches>> {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the figures, or `None` if no page was encoded.
    pub(crate) fn figures(&self) -> Option<CodecFigures> {
        let figures =
            CodecFigures { lz4: self.lz4.figures(), zstd: self.zstd.figures(), delta: self.delta.figures() };
        (figures != CodecFigures::default()).then_some(figures)
    }
}

impl Default for Counters {
    fn default() -> Self {
        let [wire_bytes, raw_pages, zero_pages, untouched, free, cpu_us] = [const { AtomicU64::new(0) }; 6];
        let channels = [const { AtomicU64::new(0) }; Settings::MAX_CHANNELS as usize];
        let (encodings, hashes) = (Encodings::default(), HashCounters::default());
        Self { wire_bytes, channels, raw_pages, zero_pages, untouched, free, cpu_us, encodings, hashes }
    }
}

impl Counters {
    /// Adds `bytes` to the counter of a bulk channel.
    pub(crate) fn count_channel(&self, channel: u16, bytes: usize) {
        if let Some(counter) = self.channels.get(usize::from(channel)) {
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Returns the bytes of each bulk channel, up to the last channel that has sent any.
    fn channels(&self) -> Vec<u64> {
        let mut bytes: Vec<u64> =
            self.channels.iter().map(|counter| counter.load(Ordering::Relaxed)).collect();
        bytes.truncate(bytes.iter().rposition(|bytes| *bytes > 0).map_or(0, |last| last + 1));
        bytes
    }

    pub(crate) fn count_frame(&self, bytes: usize, raw_pages: u64, zero_pages: u64) {
        self.wire_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.raw_pages.fetch_add(raw_pages, Ordering::Relaxed);
        self.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
    }

    /// Adds the CPU time of the calling thread. Each thread calls this once, as it ends.
    pub(crate) fn add_thread_cpu(&self) {
        self.cpu_us.fetch_add(thread_cpu_us(), Ordering::Relaxed);
    }
}

/// Returns the CPU time of the calling thread in microseconds.
pub(crate) fn thread_cpu_us() -> u64 {
    u64::try_from(thread_cpu().as_micros()).unwrap_or(u64::MAX)
}

/// Returns the CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local variable that outlives the call, and this clock always exists on
    // Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// State of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MigrationState {
    /// The source connects, negotiates and starts to track dirty pages. A postcopy also waits in
    /// this state for I/O to quiesce.
    #[default]
    Setup,
    /// The guest runs on the source while its memory is sent.
    Precopy,
    /// The guest is stopped for the switchover.
    Switchover,
    /// The guest runs on the target while the rest of its memory is sent.
    Postcopy,
    /// The guest runs on the target as far as it can without the missing pages, because the link is
    /// lost.
    PostcopyPaused,
    /// The guest runs on the target.
    Completed,
    /// The guest stays on the source, because the operator or a policy cancelled the migration.
    Cancelled,
    /// The guest stays on the source, because it could not be moved.
    Failed,
    /// The owner of the guest is not known. The source does not run the guest.
    Unknown,
    /// The guest is lost. It ran on the target and can never get its missing pages.
    Lost,
}

/// Progress of a migration at one moment.
#[derive(Debug, Clone, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Progress {
    /// Identifier of the migration, 32 hexadecimal digits. Empty before the source is connected.
    pub id: String,
    /// State of the migration.
    pub state: MigrationState,
    /// Number of the current pass, from 0.
    pub pass: u32,
    /// Number of pages that the current pass began with.
    pub pass_pages: u64,
    /// Number of pages of the current pass that are done: sent with content or as zeros, found
    /// untouched, or skipped as free.
    pub pass_done: u64,
    /// Number of pages of the current pass that are not done yet.
    pub remaining_pages: u64,
    /// Pages per second that the guest dirtied during the last pass.
    pub dirty_pages_per_s: f64,
    /// Bandwidth of the link in bytes per second, from the last pass that was large enough for a
    /// measurement. `None` before the end of the first pass.
    pub bandwidth: Option<f64>,
    /// Downtime to expect if the guest were stopped now. After the guest was stopped, the downtime
    /// that was expected then. In JSON, `predicted_downtime_ms`.
    #[serde(rename = "predicted_downtime_ms", serialize_with = "some_millis")]
    pub predicted_downtime: Option<Duration>,
    /// Bytes sent so far.
    pub wire_bytes: u64,
    /// Number of pages sent with their content so far.
    pub raw_pages: u64,
    /// Number of pages sent as runs of zeros so far, or not sent because the guest never touched
    /// them.
    pub zero_pages: u64,
    /// Bytes sent so far by each bulk channel, up to the last channel that has sent any.
    pub channel_bytes: Vec<u64>,
    /// Number of pages that were skipped because the guest reported them as free, and that were not
    /// sent since.
    pub free_pages_skipped: u64,
    /// Figures of the free pages so far. `None` if the guest cannot be asked, or if the settings do
    /// not allow it.
    pub free_pages: Option<FreePagesFigures>,
    /// Time since the start of the migration. In JSON, `elapsed_ms`.
    #[serde(rename = "elapsed_ms", serialize_with = "millis")]
    pub elapsed: Duration,
    /// Number of missing pages that the source still has to send in postcopy. `None` while there is
    /// no handover, or while the link is lost.
    pub left_pages: Option<u64>,
    /// Figures of the bulk channels that send at the same time. `None` unless
    /// [`Settings::adapt_channels`](crate::Settings::adapt_channels) is set.
    pub senders: Option<SenderFigures>,
    /// Rate limit of the bulk channels in postcopy, in bytes per second. `None` until the rate
    /// control has found a rate.
    pub pace: Option<u64>,
    /// True in postcopy, from the target's message that the guest runs until its message that all
    /// memory has arrived.
    #[serde(rename = "runs_there")]
    pub runs_on_target: bool,
    /// True from the commit until the source knows who owns the guest.
    #[serde(skip)]
    pub owner_unknown: bool,
    /// Reason for the loss of the link. `None` unless the link is lost after the handover, or the
    /// owner of the guest is unknown.
    pub interrupted: Option<String>,
    /// Last answer of the arbiter, if the source has asked it who owns the guest.
    #[serde(rename = "fence")]
    pub arbiter: Option<String>,
    /// Prediction of whether the precopy will converge, made after the last pass. `None` before the
    /// end of the first pass, and after the guest was stopped.
    pub verdict: Option<Verdict>,
    /// I/O of the guest that did not quiesce in time at the last attempt to stop the guest
    /// ([`SourceVm::quiesce`](crate::SourceVm::quiesce)). Meanwhile, the guest runs, and the source
    /// will try again. `None` if the I/O did quiesce.
    pub busy: Option<String>,
    /// Changes that the migration made by itself, with reasons
    /// ([`Settings::auto`](crate::Settings::auto)).
    pub course: Vec<CourseChange>,
    /// True if the source no longer reconnects by itself, and waits for
    /// [`MigrationHandle::recover`].
    pub awaits_recover: bool,
}

fn millis<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e3)
}

fn some_millis<S: serde::Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => millis(time, serializer),
        None => serializer.serialize_none(),
    }
}

/// Change that the migrating thread reports to the watcher of a [`MigrationHandle`] as the change
/// happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// The migration has entered this state.
    State(MigrationState),
    /// The pass with this number begins.
    Pass(u32),
}

/// Optional callback that receives changes.
#[derive(Default)]
struct Watcher(Option<Box<dyn Fn(Change) + Send + Sync>>);

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Watcher" } else { "no Watcher" })
    }
}

/// Handle that shows the progress of one migration and passes requests to it, such as a cancel.
///
/// Share the handle between the thread that calls [`migrate`](crate::migrate) and the threads that
/// watch or control the migration. Use each handle for one migration only.
#[derive(Debug, Default)]
pub struct MigrationHandle {
    pub(crate) counters: Counters,
    watcher: Watcher,
    cancel: AtomicBool,
    /// Socket of the connection that is being opened, if a cancel must end the attempt.
    opening: Mutex<Option<OwnedFd>>,
    pause: AtomicBool,
    switch: AtomicBool,
    recover: AtomicBool,
    abandon: AtomicBool,
    wakers: Wakers,
    pace: Mutex<Option<PaceFigures>>,
    known: Mutex<Known>,
}

/// State that the migrating thread has stored for readers of the handle.
#[derive(Debug, Default)]
struct Known {
    progress: Progress,
    /// Number of pages that were sent or skipped before the current pass.
    before: u64,
    /// Report so far, without the figures that `progress` and the counters hold.
    report: Report,
    /// Start of the migration. `None` before the start.
    began: Option<Instant>,
}

impl MigrationHandle {
    /// Returns a handle for one migration.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a handle for one migration that reports changes to `watcher`.
    ///
    /// The migrating thread calls `watcher` and waits until it returns. `watcher` must not call any
    /// method of this handle except [`progress`](Self::progress). A panic of `watcher` is logged,
    /// and does not affect the migration.
    #[must_use]
    pub fn watched(watcher: impl Fn(Change) + Send + Sync + 'static) -> Self {
        Self { watcher: Watcher(Some(Box::new(watcher))), ..Self::default() }
    }

    /// Requests that the migration is cancelled and the guest stays on the source.
    ///
    /// The method returns at once. The request has no effect if the source has already sent the
    /// commit.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Release);
        self.wakers.wake();
        if let Some(socket) = &*self.opening.lock().unwrap_or_else(PoisonError::into_inner) {
            // The call fails if the socket has just been closed. That is harmless.
            let _ = SockRef::from(socket).shutdown(Shutdown::Both);
        }
    }

    /// Returns the wakers, which wake the migrating thread after each request.
    pub(crate) fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// Registers `socket`. Until [`opened`](Self::opened) is called, a cancel ends every wait on
    /// this socket.
    ///
    /// Returns `Interrupted` if the migration was already cancelled.
    ///
    /// No cancel is missed, because `cancel` sets its flag before it looks for the socket, and this
    /// function stores the socket before it reads the flag. A socket that is shut down before it
    /// connects fails when it connects.
    pub(crate) fn opening(&self, socket: &impl AsFd) -> io::Result<()> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        *self.opening.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
        if self.cancelled() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    /// Removes the registered socket. A later cancel shuts down no socket. An earlier cancel is
    /// still reported by [`cancelled`](Self::cancelled).
    pub(crate) fn opened(&self) {
        *self.opening.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns true if [`cancel`](Self::cancel) was called.
    #[must_use]
    pub fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Acquire)
    }

    /// Requests that the guest moves to the target after the current pass, before all of its memory
    /// has been sent.
    ///
    /// The request has an effect only if the settings allow postcopy: in hybrid mode, with
    /// [`OnTimeout::Postcopy`](crate::OnTimeout::Postcopy), with
    /// [`Auto::postcopy`](crate::plan::Auto::postcopy), and in postcopy mode while the migration
    /// waits for I/O to quiesce. The guest is then stopped for as long as its I/O takes to quiesce.
    pub fn switch_now(&self) {
        self.switch.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Requests that the source cuts the link in postcopy, and does not reconnect before
    /// [`recover`](Self::recover) is called.
    ///
    /// The guest continues on the target as far as it can without the missing pages. The request
    /// has no effect outside postcopy.
    pub fn pause(&self) {
        self.pause.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Requests that the source reconnects now, and for another [`Settings::reconnect_for`], after
    /// the link was lost in postcopy.
    pub fn recover(&self) {
        self.recover.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Gives up a link that was lost after the handover.
    ///
    /// If the guest runs on the target, it is lost, because the target never gets the missing
    /// pages. If the owner of the guest is unknown, the migration ends with
    /// [`MigrationState::Unknown`]. The request has no effect while the link works.
    pub fn abandon(&self) {
        self.abandon.store(true, Ordering::Release);
        self.wakers.wake();
    }

    pub(crate) fn set_pace(&self, figures: PaceFigures) {
        *self.pace.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(figures);
    }

    pub(crate) fn pace(&self) -> Option<PaceFigures> {
        self.pace.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    pub(crate) fn take_switch(&self) -> bool {
        self.switch.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn take_pause(&self) -> bool {
        self.pause.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn take_recover(&self) -> bool {
        self.recover.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn take_abandon(&self) -> bool {
        self.abandon.swap(false, Ordering::AcqRel)
    }

    /// Returns the current progress.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let known = self.lock();
        let (mut progress, before) = (known.progress.clone(), known.before);
        drop(known);
        let done = self.pages_done().saturating_sub(before);
        progress.pass_done = done.min(progress.pass_pages);
        progress.remaining_pages = progress.pass_pages - progress.pass_done;
        let counters = &self.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        progress.wire_bytes = read(&counters.wire_bytes);
        progress.raw_pages = read(&counters.raw_pages);
        progress.zero_pages = read(&counters.zero_pages) + read(&counters.untouched);
        progress.channel_bytes = self.counters.channels();
        progress
    }

    /// Returns the report of the migration so far.
    ///
    /// `state` is the same as that of [`progress`](Self::progress), and `outcome` is `None`.
    /// Figures that are known only at the end are empty.
    pub fn report(&self) -> Report {
        let progress = self.progress();
        let known = self.lock();
        let mut report = known.report.clone();
        let total = known.began.map(|began| began.elapsed());
        drop(known);
        report.state = progress.state;
        report.total_ms = total.unwrap_or_default().as_secs_f64() * 1e3;
        let codecs = self.counters.encodings.figures();
        report.bytes = Bytes::of_codecs(codecs.as_ref());
        report.bytes.wire = progress.wire_bytes;
        report.bytes.raw_pages = progress.raw_pages;
        report.bytes.zero_pages = progress.zero_pages;
        report.bytes.free_pages_skipped = progress.free_pages_skipped;
        report.codecs = codecs;
        report.delta_cache = self.counters.encodings.delta_cache();
        report.known_pages = self.counters.hashes.figures();
        report.free_pages = progress.free_pages;
        report.senders = progress.senders;
        report.course = progress.course;
        report
    }

    /// Stores the start time of a migration and its first report.
    pub(crate) fn begin(&self, began: Instant, report: Report) {
        let mut known = self.lock();
        (known.began, known.report) = (Some(began), report);
    }

    /// Replaces the report so far.
    pub(crate) fn account(&self, report: Report) {
        self.lock().report = report;
    }

    /// Returns the number of pages that were sent or skipped since the start.
    pub(crate) fn pages_done(&self) -> u64 {
        let counters = &self.counters;
        [&counters.raw_pages, &counters.zero_pages, &counters.untouched, &counters.free]
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum::<u64>()
            + counters.hashes.done()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        let mut known = self.lock();
        let before = known.progress.state;
        change(&mut known.progress);
        let after = known.progress.state;
        drop(known);
        if before != after {
            self.notify(Change::State(after));
        }
    }

    fn notify(&self, change: Change) {
        if let Watcher(Some(watcher)) = &self.watcher {
            crate::vm::shielded("the watcher of the migration failed", || watcher(change));
        }
    }

    /// Records the start of pass number `pass`, which has `pages` pages.
    pub(crate) fn begin_pass(&self, pass: u32, pages: u64) {
        let done = self.pages_done();
        let mut known = self.lock();
        known.progress.pass = pass;
        known.progress.pass_pages = pages;
        known.before = done;
        drop(known);
        self.notify(Change::Pass(pass));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        // A thread that panics while it holds this lock can leave the stored state outdated, but
        // not invalid.
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
