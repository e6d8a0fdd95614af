//! Recorded bytes of migrations (`tests/streams`). The present code must read them, must write the
//! same bytes, and a target must be able to receive a guest from them. A failure means that the
//! wire format has changed, which needs a new version.
//!
//! Version 1 is frozen: its streams are never recorded again. The streams of a later version are
//! recorded in addition, by `cargo test -p vmferry-engine --test it recorded::record -- --ignored`,
//! which writes only missing files.

mod filed;
mod replay;

use crate::rig::{quick, unix_uri};
use crate::toy::{Options, Toy};
use crc_fast::{CrcAlgorithm, checksum};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use vmferry_core::PageRun;
use vmferry_engine::{
    Arrival, BulkLimit, Listener, MigrationHandle, MigrationMode, MigrationState, OnTimeout, Settings,
    migrate, receive,
};
use vmferry_testkit_peers::link::{Direction, Harm, Proxy, Rule};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, FRAME_HEADER_BYTES, FrameHeader, FrameKind, HELLO_BYTES, Hello,
    HelloReply, REQUEST_BYTES, Request, Role, RunKind, Table, TableWriter, ToSource, ToTarget,
    decode_control, encode_control,
};

/// Recorded bytes of each direction of each connection.
type Streams = BTreeMap<Direction, Vec<u8>>;

const NAMES: [&str; 4] = ["precopy", "postcopy", "recovery", "hybrid"];

fn options() -> Options {
    let write_pause = Duration::from_millis(2);
    Options {
        pages: vec![6, 2],
        used: 3,
        writers: 1,
        vcpus: 1,
        demand_paging: true,
        write_pause,
        ..Options::default()
    }
}

fn settings(name: &str) -> Settings {
    let downtime_limit = Duration::from_secs(1);
    let plain = Settings { channels: 1, urgent_channels: 1, pace: BulkLimit::Off, downtime_limit, ..quick() };
    match name {
        "precopy" => Settings { mode: MigrationMode::Precopy, ..plain },
        // Two channels of each kind, a probe, and digests to compare.
        "hybrid" => Settings {
            mode: MigrationMode::Hybrid,
            channels: 2,
            urgent_channels: 2,
            pace: BulkLimit::Auto,
            verify: true,
            downtime_limit: Duration::ZERO,
            timeout: Some(Duration::from_millis(50)),
            on_timeout: OnTimeout::Postcopy,
            ..plain
        },
        _ => Settings { mode: MigrationMode::Postcopy, ..plain },
    }
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/streams").join(format!("{name}.txt"))
}

/// Returns the text form: runs of zeros as numbers, the rest in hexadecimal.
fn write(bytes: &[u8]) -> String {
    let (mut text, mut at) = (String::new(), 0);
    while at < bytes.len() {
        let zeros = bytes[at..].iter().take_while(|byte| **byte == 0).count();
        if zeros > 4 {
            text += &format!(" z{zeros} ");
            at += zeros;
        } else {
            text += &format!("{:02x}", bytes[at]);
            at += 1;
        }
    }
    text.trim().replace("  ", " ")
}

fn read(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        match word.strip_prefix('z') {
            Some(zeros) => bytes.extend(vec![0; zeros.parse::<usize>().unwrap()]),
            None => bytes.extend(
                (0..word.len() / 2)
                    .map(|at| u8::from_str_radix(&word[2 * at..2 * at + 2], 16).expect("hexadecimal")),
            ),
        }
    }
    bytes
}

fn load(name: &str) -> Streams {
    let text = std::fs::read_to_string(file(name)).unwrap();
    let line = |line: &str| {
        let (head, bytes) = line.split_once(':').unwrap();
        let (connection, to) = head.split_once(' ').unwrap();
        (Direction { connection: connection.parse().unwrap(), to_target: to == "down" }, read(bytes))
    };
    text.lines().filter(|line| !line.starts_with('#')).map(line).collect()
}

