//! Tests of the balloon with real memory and without KVM.

use super::hints::HintBoard;
use super::host::RamHost;
use super::{ADDITIONS, BalloonHandle, VmBalloon};
use crate::DropWay;
use crate::bus::MmioDevice;
use crate::memory::GuestRam;
use crate::options::{Backing, VmOptions};
use crate::state::Sections;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::{Bytes, GuestAddress};
use vmferry_bitmap::Bitmap;
use vmferry_core::{PAGE_BYTES, PageRun, PageSet, RegionId};
use vmferry_engine::DemandPaging;
use vmferry_fault::{PagingSlot, UffdMemory, UffdOptions};
use vmferry_virtio::balloon::{BalloonHost, Dropped, Why};
use vmferry_virtio::runs::GuestRun;
use vmferry_virtio::signals::Interrupt;

#[derive(Debug)]
struct NoLine;

impl Interrupt for NoLine {
    fn trigger(&self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns a balloon without a driver, and memory of `bytes` bytes for its guest.
pub(super) fn plugged(bytes: u64) -> (VmBalloon, Arc<GuestRam>) {
    let ram = Arc::new(GuestRam::new(&VmOptions::new(bytes, 1)).unwrap());
    let paging = Arc::new(PagingSlot::new(1));
    (VmBalloon::new(&ram, &paging, (DropWay::default(), true), Box::new(NoLine)), ram)
}

fn ram(backing: Backing) -> Arc<GuestRam> {
    let mut options = VmOptions::new(8 << 20, 1);
    (options.backing, options.huge_pages) = (backing, false);
    Arc::new(GuestRam::new(&options).unwrap())
}

fn host(ram: &Arc<GuestRam>, paging: &Arc<PagingSlot>) -> RamHost {
    let hints = Arc::new(HintBoard::new(ram.layout()));
    RamHost::new(Arc::clone(ram), Arc::clone(paging), DropWay::DontNeed, hints)
}

fn run(pages: std::ops::Range<u64>) -> [GuestRun; 1] {
    [GuestRun { region: RegionId(0), run: PageRun::from(pages) }]
}

fn page(ram: &GuestRam, page: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    ram.window(RegionId(0), PageRun::from(page..page + 1)).unwrap().copy_page(0, &mut bytes);
    bytes
}

/// A guest writes a page and reports it free, repeatedly, while a sender harvests marks and copies
/// the marked pages. At the end both sides must have the same content. If the mark came before the
/// drop, this test would find an old page on the target within some rounds.
#[test]
fn page_dropped_during_a_migration_reads_as_zeros_on_source_and_target() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram(backing);
        let host = host(&ram, &Arc::new(PagingSlot::new(1)));
        let marks = ram.regions()[0].marks().bitmap();
        let (mut there, mut harvested) = ([0xff; PAGE_BYTES], Bitmap::new(marks.len()));
        let ended = AtomicBool::new(false);
        let send = |there: &mut [u8; PAGE_BYTES], harvested: &mut Bitmap| {
            marks.harvest(harvested);
            if harvested.test_and_clear(7) {
                *there = page(&ram, 7);
            }
        };
        for round in 0..200u32 {
            ended.store(false, Ordering::Release);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..20 {
                        ram.map().write_slice(&[7; PAGE_BYTES], GuestAddress(7 << 12)).unwrap();
                        assert_eq!(host.drop_pages(Why::Reported, &run(7..8)).unwrap(), Dropped::Done);
                    }
                    ended.store(true, Ordering::Release);
                });
                while !ended.load(Ordering::Acquire) {
                    send(&mut there, &mut harvested);
                }
            });
            // All vCPUs have stopped, so this is the last harvest.
            send(&mut there, &mut harvested);
            assert_eq!(page(&ram, 7), [0; PAGE_BYTES], "{backing}, round {round}");
            assert!(there == [0; PAGE_BYTES], "{backing}, round {round}: the target has an old page");
        }
    }
}

