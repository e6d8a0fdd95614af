//! Links that are cut at every boundary and between boundaries, and links that change bytes.

use crate::rig::{Ended, attempt, check_owner, quick, unix_uri};
use crate::toy::{Options, Toy, Tracking};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vmferry_engine::{Listener, MigrationHandle, MigrationState, Settings};
use vmferry_testkit::{Need, PATIENCE, alone, emulator, in_parallel, skip, tries, wait, wait_for};
use vmferry_testkit_peers::link::{Connection, Direction, Harm, Proxy, Rule, holds_commit};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, FRAME_HEADER_BYTES, FrameHeader, FrameKind, HELLO_BYTES,
};

/// Options for a small guest, so that its whole migration has few messages.
fn small() -> Options {
    Options {
        pages: vec![520, 40],
        used: 24,
        write_pause: Duration::from_millis(2),
        tracking: Tracking::ByHand,
        ..Options::default()
    }
}

fn settings() -> Settings {
    Settings { verify: true, ..quick() }
}

/// Settings for faults after which source or target waits until the peer timeout for bytes that
/// never arrive. The test waits as well.
fn impatient(peer_timeout: u64) -> Settings {
    Settings { peer_timeout: Duration::from_secs(peer_timeout), ..settings() }
}

/// Result of a migration through a proxy.
struct Passage {
    ended: Ended,
    source: Toy,
    target: Toy,
    /// All bytes, for each direction.
    seen: BTreeMap<Direction, Vec<u8>>,
    harmed: bool,
}

/// Performs a migration of a small guest through a proxy that makes one fault.
fn through(rule: Option<Rule>) -> Passage {
    let mut source = Toy::new(small(), true);
    let mut target = source.target();
    let uri = unix_uri();
    let listener = Listener::bind(&uri, false).unwrap();
    let proxy = Proxy::recording(&uri, rule);
    let settings = match rule.map(|rule| (rule.harm, rule.connection, rule.after)) {
        // On a busy host, a short timeout could expire before the fault, which would be another
        // fault.
        Some((Harm::Flip, Connection::Number(0), _) | (Harm::Flip, _, ..HELLO_BYTES)) => impatient(5),
        // A changed byte in a frame is found by its checksum, and a link that is cut at the commit
        // ends on source and target.
        Some((harm, ..)) if harm != Harm::Flip && !harm.at_commit() => impatient(2),
        _ => settings(),
    };
    let ended =
        attempt(&mut source, &mut target, &listener, &proxy.uri(), &settings, &MigrationHandle::new());
    let harmed = proxy.harmed() > 0;
    // The bytes of each direction are complete once its pump has ended.
    let seen = proxy.finished();
    Passage { ended, source, target, seen, harmed }
}

/// Offsets of bytes, each from the start of its direction.
type Places = Vec<(Direction, usize)>;

/// Returns the boundaries of messages and of parts of frames in each direction of a whole
/// migration, and the length of each direction.
fn boundaries() -> (Places, Places) {
    let mut source = Toy::new(small(), true);
    let mut target = source.target();
    let uri = unix_uri();
    let listener = Listener::bind(&uri, false).unwrap();
    let proxy = Proxy::recording(&uri, None);
    let ended =
        attempt(&mut source, &mut target, &listener, &proxy.uri(), &settings(), &MigrationHandle::new());
    assert_eq!(ended.state(), Some(MigrationState::Completed), "{}", ended.error());
    // All pumps have ended once the sockets are closed. The proxy then reports them.
    let seen = wait_for("the ends of six ways", || {
        let seen = proxy.seen();
        if seen.len() == 6 { Ok(seen) } else { Err(seen.len()) }
    });
    let (mut cuts, mut lengths) = (Vec::new(), Vec::new());
    for (direction, bytes) in seen {
        let mut at = 0;
        let mut ends = vec![0, HELLO_BYTES];
        while *ends.last().unwrap() < bytes.len() {
            at = *ends.last().unwrap();
            let rest = &bytes[at..];
            if direction.connection == 0 {
                let header = ControlHeader::decode(rest.first_chunk().unwrap()).unwrap();
                ends.extend([at + CONTROL_HEADER_BYTES, at + CONTROL_HEADER_BYTES + header.len]);
            } else {
                let header = FrameHeader::decode(rest.first_chunk().unwrap()).unwrap();
                let table = at + FRAME_HEADER_BYTES + header.table_bytes();
                let data = if header.kind == FrameKind::Pages { header.pages * 4096 } else { 0 };
                ends.extend([at + FRAME_HEADER_BYTES, table, table + data]);
            }
        }
        assert!(at < bytes.len());
        assert_eq!(ends.last(), Some(&bytes.len()), "{direction:?} does not end with a message");
        ends.dedup();
        cuts.extend(ends.into_iter().map(|end| (direction, end)));
        lengths.push((direction, bytes.len()));
    }
    (cuts, lengths)
}

