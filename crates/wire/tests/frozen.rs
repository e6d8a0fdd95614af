//! Encoding of protocol version 1, byte by byte: messages that the recorded streams
//! (`crates/engine/tests/streams`) do not contain. A change of a line in this test is a change of
//! the wire format, which needs a new version.

use vmferry_core::{PageDigest, PageIndex, PageRun, RegionId, StreamName};
use vmferry_wire::{
    CARRIER, CONTROL_HEADER_BYTES, ControlHeader, Encoding, FrameHeader, FrameKind, HASH_BYTES, Hello,
    HelloReply, LocalRegion, MigrationId, Piece, PieceKind, Refusal, RefusalCode, RegionPage, Request, Role,
    Segment, TableWriter, ToSource, ToTarget, Token, arbiter_digest, decode_control, encode_control,
};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn hello(role: Role) -> Hello {
    let arbiter = arbiter_digest("etcd /vmferry/");
    let (migration, token) = (MigrationId([0x11; 16]), Token([0x22; 16]));
    Hello { version_min: 1, version_max: 1, features: 0, migration, role, index: 3, token, arbiter }
}

const REFUSALS: [RefusalCode; 13] = [
    RefusalCode::Other,
    RefusalCode::Version,
    RefusalCode::Feature,
    RefusalCode::Busy,
    RefusalCode::Machine,
    RefusalCode::Token,
    RefusalCode::Protocol,
    RefusalCode::State,
    RefusalCode::Memory,
    RefusalCode::Cancelled,
    RefusalCode::Timeout,
    RefusalCode::Encryption,
    RefusalCode::Fence,
];

/// Returns a frame that announces the pages 512..1024 and 2048..2560.
fn touched() -> Vec<u8> {
    let mut writer = TableWriter::default();
    for first in [512, 2048] {
        assert!(writer.push_zeros(PageRun::new(PageIndex(first), 512)));
    }
    let (header, table) = writer.finish(FrameKind::Touched, RegionId(5), 0, 9);
    assert_eq!(FrameHeader::decode(&header.encode()).as_ref(), Ok(&header));
    [&header.encode(), table].concat()
}

#[test]
fn fixed_layouts_match_the_frozen_bytes() {
    let refused = |code| HelloReply {
        refused: Some(code),
        version: 1,
        features: 0,
        migration: MigrationId([0x11; 16]),
    };
    let page = |again| Request::Page { region: RegionId(5), page: PageIndex(0x1_2345), ahead: 256, again };
    let mut found: Vec<(String, String)> =
        [Role::Control, Role::Bulk, Role::Urgent, Role::Probe, Role::Measure]
            .map(|role| (format!("hello {role:?}"), hex(&hello(role).encode())))
            .into();
    found.extend(REFUSALS.map(|code| (format!("reply {code:?}"), hex(&refused(code).encode()[8..16]))));
    found.extend([
        ("probe".into(), hex(&FrameHeader::probe(7, 9).encode())),
        ("barrier".into(), hex(&FrameHeader::barrier(3, 9).encode())),
        ("touched".into(), hex(&touched())),
        ("page".into(), hex(&page(false).encode())),
        ("page again".into(), hex(&page(true).encode())),
        ("echo".into(), hex(&Request::Echo { number: 7, held_ns: 1000 }.encode())),
    ]);
    let hashes = Segment { encoding: Encoding::Hash, pages: 2, bytes: 2 * HASH_BYTES };
    let mut writer = TableWriter::default();
    assert!(writer.push(PageIndex(5), Some(PageDigest(0x11))) && writer.push(PageIndex(7), None));
    assert!(writer.push(PageIndex(8), Some(PageDigest(0x22))));
    let (header, table) = writer.finish_segments((&[hashes], &[0, 0]), RegionId(5), 0, 9);
    found.push(("header of hashes".into(), hex(&header.encode())));
    found.push(("table of hashes".into(), hex(table)));
    let carrier = Hello { features: CARRIER, ..hello(Role::Control) };
    found.push(("hello that asks for lanes".into(), hex(&carrier.encode())));
    let kinds =
        [PieceKind::Open, PieceKind::Bytes(65536), PieceKind::End, PieceKind::Stop, PieceKind::Room(131_072)];
    let piece = |kind| (format!("piece {kind:?}"), hex(&Piece { lane: 259, kind }.encode()));
    found.extend(kinds.map(piece));
    compare(&found);
}

#[test]
fn control_messages_match_the_frozen_bytes() {
    let why = Refusal::new(RefusalCode::Cancelled, "why");
    let samples = vec![RegionPage { region: RegionId(5), page: 0x1_2345 }];
    let to_target = [
        ToTarget::Cancel(why.clone()),
        ToTarget::Ping(300),
        ToTarget::Verify { pass: 2 },
        ToTarget::Thanks,
        ToTarget::TrialEnd { sections: 300 },
        ToTarget::StaysPaused,
        ToTarget::StreamOpen {
            stream: 300,
            name: StreamName { name: "device".into(), instance: 3, version: 1 },
        },
        ToTarget::StreamBytes { stream: 300, bytes: vec![7, 8] },
        ToTarget::StreamEnd { stream: 300 },
        ToTarget::LocalMemory {
            regions: vec![LocalRegion { region: RegionId(5), len: 0x1_0000, offset: 0x1000 }],
        },
    ];
    let to_source = [
        ToSource::Failed(why.clone()),
        ToSource::Returned(why),
        ToSource::Pong(300),
        ToSource::Costs { load_us: 300 },
        ToSource::WantsTrial,
        ToSource::Prepared,
        ToSource::UnknownPages { channel: 3, frame: 300, unknown: vec![0, 0x82] },
        ToSource::MemoryTaken,
        ToSource::Verified { pages: 9, mismatched: 1, samples },
    ];
    let name = |message: String| message.split([' ', '(', '{']).next().unwrap_or_default().to_owned();
    let mut found = Vec::new();
    for message in &to_target {
        let bytes = encode_control(message).unwrap();
        found.push((name(format!("{message:?}")), hex(&bytes)));
    }
    for message in &to_source {
        let bytes = encode_control(message).unwrap();
        found.push((name(format!("{message:?}")), hex(&bytes)));
    }
    compare(&found);
}

/// An unknown code of a later version must not hide from a source that its target has renounced the
/// guest.
#[test]
fn refusal_with_an_unknown_code_decodes() {
    let mut bytes = encode_control(&ToSource::Returned(Refusal::new(RefusalCode::Fence, "why"))).unwrap();
    let code = CONTROL_HEADER_BYTES + 1;
    assert_eq!(bytes[code], RefusalCode::Fence.byte());
    bytes[code] = 77;
    let crc = |bytes: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes);
    let sum = crc(&bytes[CONTROL_HEADER_BYTES..]) ^ crc(&bytes[4..8]);
    bytes[8..CONTROL_HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
    let (header, body) = bytes.split_first_chunk().unwrap();
    let read: ToSource = decode_control(ControlHeader::decode(header).unwrap(), body).unwrap();
    assert_eq!(read, ToSource::Returned(Refusal::new(RefusalCode::Other, "why")));
}

/// Compares with the lines of `frozen.txt`, each of which has a name and bytes.
fn compare(found: &[(String, String)]) {
    let frozen = include_str!("frozen.txt");
    for (name, bytes) in found {
        let line = format!("{name}: {bytes}");
        assert!(frozen.lines().any(|frozen| frozen == line), "not as it was frozen: {line}");
    }
}
