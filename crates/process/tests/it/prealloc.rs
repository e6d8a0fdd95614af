//! Migrations to targets whose memory is allocated at different times. The guest finds all its
//! pages unchanged, and no page is allocated that the guest has not touched.

use crate::rig::{can_fault, verified};
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_engine::{
    Arrival, Listener, Migratable, MigrationHandle, MigrationMode, MigrationState, Settings, SourceVm, Uri,
    migrate, receive,
};
use vmferry_guest_abi::State;
use vmferry_process::{Prealloc, ProcessGuest, ProcessOptions};
use vmferry_testkit::{PATIENCE, print_line, skip_if_emulated, wait};
use vmferry_testkit_peers::gated::Gated;
use vmferry_testkit_peers::link::Proxy;
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, HELLO_BYTES, Table};

const MEMORY: u64 = 96 << 20;
/// Workload with 32 MiB of random content, so that most blocks of 2 MiB are untouched.
const LOAD: &str = "uniform,ws=6M,data=32M,rate=20k,fill=random";
const DATA: u64 = 32 << 20;

/// Returns options with pages of 4 KiB, so that the kernel allocates single pages.
fn options(prealloc: Prealloc, memfd: bool) -> ProcessOptions {
    let mut options = ProcessOptions::new(MEMORY, 2);
    (options.prealloc, options.memfd, options.huge_pages) = (prealloc, memfd, false);
    options
}

/// Returns the pages of the guest's memory that the host has allocated.
fn allocated(guest: &ProcessGuest) -> Bitmap {
    let memory = guest.memory();
    let region = memory.layout().regions()[0];
    let mut touched = Bitmap::new(region.pages());
    memory.touched(region.id, PageRun::from(0..region.pages()), &mut touched).unwrap();
    touched
}

/// Returns a guest that has filled its memory.
fn filled(memfd: bool) -> ProcessGuest {
    let mut source = ProcessGuest::new(options(Prealloc::Off, memfd), LOAD.parse().unwrap()).unwrap();
    source.start().unwrap();
    let handle = source.handle();
    wait("the guest to fill its memory", || handle.stats().is_ok_and(|s| s.state >= State::Running));
    source
}

/// Moves a guest to a target with this option. Returns the pages that each side has allocated.
fn moved(mode: MigrationMode, prealloc: Prealloc, memfd: bool) -> [Bitmap; 2] {
    let what = format!("{mode} {prealloc:?} memfd {memfd}");
    let mut source = filled(memfd);
    let mut target = ProcessGuest::new_incoming(options(prealloc, memfd)).unwrap();
    let tcp = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    let settings =
        Settings { mode, channels: 2, verify: true, peer_timeout: PATIENCE, ..Settings::default() };
    let handle = MigrationHandle::new();
    let (report, came) =
        pair::moved(&tcp, &mut Gated::new(&mut source), &mut target, None, &settings, &handle);
    if let Some(postcopy) = came.expect("the guest") {
        assert_eq!((postcopy.state, postcopy.left), (MigrationState::Completed, 0), "{what}: {postcopy:?}");
        assert_eq!(postcopy.postcopy.duplicates, 0, "{what}: {postcopy:?}");
    }
    assert_eq!(report.state, MigrationState::Completed, "{what}: {:?}", report.error);
    let stats = verified(&target.handle(), 7);
    assert_eq!((stats.corrupt(), stats.state), (0, State::Running), "{what}: {:?}", stats.first_corrupt());
    SourceVm::pause(&mut target).unwrap();
    let found = [allocated(&source), allocated(&target)];
    let counts = found.each_ref().map(Bitmap::count);
    print_line(format!("{what}: the source has {} pages, the target {}", counts[0], counts[1]));
    found
}

/// Returns the modes that this host supports.
fn modes() -> Vec<MigrationMode> {
    let all = [MigrationMode::Precopy, MigrationMode::Hybrid, MigrationMode::Postcopy];
    all.into_iter().take(if can_fault() { 3 } else { 1 }).collect()
}

#[test]
fn pages_that_the_guest_never_touched_are_not_allocated() {
    for mode in modes() {
        for prealloc in [Prealloc::Off, Prealloc::Auto] {
            for memfd in [false, true] {
                let [source, mut target] = moved(mode, prealloc, memfd);
                target.subtract(&source);
                let extra: Vec<_> = target.runs().collect();
                assert!(extra.is_empty(), "{mode} {prealloc:?} memfd {memfd}: {extra:?}");
            }
        }
    }
}

