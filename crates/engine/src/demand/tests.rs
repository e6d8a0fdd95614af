//! Interleavings of a guest, its faults, and channels that bring pages, on the production pager
//! (shuttle). A thread that waits for ever is a deadlock, which shuttle finds.
//!
//! Shuttle treats every access as sequentially consistent. All accesses that the argument in the
//! [module](super) depends on are sequentially consistent.

use super::readahead::ReadAhead;
use super::{DemandPager, Flaw, MissingSet, PageLocation, PageSource, again_after_panics, serve_faults};
use crate::channel::Stream;
use crate::target::urgent::{UrgentChannel, UrgentChannels};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{
    DemandPaging, Fault, Gpa, Layout, PAGE_BYTES, PageIndex, PageRun, PageSet, Placed, Region, RegionId,
    VmError,
};
use vmferry_testkit::tries;
use vmferry_wire::{REQUEST_BYTES, Request};

const PAGES: usize = 4;
const TRIES: usize = 3000;
/// Content of the pages. Pages 1 and 3 are zeros.
const CONTENT: [u8; PAGES] = [7, 0, 9, 0];

#[derive(Debug, Default)]
struct State {
    pages: [Option<u8>; PAGES],
    woken: [u64; PAGES],
    faults: [VecDeque<Fault>; 2],
    raised: u64,
    interrupted: bool,
}

/// Memory that makes faults like the kernel's.
#[derive(Debug, Default)]
struct Memory {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of pages that become accessible together.
    unit: usize,
}

impl Memory {
    /// Reads a page as a vCPU, which sleeps until the page is present.
    fn read(&self, page: usize, vcpu: u32) -> u8 {
        let mut state = self.state.lock().unwrap();
        let first = page / self.unit * self.unit;
        let whole = |state: &State| state.pages[first..first + self.unit].iter().all(Option::is_some);
        loop {
            if whole(&state) {
                return state.pages[page].unwrap();
            }
            let (page_index, region) = (PageIndex(first as u64), RegionId(0));
            state.faults[first / self.unit % 2].push_back(Fault {
                region,
                page: page_index,
                write: false,
                vcpu: Some(vcpu),
            });
            state.raised += 1;
            let woken = state.woken[first];
            self.changed.notify_all();
            while !whole(&state) && state.woken[first] == woken {
                state = self.changed.wait(state).unwrap();
            }
        }
    }

    fn place_content(&self, run: PageRun, content: u8) -> Placed {
        let mut state = self.state.lock().unwrap();
        let mut placed = Placed::default();
        for page in run.range() {
            let page = &mut state.pages[usize::try_from(page).unwrap()];
            if page.is_some() {
                placed.already_present += 1;
            } else {
                *page = Some(content);
                placed.pages += 1;
            }
        }
        self.changed.notify_all();
        placed
    }
}

impl DemandPaging for Memory {
    fn shards(&self) -> usize {
        2
    }

    fn shard_of(&self, _: RegionId, page: PageIndex) -> usize {
        usize::try_from(page.0).unwrap() / self.unit % 2
    }

    fn unit_pages(&self, _: RegionId) -> u64 {
        self.unit as u64
    }

    fn begin(&self, _: &PageSet) -> Result<(), VmError> {
        Ok(())
    }

