//! Migrations to a target that has pages of the guest in files.

use crate::rig::{attempt_at, check_owner, quick, unix_uri};
use crate::toy::{Options, Toy};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vmferry_core::{PAGE_BYTES, PageDigest, PageIndex, RegionId};
use vmferry_engine::{
    Arrival, Deltas, KnownPages, KnownPagesFigures, Listener, Migratable, MigrationHandle, MigrationMode,
    MigrationState, PageCodec, ReceiveFailure, Received, Report, Settings, migrate, receive, save_copy,
};
use vmferry_testkit::{Folder, PATIENCE};
use vmferry_testkit_peers::peer::{self, Frame, Source, Target};
use vmferry_wire::{
    Encoding, FEATURE_KNOWN_PAGES, FEATURE_SEGMENTS, FrameKind, HASH_BYTES, Mode, Segment, TableWriter,
    ToSource, ToTarget,
};

/// Guest that writes a page now and then.
fn calm() -> Options {
    Options {
        pages: vec![4000, 700],
        used: 3000,
        write_pause: Duration::from_millis(20),
        demand_paging: true,
        ..Options::default()
    }
}

/// Returns a guest, and writes a snapshot of it to `path`.
fn copied(options: Options, path: &Path) -> Toy {
    let mut source = Toy::new(options, true);
    let report = save_copy(&mut source, path, &MigrationHandle::new()).unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    source
}

fn known(paths: &[&Path]) -> Arc<KnownPages> {
    let open = |path: &&Path| (path.display().to_string(), File::open(path).unwrap());
    Arc::new(KnownPages::index(paths.iter().map(open).collect()).unwrap())
}

/// Moves the guest of `source` to a target with these pages. All of the guest must arrive.
fn moved(mut source: Toy, known: Option<Arc<KnownPages>>, settings: &Settings) -> (Report, Received) {
    let mut target = source.target();
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(settings.peer_timeout).known_pages(known);
    let with = (&MigrationHandle::new(), &arrival);
    let ended = attempt_at((&mut source, &mut target), &listener, &uri, settings, with);
    check_owner(&source, &target, &ended);
    let report = ended.sent.unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    assert!(target.works(), "the guest stands still");
    assert_eq!((target.lost(), target.surprises()), (vec![], 0), "the guest misses pages");
    assert_eq!(
        (report.mismatched_pages, report.digest_mismatches_resent),
        (0, 0),
        "{:?}, {:?}",
        report.known_pages,
        report.bytes
    );
    (report, ended.received.unwrap())
}

fn verify(mode: MigrationMode) -> Settings {
    Settings { mode, verify: true, ..quick() }
}

fn figures(report: &Report) -> KnownPagesFigures {
    let figures = report.known_pages.clone().unwrap_or_default();
    assert_eq!(
        figures.known + figures.unknown,
        figures.hashes,
        "{:?}, {:?}",
        report.known_pages,
        report.bytes
    );
    assert_eq!(figures.known_bytes, figures.known * 4096);
    figures
}

#[test]
fn only_pages_that_changed_are_sent() {
    let folder = Folder::new();
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
        for channels in [1, 3] {
            let path = folder.file(&format!("{mode}-{channels}"));
            let source = copied(calm(), &path);
            let settings = Settings { channels, ..verify(mode) };
            let (report, received) = moved(source, Some(known(&[&path])), &settings);
            let figures = figures(&report);
            // On a busy host, a sender does not wait for the first answers.
            assert!(figures.hashes > 1000, "{mode}, {channels}: {figures:?}");
            assert!(figures.known * 10 > figures.hashes * 9, "{mode}, {channels}: {figures:?}");
            assert_eq!(received.known_pages, figures.known);
            assert!(
                figures.wire_bytes < figures.hashes * 50,
                "{mode}, {channels}: {figures:?}, {:?}",
                report.bytes
            );
            // The tracker of this guest finds all pages after the first pass.
            let (first, others) = (report.passes[0].wire_bytes, 3800 - figures.known);
            let most = others * 4200 + figures.hashes * 50;
            assert!(first < most, "{mode}, {channels}: {first}, {figures:?}");
            assert!(received.pages >= report.bytes.raw_pages + figures.known, "{received:?}");
        }
    }
}

#[test]
fn raw_image_serves_as_well_as_a_snapshot() {
    let folder = Folder::new();
    let (path, image) = (folder.file("snapshot"), folder.file("image"));
    let source = copied(calm(), &path);
    // The pages of a snapshot, without what makes it one.
    std::fs::copy(&path, &image).unwrap();
    OpenOptions::new().write(true).open(&image).unwrap().write_all_at(&[7; 4096], 0).unwrap();
    let (report, _) = moved(source, Some(known(&[&image])), &verify(MigrationMode::Precopy));
    let figures = figures(&report);
    assert!(figures.known * 10 > figures.hashes * 9, "{:?}, {:?}", report.known_pages, report.bytes);
}

