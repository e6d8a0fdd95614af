//! Working set of a guest that runs from a snapshot: the thread that records it, and the thread
//! that brings it in.
//!
//! # Recording
//! The kernel does not tell which page a guest uses at what time, without a fault that a process
//! handles. Therefore a thread looks for used pages periodically ([`UsedPages`]). All pages that it
//! finds for the first time in one look were used since the previous look, and are recorded in the
//! order of their addresses.
//!
//! # Prefetch
//! The thread reads ahead in the file, so that the disk always has requests, and maps the pages in
//! order. Read-ahead alone would leave a page fault for each page. Mapping alone would read one
//! page after the other.

use super::pio;
use crate::MigrateError;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::{GuestMemory, PageRun, PageSet, RegionId, UsedPages, VmError};
use vmferry_thread::{Role, spawn};
use vmferry_wire::{MAX_WORKING_SET_BYTES, RegionOffsets, WorkingSet};

/// Shortest time between two looks for used pages.
const LOOK: Duration = Duration::from_millis(5);
/// Longest time between two looks, if the previous look took less than [`SHARE`] of it.
const SELDOM: Duration = Duration::from_millis(200);
/// A look that took one unit of time is followed by a wait of this many units. The recording thus
/// takes at most 5 % of one processor.
const SHARE: u32 = 19;
/// Number of pages that are mapped at a time: 1 MiB.
const PIECE_PAGES: u64 = 256;
/// Number of bytes for which reads are under way while earlier pages are mapped. More would delay
/// the reads of pages that the guest waits for.
const AHEAD_BYTES: u64 = 16 << 20;

/// Reads the working set in the file at `path`, which may be any readable file.
///
/// # Errors
/// [`MigrateError::File`] if the file cannot be read, and [`MigrateError::WorkingSet`] if it does
/// not contain a working set.
pub fn read_working_set(path: &Path) -> Result<WorkingSet, MigrateError> {
    use std::io::Read;
    let uri = super::uri(path);
    let mut bytes = Vec::new();
    // A file that is larger than every working set is not read to its end.
    let most = MAX_WORKING_SET_BYTES as u64 + 1;
    File::open(path)
        .and_then(|file| file.take(most).read_to_end(&mut bytes))
        .map_err(|source| MigrateError::File { uri: uri.clone(), source })?;
    WorkingSet::decode(&bytes).map_err(|source| MigrateError::WorkingSet { uri, source })
}

/// Progress of a prefetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PrefetchProgress {
    /// Number of pages of the working set.
    pub pages: u64,
    /// Number of pages that were brought in.
    pub brought: u64,
    /// True if the prefetch has ended.
    pub ended: bool,
}

/// State that the thread of a prefetch shares.
#[derive(Debug, Default)]
struct PrefetchState {
    stop: AtomicBool,
    brought: AtomicU64,
    ended: AtomicBool,
}

/// Thread that brings in a working set. Dropping the value ends the thread.
#[derive(Debug)]
pub(super) struct Prefetch {
    pages: u64,
    state: Arc<PrefetchState>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Starts to bring in the pages of `set`, which was checked. `memory` is mapped from
    /// `file`, in which its regions have the offsets `places`.
    pub(super) fn start(
        set: WorkingSet,
        memory: Arc<dyn GuestMemory>,
        file: File,
        places: &[RegionOffsets],
    ) -> std::io::Result<Self> {
        let (pages, places) = (set.pages(), places.to_vec());
        let state = Arc::new(PrefetchState::default());
        let shared = Arc::clone(&state);
        let work = move || {
            bring(&set, &*memory, &file, &places, &shared);
            shared.ended.store(true, Ordering::Release);
        };
        let thread = spawn(Role::Snapshot, "prefetch", work)?;
        Ok(Self { pages, state, thread: Some(thread) })
    }

    pub(super) fn watch(&self) -> impl Fn() -> PrefetchProgress + Send + Sync + use<> {
        let (pages, state) = (self.pages, Arc::clone(&self.state));
        move || {
            let ended = state.ended.load(Ordering::Acquire);
            PrefetchProgress { pages, brought: state.brought.load(Ordering::Relaxed), ended }
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that brings in the working set panicked");
        }
    }
}

