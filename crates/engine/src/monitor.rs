//! What can be seen of a migration while it runs, and how it is told to stop.

use crate::plan::{CourseChange, Verdict};
use crate::report::{FreePagesFigures, PaceFigures, Report};
use crate::source::Settings;
use crate::wake::Wakers;
use socket2::SockRef;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counters that channel threads add to once a frame.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) wire_bytes: AtomicU64,
    /// Of them, each bulk channel's.
    channels: [AtomicU64; Settings::MAX_CHANNELS as usize],
    pub(crate) raw_pages: AtomicU64,
    pub(crate) zero_pages: AtomicU64,
    pub(crate) untouched: AtomicU64,
    /// Pages left out as free, each as often as it was.
    pub(crate) free: AtomicU64,
    pub(crate) cpu_us: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        let [wire_bytes, raw_pages, zero_pages, untouched, free, cpu_us] = [const { AtomicU64::new(0) }; 6];
        let channels = [const { AtomicU64::new(0) }; Settings::MAX_CHANNELS as usize];
        Self { wire_bytes, channels, raw_pages, zero_pages, untouched, free, cpu_us }
    }
}

impl Counters {
    /// Counts what a bulk channel has sent.
    pub(crate) fn count_channel(&self, channel: u16, bytes: usize) {
        if let Some(counter) = self.channels.get(usize::from(channel)) {
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Bytes of each bulk channel, up to the last that has sent any.
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

    /// Adds what the calling thread has used of the CPU so far; called once, as it ends.
    pub(crate) fn add_thread_cpu(&self) {
        self.cpu_us.fetch_add(thread_cpu_us(), Ordering::Relaxed);
    }
}

/// CPU time of the calling thread in microseconds.
pub(crate) fn thread_cpu_us() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours, and this clock always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    u64::try_from(time.tv_sec * 1_000_000 + time.tv_nsec / 1000).unwrap_or(0)
}

/// Where a migration stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MigrationState {
    /// Connecting, agreeing, starting to track; and a postcopy that waits for I/O to come to rest.
    #[default]
    Setup,
    /// The guest runs on the source while its memory is sent.
    Precopy,
    /// The guest is stopped.
    Switchover,
    /// The guest runs on the target while the rest of its memory is sent.
    Postcopy,
    /// The guest runs on the target, as far as it can without the rest of its memory: the link is lost.
    PostcopyPaused,
    /// The guest runs on the target.
    Completed,
    /// The guest stays, because somebody wanted it to.
    Cancelled,
    /// The guest stays, because it could not be moved.
    Failed,
    /// Nobody can know which side owns the guest; neither does the source run it.
    Unknown,
    /// The guest is lost: it ran on the target and can never have the rest of its memory.
    Lost,
}

