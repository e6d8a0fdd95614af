//! Receiving thread of a bulk channel: receives frames directly into guest memory and checks their
//! digests.

use super::ahead::Ahead;
use super::decode::{FramePages, SegmentDecoder};
use super::frames::FrameSource;
use super::urgent::{DemandPager, Stager, TABLE};
use crate::awake::{LatencyHold, LatencyRequest};
use crate::channel::IoBuf;
use crate::known::{KnownPages, PageHash};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_codec::Page;
use vmferry_core::{GuestMemory, PAGE_BYTES, PageDigest, PageRun, PageSet, RegionId, VmError, Window};
use vmferry_wire::{
    Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, MAX_FRAME_RUNS, MAX_NAMED_RUNS, MAX_TABLE_BYTES,
    MAX_UNKNOWN_BYTES, RegionPage, RegionRun, RunEntry, RunKind, Table, WireError,
};

/// Maximum number of differing pages that are named to the source. Further differing pages are only
/// counted.
const MOST_SAMPLES: usize = 16;

/// Reason why a channel ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The socket failed.
    #[error("the link failed: {0}")]
    Link(#[from] io::Error),
    /// The peer broke the protocol.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// The VMM's memory failed.
    #[error("guest memory could not be written: {0}")]
    Vm(#[from] VmError),
    /// The peer sent compressed pages that cannot be decoded.
    #[error("{0}")]
    Codec(#[from] vmferry_codec::DecodeError),
    /// The peer sent a delta that cannot be decoded.
    #[error("{0}")]
    Delta(#[from] vmferry_codec::DeltaError),
}

/// State of each page of the target, shared by all channels.
///
/// A page belongs to one channel, because the source assigns chunks to channels. Therefore threads
/// do not contend for a bit. With a hostile source they may contend, which is harmless because the
/// bits are atomic.
#[derive(Debug)]
pub(crate) struct Arrivals {
    regions: Vec<RegionState>,
    mismatched_count: AtomicU64,
    pages: AtomicU64,
    /// Pages that came from known pages.
    known: AtomicU64,
    compared: AtomicU64,
    differing: AtomicU64,
    samples: Mutex<Vec<RegionPage>>,
    /// True if memory must not be written directly any more, because it is complete or the guest is
    /// about to run. The lock is held for reading while a frame is received into memory.
    sealed: RwLock<bool>,
    /// Pager that places missing pages one by one after memory was sealed.
    pager: OnceLock<Arc<DemandPager>>,
    /// True if a channel is lost.
    lost: AtomicBool,
    /// Blocks that are populated ahead of the frames.
    ahead: Ahead,
}

/// Progress of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// All frames of this pass have arrived on this channel.
    Barrier(u32),
    /// No page is missing any more.
    AllArrived,
    /// The pages of a frame with hashes were looked up.
    LookedUp(LookedUp),
}

/// Result of the lookup of the pages of a frame with hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LookedUp {
    /// Number of the frame.
    pub(crate) frame: u64,
    /// Bitmap of the pages that the target does not know, by their positions.
    pub(crate) unknown: [u8; MAX_UNKNOWN_BYTES],
}

impl LookedUp {
    /// Marks the page at `position` as unknown.
    fn mark(&mut self, position: usize) -> Result<(), WireError> {
        *self.unknown.get_mut(position / 8).ok_or(TABLE)? |= 1 << (position % 8);
        Ok(())
    }

    /// Returns the number of unknown pages.
    fn count(&self) -> u64 {
        self.unknown.iter().map(|byte| u64::from(byte.count_ones())).sum()
    }
}

#[derive(Debug)]
struct RegionState {
    id: RegionId,
    /// Pages whose memory may hold anything but zeros.
    written: AtomicBitmap,
    /// Pages whose newest content did not match its digest.
    mismatched: AtomicBitmap,
}

impl Arrivals {
    pub(crate) fn new(memory: &dyn GuestMemory) -> Self {
        let state = |region: &vmferry_core::Region| RegionState {
            id: region.id,
            written: AtomicBitmap::new(region.pages()),
            mismatched: AtomicBitmap::new(region.pages()),
        };
        Self {
            regions: memory.layout().regions().iter().map(state).collect(),
            mismatched_count: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            known: AtomicU64::new(0),
            compared: AtomicU64::new(0),
            differing: AtomicU64::new(0),
            samples: Mutex::new(Vec::new()),
            sealed: RwLock::new(false),
            pager: OnceLock::new(),
            lost: AtomicBool::new(false),
            ahead: Ahead::new(memory.layout()),
        }
    }

    /// Returns the blocks that are populated ahead of the frames.
    pub(crate) fn ahead(&self) -> &Ahead {
        &self.ahead
    }

    fn region(&self, id: RegionId) -> Result<&RegionState, WireError> {
        self.regions.iter().find(|region| region.id == id).ok_or(WireError::Field {
            what: "region",
            value: id.0.into(),
            allowed: "one of the layout",
        })
    }

    /// Returns the number of pages received so far. A page counts each time it arrives.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Returns the number of the received pages that came from known pages.
    pub(crate) fn known(&self) -> u64 {
        self.known.load(Ordering::Relaxed)
    }

    /// Refuses every frame from now on. Returns false if a frame is being taken at the moment, or
    /// if a page has a digest mismatch.
    ///
    /// A correct source waits for the report that all pages have arrived without a mismatch, so the
    /// result is always true. If it is false, the guest must not be started.
    pub(crate) fn seal(&self) -> bool {
        self.ahead.close();
        let Ok(mut sealed) = self.sealed.try_write() else { return false };
        *sealed = true;
        self.mismatches().0 == 0
    }

    /// Refuses direct writes from now on. Later pages are for [`go_on_with`](Self::go_on_with).
    /// Returns false if a frame is being taken at the moment, or if a page with a digest mismatch
    /// is not in `missing` and will not be sent again.
    pub(crate) fn seal_but_for(&self, missing: &PageSet) -> bool {
        self.ahead.close();
        let Ok(mut sealed) = self.sealed.try_write() else { return false };
        *sealed = true;
        self.regions.iter().all(|region| {
            let mut mismatched = Bitmap::new(region.mismatched.len());
            region.mismatched.harvest(&mut mismatched);
            missing
                .region(region.id)
                .is_some_and(|missing| mismatched.runs().flatten().all(|page| missing.test(page)))
        })
    }

    /// Lets `pager` place the frames that arrive from now on.
    pub(crate) fn go_on_with(&self, pager: Arc<DemandPager>) {
        // Called once in a migration. A second call would need a second handover, which the session
        // refuses.
        let _ = self.pager.set(pager);
        // This function stores the pager before it checks the flag `lost`, and the method `lost`
        // sets the flag before it looks for the pager. Therefore at least one of the two calls sees
        // the effect of the other.
        if self.lost.load(Ordering::SeqCst) {
            self.lost();
        }
    }

    /// Returns the pager, if the handover came before all memory had arrived.
    pub(crate) fn pager(&self) -> Option<&Arc<DemandPager>> {
        self.pager.get()
    }

    /// Reports the loss of a channel: see
    /// [`MissingSet::lost`](crate::demand::MissingSet::lost).
    pub(crate) fn lost(&self) {
        self.lost.store(true, Ordering::SeqCst);
        self.ahead.close();
        if let Some(pager) = self.pager() {
            pager.pages.lost();
        }
    }

    /// Returns the number of pages with a digest mismatch, and the first of them as runs. The
    /// result is exact while no frame is being received.
    pub(crate) fn mismatches(&self) -> (u64, Vec<RegionRun>) {
        if self.mismatched_count.load(Ordering::Acquire) == 0 {
            return (0, Vec::new());
        }
        let (mut count, mut runs) = (0, Vec::new());
        for region in &self.regions {
            let mut map = Bitmap::new(region.mismatched.len());
            region.mismatched.harvest(&mut map);
            for run in map.runs() {
                // The pages stay marked until they have arrived again.
                region.mismatched.set_range(run.clone());
                count += run.end - run.start;
                if runs.len() < MAX_NAMED_RUNS {
                    runs.push(RegionRun { region: region.id, first: run.start, count: run.end - run.start });
                }
            }
        }
        (count, runs)
    }

    /// Returns the number of compared pages, the number of pages that differ, and the first of
    /// these.
    pub(crate) fn differences(&self) -> (u64, u64, Vec<RegionPage>) {
        let samples = self.samples.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        (self.compared.load(Ordering::Acquire), self.differing.load(Ordering::Acquire), samples)
    }

    /// Returns the runs of pages that no frame has written.
    #[cfg(feature = "hostile")]
    pub(crate) fn untouched(&self) -> Vec<(RegionId, PageRun)> {
        let of = |region: &RegionState| {
            let pages = (0..region.written.len()).filter(|page| !region.written.test(*page));
            pages.map(|page| (region.id, PageRun::from(page..page + 1))).collect::<Vec<_>>()
        };
        self.regions.iter().flat_map(of).collect()
    }

    fn mark_mismatched(&self, region: &RegionState, page: u64) {
        if !region.mismatched.set(page) {
            self.mismatched_count.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn mark_sound(&self, region: &RegionState, page: u64) {
        // Because mismatches are rare, the common case costs only one load. With known pages, the
        // count is rarely zero, but the page itself is rarely marked.
        if self.mismatched_count.load(Ordering::Acquire) > 0
            && region.mismatched.test(page)
            && region.mismatched.test_and_clear(page)
        {
            self.mismatched_count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn differs(&self, region: RegionId, page: u64) {
        self.differing.fetch_add(1, Ordering::AcqRel);
        let mut samples = self.samples.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if samples.len() < MOST_SAMPLES {
            samples.push(RegionPage { region, page });
        }
    }
}

/// Window, page in the window, and page in the region.
type Place<'a> = (Window<'a>, usize, u64);

/// Pages of a frame with encoded content, which are written to guest memory.
struct Written<'a, 'p> {
    arrivals: &'p Arrivals,
    region: &'p RegionState,
    table: &'p Table<'p>,
    places: &'p [Place<'a>],
    known: Option<&'p KnownPages>,
    looked_up: &'p mut LookedUp,
}

impl FramePages for Written<'_, '_> {
    fn before(&self, position: usize, to: &mut Page) -> Result<(), WireError> {
        let (window, page, _) = self.places.get(position).ok_or(TABLE)?;
        window.copy_page(*page, to);
        Ok(())
    }

    fn find(&mut self, wanted: &[(usize, PageHash)], to: &mut [Page]) -> Result<Vec<bool>, WireError> {
        let Some(known) = self.known else {
            let (what, allowed) = ("hashes of pages", "none for a target without known pages");
            return Err(WireError::Field { what, value: wanted.len() as u64, allowed });
        };
        let digest = |(position, hash): &(usize, _)| Some((self.table.digest(*position)?, *hash));
        let digests: Option<Vec<_>> = wanted.iter().map(digest).collect();
        let is_known = known.find(&digests.ok_or(TABLE)?, to);
        for ((position, _), _) in wanted.iter().zip(&is_known).filter(|(_, is_known)| !**is_known) {
            // The page counts as one with a digest mismatch until it arrives with its content.
            let (_, _, index) = self.places.get(*position).ok_or(TABLE)?;
            self.arrivals.mark_mismatched(self.region, *index);
            self.looked_up.mark(*position)?;
        }
        Ok(is_known)
    }

    fn put(&mut self, position: usize, content: &Page) -> Result<(), ReceiveError> {
        let (window, page, index) = self.places.get(position).ok_or(TABLE)?;
        if Some(PageDigest::of(content)) == self.table.digest(position) {
            self.arrivals.mark_sound(self.region, *index);
        } else {
            self.arrivals.mark_mismatched(self.region, *index);
        }
        window.write_page(*page, content);
        Ok(())
    }

    fn put_found(&mut self, position: usize, content: &Page) -> Result<(), ReceiveError> {
        let (window, page, index) = self.places.get(position).ok_or(TABLE)?;
        self.arrivals.mark_sound(self.region, *index);
        window.write_page(*page, content);
        Ok(())
    }
}

/// Receiver of a bulk, urgent or probe channel.
pub(crate) struct Receiver<'a, S> {
    memory: &'a dyn GuestMemory,
    arrivals: &'a Arrivals,
    stream: S,
    sequence: u64,
    /// Buffer as long as the longest table.
    table: Vec<u8>,
    /// Memory of the frame's runs with content. It is looked up once, to receive into and to check.
    windows: Vec<Window<'a>>,
    /// Place of each page of a frame with encoded content: its window, its page in the window, and
    /// its page in the region.
    places: Vec<Place<'a>>,
    scratch: Box<[u8; PAGE_BYTES]>,
    touched: Bitmap,
    stager: Stager,
    decoder: SegmentDecoder,
    /// Pages that the target knows. `None` if it has no known pages.
    known: Option<Arc<KnownPages>>,
    /// Result of a lookup that [`receive`](Self::receive) has not returned.
    looked_up: Option<LookedUp>,
    /// Set once this thread knows of the handover.
    handed_over: Option<LatencyHold>,
    /// Used at the handover.
    latency_request: LatencyRequest,
    /// True on a bulk channel: pages may be written directly before memory is sealed.
    direct: bool,
    /// True on a bulk channel in the first pass: memory is populated before pages are written.
    populates: bool,
}

impl<'a, S: FrameSource> Receiver<'a, S> {
    /// Returns the receiver of a bulk channel.
    pub(crate) fn new(memory: &'a dyn GuestMemory, arrivals: &'a Arrivals, stream: S) -> Self {
        Self { direct: true, populates: true, ..Self::urgent(memory, arrivals, stream) }
    }

    /// Sets the pages that the target knows.
    pub(crate) fn knowing(self, known: Option<Arc<KnownPages>>) -> Self {
        Self { known, ..self }
    }

    /// Sets the request with which the thread keeps processors awake after the handover.
    pub(crate) fn latency_request(self, latency_request: LatencyRequest) -> Self {
        Self { latency_request, ..self }
    }

    /// Returns the receiver of an urgent channel. It takes pages only after the handover.
    pub(crate) fn urgent(memory: &'a dyn GuestMemory, arrivals: &'a Arrivals, stream: S) -> Self {
        Self {
            stager: Stager::default(),
            decoder: SegmentDecoder::default(),
            known: None,
            looked_up: None,
            handed_over: None,
            latency_request: LatencyRequest::default(),
            direct: false,
            populates: false,
            memory,
            arrivals,
            stream,
            sequence: 0,
            table: vec![0; MAX_TABLE_BYTES],
            windows: Vec::with_capacity(MAX_FRAME_RUNS),
            places: Vec::new(),
            scratch: Box::new([0; PAGE_BYTES]),
            touched: Bitmap::new(0),
        }
    }

    /// Receives up to the next mark.
    pub(crate) fn receive(&mut self) -> Result<Mark, ReceiveError> {
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
                // An urgent channel has no passes. Its barriers must not count for the bulk channel
                // with that number.
                FrameKind::Barrier if !self.direct => {
                    let pass = header.pass.into();
                    let allowed = "on bulk channels";
                    return Err(WireError::Field { what: "barrier of pass", value: pass, allowed }.into());
                }
                FrameKind::Barrier => {
                    // Pages of a later pass are already allocated. The threads end now, so that no
                    // call is under way any more when memory is sealed, which is in the downtime.
                    if std::mem::take(&mut self.populates) {
                        self.arrivals.ahead.leave();
                    }
                    return Ok(Mark::Barrier(header.pass));
                }
                FrameKind::Probe => {
                    let (what, value) = ("a probe of number", header.base.0);
                    return Err(WireError::Field { what, value, allowed: "only on a probe channel" }.into());
                }
                FrameKind::Pages | FrameKind::Digests | FrameKind::Touched => {
                    if self.receive_frame(&header)? {
                        return Ok(Mark::AllArrived);
                    }
                    if let Some(looked_up) = self.looked_up.take() {
                        return Ok(Mark::LookedUp(looked_up));
                    }
                }
            }
        }
    }

    /// Receives the rest of a frame. Returns true if the frame has delivered the last missing page.
    fn receive_frame(&mut self, header: &FrameHeader) -> Result<bool, ReceiveError> {
        let arrivals = self.arrivals;
        let sealed = arrivals.sealed.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let pager = arrivals.pager.get().filter(|_| *sealed && header.kind == FrameKind::Pages);
        if pager.is_none() && (*sealed || !self.direct) {
            return Err(WireError::Field {
                what: "a frame of pass",
                value: header.pass.into(),
                allowed: "none now: not after the last pass, nor on an urgent channel before the handover",
            }
            .into());
        }
        let region = arrivals.region(header.region)?;
        // The buffer is moved out of `self` and put back, because taking the frame needs the rest
        // of `self`.
        let mut buffer = std::mem::take(&mut self.table);
        let bytes = buffer.get_mut(..header.table_bytes()).ok_or(TABLE)?;
        self.stream.fill(&mut [IoBuf::from_bytes_mut(bytes)])?;
        let table = Table::decode(header, bytes, region.written.len())?;
        let all_arrived = match (pager, header.kind) {
            (Some(pager), _) => {
                if self.handed_over.is_none() {
                    self.handed_over = Some(self.hand_over(pager));
                }
                // Missing pages are placed without this lock. The lock must be released, because a
                // channel may be silent for a long time.
                drop(sealed);
                self.stager.take(pager, header.region, &table, (&self.stream, &mut self.decoder))?
            }
            (None, FrameKind::Touched) => {
                arrivals.ahead.announce(header.region, &table);
                false
            }
            (None, FrameKind::Digests) => self.compare(region, &table).map(|()| false)?,
            (None, _) => self.receive_pages(region, &table).map(|()| false)?,
        };
        self.table = buffer;
        Ok(all_arrived)
    }

    /// Prepares this thread for a running guest. A bulk channel gives way to threads that wait for
    /// a page: it lowers its scheduling priority and keeps its receive queue short. While there are
    /// urgent channels, processors are kept awake.
    fn hand_over(&mut self, pager: &DemandPager) -> LatencyHold {
        if self.direct {
            vmferry_thread::scheduling::give_way();
            self.stream.keep_short();
            return LatencyHold::default();
        }
        let latency_request = std::mem::take(&mut self.latency_request);
        if pager.source.stay_awake() { latency_request.hold() } else { LatencyHold::default() }
    }

    fn receive_pages(&mut self, region: &RegionState, table: &Table<'_>) -> Result<(), ReceiveError> {
        self.windows.clear();
        let populate = self.populates && self.arrivals.ahead.arrive(region.id, table);
        for RunEntry { kind, run } in table.runs() {
            match kind {
                RunKind::Zero => self.zero(region, run)?,
                RunKind::Data => {
                    if populate && !region.written.test(run.first.0) {
                        self.arrivals.ahead.populate(self.memory, region.id, run);
                    }
                    // Marked before the write, so that a frame that is cut off leaves no page that
                    // is wrongly considered zero.
                    region.written.set_range(run.range());
                    self.windows.push(self.memory.window(region.id, run)?);
                }
            }
        }
        if table.is_encoded() {
            return self.decode_pages(region, table);
        }
        let mut bufs = [IoBuf::from_bytes(&[]); MAX_FRAME_RUNS];
        let bufs = bufs.get_mut(..self.windows.len()).ok_or(TABLE)?;
        for (buf, window) in bufs.iter_mut().zip(&self.windows) {
            *buf = IoBuf::from_window(*window);
        }
        self.stream.fill(bufs)?;
        self.check(region, table)
    }

    /// Receives encoded content, and writes the pages. Each page is compared with its digest before
    /// it is written.
    fn decode_pages(&mut self, region: &RegionState, table: &Table<'_>) -> Result<(), ReceiveError> {
        let data = table.runs().filter(|entry| entry.kind == RunKind::Data);
        let places = data.zip(&self.windows).flat_map(|(entry, window)| {
            entry.run.range().enumerate().map(move |(page, index)| (*window, page, index))
        });
        self.places.clear();
        self.places.extend(places);
        // The number of this frame: `receive` has counted it already.
        let frame = self.sequence.saturating_sub(1);
        let mut looked_up = LookedUp { frame, unknown: [0; MAX_UNKNOWN_BYTES] };
        let known = self.known.as_deref();
        let (arrivals, places) = (self.arrivals, &self.places);
        let mut pages = Written { arrivals, region, table, places, known, looked_up: &mut looked_up };
        self.decoder.receive(table, &self.stream, &mut pages)?;
        let hashes = table.segments().filter(|segment| segment.encoding == Encoding::Hash);
        let hashes: u64 = hashes.map(|segment| segment.pages as u64).sum();
        let unknown = looked_up.count();
        arrivals.known.fetch_add(hashes - unknown, Ordering::Relaxed);
        arrivals.pages.fetch_add(places.len() as u64 - unknown, Ordering::Relaxed);
        if hashes > 0 {
            self.looked_up = Some(looked_up);
        }
        Ok(())
    }

    /// Checks every page against its digest. A mismatch is not an error yet, because the guest may
    /// have written the page after the source computed the digest and before the page was copied
    /// into the socket. In that case, the page is dirty, and the source sends it again (hazards.md
    /// 10).
    fn check(&mut self, region: &RegionState, table: &Table<'_>) -> Result<(), ReceiveError> {
        // The pages are checked backwards, because the bytes that arrived last are still in the
        // cache. In forward order, they would be evicted before they are checked.
        let mut digests = table.digests().rev();
        let data = table.runs().rev().filter(|entry| entry.kind == RunKind::Data);
        let mut pages = 0;
        for (RunEntry { run, .. }, window) in data.zip(self.windows.iter().rev()) {
            for page in (0..window.pages()).rev() {
                let index = run.first.0 + page as u64;
                if window.digest(page, &mut self.scratch) == digests.next() {
                    self.arrivals.mark_sound(region, index);
                } else {
                    self.arrivals.mark_mismatched(region, index);
                }
            }
            pages += run.count;
        }
        assert!(digests.next().is_none(), "every digest of the table has its page");
        self.arrivals.pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the pages of `run` zeros. Pages that no frame has written are already zero.
    fn zero(&self, region: &RegionState, run: PageRun) -> Result<(), ReceiveError> {
        let mut window: Option<Window<'_>> = None;
        for (at, page) in run.range().enumerate() {
            if region.written.test(page) {
                let window = match window {
                    Some(window) => window,
                    None => *window.insert(self.memory.window(region.id, run)?),
                };
                window.slice(at, 1).zero();
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
                    // Pages that were never touched on the target read as zero, and reading them
                    // would only allocate them.
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
        mut want: impl FnMut() -> Option<vmferry_core::PageDigest>,
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