/// Returns the runs of `set` in pieces of at most [`PIECE_PAGES`] pages.
fn pieces(set: &WorkingSet) -> impl Iterator<Item = (RegionId, PageRun)> + '_ {
    set.runs().iter().flat_map(|(region, run)| {
        let (first, end) = (run.first.0, run.end());
        let starts = (first..end).step_by(usize::try_from(PIECE_PAGES).unwrap_or(1));
        starts.map(move |start| (*region, PageRun::from(start..end.min(start + PIECE_PAGES))))
    })
}

fn bring(
    set: &WorkingSet,
    memory: &dyn GuestMemory,
    file: &File,
    places: &[RegionOffsets],
    state: &PrefetchState,
) {
    let (mut ahead, mut ahead_bytes, mut maps) = (pieces(set), 0, true);
    for (region, run) in pieces(set) {
        while ahead_bytes < AHEAD_BYTES
            && let Some((region, run)) = ahead.next()
        {
            if let Some(place) = places.iter().find(|place| place.id == region) {
                pio::will_need(file, place.content(run.first), run.bytes());
            }
            ahead_bytes += run.bytes();
        }
        if state.stop.load(Ordering::Acquire) {
            return;
        }
        if maps && !memory.map_pages(region, run) {
            tracing::warn!("the pages of the working set are read, but the host cannot map them in advance");
            maps = false;
        }
        // The read-ahead is always in front, so the difference is not negative.
        ahead_bytes -= run.bytes();
        state.brought.fetch_add(run.count, Ordering::Relaxed);
    }
}

/// Request to the recording thread to end.
#[derive(Debug, Default)]
struct Ending {
    ends: Mutex<bool>,
    changed: Condvar,
}

