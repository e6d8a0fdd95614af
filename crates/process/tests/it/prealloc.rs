//! Migrations to targets whose memory is allocated at different times. The guest finds all its
//! pages unchanged, and no page is allocated that the guest has not touched.

use crate::rig::{can_fault, verified};
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_engine::{
    Arrival, Deltas, Listener, Migratable, MigrationHandle, MigrationMode, MigrationState, PageCodec, Report,
    Settings, SourceVm, Uri, ZstdLevel, migrate, receive,
};
use vmferry_guest_abi::State;
use vmferry_process::{Prealloc, ProcessGuest, ProcessOptions};
use vmferry_testkit::{PATIENCE, print_line, skip_if_emulated, wait};
use vmferry_testkit_peers::gated::Gated;
use vmferry_testkit_peers::link::Proxy;
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, HELLO_BYTES, Hello, Role, Table};

const MEMORY: u64 = 96 << 20;
/// Workload with 32 MiB of random content, so that most blocks of 2 MiB are untouched.
const LOAD: &str = "uniform,ws=6M,data=32M,rate=20k,fill=random";
/// The same workload with content that can be compressed.
const TEXT: &str = "uniform,ws=6M,data=32M,rate=20k,fill=text";
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

/// Returns a guest that has filled its memory according to `load`.
fn filled(load: &str, memfd: bool) -> ProcessGuest {
    let mut source = ProcessGuest::new(options(Prealloc::Off, memfd), load.parse().unwrap()).unwrap();
    source.start().unwrap();
    let handle = source.handle();
    wait("the guest to fill its memory", || handle.stats().is_ok_and(|s| s.state >= State::Running));
    source
}

/// Returns settings under which a target compares all pages.
fn comparing(mode: MigrationMode) -> Settings {
    Settings { mode, channels: 2, verify: true, peer_timeout: PATIENCE, ..Settings::default() }
}

/// Moves a guest to a target with this option. Returns the pages that each side has allocated.
fn moved(mode: MigrationMode, prealloc: Prealloc, memfd: bool) -> [Bitmap; 2] {
    moved_with(&comparing(mode), LOAD, prealloc, memfd).1
}