/// A snapshot of a migration under way.
#[derive(Debug, Clone, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Progress {
    /// The migration's name, 32 hexadecimal digits; empty before it is connected.
    pub id: String,
    /// Where it stands.
    pub state: MigrationState,
    /// Number of the pass under way, from 0.
    pub pass: u32,
    /// Pages that this pass has to look at.
    pub pass_pages: u64,
    /// Pages sent (with content or as zero), found untouched or left out as free in this pass.
    pub pass_done: u64,
    /// Pages known to be dirty and not yet sent, this pass included.
    pub remaining_pages: u64,
    /// Pages a second that the guest dirtied during the last pass.
    pub dirty_pages_per_s: f64,
    /// Bytes a second that the last telling pass moved.
    pub bandwidth: Option<f64>,
    /// The downtime to expect if the guest were stopped after this pass; in JSON `predicted_downtime_ms`.
    #[serde(rename = "predicted_downtime_ms", serialize_with = "some_millis")]
    pub predicted_downtime: Option<Duration>,
    /// Bytes sent so far.
    pub wire_bytes: u64,
    /// Pages sent with their content so far.
    pub raw_pages: u64,
    /// Pages sent as a count of zeros so far, or not at all because they were never touched.
    pub zero_pages: u64,
    /// Of them, what each bulk channel has sent while the guest ran here.
    pub channel_bytes: Vec<u64>,
    /// Pages that were left out because the guest says that they are free, and not sent since.
    pub free_pages_skipped: u64,
    /// How free pages were learnt of so far; `None` if nobody can be asked, or is to be.
    pub free_pages: Option<FreePagesFigures>,
    /// Time since the start; in JSON `elapsed_ms`.
    #[serde(rename = "elapsed_ms", serialize_with = "millis")]
    pub elapsed: Duration,
    /// Pages that are still to be sent to a guest that runs on the target.
    pub left_pages: Option<u64>,
    /// The pace of the bulk in bytes a second, once one was found.
    pub pace: Option<u64>,
    /// The target has said that it runs the guest, and not yet that it has all of its memory.
    pub runs_there: bool,
    /// Why the link is lost in postcopy, or while nobody knows who owns the guest, as long as it is.
    pub interrupted: Option<String>,
    /// What the fence said last, if it was asked who owns the guest.
    pub fence: Option<String>,
    /// Whether the precopy will end by itself, as of its last pass; `None` before the first has ended, and after the guest was stopped.
    pub verdict: Option<Verdict>,
    /// Why the guest's I/O did not come to rest in time when the guest was to be stopped last: it runs, and will be stopped again
    /// ([`SourceVm::settle`](crate::SourceVm::settle)).
    pub busy: Option<String>,
    /// What this migration has done by itself, and why ([`Settings::auto`](crate::Settings::auto)).
    pub course: Vec<CourseChange>,
    /// It is not tried any more to take it up again, until somebody says [`Monitor::recover`].
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

/// What a watcher of a migration is told, by the thread that migrates and at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// It stands elsewhere now.
    State(MigrationState),
    /// This pass over the pages begins.
    Pass(u32),
}

/// Who is told of changes.
#[derive(Default)]
struct Watcher(Option<Box<dyn Fn(Change) + Send + Sync>>);

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Watcher" } else { "no Watcher" })
    }
}

/// Watches a migration and can cancel it; share it between the thread that migrates and those that look.
#[derive(Debug, Default)]
pub struct Monitor {
    pub(crate) counters: Counters,
    watcher: Watcher,
    cancel: AtomicBool,
    /// The connection that is being opened, if a cancel is to end that.
    opening: Mutex<Option<OwnedFd>>,
    pause: AtomicBool,
    switch: AtomicBool,
    recover: AtomicBool,
    abandon: AtomicBool,
    wakers: Wakers,
    pace: Mutex<Option<PaceFigures>>,
    known: Mutex<Known>,
}

/// What the thread that migrates has told its monitor.
#[derive(Debug, Default)]
struct Known {
    progress: Progress,
    /// Pages that were sent or skipped before the pass under way.
    before: u64,
    /// The account so far, without what `progress` and the counters know better.
    report: Report,
    /// When the migration began; `None` before that.
    began: Option<Instant>,
}

impl Monitor {
    /// A monitor for one migration.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A monitor for one migration that tells `watcher` of changes: it is called by the thread that migrates, which waits for it, and
    /// must not call this monitor but for [`progress`](Self::progress).
    #[must_use]
    pub fn watched(watcher: impl Fn(Change) + Send + Sync + 'static) -> Self {
        Self { watcher: Watcher(Some(Box::new(watcher))), ..Self::default() }
    }

