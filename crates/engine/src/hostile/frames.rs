//! Frames of a hostile peer, and the receiver that writes them into a guest's memory.

use super::memory::{Memory, layout};
use crate::channel::IoBuf;
use crate::known::KnownPages;
use crate::target::frames::FrameSource;
use crate::target::receiver::{Arrivals, LookedUp, Mark, Receiver};
use crate::target::urgent::{DemandPager, UrgentChannels};
use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vmferry_core::{GuestMemory, PAGE_BYTES, PageSet};
use vmferry_wire::hostile;

/// Number of pages of each region, by its number.
const REGIONS: [(u32, u64); 2] = [(0, 70), (3, 9)];
/// Flag: checksums and similar fields are corrected.
const MEND: u8 = 1;
/// Flag: the channel is an urgent channel.
const URGENT: u8 = 2;
/// Flag: from the first barrier on the guest runs, and pages are placed one by one.
const LAZY: u8 = 4;
/// Flag: the target has known pages.
const KNOWN: u8 = 8;

/// Channel whose bytes are given in advance.
struct Bytes<'a>(Cell<&'a [u8]>);

impl FrameSource for Bytes<'_> {
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        for buf in bufs {
            let mut rest = self.0.get();
            rest = &rest[buf.copy_from(rest)..];
            self.0.set(rest);
            if !buf.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}

/// Has a target receive `bytes` as the frames of a channel. The first byte has flags. For the rest
/// see [`vmferry_wire::hostile::frames`].
///
/// # Panics
/// If a page is written that no frame has brought, or counts do not add up. A write outside guest
/// memory ends the process.
pub fn drive_frames(bytes: &[u8]) {
    let Some((flags, rest)) = bytes.split_first() else { return };
    let stream = hostile::frames(rest, flags & MEND != 0);
    let memory = Arc::new(Memory::new(&layout(&REGIONS)));
    let arrivals = Arrivals::new(&*memory);
    let source = Bytes(Cell::new(&stream));
    let receiver = if flags & URGENT == 0 { Receiver::new } else { Receiver::urgent };
    let known = (flags & KNOWN != 0).then(known);
    let mut receiver = receiver(&*memory, &arrivals, source).knowing(known);
    let mut pager = None;
    if flags & (LAZY | URGENT) == LAZY | URGENT {
        pager = hand_over(&memory, &arrivals);
    }
    let mut all_arrived = 0;
    while let Ok(mark) = receiver.receive() {
        match mark {
            Mark::Barrier(_) if flags & LAZY != 0 && pager.is_none() => pager = hand_over(&memory, &arrivals),
            Mark::Barrier(_) => {}
            Mark::AllArrived => all_arrived += 1,
            Mark::LookedUp(LookedUp { unknown, .. }) => {
                let count: u32 = unknown.iter().map(|byte| byte.count_ones()).sum();
                assert!(flags & (KNOWN | URGENT) == KNOWN, "hashes were taken");
                assert!(
                    u64::from(count) <= REGIONS.iter().map(|(_, pages)| pages).sum::<u64>(),
                    "{count} pages"
                );
            }
        }
    }
    assert!(all_arrived <= 1, "all pages came {all_arrived} times");
    check(&memory, &arrivals, pager.as_deref(), all_arrived == 1);
}

/// Returns known pages, each of which is filled with one byte, as in the frames.
fn known() -> Arc<KnownPages> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create("known", flags).expect("a file in memory"));
    (1..8).for_each(|fill| {
        file.write_all_at(&[fill; PAGE_BYTES], u64::from(fill) << 12).expect("room in memory");
    });
    Arc::new(KnownPages::index(vec![("known".into(), file)]).expect("a readable file"))
}

/// Makes every other page missing, and every page with a digest mismatch. Returns `None` if the
/// handover is not allowed.
fn hand_over(memory: &Arc<Memory>, arrivals: &Arrivals) -> Option<Arc<DemandPager>> {
    let mut missing = PageSet::empty(memory.layout());
    for (id, pages) in REGIONS {
        let map = missing.region_mut(vmferry_core::RegionId(id)).expect("a region");
        (0..pages).filter(|page| page % 2 == 0).for_each(|page| {
            map.set(page);
        });
    }
    for run in arrivals.mismatches().1 {
        missing.region_mut(run.region).expect("a region").set_range(run.first..run.first + run.count);
    }
    if !arrivals.seal_but_for(&missing) {
        return None;
    }
    let own = Arc::clone(memory) as Arc<dyn vmferry_core::DemandPaging>;
    own.begin(&missing).expect("it can");
    let pager = Arc::new(DemandPager::new(UrgentChannels::default(), own, &missing, 1));
    arrivals.go_on_with(Arc::clone(&pager));
    Some(pager)
}

fn check(memory: &Memory, arrivals: &Arrivals, pager: Option<&DemandPager>, all_arrived: bool) {
    let (mismatches, runs) = arrivals.mismatches();
    let pages: u64 = REGIONS.iter().map(|(_, pages)| pages).sum();
    assert_eq!(runs.iter().map(|run| run.count).sum::<u64>(), mismatches, "few enough to be named");
    assert!(mismatches <= pages);
    let (compared, mismatched, samples) = arrivals.differences();
    assert!(mismatched <= compared && samples.len() <= 16, "{mismatched} of {compared} differ");
    if let Some(pager) = pager {
        let left = pager.pages.left();
        assert_eq!(left == 0, all_arrived, "{left} pages are missing");
    }
    // A page that no frame has named must be unchanged. Pages that were placed one by one are not
    // checked, because only the pager knows them.
    let mut page = [0; PAGE_BYTES];
    for (region, run) in arrivals.untouched().into_iter().filter(|_| pager.is_none()) {
        let window = memory.window(region, run).expect("in the layout");
        assert!(window.copy_page(0, &mut page), "{run} in {region} was written, and no frame has named it");
    }
}
