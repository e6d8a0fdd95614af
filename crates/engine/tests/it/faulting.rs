//! Memory whose pages arrive later, without kernel support: a thread that touches a missing page
//! sleeps on a condition variable.

use crate::toy::Method;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, PageSet, RegionId};
use vmferry_engine::{DemandPaging, Fault, Placed, VmError};

const SHARDS: usize = 3;

/// Function that copies the bytes of a page into memory.
pub(crate) type Write = Box<dyn Fn(RegionId, u64, &[u8]) + Send + Sync>;

#[derive(Default)]
struct State {
    begun: bool,
    ended: bool,
    /// Pages that are present, with the number of times that content was given for them.
    placed: HashMap<(u32, u64), u32>,
    queues: [VecDeque<Fault>; SHARDS],
    interrupted: [bool; SHARDS],
}

/// [`DemandPaging`] over memory that `write` writes.
pub(crate) struct Faulting {
    state: Mutex<State>,
    changed: Condvar,
    write: Write,
    /// Method that panics.
    clumsy: Option<Method>,
    pub(crate) touches: AtomicU64,
}

impl std::fmt::Debug for Faulting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faulting")
    }
}

impl Faulting {
    pub(crate) fn new(write: Write, clumsy: Option<Method>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), write, clumsy, touches: 0.into() }
    }

    /// Sleeps until `page` is present, for at most `within`. Returns true if the page is present.
    pub(crate) fn touch(&self, region: RegionId, page: u64, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        let mut state = self.state.lock().unwrap();
        let mut told = false;
        while state.begun && !state.ended && !state.placed.contains_key(&(region.0, page)) {
            if !told {
                told = true;
                self.touches.fetch_add(1, Ordering::Relaxed);
                let shard = self.shard_of(region, PageIndex(page));
                let fault = Fault { region, page: PageIndex(page), write: true, vcpu: None };
                state.queues[shard].push_back(fault);
                self.changed.notify_all();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
        true
    }

    pub(crate) fn ended(&self) -> bool {
        self.state.lock().unwrap().ended
    }

    pub(crate) fn is_placed(&self, region: RegionId, page: u64) -> bool {
        self.state.lock().unwrap().placed.contains_key(&(region.0, page))
    }

    /// Returns true if the content of some page was given twice.
    pub(crate) fn any_twice(&self) -> bool {
        self.state.lock().unwrap().placed.values().any(|times| *times > 1)
    }

    fn place_content(&self, region: RegionId, run: PageRun, bytes: Option<&[u8]>) -> Result<Placed, VmError> {
        let mut state = self.state.lock().unwrap();
        if !state.begun || state.ended {
            return Err(VmError::new("not begun"));
        }
        let mut result = Placed::default();
        for (at, page) in run.range().enumerate() {
            let there = state.placed.contains_key(&(region.0, page));
            *state.placed.entry((region.0, page)).or_default() += u32::from(bytes.is_some());
            if there {
                result.already_present += 1;
                continue;
            }
            if let Some(bytes) = bytes {
                (self.write)(region, page, &bytes[at * PAGE_BYTES..][..PAGE_BYTES]);
            }
            result.pages += 1;
        }
        self.changed.notify_all();
        Ok(result)
    }
}

impl DemandPaging for Faulting {
    fn shards(&self) -> usize {
        SHARDS
    }

    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize {
        usize::try_from((page.0 / 64 + u64::from(region.0)) % SHARDS as u64).unwrap()
    }

    fn begin(&self, missing: &PageSet) -> Result<(), VmError> {
        // A page of which an older copy arrived before is discarded. It is zero until it arrives
        // again, and stays zero if it arrives as zeros.
        for (region, pages) in missing.iter() {
            pages.runs().flatten().for_each(|page| (self.write)(region, page, &[0; PAGE_BYTES]));
        }
        // The guest has touched no page of this memory yet.
        self.state.lock().unwrap().begun = true;
        Ok(())
    }

    fn next_fault(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError> {
        assert_ne!(self.clumsy, Some(Method::NextFault), "a clumsy VM");
        let deadline = Instant::now() + within;
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(fault) = state.queues[shard].pop_front() {
                return Ok(Some(fault));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || std::mem::take(&mut state.interrupted[shard]) {
                return Ok(None);
            }
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    fn interrupt(&self) {
        self.state.lock().unwrap().interrupted = [true; SHARDS];
        self.changed.notify_all();
    }

    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError> {
        assert_ne!(self.clumsy, Some(Method::Place), "a clumsy VM");
        assert_eq!(bytes.len() as u64, run.bytes());
        self.place_content(region, run, Some(bytes))
    }

    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError> {
        self.place_content(region, run, None)
    }

    fn wake(&self, _: RegionId, _: PageIndex) -> Result<(), VmError> {
        self.changed.notify_all();
        Ok(())
    }

    fn end(&self) -> Result<(), VmError> {
        self.state.lock().unwrap().ended = true;
        self.changed.notify_all();
        Ok(())
    }
}