    /// Asks for the guest to stay. Has effect until the handoff commits; says nothing about when.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Release);
        self.wakers.wake();
        if let Some(socket) = &*self.opening.lock().unwrap_or_else(PoisonError::into_inner) {
            // Fails where it has just ended by itself.
            let _ = SockRef::from(socket).shutdown(Shutdown::Both);
        }
    }

    /// What wakes the thread that migrates when one of the requests above is made.
    pub(crate) fn wakers(&self) -> &Wakers {
        &self.wakers
    }

    /// Has a cancel end whatever is waited for on `socket` from now on, until [`opened`](Self::opened); `Interrupted` if there was one
    /// before.
    ///
    /// The cancel is said before the socket is looked for, and asked for after the socket is there: one of the two finds the other. A
    /// socket that is ended before it connects fails when it does.
    pub(crate) fn opening(&self, socket: &impl AsFd) -> io::Result<()> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        *self.opening.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
        if self.cancelled() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    /// A cancel ends no socket from now on; one that did is [known](Self::cancelled).
    pub(crate) fn opened(&self) {
        *self.opening.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether somebody has asked for the guest to stay.
    #[must_use]
    pub fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Acquire)
    }

    /// Asks for the guest to go on on the target after this pass, and the rest of its memory to follow. Has effect on a
    /// migration that can do that: in hybrid mode, with [`OnTimeout::Postcopy`](crate::OnTimeout::Postcopy), or of a postcopy that waits
    /// for I/O to come to rest: the guest then stands still for as long as its VM waits for that.
    pub fn switch_now(&self) {
        self.switch.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Asks for the link to be cut in postcopy, and not to be taken up again before somebody asks for that by
    /// [`recover`](Self::recover): the guest runs on as far as it can. Has no effect at another time.
    pub fn pause(&self) {
        self.pause.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Asks for a link that was lost in postcopy to be taken up again now.
    pub fn recover(&self) {
        self.recover.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Gives up a link that was lost in postcopy: what the target still lacks it will never have.
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

    /// Where it stands now.
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

    /// The account of the migration so far, in the shape that it has at the end.
    ///
    /// Its `state` is the one of [`progress`](Self::progress), and its `outcome` is `None`. What is known only at the end is empty.
    pub fn report(&self) -> Report {
        let progress = self.progress();
        let known = self.lock();
        let mut report = known.report.clone();
        let total = known.began.map(|began| began.elapsed());
        drop(known);
        report.state = progress.state;
        report.total_ms = total.unwrap_or_default().as_secs_f64() * 1e3;
        report.bytes.wire = progress.wire_bytes;
        report.bytes.raw_pages = progress.raw_pages;
        report.bytes.zero_pages = progress.zero_pages;
        report.bytes.free_pages_skipped = progress.free_pages_skipped;
        report.free_pages = progress.free_pages;
        report.course = progress.course;
        report
    }

    /// A migration begins of which `report` is known.
    pub(crate) fn begin(&self, began: Instant, report: Report) {
        let mut known = self.lock();
        (known.began, known.report) = (Some(began), report);
    }

    /// So much is known of it now.
    pub(crate) fn account(&self, report: Report) {
        self.lock().report = report;
    }

    /// Pages that were sent or skipped since the start.
    pub(crate) fn pages_done(&self) -> u64 {
        let counters = &self.counters;
        [&counters.raw_pages, &counters.zero_pages, &counters.untouched, &counters.free]
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        let mut known = self.lock();
        let before = known.progress.state;
        change(&mut known.progress);
        let after = known.progress.state;
        drop(known);
        if before != after {
            self.tell(Change::State(after));
        }
    }

    fn tell(&self, change: Change) {
        if let Watcher(Some(watcher)) = &self.watcher {
            crate::vm::shielded("whoever watches the migration", || watcher(change));
        }
    }

    /// A pass of `pages` pages begins.
    pub(crate) fn begin_pass(&self, pass: u32, pages: u64) {
        let done = self.pages_done();
        let mut known = self.lock();
        known.progress.pass = pass;
        known.progress.pass_pages = pages;
        known.before = done;
        drop(known);
        self.tell(Change::Pass(pass));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        // A panic while holding it cannot leave a snapshot that is worse than stale.
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