#[test]
fn nothing_is_dropped_while_pages_are_missing() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let (ram, paging) = (ram(backing), Arc::new(PagingSlot::new(1)));
        let host = host(&ram, &paging);
        ram.map().write_slice(&[5; 4 * PAGE_BYTES], GuestAddress(0x8000)).unwrap();
        let made = paging.get_or_make(|threads| {
            let mut options = UffdOptions::new(threads);
            options.user_mode_only = true;
            let regions = ram.regions().iter().map(|ram| ram.paged().unwrap()).collect();
            // SAFETY: the RAM owns its mappings; no references to guest bytes are made here.
            unsafe { UffdMemory::new(regions, Arc::clone(&ram) as _, &options) }
        });
        let memory = match made {
            Ok(memory) => memory,
            Err(error) => return vmferry_testkit::skip(vmferry_testkit::Need::Uffd, error),
        };
        // Page 10 is still at the source; 8, 9 and 11 have arrived.
        let mut missing = PageSet::empty(ram.layout());
        missing.region_mut(RegionId(0)).unwrap().set(10);
        memory.begin(&missing).unwrap();
        assert_eq!(host.drop_pages(Why::Reported, &run(8..12)).unwrap(), Dropped::Held, "{backing}");
        assert_eq!(page(&ram, 8)[0], 5, "{backing}: the page was lost");
        // The guest writes to a page that it reported as free. It must find what it wrote, whatever
        // arrives later.
        ram.map().write_slice(&[6], GuestAddress(0x9000)).unwrap();
        memory.place(RegionId(0), PageRun::from(9..11), &[5; 2 * PAGE_BYTES]).unwrap();
        assert_eq!((page(&ram, 9)[0], page(&ram, 10)[0]), (6, 5), "{backing}: the page has old content");
        // A page that comes out of the balloon reads as zeros all the same.
        host.make_zeros(&run(11..12)).unwrap();
        assert_eq!(page(&ram, 11), [0; PAGE_BYTES]);

        memory.end().unwrap();
        assert_eq!(host.drop_pages(Why::Reported, &run(8..12)).unwrap(), Dropped::Done);
        assert_eq!((page(&ram, 8)[0], page(&ram, 9)[0]), (0, 0), "{backing}");
    }
}

#[test]
fn hints_wait_for_the_thread_that_asked() {
    let ram = ram(Backing::Anonymous);
    let board = HintBoard::new(ram.layout());
    let mut free = PageSet::empty(ram.layout());
    board.add(2, &run(1..3));
    assert_eq!((board.take(2, &mut free), board.late()), (None, 1));
    assert_eq!(board.begin(|| Err::<u32, _>("no")), Err("no"));
    board.begin(|| Ok::<_, ()>(2)).unwrap();
    board.add(2, &run(1..3));
    board.add(2, &run(2..5));
    assert_eq!(board.take(2, &mut free), Some((4, false)));
    board.end(1);
    assert_eq!(board.take(2, &mut free), Some((0, false)));
    board.end(2);
    board.add(1, &run(9..10));
    assert_eq!((board.take(2, &mut free), board.late()), (Some((0, true)), 2));
    assert_eq!(free.count(), 4);
    board.begin(|| Ok::<_, ()>(3)).unwrap();
    assert_eq!(board.take(2, &mut free), None);
    board.add(3, &run(7..8));
    board.close();
    assert_eq!(board.take(3, &mut free), None);
}

#[test]
fn reporting_that_is_off_has_a_section_of_its_own() {
    let names = |handle: &BalloonHandle| {
        let sections = handle.0.device().save().unwrap();
        sections.into_iter().map(|section| section.name).collect::<Vec<_>>()
    };
    let source = BalloonHandle(Arc::new(plugged(8 << 20).0));
    // A target of an earlier version accepts the state of a balloon with its initial settings.
    assert_eq!(names(&source), ["virtio-balloon"]);
    source.set_reporting(false);
    assert_eq!(names(&source), ["virtio-balloon", ADDITIONS.name]);

    let target = BalloonHandle(Arc::new(plugged(8 << 20).0));
    let load = |target: &BalloonHandle, source: &BalloonHandle| {
        let sections = source.0.device().save().unwrap();
        let mut parts = Sections::new(&sections).unwrap();
        target.0.device().prepare(&mut parts).unwrap()().unwrap();
        parts.finish().unwrap();
        target.status().reporting
    };
    assert!(!load(&target, &source));
    source.set_reporting(true);
    assert!(load(&target, &source), "state without the section leaves the old setting");
}
