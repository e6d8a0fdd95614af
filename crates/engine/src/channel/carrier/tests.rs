use super::*;
use proptest::prelude::*;
use std::io::Write;

fn piece(lane: u16, kind: PieceKind) -> Vec<u8> {
    Piece { lane, kind }.encode().to_vec()
}

fn bytes(lane: u16, bytes: &[u8]) -> Vec<u8> {
    [&piece(lane, PieceKind::Bytes(bytes.len()))[..], bytes].concat()
}

/// Returns the bytes that can be read at a far end.
fn read(mut socket: &Socket) -> Vec<u8> {
    let mut got = Vec::new();
    socket.set_nonblocking(true).unwrap();
    let _ = socket.read_to_end(&mut got);
    got
}

fn refused(lanes: &mut Lanes, said: &[Vec<u8>]) -> String {
    said.iter().find_map(|bytes| lanes.take(bytes).err()).expect("a refusal").to_string()
}

#[test]
fn peer_that_violates_the_protocol_is_refused() {
    let open = piece(0, PieceKind::Open);
    // The flood is far more than the room of a lane whose far end is not read.
    let flood = std::iter::repeat_n(bytes(0, &[1; 65536]), 256);
    for (said, words) in [
        (vec![bytes(0, b"x")], "a lane = 0"),
        (vec![piece(1, PieceKind::Open)], "a new lane = 1"),
        (vec![open.clone(), piece(1, PieceKind::End)], "a lane = 1"),
        (vec![open.clone(), open.clone()], "a new lane = 0"),
        (std::iter::once(open.clone()).chain(flood).collect(), "bytes on a lane = 65536"),
        (vec![open.clone(), piece(0, PieceKind::End), bytes(0, b"x")], "bytes on a lane = 1"),
        (vec![open, piece(0, PieceKind::Room(MAX_LANE_ROOM))], "room on a lane"),
        (vec![vec![0; PIECE_HEADER_BYTES]], "damaged"),
    ] {
        let error = refused(&mut Lanes::new(false), &said);
        assert!(error.contains(words), "{words}: {error}");
    }
    let error = refused(&mut Lanes::new(true), &[piece(0, PieceKind::Open)]);
    assert!(error.contains("by the source"), "{error}");
    let many: Vec<_> = (0..=130).map(|lane| piece(lane, PieceKind::Open)).collect();
    let mut lanes = Lanes::new(false);
    let mut far = Vec::new();
    for open in &many[..MAX_LANES] {
        far.extend(lanes.take(open).unwrap());
    }
    assert!(refused(&mut lanes, &many[MAX_LANES..]).contains("130 at once"));
    // A far end that is dropped frees its place without a message of the peer.
    far.pop();
    lanes.serve();
    assert_eq!(lanes.take(&many[MAX_LANES]).unwrap().len(), 1);
}

#[test]
fn room_is_given_only_as_fast_as_a_lane_is_read() {
    let mut lanes = Lanes::new(false);
    let mut far = lanes.take(&piece(0, PieceKind::Open)).unwrap();
    let far = far.pop().unwrap();
    let (mut sent, mut room) = (0, LANE_ROOM);
    while sent < 64 << 20 {
        let count = room.min(65536);
        assert!(count > 0, "no room after {sent} bytes");
        lanes.take(&bytes(0, &vec![5; count])).unwrap();
        (sent, room) = (sent + count, room - count);
        assert!(read(&far).iter().all(|byte| *byte == 5));
        lanes.serve();
        let said = lanes.output().to_vec();
        lanes.sent(said.len());
        for header in said.chunks(PIECE_HEADER_BYTES) {
            match Piece::decode(header.try_into().unwrap()).unwrap().kind {
                PieceKind::Room(more) => room += more,
                other => panic!("{other:?}"),
            }
        }
        assert!(room <= ROOM_MOST, "{room} bytes of room");
    }
    assert!(room > ROOM_MOST / 2, "a lane that is read has only {room} bytes of room");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Connects the two sides of a connection in memory, and cuts the bytes into arbitrary parts.
    #[test]
    fn lanes_arrive_whole_however_the_connection_is_cut(
        says in prop::collection::vec((0u16..3, prop::collection::vec(any::<u8>(), 1..300)), 1..40),
        cuts in prop::collection::vec(1usize..200, 1..40),
    ) {
        let (mut source, mut target) = (Lanes::new(true), Lanes::new(false));
        let mut ends = Vec::new();
        for _ in 0..3 {
            let (near, far) = pair().unwrap();
            source.open(near).unwrap();
            ends.push(far);
        }
        let mut want = vec![Vec::<u8>::new(); 3];
        for (lane, part) in &says {
            (&ends[usize::from(*lane)]).write_all(part).unwrap();
            want[usize::from(*lane)].extend(part);
        }
        drop(ends);
        let (mut cuts, mut arrived) = (cuts.iter().cycle(), Vec::new());
        // The bound is enough for all bytes, one at a time.
        for _ in 0..100_000 {
            source.serve();
            target.serve();
            if source.output().is_empty() && target.output().is_empty() {
                break;
            }
            let out = source.output();
            let part = out[..out.len().min(*cuts.next().unwrap())].to_vec();
            source.sent(part.len());
            arrived.extend(target.take(&part).unwrap());
            let answer = target.output().to_vec();
            target.sent(answer.len());
            prop_assert!(source.take(&answer).unwrap().is_empty());
        }
        // A local socket takes few bytes if they arrive one by one. The others wait until those
        // were read.
        let mut got = vec![Vec::new(); arrived.len()];
        loop {
            let more: Vec<_> = arrived.iter().map(read).collect();
            if more.iter().all(Vec::is_empty) {
                break;
            }
            got.iter_mut().zip(more).for_each(|(got, more)| got.extend(more));
            target.serve();
        }
        prop_assert_eq!(got, want);
        prop_assert!(source.is_empty());
    }

    /// Arbitrary bytes of a peer are rejected or taken, and the buffered bytes stay bounded.
    #[test]
    fn arbitrary_bytes_of_a_peer_keep_the_output_bounded(
        says in prop::collection::vec((0u16..4, 0u8..6, any::<u16>()), 0..60),
    ) {
        let mut lanes = Lanes::new(false);
        let mut far = Vec::new();
        for (lane, kind, value) in says {
            let count = usize::from(value) + 1;
            let said = match kind {
                0 => piece(lane, PieceKind::Open),
                1 => bytes(lane, &vec![9; count]),
                2 => piece(lane, PieceKind::End),
                3 => piece(lane, PieceKind::Stop),
                4 => piece(lane, PieceKind::Room(count)),
                _ => vec![kind; count % 64],
            };
            match lanes.take(&said) {
                Ok(opened) => far.extend(opened),
                Err(_) => break,
            }
            lanes.serve();
            prop_assert!(lanes.output().len() <= OUT_MOST);
        }
    }
}