#[test]
fn files_of_another_guest_cost_a_sample_of_hashes() {
    let folder = Folder::new();
    let path = folder.file("other");
    let wrong = File::create(&path).unwrap();
    for page in 0..100 {
        wrong.write_all_at(&[u8::try_from(page).unwrap(); 4096], page * 4096).unwrap();
    }
    // The first sample, and those after pauses of at least 256 of the 3800 pages and zeros.
    for (paths, most) in [(vec![&*path], 1024 + 6 * 256), (vec![], 0)] {
        let source = Toy::new(calm(), true);
        let settings = Settings { channels: 1, ..verify(MigrationMode::Precopy) };
        let (report, received) = moved(source, Some(known(&paths)), &settings);
        let figures = figures(&report);
        assert_eq!((figures.known, received.known_pages), (0, 0));
        let (hashes, bytes) = (figures.hashes, &report.bytes);
        assert!(hashes <= most && (hashes > 0) == (most > 0), "{hashes}, {bytes:?}");
    }
}

#[test]
fn target_without_known_pages_receives_no_hashes() {
    let (report, received) = moved(Toy::new(calm(), true), None, &verify(MigrationMode::Precopy));
    assert!(report.known_pages.is_none() && received.known_pages == 0);
}

#[test]
fn postcopy_without_precopy_sends_no_hashes() {
    let folder = Folder::new();
    let path = folder.file("snapshot");
    let source = copied(calm(), &path);
    let (report, _) = moved(source, Some(known(&[&path])), &verify(MigrationMode::Postcopy));
    assert!(report.known_pages.is_none(), "{:?}, {:?}", report.known_pages, report.bytes);
}

#[test]
fn encoded_pages_follow_hashes_of_a_guest_that_writes_a_lot() {
    let folder = Folder::new();
    let options = Options { write_pause: Duration::from_micros(100), ..calm() };
    for (codec, deltas) in
        [(PageCodec::Lz4, Deltas::Off), (PageCodec::Lz4, Deltas::On), (PageCodec::Raw, Deltas::On)]
    {
        for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
            let path = folder.file(&format!("{codec:?}-{deltas:?}-{mode}"));
            let source = copied(options.clone(), &path);
            let settings = Settings {
                codec,
                deltas,
                max_bandwidth: Some(100_000_000),
                timeout: Some(Duration::from_secs(3)),
                on_timeout: vmferry_engine::OnTimeout::Switch,
                ..verify(mode)
            };
            let timeout = settings.timeout.filter(|_| mode == MigrationMode::Precopy);
            let on_timeout = match mode {
                MigrationMode::Precopy => settings.on_timeout,
                _ => vmferry_engine::OnTimeout::Cancel,
            };
            let settings = Settings { timeout, on_timeout, ..settings };
            let (report, _) = moved(source, Some(known(&[&path])), &settings);
            assert!(figures(&report).known > 0, "{:?}, {:?}", report.known_pages, report.bytes);
        }
    }
}

#[test]
fn file_that_changes_during_the_move_causes_no_wrong_page() {
    let folder = Folder::new();
    for truncate in [true, false] {
        let path = folder.file(&format!("snapshot-{truncate}"));
        let source = copied(calm(), &path);
        let known = known(&[&path]);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        let ended = AtomicBool::new(false);
        let report = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut at, mut byte) = (len, 0u8);
                while !ended.load(Ordering::Relaxed) {
                    if truncate {
                        at -= at.min(1 << 19);
                        file.set_len(at).unwrap();
                    } else {
                        at = (at + 4096 * 37 + 5) % len;
                        byte = byte.wrapping_add(1);
                        file.write_all_at(&[byte; 9], at).unwrap();
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            let (report, _) = moved(source, Some(known), &verify(MigrationMode::Precopy));
            ended.store(true, Ordering::Relaxed);
            report
        });
        assert!(figures(&report).hashes > 0, "{:?}, {:?}", report.known_pages, report.bytes);
    }
}

/// Frame with the hash of page `page`, which is all of ones.
fn hash_frame(frame: &mut Frame, page: u64) {
    let mut writer = TableWriter::default();
    assert!(writer.push(PageIndex(page), Some(PageDigest::of(&[1; PAGE_BYTES]))));
    let segment = Segment { encoding: Encoding::Hash, pages: 1, bytes: HASH_BYTES };
    let (header, table) = writer.finish_segments((&[segment], &[0]), RegionId(0), 0, frame.header.sequence);
    (frame.header, frame.table, frame.content) = (header, table.to_vec(), vec![5; HASH_BYTES]);
}