/// Performs a migration through a proxy that records all bytes.
fn migrated(name: &str) -> Streams {
    let mut source = Toy::new(options(), true);
    let mut target = source.target();
    let uri = unix_uri();
    let listener = Listener::bind(&uri, false).unwrap();
    let bulk = Direction { connection: 1, to_target: true };
    let rule = (name == "recovery").then_some(Rule::on(bulk, 2000, Harm::CutAll));
    let proxy = Proxy::recording(&uri, rule);
    let (settings, uri) = (settings(name), proxy.uri());
    let arrival = Arrival::new(settings.peer_timeout);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let received = receive(&mut target, &listener, &arrival).unwrap();
            received.postcopy.map(|postcopy| postcopy.finish(&listener, &arrival).state)
        });
        let report = migrate(&mut source, &uri, None, &settings, &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        let postcopy = receiving.join().unwrap();
        assert!(postcopy.is_none_or(|state| state == MigrationState::Completed), "{postcopy:?}");
    });
    assert_eq!(proxy.harmed() > 0, name == "recovery");
    assert!(target.works() && target.lost().is_empty());
    proxy.finished()
}

#[test]
#[ignore = "writes what is not there of tests/streams: cargo test -p vmferry-engine --test it recorded::record -- --ignored"]
fn record() {
    std::fs::create_dir_all(file("").parent().unwrap()).unwrap();
    for name in NAMES.into_iter().filter(|name| !file(name).exists()) {
        let mut text = format!(
            "# {name}: the bytes of each connection, in the order of their arrival, to the target (down) and to the source (up).\n\
             # zN are N zeros. Recorded by crates/engine/tests/it/recorded.rs; no encryption.\n"
        );
        for (direction, bytes) in migrated(name) {
            let to = if direction.to_target { "down" } else { "up" };
            text += &format!("{} {to}: {}\n", direction.connection, write(&bytes));
        }
        assert!(text.len() < 20_000, "{name}: {} bytes", text.len());
        std::fs::write(file(name), text).unwrap();
    }
}

/// Numbers of items found in the streams, by name.
type Found = BTreeMap<String, u32>;

fn note(found: &mut Found, what: &impl std::fmt::Debug) {
    let text = format!("{what:?}");
    let name = text.split([' ', '(', '{']).next().unwrap_or_default();
    *found.entry(name.to_owned()).or_default() += 1;
}

fn hello_of(down: &[u8]) -> Hello {
    Hello::decode(down.first_chunk().expect("a hello")).unwrap()
}

/// Returns the messages of a control channel, the last of which may be incomplete.
fn messages<M>(mut bytes: &[u8]) -> Vec<(M, &[u8])>
where
    M: serde::de::DeserializeOwned,
{
    let mut messages = Vec::new();
    while let Some(header) = bytes.first_chunk() {
        let header = ControlHeader::decode(header).unwrap();
        let end = CONTROL_HEADER_BYTES + header.len;
        let Some(body) = bytes.get(CONTROL_HEADER_BYTES..end) else { break };
        messages.push((decode_control(header, body).unwrap(), &bytes[..end]));
        bytes = &bytes[end..];
    }
    messages
}

fn check_frames(mut bytes: &[u8], found: &mut Found) {
    let mut sequence = 0;
    while let Some(head) = bytes.first_chunk() {
        let header = FrameHeader::decode(head).unwrap();
        assert_eq!(&header.encode(), head);
        assert_eq!(header.sequence, sequence);
        sequence += 1;
        let contents = if header.kind == FrameKind::Pages { header.pages * 4096 } else { 0 };
        let table_end = FRAME_HEADER_BYTES + header.table_bytes();
        // End of a stream that was cut off.
        let Some(rest) = bytes.get(table_end + contents..) else { break };
        note(found, &header.kind);
        if header.table_bytes() > 0 {
            let table = &bytes[FRAME_HEADER_BYTES..table_end];
            let read = Table::decode(&header, table, 8).unwrap();
            let (mut writer, mut digests) = (TableWriter::default(), read.digests());
            for entry in read.runs() {
                let PageRun { first, .. } = entry.run;
                match entry.kind {
                    RunKind::Zero => assert!(writer.push_zeros(entry.run)),
                    RunKind::Data => (first.0..entry.run.end()).for_each(|page| {
                        assert!(writer.push(vmferry_core::PageIndex(page), digests.next()));
                    }),
                }
            }
            let (again, written) = writer.finish(header.kind, header.region, header.pass, header.sequence);
            assert_eq!((again, written), (header, table));
        }
        bytes = rest;
    }
}

