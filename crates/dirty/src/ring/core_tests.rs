//! Tests of the shipped harvesting code with a model of KVM, under every interleaving that a
//! scheduler generates.

use super::*;
use proptest::prelude::*;
use shuttle::sync::atomic::{AtomicBool as Flag, AtomicU32 as Index, AtomicU64 as Word};
use shuttle::thread;
use std::io;
use vmferry_bitmap::Bitmap;
use vmferry_testkit::tries;

/// Number of entries in the model's rings, all of them usable. Few, so that the rings wrap around
/// often.
const ENTRIES: u32 = 4;
const PAGES: usize = 6;

const DIRTY: u32 = 1;
const HARVESTED: u32 = 2;

/// One ring, as KVM keeps it.
#[derive(Debug)]
struct ModelRing {
    flags: Vec<Index>,
    pages: Vec<Word>,
    /// Index at which KVM puts the next page.
    filled: Index,
    /// Index up to which KVM has reset the entries.
    reset: Index,
}

/// Model of KVM: rings, page protection, and pages with content.
#[derive(Debug)]
struct Model {
    rings: Vec<ModelRing>,
    writable: Vec<Flag>,
    content: Vec<Word>,
    /// Lock that orders writes and changes of the protection, as the TLB of a processor and its
    /// flushes do.
    tlb: Mutex<()>,
    /// Lock that KVM holds while it resets entries and protects their pages, but not while it
    /// flushes the TLBs afterwards.
    slots: Mutex<()>,
    /// Number of the next calls of `reset` that end early.
    interrupted: Index,
    /// True if calls of `reset` fail.
    broken: Flag,
    /// True if `reset` leaves entries without an error.
    mute: Flag,
}

fn refused(errno: i32) -> SysError {
    let source = io::Error::from_raw_os_error(errno);
    SysError::Refused {
        call: "KVM_RESET_DIRTY_RINGS",
        target: "a model".to_owned(),
        source,
        meaning: "a test",
    }
}

impl Model {
    fn new(rings: usize, start: u32) -> Self {
        let ring = |_| ModelRing {
            flags: (0..ENTRIES).map(|_| Index::new(0)).collect(),
            pages: (0..ENTRIES).map(|_| Word::new(u64::MAX)).collect(),
            filled: Index::new(start),
            reset: Index::new(start),
        };
        Self {
            rings: (0..rings).map(ring).collect(),
            writable: (0..PAGES).map(|_| Flag::new(false)).collect(),
            content: (0..PAGES).map(|_| Word::new(0)).collect(),
            tlb: Mutex::new(()),
            slots: Mutex::new(()),
            interrupted: Index::new(0),
            broken: Flag::new(false),
            mute: Flag::new(false),
        }
    }

    fn at(index: u32) -> usize {
        (index % ENTRIES) as usize
    }

    /// Simulates a write of the guest to `page` on the vCPU of `ring`. Returns false if the ring is
    /// full and the vCPU stops.
    fn write(&self, ring: usize, page: usize) -> bool {
        let ring = &self.rings[ring];
        loop {
            {
                let _tlb = lock(&self.tlb);
                if self.writable[page].load(Ordering::SeqCst) {
                    self.content[page].fetch_add(1, Ordering::SeqCst);
                    return true;
                }
            }
            let filled = ring.filled.load(Ordering::SeqCst);
            if filled.wrapping_sub(ring.reset.load(Ordering::SeqCst)) >= ENTRIES {
                return false;
            }
            // A fault: the page becomes writable and is added to the ring, and the guest retries.
            self.writable[page].store(true, Ordering::SeqCst);
            ring.pages[Self::at(filled)].store(page as u64, Ordering::SeqCst);
            ring.filled.store(filled.wrapping_add(1), Ordering::SeqCst);
            ring.flags[Self::at(filled)].store(DIRTY, Ordering::SeqCst);
        }
    }
}

impl Kernel for Model {
    fn entries(&self) -> u32 {
        ENTRIES
    }