impl Ending {
    /// Waits for `time`, or until the end is requested. Returns true if it was requested.
    fn wait(&self, time: Duration) -> bool {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(ends, time, |ends| !*ends);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn request(&self) {
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

/// Thread that records the working set of a guest.
#[derive(Debug)]
pub(super) struct Recording {
    ending: Arc<Ending>,
    thread: Option<JoinHandle<Recorder>>,
}

impl Recording {
    /// Starts to record the pages that `used` finds in `memory`, into a working set of the snapshot
    /// with the id of `set`.
    pub(super) fn start(
        set: WorkingSet,
        used: Box<dyn UsedPages>,
        memory: Arc<dyn GuestMemory>,
    ) -> std::io::Result<Self> {
        let empty = PageSet::empty(memory.layout());
        let mut recorder = Recorder { set, found: empty.clone(), seen: empty, used, memory };
        let ending = Arc::new(Ending::default());
        let asked = Arc::clone(&ending);
        let thread = spawn(Role::Snapshot, "record", move || {
            recorder.record(&asked);
            recorder
        })?;
        Ok(Self { ending, thread: Some(thread) })
    }

    /// Ends the recording and returns the working set.
    pub(super) fn finish(mut self) -> Result<WorkingSet, VmError> {
        let recorder = self.join().ok_or_else(|| VmError::new("the recording thread panicked"))?;
        Ok(recorder.set)
    }

    fn join(&mut self) -> Option<Recorder> {
        self.ending.request();
        self.thread.take()?.join().ok()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Ends the use of the memory on this thread.
        drop(self.join());
    }
}

/// Work of the recording thread.
struct Recorder {
    set: WorkingSet,
    used: Box<dyn UsedPages>,
    /// Pages that were found so far.
    seen: PageSet,
    /// Pages that the current look finds. The set is kept, so that it is allocated once.
    found: PageSet,
    /// Memory in which pages are found. It must not be unmapped before `used` is dropped.
    memory: Arc<dyn GuestMemory>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("layout", self.memory.layout()).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Looks for used pages until the end is requested, the working set is full, or a look fails.
    fn record(&mut self, ending: &Ending) {
        let mut pause = LOOK;
        loop {
            let ends = ending.wait(pause);
            let began = Instant::now();
            let more = match self.look() {
                Ok(Look::Found(pages)) => pages > 0,
                Ok(Look::Full) => {
                    tracing::warn!(
                        "the working set is full; the pages that the guest uses later are not recorded"
                    );
                    return;
                }
                Err(error) => {
                    tracing::warn!("the working set is incomplete: {error}");
                    return;
                }
            };
            if ends {
                return;
            }
            pause = next_pause(pause, began.elapsed(), more);
        }
    }

    fn look(&mut self) -> Result<Look, VmError> {
        self.found.clear();
        self.used.find(&mut self.found)?;
        self.found.subtract(&self.seen);
        for (region, pages) in self.found.iter() {
            for run in pages.runs() {
                if !self.set.push(region, run.into()) {
                    return Ok(Look::Full);
                }
            }
        }
        self.seen.union(&self.found);
        Ok(Look::Found(self.found.count()))
    }
}

/// Result of one look.
enum Look {
    /// This number of pages was found for the first time.
    Found(u64),
    Full,
}

/// Returns the wait before the next look, after a look that took the time `took` and has found new
/// pages or not.
fn next_pause(pause: Duration, took: Duration, more: bool) -> Duration {
    let next = if more { LOOK } else { (pause * 2).min(SELDOM) };
    next.max(took * SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use vmferry_core::{Gpa, Layout, Region, Window};
    use vmferry_testkit::wait_for;
    use vmferry_wire::MigrationId;

    const ID: MigrationId = MigrationId([5; 16]);

    fn layout() -> Layout {
        Layout::new(vec![
            Region { id: RegionId(0), gpa: Gpa(0), len: 4096 << 12 },
            Region { id: RegionId(1), gpa: Gpa(1 << 32), len: 64 << 12 },
        ])
        .unwrap()
    }

    /// Memory that records the calls of `map_pages`.
    struct Noted {
        layout: Layout,
        calls: Mutex<Sender<(RegionId, PageRun)>>,
        maps: bool,
    }

    impl GuestMemory for Noted {
        fn layout(&self) -> &Layout {
            &self.layout
        }

        fn window(&self, _: RegionId, _: PageRun) -> Result<Window<'_>, VmError> {
            Err(VmError::new("not used"))
        }

        fn map_pages(&self, region: RegionId, run: PageRun) -> bool {
            self.calls.lock().unwrap().send((region, run)).unwrap();
            self.maps
        }
    }

    fn memory(maps: bool) -> (Arc<dyn GuestMemory>, Receiver<(RegionId, PageRun)>) {
        let (calls, noted) = channel();
        (Arc::new(Noted { layout: layout(), calls: Mutex::new(calls), maps }), noted)
    }

    fn prefetch(maps: bool) -> (Vec<(u32, u64, u64)>, PrefetchProgress) {
        let mut set = WorkingSet::new(ID);
        set.push(RegionId(1), PageRun::from(3..4));
        set.push(RegionId(0), PageRun::from(100..700));
        set.push(RegionId(0), PageRun::from(0..1));
        let (memory, noted) = memory(maps);
        let file = File::open("/dev/null").unwrap();
        let prefetch = Prefetch::start(set, memory, file, &[]).unwrap();
        let watch = prefetch.watch();
        wait_for("the end of the prefetch", || if watch().ended { Ok(()) } else { Err(watch()) });
        drop(prefetch);
        let calls = noted.iter().map(|(region, run)| (region.0, run.first.0, run.end())).collect();
        (calls, watch())
    }

    #[test]
    fn pages_are_brought_in_in_their_order() {
        let (calls, progress) = prefetch(true);
        assert_eq!(calls, [(1, 3, 4), (0, 100, 356), (0, 356, 612), (0, 612, 700), (0, 0, 1)]);
        assert_eq!(progress, PrefetchProgress { pages: 602, brought: 602, ended: true });
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_asked_once() {
        let (calls, progress) = prefetch(false);
        assert_eq!(calls, [(1, 3, 4)]);
        assert_eq!(progress.brought, 602, "the pages are read nevertheless");
    }

    /// Finds the pages that the test sends, and all pages that it has sent before.
    struct Sent {
        receiver: Receiver<(u32, u64)>,
        all: Vec<(u32, u64)>,
    }

    impl UsedPages for Sent {
        fn find(&mut self, used: &mut PageSet) -> Result<(), VmError> {
            self.all.extend(self.receiver.try_iter());
            for (region, page) in &self.all {
                let pages = used.region_mut(RegionId(*region)).ok_or_else(|| VmError::new("no region"))?;
                pages.set(*page);
            }
            Ok(())
        }
    }

    #[test]
    fn pages_are_recorded_once_in_the_order_of_their_use() {
        let (send, receiver) = channel();
        let used = Box::new(Sent { receiver, all: Vec::new() });
        let mut recorder = Recorder {
            set: WorkingSet::new(ID),
            used,
            seen: PageSet::empty(&layout()),
            found: PageSet::empty(&layout()),
            memory: memory(true).0,
        };
        for look in [vec![(1, 9)], vec![(0, 8), (0, 7), (1, 9)], vec![], vec![(0, 6), (0, 9)]] {
            look.into_iter().for_each(|page| send.send(page).unwrap());
            assert!(matches!(recorder.look(), Ok(Look::Found(_))));
        }
        let runs: Vec<_> =
            recorder.set.runs().iter().map(|(region, run)| (region.0, run.first.0, run.end())).collect();
        assert_eq!(runs, [(1, 9, 10), (0, 7, 9), (0, 6, 7), (0, 9, 10)]);
    }

    #[test]
    fn last_look_is_after_the_request_to_end() {
        let (send, receiver) = channel();
        let used = Box::new(Sent { receiver, all: Vec::new() });
        let recording = Recording::start(WorkingSet::new(ID), used, memory(true).0).unwrap();
        send.send((0, 77)).unwrap();
        let set = recording.finish().unwrap();
        assert_eq!(set.runs(), [(RegionId(0), PageRun::from(77..78))]);
    }

    #[test]
    fn failed_look_keeps_what_was_recorded() {
        let (send, receiver) = channel();
        let used = Box::new(Sent { receiver, all: Vec::new() });
        let recording = Recording::start(WorkingSet::new(ID), used, memory(true).0).unwrap();
        send.send((0, 1)).unwrap();
        std::thread::sleep(LOOK * 4);
        send.send((9, 1)).unwrap();
        std::thread::sleep(LOOK * 4);
        let _ = send.send((0, 2));
        assert!(recording.finish().unwrap().runs().iter().all(|(region, _)| *region == RegionId(0)));
    }

    #[test]
    fn looks_become_rare_and_take_a_small_share_of_the_time() {
        let ms = Duration::from_millis;
        assert_eq!(next_pause(ms(80), ms(0), true), LOOK);
        assert_eq!(next_pause(ms(80), ms(0), false), ms(160));
        assert_eq!(next_pause(ms(160), ms(0), false), SELDOM);
        assert_eq!(next_pause(ms(5), ms(10), true), ms(190));
    }

    #[test]
    fn files_that_hold_no_working_set_are_refused() {
        let folder = vmferry_testkit::Folder::new();
        let path = folder.path("set");
        let refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            read_working_set(Path::new(&path)).unwrap_err().to_string()
        };
        assert!(refused(b"").contains("it is empty"));
        assert!(refused(b"VMFSNAP\n").contains("not a working set"));
        assert!(refused(&WorkingSet::new(ID).encode()[1..]).contains("not a working set"));
        std::fs::write(&path, WorkingSet::new(ID).encode()).unwrap();
        assert_eq!(read_working_set(Path::new(&path)).unwrap(), WorkingSet::new(ID));
        let missing = read_working_set(Path::new(&folder.path("none"))).unwrap_err();
        assert!(matches!(missing, MigrateError::File { .. }), "{missing}");
        let endless = read_working_set(Path::new("/dev/zero")).unwrap_err();
        assert!(endless.to_string().contains("not a working set"), "{endless}");
    }
}