fn check(streams: &Streams) -> Found {
    let mut found = Found::new();
    for (direction, bytes) in streams {
        let role = hello_of(&streams[&Direction { to_target: true, ..*direction }]).role;
        let (head, rest) = bytes.split_first_chunk::<HELLO_BYTES>().expect("a hello or its answer");
        if direction.to_target {
            assert_eq!(&Hello::decode(head).unwrap().encode(), head);
        } else {
            assert_eq!(&HelloReply::decode(head).unwrap().encode(), head);
        }
        match (role, direction.to_target) {
            (Role::Control, true) => messages::<ToTarget>(rest).iter().for_each(|(message, bytes)| {
                assert_eq!(&encode_control(message).unwrap(), bytes, "{message:?}");
                note(&mut found, message);
            }),
            (Role::Control, false) => messages::<ToSource>(rest).iter().for_each(|(message, bytes)| {
                assert_eq!(&encode_control(message).unwrap(), bytes, "{message:?}");
                note(&mut found, message);
            }),
            (_, true) => check_frames(rest, &mut found),
            (_, false) => rest.as_chunks::<REQUEST_BYTES>().0.iter().for_each(|bytes| {
                let request = Request::decode(bytes).unwrap();
                assert_eq!(&request.encode(), bytes);
                note(&mut found, &request);
            }),
        }
    }
    found
}

#[test]
fn recorded_streams_decode_and_encode_to_the_same_bytes() {
    let all = ["Setup", "Accept", "ChannelsUp", "StateEnd", "Ready", "Commit", "Running", "Barrier", "Pages"];
    for name in NAMES {
        let found = check(&load(name));
        println!("{name}: {found:?}");
        let special: &[&str] = match name {
            "precopy" => &["Pass", "Received", "Final", "Load", "Section"],
            "postcopy" => &["Lacking", "LoadLazily", "Complete", "Thanks"],
            "hybrid" => {
                &["Pass", "Received", "Verify", "Verified", "Digests", "Lacking", "Complete", "Thanks"]
            }
            _ => &["Lacking", "LoadLazily", "Resume", "Complete", "Thanks"],
        };
        all.iter().chain(special).for_each(|what| assert!(found.contains_key(*what), "{name}: no {what}"));
    }
}

/// The recorded files must not change: a stream that was recorded again would hide a change of the
/// wire format.
#[test]
fn recorded_streams_are_unchanged() {
    for (name, frozen) in [
        ("precopy", 0xb45b35d342a6ee47),
        ("postcopy", 0xfe8cb61984348566),
        ("recovery", 0xb40871c979c7918b),
        ("hybrid", 0xb1859f375e11dd3a),
        ("file", 0x41e4c440a0eac209),
    ] {
        let crc = checksum(CrcAlgorithm::Crc64Nvme, &std::fs::read(file(name)).unwrap());
        assert_eq!(crc, frozen, "{name} has another checksum: {crc:#018x}");
    }
}

#[test]
fn zeros_are_written_as_numbers_and_read_back() {
    for bytes in [vec![], vec![0; 9], vec![0, 0, 7, 0], [vec![1; 3], vec![0; 5000], vec![255]].concat()] {
        assert_eq!(read(&write(&bytes)), bytes);
    }
}