/// Returns true if a complete commit is among the bytes that reached the target.
fn commit_arrived(seen: &BTreeMap<Direction, Vec<u8>>) -> bool {
    seen.get(&Direction { connection: 0, to_target: true }).is_some_and(|bytes| holds_commit(bytes))
}

fn cut(rule: Rule) -> MigrationState {
    let Passage { ended, source, target, seen, .. } = through(Some(rule));
    check_owner(&source, &target, &ended);
    if target.ran() {
        assert!(commit_arrived(&seen), "{rule:?}: it runs on the target, which read no commit");
    }
    match ended.state() {
        Some(MigrationState::Failed) | None => {
            assert!(source.works(), "{rule:?}");
            assert_eq!(source.lost(), [], "{rule:?}");
            MigrationState::Failed
        }
        Some(state) => {
            assert!(target.ran() || state == MigrationState::Unknown, "{rule:?}: {}", ended.error());
            state
        }
    }
}

/// Number of parallel migrations, which mostly wait for timeouts.
const THREADS: usize = 24;

#[test]
fn link_cut_at_any_boundary_or_byte_leaves_one_guest() {
    let began = Instant::now();
    let (cuts, lengths) = boundaries();
    let mut rules: Vec<Rule> = Vec::new();
    for (direction, after) in cuts {
        rules.push(Rule::on(direction, after, Harm::CutOne));
        rules.push(Rule::on(direction, after, Harm::CutAll));
    }
    let each = rules.len() / tries(rules.len());
    let mut rules: Vec<Rule> = rules.into_iter().step_by(each).collect();
    let at_boundaries = rules.len();
    let mut random = 0x1234_5678_9abc_def1_u64;
    for _ in 0..tries(100) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let choice = usize::try_from(random >> 33).unwrap();
        let (direction, length) = lengths[choice % lengths.len()];
        let harm = if choice & 64 == 0 { Harm::CutOne } else { Harm::CutAll };
        rules.push(Rule::on(direction, choice / 128 % length, harm));
    }
    let all = rules.len();
    let ends = Mutex::new(Vec::new());
    in_parallel(THREADS, rules, |rule| {
        let end = cut(rule);
        ends.lock().unwrap().push(end);
    });
    let ends = ends.into_inner().unwrap();
    let count = |state| ends.iter().filter(|end| **end == state).count();
    let (failed, completed, unknown) =
        (count(MigrationState::Failed), count(MigrationState::Completed), count(MigrationState::Unknown));
    println!(
        "cuts: {at_boundaries} at boundaries and {} anywhere in {:.1} s: the guest stayed {failed} times, moved \
         {completed} times, unknown {unknown} times",
        all - at_boundaries,
        began.elapsed().as_secs_f64()
    );
    assert_eq!(ends.len(), all);
    assert!(failed > all / 2, "{failed} {completed} {unknown}");
}

/// Two cases that a source cannot distinguish, and must not guess about.
#[test]
fn link_cut_at_the_commit_leaves_the_owner_unknown() {
    let direction = Direction { connection: 0, to_target: true };
    for (harm, moved) in [(Harm::CutBehindCommit, true), (Harm::CutAtCommit, false)] {
        let Passage { ended, source, target, harmed, .. } = through(Some(Rule::on(direction, 0, harm)));
        assert!(harmed);
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Unknown), "{}", ended.error());
        assert!(target.running() == moved && !source.running(), "{harm:?}");
    }
}