fn moved_with(settings: &Settings, load: &str, prealloc: Prealloc, memfd: bool) -> (Report, [Bitmap; 2]) {
    let what = format!("{} {:?} {prealloc:?} memfd {memfd}", settings.mode, settings.codec);
    let mut source = filled(load, memfd);
    let mut target = ProcessGuest::new_incoming(options(prealloc, memfd)).unwrap();
    let tcp = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    let handle = MigrationHandle::new();
    let (report, came) =
        pair::moved(&tcp, &mut Gated::new(&mut source), &mut target, None, settings, &handle);
    if let Some(postcopy) = came.expect("the guest") {
        assert_eq!((postcopy.state, postcopy.left), (MigrationState::Completed, 0), "{what}: {postcopy:?}");
        assert_eq!(postcopy.postcopy.duplicates, 0, "{what}: {postcopy:?}");
    }
    assert_eq!(report.state, MigrationState::Completed, "{what}: {:?}", report.error);
    assert_eq!((report.mismatched_pages, report.digest_mismatches_resent), (0, 0), "{what}");
    let stats = verified(&target.handle(), 7);
    assert_eq!((stats.corrupt(), stats.state), (0, State::Running), "{what}: {:?}", stats.first_corrupt());
    SourceVm::pause(&mut target).unwrap();
    let found = [allocated(&source), allocated(&target)];
    let counts = found.each_ref().map(Bitmap::count);
    print_line(format!("{what}: the source has {} pages, the target {}", counts[0], counts[1]));
    (report, found)
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

/// Pages that are decoded to a buffer first take the same way through allocated memory as others,
/// and deltas refer to the pages that the target has.
#[test]
fn encoded_pages_arrive_whenever_the_memory_is_allocated() {
    let zstd = PageCodec::Zstd(ZstdLevel::MIN);
    for mode in modes() {
        for prealloc in [Prealloc::Off, Prealloc::Auto, Prealloc::On] {
            if prealloc == Prealloc::On && skip_if_emulated("MADV_POPULATE_WRITE") {
                continue;
            }
            for (codec, memfd) in [(zstd, false), (PageCodec::Lz4, true)] {
                let (deltas, delta_cache) = (Deltas::On, Some(MEMORY));
                let settings = Settings { codec, deltas, delta_cache, ..comparing(mode) };
                let (report, [source, mut target]) = moved_with(&settings, TEXT, prealloc, memfd);
                let what = format!("{mode} {codec:?} {prealloc:?}: {report:?}");
                let codecs = report.codecs.clone().expect("encoded pages");
                // Pages that a thread of the guest waits for are not encoded.
                let least = if mode == MigrationMode::Postcopy { 1 } else { DATA / 4096 / 2 };
                assert!(codecs.zstd.pages + codecs.lz4.pages >= least, "{what}");
                if mode == MigrationMode::Precopy {
                    assert!(codecs.delta.pages > 0, "{what}");
                    assert_eq!(report.verified_pages, MEMORY / 4096, "{what}");
                }
                match prealloc {
                    Prealloc::On if mode == MigrationMode::Precopy => {
                        assert_eq!(target.count(), MEMORY / 4096, "{what}");
                    }
                    Prealloc::On => {}
                    Prealloc::Off | Prealloc::Auto => {
                        target.subtract(&source);
                        assert!(target.is_empty(), "{:?}, {what}", target.runs().collect::<Vec<_>>());
                    }
                }
            }
        }
    }
}

/// Adds the pages that the frames of a channel announce to `announced`. All announcements must come
/// in the first pass, and before the channel sends any of the pages. Returns the number of frames
/// with encoded content.
fn add_announced(bytes: &[u8], announced: &mut Bitmap) -> u32 {
    let (mut rest, mut barriers, mut encoded) = (&bytes[HELLO_BYTES..], 0, 0);
    let mut sent = Bitmap::new(announced.len());
    while let Some(header) = rest.first_chunk() {
        let header = FrameHeader::decode(header).unwrap();
        let (table, after) = rest[FRAME_HEADER_BYTES..].split_at(header.table_bytes());
        rest = after;
        if header.kind == FrameKind::Barrier {
            barriers += 1;
            continue;
        }
        let table = Table::decode(&header, table, announced.len()).unwrap();
        for entry in table.runs() {
            if header.kind == FrameKind::Touched {
                assert_eq!((entry.run.first.0 % 512, entry.run.count % 512), (0, 0), "{}", entry.run);
                assert_eq!(sent.count_range(entry.run.range()), 0, "{} was sent before", entry.run);
                assert_eq!(barriers, 0, "an announcement after the first pass");
                announced.set_range(entry.run.range());
            } else {
                sent.set_range(entry.run.range());
            }
        }
        if header.kind == FrameKind::Pages {
            encoded += u32::from(table.is_encoded());
            rest = &rest[table.content_bytes()..];
        }
    }
    encoded
}

#[test]
fn source_announces_the_blocks_of_which_the_guest_has_touched_every_page() {
    for codec in [PageCodec::Raw, PageCodec::Zstd(ZstdLevel::MIN)] {
        announces(codec);
    }
}

fn announces(codec: PageCodec) {
    let (mut source, uri) = (filled(TEXT, false), unix_uri());
    let mut target = ProcessGuest::new_incoming(options(Prealloc::Auto, false)).unwrap();
    let listener = Listener::bind(&uri, false).unwrap();
    let proxy = Proxy::recording(&uri, None);
    let (arrival, handle) = (Arrival::new(PATIENCE), MigrationHandle::new());
    let settings = Settings { channels: 2, codec, peer_timeout: PATIENCE, ..Settings::default() };
    let report = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let report = migrate(&mut source, &proxy.uri(), None, &settings, &handle).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        assert!(receiving.join().unwrap().is_ok());
        report
    });
    let touched = allocated(&source);
    let (mut announced, mut encoded, mut total) = (Bitmap::new(touched.len()), 0, 0);
    for (_, bytes) in proxy.finished().into_iter().filter(|(direction, _)| direction.to_target) {
        let hello = Hello::decode(bytes.first_chunk().unwrap()).unwrap();
        if hello.role == Role::Bulk {
            encoded += add_announced(&bytes, &mut announced);
            total += bytes.len() - HELLO_BYTES;
        }
    }
    assert_eq!(report.bytes.wire, total as u64, "announcements and barriers count");
    assert_eq!(encoded > 0, codec != PageCodec::Raw, "{encoded} frames are encoded");
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