    fn next_fault(&self, shard: usize, _: Duration) -> Result<Option<Fault>, VmError> {
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(fault) = state.faults[shard].pop_front() {
                return Ok(Some(fault));
            }
            if state.interrupted {
                return Ok(None);
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    fn interrupt(&self) {
        self.state.lock().unwrap().interrupted = true;
        self.changed.notify_all();
    }

    fn place(&self, _: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError> {
        Ok(self.place_content(run, bytes[0]))
    }

    fn place_zeros(&self, _: RegionId, run: PageRun) -> Result<Placed, VmError> {
        Ok(self.place_content(run, 0))
    }

    fn wake(&self, _: RegionId, page: PageIndex) -> Result<(), VmError> {
        let first = usize::try_from(page.0).unwrap() / self.unit * self.unit;
        self.state.lock().unwrap().woken[first] += 1;
        self.changed.notify_all();
        Ok(())
    }

    fn end(&self) -> Result<(), VmError> {
        Ok(())
    }
}

/// Source whose fault threads bring pages themselves, like those of a file.
#[derive(Debug, Default)]
struct Direct {
    /// Number of times that a fault thread brought the last page.
    last: shuttle::sync::atomic::AtomicU32,
}

impl PageSource for Direct {
    type Local = ();

    fn local(&self) {}

    fn fetch(&self, pages: &MissingSet, (): &mut (), place: PageLocation, _: u16) {
        let neighbour = place.page ^ 1;
        for page in [place.page, neighbour] {
            let last = u32::from(place_unclaimed(pages, page));
            self.last.fetch_add(last, std::sync::atomic::Ordering::SeqCst);
        }
    }
}

fn place_unclaimed(pages: &MissingSet, page: u64) -> bool {
    let place = PageLocation { region: 0, page };
    pages.is_missing(place) && pages.claim(place) && place_claimed(pages, page)
}

fn pager<S: PageSource>(source: S, flaw: Flaw, unit: usize) -> (Arc<Memory>, Arc<DemandPager<S>>) {
    let region = Region { id: RegionId(0), gpa: Gpa(0), len: (PAGES as u64) << 12 };
    let missing = PageSet::full(&Layout::new(vec![region]).unwrap());
    let memory = Arc::new(Memory { unit, ..Memory::default() });
    let mut pager = DemandPager::new(source, Arc::clone(&memory) as Arc<dyn DemandPaging>, &missing, 2);
    pager.pages.flaw = flaw;
    (memory, Arc::new(pager))
}

/// Brings a page. Returns true if it was the last one.
fn place_claimed(pages: &MissingSet, page: u64) -> bool {
    let run = PageRun::new(PageIndex(page), 1);
    match CONTENT[usize::try_from(page).unwrap()] {
        0 => pages.take_zeros(0, run),
        content => pages.place_run(0, run, &[content; PAGE_BYTES]).unwrap(),
    }
}

/// Runs two vCPUs, a fault thread for each shard, a bulk and an urgent channel.
fn run(flaw: Flaw, reads: [&'static [usize]; 2], overflow: bool) {
    run_units(flaw, reads, overflow, 1);
}

/// Does the same as [`run`] with huge pages of `unit` pages.
fn run_units(flaw: Flaw, reads: [&'static [usize]; 2], overflow: bool, unit: usize) {
    let (_, last) = run_on(
        UrgentChannels::default(),
        (flaw, overflow, unit),
        reads,
        [
            |pages| [1, 2].into_iter().map(|page| u32::from(place_claimed(pages, page))).sum(),
            |pages| [0, 3].into_iter().map(|page| u32::from(place_claimed(pages, page))).sum(),
        ],
    );
    assert_eq!(last, 1, "the last page is noticed once");
}

/// Runs two vCPUs, a fault thread for each shard that brings pages itself, and two threads that
/// sweep.
fn run_direct(reads: [&'static [usize]; 2], unit: usize) {
    let sweep: fn(&MissingSet) -> u32 =
        |pages| (0..PAGES as u64).map(|page| u32::from(place_unclaimed(pages, page))).sum();
    let (pager, last) = run_on(Direct::default(), (Flaw::None, false, unit), reads, [sweep, sweep]);
    let last = last + pager.source.last.load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(last, 1, "the last page is noticed once");
}

fn run_on<S: PageSource + 'static>(
    source: S,
    (flaw, overflow, unit): (Flaw, bool, usize),
    reads: [&'static [usize]; 2],
    channels: [fn(&MissingSet) -> u32; 2],
) -> (Arc<DemandPager<S>>, u32) {
    let (memory, pager) = pager(source, flaw, unit);
    if overflow {
        while pager.pages.waiters.add(PageLocation { region: 0, page: 2 }, 0, None) {}
    }
    let guests: Vec<_> = (0u32..)
        .zip(reads)
        .map(|(vcpu, pages)| {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                for page in pages {
                    assert_eq!(memory.read(*page, vcpu), CONTENT[*page], "lost: the content of page {page}");
                }
            })
        })
        .collect();
    let faults = [0, 1].map(|shard| {
        let pager = Arc::clone(&pager);
        thread::spawn(move || serve_faults(&pager, shard))
    });
    let channels = channels.map(|work| {
        let pager = Arc::clone(&pager);
        thread::spawn(move || work(&pager.pages))
    });
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    let last: u32 = channels.into_iter().map(|channel| channel.join().unwrap()).sum();
    pager.pages.stop();
    faults.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(pager.pages.left(), 0);
    assert_eq!(pager.pages.waiting(), [], "a waiter is still noted");
    let (figures, raised) = (pager.pages.figures(), memory.state.lock().unwrap().raised);
    assert_eq!((figures.pages, figures.duplicates), (2, 0));
    assert!(overflow || figures.all.faults <= raised, "a waiter was let go twice");
    (pager, last)
}

const BOTH: [&[usize]; 2] = [&[1, 0], &[1, 2, 3]];
const APART: [&[usize]; 2] = [&[1, 0], &[2, 3]];

#[test]
fn each_waiter_goes_on_and_reads_what_was_sent() {
    shuttle::check_random(|| run(Flaw::None, BOTH, false), tries(TRIES));
    shuttle::check_pct(|| run(Flaw::None, BOTH, false), tries(TRIES), 4);
}

#[test]
fn each_waiter_goes_on_where_fault_threads_place_pages_themselves() {
    for unit in [1, 2] {
        shuttle::check_random(move || run_direct(BOTH, unit), tries(TRIES));
        shuttle::check_pct(move || run_direct(BOTH, unit), tries(TRIES), 4);
    }
}

#[test]
fn each_waiter_goes_on_for_a_huge_page_whose_parts_come_from_several_channels() {
    for unit in [2, 4] {
        shuttle::check_random(move || run_units(Flaw::None, BOTH, false, unit), tries(TRIES));
        shuttle::check_pct(move || run_units(Flaw::None, BOTH, false, unit), tries(TRIES), 4);
    }
}

#[test]
#[should_panic(expected = "a waiter is still noted")]
fn fault_thread_that_looks_once_leaves_a_waiter_of_a_huge_page() {
    search(|| run_units(Flaw::LooksOnce, BOTH, false, 2));
}

#[test]
fn each_waiter_goes_on_where_the_table_is_full() {
    shuttle::check_random(|| run(Flaw::None, BOTH, true), tries(TRIES));
}

/// Runs `test` in the same sequence of interleavings each time.
fn search(test: impl Fn() + Send + Sync + 'static) {
    let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(1, 20 * TRIES);
    shuttle::Runner::new(scheduler, shuttle::Config::new()).run(test);
}

#[test]
#[should_panic(expected = "deadlock")]
fn fault_thread_that_looks_once_leaves_a_waiter() {
    search(|| run(Flaw::LooksOnce, APART, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn channel_that_looks_for_waiters_first_leaves_a_waiter() {
    search(|| run(Flaw::WaitersFirst, APART, false));
}

#[test]
#[should_panic(expected = "lost")]
fn page_that_is_removed_before_it_is_placed_is_lost() {
    search(|| run(Flaw::RemovesBeforePlacing, BOTH, false));
}

/// Tests a fault while the link is taken up again: the page must be requested on the new channel.
fn relink(flaw: Flaw) {
    let (_, pager) = pager(UrgentChannels::default(), flaw, 1);
    let (near, far) = socket2::Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    far.set_nonblocking(true).unwrap();
    let channel = Arc::new(UrgentChannel::new(Arc::new(Stream::new(near, "near".into()).unwrap())));
    let (faulted, linked) = (Arc::clone(&pager), Arc::clone(&pager));
    let fault = Fault { region: RegionId(0), page: PageIndex(1), write: true, vcpu: None };
    let fault = thread::spawn(move || faulted.serve(fault, &mut ReadAhead::default(), &mut ()));
    let link = thread::spawn(move || {
        linked.source.replace(&linked.pages, Vec::new());
        linked.source.replace(&linked.pages, vec![channel]);
    });
    fault.join().unwrap();
    link.join().unwrap();
    let mut bytes = [0; REQUEST_BYTES];
    let got = std::io::Read::read(&mut &far, &mut bytes).unwrap_or(0);
    assert_eq!(got, REQUEST_BYTES, "never requested");
    assert!(matches!(Request::decode(&bytes), Ok(Request::Page { page: PageIndex(1), again: false, .. })));
}

#[test]
fn page_with_a_waiter_is_requested_when_the_link_is_back() {
    shuttle::check_random(|| relink(Flaw::None), tries(TRIES));
}

#[test]
#[should_panic(expected = "never requested")]
fn request_before_the_channels_are_set_is_lost() {
    search(|| relink(Flaw::AsksBeforeChannels));
}

#[test]
fn fault_thread_goes_on_after_a_panic() {
    let mut calls = 0;
    again_after_panics(|| {
        calls += 1;
        assert!(calls > 2, "a clumsy VM");
    });
    assert_eq!(calls, 3);
}