/// Adds the pages that the frames of a channel announce to `announced`. All announcements must come
/// in the first pass.
fn add_announced(bytes: &[u8], announced: &mut Bitmap) {
    let (mut rest, mut barriers) = (&bytes[HELLO_BYTES..], 0);
    while let Some(header) = rest.first_chunk() {
        let header = FrameHeader::decode(header).unwrap();
        let table = &rest[FRAME_HEADER_BYTES..][..header.table_bytes()];
        let content = if header.kind == FrameKind::Pages { header.pages * 4096 } else { 0 };
        rest = &rest[FRAME_HEADER_BYTES + table.len() + content..];
        barriers += u32::from(header.kind == FrameKind::Barrier);
        if header.kind == FrameKind::Touched {
            assert_eq!(barriers, 0, "an announcement after the first pass");
            let table = Table::decode(&header, table, announced.len()).unwrap();
            for entry in table.runs() {
                assert_eq!((entry.run.first.0 % 512, entry.run.count % 512), (0, 0), "{}", entry.run);
                announced.set_range(entry.run.range());
            }
        }
    }
}

#[test]
fn source_announces_the_blocks_of_which_the_guest_has_touched_every_page() {
    let (mut source, uri) = (filled(false), unix_uri());
    let mut target = ProcessGuest::new_incoming(options(Prealloc::Auto, false)).unwrap();
    let listener = Listener::bind(&uri, false).unwrap();
    let proxy = Proxy::recording(&uri, None);
    let (arrival, handle) = (Arrival::new(PATIENCE), MigrationHandle::new());
    let settings = Settings { channels: 2, peer_timeout: PATIENCE, ..Settings::default() };
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let report = migrate(&mut source, &proxy.uri(), None, &settings, &handle).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        assert!(receiving.join().unwrap().is_ok());
    });
    let touched = allocated(&source);
    let mut announced = Bitmap::new(touched.len());
    for (direction, bytes) in proxy.finished() {
        if direction.to_target && direction.connection > 0 {
            add_announced(&bytes, &mut announced);
        }
    }
    // The data need not begin at a block.
    assert!(announced.count() >= 15 * 512, "only {} pages", announced.count());
    announced.subtract(&touched);
    assert!(announced.is_empty(), "{:?} were never touched", announced.runs().collect::<Vec<_>>());
}

#[test]
fn memory_that_is_allocated_in_advance_takes_a_guest_in_every_mode() {
    if skip_if_emulated("MADV_POPULATE_WRITE") {
        return;
    }
    let empty = ProcessGuest::new_incoming(options(Prealloc::On, false)).unwrap();
    assert_eq!(allocated(&empty).count(), MEMORY / 4096);
    for mode in modes() {
        for memfd in [false, true] {
            let [source, target] = moved(mode, Prealloc::On, memfd);
            // The target drops the pages that are missing at the handover, which in a postcopy are
            // all pages near touched ones. Pages of zeros need no memory.
            let least = if mode == MigrationMode::Postcopy { DATA / 4096 } else { MEMORY / 4096 };
            assert!(target.count() >= least, "{mode} memfd {memfd}: {} {}", source.count(), target.count());
        }
    }
}

/// More memory than any host has.
#[test]
fn memory_that_the_host_does_not_have_is_refused() {
    let mut options = options(Prealloc::On, false);
    options.memory = 64 << 40;
    // A host may refuse even to map so much.
    let error = ProcessGuest::new_incoming(options).unwrap_err().to_string();
    assert!(error.contains("70368744177664 bytes"), "{error}");
    assert!(error.contains("less memory"), "{error}");
}

#[test]
fn memory_populates_a_page_only_if_the_option_says_so() {
    if skip_if_emulated("MADV_POPULATE_WRITE") {
        return;
    }
    for (prealloc, populates) in [(Prealloc::Off, false), (Prealloc::Auto, true), (Prealloc::On, false)] {
        let guest = ProcessGuest::new_incoming(options(prealloc, false)).unwrap();
        let memory = Arc::clone(&guest.memory());
        let region = memory.layout().regions()[0].id;
        assert_eq!(memory.populate(region, PageRun::from(512..1024)), populates, "{prealloc:?}");
        assert!(!memory.populate(region, PageRun::from(MEMORY / 4096..MEMORY / 4096 + 1)));
    }
}