/// Runs `act` as a source of a target with known pages, if `knows`. Returns why the target refused
/// the guest.
fn refusal(knows: bool, act: impl FnOnce(&mut Source)) -> String {
    let folder = Folder::new();
    std::fs::write(folder.file("image"), [1; PAGE_BYTES]).unwrap();
    let mut target = Toy::new(Options::default(), false);
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let known = knows.then(|| known(&[&folder.file("image")]));
    let arrival = Arrival::new(PATIENCE).known_pages(known);
    let machine = target.config();
    let failure = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let mut source = Source::new(&uri);
        let Some(ToSource::Accept { bulk, .. }) = source.offer(&machine, Mode::Precopy, 1, 0) else {
            panic!("not accepted")
        };
        source.open((1, bulk), (0, bulk));
        act(&mut source);
        while source.receive().is_some() {}
        drop(source);
        receiving.join().unwrap().unwrap_err()
    });
    assert!(!target.ran() && !target.running(), "it ran: {failure}");
    assert!(matches!(failure, ReceiveFailure::Failed(_)));
    failure.to_string()
}

#[test]
fn hostile_source_gets_no_page_from_a_wrong_hash() {
    let hashes = |source: &mut Source, page| {
        source.frame(0, 0, page, &[0; PAGE_BYTES], |frame| hash_frame(frame, page));
    };
    let why = refusal(false, |source| hashes(source, 5));
    assert!(why.contains("hashes of pages"), "{why}");
    let why = refusal(true, |source| hashes(source, 1200));
    assert!(why.contains("run of pages"), "{why}");
    // The digest is that of a known page, and the hash is not.
    let why = refusal(true, |source| {
        for frame in 0..300 {
            hashes(source, 5);
            let answer = ToSource::UnknownPages { channel: 0, frame, unknown: vec![1] };
            assert_eq!(source.receive(), Some(answer));
        }
        source.send(&ToTarget::Final { pass: 0 });
        source.send(&ToTarget::StateEnd { sections: 0 });
        source.barrier(0, 0);
        assert!(matches!(source.receive(), Some(ToSource::Received { mismatches: 1, .. })));
        source.send(&ToTarget::Load);
    });
    assert!(why.contains("no digest mismatch: false"), "{why}");
}

/// Migrates to a target that offers `features` and sends `answers` in the first pass. The guest
/// must continue on the source. Returns the reason of the failure.
fn answered(features: u64, answers: Vec<ToSource>) -> String {
    let mut source = Toy::new(Options { used: 100, ..Options::default() }, true);
    let listener = peer::Listener::unix();
    let uri = listener.uri().clone();
    let settings = Settings { channels: 1, ..quick() };
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut target = Target::accept_control_with(&listener, features);
            target.accept(1);
            assert!(matches!(target.receive(), Some(ToTarget::Pass { pass: 0, .. })));
            // The first frame has arrived, and the others wait in the socket.
            let header = target.first_header();
            assert_eq!(header.kind, FrameKind::Pages);
            answers.iter().for_each(|answer| target.send(answer));
            target.listen();
        });
        migrate(&mut source, &uri, None, &settings, &MigrationHandle::new()).unwrap()
    });
    assert_eq!(report.state, MigrationState::Failed);
    assert!(source.works());
    report.error.unwrap_or_default()
}

#[test]
fn hostile_target_cannot_ask_for_pages_that_it_was_not_told_of() {
    let offers = FEATURE_KNOWN_PAGES | FEATURE_SEGMENTS;
    let answer =
        |channel, frame, unknown: &[u8]| ToSource::UnknownPages { channel, frame, unknown: unknown.to_vec() };
    let why = answered(0, vec![answer(0, 0, &[])]);
    assert!(why.contains("which it was not sent"), "{why}");
    let why = answered(FEATURE_KNOWN_PAGES, vec![answer(0, 0, &[])]);
    assert!(why.contains("which it was not sent"), "hashes are in segments: {why}");
    let why = answered(offers, vec![answer(1, 0, &[])]);
    assert!(why.contains("bulk channel 1, which does not exist"), "{why}");
    let why = answered(offers, vec![answer(0, 1, &[])]);
    assert!(why.contains("frame 1, which is not the next one"), "{why}");
    let why = answered(offers, vec![answer(0, 0, &[]), answer(0, 0, &[])]);
    assert!(why.contains("frame 0, which is not the next one"), "{why}");
    // The first frame has 100 pages.
    let why = answered(offers, vec![answer(0, 0, &[255; 13])]);
    assert!(why.contains("pages of frame 0 that are not in it"), "{why}");
}
