//! A bulk channel's receiving thread: frames straight into guest memory, and a digest of what arrived.

use super::session::MAX_NAMED_RUNS;
use crate::channel::{IoBuf, Stream};
use crate::vm::{GuestMemory, VmError};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_memory::{PAGE_BYTES, PageRun, RegionId, Window};
use vmferry_wire::{
    FRAME_HEADER_BYTES, FrameHeader, FrameKind, MAX_FRAME_RUNS, MAX_TABLE_BYTES, PageName, RunEntry, RunKind,
    RunName, Table, WireError,
};

/// Differing pages that are named to the source; the rest is counted.
const MOST_SAMPLES: usize = 16;

/// Why a channel stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The socket.
    #[error("the link failed: {0}")]
    Link(#[from] io::Error),
    /// The peer.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// The VMM's memory.
    #[error("guest memory could not be written: {0}")]
    Vm(#[from] VmError),
}

/// What is known of each page of the target, shared by all its channels.
///
/// A page belongs to one channel (the source deals chunks), so no two threads contend for a bit; they may share a word
/// with a hostile source only, and then atomics keep that harmless.
#[derive(Debug)]
pub(crate) struct Arrivals {
    regions: Vec<RegionState>,
    suspect_count: AtomicU64,
    pages: AtomicU64,
    compared: AtomicU64,
    mismatched: AtomicU64,
    samples: Mutex<Vec<PageName>>,
    /// Whether memory is complete and must not be written any more. Held for reading while a frame is taken.
    sealed: RwLock<bool>,
}

#[derive(Debug)]
struct RegionState {
    id: RegionId,
    /// Pages whose memory may hold anything but zeros.
    written: AtomicBitmap,
    /// Pages whose newest content did not match its digest.
    suspect: AtomicBitmap,
}

impl Arrivals {
    pub(crate) fn new(memory: &dyn GuestMemory) -> Self {
        let state = |region: &vmferry_memory::Region| RegionState {
            id: region.id,
            written: AtomicBitmap::new(region.pages()),
            suspect: AtomicBitmap::new(region.pages()),
        };
        Self {
            regions: memory.layout().regions().iter().map(state).collect(),
            suspect_count: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            compared: AtomicU64::new(0),
            mismatched: AtomicU64::new(0),
            samples: Mutex::new(Vec::new()),
            sealed: RwLock::new(false),
        }
    }

    fn region(&self, id: RegionId) -> Result<&RegionState, WireError> {
        self.regions.iter().find(|region| region.id == id).ok_or(WireError::Field {
            what: "region",
            value: id.0.into(),
            allowed: "one of the layout",
        })
    }

    /// Pages received so far, counting a page each time it came.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Refuses every frame from now on. Fails if one is just being taken, or a page is damaged: an honest source has
    /// waited for the word that all is here and sound, one that has not must not have its guest started.
    pub(crate) fn seal(&self) -> bool {
        let Ok(mut sealed) = self.sealed.try_write() else { return false };
        *sealed = true;
        self.suspects().0 == 0
    }

    /// How many pages are damaged, and the first of them as runs. Exact while no frame is being received.
    pub(crate) fn suspects(&self) -> (u64, Vec<RunName>) {
        if self.suspect_count.load(Ordering::Acquire) == 0 {
            return (0, Vec::new());
        }
        let (mut count, mut runs) = (0, Vec::new());
        for region in &self.regions {
            let mut map = Bitmap::new(region.suspect.len());
            region.suspect.harvest(&mut map);
            for run in map.runs() {
                // They stay suspect until they have come again.
                region.suspect.set_range(run.clone());
                count += run.end - run.start;
                if runs.len() < MAX_NAMED_RUNS {
                    runs.push(RunName { region: region.id, first: run.start, count: run.end - run.start });
                }
            }
        }
        (count, runs)
    }

    /// Pages compared, pages that differ, and the first of these.
    pub(crate) fn differences(&self) -> (u64, u64, Vec<PageName>) {
        let samples = self.samples.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        (self.compared.load(Ordering::Acquire), self.mismatched.load(Ordering::Acquire), samples)
    }

    fn mark_suspect(&self, region: &RegionState, page: u64) {
        if !region.suspect.set(page) {
            self.suspect_count.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn mark_sound(&self, region: &RegionState, page: u64) {
        // Damage is rare: one load in the common case.
        if self.suspect_count.load(Ordering::Acquire) > 0 && region.suspect.test_and_clear(page) {
            self.suspect_count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn differs(&self, region: RegionId, page: u64) {
        self.mismatched.fetch_add(1, Ordering::AcqRel);
        let mut samples = self.samples.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if samples.len() < MOST_SAMPLES {
            samples.push(PageName { region, page });
        }
    }
}

/// Where frames come from: a socket, or a file.
pub(crate) trait FrameSource {
    /// Fills all of `bufs`.
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()>;
}

impl FrameSource for &Stream {
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        self.receive(bufs)
    }
}

/// The receiving end of a bulk channel.
pub(crate) struct Receiver<'a, S> {
    memory: &'a dyn GuestMemory,
    arrivals: &'a Arrivals,
    stream: S,
    sequence: u64,
    /// As long as the longest table.
    table: Vec<u8>,
    scratch: Box<[u8; PAGE_BYTES]>,
    touched: Bitmap,
}

impl<'a, S: FrameSource> Receiver<'a, S> {
    pub(crate) fn new(memory: &'a dyn GuestMemory, arrivals: &'a Arrivals, stream: S) -> Self {
        Self {
            memory,
            arrivals,
            stream,
            sequence: 0,
            table: vec![0; MAX_TABLE_BYTES],
            scratch: Box::new([0; PAGE_BYTES]),
            touched: Bitmap::new(0),
        }
    }

    /// Receives up to and including the next barrier; returns the pass that it ends.
    pub(crate) fn receive_pass(&mut self) -> Result<u32, ReceiveError> {
        loop {
            let mut bytes = [0; FRAME_HEADER_BYTES];
            self.stream.fill(&mut [IoBuf::from_bytes_mut(&mut bytes)])?;
            let header = FrameHeader::decode(&bytes)?;
            if header.sequence != self.sequence {
                return Err(WireError::Field {
                    what: "frame number",
                    value: header.sequence,
                    allowed: "the one after the last frame's",
                }
                .into());
            }
            self.sequence += 1;
            match header.kind {
                FrameKind::Barrier => return Ok(header.pass),
                FrameKind::Pages => self.receive_frame(&header, Self::receive_pages)?,
                FrameKind::Digests => self.receive_frame(&header, Self::compare)?,
            }
        }
    }

    fn receive_frame(
        &mut self,
        header: &FrameHeader,
        take: fn(&mut Self, &RegionState, &Table<'_>) -> Result<(), ReceiveError>,
    ) -> Result<(), ReceiveError> {
        let arrivals = self.arrivals;
        let sealed = arrivals.sealed.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *sealed {
            return Err(WireError::Field {
                what: "a frame of pass",
                value: header.pass.into(),
                allowed: "none after the last pass",
            }
            .into());
        }
        let region = arrivals.region(header.region)?;
        // The table's buffer is lent out and put back: `take` needs the rest of self.
        let mut buffer = std::mem::take(&mut self.table);
        let bytes = &mut buffer[..header.table_bytes()];
        self.stream.fill(&mut [IoBuf::from_bytes_mut(bytes)])?;
        let table = Table::decode(header, bytes, region.written.len())?;
        take(self, region, &table)?;
        self.table = buffer;
        Ok(())
    }

    fn receive_pages(&mut self, region: &RegionState, table: &Table<'_>) -> Result<(), ReceiveError> {
        let mut bufs = [IoBuf::from_bytes(&[]); MAX_FRAME_RUNS];
        let mut used = 0;
        for RunEntry { kind, run } in table.runs() {
            match kind {
                RunKind::Zero => self.zero(region, run)?,
                RunKind::Data => {
                    // Marked before it is written: a frame cut off half-way leaves no page that is taken for zero.
                    region.written.set_range(run.range());
                    bufs[used] = IoBuf::from_window(self.memory.window(region.id, run)?);
                    used += 1;
                }
            }
        }
        self.stream.fill(&mut bufs[..used])?;
        self.check(region, table)
    }

    /// Every page against its digest. A mismatch is no error yet: the guest may have written the page between the
    /// source's digest and its copy into the socket, and then it is dirty and comes again (traps.md 10).
    fn check(&mut self, region: &RegionState, table: &Table<'_>) -> Result<(), ReceiveError> {
        // Backwards: what came last is still in the cache, and going forwards would push it out before its turn.
        let mut digests = table.digests().rev();
        let data = table.runs().rev().filter(|entry| entry.kind == RunKind::Data);
        let mut pages = 0;
        for RunEntry { run, .. } in data {
            let window = self.memory.window(region.id, run)?;
            for page in (0..window.pages()).rev() {
                let index = run.first.0 + page as u64;
                if window.digest(page, &mut self.scratch) == digests.next() {
                    self.arrivals.mark_sound(region, index);
                } else {
                    self.arrivals.mark_suspect(region, index);
                }
            }
            pages += run.count;
        }
        self.arrivals.pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    fn zero(&self, region: &RegionState, run: PageRun) -> Result<(), ReceiveError> {
        for page in run.range() {
            if region.written.test(page) {
                let window: Window<'_> = self.memory.window(region.id, (page..page + 1).into())?;
                window.zero();
            }
            self.arrivals.mark_sound(region, page);
        }
        self.arrivals.pages.fetch_add(run.count, Ordering::Relaxed);
        Ok(())
    }

    fn compare(&mut self, region: &RegionState, table: &Table<'_>) -> Result<(), ReceiveError> {
        let mut digests = table.digests();
        let mut touched = std::mem::replace(&mut self.touched, Bitmap::new(0));
        if touched.len() != region.written.len() {
            touched = Bitmap::new(region.written.len());
        }
        for RunEntry { kind, run } in table.runs() {
            match kind {
                RunKind::Zero => {
                    // Pages that were never touched here read as zero, and reading them would only make them exist.
                    touched.clear_range(run.range());
                    self.memory.touched(region.id, run, &mut touched)?;
                    for some in touched.runs_in(run.range()) {
                        self.compare_run(region.id, some.into(), || None)?;
                    }
                }
                RunKind::Data => self.compare_run(region.id, run, || digests.next())?,
            }
            self.arrivals.compared.fetch_add(run.count, Ordering::AcqRel);
        }
        self.touched = touched;
        Ok(())
    }

    fn compare_run(
        &mut self,
        region: RegionId,
        run: PageRun,
        mut want: impl FnMut() -> Option<vmferry_memory::PageDigest>,
    ) -> Result<(), ReceiveError> {
        let window = self.memory.window(region, run)?;
        for (page, index) in (0..window.pages()).zip(run.range()) {
            if window.digest(page, &mut self.scratch) != want() {
                self.arrivals.differs(region, index);
            }
        }
        Ok(())
    }
}