    fn dirty(&self, ring: usize, index: u32) -> Option<RingPage> {
        let (ring, at) = (&self.rings[ring], Self::at(index));
        let dirty = ring.flags[at].load(Ordering::SeqCst) & (DIRTY | HARVESTED) == DIRTY;
        dirty.then(|| RingPage { slot: 3, offset: ring.pages[at].load(Ordering::SeqCst) })
    }

    fn mark_harvested(&self, ring: usize, index: u32) {
        self.rings[ring].flags[Self::at(index)].store(HARVESTED, Ordering::SeqCst);
    }

    fn awaits_reset(&self, ring: usize, index: u32) -> bool {
        self.rings[ring].flags[Self::at(index)].load(Ordering::SeqCst) & HARVESTED != 0
    }

    /// Frees each entry first and protects its page later. The protection is effective only after
    /// the TLB flush at the end, outside the lock. The documentation guarantees only that all steps
    /// are complete when the call returns.
    fn reset(&self) -> Result<u32, SysError> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(refused(libc::EIO));
        }
        if self.mute.load(Ordering::SeqCst) {
            return Ok(0);
        }
        let early = self.interrupted.load(Ordering::SeqCst);
        if early > 0 {
            self.interrupted.store(early - 1, Ordering::SeqCst);
        }
        let mut freed = Vec::new();
        {
            let _slots = lock(&self.slots);
            'rings: for ring in &self.rings {
                loop {
                    let reset = ring.reset.load(Ordering::SeqCst);
                    if ring.flags[Self::at(reset)].load(Ordering::SeqCst) & HARVESTED == 0 {
                        break;
                    }
                    let page = ring.pages[Self::at(reset)].load(Ordering::SeqCst);
                    ring.flags[Self::at(reset)].store(0, Ordering::SeqCst);
                    ring.reset.store(reset.wrapping_add(1), Ordering::SeqCst);
                    freed.push(usize::try_from(page).unwrap());
                    if early > 0 {
                        break 'rings;
                    }
                }
            }
        }
        for page in &freed {
            let _tlb = lock(&self.tlb);
            self.writable[*page].store(false, Ordering::SeqCst);
        }
        if freed.is_empty() && early > 0 {
            return Err(refused(libc::EINTR));
        }
        Ok(u32::try_from(freed.len()).unwrap())
    }
}

fn empty() -> Arc<AtomicBitmap> {
    Arc::new(AtomicBitmap::new(PAGES as u64))
}

fn found(map: &Arc<AtomicBitmap>) -> Found {
    Found::new(vec![(3, Arc::clone(map))])
}

fn core(rings: usize, start: u32) -> (Arc<Core<Model>>, Arc<AtomicBitmap>) {
    let map = Arc::new(AtomicBitmap::new(PAGES as u64));
    let core = Core::new(Model::new(rings, start), rings, (found(&map), found(&empty())));
    for ring in &core.rings {
        let mut harvester = lock(&ring.harvester);
        (harvester.next, harvester.unseen) = (Cursor(start), Cursor(start));
        ring.next.store(start, Ordering::Relaxed);
    }
    (Arc::new(core), map)
}

/// Takes the published pages and copies their content. With `discards`, discards the recorded
/// writes of each page before it is copied, or after that if `late` is set, which is wrong.
fn send(core: &Core<Model>, map: &Arc<AtomicBitmap>, copy: &mut [u64], (discards, late): (bool, bool)) {
    let mut dirty = Bitmap::new(PAGES as u64);
    map.harvest(&mut dirty);
    for number in dirty.runs().flatten() {
        let discard = || {
            if !discards {
                return;
            }
            let wanted = || std::iter::once((0, 1 << number));
            let discarded = |_, discarded| assert_eq!(discarded, 1 << number);
            core.discard(0, wanted, |_| true, discarded).unwrap();
        };
        let page = usize::try_from(number).unwrap();
        if !late {
            discard();
        }
        copy[page] = core.kernel().content[page].load(Ordering::SeqCst);
        if late {
            discard();
        }
    }
}

/// Runs a vCPU thread: writes to its own pages and to a shared page, and empties its ring when it
/// is full.
fn guest(core: &Core<Model>, ring: usize, all: bool) {
    for step in 0..5 {
        let page = if step == 2 { 0 } else { 1 + (ring * 3 + step) % (PAGES - 1) };
        while !core.kernel().write(ring, page) {
            core.full(ring, all).unwrap();
        }
    }
}