/// A changed byte in the description of pages, or in a message, ends the migration without losing
/// the guest.
#[test]
fn damage_outside_of_pages_is_noticed_by_source_and_target() {
    let control = |to_target| Direction { connection: 0, to_target };
    let bulk = Direction { connection: 1, to_target: true };
    let cases = [
        (control(true), 3),
        (control(true), 40),
        (control(true), HELLO_BYTES + 1),
        (control(true), HELLO_BYTES + 6),
        (control(true), HELLO_BYTES + CONTROL_HEADER_BYTES + 2),
        (control(false), 5),
        (control(false), 30),
        (control(false), HELLO_BYTES + 9),
        (control(false), HELLO_BYTES + CONTROL_HEADER_BYTES),
        (bulk, 44),
        (bulk, HELLO_BYTES + 2),
        (bulk, HELLO_BYTES + 8),
        (bulk, HELLO_BYTES + 60),
        (bulk, HELLO_BYTES + FRAME_HEADER_BYTES + 4),
    ];
    in_parallel(THREADS, cases, |(direction, after)| {
        let rule = Rule::on(direction, after, Harm::Flip);
        let Passage { ended, source, target, harmed, .. } = through(Some(rule));
        assert!(harmed, "{rule:?}: {}; {:?}", ended.error(), ended.received);
        check_owner(&source, &target, &ended);
        assert_ne!(ended.state(), Some(MigrationState::Completed), "{rule:?}");
        assert!(source.works() && !target.ran(), "{rule:?}");
        if direction == bulk && after >= HELLO_BYTES {
            let (here, there) = (ended.error(), ended.received.unwrap_err().to_string());
            for error in [&here, &there] {
                assert!(error.contains("damaged") || error.contains("magic"), "{rule:?}: {error}");
            }
        }
    });
}

/// A changed byte in a page has the page sent again, and no other effect.
#[test]
fn damaged_pages_are_sent_again() {
    // Offsets behind the hello, the header of the first frame, its table of less than 300 bytes and
    // page 0, which saving writes anyway.
    for after in [HELLO_BYTES + 5500, HELLO_BYTES + 9000, HELLO_BYTES + 20_000] {
        // A guest that never writes, so that only the changed byte makes the page arrive again.
        let mut source = Toy::new(Options { writers: 0, ..small() }, true);
        let mut target = source.target();
        let uri = unix_uri();
        let listener = Listener::bind(&uri, false).unwrap();
        let direction = Direction { connection: 1, to_target: true };
        let proxy = Proxy::new(&uri, Some(Rule::on(direction, after, Harm::Flip)));
        let settings = Settings { verify: true, ..quick() };
        let ended =
            attempt(&mut source, &mut target, &listener, &proxy.uri(), &settings, &MigrationHandle::new());
        check_owner(&source, &target, &ended);
        assert!(proxy.harmed() > 0);
        let report = ended.sent.unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        assert_eq!(report.digest_mismatches_resent, 1, "{report:?}");
        assert_eq!(target.lost(), []);
    }
}

/// A target that accepts the first connection and does not answer on the next one.
#[test]
fn cancel_ends_the_wait_of_any_channel() {
    for connection in [0, 1, 2] {
        let mut source = Toy::new(small(), true);
        let mut target = source.target();
        let uri = unix_uri();
        let listener = Listener::bind(&uri, false).unwrap();
        let direction = Direction { connection, to_target: false };
        let proxy = Proxy::new(&uri, Some(Rule::on(direction, 0, Harm::Hold)));
        let (handle, began) = (MigrationHandle::new(), Instant::now());
        // Without the cancel the source would wait longer than this test.
        let patient = Settings { peer_timeout: PATIENCE * 2, ..settings() };
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait("a channel that is held", || proxy.harmed() > 0);
                handle.cancel();
            });
            attempt(&mut source, &mut target, &listener, &proxy.uri(), &patient, &handle)
        });
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Cancelled), "{}", ended.error());
        assert!(source.works());
    }
}

fn descriptors_and_threads() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Runs in a process of its own, in which no other test opens anything.
#[test]
fn no_threads_and_descriptors_remain() {
    if let Some(emulator) = emulator() {
        return skip(Need::Kernel, format!("{emulator} starts no second program of its architecture"));
    }
    if !alone("links::no_threads_and_descriptors_remain") {
        return;
    }
    let once = |after: usize, harm, to_target, connection| {
        drop(through(Some(Rule::on(Direction { connection, to_target }, after, harm))));
    };
    once(500, Harm::CutAll, true, 1);
    let before = descriptors_and_threads();
    in_parallel(THREADS, 0..10, |round| {
        once(10 + round * 40, Harm::CutAll, round % 2 == 0, 0);
        once(50 + round * 4000, Harm::CutOne, true, 1);
        once(usize::MAX, Harm::CutAll, true, 1);
    });
    // Threads that only handled a hello end by themselves.
    wait_for("as many descriptors and threads as before 30 migrations", || {
        let after = descriptors_and_threads();
        // A thread that was about to end may have been counted before.
        if after.0 <= before.0 && after.1 <= before.1 { Ok(()) } else { Err((before, after)) }
    });
}