/// Runs vCPUs, reaper and tracker concurrently. Then the vCPUs stop, and the last harvest has to
/// find every page that was not sent.
fn migrate(flaw: Flaw, all: bool, start: u32, interrupted: u32) {
    migrate_and_discard(flaw, all, start, interrupted, false);
}

fn migrate_and_discard(flaw: Flaw, all: bool, start: u32, interrupted: u32, late: bool) {
    let (core, map) = core(2, start);
    let mut core = Arc::try_unwrap(core).unwrap();
    core.flaw = flaw;
    core.kernel.interrupted.store(interrupted, Ordering::SeqCst);
    let core = Arc::new(core);
    let mut threads: Vec<_> = (0..2)
        .map(|ring| {
            let core = Arc::clone(&core);
            thread::spawn(move || guest(&core, ring, all))
        })
        .collect();
    threads.push({
        let core = Arc::clone(&core);
        thread::spawn(move || {
            for _ in 0..2 {
                let used: Vec<_> = (0..2).filter(|ring| core.view(*ring, 0).used > 0).collect();
                // A policy may name a ring twice, and the rings in any order.
                let named: Vec<_> = used.iter().rev().chain(&used).copied().collect();
                let due = RingSet::named(&named, 2).unwrap();
                if all { core.harvest_all() } else { core.harvest(&due) }.unwrap();
            }
        })
    });
    let mut copy = vec![0; PAGES];
    for _ in 0..2 {
        core.harvest_every().unwrap();
        send(&core, &map, &mut copy, (true, late));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    core.harvest_every().unwrap();
    send(&core, &map, &mut copy, (false, false));
    let content: Vec<_> = core.kernel().content.iter().map(|page| page.load(Ordering::SeqCst)).collect();
    assert_eq!(copy, content, "lost");
    assert!((0..2).all(|ring| core.view(ring, 0).used == 0), "drained");
    core.found().check().unwrap();
}

/// Number of interleavings that are tried, for a few seconds.
const TRIES: usize = 3000;

#[test]
fn no_write_is_lost_when_each_ring_is_harvested_separately() {
    shuttle::check_random(|| migrate(Flaw::None, false, 0, 0), tries(TRIES));
    shuttle::check_pct(|| migrate(Flaw::None, false, u32::MAX - 2, 0), tries(TRIES), 4);
}

#[test]
fn no_write_is_lost_when_all_rings_are_harvested_under_one_lock() {
    shuttle::check_random(|| migrate(Flaw::None, true, 0, 0), tries(TRIES));
    shuttle::check_pct(|| migrate(Flaw::None, true, u32::MAX - 2, 0), tries(TRIES), 4);
}

#[test]
fn no_write_is_lost_when_resets_end_early() {
    shuttle::check_random(|| migrate(Flaw::None, false, 0, 5), tries(TRIES));
    shuttle::check_pct(|| migrate(Flaw::None, false, 2, 5), tries(TRIES), 4);
}

#[test]
#[should_panic(expected = "lost")]
fn publishing_before_the_reset_loses_writes() {
    search(|| migrate(Flaw::PublishFirst, false, 0, 0));
}

#[test]
#[should_panic(expected = "lost")]
fn concurrent_resets_lose_writes() {
    search(|| migrate(Flaw::ResetsAtOnce, false, 0, 0));
}

#[test]
#[should_panic(expected = "lost")]
fn discarding_after_the_page_was_read_loses_writes() {
    search(|| migrate_and_discard(Flaw::None, false, 0, 0, true));
}

/// Searches for an interleaving that shows an injected flaw, with several seeds. The interleavings
/// are the same in every run, so that a rare one is not found only on some days. The first seed
/// finds all flaws soon.
fn search(test: fn()) {
    for seed in 7..=14 {
        let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(seed, 20 * TRIES);
        shuttle::Runner::new(scheduler, shuttle::Config::new()).run(test);
    }
}

/// Runs `test` without other threads. The locks of shuttle work only under its scheduler.
fn alone(test: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(test, 1);
}

fn published(map: &AtomicBitmap) -> Vec<u64> {
    let mut dirty = Bitmap::new(PAGES as u64);
    map.harvest(&mut dirty);
    dirty.runs().flatten().collect()
}

#[test]
fn failed_reset_keeps_the_pages_for_the_next_attempt() {
    alone(|| {
        let (core, map) = core(1, 0);
        assert!(core.kernel().write(0, 1) && core.kernel().write(0, 4));
        core.kernel().broken.store(true, Ordering::SeqCst);
        let error = core.harvest_every().unwrap_err();
        assert!(
            matches!(&error, TrackerError::RingReset(source) if source.errno() == Some(libc::EIO)),
            "{error}"
        );
        assert_eq!(published(&map), [], "pages that are not protected are not published");
        assert!(core.full(0, false).is_err(), "a vCPU that needs room gets the error");
        assert!(core.kernel().write(0, 5));
        core.kernel().broken.store(false, Ordering::SeqCst);
        assert_eq!(core.harvest_every().unwrap(), 3);
        assert_eq!(published(&map), [1, 4, 5]);
        assert_eq!(core.harvest_every().unwrap(), 0);
    });
}

#[test]
fn ring_that_kvm_does_not_reset_is_an_error_and_not_a_hang() {
    // Many steps, all of one thread.
    let mut config = shuttle::Config::new();
    config.max_steps = shuttle::MaxSteps::None;
    let scheduler = shuttle::scheduler::RandomScheduler::new(1);
    shuttle::Runner::new(scheduler, config).run(|| {
        let (core, map) = core(2, 0);
        assert!(core.kernel().write(1, 2));
        core.kernel().mute.store(true, Ordering::SeqCst);
        let error = core.harvest_every().unwrap_err();
        assert!(matches!(error, TrackerError::RingStuck { vcpu: 1 }), "{error}");
        assert_eq!(published(&map), []);
    });
}

#[test]
fn page_outside_all_slots_fails_every_later_harvest() {
    alone(|| {
        let map = Arc::new(AtomicBitmap::new(2));
        let core = Core::new(Model::new(1, 0), 1, (found(&map), found(&empty())));
        assert!(core.kernel().write(0, 1) && core.kernel().write(0, 5));
        core.harvest_every().unwrap();
        assert!(map.test(1));
        let error = core.found().check().unwrap_err().to_string();
        assert!(error.contains("region 3 is not tracked"), "{error}");
    });
}

#[test]
fn full_rings_are_counted_and_set_the_usable_size() {
    alone(|| {
        let (core, _map) = core(2, 0);
        for page in 0..4 {
            assert!(core.kernel().write(1, page));
        }
        assert!(!core.kernel().write(1, 4));
        core.full(1, false).unwrap();
        assert!(core.kernel().write(1, 4));
        let reports = [0, 1].map(|ring| core.counters(ring).report());
        assert_eq!((reports[0].full_exits, reports[1].full_exits, reports[1].pages), (0, 1, 4));
        assert!(reports[1].stalled > Duration::ZERO && reports[1].stalled_max == reports[1].stalled);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn look_counts_the_dirty_entries_from_any_starting_point(
        start: u32,
        filled in 0..=ENTRIES,
        harvested in 0..=ENTRIES,
        before in 0..=ENTRIES,
    ) {
        alone(move || {
            let (core, _map) = core(1, start);
            for page in 0..harvested {
                assert!(core.kernel().write(0, page as usize));
            }
            core.harvest_every().unwrap();
            for page in 0..filled {
                assert!(core.kernel().write(0, page as usize));
            }
            assert_eq!(core.view(0, before).used, filled);
            assert_eq!((0..ENTRIES).map(|entries| core.above(0, entries)).filter(|above| *above).count(), filled as usize);
        });
    }
}

#[test]
fn look_shows_each_entry_and_leaves_it_in_the_ring() {
    alone(|| {
        for start in [0, u32::MAX - 1] {
            let (core, map) = core(2, start);
            let look = || {
                let entries = core.look();
                (entries, published(core.seen().map(0)))
            };
            assert!(core.kernel().write(0, 1) && core.kernel().write(1, 4));
            assert_eq!(look(), (2, vec![1, 4]));
            assert_eq!(look(), (2, vec![]), "an entry is shown once");
            assert!(core.kernel().write(0, 2));
            assert_eq!(look(), (3, vec![2]));
            assert_eq!(core.harvest_every().unwrap(), 3);
            assert_eq!(published(&map), [1, 2, 4]);
            // A whole ring that no look has seen, after another one.
            for pages in [[1, 2, 3, 5], [5, 4, 3, 2]] {
                assert!(pages.iter().all(|page| core.kernel().write(0, *page)));
                core.harvest_every().unwrap();
            }
            assert!(core.kernel().write(0, 5));
            assert_eq!(look(), (1, vec![5]));
        }
    });
}

#[test]
fn entries_stay_in_the_rings_if_they_may_not_be_harvested() {
    alone(|| {
        let (core, map) = core(2, 0);
        let discard = |allowed: bool| {
            let mut discarded = 0;
            let may_harvest = |entries| {
                assert_eq!(entries, 2);
                allowed
            };
            let wanted = || std::iter::once((0, 1 << 4));
            core.discard(0, wanted, may_harvest, |_, pages| discarded |= pages).unwrap();
            discarded
        };
        assert!(core.kernel().write(0, 1) && core.kernel().write(1, 4));
        assert_eq!((discard(false), published(&map)), (0, vec![]));
        // The next harvest finds both pages.
        assert_eq!(core.harvest_every().unwrap(), 2);
        assert_eq!(discard(false), 1 << 4, "a harvested page is discarded without another harvest");
        assert_eq!(published(&map), [1]);
        assert!(core.kernel().write(0, 1) && core.kernel().write(1, 4));
        assert_eq!((discard(true), published(&map)), (1 << 4, vec![1]));
    });
}

#[test]
fn harvest_for_one_chunk_is_not_repeated_for_pages_that_it_took() {
    alone(|| {
        let (core, map) = core(2, 0);
        assert!(core.kernel().write(0, 1) && core.kernel().write(1, 4));
        let harvests_for = |page: u32| {
            let mut harvests = false;
            let may_harvest = |_| {
                harvests = true;
                true
            };
            core.discard(0, || std::iter::once((0, 1 << page)), may_harvest, |_, _| {}).unwrap();
            harvests
        };
        assert!(harvests_for(1), "the page is in a ring");
        // Page 4 was seen at the same time, and taken by the same harvest.
        assert!(core.kernel().write(0, 2));
        assert!(!harvests_for(4), "no ring has the page any more");
        assert_eq!(published(&map), [], "both pages are discarded");
        assert!(harvests_for(2));
    });
}

#[test]
fn smallest_plausible_number_of_entries_of_a_full_ring_is_learned() {
    struct Size(u32);
    impl Kernel for Size {
        fn entries(&self) -> u32 {
            self.0
        }
        fn dirty(&self, _: usize, _: u32) -> Option<RingPage> {
            None
        }
        fn mark_harvested(&self, _: usize, _: u32) {}
        fn awaits_reset(&self, _: usize, _: u32) -> bool {
            false
        }
        fn reset(&self) -> Result<u32, SysError> {
            Ok(0)
        }
    }
    let core = Core::new(Size(4096), 1, (found(&empty()), found(&empty())));
    assert_eq!(core.usable(), 4096 - RESERVED_ENTRIES);
    // With PML, a full ring has from 3520 to 4031 entries.
    for (pages, usable) in [(100, 4032), (3900, 3900), (3519, 3900), (4031, 3900), (3520, 3520)] {
        core.learn_usable(pages);
        assert_eq!(core.usable(), usable, "after a full ring with {pages} entries");
    }
    core.unlearn();
    assert_eq!(core.usable(), 4096 - RESERVED_ENTRIES);
}

#[test]
fn senders_may_harvest_one_entry_for_every_two_pages_of_the_pass() {
    let allowance = super::super::Allowance::default();
    assert!(!allowance.take(1));
    allowance.add(2048);
    assert!(!allowance.take(1025) && allowance.take(1000) && !allowance.take(25) && allowance.take(24));
    allowance.add(2048);
    allowance.begin();
    assert!(!allowance.take(1), "a pass has its own allowance");
}
